"""One replica, whose engine sleeps in its steps: ``python -m benchmarks.lib.gateways.replica --port N --endpoint E``.

Each token's logprob is the negative CLOCK_MONOTONIC of the moment in which the token was made, in seconds.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import uuid
from typing import Any

import uvloop

from benchmarks.lib.fleet.runner import Costs, SleepingRunner
from fastdeploy.client.engine_client import EngineClient
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import Sampled
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.entrypoints.process_tree import bind
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, ZmqRouterTransport

MODEL = "timed"


class ClockRunner(SleepingRunner):
    """A runner whose logprobs are times."""

    def _sample(self, *args: Any) -> Sampled | None:
        sampled = super()._sample(*args)
        return sampled and Sampled(sampled.token_ids, [Logprob(-time.monotonic())])


def run_engine(endpoint: str, step_s: float) -> None:
    """Run the engine until its process ends."""
    runner = ClockRunner(Costs(step_s=step_s, num_blocks=4096, vocab_size=255))
    config = EngineConfig(model=MODEL, max_num_seqs=64)
    CommonEngine(config, runner, ZmqRouterTransport(endpoint), uuid.uuid4().hex).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=run_engine, args=(args.endpoint, args.step_s), daemon=True).start()
    config = ServeConfig(model=str(MODEL_DIR), served_model_name=MODEL)
    tokenizer = load_tokenizer(config.model)

    async def serve() -> None:
        server = make_server(EngineClient(ZmqConnector(args.endpoint), config.stall_s), tokenizer, config)
        await server.serve(sockets=[bind("127.0.0.1", args.port)])

    uvloop.run(serve())


if __name__ == "__main__":
    main()
