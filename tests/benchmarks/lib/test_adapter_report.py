"""The tables of adapters.py, on rounds small enough to compute by hand."""

from __future__ import annotations

import pytest

from benchmarks.lib.adapter_decoding import Round, summarize
from benchmarks.lib.adapter_report import BASE_HEADER, DECODING_HEADER, TENANTS_HEADER, Results, without
from benchmarks.lib.roofline import Machine
from benchmarks.lib.tenants import LIVE, QUIET, PhaseGaps
from benchmarks.lib.timeline import StreamLog, TokenEvent


def rounds(*steps: float) -> list[Round]:
    return [Round(10, step) for step in steps]


def results(**more: dict[int, list[Round]]) -> Results:
    """Return results of two engines: the machine is twice as slow in the second round."""
    found = Results(step_bytes=800, adapter_bytes=50, probes=[Machine(1000.0, None)] * 3)
    found.rounds = {
        "ours": {4: rounds(1.25, 2.5, 1.25), 0: rounds(1.0, 2.0, 1.0)},
        without("ours"): {0: rounds(1.0, 1.6, 1.0)},
        "peer": {4: rounds(2.5, 7.5, 2.5), 0: rounds(2.0, 4.0, 2.0)},
        without("peer"): {0: rounds(2.0, 2.0, 1.0)},
        **more,
    }
    return found


def decoding(found: Results, row: int) -> dict[str, str]:
    return dict(zip(DECODING_HEADER, found.decoding_rows()[row], strict=True))


def test_a_row_has_the_median_speed_and_the_median_ratio_of_the_rounds():
    rows = [decoding(results(), row) for row in range(4)]
    assert [(row["engine"], row["adapters"]) for row in rows] == [
        ("ours", "base only"), ("ours", "4"), ("peer", "base only"), ("peer", "4")
    ]  # fmt: skip
    assert (rows[1]["tok/s"], rows[1]["from - to"], rows[1]["ms per step"]) == ("8.0", "4.0 - 8.0", "1250.0")
    assert (rows[0]["of base only"], rows[1]["of base only"]) == ("1.000", "0.800")
    assert (rows[1]["ratio"], rows[2]["ratio"], rows[3]["ratio"]) == ("1.00", "2.00", "2.00")


def test_the_bound_adds_only_the_time_to_read_the_adapters():
    row = decoding(results(), 1)
    assert row["bound"] == f"{1.0 / (1.0 + 4 * 50 / 1000):.3f}"
    assert row["of read bandwidth"] == f"{(800 + 4 * 50) / 1.25 / 1000:.0%}"


def test_without_a_probe_only_the_bound_and_the_share_are_missing():
    found = results()
    found.probes = []
    row = decoding(found, 1)
    assert (row["bound"], row["of read bandwidth"], row["of base only"]) == ("-", "-", "0.800")


def test_base_requests_are_compared_with_those_of_the_server_without_adapters():
    row = dict(zip(BASE_HEADER, results().base_rows()[0], strict=True))
    assert row == {
        "engine": "ours",
        "tok/s without adapters": "10.0",
        "tok/s with adapters loaded": "10.0",
        "with / without": "1.000",
        "from - to": "0.800 - 1.000",
    }


def test_rounds_without_figures_give_dashes_and_disturb_no_other_row():
    found = results(ours={4: [*rounds(1.25), Round(10, 0.0, ("refused",))], 0: rounds(1.0, 2.0, 1.0)})
    assert set(found.decoding_rows()[1][2:]) == {"-"}
    assert decoding(found, 0)["tok/s"] == "10.0" and decoding(found, 3)["ratio"] == "-"
    assert found.to_json()["decoding"]["ours"]["4"].keys() == {"rounds"}


def test_without_its_second_server_an_engine_lacks_only_the_comparison_of_base_requests():
    found = results()
    del found.rounds[without("peer")]
    assert decoding(found, 3)["ratio"] == "2.00"
    assert found.base_rows()[1] == ("peer", *"-" * 4)


def test_the_longest_gap_is_a_multiple_of_the_median_before():
    found = results()
    found.tenants["ours"] = [PhaseGaps(QUIET, (0.1, 0.1, 0.4), (2.0,)), PhaseGaps(LIVE, (0.1, 0.15), (0.3, 0.5, 0.4))]
    rows = [dict(zip(TENANTS_HEADER, row, strict=True)) for row in found.tenant_rows()]
    assert (rows[0]["it took ms"], rows[0]["longest / median before"]) == ("-", "4.00")
    assert (rows[1]["it took ms"], rows[1]["longest ms"], rows[1]["longest / median before"]) == (
        "400.0", "150.0", "1.50"
    )  # fmt: skip


def stream(*times: float) -> StreamLog:
    return StreamLog("r", 0.0, 200, [TokenEvent(at, [1]) for at in times], [(times[-1], "length")], done_markers=1)


def test_the_step_of_a_round_is_taken_while_all_streams_decode():
    early, late = stream(0.0, 9.0, 10.0, 11.0), stream(9.0, 10.0, 11.0, 12.0)
    assert summarize([early, late], 4) == Round(2, pytest.approx(1.0))


def test_streams_that_never_decode_at_the_same_time_have_no_step():
    assert summarize([stream(0.0, 1.0), stream(2.0, 3.0)], 2) == Round(2, 0.0)


def test_a_stream_with_too_few_tokens_is_an_error():
    [error] = summarize([stream(0.0, 1.0)], 3).errors
    assert "2 of 3 tokens" in error
