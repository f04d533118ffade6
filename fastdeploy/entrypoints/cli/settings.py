"""Where the settings of a command come from: a YAML file, then the environment, then flags, each stronger than the one
before. Flags of PaddlePaddle/FastDeploy are taken at the place at which they stand."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from fastdeploy.core.errors import InvalidField
from fastdeploy.entrypoints.cli.fastdeploy_flags import FLAGS, REFUSED_VALUES, VALUES
from fastdeploy.entrypoints.cli.foreign import Foreign, Form, Verdict

PREFIX, CONFIG = "FASTDEPLOY_", "FASTDEPLOY_CONFIG"
DEFAULT = "default"
# Not settings, though a flag has the name: these variables hold the keys themselves, and are read with the keys.
OTHER_MEANING = ("FASTDEPLOY_API_KEY", "FASTDEPLOY_CONTROL_KEY")
SECRET = ("api_key", "control_key", "fleet_key_file")
NOT_SETTINGS = ("help", "config", "folder", "json", "input_file", "output_file", "output_tmp_dir")
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
FOREIGN = {row.name: row for row in FLAGS if row.form is not Form.OURS}


class Setting(NamedTuple):
    """One setting of a command. source: "default", a flag, a variable of the environment, or the path of a file. value:
    of a key, the number of keys only."""

    name: str
    value: Any
    source: str


class Layer(NamedTuple):
    """What one place says. ours: settings of ours. foreign: texts of FastDeploy's flags. source: how an error and a
    report name the place of each."""

    ours: dict[str, Any]
    foreign: dict[str, str]
    sources: dict[str, str]


class SettingsParser(argparse.ArgumentParser):
    """A parser whose flags may stand in a file and in the environment too, once :meth:`take_settings` was called. The
    namespace has ``sources``: from the name of each setting to its source; ``without_effect``: the flags of FastDeploy
    that were given and change nothing; and ``argv``: the words of the command line."""

    _settings: Mapping[str, argparse.Action] | None = None

    def take_settings(self) -> None:
        """Add ``--config``, and FastDeploy's flags that are not ours. To be called after all flags were added."""
        text = "YAML file of settings, by the names of flags; environment and flags are stronger"
        self.add_argument("--config", metavar="FILE", help=text)
        self._settings = {a.dest: a for a in self._actions if a.option_strings and a.dest not in NOT_SETTINGS}
        for row in FOREIGN.values():
            _add_foreign(self, row)
        self.epilog = "The other flags of PaddlePaddle/FastDeploy are taken too: see docs/fastdeploy.md."

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse. Exits with status 2 and one line for a bad file, variable or flag."""
        if self._settings is None:
            return super().parse_known_args(args, namespace)
        unset = argparse.Namespace(**{action.dest: _UNSET for action in self._actions})
        given, rest = super().parse_known_args([_with_dashes(arg) for arg in args], unset)
        found = {name: value for name, value in vars(given).items() if value is not _UNSET}
        namespace = argparse.Namespace() if namespace is None else namespace
        namespace.argv = list(args)
        namespace.__dict__.update({name: found.pop(name) for name in self._defaults if name in found})
        try:
            self._merge(found, namespace)
        except _BadSetting as error:
            self.error(str(error))
        return namespace, rest

    def change(self, namespace: argparse.Namespace, given: Mapping[str, str]) -> None:
        """Put settings, as text, in the place of those that were parsed. Raises InvalidField for a bad one."""
        settings = self._settings or {}
        for name, text in given.items():
            if name not in settings:
                raise InvalidField(name, f"unknown setting{_similar(name, settings)}")
            try:
                setattr(namespace, name, _read(settings[name], text, name))
            except _BadSetting as error:
                raise InvalidField(name, str(error).removeprefix(f"{name}: ")) from None

    def _merge(self, given: dict[str, Any], namespace: argparse.Namespace) -> None:
        settings = self._settings or {}
        values = {action.dest: action.default for action in self._actions if action.dest not in ("help", "config")}
        values = {name: value for name, value in values.items() if not name.startswith("fastdeploy:")}
        sources, ranks, without_effect = dict.fromkeys(settings, DEFAULT), dict.fromkeys(values, -1), []
        path = given.pop("config", None) or os.environ.get(CONFIG)
        layers = [] if path is None else [_of_file(path, settings)]
        layers += [_of_environment(os.environ, settings), _of_flags(given, settings)]
        for rank, layer in enumerate(layers):
            values.update(layer.ours)
            sources.update({name: layer.sources[name] for name in layer.ours})
            ranks.update(dict.fromkeys(layer.ours, rank))
        values.update({name: value for name, value in given.items() if name in NOT_SETTINGS})
        if values["folder"] is not None and ranks["model"] != len(layers) - 1:
            values["model"] = None  # the word on the command line is stronger
        for rank, layer in enumerate(layers):
            for name, text in layer.foreign.items():
                row, source = FOREIGN[name], layer.sources[f"fastdeploy:{name}"]
                if row.verdict is Verdict.NO_EFFECT:
                    without_effect.append(row.flag)
                try:
                    meaning = row.meaning(text, values)
                except ValueError as error:
                    raise _BadSetting(f"{_place(source)}: {error}") from None
                for target, value in meaning.items():
                    if rank > ranks[target]:
                        values[target], sources[target], ranks[target] = value, source, rank
        namespace.__dict__.update(values, sources=sources, without_effect=without_effect)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return each setting of a command that has settings, in the order of the flags, with where it came from."""
    values = {name: getattr(args, name) for name in args.sources}
    if args.folder is not None:
        values["model"], args.sources["model"] = args.folder, "MODEL"
    for name in SECRET:
        if values.get(name) is not None:
            values[name] = "given"
    return [Setting(name, value, args.sources[name]) for name, value in values.items()]


