"""The real engine, on a fake runner or a real one, behind a real API server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.runner import Runner
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.http.guards.keys import NO_KEYS
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport
from fastdeploy.scheduler.drafts import Drafter
from support.fake_runner import FakeRunner, expected_tokens
from support.http_stack import Server

VOCAB = 256  # the tokens of the runner are bytes, which the tiny tokenizer can decode


def tokens_of(prompt: list[int], count: int, adapter: int = 0) -> list[int]:
    """Return the tokens of an undisturbed run with the adapter "a<k>"; 0 = the base model."""
    return expected_tokens(prompt, count, vocab=VOCAB, adapter=adapter)


@contextlib.contextmanager
def engine_stack(
    model_dir: str,
    tokenizer: Tokenizer,
    runner: Runner | None = None,
    drafter: Drafter | None = None,
    **settings: Any,
) -> Iterator[Server]:
    """Serve, and give the API server. runner: None = a fake one. settings: fields of EngineConfig and ServeConfig."""
    path = ipc_dir.create()
    endpoint, names = ipc_dir.endpoint(path), {"model": model_dir, "served_model_name": "tiny"}
    config = _config(EngineConfig, {**names, "max_num_seqs": 4, "max_num_batched_tokens": 32, **settings})
    transport = ZmqRouterTransport(endpoint)
    engine = CommonEngine(config, runner or FakeRunner(vocab=VOCAB), transport, drafter=drafter)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    server = Server(endpoint, tokenizer, _config(ServeConfig, {**names, **settings}), NO_KEYS)
    server.wait_connected()
    yield server
    server.stop()
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    transport.close()
    ipc_dir.remove(path)


def _config(kind: type[Any], settings: dict[str, Any]) -> Any:
    return kind(**{name: settings[name] for name in settings.keys() & {f.name for f in msgspec.structs.fields(kind)}})
