"""Our gateway before replicas that run: ``python -m benchmarks.lib.gateways.own --port N ENDPOINT...``."""

from __future__ import annotations

import argparse

import uvloop

from benchmarks.lib.gateways.replica import MODEL
from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.config import ServeConfig
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.api_server import make_server
from fastdeploy.entrypoints.process_tree import bind
from fastdeploy.fleet.client import FleetClient
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Placement, StaticLauncher
from fastdeploy.inter_communicator.zmq_transport import ZmqConnector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("endpoints", nargs="+")
    args = parser.parse_args()
    placements = [Placement(f"replica-{i}", endpoint, "", "here") for i, endpoint in enumerate(args.endpoints)]
    config = ServeConfig(model=str(MODEL_DIR), served_model_name=MODEL)
    tokenizer = load_tokenizer(config.model)

    async def serve() -> None:
        launcher = StaticLauncher(placements)
        fleet = FleetClient(FleetConfig(fleet_id="bench"), launcher, lambda place: ZmqConnector(place.endpoint))
        await make_server(fleet, tokenizer, config).serve(sockets=[bind("127.0.0.1", args.port)])

    uvloop.run(serve())


if __name__ == "__main__":
    main()
