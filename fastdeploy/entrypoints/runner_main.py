"""The runner's process: ``python -m fastdeploy.entrypoints.runner_main`` (started by the engine, see loading.py)."""

from __future__ import annotations

import argparse
import os
import sys

from fastdeploy.core.collector import collect_rarely
from fastdeploy.core.config import EngineConfig, from_json
from fastdeploy.core.logger import setup_logging
from fastdeploy.core.runner import Runner
from fastdeploy.entrypoints.loading import load_model
from fastdeploy.inter_communicator.runner_server import RunnerServer


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--socket-dir", required=True, help="private folder for the sockets")
    parser.add_argument("--event-fd", type=int, required=True, help="required by Child, and not used")
    args = parser.parse_args()
    setup_logging("runner")
    os.close(args.event_fd)
    config = from_json(args.config, EngineConfig)

    def load() -> Runner:
        runner = load_model(config)
        collect_rarely()
        return runner

    RunnerServer(args.socket_dir).serve(load)
    return 0


if __name__ == "__main__":
    sys.exit(main())
