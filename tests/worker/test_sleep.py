"""Sleep returns memory to the system, and wake-up restores the same weights, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastdeploy.core.errors import EngineError, InvalidField, OutOfSpace, WrongOrder
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.weight_source import FileSource
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import to_bfloat16, write_safetensors
from fastdeploy.worker import model_runner
from fastdeploy.worker.model_runner import ModelRunner
from support.specs import SPECS
from support.step_driver import outputs, sleep, update, wake
from worker.architectures import with_ops_by_architecture

MIB = 1 << 20


def assert_the_same_weights_serve_after_a_sleep(runner: ModelRunner, *tags: str) -> None:
    before, checksums = outputs(runner), runner.checksums()
    for _ in range(2):
        sleep(runner, *tags)
        assert runner.asleep == set(tags) and runner.has_weights == ("weight" not in tags)
        with pytest.raises(WrongOrder):
            runner.execute(StepPlan(0, [], []))
        wake(runner, *tags)
        assert runner.asleep == set() and runner.has_weights
        assert outputs(runner) == before and runner.checksums() == checksums


@pytest.mark.parametrize(("make_runner", "name"), with_ops_by_architecture(), indirect=["make_runner"])
def test_after_a_sleep_the_same_weights_serve_bit_for_bit(name, make_runner, tmp_path):
    assert_the_same_weights_serve_after_a_sleep(make_runner(name, spill_dir=str(tmp_path)), "weight", "kv_cache")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["weight", "kv_cache"])
def test_after_a_sleep_of_one_tag_the_same_weights_serve_bit_for_bit(tag, make_runner):
    assert_the_same_weights_serve_after_a_sleep(make_runner("qwen2_bf16"), tag)


def open_files(folder: Path) -> list[str]:
    """Return the descriptors of this process of files in ``folder``, also of files without a name."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread closed it
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                found.append(number)
    return sorted(found)


def test_a_partial_update_survives_a_sleep(make_runner, tmp_path):
    runner, name = make_runner("qwen2_bf16"), "model.layers.0.self_attn.k_proj.weight"
    new = to_bfloat16(random_tensors(replace(SPECS["qwen2_bf16"], seed=9))[name])
    write_safetensors(tmp_path / "x", {name: new})
    update(runner, FileSource(str(tmp_path / "x")), partial=True)
    before, checksums = outputs(runner), runner.checksums()
    sleep(runner, "weight")
    wake(runner, "weight")
    assert outputs(runner) == before and runner.checksums() == checksums


def test_the_tags_sleep_and_wake_apart(make_runner):
    runner = make_runner("qwen2")
    before = outputs(runner)
    sleep(runner, "kv_cache")
    sleep(runner, "weight")
    wake(runner, "weight")
    assert runner.asleep == {"kv_cache"} and runner.checksums()
    wake(runner, "kv_cache")
    assert outputs(runner) == before


def test_the_file_of_sleeping_weights_has_no_name_and_is_closed_on_wake_up(make_runner, tmp_path):
    runner = make_runner("qwen2", spill_dir=str(tmp_path))
    sleep(runner, "weight")
    assert list(tmp_path.iterdir()) == []
    descriptors = len(open_files(tmp_path))
    wake(runner, "weight")
    assert len(open_files(tmp_path)) == descriptors - 1


def test_an_unknown_tag_or_one_in_the_wrong_state_is_refused_and_nothing_changes(make_runner):
    runner = make_runner("qwen2")
    before = outputs(runner)
    with pytest.raises(WrongOrder):
        wake(runner, "weight")
    with pytest.raises(InvalidField, match="tags"):
        sleep(runner, "weight", "adapters")
    sleep(runner, "kv_cache")
    with pytest.raises(WrongOrder):
        sleep(runner, "weight", "kv_cache")
    with pytest.raises(WrongOrder):
        wake(runner, "weight", "kv_cache")
    assert runner.asleep == {"kv_cache"} and runner.has_weights
    wake(runner, "kv_cache")
    assert outputs(runner) == before


def test_discarded_weights_are_gone_until_a_whole_update(make_runner, tmp_path):
    runner = make_runner("qwen2", spill_dir="/nowhere")  # nothing is written
    spec = replace(SPECS["qwen2"], seed=99)
    folder = write_checkpoint(tmp_path / "new", spec)
    fresh = outputs(make_runner(folder))
    sleep(runner, "weight", discard=True)
    with pytest.raises(WrongOrder):
        runner.begin_update(False, False)
    wake(runner, "weight")
    assert runner.asleep == set() and not runner.has_weights
    for call in (lambda: runner.execute(StepPlan(0, [], [])), runner.checksums):
        with pytest.raises(WrongOrder):
            call()
    with pytest.raises(WrongOrder):
        runner.begin_update(True, False)
    update(runner, folder)
    assert runner.has_weights and outputs(runner) == fresh


