"""A report as lines that a person reads in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fastdeploy.rl.check_sync.report import Difference, ServingState, SyncReport

WIDTH = 110  # characters of a line
SHOWN = 8  # differences; JSON has all
NAMES = {"fastdeploy": "FastDeploy", "sglang": "SGLang", "vllm": "vLLM", "unknown": "an unknown engine"}


def lines(report: SyncReport) -> Iterator[str]:
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
            f"{one.changed} of {one.values} values differ ({one.share:.3g} of all), by at most {one.max_abs:.6g} "
            f"({one.relative:.3g} of the largest). The first at {one.first}: expected {one.expected:.9g}, "
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
