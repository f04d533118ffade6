"""The command line: ``fastdeploy serve`` and ``fastdeploy fleet``, or ``python -m fastdeploy`` with the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import uuid
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import msgspec

from fastdeploy.core.config import EngineConfig, Flag, ServeConfig, flags_of, is_loopback
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION, host_id, setup_logging
from fastdeploy.entrypoints.fleet import Fleet, LauncherSpec, RaySpec, StaticSpec
from fastdeploy.entrypoints.process_tree import ProcessTree
from fastdeploy.entrypoints.ray_launcher import RayConfig, import_ray
from fastdeploy.entrypoints.ray_replica import ReplicaSpec
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.entrypoints.supervisor import ENGINE_MODULE, Supervisor
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY, Keys, is_exposed, read_keys
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, pop_fleet_key, require_fleet_key

EMBEDDED_NAME = "fastdeploy-embedded"
DEFAULT_REPLICAS = 2
MAX_KEY_BYTES = 4096
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
    _add_fleet_flags(fleet.add_argument_group("fleet").add_argument)
    return parser


def _add_serve_flags(parser: argparse.ArgumentParser, but: Sequence[str] = ()) -> None:
    """Add the flags of the configs, and those that are more than one setting."""
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="as --model")
    add = parser.add_argument
    add("--model", metavar="PATH", help="folder of Hugging Face or Paddle; without it the embedded model is served")
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


def _add_fleet_flags(add: Callable[..., Any]) -> None:
    """Add the flags that ``fastdeploy serve`` does not have, with argparse's add_argument."""
    defaults = FleetConfig(fleet_id="")
    text = f"engines to start on this host, which share its cores and its free memory ({DEFAULT_REPLICAS})"
    add("--replicas", type=int, metavar="N", help=text)
    text = "an engine that runs elsewhere: address and URL of 'fastdeploy serve --fleet-endpoint'; repeatable"
    add("--replica", action="append", metavar="tcp://HOST:PORT=URL", help=text)
    ray = RayConfig(name="default", replicas=DEFAULT_REPLICAS)
    text = "run the replicas on a Ray cluster: HOST:PORT of its head (the cluster of this host); needs a fleet key"
    add("--ray", nargs="?", const=ray.address, metavar="ADDRESS", help=text)
    text = "name of the fleet on Ray; the next gateway of this name finds its replicas (%(default)s)"
    add("--name", default=ray.name, help=text)
    add("--replica-cpus", type=float, default=ray.replica_cpus, help="cores of each replica on Ray (%(default)g)")
    add("--keep-replicas", action="store_true", help="let the replicas on Ray run on when this command is stopped")
    text = "a replica that has not answered for so long is cut off and started again (%(default)g)"
    add("--fence-after-s", type=float, default=defaults.fence_after_s, help=text)
    text = "a request whose replica was lost waits so long for another one (%(default)g)"
    add("--failover-s", type=float, default=defaults.failover_s, help=text)


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
        raise InvalidField("model", f"expected a folder with a config.json, got {model!r}")
    name = args.served_model_name or (os.path.basename(model) if given_model else EMBEDDED_NAME)
    any_path = ["/"] if is_loopback(args.host) else []
    roots = any_path if args.model_root is None else args.model_root
    if args.pull_root:
        args.pull_root = os.path.abspath(args.pull_root)
        roots = [*roots, args.pull_root]  # pulled weights must be allowed as a source
    if args.trace:
        args.trace = os.path.abspath(args.trace)
    if args.session_dir:
        args.session_dir = os.path.abspath(args.session_dir)
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


def fleet_config(args: argparse.Namespace, model_roots: tuple[str, ...]) -> FleetConfig:
    """Return the checked settings of the gateways of one fleet. model_roots: of its engines. Raises InvalidField."""
    given = {name: getattr(args, name) for name in ("fence_after_s", "failover_s", "stall_s", "stage_timeout_s")}
    # On Ray, replicas may outlive the gateway and its parent; the next ones must be of the same fleet.
    fleet_id = uuid.uuid4().hex if args.ray is None else _ray_config(args).namespace
    config = FleetConfig(fleet_id=fleet_id, model_roots=model_roots, **given).check()
    if args.replicas is not None and not 1 <= args.replicas <= config.max_replicas:
        raise InvalidField("replicas", f"expected a number from 1 to {config.max_replicas}, got {args.replicas}")
    return config


def launcher_spec(args: argparse.Namespace, fleet_key: str | None) -> LauncherSpec | None:
    """Return who starts the replicas: None = the parent of the gateway. Raises InvalidField."""
    if not args.replica:
        return None
    if args.replicas is not None:
        raise InvalidField("replica", "expected --replicas N for engines of this host, or --replica for others")
    placements = [_placement(f"replica-{i}", text) for i, text in enumerate(args.replica)]
    for placement in placements:
        require_fleet_key(placement.endpoint, fleet_key)
    return StaticSpec(placements)


def _ray_config(args: argparse.Namespace) -> RayConfig:
    return RayConfig(
        name=args.name,
        replicas=DEFAULT_REPLICAS if args.replicas is None else args.replicas,
        address=args.ray,
        replica_cpus=args.replica_cpus,
        keep_replicas=args.keep_replicas,
        stop_s=args.shutdown_s / 4,
    ).check()


def ray_spec(args: argparse.Namespace, fleet_key: str | None, engine: EngineConfig, serve: ServeConfig) -> RaySpec:
    """Return the replicas that Ray starts, for --ray. Raises InvalidField."""
    if args.replica:
        raise InvalidField("replica", "expected --ray, or --replica for engines that run already")
    ray = _ray_config(args)
    import_ray()
    if fleet_key is None:
        text = f"expected the secret of the fleet for --ray, here or in {FLEET_KEY}, since engines are on the network"
        raise InvalidField("fleet_key_file", text)
    # The replicas end within stop_s, and have no control port of their own.
    own = msgspec.structs.replace(serve, control_port=None, shutdown_s=ray.stop_s, session_dir="")
    return RaySpec(ray, ReplicaSpec(ReplicaConfig(engine, own), threads=max(int(ray.replica_cpus), 1)))


def _placement(name: str, text: str) -> Placement:
    endpoint, _, url = text.partition("=")
    expected = f"expected tcp://HOST:PORT=http://HOST:PORT, got {text!r}"
    try:
        address, page = urlsplit(endpoint), urlsplit(url)
        is_local = address.scheme == "ipc" and bool(address.path)
        is_remote = address.scheme == "tcp" and bool(address.hostname and address.port)
    except ValueError as error:  # such as a port that is no number
        raise InvalidField("replica", expected) from error
    if not (is_local or is_remote) or page.scheme not in ("http", "https") or not page.hostname:
        raise InvalidField("replica", expected)
    return Placement(name, endpoint, url.rstrip("/"), host_id() if is_local else str(address.hostname))


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
