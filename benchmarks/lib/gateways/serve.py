"""A replica whose engine sleeps in its steps, or our gateway before such replicas:

    python -m benchmarks.lib.gateways.serve --port N [--gateway] ENDPOINT...

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
from fastdeploy.client.serving_client import ServingClient
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.listener import bind
from fastdeploy.core.outputs import Logprob
from fastdeploy.core.plan import Sampled
from fastdeploy.core.process import collect_rarely
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector, ZmqRouterTransport
from fastdeploy.scheduler.drafts import NoDrafts

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
    engine = CommonEngine(config, runner, ZmqRouterTransport(endpoint), uuid.uuid4().hex, drafter=NoDrafts())
    collect_rarely()
    engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gateway", action="store_true")
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("endpoints", nargs="+", help="of engines; without --gateway of the one that is started")
    args = parser.parse_args()
    if not args.gateway:
        engine = multiprocessing.get_context("spawn").Process
        engine(target=run_engine, args=(args.endpoints[0], args.step_s), daemon=True).start()
    config = ServeConfig(model=str(MODEL_DIR), served_model_name=MODEL)
    tokenizer = load_tokenizer(config.model)

    async def serve() -> None:
        client: ServingClient
        if args.gateway:
            places = [Placement(f"replica-{i}", endpoint, "", "here") for i, endpoint in enumerate(args.endpoints)]
            settings = FleetConfig(fleet_id="benchmark")
            client = FleetClient(settings, StaticLauncher(places), lambda place: ZmqConnector(place.endpoint))
        else:
            client = EngineClient(ZmqConnector(args.endpoints[0]), config.stall_s)
        server = make_server(client, tokenizer, config)
        collect_rarely()  # as every server of ours
        await server.serve(sockets=[bind("127.0.0.1", args.port)])

    uvloop.run(serve())


if __name__ == "__main__":
    main()
