"""The least time of a decode step on a machine, for metrics and for ``fastdeploy check``.

A decode step computes one token of each running sequence. It reads every weight of the layers and of the output head
once, and the KV of every sequence; and it multiplies each of these weights with one row of each sequence. The least
time is the longer one of reading at the machine's bandwidth and multiplying at its peak. Not counted: activations,
norms, attention's arithmetic, sampling, adapters, and all that the engine does between two steps. A model whose layers
attend to a window reads less KV than is counted here.
"""

from __future__ import annotations

from typing import NamedTuple


class Machine(NamedTuple):
    """read: bytes per second that all threads read together. peak: bfloat16 operations per second of all threads, in
    AMX tiles or else by VDPBF16PS; None without either."""

    read: float
    peak: float | None

    def least_s(self, nbytes: float, operations: float) -> float:
        """Return the least seconds to read and to multiply at the same time. Without a peak, those of reading."""
        return max(nbytes / self.read, operations / self.peak if self.peak else 0.0)


class StepRoofline(NamedTuple):
    """The least time of decode steps of one model on one machine. parameters: weights that a step multiplies with.
    weight_bytes: of these, in memory. kv_bytes: of one token in all layers."""

    machine: Machine
    parameters: int
    weight_bytes: int
    kv_bytes: int

    def least_s(self, sequences: int, tokens: float) -> float:
        """Return the least seconds of a decode step. tokens: whose KV is read, of all sequences together."""
        return self.machine.least_s(self.weight_bytes + self.kv_bytes * tokens, 2 * self.parameters * sequences)
