"""How far a figure is from what the machine can do: the formulas, and the probe that measures the machine.

A decode step must read every weight once, so it takes at least their bytes over the read bandwidth. A prefill must
multiply every prompt token with every weight of the layers, so it takes at least those operations over the matrix rate.
Reading the KV cache, norms, sampling and HTTP are not in these bounds: they are what an engine may lose.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
BYTES = 2  # of a bfloat16


class Machine(NamedTuple):
    """read: bytes per second that all threads read together. peak: bfloat16 operations per second of all threads."""

    read: float
    peak: float


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen2 or Qwen3 model. ``heads`` and ``kv_heads`` times ``head_dim`` are the widths of q and k, v."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, folder: Path) -> Shape:
        """From config.json. Raises OSError or KeyError."""
        config = json.loads((folder / "config.json").read_text())
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            hidden,
            config["intermediate_size"],
            config["num_hidden_layers"],
            heads,
            config["num_key_value_heads"],
            config.get("head_dim") or hidden // heads,
            config["vocab_size"],
        )

    @property
    def layer_parameters(self) -> int:
        """Of the linears of all layers, without biases: q, k, v, o; gate, up, down."""
        attention = self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * self.hidden * (attention + 3 * self.inner)

    @property
    def step_bytes(self) -> int:
        """What a decode step must read: the linears of all layers and the output head, in bfloat16."""
        return BYTES * (self.layer_parameters + self.vocab * self.hidden)

    def prefill_operations(self, tokens: int) -> int:
        """Of one prompt of ``tokens``: 2 per weight of the layers and token; causal attention, q.k and p.v, 2 each per
        head, dimension and pair of positions, of which there are tokens^2 / 2. The head sees one row: left out."""
        attention = self.layers * self.heads * self.head_dim * 2 * tokens**2
        return 2 * self.layer_parameters * tokens + attention


def decode_share(shape: Shape, machine: Machine, token_s: float) -> float:
    """The part of the read bandwidth that a stream with ``token_s`` seconds between tokens uses:
    step_bytes / token_s / read. All streams of a step share one reading, so their number is not in it."""
    return shape.step_bytes / token_s / machine.read


def prefill_share(shape: Shape, machine: Machine, prompts: int, tokens: int, seconds: float) -> float:
    """The part of the matrix rate in use while ``prompts`` of ``tokens`` were computed, from the first request sent to
    the last first token: operations / seconds / peak."""
    return prompts * shape.prefill_operations(tokens) / seconds / machine.peak


def group_share(
    shape: Shape, machine: Machine, groups: int, at_once: int, prompt: int, output: int, seconds: float
) -> float:
    """Least time over ``seconds`` for ``groups`` of samples, ``at_once`` in flight: each prompt is prefilled once, then
    ceil(groups / at_once) times ``output`` decode steps, every step reading the weights once for all that run."""
    prefill = groups * shape.prefill_operations(prompt) / machine.peak
    decode = -(-groups // at_once) * output * shape.step_bytes / machine.read
    return (prefill + decode) / seconds


def probe() -> Machine | None:
    """Measure the machine, in a process of its own that is gone afterwards. None where the probe has no kernel (it
    needs AMX). Raises CalledProcessError."""
    command = [sys.executable, "-m", "benchmarks.lib.probe"]
    run = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    found: dict[str, Any] | None = json.loads(run.stdout.splitlines()[-1])
    return None if found is None else Machine(found["read"], found["peak"])


def middle(probes: list[Machine]) -> Machine | None:
    """The medians of several probes; None of none."""
    if not probes:
        return None
    return Machine(median(p.read for p in probes), median(p.peak for p in probes))
