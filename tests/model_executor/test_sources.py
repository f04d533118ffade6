"""Tensors come out of a folder, a file or shared memory as they were written; what is wrong is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import uuid
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest

from checkpoints import SPECS, bfloat16_bits, random_tensors, write_checkpoint, write_safetensors
from fastdeploy.errors import WeightUpdateRefused
from fastdeploy.inter_communicator.messages import FileSource, FolderSource, SharedMemorySource
from fastdeploy.model_executor.safetensors_source import MAX_HEADER_BYTES, open_source

SPEC = SPECS["qwen2_tied"]
SHAPES = {name: array.shape for name, array in random_tensors(SPEC).items()}


@pytest.fixture
def segment():
    """Path of a shared memory segment that does not exist yet."""
    path = Path("/dev/shm") / f"fastdeploy-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def _file(path: Path, tensors: dict[str, np.ndarray]) -> FileSource:
    write_safetensors(path, tensors)
    return FileSource(str(path))


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tensors_come_out_of_a_folder_as_they_were_written(shards, tmp_path):
    spec = replace(SPECS["qwen3"], shards=shards)
    with open_source(FolderSource(str(write_checkpoint(tmp_path / "c", spec)))) as reader:
        for name, array in random_tensors(spec).items():
            read = reader.read(name)
            assert read.dtype == np.float32 and np.array_equal(read, array)


def test_bfloat16_is_read_as_bits_and_float16_is_widened(tmp_path):
    values = np.array([[1.5, -2.25], [3e-5, 7.0]], np.float32)
    tensors = {"b": bfloat16_bits(values), "h": values.astype(np.float16), "f": values}
    with open_source(_file(tmp_path / "x", tensors)) as reader:
        assert reader.read("b").dtype == np.uint16
        assert np.array_equal(reader.read("b"), bfloat16_bits(values))
        assert np.array_equal(reader.read("h"), values.astype(np.float16).astype(np.float32))


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path):
    source = _file(tmp_path / "x", {"s": np.float32(3).reshape(()), "e": np.zeros((0, 4), np.float32)})
    with open_source(source) as reader:
        assert reader.read("s") == 3 and reader.read("e").shape == (0, 4)


def test_what_was_read_from_shared_memory_is_a_copy_that_a_trainer_cannot_change(segment):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(segment, {"w": values})
    with open_source(SharedMemorySource("/" + segment.name)) as reader:
        array = reader.read("w")
        segment.write_bytes(b"\xff" * segment.stat().st_size)
        assert np.array_equal(array, values)


def test_a_segment_that_is_cut_while_it_is_read_is_refused(segment):
    write_safetensors(segment, {"w": np.ones((1000, 10), np.float32)})
    with open_source(SharedMemorySource(segment.name)) as reader:
        os.truncate(segment, 2000)  # a mapping would now be a SIGBUS
        with pytest.raises(WeightUpdateRefused, match="cut short"):
            reader.read("w")


def test_nbytes_bounds_what_is_looked_at_of_a_segment(segment):
    write_safetensors(segment, {"w": np.ones((3, 4), np.float32)})
    size = segment.stat().st_size
    with open(segment, "ab") as file:
        file.write(b"\xff" * 4096)
    with open_source(SharedMemorySource(segment.name, size)) as reader:
        assert reader.read("w").shape == (3, 4)
    for nbytes in (0, size - 4, size + 4097, -5):
        with pytest.raises(WeightUpdateRefused, match=segment.name):
            open_source(SharedMemorySource(segment.name, nbytes))


def test_the_segment_stays_the_trainers(segment, monkeypatch):
    monkeypatch.setattr(resource_tracker, "register", lambda *args: pytest.fail("the tracker would unlink it"))
    write_safetensors(segment, {"w": np.ones(4, np.float32)})
    with open_source(SharedMemorySource(segment.name)) as reader:
        reader.read("w")
    assert segment.exists() and "multiprocessing.shared_memory" not in sys.modules


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "../etc/passwd", "/a/b", "a\0b", "no-such-segment"])
def test_the_name_of_a_segment_cannot_lead_elsewhere(name):
    with pytest.raises(WeightUpdateRefused):
        open_source(SharedMemorySource(name))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for source in (FolderSource(str(tmp_path)), FileSource(str(tmp_path / "model.safetensors"))):
        with pytest.raises(WeightUpdateRefused, match="not a regular file"):
            open_source(source)


class _Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_is_never_opened_whatever_its_name(name, tmp_path, segment):
    (tmp_path / name).write_bytes(pickle.dumps({"w": _Bomb()}))
    segment.write_bytes(pickle.dumps({"w": _Bomb()}))
    sources = (FolderSource(str(tmp_path)), FileSource(str(tmp_path / name)), SharedMemorySource(segment.name))
    for source in sources:
        with pytest.raises(WeightUpdateRefused):
            open_source(source)


def test_a_name_that_appears_twice_in_a_header_is_refused(tmp_path):
    source = _file(tmp_path / "x", {"v": np.ones(2, np.float32), "w": np.ones(2, np.float32)})
    data = Path(source.path).read_bytes()
    Path(source.path).write_bytes(data.replace(b'"v"', b'"w"'))
    with pytest.raises(WeightUpdateRefused, match="twice"):
        open_source(source)


def test_a_header_is_bounded(tmp_path):
    path = tmp_path / "x"
    with open(path, "wb") as file:  # sparse: it takes no space
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(WeightUpdateRefused, match="cannot hold the header"):
        open_source(FileSource(str(path)))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_checksum_is_that_of_the_bytes_in_the_source(kind, tmp_path):
    values = np.linspace(-3, 5, 60, dtype=np.float32).reshape(6, 10)
    stored = bfloat16_bits(values) if kind == "bfloat16" else values.astype(kind)
    right = hashlib.sha256(stored.tobytes()).hexdigest()
    with open_source(_file(tmp_path / "x", {"w": stored})) as reader:
        assert reader.read("w", right).shape == reader.read("w", right.upper()).shape == (6, 10)
        with pytest.raises(WeightUpdateRefused, match="tensor w: of x does not have the sha256"):
            reader.read("w", right[::-1])


def test_no_file_stays_open_whether_reading_succeeds_or_fails(tmp_path):
    good = write_checkpoint(tmp_path / "good", replace(SPEC, shards=4))
    bad = write_checkpoint(tmp_path / "bad", replace(SPEC, shards=4))
    os.truncate(bad / "model-00004-of-00004.safetensors", 100)
    before = sorted(os.listdir("/proc/self/fd"))
    with open_source(FolderSource(str(good))) as reader:
        reader.read("model.norm.weight")
    with pytest.raises(WeightUpdateRefused):
        open_source(FolderSource(str(bad)))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_damaged_header_is_refused_or_harmless_but_never_anything_else(tmp_path):
    folder = write_checkpoint(tmp_path / "c", SPEC)
    path = folder / "model.safetensors"
    good, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(300):
        data = bytearray(good)
        for at in rng.integers(0, end, rng.integers(1, 4)):
            data[at] = rng.choice(list(b'0129{}[]",:-.eF\x00\xff'))
        path.write_bytes(data)
        try:
            with open_source(FolderSource(str(folder))) as reader:
                reader.check(SHAPES)
                for name in reader.entries:
                    reader.read(name)
        except WeightUpdateRefused:
            refused += 1
    assert refused > 250


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_refused_by_name(kind, value, tmp_path):
    values = np.ones((3, 700_000), np.float32)  # the last of several pieces
    values[2, -1] = value
    stored = bfloat16_bits(values) if kind == "bfloat16" else values.astype(kind)
    with open_source(_file(tmp_path / "x", {"fine": stored[:2], "diverged": stored})) as reader:
        assert reader.read("fine").shape == (2, 700_000)
        with pytest.raises(WeightUpdateRefused, match="diverged.* not finite"):
            reader.read("diverged")


def test_an_entry_that_lies_about_its_size_is_refused(tmp_path):
    source = _file(tmp_path / "x", {"w": np.ones((4, 4), np.float32)})
    data = Path(source.path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["w"]["shape"] = [4, 5]
    Path(source.path).write_bytes(data[:8] + json.dumps(header).encode().ljust(length) + data[8 + length :])
    with pytest.raises(WeightUpdateRefused, match="tensor w"):
        open_source(source)
