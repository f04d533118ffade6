"""The weight sessions of a state machine, as the machine expects them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Publication:
    """The calls of one weight session. names: the folders of the parts before its commit."""

    version: str | None
    partial: bool
    delta: bool = False
    names: list[str] = field(default_factory=list)
    committing: bool = False

    def weights(self, serving: int) -> int:
        numbers = [number_of(name) for name in self.names]
        if self.delta:
            return serving + sum(numbers)
        return (numbers or [0])[-1] + (serving if self.partial else 0)


def number_of(folder: str) -> int:
    """Return the k of "/w<k>", "/d<k>" and their like."""
    return int(folder[2:].partition("-")[0])
