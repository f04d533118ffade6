"""Calls of a trainer to a harness."""

from __future__ import annotations

from fastdeploy.core.weight_source import DeltaBase, FolderSource, PartFormat
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens, fingerprint_of
from support.harness import PROMPT, Harness

OVERWRITE = PartFormat("overwrite", "zstd")


def base_of(weights: int, **more) -> DeltaBase:
    """Return the base of a delta against the weights ``weights`` of the fake runner."""
    return DeltaBase(fingerprint_of(weights), **more)


def begin(h: Harness, **args) -> str:
    reply = h.ask(m.BeginUpdateArgs(**args))
    assert reply.failure is None, reply
    return reply.result["session_id"]


def chunk(h: Harness, session: str, folder: str, **args) -> m.Reply:
    return h.ask(m.UpdatePartArgs(session, FolderSource(folder), **args), rounds=2)


def commit(h: Harness, session: str, **args) -> m.Reply:
    return h.ask(m.CommitUpdateArgs(session, **args), rounds=2)


def hold_ids(h: Harness) -> list[str]:
    return [hold["id"] for hold in h.status()["holds"]]


def assert_serves(h: Harness, weights: int) -> None:
    """Assert that a new request is computed with ``weights``."""
    name = f"probe{len(h.transport.sent['a'])}"
    h.add(name, PROMPT, max_tokens=4)
    h.run_out()
    assert h.stream(name).tokens == expected_tokens(PROMPT, 4, weights=weights)


def paused(**config) -> Harness:
    h = Harness(**config)
    h.pause(mode="keep")
    return h
