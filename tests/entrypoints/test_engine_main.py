"""The engine process, until the engine's loop begins."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

from fastdeploy.core.config import EngineConfig
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints import engine_main as main
from support.fake_runner import FakeRunner


def test_the_engine_reports_ready_after_warm_up_and_collector_settings(monkeypatch, tmp_path):
    runner, order = FakeRunner(), []
    monkeypatch.setattr(main, "collect_rarely", lambda: order.append(f"collector, after {len(runner.plans)} steps"))
    monkeypatch.setattr(CommonEngine, "run", lambda engine: order.append("run"))
    events = SimpleNamespace(send=lambda kind, **_: order.append(kind))
    main.serve(EngineConfig(model="fake"), runner, str(tmp_path), events, SimpleNamespace())
    assert order == ["collector, after 3 steps", "ready", "run"]


SIGNALLED = """
import os, signal, threading
from fastdeploy.entrypoints.engine_main import stop_signals_deferred
signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
with stop_signals_deferred():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)
    print("end of the block", flush=True)
"""


def test_a_stop_signal_is_deferred_and_reaches_no_thread_that_the_block_started():
    """The engine imports Paddle in such a block, because a signal handler of Paddle would kill the process."""
    done = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["end of the block", "handled"], done.stderr
