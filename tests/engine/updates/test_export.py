"""Exports of the weights that serve, and the question for a request that an engine may know."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest

from fastdeploy.core import weight_source
from fastdeploy.core.errors import OutOfSpace
from fastdeploy.core.weight_source import FileSource
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import PROMPT, Harness, one_running


@pytest.fixture
def harness(tmp_path) -> Harness:
    return Harness(upload_dir=str(tmp_path))


def test_an_export_is_a_source_for_another_engine(harness, tmp_path):
    harness.update("/w5", version="v5")
    reply = harness.ask(m.ExportWeightsArgs(), rounds=3)
    export = reply.result
    assert reply.failure is None and (export["version"], export["weight_epoch"]) == ("v5", 1)
    assert Path(export["path"]).parent == tmp_path and os.path.getsize(export["path"]) == export["nbytes"]
    other = Harness(upload_dir=str(tmp_path))
    report = other.ask(m.UpdateWeightsArgs(FileSource(export["path"]), fingerprint=export["fingerprint"]), rounds=3)
    assert report.failure is None and other.runner.weights == 5


def test_steps_go_on_during_an_export(tmp_path):
    h = one_running(20, upload_dir=str(tmp_path))
    h.runner.may_stage.clear()
    call = h.call(m.ExportWeightsArgs())
    h.run_rounds(25)
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20) and h.reply(call) is None
    h.runner.may_stage.set()
    h.join_staging()
    h.run_rounds(2)
    assert h.reply(call).failure is None


def test_an_export_in_whose_middle_the_weights_get_another_label_is_refused_and_removed(harness, tmp_path):
    harness.runner.may_stage.clear()
    call = harness.call(m.ExportWeightsArgs())
    harness.run_rounds()
    harness.ask(m.SetVersionArgs("other"))
    harness.runner.may_stage.set()
    harness.join_staging()
    harness.run_rounds(2)
    assert harness.reply(call).failure.code == "update_in_progress" and os.listdir(tmp_path) == []


def test_the_file_of_an_export_that_came_too_late_is_removed(harness, tmp_path):
    harness.runner.may_stage.clear()
    call = harness.call(m.ExportWeightsArgs(timeout_s=5.0))
    harness.run_rounds()
    harness.now += 5.1
    harness.run_rounds(2)
    assert harness.reply(call).failure.code == "staging_timeout"
    harness.runner.may_stage.set()
    harness.join_staging()
    harness.run_rounds(2)
    assert os.listdir(tmp_path) == []


def test_weights_that_sleep_are_not_exported(harness):
    harness.ask(m.SleepArgs(("weight",)), rounds=4)
    assert harness.failure(m.ExportWeightsArgs()).code == "wrong_order"


def test_an_export_takes_the_next_folder_where_the_first_has_no_room(tmp_path, monkeypatch):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(weight_source, "upload_folders", lambda upload_dir: tuple(map(str, folders)))

    class FirstIsFull(FakeRunner):
        def export(self, path: str, tensors: Collection[str] = ()) -> int:
            if "first" in path:
                raise OutOfSpace("full")
            return super().export(path, tensors)

    export = Harness(FirstIsFull()).ask(m.ExportWeightsArgs(), rounds=3).result
    assert Path(export["path"]).parent == folders[1] and os.listdir(folders[0]) == []


def test_an_engine_knows_requests_that_run_and_results_that_are_kept():
    h = Harness()

    def known(request_id: str) -> bool:
        return h.ask(m.RetainedArgs(request_id)).result["known"]

    h.add("plain", PROMPT, max_tokens=50)
    h.add("kept-0", PROMPT, max_tokens=3, retain_s=60.0, group="kept", fingerprint="f")
    h.run_rounds(2)
    assert known("plain") and known("kept") and known("kept-0") and not known("other")
    h.run_out()
    assert not known("plain") and known("kept") and known("kept-0")
    h.now += 61.0
    h.run_rounds()
    assert not known("kept")


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_export_needs_a_positive_timeout(harness, timeout_s):
    harness.assert_refused(m.ExportWeightsArgs(timeout_s=timeout_s), "timeout_s")
