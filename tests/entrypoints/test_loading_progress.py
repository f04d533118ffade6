"""The start of an engine is shown: to its supervisor and its API servers, and on the terminal or in the log."""

from __future__ import annotations

import io
import logging
import os
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.loading import Loading, LoadingStage, read_loading, write_loading
from fastdeploy.entrypoints.child import EventPipe, EventReader
from fastdeploy.entrypoints.loading_progress import LOG_S, REPORT_S, LoadingLine, LoadingReports

GB = 10**9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def weights(done: int, total: int = 4 * GB) -> Loading:
    return Loading(LoadingStage.WEIGHTS, done, total)


def test_a_state_tells_its_bytes_and_its_share():
    assert str(weights(GB)) == "reading and packing the weights: 25%, 1.0 of 4.0 GB"
    assert str(weights(10**6, 2 * 10**6)) == "reading and packing the weights: 50%, 1.0 of 2.0 MB"
    assert str(Loading(LoadingStage.WARM_UP)) == "warming up"
    assert (weights(GB).share, Loading(LoadingStage.WARM_UP).share) == (0.25, None)


def test_the_engine_reports_each_stage_and_a_long_one_now_and_then(tmp_path: Path):
    read_fd, write_fd = os.pipe()
    clock, path = Clock(), str(tmp_path / "loading.json")
    reports, reader = LoadingReports(EventPipe(write_fd), path, clock), EventReader(read_fd)
    reports(Loading(LoadingStage.PLAN))
    for done in (0, 1, 2):
        reports(weights(done * GB))
    clock.now += REPORT_S
    reports(weights(3 * GB))
    assert read_loading(path) == weights(3 * GB)
    reports(weights(4 * GB))
    assert [event["done"] / GB for event in reader.read()] == [0, 0, 3, 4], "the last one at once"
    reports.end()
    assert read_loading(path) is None and os.listdir(tmp_path) == []
    reader.close()
    os.close(write_fd)


def test_a_folder_that_is_gone_is_no_error(tmp_path: Path):
    write_loading(str(tmp_path / "gone" / "loading.json"), weights(0))
    (tmp_path / "bad").write_text("{}")
    assert read_loading(str(tmp_path / "bad")) is None


def test_a_terminal_has_one_line_that_moves_and_ends():
    out = Terminal()
    line = LoadingLine(out=out)
    line.show(weights(0))
    line.show(weights(GB))
    line.end()
    line.end()
    assert out.getvalue().count("\n") == 0
    assert out.getvalue().split("\r\x1b[K")[1:] == [f"fastdeploy: {weights(0)}", f"fastdeploy: {weights(GB)}", ""]


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_a_log_has_a_line_each_few_seconds_and_none_of_a_short_start(out, caplog):
    clock = Clock()
    line = LoadingLine(moves=not isinstance(out, Terminal), out=out, clock=clock)
    with caplog.at_level(logging.INFO):
        line.show(Loading(LoadingStage.PLAN))
        for done in (0, 1, 2, 3, 4):
            clock.now += LOG_S / 2
            line.show(weights(done * GB))
        line.end()
        clock.now += LOG_S
        line.show(Loading(LoadingStage.PLAN))
    assert [record.getMessage() for record in caplog.records] == [f"loading: {weights(n * GB)}" for n in (1, 3)]
    assert out.getvalue() == ""


def test_weights_are_read_in_pieces_when_somebody_looks(monkeypatch):
    from fastdeploy.worker import part_reading

    monkeypatch.setattr(part_reading, "PIECE_BYTES", 100)
    monkeypatch.setattr(part_reading, "stage_items", lambda ops, reader, items, stop: dict.fromkeys(items, "found"))
    sizes = {"a": 60, "b": 60, "c": 300, "d": 10, "e": 0}

    class Entry:
        dtype, offset, fd, view = "BF16", 0, 0, None

        def __init__(self, nbytes: int):
            self.nbytes = nbytes

    class Reader:
        entries = {name: Entry(nbytes) for name, nbytes in sizes.items()}

    seen: list[tuple[int, int]] = []
    stop, regions = np.zeros(1, np.int32), dict.fromkeys(sizes)
    found = part_reading.stage_tensors(None, Reader(), regions, {}, stop, lambda *state: seen.append(state))
    assert found.keys() == sizes.keys()
    assert seen == [(0, 430), (120, 430), (420, 430), (430, 430)]