def test_no_update_begins_while_the_weights_sleep_but_one_does_while_the_kv_cache_sleeps(make_runner, tmp_path):
    runner = make_runner("qwen2")
    folder = write_checkpoint(tmp_path / "new", replace(SPECS["qwen2"], seed=99))
    sleep(runner, "weight", "kv_cache")
    for partial in (True, False):
        with pytest.raises(WrongOrder):
            runner.begin_update(partial, False)
    wake(runner, "weight")
    update(runner, folder)
    wake(runner, "kv_cache")
    assert outputs(runner) == outputs(make_runner(folder))


@pytest.fixture
def file_size_limit():
    """Return a function that limits the size of files: a longer write fails, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_the_sleep_and_changes_nothing(make_runner, tmp_path, file_size_limit):
    runner = make_runner("qwen2", spill_dir=str(tmp_path))
    before, weights, cache = outputs(runner), runner.weights, runner.cache
    descriptors = open_files(tmp_path)
    file_size_limit(50_000)
    with pytest.raises(OutOfSpace):
        sleep(runner, "kv_cache", "weight")
    assert runner.asleep == set() and runner.weights is weights and runner.cache is cache
    assert list(tmp_path.iterdir()) == [] and open_files(tmp_path) == descriptors
    assert outputs(runner) == before


def test_a_spill_folder_that_is_not_there_refuses_the_sleep(make_runner, tmp_path):
    runner = make_runner("qwen2", spill_dir=str(tmp_path / "gone"))
    with pytest.raises(OutOfSpace, match="gone"):
        sleep(runner, "weight")
    assert runner.asleep == set() and runner.has_weights


@pytest.mark.parametrize("shortage", ["told by the system", "while packing", "while allocating the cache"])
def test_a_wake_up_without_enough_memory_fails_and_can_be_repeated(shortage, make_runner, monkeypatch):
    runner = make_runner("qwen2")
    before, calls = outputs(runner), []
    sleep(runner, "weight", "kv_cache")

    def fails_late(*args):
        calls.append(args)
        if len(calls) >= 3 or shortage == "while allocating the cache":
            raise MemoryError("no pages left")
        return pack(*args)

    pack = runner.ops.pack_linear
    with monkeypatch.context() as patch:
        if shortage == "told by the system":
            patch.setattr(model_runner, "free_memory", lambda: 1000)
        else:
            patch.setattr(runner.ops, "pack_linear" if "packing" in shortage else "new_kv_cache", fails_late)
        with pytest.raises(OutOfSpace):
            wake(runner, "weight", "kv_cache")
    assert runner.asleep == {"weight", "kv_cache"} and not runner.has_weights and runner.cache is None
    wake(runner, "weight", "kv_cache")
    assert outputs(runner) == before


def _measure(folder: str, ops: str, dtype: str) -> None:
    """Print the resident memory of this process before, during and after a sleep."""

    def resident() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))

    runner = ModelRunner(
        folder,
        dtype=dtype,
        num_blocks=3000,
        ops=ReferenceOps(dtype) if ops == "reference" else get_ops(dtype),
        standby_weights="on",
    )
    runner.refresh_standby()
    blocks = list(range(2999))
    runner.ops.copy_blocks(runner.cache, blocks[::-1], [block + 1 for block in blocks[::-1]])  # touch all pages
    outputs(runner)
    weights = sum(value.nbytes for value in runner.weights.values.values() if hasattr(value, "out_features"))
    report = {"before": resident(), "weights": weights, "cache": runner.cache.nbytes, "standby": runner.standby_nbytes}
    report["freed"] = sleep(runner, "weight")
    report["asleep"] = resident()
    wake(runner, "weight")
    report["awake"] = resident()
    report["freed_again"] = sleep(runner, "weight", "kv_cache")
    report["both"] = resident()
    print(json.dumps(report))


# The C++ ops pack each dtype in another way. The reference holds Paddle tensors of float32 for both.
@pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        (get_ops("float32").name, "bfloat16"),
        pytest.param(get_ops("float32").name, "float32", marks=pytest.mark.slow),
        pytest.param("reference", "float32", marks=pytest.mark.slow),
    ],
)
def test_sleep_returns_the_memory_to_the_system(ops, dtype, tmp_path):
    spec = replace(SPECS["qwen2"], hidden=512, inner=3072, layers=4, vocab=8000, seed=7)
    folder = write_checkpoint(tmp_path / "large", spec)
    code = f"from worker.test_sleep import _measure; _measure({str(folder)!r}, {ops!r}, {dtype!r})"
    tests = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, str(Path(tests).parent)]), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["standby"] == report["weights"] > 40 * MIB
    assert report["before"] - report["asleep"] > 0.9 * 2 * report["weights"]
    assert report["freed"] > 0.9 * 2 * report["weights"]
    most_awake = report["before"] - report["standby"] + 20 * MIB
    assert report["awake"] < most_awake, "wake-up takes more memory than sleep returned"
    assert report["awake"] - report["both"] > 0.9 * (report["weights"] + report["cache"]), "the KV cache kept pages"
    assert report["freed_again"] > 0.9 * (report["weights"] + report["cache"])


def test_steps_and_updates_go_on_while_the_weights_are_written(make_runner, tmp_path, monkeypatch):
    runner = make_runner("qwen2")
    before, new = outputs(runner), write_checkpoint(tmp_path / "new", replace(SPECS["qwen2"], seed=99))
    unpack, seen = runner.ops.unpack_linear, []

    def unpack_beside_steps(*args):
        seen.append(outputs(runner) == before)
        return unpack(*args)

    written = runner.begin_sleep(("weight",), discard=False)
    with monkeypatch.context() as patch:
        patch.setattr(runner.ops, "unpack_linear", unpack_beside_steps)
        written.run()
    assert seen and all(seen)
    written.abandon()
    update(runner, new)
    sleep(runner, "weight")
    wake(runner, "weight")
    assert outputs(runner) == outputs(make_runner(new)) != before


@pytest.mark.parametrize("way", ["sleep", "wake"])
def test_a_move_that_is_abandoned_stops_at_the_next_piece_and_frees_its_copy(way, make_runner, monkeypatch, tmp_path):
    runner = make_runner("qwen2", spill_dir=str(tmp_path))
    before = outputs(runner)
    if way == "wake":
        sleep(runner, "weight")
    move = runner.begin_wake(("weight",)) if way == "wake" else runner.begin_sleep(("weight",), False)
    descriptors = len(open_files(tmp_path))
    name = "preadv" if way == "wake" else "write"
    call, calls = getattr(os, name), []

    def abandoned_meanwhile(*args):
        calls.append(len(calls))
        if len(calls) == 2:
            move.abandon()
        return call(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, abandoned_meanwhile)
        with pytest.raises(WrongOrder):
            move.run()
    gc.collect()  # pytest keeps the frames of the error
    assert len(calls) == 2 and len(open_files(tmp_path)) == descriptors
    if way == "wake":
        wake(runner, "weight")
    assert outputs(runner) == before


def test_a_copy_that_is_ready_and_not_wanted_is_freed(make_runner, tmp_path):
    runner = make_runner("qwen2", spill_dir=str(tmp_path))
    before, descriptors = outputs(runner), len(open_files(tmp_path))
    written = runner.begin_sleep(("weight",), discard=False)
    written.run()
    assert len(open_files(tmp_path)) == descriptors + 1
    written.abandon()
    assert len(open_files(tmp_path)) == descriptors and outputs(runner) == before


def test_a_read_that_hangs_keeps_the_file_so_that_no_other_gets_its_number(make_runner, monkeypatch):
    runner = make_runner("qwen2")
    before = outputs(runner)
    sleep(runner, "weight")
    hanging, preadv, numbers = runner.begin_wake(("weight",)), os.preadv, []

    def hangs(fd, *args):
        if not numbers:
            numbers.append(fd)
            hanging.abandon()
            wake(runner, "weight")
            numbers.append(os.readlink(f"/proc/self/fd/{fd}"))
        return preadv(fd, *args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", hangs)
        with pytest.raises(WrongOrder):
            hanging.run()
    assert "fastdeploy-" in numbers[1] and outputs(runner) == before


@pytest.mark.parametrize("how", ["cut short", "input/output error"])
def test_a_file_that_cannot_be_read_fails_the_wake_up_and_nothing_changes(how, make_runner, monkeypatch):
    runner = make_runner("qwen2")
    before = outputs(runner)
    sleep(runner, "weight")

    def fails(*args):
        if how == "cut short":
            return 0
        raise OSError(errno.EIO, how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(EngineError, match=how):
            wake(runner, "weight")
    assert runner.asleep == {"weight"} and not runner.has_weights
    wake(runner, "weight")
    assert outputs(runner) == before
