"""Weight updates in the middle of generations, on a real model: each continuation is compared with torch.

Token k is the last one that the old weights sampled. The next step computes its keys and values with the new weights.

    kv=keep       prompt and tokens 1..k-1 keep the keys and values of the old weights
    kv=recompute  all keys and values are computed again with the new weights
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.testing.checkpoints import write_checkpoint
from fastdeploy.worker.model_runner import ModelRunner
from support.harness import Harness, Stream
from support.specs import SPECS, prompt
from support.torch_continuations import Case, continuations

LENGTH = 100
STAGGER = 5  # steps between two arrivals, so that one commit meets its targets at 20 different tokens
TARGETS = LENGTH // STAGGER
VOCAB = 211
# All targets share the beginning of their prompt, and each half shares the whole: there are many prefix hits.
PROMPTS = [prompt(37, VOCAB), prompt(37, VOCAB)[:33] + prompt(9, VOCAB)]


class HeldRunner(ModelRunner):
    """A real runner whose staging waits for ``may_stage``, which the harness clears during a round."""

    before_commit: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.may_stage = threading.Event()
        self.may_stage.set()

    def commit(self, staged) -> None:
        self.before_commit()
        super().commit(staged)

    def begin_update(self, partial: bool, delta: bool = False):
        staging = super().begin_update(partial, delta)
        add = staging.add

        def held_add(*args, **more):
            assert self.may_stage.wait(60)
            return add(*args, **more)

        staging.add = held_add
        return staging


MODELS = ["qwen2", "qwen3_wide"]
# model, kv, whether the engine is paused
WAYS = [("qwen2", "keep", False), ("qwen2", "keep", True), ("qwen2", "recompute", False), ("qwen2", "recompute", True),
        ("qwen3_wide", "keep", False), ("qwen3_wide", "recompute", True)]  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folders(request, tmp_path_factory) -> tuple[Path, Path]:
    """Write the old and the new weights: two random models of one shape."""
    root = tmp_path_factory.mktemp("policies")
    spec = SPECS[request.param]
    return (
        write_checkpoint(root / f"{request.param}-old", spec),
        write_checkpoint(root / f"{request.param}-new", replace(spec, seed=spec.seed + 100)),
    )


def engine_on(folder: Path, **settings) -> Harness:
    runner = HeldRunner(str(folder), num_blocks=settings.pop("num_blocks", 400), dtype="float32")
    # Prompts are not paced by the speed of the machine, so each run reaches the same switch points.
    limits = {"max_num_seqs": TARGETS + 8, "max_num_batched_tokens": 64, "max_step_ms": 60_000.0}
    return Harness(runner, **{**limits, **settings})


def target(h: Harness, i: int, **fields) -> None:
    fields = {"max_tokens": LENGTH, "temperature": 0.0, "logprobs": 0, **fields}
    h.add(f"t{i}", PROMPTS[i % 2], **fields)


def update(h: Harness, folder: Path, kv: str, paused: bool) -> None:
    if paused:
        assert h.pause(mode="keep").failure is None
    reply = h.update(str(folder), rounds=3, kv=kv)
    assert reply.failure is None and reply.result["kv"] == kv, reply
    if paused:
        assert h.status()["is_paused"], "an update does not resume"
        h.run_rounds(3)
        assert h.resume().failure is None


def run(folders: tuple[Path, Path], offset: int, kv: str, paused: bool) -> tuple[list[Stream], Stream]:
    """Run 20 staggered targets among other requests, with an update ``offset`` steps after the last target began.

    Returns the streams of the targets, and the stream of a request that was sent after the update."""
    old, new = folders
    h = engine_on(old)
    for i in range(TARGETS):
        h.run_rounds(STAGGER)
        target(h, i)
        if i % 6 == 0:  # other requests, which end at other times
            h.add(f"other{i}", prompt(50 + i, VOCAB), max_tokens=7 + i, temperature=1.0, seed=i)
    h.run_rounds(offset)
    update(h, new, kv, paused)
    h.add("after", PROMPTS[0], max_tokens=LENGTH, temperature=0.0, logprobs=0)
    h.run_out()
    assert h.engine.kv.hit_tokens > 0, "no prefix hit"
    return [h.stream(f"t{i}") for i in range(TARGETS)], h.stream("after")


def switch_point(stream: Stream) -> int:
    """Return how many tokens the old weights sampled, and assert that the spans leave no gap."""
    weight_epochs = [span.weight_epoch for span in stream.spans]
    assert weight_epochs == sorted(weight_epochs) and set(weight_epochs) <= {0, 1}
    assert [(s.start, s.end) for s in stream.spans] == [(i, i + 1) for i in range(len(stream.tokens))]
    return weight_epochs.count(0)


@pytest.fixture(scope="module")
def on_new_weights(folders) -> Stream:
    """Run the request that comes after the update on an engine that has had no other weights."""
    h = engine_on(folders[1])
    h.add("after", PROMPTS[0], max_tokens=LENGTH, temperature=0.0, logprobs=0)
    h.run_out()
    return h.stream("after")


# All ways are in the test of a switch in the middle of a prompt, too.
@pytest.mark.covers("kv", "paused")
@pytest.mark.parametrize(("folders", "kv", "paused"), WAYS, indirect=["folders"])
def test_at_every_switch_point_the_continuation_is_that_of_torch(folders, on_new_weights, torch_process, kv, paused):
    cases, streams, points = [], [], set()
    for offset in range(STAGGER):
        targets, after = run(folders, offset, kv, paused)
        assert (after.tokens, after.logprobs) == (on_new_weights.tokens, on_new_weights.logprobs), (
            "differs from an engine that started with the new weights"
        )
        for i, stream in enumerate(targets):
            assert stream.reason == "length" and len(stream.tokens) == len(stream.logprobs) == LENGTH
            k = switch_point(stream)
            if k < LENGTH:
                points.add(k)
                tokens = PROMPTS[i % 2] + stream.tokens
                kept = len(PROMPTS[i % 2]) + k - 1 if kv == "keep" and k else 0
                cases.append(Case(tokens, kept, LENGTH - k))
                streams.append(stream)
    assert points >= set(range(1, LENGTH)), f"switch points not reached: {sorted(set(range(1, LENGTH)) - points)}"
    references = torch_process.run(continuations, *folders, cases)
    for case, stream, wanted in zip(cases, streams, references, strict=True):
        assert stream.tokens[-case.new :] == wanted["best"].tolist(), f"switch at {LENGTH - case.new}"
        logprobs = np.array([entry.logprob for entry in stream.logprobs[-case.new :]])
        assert np.abs(logprobs - wanted["logprobs"]).max() < 1e-3


@pytest.mark.parametrize("folders", ["qwen2", pytest.param("qwen3_wide", marks=pytest.mark.slow)], indirect=True)
def test_keep_and_recompute_give_different_tokens(folders):
    kept, recomputed = (run(folders, 0, kv, False)[0] for kv in ("keep", "recompute"))
    differing = sum(a.tokens != b.tokens for a, b in zip(kept, recomputed, strict=True))
    assert differing > TARGETS / 2


@pytest.mark.parametrize(("folders", "kv", "paused"), WAYS, indirect=["folders"])
def test_a_continuation_after_a_switch_in_the_middle_of_a_prompt_is_that_of_torch(folders, torch_process, kv, paused):
    old, new = folders
    long = prompt(90, VOCAB)
    h = engine_on(old, max_num_batched_tokens=16)
    h.add("busy", PROMPTS[0], max_tokens=60)
    h.run_rounds(5)
    h.add("half", long, max_tokens=20, temperature=0.0, logprobs=0)
    h.run_rounds(2)
    (half,) = h.engine.lifecycle.requests.known_as("half")
    computed = []
    h.runner.before_commit = lambda: computed.append(half.num_computed)
    update(h, new, kv, paused)
    h.run_out()
    stream = h.stream("half")
    (cut,) = computed
    assert 0 < cut < len(long) and switch_point(stream) == 0
    case = Case(long + stream.tokens, cut if kv == "keep" else 0, 20)
    (wanted,) = torch_process.run(continuations, old, new, [case])
    assert stream.tokens == wanted["best"].tolist()
    assert np.abs(np.array([e.logprob for e in stream.logprobs]) - wanted["logprobs"]).max() < 1e-3


def test_a_request_ends_at_its_eos_after_a_pause_and_an_update(folders, tmp_path):
    """Run once to learn the tokens after the switch, make one of them the EOS of both checkpoints, and run again."""

    def generate(folders: tuple[Path, Path], ignore_eos: bool) -> Stream:
        h = engine_on(folders[0])
        target(h, 0, ignore_eos=ignore_eos)
        h.run_rounds(12)
        update(h, folders[1], "keep", paused=True)
        h.run_out()
        return h.stream("t0")

    def with_eos(folder: Path, token: int) -> Path:
        copied = Path(shutil.copytree(folder, tmp_path / f"{folder.name}-with-eos"))
        (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": token}))
        return copied

    undisturbed = generate(folders, ignore_eos=True)
    k = switch_point(undisturbed)
    at = next(i for i in range(k + 3, LENGTH) if undisturbed.tokens.index(undisturbed.tokens[i]) == i)
    old, new = (with_eos(folder, undisturbed.tokens[at]) for folder in folders)
    ended = generate((old, new), ignore_eos=False)
    assert ended.tokens == undisturbed.tokens[: at + 1] and ended.reason == "stop"
    assert switch_point(ended) == k < at


def test_a_runner_that_is_told_of_a_request_anew_gives_it_the_same_bits(folders):
    streams = []
    for told_anew in (False, True):
        h = engine_on(folders[0], max_num_batched_tokens=16)
        for i in range(3):
            target(h, i, min_tokens=LENGTH, ignore_eos=False)
        for _ in range(20):
            h.run_rounds()
            if told_anew:
                h.engine.scheduler.set_eos(h.engine.scheduler.eos_token_ids)
        h.run_out()
        streams.append([(h.stream(f"t{i}").tokens, h.stream(f"t{i}").logprobs) for i in range(3)])
    assert streams[0] == streams[1]
