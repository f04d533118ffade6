"""The model in a separate process: the same bits, and clear errors when the process dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import EngineError, FastDeployError, InvalidField, WeightUpdateRefused
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.loading import load_runner
from fastdeploy.inter_communicator.remote_runner import RemoteRunner
from support.adapters import cases, simple, write_adapter
from support.checkpoints import SPECS, prompt
from support.step_driver import Driver, Sequence, load, sleep, wake

SETTINGS = {"num_gpu_blocks_override": 64, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PROMPTS = [[(7 * i + 3 * j) % 50 for j in range(5 + 9 * i)] for i in range(7)]
SAMPLING = [
    SamplingParams(max_tokens=60, temperature=0.0, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(
        max_tokens=60, min_tokens=5, seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=1, logprobs_mode="processed",
        return_kept=True,
    ),
]  # fmt: skip


@pytest.fixture
def remote() -> Iterator[RemoteRunner]:
    runner = load_runner(EngineConfig(model=str(MODEL_DIR), runner_process=True, model_roots=("/",), **SETTINGS))
    assert isinstance(runner, RemoteRunner)
    yield runner
    runner.close()


def child_of(pid: int) -> int:
    """Return the process id of the only runner process that ``pid`` has started."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields, command = stat.read_text().rsplit(")", 1)[1].split(), (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and b"fastdeploy.entrypoints.runner_main" in command:
            return int(stat.parent.name)
    raise AssertionError("no runner process found")


def test_tokens_and_logprobs_are_bitwise_equal_in_a_separate_process():
    """Few blocks and small steps: prompts take several chunks, and preempted sequences are sent to the runner again."""
    results = []
    for runner_process in (False, True):
        with LLM(**{**SETTINGS, "num_gpu_blocks_override": 12}, runner_process=runner_process) as llm:
            outputs = [output for sampling in SAMPLING for output in llm.generate(PROMPTS, sampling, n=2)]
            results.append(
                [(c.token_ids, c.logprobs, c.prompt_logprobs, c.finish_reason) for o in outputs for c in o.choices]
            )
            assert llm._engine.scheduler.num_preemptions, "no preemption happened"
    assert results[0] == results[1]


def test_adapters_give_the_same_bits_in_a_separate_process(checkpoints, tmp_path):
    spec, results = SPECS["qwen2"], []
    folder = write_adapter(tmp_path / "adapter", spec, cases(spec)["output_layer"])
    for runner_process in (False, True):
        config = EngineConfig(model=str(checkpoints["qwen2"]), runner_process=runner_process, **SETTINGS)
        runner = load_runner(config)
        served = load(runner, 3, folder)
        sequences = [Sequence(f"s{i}", prompt(9 + i, 211), served=[ServedWeights(), served][i % 2]) for i in range(4)]
        results.append([one.trace for one in Driver(runner).generate(sequences, 8)])
        runner.close()
    assert results[0] == results[1]


def test_a_runner_process_takes_adapters_up_to_the_rank_of_its_settings(checkpoints, tmp_path):
    folder = write_adapter(tmp_path / "adapter", SPECS["qwen2"], simple(SPECS["qwen2"], 8))
    config = EngineConfig(model=str(checkpoints["qwen2"]), runner_process=True, max_lora_rank=7, **SETTINGS)
    runner = load_runner(config)
    with pytest.raises(WeightUpdateRefused, match="--max-lora-rank") as error:
        runner.begin_adapter().read(str(folder))
    assert error.value.detail["key"] == "r"
    runner.close()


def test_every_request_fails_when_the_runner_is_killed():
    with LLM(**SETTINGS, runner_process=True) as llm, ThreadPoolExecutor(4) as pool:
        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        llm.generate(PROMPTS[:1], SAMPLING[0])
        llm.pause(mode="keep")  # no step runs, so only the heartbeat can notice the death
        futures = [pool.submit(llm.generate, [prompt], sampling) for prompt in PROMPTS]
        os.kill(child_of(os.getpid()), signal.SIGKILL)
        for future in futures:
            with pytest.raises(FastDeployError):
                future.result(timeout=30)


def test_a_waiting_call_fails_when_the_process_dies(remote, tmp_path):
    os.mkfifo(tmp_path / "config.json")
    staging = remote.begin_update(False, False)
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(staging.add, FolderSource(str(tmp_path)), {})
        os.kill(child_of(os.getpid()), signal.SIGKILL)
        assert type(adding.exception(timeout=30)) in (EngineError, WeightUpdateRefused)
    with pytest.raises(EngineError, match="has ended"):
        remote.checksums()
    with pytest.raises(EngineError, match="has ended"):
        remote.check_alive()


def test_a_move_of_sleeping_weights_ends_with_the_process(remote):
    move = remote.begin_sleep(("weight",), discard=False)
    os.kill(child_of(os.getpid()), signal.SIGKILL)
    with pytest.raises(EngineError, match="has ended"):
        move.run()
    move.abandon()


def test_errors_keep_their_class_and_weights_are_updated_put_to_sleep_and_woken(remote, tmp_path):
    refused = remote.begin_update(False, False)
    with pytest.raises(WeightUpdateRefused):
        refused.add(FolderSource(str(tmp_path)), {})
    refused.abandon()
    before = remote.checksums()
    staging = remote.begin_update(False, True)
    assert remote.has_weights
    receipt = staging.add(FolderSource(str(MODEL_DIR)), {})
    assert not remote.has_weights and receipt.tensors == len(before)
    remote.commit(staging.finish().weights)
    sleep(remote, "weight", "kv_cache")
    assert remote.asleep == {"weight", "kv_cache"} and not remote.has_weights
    wake(remote, "weight", "kv_cache")
    assert remote.asleep == frozenset() and remote.checksums() == before


def test_a_bad_model_gives_the_same_error_as_in_one_process(tmp_path):
    for model, settings in ((str(tmp_path), {}), (str(MODEL_DIR), {"block_size": 24})):
        errors = []
        for runner_process in (False, True):
            with pytest.raises((FastDeployError, OSError)) as error:
                load_runner(EngineConfig(model=model, runner_process=runner_process, **settings))
            errors.append((type(error.value), str(error.value)))
        assert errors[0] == errors[1]
    assert errors[0][0] is InvalidField
