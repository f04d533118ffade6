"""The flags of an engine and its API servers, which ``serve``, ``fleet`` and ``check`` share, and their configs."""

from __future__ import annotations

import argparse
import functools
import logging
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from fastdeploy.core.config import EngineConfig, Flag, ServeConfig, flags_of, is_loopback
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import setup_logging
from fastdeploy.entrypoints.cli.fastdeploy_flags import VALUES
from fastdeploy.entrypoints.cli.fastdeploy_variables import take_variables
from fastdeploy.entrypoints.cli.settings import PREFIX, SettingsParser, fastdeploy_value, misspelt_variables
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY, Keys, is_exposed, read_keys
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, pop_fleet_key
from fastdeploy.testing.models import find_model

# Variables of the environment that are ours and no settings.
OTHERS = "CONFIG", "LOG_NAME", "LOG_LEVEL", "IPC_ROOT", "CPU_THREADS", "CPU_ISA", "CHECK_INTEGRITY"
NO_SETTINGS = (API_KEY, CONTROL_KEY, FLEET_KEY, *(PREFIX + name for name in OTHERS))
FAULTS_ON = "on"
USAGE = "%(prog)s [MODEL] [--FLAG VALUE ...]"
MAX_KEY_BYTES = 4096
logger = logging.getLogger(__name__)


