"""The supervisor over fake_engine_main: ``python supervisor_main.py MODEL_DIR NAME WORKERS SHUTDOWN_S``."""

from __future__ import annotations

import os
import signal
import sys

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.process import setup_logging
from fastdeploy.entrypoints import child
from fastdeploy.entrypoints.child import Child
from fastdeploy.entrypoints.supervisor import Supervisor
from fastdeploy.inter_communicator.fleet_key import pop_fleet_key

if __name__ == "__main__":
    model, name, workers, shutdown_s = sys.argv[1:]
    setup_logging("supervisor")
    engine = EngineConfig(model=model, served_model_name=name)
    serve = ServeConfig(
        model=model, served_model_name=name, port=0, workers=int(workers), shutdown_s=float(shutdown_s), stall_s=60.0
    )
    if name == "immortal":  # as if a thread of the engine read from a dead mount
        Child.kill = lambda self: self.name == "engine" or self.signal(signal.SIGKILL)
    child.KILLED_S = 0.5
    key = pop_fleet_key(os.environ)
    module = "support.fake_engine_main"
    sys.exit(Supervisor(engine, serve, engine_module=module, first_delay_s=0.05, fleet_key=key).run())
