"""The machine's roofline: formulas of the least time of a load, and the probe that measures the machine.

A decode step reads every weight once, and multiplies it with a row of each sequence. Its least time is the longer one
of reading at the read bandwidth and multiplying at the matrix rate. A prefill multiplies every prompt token with every
weight of the layers. Its least time is these operations over the matrix rate. Reading the KV cache, norms, sampling and
HTTP are not counted.

A Mixture of Experts reads the experts that at least one token of the step chose, and multiplies each token with the
experts that this token chose. How many distinct experts that are is estimated, see ``share_of_experts``: where tokens
choose some experts more often than others, a step reads less.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastdeploy.core.roofline import Machine, share_of_experts

REPOSITORY = Path(__file__).resolve().parents[2]
BYTES = 2  # of a bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2, Qwen3 or Qwen3-MoE model. The width of q is heads * head_dim, that of k and v kv_heads *
    head_dim. inner: the width of the MLP, or of one expert if there are ``experts``, of which a token uses top_k."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """Read the sizes from config.json. Raises OSError or KeyError."""
        config = json.loads((folder / "config.json").read_text())
        heads, hidden, experts = config["num_attention_heads"], config["hidden_size"], config.get("num_experts", 0)
        return cls(
            hidden,
            config["moe_intermediate_size" if experts else "intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
            experts,
            config["num_experts_per_tok"] if experts else 0,
        )

    @property
    def layer_parameters(self) -> int:
        """Number of weights of the linears of all layers that multiply a token: q, k, v, o; gate, up, down, or the
        router and those of top_k experts. Biases are not counted."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.inner * self.top_k + self.experts if self.experts else 3 * self.inner
        return self.layers * self.hidden * (attention + mlp)

    def step_bytes(self, rows: int) -> int:
        """Return the bytes that a decode step of ``rows`` sequences reads: the linears of all layers, of a Mixture the
        experts that are chosen, and the output head, in bfloat16."""
        chosen = share_of_experts(self.experts, self.top_k, rows) * self.experts if self.experts else 0.0
        experts = self.layers * self.hidden * 3 * self.inner * (chosen - self.top_k)
        return round(BYTES * (self.layer_parameters + experts + self.vocab * self.hidden))

    def step_operations(self, rows: int) -> int:
        """Return the operations of a decode step of ``rows`` sequences: 2 per row and weight of the linears of all
        layers, of a Mixture top_k experts, and of the output head. Attention is not counted."""
        return 2 * rows * (self.layer_parameters + self.vocab * self.hidden)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values of ``tokens`` in all layers, in bfloat16."""
        return BYTES * 2 * self.layers * self.kv_heads * self.head_dim * tokens

    def prefill_operations(self, tokens: int) -> int:
        """Return the operations of one prompt of ``tokens``: 2 per token and weight that multiplies it; for q.k and p.v
        of causal attention 2 each per head, dimension and pair of positions (tokens^2 / 2 pairs). The output head,
        which computes one row, is not counted."""
        attention = self.layers * self.heads * self.head_dim * 2 * tokens**2
        return 2 * self.layer_parameters * tokens + attention


def decode_share(shape: Shape, machine: Machine, rows: int, token_s: float, more_bytes: int = 0) -> float:
    """Return the least time of a decode step of ``rows`` streams over ``token_s``, the seconds between tokens.
    more_bytes: that the step reads beside the weights."""
    return machine.least_s(shape.step_bytes(rows) + more_bytes, shape.step_operations(rows)) / token_s


def prefill_share(shape: Shape, machine: Machine, prompts: int, tokens: int, seconds: float) -> float | None:
    """Return the share of the matrix rate in the prefill of ``prompts`` of ``tokens``: operations / seconds / peak.
    seconds: from the first request sent to the first token of the last stream. None without a peak."""
    if machine.peak is None:
        return None
    return prompts * shape.prefill_operations(tokens) / seconds / machine.peak


def group_share(
    shape: Shape, machine: Machine, groups: int, at_once: int, samples: int, prompt: int, output: int, seconds: float
) -> float | None:
    """Return the least time of ``groups`` of ``samples``, ``at_once`` groups in flight, over ``seconds``. In the least
    time, each prompt is prefilled once; then each round of groups takes ``output`` decode steps of all its samples.
    None without a peak."""
    if machine.peak is None:
        return None
    prefill = groups * shape.prefill_operations(prompt) / machine.peak
    rounds = [min(at_once, groups - first) for first in range(0, groups, at_once)]
    streams = [count * samples for count in rounds]
    steps = [machine.least_s(shape.step_bytes(rows), shape.step_operations(rows)) for rows in streams]
    return (prefill + output * sum(steps)) / seconds


def probe() -> Machine:
    """Measure the machine, in a process of its own. Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.ops", "--probe", "--repeats", "5"]
    run = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return Machine(found["read"], found["peak"])


def middle(probes: Sequence[Machine]) -> Machine:
    """Return the medians of at least one probe."""
    peaks = [probe.peak for probe in probes if probe.peak is not None]
    return Machine(median(probe.read for probe in probes), median(peaks) if peaks else None)
