"""The engine process: ``python -m fastdeploy.entrypoints.engine_main`` (started by the supervisor).

Exit status: 0 after a stop signal, REFUSED if the model or a setting cannot be served.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import msgspec
import zmq

from fastdeploy.core.config import EngineConfig, from_json
from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.loading import Loading, LoadingStage, ShowLoading
from fastdeploy.core.process import collect_rarely, setup_logging
from fastdeploy.core.runner import Runner
from fastdeploy.entrypoints.child import EventPipe
from fastdeploy.entrypoints.loading import load_runner
from fastdeploy.entrypoints.loading_progress import LoadingReports
from fastdeploy.inter_communicator import ipc_dir
from fastdeploy.inter_communicator.fleet_key import pop_fleet_key, require_fleet_key
from fastdeploy.inter_communicator.zmq_transport import ZmqRouterTransport

logger = logging.getLogger(__name__)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def stop_signals_deferred() -> Iterator[None]:
    """Defer stop signals until the block ends. A thread that is started in the block never receives them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Lifeline:
    """The end of the engine: on a stop signal, or when the supervisor has ended. In the second case the lifeline also
    removes the socket folder. stop: ends this process; ``serve`` sets it to the stop of the engine's loop.

    A thread watches the supervisor. A signal at the parent's death does not suffice: its handler would wait until the
    main thread returns from a step, and before a handler is set the signal would end the process without a clean-up.
    """

    def __init__(self, supervisor: int, socket_dir: str, bound_s: float):
        self._socket_dir = socket_dir
        self._bound_s = bound_s
        self.stop: Callable[[], None] = lambda: sys.exit(0)
        self.catch_signals()
        supervisor_fd = os.pidfd_open(supervisor) if os.getppid() == supervisor else None
        with stop_signals_deferred():
            threading.Thread(target=self._watch, args=(supervisor_fd,), daemon=True).start()

    def catch_signals(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: self.stop())

    def _watch(self, supervisor_fd: int | None) -> None:
        if supervisor_fd is not None:
            select.select([supervisor_fd], [], [])
        logger.error("the supervisor is gone: stopping")
        ipc_dir.remove(self._socket_dir)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(self._bound_s)  # time for an orderly end
        os._exit(1)


def load(config: EngineConfig, lifeline: Lifeline, show: ShowLoading) -> Runner:
    """Load the model. show: called with how far this is. Raises FastDeployError or OSError if the model cannot be
    served."""
    show(Loading(LoadingStage.MODULES))
    # The import of Paddle sets signal handlers that print a trace and kill the process.
    with stop_signals_deferred():
        from fastdeploy.model_executor import paddle

        paddle.disable_signal_handler()
        lifeline.catch_signals()
    return load_runner(config, show)


def serve(
    config: EngineConfig,
    runner: Runner,
    transport: ZmqRouterTransport,
    socket_dir: str,
    events: EventPipe,
    lifeline: Lifeline,
    reports: LoadingReports,
) -> None:
    """Report that the engine is ready, and run the engine until it is stopped."""
    from fastdeploy.engine.common_engine import CommonEngine
    from fastdeploy.engine.requests.retention import RetainedLog

    if config.faults_dir:
        from fastdeploy.faults.in_engine import install

        install(config.faults_dir)
    boot_id = uuid.uuid4().hex
    engine = CommonEngine(
        config,
        runner,
        transport,
        boot_id,
        lambda are_first: events.send("commit", are_first=are_first),
        retained_log=RetainedLog(ipc_dir.retained_log(socket_dir)),
    )
    lifeline.stop = engine.stop
    reports(Loading(LoadingStage.WARM_UP))
    engine.scheduler.pacer.warm_up(runner, config.max_num_seqs)
    collect_rarely()
    reports.end()
    events.send("ready", boot_id=boot_id, fleet_endpoint=transport.fleet_endpoint)
    try:
        engine.run()
    finally:
        transport.close()
        runner.close()


def listen(config: EngineConfig, socket_dir: str, fleet_key: str | None) -> ZmqRouterTransport:
    """Open the engine's socket. Raises InvalidField if the fleet endpoint cannot be used."""
    try:
        return ZmqRouterTransport(ipc_dir.endpoint(socket_dir), config.fleet_endpoint, fleet_key)
    except zmq.ZMQError as error:
        raise InvalidField("fleet_endpoint", f"cannot listen on {config.fleet_endpoint}: {error}") from error


def _named_by_flag(error: Exception) -> Exception:
    """Return ``error``. For a bad setting, return an error that names the flag."""
    if isinstance(error, InvalidField) and error.field in EngineConfig.__struct_fields__:
        return FastDeployError("--" + error.field.replace("_", "-") + str(error).removeprefix(error.field))
    return error


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="EngineConfig as JSON")
    parser.add_argument("--socket-dir", required=True, help="private folder for the socket")
    parser.add_argument("--supervisor", type=int, required=True, help="process id of the parent")
    parser.add_argument("--event-fd", type=int, required=True, help="inherited pipe for events to the supervisor")
    parser.add_argument("--lost-commit", action="store_true", help="an earlier engine had other weights")
    parser.add_argument("--bound-s", type=float, default=10.0, help="seconds for a stop after the supervisor has ended")
    args = parser.parse_args()
    setup_logging("engine")
    events = EventPipe(args.event_fd)
    reports = LoadingReports(events, ipc_dir.loading_file(args.socket_dir))
    lifeline = Lifeline(args.supervisor, args.socket_dir, args.bound_s)
    config = from_json(args.config, EngineConfig)
    if args.lost_commit:
        config = msgspec.structs.replace(config, lost_commit=True)
    try:
        fleet_key = pop_fleet_key(os.environ)
        require_fleet_key(config.fleet_endpoint, fleet_key)
        runner = load(config, lifeline, reports)
        transport = listen(config, args.socket_dir, fleet_key)
    except (FastDeployError, OSError) as error:
        return events.refuse(_named_by_flag(error))
    serve(config, runner, transport, args.socket_dir, events, lifeline, reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
