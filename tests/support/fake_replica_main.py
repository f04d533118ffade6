"""Stands in for the process of one replica: ``python -m support.fake_replica_main``. The name of the served model
selects what the process does."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from fastdeploy.core.config import from_json
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.replica_main import ReplicaConfig

SECRET = "FASTDEPLOY_FLEET_KEY"


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--name", "--config"):
        parser.add_argument(name)
    parser.add_argument("--event-fd", type=int)
    args = parser.parse_args()
    config, events = from_json(args.config, ReplicaConfig), EventPipe(args.event_fd)
    if config.serve.served_model_name == "refuse":
        return events.refuse(ValueError("config.json: is broken"))
    print(f"{args.name} begins", flush=True)
    events.beat()
    if os.environ.get(SECRET):
        # Tests read the host as "PID of the replica, digits of its secret".
        events.send(
            "serving",
            endpoint=f"{config.engine.fleet_endpoint}{os.getpid()}",  # differs after a restart
            url=f"http://{config.serve.host}:1",
            host=f"{os.getpid()},{len(os.environ[SECRET])}",
        )
    if config.serve.served_model_name == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        events.beat()
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
