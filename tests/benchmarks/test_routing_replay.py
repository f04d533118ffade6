"""benchmarks/routing_replay.py: the figures, and (slow) a run on a small model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import routing_replay


def test_rows_differ_by_the_set_of_their_experts_in_any_layer():
    wanted = np.array([[[1, 2], [3, 4]], [[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 1], [2, 3]]])
    found = wanted.copy()
    found[0] = [[2, 1], [4, 3]]  # another order
    found[1, 0] = [1, 3]
    assert routing_replay.differing([found[:3], found[3:]], [wanted[:3], wanted[3:]]) == (0.25, 0.125)


@pytest.mark.slow
def test_replay_brings_torch_nearer_and_the_scorer_needs_none(tmp_path):
    file = tmp_path / "out.json"
    args = ["--layers", "2", "--samples", "4", "--max-tokens", "16", "--json", str(file)]
    assert routing_replay.main(args) == 0
    rows = {(row["trainer"], row["replay"]): row for row in json.loads(file.read_text())["rows"]}
    for trainer in ("torch, float32", "torch, bfloat16"):
        own, replayed = rows[trainer, False], rows[trainer, True]
        assert own["experts_differ"] > replayed["experts_differ"] == 0
        assert own["kl"] > replayed["kl"] > 0
    assert all(rows["`fastdeploy.rl.scoring`", replay]["differ"] == 0 for replay in (False, True))