def named_source(args: argparse.Namespace, field: str) -> str:
    """Return how an error names the place of a setting: a flag if nothing else gave it. field: may be a variable."""
    if field.isupper():
        return field
    source: str = getattr(args, "sources", {}).get(field, DEFAULT)
    if source == DEFAULT or source.startswith("--"):
        return f"argument {source if source.startswith('--') else '--' + field.replace('_', '-')}"
    return source


class _Unset:
    """The value of what was not given. Flags that can be repeated start from it as from nothing."""

    def __copy__(self) -> list[Any]:
        return []


_UNSET = _Unset()


class _BadSetting(Exception):
    """What is wrong, with the place."""


def _add_foreign(parser: argparse.ArgumentParser, row: Foreign) -> None:
    names = (row.flag, *row.short)
    options: dict[str, Any] = {"dest": row.dest, "help": argparse.SUPPRESS}
    if row.form is Form.SWITCH:
        parser.add_argument(*names, action="store_const", const="true", **options)
    elif row.form is Form.TOGGLE:
        parser.add_argument(*names, action="store_const", const="true", **options)
        parser.add_argument("--no-" + row.flag[2:], action="store_const", const="false", **options)
    else:
        parser.add_argument(*names, nargs="+" if row.form is Form.MANY else None, metavar="VALUE", **options)


def _with_dashes(arg: str) -> str:
    """Return a flag with dashes, as FastDeploy takes ``--max_model_len`` too."""
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else arg


def _place(source: str) -> str:
    return f"argument {source}" if source.startswith("--") else source


def _of_flags(given: Mapping[str, Any], settings: Mapping[str, argparse.Action]) -> Layer:
    """Return what the flags say. given: only those that stand on the command line."""
    ours = {name: value for name, value in given.items() if name in settings}
    foreign = {row.name: given[row.dest] for row in FOREIGN.values() if row.dest in given}
    texts = {name: "\n".join(value) if isinstance(value, list) else value for name, value in foreign.items()}
    sources = {name: settings[name].option_strings[0] for name in ours}
    return Layer(ours, texts, sources | {f"fastdeploy:{name}": FOREIGN[name].flag for name in foreign})