def add_serve_flags(parser: SettingsParser, but: Sequence[str] = ()) -> None:
    """Add the flags of the configs, and those that are more than one setting. ``take_settings`` of the parser comes
    after all flags."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="as --model")
    add = parser.add_argument
    text = "folder of Hugging Face or Paddle, or qwen3, llama, ernie or moe: tiny models for tests (default: qwen3)"
    add("--model", metavar="PATH", help=text)
    add("--served-model-name", metavar="NAME", help="the model's name in requests and replies (the folder's name)")
    text = "folder that weights may be updated from; repeatable (any path when bound to loopback, none otherwise)"
    add("--model-root", action="append", metavar="PATH", help=text)
    text = f"opens data routes: a file of keys, one on each line, or one key; repeatable (or {API_KEY}, the keys)"
    add("--api-key", action="append", metavar="FILE", help=text)
    text = f"file of keys, one on each line, that open every route (or {CONTROL_KEY}, the keys)"
    add("--control-key", metavar="FILE", help=text)
    text = f"file of the secret that gateway and engines of other hosts share (or {FLEET_KEY}, the secret itself)"
    add("--fleet-key-file", metavar="FILE", help=text)
    text = "let requests break this server, to test clients and trainers; FILE: a scenario (docs/faults.md) (off)"
    add("--faults", nargs="?", const=FAULTS_ON, default="", metavar="FILE", help=text)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field, flag in [*flags_of(ServeConfig), *flags_of(EngineConfig)]:
        if flag.heading not in groups:
            groups[flag.heading] = parser.add_argument_group(flag.heading)
        if field.name not in but:
            _add_flag(groups[flag.heading], field, flag)


def _add_flag(group: argparse._ArgumentGroup, field: msgspec.structs.FieldInfo, flag: Flag) -> None:
    """Add the flag of one setting. Its text ends with the default, unless this is nothing."""
    name, default, kind = "--" + field.name.replace("_", "-"), field.default, field.type.__origin__
    if kind is bool:
        action = argparse.BooleanOptionalAction if default else "store_true"
        group.add_argument(name, action=action, default=default, help=flag.text)
        return
    shown = f" ({default:g})" if kind is float else f" ({default})" if default not in (None, "", ()) else ""
    reader = _comma_list if isinstance(default, tuple) else (get_args(kind) or (kind,))[0]
    if field.name in VALUES:
        reader = functools.partial(fastdeploy_value, field.name)
    group.add_argument(name, type=reader, default=default, choices=flag.choices or None, help=flag.text + shown)


def _comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def configs(args: argparse.Namespace) -> tuple[EngineConfig, ServeConfig]:
    """Return the checked configs of an engine and its API servers. Raises InvalidField, which names a setting."""
    if args.folder and args.model:
        raise InvalidField("model", "expected the model once: as MODEL or as --model")
    if "" in (args.folder, args.model):  # a variable of a script that is not set must not serve the embedded model
        raise InvalidField("model", "expected a folder, got an empty text")
    model, own_name = find_model(args.folder or args.model)
    name = args.served_model_name or own_name
    any_path = ["/"] if is_loopback(args.host) else []
    roots = any_path if args.model_root is None else args.model_root
    if args.pull_root:
        args.pull_root = os.path.abspath(args.pull_root)
        roots = [*roots, args.pull_root]  # pulled weights must be allowed as a source
    if args.faults not in ("", FAULTS_ON):
        args.faults = os.path.abspath(args.faults)
    if args.trace:
        args.trace = os.path.abspath(args.trace)
    if args.session_dir:
        args.session_dir = os.path.abspath(args.session_dir)
    if args.adapter_root:
        args.adapter_root = os.path.abspath(args.adapter_root)
    args.chat_template = read_template(args.chat_template)
    model_roots = tuple(os.path.abspath(root) for root in roots)
    given = vars(args) | {"model": str(model), "served_model_name": name, "model_roots": model_roots}

    def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {field: given[field] for field in kind.__struct_fields__ if field in given}

    return EngineConfig(**fields_of(EngineConfig)).check(), ServeConfig(**fields_of(ServeConfig)).check()


def read_template(given: str | None) -> str:
    """Return a chat template that is given as its text or as a file of it; "" without one. Raises InvalidField for a
    file that cannot be read."""
    if not given or "{" in given:
        return given or ""
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8"
        raise InvalidField("chat_template", f"expected Jinja or a file of it, got {given!r}: {why}") from None


class Start(NamedTuple):
    """The settings and secrets of the parent process of a server or of a fleet. fleet_key: None without one."""

    engine: EngineConfig
    serve: ServeConfig
    keys: Keys
    fleet_key: str | None


def read_start(args: argparse.Namespace) -> Start:
    """Return what the flags and the environment say, checked, and take secrets out of the environment. Raises
    InvalidField, which names a setting."""
    args.without_effect += take_variables(os.environ)
    engine, serve = configs(args)
    keys = read_keys(args.api_key, args.control_key, os.environ)
    check_faults(serve, keys, is_fleet=hasattr(args, "replicas"))
    put_fleet_key(args.fleet_key_file, os.environ)
    return Start(engine, serve, keys, pop_fleet_key(os.environ))


def check_faults(config: ServeConfig, keys: Keys, is_fleet: bool) -> None:
    """Raise InvalidField for --faults on a server that others may depend on: one with keys that other machines reach.
    Raise it for a schedule file that cannot be read, too."""
    if not config.faults:
        return
    if not is_loopback(config.host) and (keys.data or keys.control):
        why = f"refused with keys on {config.host}, which other machines reach: a server that is shared must not fail"
        raise InvalidField("faults", f"{why}. Take a loopback --host, or no keys")
    if config.faults != FAULTS_ON:
        from fastdeploy.faults.rules import read_file

        read_file(config.faults, is_fleet)


def announce(args: argparse.Namespace, name: str, start: Start) -> None:
    """Begin the log of the process ``name`` with the warnings about its settings."""
    setup_logging(name)
    warn_if_exposed(start.serve, start.keys)
    log_without_effect(args)


def put_fleet_key(path: str | None, environment: MutableMapping[str, str]) -> None:
    """Put the secret in the file ``path`` into ``environment``, where the processes that need it look. Raises
    InvalidField, which does not show the content."""
    if path is None:
        return
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "no text"
        raise InvalidField("fleet_key_file", f"expected the path of a file that holds the secret: {why}") from None
    if not secret:
        raise InvalidField("fleet_key_file", "expected a secret in the file, found nothing")
    environment[FLEET_KEY] = secret


def exposure(config: ServeConfig, keys: Keys) -> str | None:
    """Return a warning if other machines can reach this server and no control key is set."""
    if not is_exposed(config, keys):
        return None
    if config.insecure_control:
        return f"--insecure-control: anyone who reaches {config.host} can pause the engine and change weights"
    return f"no control key and --host {config.host}: control routes are refused (--control-key FILE)"


def warn_if_exposed(config: ServeConfig, keys: Keys) -> None:
    """Log the warning of :func:`exposure`."""
    if (warning := exposure(config, keys)) is not None:
        logger.warning(warning)


def log_without_effect(args: argparse.Namespace) -> None:
    """Log one line of the flags and variables of FastDeploy that were given and have no effect, and one for each
    variable whose name is nearly that of a setting."""
    if names := list(dict.fromkeys(args.without_effect)):
        logger.info("taken without effect (docs/fastdeploy.md says why): %s", ", ".join(names))
    for name, near in misspelt_variables(os.environ, list(args.sources), NO_SETTINGS):
        logger.warning("%s is no setting; did you mean %s?", name, near)
