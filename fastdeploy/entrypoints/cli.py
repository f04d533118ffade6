"""The command line: ``fastdeploy serve`` and ``fastdeploy fleet``, or ``python -m fastdeploy`` with the same."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from fastdeploy.core.config import DTYPES, PAUSE_MODES, STANDBY_POLICIES, EngineConfig, ServeConfig, is_loopback
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.process import VERSION, setup_logging
from fastdeploy.core.sampling_params import LOGPROBS_MODES
from fastdeploy.entrypoints.fleet_flags import (
    DEFAULT_REPLICAS,
    add_fleet_flags,
    fleet_config,
    launcher_spec,
    put_fleet_key,
    ray_spec,
)
from fastdeploy.http.guards.keys import API_KEY, CONTROL_KEY, Keys, is_exposed, read_keys
from fastdeploy.inter_communicator.fleet_key import FLEET_KEY, require_fleet_key, take_fleet_key


class Parent(Protocol):
    """The parent of the processes of a command."""

    def run(self) -> int: ...


AddArgument = Callable[..., Any]  # argparse's add_argument, of one group
EMBEDDED_NAME = "fastdeploy-embedded"
logger = logging.getLogger(__name__)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The defaults of flags are those of the configs."""
    parser = argparse.ArgumentParser(prog="fastdeploy", description="An LLM serving engine for RL rollouts.")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    _add_serve_flags(serve)
    text = f"second address of the engine, for a fleet: ipc://PATH or tcp://HOST:PORT, which needs {FLEET_KEY} (none)"
    serve.add_argument_group("fleet").add_argument("--fleet-endpoint", default="", metavar="ADDRESS", help=text)
    text = "serve a model with many engines behind one address"
    fleet = commands.add_parser("fleet", help=text, allow_abbrev=False)
    add_fleet_flags(fleet.add_argument_group("fleet").add_argument)
    _add_serve_flags(fleet)
    for command in (serve, fleet):
        text = f"file of the secret that gateway and engines of other hosts share (or {FLEET_KEY}, the secret itself)"
        command.add_argument("--fleet-key-file", metavar="FILE", help=text)
    return parser


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="MODEL", help="as --model")
    engine, http = EngineConfig(model=""), ServeConfig(model="")
    _add_http_flags(parser.add_argument_group("HTTP").add_argument, http)
    _add_limit_flags(parser.add_argument_group("connections, request bodies and uploads").add_argument, http)
    _add_request_flags(parser.add_argument_group("requests").add_argument, http)
    _add_access_flags(parser.add_argument_group("access").add_argument)
    _add_engine_flags(parser.add_argument_group("engine").add_argument, engine)
    _add_weight_flags(parser.add_argument_group("weights").add_argument, engine, http)
    _add_adapter_flags(parser.add_argument_group("adapters").add_argument, engine)


def _add_http_flags(add: AddArgument, http: ServeConfig) -> None:
    add("--host", default=http.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=http.port, help="port to listen on, 0 = any free one (%(default)s)")
    add("--workers", type=int, default=http.workers, help="API server processes (%(default)s)")
    add("--served-model-name", help="the model's name in requests and replies (the folder's name)")
    add("--keepalive-s", type=float, default=http.keepalive_s, help="comment on a stream silent so long (%(default)g)")
    add("--shutdown-s", type=float, default=http.shutdown_s, help="seconds that a shutdown may take (%(default)g)")
    add("--stall-s", type=float, default=http.stall_s, help="an engine silent for so long is killed (%(default)g)")


def _add_limit_flags(add: AddArgument, http: ServeConfig) -> None:
    add("--max-connections", type=int, default=http.max_connections, help="open connections (%(default)s)")
    add("--max-header-kb", type=int, default=http.max_header_kb, help="KiB of a request's headers (%(default)s)")
    add("--header-s", type=float, default=http.header_s, help="time for a request's headers (%(default)g)")
    add("--max-body-mb", type=int, default=http.max_body_mb, help="MiB a request body may have (%(default)s)")
    add("--max-bodies-mb", type=int, default=http.max_bodies_mb, help="MiB of all bodies being received (%(default)s)")
    add("--body-idle-s", type=float, default=http.body_idle_s, help="time for each MiB of a body (%(default)g)")
    add("--max-upload-mb", type=int, default=http.max_upload_mb, help="MiB a weight upload may have (%(default)s)")
    add("--max-uploads", type=int, default=http.max_uploads, help="weight uploads at once (%(default)s)")


def _add_request_flags(add: AddArgument, http: ServeConfig) -> None:
    text = "log probabilities one request may ask for: choices x max_tokens x (1 + top) (%(default)s)"
    add("--max-reply-logprobs", type=int, default=http.max_reply_logprobs, help=text)
    text = "for requests that name no mode; routes of SGLang: temperature (%(default)s)"
    add("--logprobs-mode", choices=LOGPROBS_MODES, default=http.logprobs_mode, help=text)
    add("--trust-request-chat-template", action="store_true", help="take a chat_template from a request")
    for dialect in ("vllm", "sglang", "areal"):
        name = f"{dialect}_pause_mode"
        flag = "--" + name.replace("_", "-")
        text = f"mode of a pause by a {dialect} route that names no mode (%(default)s)"
        add(flag, choices=PAUSE_MODES, default=getattr(http, name), help=text)
    text = "time after which the hold of such a pause ends by itself (%(default)g)"
    add("--dialect-hold-ttl-s", type=float, default=http.dialect_hold_ttl_s, help=text)


