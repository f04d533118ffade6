"""Chains of deltas while trainers, engines and API servers are killed: the weights are those of one whole load."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from e2e.delta_trainer_child import Checkpoint, bits_of
from e2e.server import PROMPT, SMALL, Server, until
from fastdeploy import LLM, SamplingParams
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.process import is_alive
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.loading import load_runner
from fastdeploy.testing.tensors import write_safetensors

TRAINER = Path(__file__).with_name("delta_trainer_child.py")
SETTINGS = {"max_num_seqs": 4, "num_gpu_blocks_override": 256}
# Of publications that fail because a process was killed. "wrong_order": a killed trainer has put the server to sleep.
FAILURES = {"unreachable", "engine_dead", "engine_stalled", "session_not_found", "wrong_order"}


class Crashes:
    """One server, its trainers, and their deaths. seen: what has happened, by its name."""

    def __init__(self, server: Server, folder: Path, seen: Counter[str], seed: int):
        self._server, self._folder, self._seen = server, folder, seen
        self._random = random.Random(seed)

    def publish(self, deltas: int, victims: Sequence[str]) -> None:
        """Let trainers publish ``deltas`` deltas. victims: killed one after the other, at random times."""
        left = deltas
        plan = sorted(self._random.uniform(0.1, 0.9) for _ in victims)
        waiting = [(round(share * deltas), victim) for share, victim in zip(plan, victims, strict=True)]
        while left > 0:
            with self._trainer(left) as trainer:
                for line in trainer.stdout:
                    left -= self._note(line)
                    if waiting and deltas - left >= waiting[0][0]:
                        self._kill(waiting.pop(0)[1], trainer)
                code = trainer.wait()
            assert code in (0, -signal.SIGKILL), "the trainer failed: see its traceback"

    @contextlib.contextmanager
    def _trainer(self, deltas: int) -> Iterator[subprocess.Popen[str]]:
        path = os.pathsep.join([str(TRAINER.parents[1]), str(TRAINER.parents[2])])
        command = [sys.executable, str(TRAINER), self._server.url, str(self._folder), str(deltas)]
        environment = {**os.environ, "PYTHONPATH": path}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                yield process
            finally:
                process.kill()

    def _note(self, line: str) -> int:
        """Count what a line tells. Return the number of deltas that it tells of."""
        name, *more = line.split()
        self._seen[name] += 1
        if name == "failed":
            assert set(more) <= FAILURES and self._seen.keys() & {"engine killed", "api killed", "trainer killed"}, line
        return int(name == "delta")

    def _kill(self, victim: str, trainer: subprocess.Popen[str]) -> None:
        time.sleep(self._random.uniform(0, 0.15))  # the moment of the kill within the work of the trainer
        api = self._random.choice(self._server.api_pids)
        pid = {"trainer": trainer.pid, "engine": self._server.engine_pid, "api": api}[victim]
        os.kill(pid, signal.SIGKILL)
        self._seen[f"{victim} killed"] += 1
        if victim != "trainer":
            until(lambda: not is_alive(pid), 20, "the process is dead")
            until(lambda: self._server.pids("engine_main") and self._server.api_pids, 60, "another process")

    def compare_with_a_whole_load(self) -> None:
        """Compare the fingerprint, the checksums and the tokens with those of a fresh runner that has loaded the state
        of the trainer."""
        fresh = self._folder / "fresh"
        shutil.copytree(MODEL_DIR, fresh, dirs_exist_ok=True)
        state, step = Checkpoint(self._folder).read()
        write_safetensors(fresh / "model.safetensors", bits_of(state))
        runner = load_runner(EngineConfig(model=str(fresh), **SETTINGS).check())
        served = self._server.weights(checksums=True)
        assert served["version"] in (str(step), str(served["weight_epoch"]))
        assert served["fingerprint"] == runner.fingerprint
        assert served["checksums"] == runner.checksums()
        with LLM(str(fresh), runner=runner, **SETTINGS) as llm:
            greedy = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
            expected = llm.generate([PROMPT], greedy)[0].outputs[0].token_ids
        assert self._server.complete(PROMPT, max_tokens=40, ignore_eos=True)["token_ids"] == list(expected)
        self._seen["compared"] += 1


def run(folder: Path, plans: Sequence[Sequence[str]], deltas: int, seen: Counter[str], seed: int) -> None:
    """Start a server, and publish ``deltas`` deltas for each plan: the processes that are killed meanwhile."""
    uploads = folder / "uploads"
    uploads.mkdir(exist_ok=True)
    with Server(*SMALL, "--workers", "2", "--upload-dir", str(uploads)) as server:
        crashes = Crashes(server, folder, seen, seed)
        for plan in plans:
            crashes.publish(deltas, plan)
            crashes.compare_with_a_whole_load()
        assert server.stop() == 0
    assert not list(uploads.iterdir()), "an upload was left"


@pytest.mark.slow
@pytest.mark.processes
def test_after_deltas_and_crashes_the_weights_are_those_of_a_whole_load(tmp_path):
    seen: Counter[str] = Counter()
    run(tmp_path, [["trainer", "engine", "api"]], 12, seen, seed=1)
    assert seen["delta"] >= 12 and seen["compared"] == 1
    assert all(seen[f"{victim} killed"] == 1 for victim in ("trainer", "engine", "api")), seen


@pytest.mark.slow
@pytest.mark.processes
def test_after_a_thousand_deltas_and_many_crashes_the_weights_are_those_of_whole_loads(tmp_path):
    """A server lives for 200 deltas, since a killed process is started again after longer and longer times."""
    seen: Counter[str] = Counter()
    plans = [["trainer", "engine"], ["trainer", "api"], ["engine", "trainer"], ["trainer", "trainer", "engine"]]
    for seed in range(5):
        run(tmp_path, plans, 50, seen, seed)
    print(dict(seen))
    assert seen["delta"] >= 1000 and seen["compared"] == 20
    assert {"wrong-base", "truncated", "flipped", "wrong-result", "aborted", "slept", "checked"} <= seen.keys()
