"""Both benchmarks of a step run on the embedded model, and the step's bounds are those of the roofline."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ops, step
from benchmarks.lib.roofline import Machine, Shape
from benchmarks.make_adapters import adapter_bytes
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.model_executor.ops import get_ops

ROOT = Path(__file__).resolve().parents[2]
needs_cpu_ops = pytest.mark.skipif(get_ops("bfloat16").name != "cpu", reason="there is no compiler here")


@needs_cpu_ops
def test_the_step_benchmark_reports_every_step_and_its_share_of_the_roofline(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(ops, "PROBE_ROWS", 1 << 10)
    arguments = [
        "--running",
        "1,3",
        "--context",
        "20",
        "--chunk",
        "40",
        "--repeats",
        "1",
        "--adapters",
        "2",
        "--rank",
        "4",
    ]
    told = tmp_path / "report.json"
    monkeypatch.setattr(sys, "argv", ["step", "--model", str(MODEL_DIR), *arguments, "--json", str(told)])
    step.main()
    report, shape = json.loads(told.read_text()), Shape.of(MODEL_DIR)
    assert list(report["steps"]) == [
        "decode 1",
        "decode 3",
        "decode 3, adapters 2",
        "prefill 40",
        "attention 1",
        "attention 3",
    ]
    assert all(found["ms"] >= found["best_ms"] > 0 for found in report["steps"].values())
    machine, kv, operations = Machine(**report["machine"]), shape.kv_bytes(3 * 20), shape.step_operations(3)
    nbytes = shape.step_bytes(3) + kv
    bounds = {
        "attention 3": kv / machine.read,
        "decode 3": machine.least_s(nbytes, operations),
        "decode 3, adapters 2": machine.least_s(nbytes + 2 * adapter_bytes(shape, 4), operations),
        # The peak is known with AMX or AVX512_BF16.
        "prefill 40": None if machine.peak is None else shape.prefill_operations(40) / machine.peak,
    }
    for name, least in bounds.items():
        found = report["steps"][name]
        assert found["of_roofline"] == (None if least is None else pytest.approx(least * 1e3 / found["ms"]))
    assert "prefill 40" in capsys.readouterr().out


def test_host_time_reports_the_parts_of_a_step_and_their_sum():
    arguments = ["--running", "3", "--waiting", "4", "--context", "40", "--steps", "5", "--json"]
    command = [sys.executable, "-m", "benchmarks.host_time", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    tables = json.loads(run.stdout.splitlines()[-1])
    assert list(tables) == ["0", "4"]
    for rows in tables.values():
        medians = {row["part"]: row["median"] for row in rows}
        assert {"plan", "make batch", "sampling", "outputs"} <= set(medians)
        assert 0 < medians["make batch"] < medians["host time of a step"]


def test_the_rows_of_one_adapter_are_neighbours_and_all_adapters_are_used():
    options = argparse.Namespace(running=[1, 7], adapters=[3], rank=4, context=20, chunk=40)
    steps = step.make_steps(options, Shape.of(MODEL_DIR), blocks=4)
    numbers = [chunk.served.adapter for chunk in steps["decode 7, adapters 3"].plan.chunks]
    assert numbers == sorted(numbers) and set(numbers) == {1, 2, 3}
    assert {chunk.served.adapter for chunk in steps["decode 7"].plan.chunks} == {0}