def _add_engine_flags(add: AddArgument, engine: EngineConfig) -> None:
    add("--model", help="Hugging Face folder; without it the embedded model is served")
    add("--dtype", choices=DTYPES, default=engine.dtype, help="of weights and KV cache (%(default)s: the checkpoint's)")
    add("--max-model-len", type=int, help="context in tokens, prompt and output together (the checkpoint's)")
    add("--max-num-seqs", type=int, default=engine.max_num_seqs, help="sequences per step (%(default)s)")
    add("--max-num-batched-tokens", type=int, default=engine.max_num_batched_tokens, help="per step (%(default)s)")
    add("--max-step-ms", type=float, default=engine.max_step_ms, help="time cap of a step with prefill (%(default)g)")
    add("--max-waiting", type=int, default=engine.max_waiting, help="choices that may wait, then 429 (%(default)s)")
    add("--block-size", type=int, default=engine.block_size, help="tokens per KV block (%(default)s)")
    add("--num-gpu-blocks-override", type=int, help="KV blocks (from --kv-cache-gb, or the memory that is free)")
    add("--kv-cache-gb", type=float, help="memory for the KV cache in GiB")
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=engine.enable_prefix_caching,
        help="reuse the KV of equal prompt beginnings",
    )
    add("--max-retained", type=int, default=engine.max_retained, help="results kept for retain_s (%(default)s)")
    text = "write a trace for Perfetto; a file that exists is kept, and NAME.2.json and so on are written (none)"
    add("--trace", default=engine.trace, metavar="FILE", help=text)
    add("--trace-max-mb", type=int, default=engine.trace_max_mb, help="MiB after which a trace ends (%(default)s)")
    add("--max-retained-mb", type=int, default=engine.max_retained_mb, help="MiB of such results (%(default)s)")


def _add_weight_flags(add: AddArgument, engine: EngineConfig, http: ServeConfig) -> None:
    text = "folder that weights may be updated from; repeatable (any path when bound to loopback, none otherwise)"
    add("--model-root", action="append", metavar="PATH", help=text)
    text = "folder below which pulls of published weights write; weights may be loaded from there too (nowhere)"
    add("--pull-root", default=http.pull_root, metavar="PATH", help=text)
    add("--upload-dir", default=http.upload_dir, help="where weight uploads are spooled (shared memory, or TMPDIR)")
    text = "seconds that reading new weights may take; then the update ends (%(default)g)"
    add("--stage-timeout-s", type=float, default=engine.stage_timeout_s, help=text)
    add("--spill-dir", default=engine.spill_dir, help="where sleeping weights are written (TMPDIR)")
    text = (
        "keep a second copy of the weights in memory, which makes updates fast. auto: made if the bytes of weights and "
        "KV cache and 1 GiB are free, kept while 1 GiB is free (%(default)s)"
    )
    add("--standby-weights", choices=STANDBY_POLICIES, default=engine.standby_weights, help=text)


def _add_adapter_flags(add: AddArgument, engine: EngineConfig) -> None:
    text = "MiB of packed adapters; those used least recently leave, and are read again when named (%(default)s)"
    add("--adapter-memory-mb", type=int, default=engine.adapter_memory_mb, help=text)
    text = "folder in which the name of an unknown adapter is looked up (nowhere)"
    add("--adapter-root", default=engine.adapter_root, metavar="PATH", help=text)
    text = "where copies of loaded adapters are kept while the server runs (TMPDIR)"
    add("--adapter-store", default=engine.adapter_store, metavar="PATH", help=text)
    add("--max-lora-rank", type=int, default=engine.max_lora_rank, help="largest rank of an adapter (%(default)s)")


def _add_access_flags(add: AddArgument) -> None:
    keys = "file of keys, one on each line; each key opens"
    add("--api-key", metavar="FILE", help=f"{keys} data routes (or {API_KEY}, which holds the keys themselves)")
    add("--control-key", metavar="FILE", help=f"{keys} every route (or {CONTROL_KEY}, likewise)")
    add("--control-port", type=int, help="the only port that answers control routes, 0 = any free one (--port)")
    text = "answer control routes without a key though other machines can reach them"
    add("--insecure-control", action="store_true", help=text)
    text = "names that the Host header may have, besides loopback's; * = any (any, unless bound to loopback)"
    add("--allowed-hosts", type=_comma_list, default=(), metavar="A,B", help=text)
    text = "origins of web pages that may use this server; * = any (none but its own)"
    add("--allowed-origins", type=_comma_list, default=(), metavar="A,B", help=text)


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
) -> Parent:
    """Return the parent process of the command. Raises InvalidField, which names a setting."""
    put_fleet_key(args.fleet_key_file, os.environ)
    fleet_key = take_fleet_key(os.environ)
    if args.command == "serve":
        from fastdeploy.entrypoints.supervisor import Supervisor

        require_fleet_key(engine.fleet_endpoint, fleet_key)
        return Supervisor(engine, serve, engine_module, keys, fleet_key=fleet_key)
    from fastdeploy.entrypoints.fleet import Fleet

    on_ray = args.ray is not None
    spec = ray_spec(args, fleet_key, engine, serve) if on_ray else launcher_spec(args, fleet_key)
    number = 0 if spec else args.replicas or DEFAULT_REPLICAS
    return Fleet(engine, serve, fleet_config(args, engine.model_roots), number, spec, keys, fleet_key, engine_module)


def main(argv: Sequence[str] | None = None, engine_module: str = "fastdeploy.entrypoints.engine_main") -> int:
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
