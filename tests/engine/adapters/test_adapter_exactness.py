"""Adapters that are replaced in the middle of generations, on a real model: each continuation is compared with PEFT.

kv=keep and kv=recompute mean what they mean in test_update_exactness.py.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from fastdeploy.testing.checkpoints import write_checkpoint
from fastdeploy.worker.model_runner import ModelRunner
from support.adapters import simple, write_adapter
from support.harness import Harness, Stream
from support.specs import SPECS, prompt
from support.torch_adapters import adapted_continuations
from support.torch_continuations import Case

LENGTH = 100
STAGGER = 5  # steps between two arrivals, so that one commit meets its targets at 20 different tokens
TARGETS = LENGTH // STAGGER
VOCAB = 211
# All targets share the beginning of their prompt, and each half shares the whole: there are many prefix hits.
PROMPTS = [prompt(37, VOCAB), prompt(37, VOCAB)[:33] + prompt(9, VOCAB)]


class Runner(ModelRunner):
    """A real runner whose staging waits for ``may_stage``, which the harness clears during a round."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.may_stage = threading.Event()
        self.may_stage.set()

    def begin_adapter(self):
        staging = super().begin_adapter()
        read = staging.read

        def held_read(path: str):
            assert self.may_stage.wait(60)
            return read(path)

        staging.read = held_read
        return staging


WAYS = [("qwen2", "keep"), ("qwen2", "recompute"), ("qwen3_wide", "keep")]


@pytest.fixture(scope="module")
def folders(request, tmp_path_factory) -> dict[str, Path]:
    """Write a base model, an old and a new adapter of one name, and an adapter of another tenant."""
    root, spec = tmp_path_factory.mktemp("adapters"), SPECS[request.param]
    return {
        "base": write_checkpoint(root / request.param, spec),
        "old": write_adapter(root / "old", spec, simple(spec, 16, seed=41)),
        "new": write_adapter(root / "new", spec, simple(spec, 8, seed=42)),
        "other": write_adapter(root / "other", spec, simple(spec, 4, "q_proj", "v_proj", "down_proj", seed=43)),
    }


def engine_on(folders: dict[str, Path], **adapters: str) -> Harness:
    runner = Runner(str(folders["base"]), num_blocks=600, dtype="float32")
    # Prompts are not paced by the speed of the machine, so each run reaches the same switch points.
    h = Harness(runner, max_num_seqs=TARGETS + 12, max_num_batched_tokens=64, max_step_ms=60_000.0)
    for name, which in adapters.items():
        assert h.ask(load_args(name, folders[which]), rounds=5).failure is None
    return h


def load_args(name: str, folder: Path, kv: str = "keep") -> m.LoadAdapterArgs:
    return m.LoadAdapterArgs(name, FolderSource(str(folder)), kv=kv)


def add(h: Harness, name: str, which: int, adapter: str = "") -> None:
    h.add(name, PROMPTS[which], max_tokens=LENGTH, temperature=0.0, logprobs=0, adapter=adapter)


def run(folders: dict[str, Path], offset: int, kv: str) -> Harness:
    """Run staggered targets on adapter "a" among requests of adapter "b" and of the base model. The load of a new "a"
    begins ``offset`` steps after the last target but two began; the last two begin while the adapter is read."""
    h = engine_on(folders, a="old", b="other")
    for i in range(TARGETS):
        h.run_rounds(STAGGER)
        add(h, f"t{i}", i % 2, "a")
        if i % 7 == 0:
            add(h, f"b{i}", i % 2, "b")
            add(h, f"base{i}", i % 2)
    h.run_rounds(offset)
    load = h.call(load_args("a", folders["new"], kv))
    add(h, f"t{TARGETS}", 0, "a")
    h.run_rounds()
    add(h, f"t{TARGETS + 1}", 1, "a")
    h.run_rounds(3)
    reply = h.reply(load)
    assert reply is not None and reply.failure is None, reply
    add(h, "after", 0, "a")
    h.run_out()
    assert h.engine.kv.hit_tokens > 0, "no prefix hit"
    return h


def alone(folders: dict[str, Path], **adapters: str) -> Stream:
    """Run one request, of the only adapter or of the base model, on an engine of its own."""
    h = engine_on(folders, **adapters)
    add(h, "one", 0, *adapters)
    h.run_out()
    return h.stream("one")


def switch_point(stream: Stream) -> int:
    """Return how many tokens the old adapter sampled."""
    epochs = [span.adapter_epoch for span in stream.spans]
    assert epochs == sorted(epochs) and set(epochs) <= {1, 2} and {span.adapter for span in stream.spans} == {"a"}
    assert [(s.start, s.end) for s in stream.spans] == [(i, i + 1) for i in range(len(stream.tokens))]
    return epochs.count(1)


@pytest.mark.covers("kv")
@pytest.mark.parametrize(("folders", "kv"), WAYS, indirect=["folders"])
def test_at_every_switch_point_the_continuation_is_that_of_peft_and_other_tenants_keep_their_bits(
    folders, kv, torch_process
):
    of_new, of_other, of_base = alone(folders, a="new"), alone(folders, b="other"), alone(folders)
    assert len({str(stream.tokens) for stream in (of_new, of_other, of_base)}) == 3, "an adapter changes no token"
    cases, streams, points = [], [], set()
    for offset in range(STAGGER):
        h = run(folders, offset, kv)
        for name, undisturbed in (("after", of_new), ("b0", of_other), ("base0", of_base), ("b14", of_other)):
            stream = h.stream(name)
            assert (stream.tokens, stream.logprobs) == (undisturbed.tokens, undisturbed.logprobs), name
        for i in range(TARGETS + 2):
            stream, ids = h.stream(f"t{i}"), PROMPTS[i % 2]
            assert stream.reason == "length" and len(stream.tokens) == len(stream.logprobs) == LENGTH
            k = switch_point(stream)
            if k < LENGTH:
                points.add(k)
                cases.append(Case(ids + stream.tokens, len(ids) + k - 1 if kv == "keep" and k else 0, LENGTH - k))
                streams.append(stream)
    assert points >= set(range(1, LENGTH)), f"switch points not reached: {sorted(set(range(1, LENGTH)) - points)}"
    at = folders["base"], folders["old"], folders["new"]
    references = torch_process.run(adapted_continuations, *at, cases)
    for case, stream, wanted in zip(cases, streams, references, strict=True):
        assert stream.tokens[-case.new :] == wanted["best"].tolist(), f"switch at {LENGTH - case.new}"
        logprobs = np.array([entry.logprob for entry in stream.logprobs[-case.new :]])
        assert np.abs(logprobs - wanted["logprobs"]).max() < 1e-3


@pytest.mark.parametrize("folders", ["qwen2"], indirect=True)
def test_keep_and_recompute_give_different_tokens(folders):
    kept, recomputed = (run(folders, 0, kv) for kv in ("keep", "recompute"))
    differing = sum(kept.stream(f"t{i}").tokens != recomputed.stream(f"t{i}").tokens for i in range(TARGETS))
    assert differing > TARGETS / 2
