"""A state machine on a real model: whatever happens to requests, and whatever is drafted, each token and each logprob
is that of a run of the request alone, without speculation, with the same weights at the same tokens. Bit for bit. So
are the experts of each token."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from fastdeploy.core.request import Request
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import adapter_scope
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.testing.checkpoints import write_checkpoint
from support import search
from support.adapters import simple, write_adapter
from support.drafters import adversary
from support.harness import Harness
from support.replays import LONGEST, Outcome, Recorder, SteppedRunner, outcome, replay
from support.specs import SPECS, prompt

NUM_WEIGHTS, MOST_DRAFTS = 3, 20  # more drafts than a step or a request has room for
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
SHARED = prompt(21, 211)
ADAPTER = "a"
# What can be asked of the engine for one request, by its id: the prompt, what its sampling differs in, and the adapter.
ASKED: list[tuple[list[int], dict, str]] = [
    (SHARED, {"temperature": 0.0, "logprobs": 3}, ""),
    (SHARED, {"logprobs": 0, "ignore_eos": True, "max_tokens": 50}, ""),
    (SHARED[:16], {"top_p": 0.8, "logprobs": 2, "logprobs_mode": "processed", "return_sampling_mask": True}, ""),
    (SHARED + [7, 8], {"top_k": 9, "repetition_penalty": 1.4, "logprobs": 1, "logprobs_mode": "temperature",
                       "temperature": 1.6}, ""),
    (prompt(40, 211), {"presence_penalty": 0.9, "frequency_penalty": 0.6, "logprobs": 1, "temperature": 0.7}, ""),
    ([5], {"min_p": 0.1, "min_tokens": 9, "stop_token_ids": tuple(range(0, 211, 3)), "logprobs": 0}, ""),
    (SHARED[:5], {"prompt_logprobs": 2, "logprobs": 0, "stop_token_ids": tuple(range(0, 211, 9))}, ""),
    (SHARED, {"logprobs": 1, "temperature": 0.9}, ADAPTER),
    (prompt(33, 211), {"temperature": 0.0, "prompt_logprobs": 0, "logprobs": 0, "repetition_penalty": 0.8}, ADAPTER),
    (SHARED[:8], {"max_tokens": 1, "logprobs": 0}, ""),
]  # fmt: skip


class Served:
    """A model with some sets of weights and an adapter, in folders, and what each request gets when it is alone."""

    def __init__(self, name: str):
        self._folder = tempfile.TemporaryDirectory()
        base, spec = Path(self._folder.name), SPECS[name]
        self.vocab = spec.vocab
        self._has_experts = bool(spec.experts)
        self.folders = [
            write_checkpoint(base / f"w{k}", dataclasses.replace(spec, seed=40 + k)) for k in range(NUM_WEIGHTS)
        ]
        modules = ("q_proj", "o_proj" if self._has_experts else "down_proj")
        self.adapter = write_adapter(base / ADAPTER, spec, simple(spec, 4, *modules))
        self._alone: dict[tuple[int, int, int], list[int]] = {}

    def harness(self, weights: int = 0, **more) -> Harness:
        runner = SteppedRunner(self.folders[weights], routed_experts=self._has_experts)
        h = Harness(runner, **{**LIMITS, **more})
        h.load = h.ask(m.LoadAdapterArgs(ADAPTER, FolderSource(str(self.adapter))), rounds=4)
        assert h.load.failure is None, h.load
        return h

    def asked(self, number: int, request_id: str, **fields) -> AddRequest:
        """Return a request of ASKED. Of a Mixture of Experts it asks for the experts of each token, too."""
        ids, settings_, adapter = ASKED[number]
        given = {"max_tokens": 30, "seed": number, "routed_experts": self._has_experts, **settings_}
        return AddRequest(request_id, list(ids), SamplingParams(**given), adapter=adapter, **fields)

    def alone(self, weights: int, number: int, choice: int) -> list[int]:
        """Return the tokens of a request that these weights compute from its first token to its last."""
        key = weights, number, choice
        if key not in self._alone:
            h = self.harness(weights)
            self._alone[key] = replay(h, self.asked(number, "r"), choice, [], LONGEST).tokens
        return self._alone[key]

    def close(self) -> None:
        self._folder.cleanup()


def machine_of(served: Served) -> type[RuleBasedStateMachine]:
    class SpeculatingEngine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.weights, self.added = 0, dict[str, AddRequest]()
            self.h = served.harness(drafter=adversary(self.coming, served.vocab, most=MOST_DRAFTS))
            self.recorder = Recorder(self.h)

        def coming(self, request: Request, count: int) -> list[int]:
            number = int(request.key[0].partition("-")[0])
            tokens = served.alone(self.weights, number, request.key[1])
            return tokens[request.num_output_tokens :][:count]

        # ------------------------------------------------------------ requests

        @rule(numbers=st.lists(st.integers(0, len(ASKED) - 1), min_size=1, max_size=3), n=st.sampled_from([1, 1, 2, 3]),
              priority=st.integers(0, 1), salt=st.sampled_from(["", "", "s"]))  # fmt: skip
        def add(self, numbers: list[int], n: int, priority: int, salt: str) -> None:
            for number in numbers:
                add = served.asked(number, f"{number}-{len(self.added)}", n=n, priority=priority, cache_salt=salt)
                self.added[add.request_id] = add
                self.h.send(add)
            self.h.run_rounds()

        @rule(times=st.sampled_from([1, 2, 3, 5, 8]))
        def compute(self, times: int) -> None:
            self.h.run_rounds(times)

        @precondition(lambda self: self.added)
        @rule(data=st.data(), choice=st.sampled_from([None, 0, 1]))
        def cancel(self, data: st.DataObject, choice: int | None) -> None:
            self.h.send(m.CancelRequest(data.draw(st.sampled_from(sorted(self.added))), choice, "abort"))
            self.h.run_rounds()

        # ------------------------------------------------------------ pauses and weights

        @rule(mode=st.sampled_from(["keep", "keep", "wait", "abort"]), of_adapter=st.booleans(),
              clear=st.sampled_from([None, True]), in_step=st.booleans(), before=st.integers(0, 2))  # fmt: skip
        def pause_and_resume(self, mode: str, of_adapter: bool, clear: bool | None, in_step: bool, before: int) -> None:
            scope = {"scope": adapter_scope(ADAPTER)} if of_adapter else {}
            args = m.PauseArgs(mode, clear, timeout_s=1e6, **scope)
            if in_step:
                self.h.runner.in_step = lambda: self.h.call(args)
            else:
                self.h.call(args)
            self.h.run_rounds(1 + before)
            self.h.call(m.ResumeArgs(**scope))
            self.h.run_rounds()

        @rule(weights=st.integers(0, NUM_WEIGHTS - 1), kv=st.sampled_from(["keep", "keep", "recompute"]),
              paused=st.booleans())  # fmt: skip
        def update(self, weights: int, kv: str, paused: bool) -> None:
            if paused:
                self.h.runner.in_step = lambda: self.h.call(m.PauseArgs("keep"))
                self.h.run_rounds()
            self.recorder.folder = served.folders[weights]
            reply = self.h.update(str(served.folders[weights]), kv=kv)
            assert reply.failure is None, reply
            self.weights = weights
            self.h.call(m.ResumeArgs())
            self.h.run_rounds()

        @rule()
        def lose_the_cache(self) -> None:
            self.h.call(m.ResetCacheArgs(True))
            self.h.run_rounds()

        @rule(tags=st.sampled_from([(), ("weight",), ("kv_cache",)]))
        def sleep_and_wake(self, tags: tuple[str, ...]) -> None:
            self.h.call(m.SleepArgs(tags))
            self.h.run_rounds(4)
            self.h.call(m.WakeArgs())
            self.h.run_rounds(4)
            assert not self.h.runner.asleep

        # ------------------------------------------------------------ what must be equal

        def teardown(self) -> None:
            try:
                self.h.runner.in_step = lambda: None
                self.h.call(m.ResumeArgs())
                self.h.call(m.ResumeArgs(scope=adapter_scope(ADAPTER)))
                self.h.run_out()
                speculation = self.h.engine.scheduler.speculation
                event(f"drafts that were right: {speculation.num_accepted > 0}")
                event(f"preemptions: {self.h.engine.scheduler.num_preemptions > 0}")
                for (request_id, choice), history in self.recorder.histories.items():
                    self.check(request_id, choice, history)
            finally:
                self.h.runner.close()

        def check(self, request_id: str, choice: int, history: list) -> None:
            got = outcome(self.h, request_id, choice)
            h = served.harness(enable_prefix_caching=False)
            expected = replay(h, self.added[request_id], choice, history, len(got.tokens))
            h.runner.close()
            assert_equal(got, expected)

    return SpeculatingEngine


def assert_equal(got: Outcome, expected: Outcome) -> None:
    """Compare. A choice that was aborted or cancelled has the beginning of what the other run has."""
    assert got.tokens == expected.tokens and got.logprobs == expected.logprobs and got.rows == expected.rows
    assert [(s.version, s.start, s.end) for s in got.spans] == [(s.version, s.start, s.end) for s in expected.spans]
    if got.reason in (None, "abort"):
        return
    assert (got.reason, got.stop_reason) == (expected.reason, expected.stop_reason)
    assert got.prompt_logprobs == expected.prompt_logprobs


@pytest.fixture(scope="module", params=[pytest.param("qwen3", marks=pytest.mark.slow), "qwen3_bf16", "qwen3_moe"])
def served(request: pytest.FixtureRequest):
    made = Served(request.param)
    yield made
    made.close()


def explore(machine: Callable[[], RuleBasedStateMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples * search.TIMES, stateful_step_count=steps)
    )


def test_no_draft_changes_a_bit_whatever_happens_to_requests(served):
    explore(machine_of(served), examples=7, steps=25)
