"""The least time of a decode step on a machine, for metrics and for ``fastdeploy check``.

A decode step computes one token of each running sequence. It reads every weight of the layers and of the output head
once, and the KV of every sequence; and it multiplies each of these weights with one row of each sequence. The least
time is the longer one of reading at the machine's bandwidth and multiplying at its peak. Not counted: activations,
norms, attention's arithmetic, sampling, adapters, and all that the engine does between two steps. A model whose layers
attend to a window reads less KV than is counted here.

A Mixture of Experts reads the experts that at least one sequence chose, and multiplies each sequence with those that
it chose. The number of distinct experts is estimated, as if every token chose each expert with the same probability.
This estimate is the most that independent choices read on average: real choices are uneven, so a step reads less, and
its share of the least time looks better than it is.
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


def share_of_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Return which share of the experts of a layer is chosen by at least one of ``tokens`` tokens, on average:
    1 - (1 - top_k / num_experts) ** tokens, if every expert is chosen with the same probability."""
    return 1.0 - (1.0 - top_k / num_experts) ** tokens


class ExpertsCost(NamedTuple):
    """The experts of all layers of a Mixture, of which a token uses ``top_k`` of ``num_experts`` in each layer.
    parameters: weights of all of them. nbytes: of these, in memory."""

    num_experts: int
    top_k: int
    parameters: int
    nbytes: int


class StepRoofline(NamedTuple):
    """The least time of decode steps of one model on one machine. parameters: weights that every sequence is multiplied
    with. weight_bytes: of these, in memory. kv_bytes: of one token in all layers. experts: None for a dense model."""

    machine: Machine
    parameters: int
    weight_bytes: int
    kv_bytes: int
    experts: ExpertsCost | None = None

    def least_s(self, sequences: int, tokens: float) -> float:
        """Return the least seconds of a decode step. tokens: whose KV is read, of all sequences together."""
        nbytes, parameters = self.weight_bytes + self.kv_bytes * tokens, float(self.parameters)
        if (experts := self.experts) is not None:
            nbytes += experts.nbytes * share_of_experts(experts.num_experts, experts.top_k, sequences)
            parameters += experts.parameters * experts.top_k / experts.num_experts
        return self.machine.least_s(nbytes, 2 * parameters * sequences)
