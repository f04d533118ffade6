"""benchmarks/quantization.py on the embedded model: the scorer with int8 agrees to the bit, the other one nearly."""

from __future__ import annotations

import json

import pytest

from benchmarks import quantization
from fastdeploy.model_executor.ops import get_ops


@pytest.mark.skipif(get_ops("bfloat16").name != "cpu", reason="there is no compiler here")
def test_it_reports_the_mismatch_of_both_scorers_and_the_costs(tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["--prompts", "24", "--running", "1,2", "--repeats", "1", "--json", str(file)]
    assert quantization.main(arguments) == 0
    report = json.loads(file.read_text())
    plain, int8 = report["mismatch"]
    assert (plain["scorer"], int8["scorer"]) == ("bfloat16", "int8")
    assert int8["differ"] == 0 and 0 < plain["kl"] <= 3.5e-4
    costs = {row["what"]: row for row in report["costs"]}
    assert list(costs) == ["decode 1, ms", "decode 2, ms", "prefill 512, ms", "update, ms", "packed linears, MB"]
    memory = costs["packed linears, MB"]
    assert 1.4 < memory["int8"] / memory["bfloat16"] < 1.6
    assert "packed linears" in capsys.readouterr().out
