"""The options of a run, and the figures of one pause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """replicas: number of engines. gateways: number of gateways, of which one is harmed in each cycle if there are
    several. pauses: number of cycles. harm: part of the replicas that is harmed in a cycle with harm. step_s: of a
    replica. fence_s: fence_after_s of the fleet, above a step. sessions: of the load. scale: of the lengths of its
    answers. pace_s: longest time between two calls."""

    replicas: int = 32
    gateways: int = 3
    pauses: int = 1000
    seed: int = 0
    harm: float = 0.1
    step_s: float = 0.03
    fence_s: float = 0.03
    sessions: int = 16
    scale: float = 1.0
    pace_s: float = 0.3

    @property
    def num_harmed(self) -> int:
        return max(1, round(self.replicas * self.harm))

    @property
    def num_needed(self) -> int:
        """Members before a cycle begins. Others may still be on their way back."""
        return max(self.replicas - 2 * self.num_harmed, 1)


@dataclass(frozen=True)
class Pause:
    """A pause call. seconds: until its answer. harmed: harm was done to engines in its cycle. door: a gateway was
    harmed during the call. fenced: replicas during the call."""

    mode: str
    seconds: float
    harmed: bool
    door: bool
    fenced: int
