"""The result of a check: the tensors that differ, the answers of the engine, and the text of both."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

WIDTH = 110  # characters of a line
SHOWN = 8  # differences; JSON has all
NAMES = {"fastdeploy": "FastDeploy", "sglang": "SGLang", "vllm": "vLLM", "unknown": "an unknown engine"}


class Verdict(Enum):
    """EQUAL: the weights that serve are those of the trainer. DIFFERS: they are others. UNKNOWN: could not be said."""

    EQUAL = "equal"
    DIFFERS = "differs"
    UNKNOWN = "unknown"


EXIT_STATUS = {Verdict.EQUAL: 0, Verdict.DIFFERS: 1, Verdict.UNKNOWN: 2}


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides.

    tensor: its name in the checkpoint. kind: a name in ``compare.CLASSIFIERS``, or one of "missing", "unexpected",
    "shape", "damaged", "replica" and "unknown". how: one sentence. shape: of the trainer's tensor. changed: number of
    values that differ. max_abs: the largest difference. relative: ``max_abs`` divided by the largest value of the
    trainer's tensor. first: index of the first value that differs, in row-major order. expected, served: that value on
    both sides. These are None if the values could not be compared. replica: of a fleet."""

    tensor: str
    kind: str
    how: str
    shape: tuple[int, ...] = ()
    values: int = 0
    changed: int | None = None
    max_abs: float | None = None
    relative: float | None = None
    first: int | None = None
    expected: float | None = None
    served: float | None = None
    replica: str | None = None

    @property
    def share(self) -> float | None:
        """The share of the values that differ."""
        return None if self.changed is None or not self.values else self.changed / self.values


@dataclass(frozen=True)
class Divergence:
    """The first token that differs from a run of our own on the trainer's weights. prompt: token ids. position: of the
    token in the answer, from 0. expected, got: token ids; the two logprobs are those of our run and of the engine, of
    the token that each has chosen."""

    prompt: tuple[int, ...]
    position: int
    expected: int
    got: int
    expected_logprob: float
    got_logprob: float


@dataclass(frozen=True)
class BehaviourReport:
    """How the engine answers prompts, as compared with the trainer's weights.

    verdict: of the log probabilities. statistic: how far they are from those of the trainer's weights; above ``bound``
    they are of other weights. power: the probability with which this check finds weights that are ``smallest`` away.
    tokens: log probabilities that were compared. how: one sentence. diverged: None if no token did. kv: DIFFERS if keys
    and values of older weights are reused for new requests. kv_how: one sentence. stale_by: the answers fit the k-th of
    the previous weights better than the trainer's; None: they do not."""

    verdict: Verdict
    how: str
    statistic: float | None = None
    bound: float | None = None
    power: float | None = None
    smallest: float | None = None
    tokens: int = 0
    diverged: Divergence | None = None
    kv: Verdict = Verdict.UNKNOWN
    kv_how: str = ""
    stale_by: int | None = None


@dataclass(frozen=True)
class ServingState:
    """The engine's facts about itself. engine: "fastdeploy", "sglang", "vllm" or "unknown". fields are None if the
    engine does not tell. session: a weight update is open. adapters: names that are loaded. fingerprint: over all
    tensors. replicas: the members of a fleet, () for one server."""

    engine: str
    version: str | None = None
    weight_epoch: int | None = None
    boot_id: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    fingerprint: str | None = None
    session: str | None = None
    asleep: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()


@dataclass(frozen=True)
class SyncReport:
    """The result of a check. method: how the weights were compared; "answers" if the engine shows no tensors, "none" if
    nothing was compared. tensors: number that were compared. fingerprint: of the trainer's weights over all tensors, in
    the serving dtype; None if it was not computed. differences: in the order of the model. notes: sentences about the
    state of the engine."""

    url: str
    verdict: Verdict
    how: str
    state: ServingState
    method: str
    tensors: int = 0
    fingerprint: str | None = None
    differences: tuple[Difference, ...] = ()
    behaviour: BehaviourReport | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether the weights that serve are those of the trainer, and no older KV is in use."""
        return self.verdict is Verdict.EQUAL

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.verdict]

    @property
    def kv(self) -> Verdict:
        """Whether KV that is in use is of the weights that serve."""
        return Verdict.UNKNOWN if self.behaviour is None else self.behaviour.kv

    @property
    def diverged(self) -> Divergence | None:
        """The first token that differs from a run of our own."""
        return None if self.behaviour is None else self.behaviour.diverged

    def text(self) -> str:
        """Return the report as lines for a terminal."""
        return "\n".join(_lines(self))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON has it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found | {"ok": self.ok, "exit_status": self.exit_status}


def _lines(report: SyncReport) -> Iterator[str]:
    """Yield the lines of a report."""
    yield from _wrapped(f"{report.verdict.value.upper()}: {report.how}", "", "  ")
    for one in report.differences[:SHOWN]:
        yield ""
        yield from _difference(one)
    if len(report.differences) > SHOWN:
        yield ""
        yield f"and {len(report.differences) - SHOWN} more differences: --json has all."
    yield ""
    yield from _field("engine", f"{NAMES[report.state.engine]} at {report.url}")
    if (served := _served(report.state)) != "":
        yield from _field("serves", served)
    if report.tensors:
        yield from _field("compared", f"{report.tensors} tensors by {report.method}")
    if (behaviour := report.behaviour) is not None:
        yield from _field("answers", f"{behaviour.verdict.value}: {behaviour.how}")
        yield from _field("KV", f"{behaviour.kv.value}: {behaviour.kv_how}" if behaviour.kv_how else "not checked")
        if (found := behaviour.diverged) is not None:
            yield from _field(
                "diverges",
                f"at token {found.position} of the answer to a prompt of {len(found.prompt)} tokens: expected "
                f"{found.expected} (logprob {found.expected_logprob:.4f}), got {found.got} ({found.got_logprob:.4f})",
            )
        if behaviour.stale_by is not None:
            yield from _field("stale", f"the answers fit the previous weights {behaviour.stale_by} better")
    for note in report.notes:
        yield from _field("note", note)


def _difference(one: Difference) -> Iterator[str]:
    shape = f" {list(one.shape)}" if one.shape else ""
    yield f"{one.tensor or one.replica}{shape}"
    yield from _wrapped(f"{one.kind}: {one.how}.", "  ", "    ")
    if one.changed is not None and one.share is not None:
        size = (
            f"{one.changed} of {one.values} values differ ({one.share:.3%}), by at most {one.max_abs:.6g} "
            f"({one.relative:.3%} of the largest). The first at {one.first}: expected {one.expected:.9g}, "
            f"serves {one.served:.9g}."
        )
        yield from _wrapped(size, "  ", "    ")


def _served(state: ServingState) -> str:
    facts = [
        "" if state.version is None else f"version {state.version}",
        "" if state.weight_epoch is None else f"weight_epoch {state.weight_epoch}",
        state.dtype or "",
        "" if state.quantization is None else f"multiplied as {state.quantization}",
        f"{len(state.replicas)} replicas" if state.replicas else "",
    ]
    return ", ".join(filter(None, facts))


def _field(name: str, text: str) -> Iterator[str]:
    yield from _wrapped(text, f"{name:<10}", " " * 10)


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )
