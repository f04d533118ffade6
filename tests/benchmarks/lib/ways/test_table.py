"""The tables show the runs, and go into the page between its markers."""

from __future__ import annotations

import pytest

from benchmarks.lib.ways.record import CONTROL, WAYS, read
from benchmarks.lib.ways.table import fill_in, tables
from support.markdown import ROOT
from support.sync_run import MadeUpRun


@pytest.fixture
def records(tmp_path):
    runs = [MadeUpRun(way, seed) for way in (WAYS[0], WAYS[4]) for seed in range(3)] + [
        MadeUpRun(CONTROL, mismatch=0.5)
    ]
    return [read(made.write(tmp_path / str(number))) for number, made in enumerate(runs)]


def cells(table: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows[2:]}


def test_the_table_of_ways_has_a_row_per_way_with_the_band_over_its_seeds(records):
    rows = cells(tables(records)["ways"])
    assert list(rows) == ["synchronous", "keep, recompute"], "the control run is no way"
    assert rows["synchronous"] == ["57.6 (57.5 to 57.8) %", "4", "53", "200", "200", "0.12", "1"]


def test_the_table_of_the_ledger_adds_up_the_seeds(records):
    rows = cells(tables(records)["ledger"])
    assert list(rows) == ["synchronous", "keep, recompute", "stale KV (control)"]
    assert rows["synchronous"] == [
        "1,521", "720 (47.3%)", "30 stale", "21 (1.4%)", "750 (49.3%)", "0", "36 (2.4%)"
    ]  # fmt: skip


def test_the_table_of_mismatch_has_the_control_run(records):
    rows = cells(tables(records)["mismatch"])
    assert rows["keep, recompute"] == ["480", "0", "0", "1", "240", "0", "0", "1"]
    assert rows["stale KV (control)"][:4] == ["160", "0.5", "0.05", "1.5"]


def test_the_table_of_lengths_counts_the_answers_that_ended(records):
    assert cells(tables(records)["lengths"])["synchronous"] == ["27", "30", "30", "30", "30"]


def test_a_page_is_filled_in_between_its_markers_and_nowhere_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a begins -->\nold\n<!-- a ends -->\nafter\n")
    fill_in(page, {"a": "| \\1 |\n"})
    assert page.read_text() == "before\n<!-- a begins -->\n| \\1 |\n<!-- a ends -->\nafter\n"
    with pytest.raises(ValueError, match="expected each of the markers '<!-- b begins -->'"):
        fill_in(page, {"b": ""})


def test_our_page_has_the_markers_of_all_tables(records, tmp_path):
    page = tmp_path / "sync-ways.md"
    page.write_text((ROOT / "docs" / "sync-ways.md").read_text())
    fill_in(page, tables(records))
