"""The command line: ``fastdeploy serve`` and ``fastdeploy fleet``, or ``python -m fastdeploy`` with the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, get_args

import msgspec

from fastdeploy.core.config import EngineConfig, Flag, ServeConfig, flags_of, is_loopback
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION, setup_logging
from fastdeploy.entrypoints.fleet import Fleet
from fastdeploy.entrypoints.fleet_flags import (
    DEFAULT_REPLICAS,
    add_fleet_flags,
    fleet_config,
    launcher_spec,
    put_fleet_key,
    ray_spec,
)
from fastdeploy.entrypoints.process_tree import ProcessTree
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE, Supervisor
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY, Keys, is_exposed, read_keys
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, pop_fleet_key, require_fleet_key

EMBEDDED_NAME = "fastdeploy-embedded"
logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The defaults of flags are those of the configs."""
    parser = argparse.ArgumentParser(prog="fastdeploy", description="An LLM serving engine for RL rollouts.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    text = "serve a model with many engines behind one address"
    fleet = commands.add_parser("fleet", help=text, allow_abbrev=False)
    for command in (serve, fleet):
        _add_serve_flags(command, but=("fleet_endpoint",) if command is fleet else ())
    add_fleet_flags(fleet.add_argument_group("fleet").add_argument)
    return parser


def _add_serve_flags(parser: argparse.ArgumentParser, but: Sequence[str] = ()) -> None:
    """Add the flags of the configs, and those that are more than one setting."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="as --model")
    add = parser.add_argument
    add("--model", metavar="PATH", help="Hugging Face folder; without it the embedded model is served")
    add("--served-model-name", metavar="NAME", help="the model's name in requests and replies (the folder's name)")
    text = "folder that weights may be updated from; repeatable (any path when bound to loopback, none otherwise)"
    add("--model-root", action="append", metavar="PATH", help=text)
    keys = "file of keys, one on each line; each key opens"
    add("--api-key", metavar="FILE", help=f"{keys} data routes (or {API_KEY}, which holds the keys themselves)")
    add("--control-key", metavar="FILE", help=f"{keys} every route (or {CONTROL_KEY}, likewise)")
    text = f"file of the secret that gateway and engines of other hosts share (or {FLEET_KEY}, the secret itself)"
    add("--fleet-key-file", metavar="FILE", help=text)
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
    group.add_argument(name, type=reader, default=default, choices=flag.choices or None, help=flag.text + shown)


def _comma_list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def configs(args: argparse.Namespace) -> tuple[EngineConfig, ServeConfig]:
    """Return the checked configs of ``fastdeploy serve``. Raises InvalidField, which names a setting."""
    from fastdeploy.embedded import MODEL_DIR

    if args.folder and args.model:
        raise InvalidField("model", "expected the model once: as MODEL or as --model")
    given_model = args.folder or args.model
    model = os.path.abspath(given_model or MODEL_DIR)
    if not os.path.isfile(os.path.join(model, "config.json")):
        raise InvalidField("model", f"expected a Hugging Face folder with a config.json, got {model!r}")
    name = args.served_model_name or (os.path.basename(model) if given_model else EMBEDDED_NAME)
    any_path = ["/"] if is_loopback(args.host) else []
    roots = any_path if args.model_root is None else args.model_root
    if args.pull_root:
        args.pull_root = os.path.abspath(args.pull_root)
        roots = [*roots, args.pull_root]  # pulled weights must be allowed as a source
    if args.trace:
        args.trace = os.path.abspath(args.trace)
    if args.adapter_root:
        args.adapter_root = os.path.abspath(args.adapter_root)
    model_roots = tuple(os.path.abspath(root) for root in roots)
    given = vars(args) | {"model": model, "served_model_name": name, "model_roots": model_roots}

    def fields_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
        return {field: given[field] for field in kind.__struct_fields__ if field in given}

    return EngineConfig(**fields_of(EngineConfig)).check(), ServeConfig(**fields_of(ServeConfig)).check()


def _warn_if_exposed(config: ServeConfig, keys: Keys) -> None:
    if not is_exposed(config, keys):
        return
    if config.insecure_control:
        logger.warning("--insecure-control: anyone who reaches %s can pause the engine and change weights", config.host)
    else:
        logger.warning("no control key and --host %s: control routes are refused (--control-key FILE)", config.host)


def _without_flag(error: InvalidField) -> str:
    """Return the message, without the name of a setting that has a flag."""
    return error.message if error.field == FLEET_KEY else error.message.removeprefix(error.field + ": ")


def make_parent(
    args: argparse.Namespace, engine: EngineConfig, serve: ServeConfig, keys: Keys, engine_module: str
) -> ProcessTree:
    """Return the parent process of the command. Raises InvalidField, which names a setting."""
    put_fleet_key(args.fleet_key_file, os.environ)
    fleet_key = pop_fleet_key(os.environ)
    if args.command == "serve":
        require_fleet_key(engine.fleet_endpoint, fleet_key)
        return Supervisor(engine, serve, engine_module, keys, fleet_key=fleet_key)
    on_ray = args.ray is not None
    spec = ray_spec(args, fleet_key, engine, serve) if on_ray else launcher_spec(args, fleet_key)
    number = 0 if spec else args.replicas or DEFAULT_REPLICAS
    return Fleet(engine, serve, fleet_config(args, engine.model_roots), number, spec, keys, fleet_key, engine_module)


def main(argv: Sequence[str] | None = None, engine_module: str = ENGINE_MODULE) -> int:
    """Run the command line ``argv`` and return the exit status. engine_module: see Supervisor."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        engine_config, serve_config = configs(args)
        keys = read_keys(args.api_key, args.control_key, os.environ)
        parent = make_parent(args, engine_config, serve_config, keys, engine_module)
    except InvalidField as error:
        flag = "--fleet-key-file" if error.field == FLEET_KEY else "--" + error.field.replace("_", "-")
        parser.error(f"argument {flag}: {_without_flag(error)}")
    setup_logging("supervisor" if args.command == "serve" else "fleet")
    _warn_if_exposed(serve_config, keys)
    try:
        return parent.run()
    except OSError as error:
        print(f"fastdeploy: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
