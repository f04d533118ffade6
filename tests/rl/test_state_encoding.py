"""Encoding of a trainer's tensors as safetensors, for every framework."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from fastdeploy.core.errors import InvalidField
from fastdeploy.rl import state_encoding

# a: not in row-major order; b: bfloat16; c: a parameter that has a gradient; d: a scalar; e: no elements
TORCH = """
import torch
state = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.arange(4).to(torch.bfloat16),
         "c": torch.nn.Parameter(torch.ones(2)), "d": torch.tensor(3.0), "e": torch.zeros(0, 3)}
"""
PADDLE = """
import paddle
state = {"a": paddle.arange(6.0).reshape([2, 3]).T, "b": paddle.arange(4).astype("bfloat16"),
         "c": paddle.create_parameter([2], "float32", default_initializer=paddle.nn.initializer.Constant(1.0)),
         "d": paddle.to_tensor(3.0), "e": paddle.zeros([0, 3])}
"""
TELL = """
import hashlib, json, sys
from fastdeploy.rl.state_encoding import host_tensors
host = host_tensors(state)
print(json.dumps({n: [t.dtype, t.shape, hashlib.sha256(t.data).hexdigest()] for n, t in host.items()}))
assert not {"torch", "paddle"} <= set(sys.modules)
"""


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("framework", [TORCH, PADDLE], ids=["torch", "paddle"])
def test_tensors_of_either_framework_give_the_same_bytes_without_the_other(framework):
    done = subprocess.run([sys.executable, "-c", framework + TELL], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    a = np.arange(6, dtype=np.float32).reshape(2, 3).T
    bits = (np.arange(4, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "a": ["F32", [3, 2], sha(np.ascontiguousarray(a))],
        "b": ["BF16", [4], sha(bits)],
        "c": ["F32", [2], sha(np.ones(2, np.float32))],
        "d": ["F32", [], sha(np.float32(3))],
        "e": ["F32", [0, 3], sha(np.zeros(0))],
    }


STATE = {"x": np.arange(6, dtype=np.float16).reshape(2, 3).T, "y": np.float32(1.5), "z": np.zeros((0, 2), np.int64)}


async def test_safetensors_reads_every_encoding(tmp_path):
    host = state_encoding.host_tensors(STATE)
    state_encoding.write_folder(host, tmp_path)
    async with state_encoding.shared_memory(host) as (name, nbytes):
        segment = (state_encoding.SHM / name).read_bytes()
    assert len(segment) == nbytes and not (state_encoding.SHM / name).exists()
    for read in (load(b"".join(state_encoding.pieces(host))), load(segment), load_file(tmp_path / "model.safetensors")):
        assert {n: (v.dtype, v.shape, v.tolist()) for n, v in read.items()} == {
            n: (v.dtype, v.shape, v.tolist()) for n, v in STATE.items()
        }


async def test_a_shared_memory_segment_is_deleted_also_after_an_error():
    with pytest.raises(ValueError):
        async with state_encoding.shared_memory(state_encoding.host_tensors(STATE)) as (name, _):
            raise ValueError
    assert not (state_encoding.SHM / name).exists()


async def test_the_segment_of_a_killed_trainer_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(state_encoding, "SHM", tmp_path)
    killed = tmp_path / f"{state_encoding.SEGMENT_PREFIX}1-a"
    killed.write_bytes(b"x")
    (tmp_path / "somebody-else").write_bytes(b"x")
    async with state_encoding.shared_memory(state_encoding.host_tensors(STATE)) as (first, _):
        assert not killed.exists()
        async with state_encoding.shared_memory(state_encoding.host_tensors(STATE)) as (second, _):
            assert {path.name for path in tmp_path.iterdir()} == {first, second, "somebody-else"}


async def test_the_event_loop_goes_on_while_a_segment_is_written_and_a_cancelled_write_leaves_none(
    monkeypatch, tmp_path
):
    may_write = threading.Event()

    async def write() -> None:
        async with state_encoding.shared_memory(state_encoding.host_tensors(STATE)):
            pass

    monkeypatch.setattr(state_encoding, "SHM", tmp_path)
    monkeypatch.setattr(state_encoding, "write_all", lambda file, piece: may_write.wait(30))
    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    assert list(tmp_path.iterdir()) and not may_write.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list(tmp_path.iterdir())
    may_write.set()


def test_chunks_keep_the_order_and_their_size_and_lose_nothing():
    host = state_encoding.host_tensors(
        {f"t{i}": np.zeros(size, np.uint8) for i, size in enumerate([3, 3, 9, 1, 1, 1, 4])}
    )
    groups = [list(group) for group in state_encoding.split(host, 6)]
    assert groups == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"], ["t6"]]


@pytest.mark.parametrize("value", [[1.0], "text", None, np.zeros(2, np.complex64)])
def test_a_value_that_is_no_tensor_is_refused_by_name(value):
    with pytest.raises(InvalidField, match="layer.3"):
        state_encoding.host_tensors({"layer.3": value})
