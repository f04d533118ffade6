"""The engine of a measured run notes its tokens."""

from __future__ import annotations

import json

from benchmarks.lib.ways.engine_main import token_times
from support.harness import Harness


def test_the_times_of_all_tokens_are_noted_with_their_weight_epoch(tmp_path):
    with token_times(tmp_path / "times.json"):
        h = Harness()
        for i in range(2):
            h.add(f"r{i}", [i + 1] * 3, max_tokens=10)
        h.run_rounds(4)
        h.update("/w1")
        h.run_out()
    times = json.loads((tmp_path / "times.json").read_text())
    spans = [span for i in range(2) for span in h.stream(f"r{i}").spans]
    assert sum(tokens for _, tokens, _ in times) == h.metric("generation_tokens_total") == 20
    for epoch in (0, 1):
        of_epoch = sum(tokens for _, tokens, weight_epoch in times if weight_epoch == epoch)
        assert of_epoch == sum(span.weight_epoch == epoch for span in spans) > 0
    assert [at for at, _, _ in times] == sorted(at for at, _, _ in times)
