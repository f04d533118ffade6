"""The rows of a comparison, and the formulas of the bounds on numbers small enough to compute by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.lib.comparison import HEADER, EngineRuns, LoadComparison, machine_line
from benchmarks.lib.loads import Figures, Groups, Streams
from benchmarks.lib.roofline import Machine, Shape, decode_share, group_share, middle, prefill_share

SHAPE = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)  # 656 bytes a step
LOAD = Streams("8", 8, 32, 64, 16)


def figures(speed: float, first: float = 1.0, token_s: float = 1.0) -> Figures:
    return Figures(1.0, 10, speed, first, first, first, token_s, first)


def compared(
    *engines: tuple[str, list[Figures]], probes: tuple[Machine, ...] = (Machine(1000.0, 1e6),)
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


def test_the_roofline_is_that_of_the_machine_as_probed_in_this_run():
    runs = [figures(1, token_s=1.312)]
    assert cells(compared(("ours", runs)), 0)["of the roofline"] == "50% of least time"
    slower = (Machine(500.0, 1e6), Machine(500.0, 1e6), Machine(1000.0, 1e6))
    assert cells(compared(("ours", runs), probes=slower), 0)["of the roofline"] == "100% of least time"


def test_the_probes_are_described_by_their_median_and_range():
    text = machine_line([Machine(1e9, None), Machine(4e9, 3e12), Machine(2e9, 1e12)])
    assert "reads 2.0 GB/s (1.0 to 4.0) and multiplies 2.00 TFLOP/s in bfloat16 (1.00 to 3.00)" in text
    assert "multiplies" not in machine_line([Machine(1e9, None)])


def test_a_figure_that_a_load_does_not_have_is_a_dash():
    runs = (Figures(2.0, 10, 5.0),)
    found = LoadComparison(
        Groups("groups", 4, 8, 8, 8), (EngineRuns("ours", runs), EngineRuns("peer", runs)), (MACHINE,)
    )
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


# Per layer: q 4x4, k and v 2x4 each, o 4x4: 48; gate, up, down 3x8x4: 96. Two layers: 288. Head: 10x4.
SMALL = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)
MACHINE = Machine(read=1000.0, peak=10_000.0)


def test_a_decode_step_reads_the_linears_and_the_head_in_two_bytes_each():
    assert SMALL.layer_parameters == 288
    assert SMALL.step_bytes(1) == SMALL.step_bytes(8) == 2 * (288 + 40)


# As SMALL, but 4 experts of the same width, 2 for each token. Per layer: attention 48, router 16, an expert 96.
MIXTURE = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10, experts=4, top_k=2)


def test_a_decode_step_of_a_mixture_reads_each_expert_that_a_token_chose_once():
    rest = 2 * (48 + 16) + 40
    assert MIXTURE.step_bytes(1) == 2 * (rest + 2 * 2 * 96)
    assert MIXTURE.step_bytes(2) == 2 * (rest + 2 * 3 * 96)  # each is not chosen with the probability 1/4
    assert MIXTURE.step_bytes(100) == 2 * (rest + 2 * 4 * 96)
    assert MIXTURE.step_operations(20) == 2 * 20 * (rest + 2 * 2 * 96)
    assert MIXTURE.layer_parameters == 2 * (48 + 16 + 2 * 96)


def test_a_prefill_multiplies_every_token_and_attends_to_half_of_all_pairs():
    # 2 x 288 x 5, and per layer and head: q.k and p.v of 5^2 / 2 pairs, 2 dimensions, 2 operations.
    assert SMALL.prefill_operations(5) == 2 * 288 * 5 + 2 * 2 * (25 / 2 * 2 * 2 * 2)


def test_the_decode_share_is_one_at_the_bandwidth_and_half_at_half_the_speed():
    assert decode_share(SMALL, MACHINE, 1, 0.656) == pytest.approx(1.0)
    assert decode_share(SMALL, MACHINE, 8, 1.312) == pytest.approx(0.5)
    assert decode_share(SMALL, MACHINE, 8, 1.0, more_bytes=344) == pytest.approx(1.0)


def test_a_decode_step_of_many_rows_is_bounded_by_its_operations():
    assert SMALL.step_operations(20) == 2 * 328 * 20  # more than 0.656 s at 10,000 a second
    assert decode_share(SMALL, MACHINE, 20, 1.312) == pytest.approx(1.0)


def test_the_prefill_share_counts_all_prompts():
    seconds = 3 * SMALL.prefill_operations(5) / MACHINE.peak
    assert prefill_share(SMALL, MACHINE, 3, 5, seconds) == pytest.approx(1.0)
    assert prefill_share(SMALL, MACHINE, 3, 5, 4 * seconds) == pytest.approx(0.25)


def test_the_least_time_of_groups_counts_each_prompt_once_and_each_round_of_decoding():
    prefill = 5 * SMALL.prefill_operations(5) / 10_000
    least = prefill + 3 * 7 * 0.656  # 5 groups, 2 at a time: 3 rounds
    assert group_share(SMALL, MACHINE, 5, 2, 4, 5, 7, least) == pytest.approx(1.0)
    least = prefill + 2 * 7 * 1.312 + 7 * 0.656  # 20 rows, the last time 10
    assert group_share(SMALL, MACHINE, 5, 2, 10, 5, 7, least) == pytest.approx(1.0)


@pytest.mark.parametrize(("config", "head_dim"), [({}, 2), ({"head_dim": 3}, 3), ({"head_dim": None}, 2)])
def test_the_shape_is_that_of_config_json(tmp_path: Path, config: dict, head_dim: int):
    config = config | {
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 10,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Shape.of(tmp_path) == Shape(4, 8, 2, 2, 1, head_dim, 10)


def test_the_machine_is_the_median_of_its_probes():
    assert middle([Machine(1, 30), Machine(3, 20), Machine(2, 10)]) == Machine(2, 20)


def test_the_kv_of_a_token_is_its_keys_and_values_in_all_layers():
    assert SMALL.kv_bytes(3) == 3 * 2 * 2 * 2 * 2  # K and V, layers, head_dim, bytes


def test_without_a_peak_only_the_read_bandwidth_is_known():
    machine = Machine(1000.0, None)
    assert decode_share(SMALL, machine, 20, 0.656) == pytest.approx(1.0)
    assert prefill_share(SMALL, machine, 1, 5, 1.0) is group_share(SMALL, machine, 5, 2, 8, 5, 7, 1.0) is None
    assert middle([machine, Machine(500.0, None), Machine(500.0, None)]) == Machine(500.0, None)
