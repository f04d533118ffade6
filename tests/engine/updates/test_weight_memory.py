"""Weights that do not serve are freed at once, without Python's garbage collector (see collector.py)."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.testing.checkpoints import write_checkpoint
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.staging import WeightStaging
from support.harness import Harness
from support.specs import SPECS


class WatchedRunner(ModelRunner):
    """A real runner with weak references to all weights that it staged and committed."""

    def __init__(self, *args, **settings):
        self.seen: list[weakref.ref] = []
        self.may_stage = threading.Event()
        self.may_stage.set()
        super().__init__(*args, **settings)

    def begin_update(self, partial: bool, delta: bool = False):
        staging = super().begin_update(partial, delta)
        self.seen.append(weakref.ref(staging))
        return staging

    def commit(self, weights) -> None:
        super().commit(weights)
        self.seen += [weakref.ref(weights.weights), *(weakref.ref(layer) for layer in weights.weights.layers)]

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.seen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights") / "qwen2", SPECS["qwen2"])


@pytest.fixture
def h(folder) -> Harness:
    gc.collect()
    gc.disable()
    yield Harness(WatchedRunner(str(folder), num_blocks=40, dtype="float32"))
    gc.enable()


def test_an_update_leaves_one_set_of_weights(h, folder):
    one_set = h.runner.alive
    for _ in range(3):
        assert h.update(folder).failure is None
        assert h.runner.alive == one_set


def test_a_session_and_a_partial_update_leave_one_set_of_weights(h, folder):
    one_set = h.runner.alive
    assert h.update(folder, partial=True).failure is None
    assert h.runner.alive == one_set
    session = h.ask(m.BeginUpdateArgs(), rounds=2).result["session_id"]
    assert h.ask(m.UpdatePartArgs(session, FolderSource(str(folder))), rounds=3).failure is None
    assert h.ask(m.CommitUpdateArgs(session), rounds=3).failure is None
    assert h.runner.alive == one_set


def test_refused_and_aborted_weights_are_freed(h, folder):
    one_set = h.runner.alive
    wrong = {"model.embed_tokens.weight": "0" * 64}
    for _ in range(2):
        assert h.update(folder, checksums=wrong, verify_checksum=True).failure.code == "weight_update_refused"
        assert h.runner.alive == one_set
    session = h.ask(m.BeginUpdateArgs(), rounds=2).result["session_id"]
    assert h.ask(m.UpdatePartArgs(session, FolderSource(str(folder))), rounds=3).failure is None
    h.ask(m.AbortUpdateArgs(session), rounds=3)
    assert h.runner.alive == one_set


def test_weights_aborted_at_the_end_of_staging_are_freed(h, folder, monkeypatch):
    one_set = h.runner.alive
    finish, may_end = WeightStaging.finish, threading.Event()

    def held_up(staging):
        staged = finish(staging)
        h.runner.seen.append(weakref.ref(staged.weights.weights))
        assert may_end.wait(30)
        return staged

    monkeypatch.setattr(WeightStaging, "finish", held_up)
    call = h.call(m.UpdateWeightsArgs(FolderSource(str(folder))))
    h.engine.run_once(block=False)
    h.call(m.AbortUpdateArgs())
    h.engine.run_once(block=False)
    may_end.set()
    h.join_staging()
    h.run_rounds(3)
    assert h.reply(call).failure is not None
    assert h.runner.alive == one_set


def test_sleep_frees_the_weights(h, folder):
    assert h.update(folder).failure is None
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure is None
    assert h.runner.alive == 0
    assert h.ask(m.WakeArgs(("weight",)), rounds=2).failure is None


def test_metrics_tell_the_memory_of_the_standby_copy(folder):
    h = Harness(WatchedRunner(str(folder), num_blocks=40, dtype="float32", standby_weights="on"))
    assert h.metric("standby_weight_bytes") == 0
    assert h.update(folder).failure is None
    weights = h.runner.weights.values.values()
    assert h.metric("standby_weight_bytes") == sum(w.nbytes for w in weights if hasattr(w, "out_features"))
    assert h.ask(m.SleepArgs(("weight",)), rounds=5).failure is None
    assert h.metric("standby_weight_bytes") == 0
