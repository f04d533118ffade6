"""A trainer and a real engine in one process: rollouts with disturbances, updates, and the comparison of the two."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fastdeploy.rl.scoring import Scorer
from fastdeploy.rl.state_encoding import host_tensors, write_folder
from fastdeploy.worker.model_runner import ModelRunner
from support.harness import Harness
from support.specs import prompt

VOCAB = 211
LONG = prompt(50, VOCAB)
PROMPTS = [LONG, LONG[:40] + prompt(9, VOCAB), prompt(5, VOCAB)]  # the first two share their beginning
GROUP, LENGTH = 4, 24
LEARNING_RATE = 2e-3  # with a larger one, some models are certain of every token after 100 updates


class RealRunner(ModelRunner):
    """A runner for the harness, which holds up staging within a round."""

    def __init__(self, folder: Path, **settings: Any):
        super().__init__(str(folder), **settings)
        self.may_stage = threading.Event()
        self.may_stage.set()


class Rollout:
    """One sample: its prompt, and the tokens, log probabilities and bytes of routed experts that the engine has
    returned so far."""

    def __init__(self, prompt: list[int]):
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.routed = b""

    @property
    def sample(self) -> tuple[list[int], list[int]]:
        return self.prompt, self.tokens


class Loop:
    """Generates groups of GROUP samples for each of PROMPTS, in an engine whose KV cache is too small for all of them.

    dtype: "int8" is bfloat16 with this quantization. settings: sampling parameters of all requests."""

    def __init__(self, folder: Path, dtype: str, scratch: Path, num_blocks: int = 14, **settings: Any):
        served_as = {"dtype": "bfloat16", "quantization": "int8"} if dtype == "int8" else {"dtype": dtype}
        routed = settings.get("routed_experts", False)
        runner = RealRunner(
            folder, num_blocks=num_blocks, max_model_len=128, enable_return_routed_experts=routed, **served_as
        )
        self.engine = Harness(runner, max_num_seqs=8, max_num_batched_tokens=32)
        self.scorer = Scorer(str(folder), **served_as)
        self._folder, self._scratch = folder, scratch
        self._settings = {"temperature": 1.0, "logprobs": 0, **settings}
        self._requests = 0
        self._optimizer = paddle.optimizer.AdamW(LEARNING_RATE, parameters=list(self.scorer.parameters.values()))

    def begin(self) -> dict[str, list[Rollout]]:
        """Send one request for each prompt. Returns its rollouts by request id."""
        return {self._send(p, GROUP): [Rollout(p) for _ in range(GROUP)] for p in PROMPTS}

    def _send(self, ids: list[int], n: int, max_tokens: int = LENGTH) -> str:
        self._requests += 1
        name = f"r{self._requests}"
        self.engine.add(name, ids, n=n, seed=self._requests, max_tokens=max_tokens, **self._settings)
        return name

    def collect(self, rollouts: dict[str, list[Rollout]]) -> None:
        """Give the rollouts what the engine has returned so far."""
        for name, group in rollouts.items():
            for choice, rollout in enumerate(group):
                stream = self.engine.stream(name, choice)
                rollout.tokens, rollout.logprobs = stream.tokens, [one.logprob for one in stream.logprobs]
                rollout.routed = stream.routed

    def finish(self, rollouts: dict[str, list[Rollout]]) -> list[Rollout]:
        """Run the engine until all are finished. Returns them."""
        self.engine.run_out()
        self.collect(rollouts)
        return [rollout for group in rollouts.values() for rollout in group]

    def finish_aborted(self, rollouts: dict[str, list[Rollout]]) -> list[Rollout]:
        """Abort all, and continue each sample by a request with the tokens so far, as a trainer's client does."""
        assert self.engine.pause(mode="abort").failure is None
        self.collect(rollouts)
        assert self.engine.resume().failure is None
        parts = [rollout for group in rollouts.values() for rollout in group]
        later = {
            self._send(part.prompt + part.tokens, 1, LENGTH - len(part.tokens)): part
            for part in parts
            if len(part.tokens) < LENGTH
        }
        self.engine.run_out()
        for name, part in later.items():
            stream = self.engine.stream(name)
            part.tokens = part.tokens + stream.tokens
            part.logprobs = part.logprobs + [one.logprob for one in stream.logprobs]
        return parts

    def train(self, rollouts: list[Rollout]) -> None:
        """Take one step on random advantages."""
        logprobs = self.scorer.logprobs([one.sample for one in rollouts])
        advantages = np.random.default_rng(self._requests).normal(size=len(rollouts)).astype(np.float32)
        weights = advantages.repeat([len(one.tokens) for one in rollouts])
        (logprobs * paddle.to_tensor(weights)).mean().backward()
        self._optimizer.step()
        self._optimizer.clear_grad()
        self.scorer.refresh()

    def publish(self, state: dict[str, paddle.Tensor] | None = None, **args: Any) -> None:
        """Update the engine to the state of the scorer, or to another one."""
        folder = self._scratch / "published"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copy(self._folder / "config.json", folder)
        write_folder(host_tensors(self.scorer.state() if state is None else state), folder)
        reply = self.engine.update(str(folder), **args)
        assert reply.failure is None, reply


def bits(values: Any) -> np.ndarray:
    return np.asarray(values, np.float32).view(np.uint32)


def assert_no_mismatch(
    scorer: Scorer,
    rollouts: list[Rollout],
    temperature: float = 1.0,
    routed_experts: list[np.ndarray | None] | None = None,
) -> None:
    """Assert that the log probabilities of trainer and engine are equal to the bit."""
    samples = [one.sample for one in rollouts]
    trainer = scorer.logprobs(samples, temperature, routed_experts=routed_experts).numpy()
    server = np.array([x for one in rollouts for x in one.logprobs], np.float32)
    assert len(trainer) == len(server) > 0
    unequal = int((bits(trainer) != bits(server)).sum())
    assert unequal == 0, f"{unequal} of {len(server)} log probabilities differ"
    assert (np.exp(trainer - server) == 1.0).all() and float((server - trainer).mean()) == 0.0
