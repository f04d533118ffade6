"""The tables that compare.py writes for docs/benchmarks.md."""

from __future__ import annotations

from benchmarks.lib.comparison import EngineRuns, LoadComparison
from benchmarks.lib.costs import Costs
from benchmarks.lib.docs_tables import cost_table, machine_kind, speed_table
from benchmarks.lib.loads import Figures, Groups, Prefill, Streams
from benchmarks.lib.roofline import Machine, Shape

SHAPE = Shape(hidden=4, inner=8, layers=2, heads=2, kv_heads=1, head_dim=2, vocab=10)  # 656 bytes a step
PROBES = (Machine(1000.0, None),)


def figures(speed: float, first: float = 1.0) -> Figures:
    return Figures(1.0, 10, speed, first, first, first, 1.312, first)


def cells(table: str, row: int = 0) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def test_a_row_has_every_engine_and_the_ratio_to_the_fastest_peer():
    runs = {"ours": [30.0, 33.0], "vllm": [15.0, 15.0], "llamacpp": [20.0, 30.0]}
    engines = tuple(EngineRuns(name, tuple(map(figures, speeds))) for name, speeds in runs.items())
    table = speed_table([LoadComparison(Streams("8", 8, 32, 64, 16), engines, PROBES)], SHAPE)
    assert "| FastDeploy | vLLM | llama.cpp |" in table
    first, *speeds, best, used = cells(table)
    assert first == "8 streams, 32 tokens in, 64 out"
    assert speeds == ["31.5 tok/s, 1312.0 ms", "15 tok/s, 1312.0 ms", "25 tok/s, 1312.0 ms"]
    assert best == "1.30 (1.10 to 1.50)" and used == "50, 50, 50 % of least time"


def test_a_prefill_is_judged_by_its_first_token_too():
    engines = (EngineRuns("ours", (figures(30, 2.0),)), EngineRuns("vllm", (figures(20, 3.0),)))
    row = cells(speed_table([LoadComparison(Prefill("prefill", 8, 512, 32, 8), engines, PROBES)], SHAPE))
    assert row[1] == "30 tok/s, first token 2.00 s"
    assert row[3:] == ["1.50 (1.50 to 1.50); first token 1.50 sooner", "-"]


def test_an_engine_that_was_removed_later_has_a_dash_in_the_loads_that_it_missed():
    ours, peer = (EngineRuns(name, (figures(30),)) for name in ("ours", "vllm"))
    both = LoadComparison(Streams("1", 1, 32, 64, 2), (ours, peer), PROBES)
    alone = LoadComparison(Groups("groups", 4, 512, 64, 8), (ours,), PROBES)
    row = cells(speed_table([both, alone], SHAPE), 1)
    assert row[2] == row[4] == "-"


def test_an_engine_without_updates_has_dashes_in_their_rows():
    ours = Costs("ours", "abc", 7.61, 3_000_000_000, 4_000_000_000, 0.349, 5_000_000_000)
    table = cost_table([ours, Costs("openvino", "1", 9.0, 2_000_000_000, 2_500_000_000)])
    assert cells(table, 0) == ["ready after", "7.6 s", "9.0 s"]
    assert cells(table, 3) == ["update from a folder, paused", "0.35 s", "-"]
    assert cells(table, 4) == ["most memory in an update", "5.00 GB", "-"]


def test_the_kind_of_a_machine_is_its_best_instruction_set():
    assert machine_kind({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}) == "AMX"
    assert machine_kind({"avx2", "avx512f", "avx512_bf16"}) == "AVX512-BF16"
    assert machine_kind({"avx2", "avx512f"}) == "AVX-512"
