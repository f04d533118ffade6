from __future__ import annotations

import json

from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison, machine_line
from benchmarks.lib.loads import Figures, Groups, Streams
from benchmarks.lib.roofline import Machine, Shape

SHAPE = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)  # 656 bytes a step
LOAD = Streams("8", 8, 32, 64, 16)


def figures(speed: float, first: float = 1.0, token_s: float = 1.0) -> Figures:
    return Figures(1.0, 10, speed, first, first, first, token_s, first)


def compared(
    *engines: tuple[str, list[Figures]], probes: tuple[Machine, ...] = (Machine(1000.0, 1.0),)
) -> LoadComparison:
    return LoadComparison(LOAD, tuple(EngineRuns(name, tuple(runs)) for name, runs in engines), probes)


def cells(found: LoadComparison, engine: int) -> dict[str, str]:
    return dict(zip(HEADER, found.rows(SHAPE)[engine], strict=True))


def test_the_ratio_is_the_median_of_the_ratios_of_the_repeats():
    # The machine is three times slower in repeats 2 and 3; the first engine is always twice as fast.
    found = compared(
        ("ours", [figures(30), figures(10), figures(10)]), ("peer", [figures(15), figures(5), figures(15)])
    )
    assert found.engines[0].over(found.engines[1]) == 2.0
    assert cells(found, 0)["ratio"] == "1.00" and cells(found, 1)["ratio"] == "2.00"


def test_sooner_is_the_peers_time_to_the_first_token_over_ours():
    found = compared(("ours", [figures(1, first=0.5)]), ("peer", [figures(1, first=0.75)]))
    assert cells(found, 1)["sooner"] == "1.50"
    assert cells(found, 1)["first token s: mean"] == "0.750"


def test_a_row_shows_the_median_and_the_spread_of_the_repeats():
    row = cells(compared(("ours", [figures(30), figures(10), figures(12)])), 0)
    assert (row["tok/s"], row["from - to"]) == ("12.0", "10.0 - 30.0")


def test_the_roofline_is_that_of_the_machine_as_probed_in_this_run():
    runs = [figures(1, token_s=1.312)]
    assert cells(compared(("ours", runs)), 0)["of the roofline"] == "50% of read bandwidth"
    slower = (Machine(500.0, 1.0), Machine(500.0, 1.0), Machine(1000.0, 1.0))
    assert cells(compared(("ours", runs), probes=slower), 0)["of the roofline"] == "100% of read bandwidth"


def test_without_a_probe_only_the_roofline_is_missing():
    found = compared(("ours", [figures(30)]), probes=())
    assert cells(found, 0)["of the roofline"] == "-" and cells(found, 0)["tok/s"] == "30.0"
    assert "no roofline" in machine_line(())


def test_the_machine_is_described_with_what_was_probed():
    assert "TFLOP/s" not in machine_line([Machine(2e10, None)]) and "20.0 GB/s" in machine_line([Machine(2e10, None)])
    assert "3.00 TFLOP/s" in machine_line([Machine(2e10, 3e12)])


def test_a_figure_that_a_load_does_not_have_is_a_dash():
    runs = (Figures(2.0, 10, 5.0),)
    found = LoadComparison(Groups("groups", 4, 8, 8, 8), (EngineRuns("ours", runs), EngineRuns("peer", runs)), ())
    row = cells(found, 1)
    assert {row[name] for name in ("ms per token", "p50", "sooner", "in the engine")} == {"-"}
    assert row["ratio"] == "1.00"


def test_a_run_without_a_time_between_tokens_has_no_share_of_the_roofline():
    hidden = Figures(1.0, 10, 5.0, 1.0, 1.0, 1.0, None, 1.0)
    row = cells(compared(("ours", [figures(1), hidden])), 0)
    assert (row["of the roofline"], row["ms per token"]) == ("-", "1000.0")


def test_a_run_with_errors_has_no_share_of_the_roofline_and_its_errors_name_the_engine():
    broken = Figures(1.0, 10, 5.0, errors=("HTTP 500",))
    found = compared(("ours", [figures(1)]), ("peer", [broken, broken]))
    assert found.errors == ["peer: HTTP 500"]
    assert cells(found, 1)["of the roofline"] == "-"


def test_the_times_between_tokens_of_the_engine_and_of_the_client_have_two_columns():
    found = LoadComparison(LOAD, (EngineRuns("ours", (figures(1, token_s=0.04),), (0.035,)),), ())
    assert (cells(found, 0)["ms per token"], cells(found, 0)["in the engine"]) == ("40.0", "35.0")


def test_the_json_has_every_run_and_every_probe():
    found = compared(("ours", [figures(30), figures(10)]), ("peer", [figures(15), figures(5)]))
    content = json.loads(json.dumps(found.to_json()))
    assert content["load"]["kind"] == "Streams" and content["load"]["bound"] == "read bandwidth"
    assert content["probes"] == [{"read": 1000.0, "peak": 1.0}]
    assert [run["tokens_per_s"] for run in content["engines"]["peer"]["runs"]] == [15, 5]
