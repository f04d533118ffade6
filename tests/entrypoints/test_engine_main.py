"""The engine process, until the engine's loop begins."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.entrypoints import engine_main as main
from fastdeploy.entrypoints.loading_progress import LoadingReports
from support.fake_runner import FakeRunner


def test_the_engine_reports_ready_after_warm_up_and_collector_settings(monkeypatch, tmp_path):
    runner, order = FakeRunner(), []
    monkeypatch.setattr(main, "collect_rarely", lambda: order.append(f"collector, after {len(runner.plans)} steps"))
    monkeypatch.setattr(CommonEngine, "run", lambda engine: order.append("run"))
    events = SimpleNamespace(send=lambda kind, **_: order.append(kind))
    config, reports = EngineConfig(model="fake"), LoadingReports(events, str(tmp_path / "loading.json"))
    main.serve(
        config, runner, main.listen(config, str(tmp_path), None), str(tmp_path), events, SimpleNamespace(), reports
    )
    assert runner.plans and order == ["loading", f"collector, after {len(runner.plans)} steps", "ready", "run"]
    assert not (tmp_path / "loading.json").exists(), "the API servers would say that it still loads"


def test_the_engine_tells_the_supervisor_where_it_listens_for_the_fleet(monkeypatch, tmp_path):
    sent: dict[str, str] = {}
    monkeypatch.setattr(CommonEngine, "run", lambda engine: None)
    events = SimpleNamespace(send=lambda kind, **fields: sent.update(fields))
    config = EngineConfig(model="fake", fleet_endpoint="tcp://127.0.0.1:0")
    transport, reports = main.listen(config, str(tmp_path), "k" * 40), LoadingReports(events, str(tmp_path / "loading"))
    main.serve(config, FakeRunner(), transport, str(tmp_path), events, SimpleNamespace(), reports)
    assert sent["fleet_endpoint"] == transport.fleet_endpoint != config.fleet_endpoint


def test_a_fleet_endpoint_that_cannot_be_used_is_named(tmp_path):
    config = EngineConfig(model="fake", fleet_endpoint="tcp://192.0.2.1:9")  # an address of no machine
    with pytest.raises(InvalidField, match="192.0.2.1") as info:
        main.listen(config, str(tmp_path), "k" * 40)
    assert info.value.field == "fleet_endpoint"


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