def _of_file(path: str, settings: Mapping[str, argparse.Action]) -> Layer:
    """Return what a YAML file says. An entry without a value counts as absent."""
    import yaml

    try:
        content = Path(path).read_bytes()
        _refuse_twice(path, yaml.compose(content, yaml.SafeLoader))
        entries = yaml.safe_load(content)
    except OSError as error:
        raise _BadSetting(f"argument --config: expected a YAML file, got {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        at = getattr(error, "problem_mark", None)
        where = f", line {at.line + 1}" if at is not None else ""
        raise _BadSetting(f"{path}{where}: expected YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(entries, dict | None):
        raise _BadSetting(f"{path}: expected settings with names, got {type(entries).__name__}")
    layer = Layer({}, {}, {})
    for key, value in (entries or {}).items():
        name = str(key).replace("-", "_")
        if name not in settings and name not in FOREIGN:
            raise _BadSetting(f"{path}: unknown setting {str(key)!r}{_similar(name, [*settings, *FOREIGN])}")
        if value is not None:
            _put(layer, name, value, f"{path}: {key}", settings)
    return layer


def _refuse_twice(path: str, node: Any) -> None:
    """Refuse a setting that stands twice in a file, of which YAML takes the last one."""
    names: set[str] = set()
    for key, _ in node.value if node is not None and node.id == "mapping" else ():
        name = str(key.value).replace("-", "_")
        if name in names:
            raise _BadSetting(f"{path}, line {key.start_mark.line + 1}: {name} stands there twice")
        names.add(name)


def _of_environment(environment: Mapping[str, str], settings: Mapping[str, argparse.Action]) -> Layer:
    """Return what variables say. One that is empty counts as absent."""
    layer = Layer({}, {}, {})
    for name in settings:
        variable = PREFIX + name.upper()
        text = environment.get(variable, "")
        # Kubernetes gives the pods of a service "fastdeploy" the variable of --port, with the URL of the service.
        if text and variable not in OTHER_MEANING and not re.match(r"(tcp|udp|sctp)://", text):
            _put(layer, name, text, variable, settings)
    return layer


def _put(layer: Layer, name: str, value: Any, place: str, settings: Mapping[str, argparse.Action]) -> None:
    """Add one value of a file or of the environment to its layer."""
    if name in settings:
        layer.ours[name], layer.sources[name] = _read(settings[name], value, place), place
        return
    if (text := _foreign_text(FOREIGN[name], value)) is not None:
        layer.foreign[name], layer.sources[f"fastdeploy:{name}"] = text, place


def _foreign_text(row: Foreign, value: Any) -> str | None:
    """Return a value of a file as it would stand on the command line; None for a switch that is off."""
    if row.form is Form.SWITCH and value in (False, "false"):
        return None
    if row.form is Form.MANY and isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _read(action: argparse.Action, value: Any, place: str) -> Any:
    """Return the value of a setting, as the parser would read it."""

    def bad(expected: str) -> NoReturn:
        raise _BadSetting(f"{place}: expected {expected}, got {'a value' if action.dest in SECRET else repr(value)}")

    if action.nargs == 0:  # a switch
        if isinstance(value, str) and value.lower() in (*TRUE, *FALSE):
            return value.lower() in TRUE
        return value if isinstance(value, bool) else bad("true or false")
    takes_text = action.type is None and action.choices is None
    if takes_text and any(isinstance(one, int | float) for one in (value if isinstance(value, list) else [value])):
        bad("text in quotes")  # 0123 is 83 in YAML, and 1.10 is 1.1
    if isinstance(action, argparse._AppendAction):
        parts = value if isinstance(value, list) else str(value).split(",")
        return [str(part) for part in parts]
    if isinstance(value, list) and isinstance(action.default, tuple):
        value = ",".join(map(str, value))
    if isinstance(value, bool) and {"on", "off"} <= set(action.choices or ()):
        value = "on" if value else "off"  # what YAML makes of the words
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        bad("one value" if isinstance(value, list | dict) else _kind(action))
    text = str(value)
    try:
        result = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise _BadSetting(f"{place}: {error}") from None
    except ValueError:
        bad(_kind(action))
    if action.choices is not None and result not in action.choices:
        bad(f"one of {', '.join(map(str, action.choices))}")
    return result


def _kind(action: argparse.Action) -> str:
    kinds: dict[Any, str] = {int: "a whole number", float: "a number"}
    return kinds.get(action.type, "text")


def _similar(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def fastdeploy_value(setting: str, text: str) -> str:
    """Return the value of one of our flags for a value of FastDeploy's. Raises argparse.ArgumentTypeError for one that
    is refused, with what to use."""
    method = text
    if setting == "quantization" and text.lstrip().startswith("{"):
        try:
            method = str(json.loads(text).get("quantization"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected JSON or a name, got {text!r}") from None
    if (why := REFUSED_VALUES[setting].get(method) if setting in REFUSED_VALUES else None) is not None:
        raise argparse.ArgumentTypeError(f"{method} is refused here: {why}")
    return VALUES[setting].get(method, method)


def misspelt_variables(
    environment: Mapping[str, str], settings: Sequence[str], others: Sequence[str]
) -> list[tuple[str, str]]:
    """Return each variable that is no setting but nearly has the name of one, with this name."""
    known = [PREFIX + name.upper() for name in settings] + list(others)
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    near = [(name, difflib.get_close_matches(name, known, 1, cutoff=0.9)) for name in unknown]
    return [(name, matches[0]) for name, matches in near if matches]
