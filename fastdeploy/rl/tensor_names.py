"""The tensors of a trainer under the names that a server counts: fingerprints and deltas go by these names.

A model of transformers stacks the experts of a layer in one tensor, of which a checkpoint has one for each expert. A
checkpoint may also have tensors that the server ignores, those of a layer that predicts further tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import ERNIE_ROUTER_BIAS
from fastdeploy.rl.state_encoding import HostTensor

STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class TensorNames(NamedTuple):
    """The facts of a server's model that the beginning of a weight session tells. ignored: how the names of tensors
    begin that the server ignores. stacks_experts: its own tensors have all experts of a layer, as those of gpt-oss."""

    ignored: tuple[str, ...] = ()
    stacks_experts: bool = False

    def counted(self, state: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
        """Return the tensors of ``state`` that the server counts, by its names. The data are not copied. Raises
        InvalidField for an expert that is there twice."""
        found: dict[str, HostTensor] = {}
        for name, tensor in state.items():
            if name.startswith(self.ignored):
                continue
            for one, part in self._parts(name.replace(*ERNIE_ROUTER_BIAS), tensor):
                if one in found:
                    raise InvalidField(name, f"has the values of {one}, too")
                found[one] = part
        return found

    def _parts(self, name: str, tensor: HostTensor) -> Iterator[tuple[str, HostTensor]]:
        """Yield name and tensor of each matrix of a stack: [experts, 2 * inner, hidden] of gate and up, [experts,
        hidden, inner] of down. Any other tensor as it is."""
        stack = STACKED.fullmatch(name)
        parts = PARTS[stack[2]] if stack else ()
        if self.stacks_experts or not stack or len(tensor.shape) != 3 or tensor.shape[1] % len(parts):
            yield name, tensor
            return
        experts, rows, columns = tensor.shape
        shape, number = (rows // len(parts), columns), experts * len(parts)
        for i in range(number):
            begin, end = (tensor.data.nbytes * at // number for at in (i, i + 1))
            one = f"{stack[1]}{i // len(parts)}.{parts[i % len(parts)]}.weight"
            yield one, HostTensor(tensor.dtype, shape, tensor.data[begin:end])
