"""benchmarks/mismatch.py: the figures, the weights, and (slow) a run on the embedded model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from benchmarks import mismatch
from benchmarks.mismatch import TRAINERS, Sample, batches


def test_the_figures_are_those_that_trl_logs():
    server, trainer = np.log([0.5, 0.25, 0.1]), np.log([0.5, 0.5, 0.05])
    figures = mismatch.difference(trainer, server)
    assert (figures["tokens"], figures["differ"]) == (3, 2)
    ratios = [1.0, 2.0, 0.5]
    assert math.isclose(figures["kl"], sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert math.isclose(figures["max_abs"], math.log(2))
    assert np.allclose([figures["ratio_min"], figures["ratio_max"]], [0.5, 2.0])


def test_a_batch_marks_the_tokens_of_the_answers_alone():
    [(ids, answer)] = batches([Sample([1, 2, 3], [4], [0.0]), Sample([5], [6, 7], [0.0, 0.0])])
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert ids[answer].tolist() == [4, 6, 7]


@pytest.mark.slow
def test_only_the_scorer_agrees_with_the_server_to_the_bit(tmp_path):
    file = tmp_path / "out.json"
    assert mismatch.main(["--problems", "4", "--group", "2", "--max-tokens", "32", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["trainer"] for row in rows] == [trainer.name for trainer in TRAINERS] * 2
    for row in rows:
        assert (row["differ"] == 0) == ("scoring" in row["trainer"])
        assert row["kl"] < 1e-2
