"""``fastdeploy fleet``: many engines behind one address."""

from __future__ import annotations

import argparse
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig, is_loopback
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import host_id
from fastdeploy.entrypoints.cli.changed_settings import reread_of
from fastdeploy.entrypoints.cli.command import Commands, Context
from fastdeploy.entrypoints.cli.flags import USAGE, Start, add_serve_flags, announce, configs, read_start
from fastdeploy.entrypoints.cli.settings import SettingsParser
from fastdeploy.entrypoints.gateway_config import GatewayConfig, LauncherSpec, RaySpec, StaticSpec, replica_keys
from fastdeploy.entrypoints.ray_actors import RayConfig, import_ray
from fastdeploy.entrypoints.ray_fleet import RayFleet
from fastdeploy.entrypoints.ray_replica import ReplicaSpec
from fastdeploy.entrypoints.replica_main import ReplicaConfig
from fastdeploy.entrypoints.roll import Settings
from fastdeploy.entrypoints.rolling_fleet import RollingFleet
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, require_fleet_key, with_fleet_key

DEFAULT_REPLICAS = 2
MAX_GATEWAYS = 64


def add_parser(commands: Commands) -> SettingsParser:
    """Add this command."""
    text = "serve a model with many engines behind one address"
    parser = commands.add_parser("fleet", help=text, allow_abbrev=False, usage=USAGE)
    add_serve_flags(parser, but=("fleet_endpoint",))
    _add_fleet_flags(parser.add_argument_group("fleet").add_argument)
    parser.take_settings()
    return parser


def run(args: argparse.Namespace, context: Context) -> int:
    """Serve until a signal comes. Return the exit status. Raises InvalidField, which names a setting."""
    start = read_start(args)
    engine, serve, keys, fleet_key = start
    on_ray = args.ray is not None
    spec = ray_spec(args, fleet_key, engine, serve) if on_ray else launcher_spec(args, fleet_key)
    if serve.faults and spec is not None:
        raise InvalidField("faults", "expected a fleet whose replicas run on this host: --replicas N")
    check_gateways(args, serve)
    number = 0 if spec else args.replicas or DEFAULT_REPLICAS
    config = fleet_config(args, engine.model_roots)
    if isinstance(spec, RaySpec) and args.gateways is not None:
        return _run_on_ray(args, start, spec, config)
    parent = RollingFleet(
        engine,
        serve,
        config,
        number,
        spec,
        keys,
        fleet_key,
        context.engine_module,
        reread=reread_of(args, Settings(engine, serve, config), _settings_of),
        num_gateways=args.gateways or 1,
        gateway_endpoint=gateway_endpoint(args, fleet_key),
    )
    announce(args, "fleet", start)
    return parent.run()


def _run_on_ray(args: argparse.Namespace, start: Start, spec: RaySpec, config: FleetConfig) -> int:
    """Serve with gateways that are actors. They are on the network, at the addresses of their hosts."""
    engine, serve, keys, fleet_key = start
    own_keys = replica_keys(spec, keys, fleet_key)
    secrets, replica_secrets = (with_fleet_key(kind.environment({}), fleet_key) for kind in (keys, own_keys))
    fleet = RayFleet(spec, args.gateways, GatewayConfig("", serve, config, spec), secrets, replica_secrets)
    exposed = msgspec.structs.replace(serve, host="0.0.0.0") if is_loopback(serve.host) else serve
    announce(args, "fleet", start._replace(serve=exposed))
    return fleet.run()


def _settings_of(args: argparse.Namespace) -> Settings:
    engine, serve = configs(args)
    return Settings(engine, serve, fleet_config(args, engine.model_roots))


def _add_fleet_flags(add: Callable[..., Any]) -> None:
    """Add the flags that ``fastdeploy serve`` does not have, with argparse's add_argument."""
    defaults = FleetConfig(fleet_id="")
    text = f"engines to start on this host, which share its cores and its free memory ({DEFAULT_REPLICAS})"
    add("--replicas", type=int, metavar="N", help=text)
    text = "processes that answer HTTP at one port for the whole fleet; one leads, and makes the control calls (1)"
    add("--gateways", type=int, metavar="N", help=text)
    text = "where the gateways of other hosts reach those of this one: gateway i at PORT + i, 0 = any free ports"
    add("--gateway-endpoint", metavar="tcp://HOST:PORT", help=text)
    text = "an engine that runs elsewhere: address and URL of 'fastdeploy serve --fleet-endpoint'; repeatable"
    add("--replica", action="append", metavar="tcp://HOST:PORT=URL", help=text)
    ray = RayConfig(name="default", replicas=DEFAULT_REPLICAS)
    text = "run the replicas on a Ray cluster: HOST:PORT of its head (the cluster of this host); needs a fleet key"
    add("--ray", nargs="?", const=ray.address, metavar="ADDRESS", help=text)
    text = "name of a fleet on Ray, or with --gateway-endpoint; its gateways find each other by it (%(default)s)"
    add("--name", default=ray.name, help=text)
    add("--replica-cpus", type=float, default=ray.replica_cpus, help="cores of each replica on Ray (%(default)g)")
    add("--keep-replicas", action="store_true", help="let the replicas on Ray run on when this command is stopped")
    text = "a replica that has not answered for so long is cut off and started again (%(default)g)"
    add("--fence-after-s", type=float, default=defaults.fence_after_s, help=text)
    text = "a request whose replica was lost waits so long for another one (%(default)g)"
    add("--failover-s", type=float, default=defaults.failover_s, help=text)


def check_gateways(args: argparse.Namespace, serve: ServeConfig) -> None:
    """Raise InvalidField if the fleet cannot have so many gateways."""
    number = 1 if args.gateways is None else args.gateways
    if not 1 <= number <= MAX_GATEWAYS:
        raise InvalidField("gateways", f"expected a number from 1 to {MAX_GATEWAYS}, got {number}")
    if number > 1 and serve.faults:
        raise InvalidField("gateways", f"expected 1 with --faults: one process counts, got {number}")


def gateway_endpoint(args: argparse.Namespace, fleet_key: str | None) -> str:
    """Return the address of this host's gateways for those of other hosts; "" = there are none. Raises InvalidField."""
    given: str | None = args.gateway_endpoint
    if given is None:
        return ""
    try:
        address = urlsplit(given)
        fits = address.scheme == "tcp" and address.hostname and address.port is not None and not address.path
    except ValueError:  # such as a port that is no number
        fits = False
    if not fits:
        raise InvalidField("gateway_endpoint", f"expected tcp://HOST:PORT, got {given!r}")
    if not args.replica:
        text = "expected --replica with it, since gateways of other hosts cannot reach engines that this command starts"
        raise InvalidField("gateway_endpoint", text)
    require_fleet_key(given, fleet_key)
    return given


def fleet_config(args: argparse.Namespace, model_roots: tuple[str, ...]) -> FleetConfig:
    """Return the checked settings of the gateways of one fleet. model_roots: of its engines. Raises InvalidField."""
    given = {name: getattr(args, name) for name in ("fence_after_s", "failover_s", "stall_s", "stage_timeout_s")}
    # Gateways of other parents, later or on other hosts, must be of the same fleet.
    is_shared = args.ray is not None or args.gateway_endpoint is not None
    fleet_id = _ray_config(args).namespace if is_shared else uuid.uuid4().hex
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
        address=args.ray or "auto",
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
    # The replicas end within stop_s, and have no control port and no metrics port of their own.
    own = msgspec.structs.replace(serve, control_port=None, metrics_port=None, shutdown_s=ray.stop_s, session_dir="")
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
