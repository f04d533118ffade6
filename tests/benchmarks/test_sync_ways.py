"""benchmarks/sync_ways.py: the command, on made-up runs and on a real one."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks.lib.ways import runs
from benchmarks.lib.ways.record import RUN, WAYS, Way, read
from benchmarks.lib.ways.runs import folder_of
from benchmarks.sync_ways import main, parse, plan_of
from support.markdown import ROOT
from support.sync_run import MadeUpRun


def write_runs(out, *made: MadeUpRun) -> None:
    """Write finished runs where the command looks for them, with the settings that it has by default."""
    for run in made:
        folder = run.write(folder_of(out, run.way, run.seed))
        done = json.loads((folder / RUN).read_text()) | {"settings": plan_of(parse([])).settings}
        (folder / RUN).write_text(json.dumps(done))


@pytest.fixture
def no_runs(monkeypatch):
    def run(*args) -> None:
        raise AssertionError("a run was made")

    monkeypatch.setattr("benchmarks.sync_ways.run", run)


def test_finished_runs_are_not_made_again(tmp_path, no_runs, capsys):
    write_runs(tmp_path, *(MadeUpRun(way, seed) for way in WAYS[:2] for seed in range(2)))
    assert main(["--ways", "synchronous,wait", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert "| wait |" in capsys.readouterr().out


@pytest.mark.parametrize("spoil", ["settings", "unfinished"])
def test_a_run_that_is_not_complete_or_has_other_settings_is_made_again(tmp_path, monkeypatch, spoil):
    write_runs(tmp_path, *(MadeUpRun(WAYS[0], seed) for seed in range(2)))
    folder = folder_of(tmp_path, WAYS[0], 1)
    if spoil == "settings":
        MadeUpRun(WAYS[0], 1).write(folder)
    else:
        (folder / RUN).unlink()
    again: list[tuple[Way, int]] = []

    def run(plan, way, seed, into) -> None:
        again.append((way, seed))
        write_runs(tmp_path, MadeUpRun(way, seed))

    monkeypatch.setattr("benchmarks.sync_ways.run", run)
    assert main(["--ways", "synchronous", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert again == [(WAYS[0], 1)]


def test_one_unexplained_token_fails_the_command(tmp_path, no_runs, capsys):
    made = MadeUpRun(WAYS[0])
    made.times.append((999.0, 1, 4))
    made.engine["generated"] += 1
    write_runs(tmp_path, made)
    assert main(["--ways", "synchronous", "--seeds", "1", "--out", str(tmp_path)]) == 1
    assert "WRONG: synchronous, seed 0: 1 tokens in all are unexplained" in " ".join(capsys.readouterr().err.split())


def test_a_mismatch_where_there_must_be_none_fails_the_command(tmp_path, no_runs):
    write_runs(tmp_path, MadeUpRun(WAYS[0], mismatch=1e-6))
    assert main(["--ways", "synchronous", "--seeds", "1", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_tables_and_plots_go_into_the_docs(tmp_path, no_runs):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(ROOT / "docs" / "sync-ways.md", docs)
    write_runs(tmp_path / "out", MadeUpRun(WAYS[0]))
    assert main(["--plot-only", "--seeds", "1", "--out", str(tmp_path / "out"), "--docs", str(docs)]) == 0
    assert "| synchronous | " in (docs / "sync-ways.md").read_text()
    pictures = {path.name for path in docs.glob("*.png")}
    assert pictures and all(f"]({name})" in (docs / "sync-ways.md").read_text() for name in pictures)


def test_without_a_finished_run_there_is_nothing_to_plot(tmp_path, capsys):
    assert main(["--plot-only", "--out", str(tmp_path)]) == 2
    assert "has no finished run with these settings" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.processes
def test_every_token_of_a_real_run_is_explained(tmp_path):
    """By the way in which most tokens can get lost: abort, with automatic resume."""
    small = "--group 4 --groups 2 --concurrency 32 --eval-problems 8 --eval-every 6"  # many are aborted at each update
    arguments = ["--ways", "abort", "--seeds", "1", "--updates", "12", "--seconds", "300", "--trainer", small]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    record = read(runs.folder_of(tmp_path, Way("abort"), 0))
    assert record.engine.generated > 0 and len(record.updates) == 12
    assert any(rollout.resumes for rollout in record.rollouts) and record.engine.recomputed > 0
