"""An engine with two adapters, "a" and "b", and requests of both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner, expected_tokens
from support.harness import Harness

A, B = adapter_scope("a"), adapter_scope("b")
CONTENT = {"": 0, "a": 1, "b": 2}  # of the adapters: the fake runner's weights of an adapter are a number
LONG = 60  # output tokens of each request


def tenants(num_blocks: int = 128, rounds: int = 3, requests: int = 3, **config: Any) -> Harness:
    """Return a harness with requests a0, a1 ... of adapter "a" and b0, b1 ... of adapter "b", after ``rounds`` rounds.
    Of three each, the last waits."""
    h = Harness(FakeRunner(num_blocks=num_blocks), **config)
    for name in ("a", "b"):
        h.load_adapter(name, CONTENT[name])
    for i in range(requests):
        for name in ("a", "b"):
            h.add(f"{name}{i}", _prompt(i), max_tokens=LONG, adapter=name)
    h.run_rounds(rounds)
    return h


def _prompt(i: int) -> list[int]:
    return [i + 1, 7]


def counts(h: Harness, name: str) -> list[int]:
    """Return the number of output tokens of the first three requests of an adapter."""
    return [len(h.stream(f"{name}{i}").tokens) for i in range(3)]


def exact(
    h: Harness, request_id: str, prompt: Sequence[int] = (), count: int = LONG, adapter: str | None = None
) -> bool:
    """Return whether a request has got all tokens of an undisturbed run. Prompt and adapter need not be named for the
    requests of ``tenants``."""
    name = request_id[0] if adapter is None else adapter
    prompt = list(prompt) or _prompt(int(request_id[1:]))
    return h.stream(request_id).tokens == expected_tokens(prompt, count, adapter=CONTENT[name])


def run_out_exactly(h: Harness) -> None:
    """Run until no request is left, and assert that all six have got the tokens of an undisturbed run."""
    h.run_out()
    wrong = [f"{name}{i}" for name in "ab" for i in range(3) if not exact(h, f"{name}{i}")]
    assert not wrong


def resume(h: Harness, scope: str, hold_id: str | None = None) -> dict[str, Any]:
    return h.ask(m.ResumeArgs(hold_id, scope)).result


def paused_adapters(h: Harness) -> list[dict[str, Any]]:
    """Return the status of each adapter with a hold, as the status of the engine lists them."""
    return h.ask(m.PauseStatusArgs()).result["scopes"]
