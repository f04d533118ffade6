"""Stands in for the engine process under the supervisor: the fake engine, in a process that can be killed."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import uuid

from fastdeploy.core.config import EngineConfig, from_json
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.engine_main import Lifeline
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import FakeEngine, reply_with

EXIT = 60  # the system call of one thread, on x86-64


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--config", "--socket-dir"):
        parser.add_argument(name)
    for name in ("--supervisor", "--event-fd"):
        parser.add_argument(name, type=int)
    parser.add_argument("--bound-s", type=float)
    parser.add_argument("--lost-commit", action="store_true")
    args = parser.parse_args()
    config = from_json(args.config, EngineConfig)
    stopped = threading.Event()
    lifeline = Lifeline(args.supervisor, args.socket_dir, args.bound_s)
    lifeline.stop = stopped.set
    events = EventPipe(args.event_fd)
    if config.served_model_name == "broken":
        return events.refuse(ValueError("config.json: is broken"))
    if config.served_model_name == "once":  # the second one dies before it is ready
        try:
            os.close(os.open(os.path.join(args.socket_dir, "started"), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return 1
    if config.served_model_name in ("stubborn", "immortal"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def tell_and_be_silent(add: AddRequest) -> list[m.Output]:
        engine.status["num_asked"] = len(engine.requests)
        return []

    script = tell_and_be_silent if config.served_model_name == "silent" else reply_with([104, 105])
    engine = FakeEngine(ipc_dir.endpoint(args.socket_dir), script, boot_id=uuid.uuid4().hex, pid=os.getpid())
    engine.status |= {"lost_commit": args.lost_commit, "pid": os.getpid(), "short_lives": config.short_lives}
    # Ends the main thread alone, like the death of an engine of which another thread hangs in a read.
    signal.signal(signal.SIGUSR1, lambda *_: ctypes.CDLL(None).syscall(EXIT, 0))

    def commit(call: m.Call) -> m.Reply:
        events.send("commit", are_first=call.args.version == "0")
        return m.Reply(call.call_id, {"weight_epoch": 1})

    engine.replies[m.UpdateWeightsArgs] = commit
    events.send("ready", boot_id=engine.boot_id)
    while not stopped.wait(3600):
        pass
    engine.die()
    return 0


if __name__ == "__main__":
    sys.exit(main())
