"""The engine process, up to its loop."""

from __future__ import annotations

from types import SimpleNamespace

from fake_runner import FakeRunner
from fastdeploy.config import EngineConfig
from fastdeploy.engine import main
from fastdeploy.engine.common_engine import CommonEngine


def test_nobody_is_told_that_it_is_ready_before_it_is_warm_and_its_collector_tamed(monkeypatch, tmp_path):
    runner, order = FakeRunner(), []
    monkeypatch.setattr(main, "collect_rarely", lambda: order.append(f"collector, after {len(runner.plans)} steps"))
    monkeypatch.setattr(CommonEngine, "run", lambda engine: order.append("run"))
    events = SimpleNamespace(send=lambda kind, **_: order.append(kind))
    main.serve(EngineConfig(model="fake"), runner, str(tmp_path), events, SimpleNamespace())
    assert order == ["collector, after 3 steps", "ready", "run"]
