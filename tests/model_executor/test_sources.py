"""Tensors are read from a folder, a file or shared memory with the bits that were written; errors name the cause."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.files import ANYWHERE, Folder
from fastdeploy.core.pulled_folder import LOCK, STATE, SYNC
from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource, Source
from fastdeploy.model_executor.safetensors_source import (
    CHECKSUMS,
    DTYPES,
    INDEX,
    MAX_FILES,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    MAX_TENSORS,
    open_source,
    read_checksums,
)
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from fastdeploy.testing.tensors import to_bfloat16, write_safetensors
from support.search import examples
from support.specs import SPECS

SPEC = SPECS["qwen2_tied"]
SHAPES = {name: array.shape for name, array in random_tensors(SPEC).items()}


@pytest.fixture
def segment():
    """Return the path of a shared memory segment that does not exist yet."""
    path = Path("/dev/shm") / f"fastdeploy-test-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


def _file(path: Path, tensors: dict[str, np.ndarray]) -> FileSource:
    write_safetensors(path, tensors)
    return FileSource(str(path))


def refused(source: Source, match: str | None = None, roots: Sequence[str] = ANYWHERE) -> None:
    """Check that the source cannot be opened."""
    with pytest.raises(WeightUpdateRefused, match=match):
        open_source(source, roots)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_tensors_come_out_of_a_folder_as_they_were_written(shards, tmp_path):
    spec = replace(SPECS["qwen3"], shards=shards)
    with open_source(FolderSource(str(write_checkpoint(tmp_path / "c", spec)))) as reader:
        for name, array in random_tensors(spec).items():
            read = reader.read(name)
            assert read.dtype == np.float32 and np.array_equal(read, array)


def test_bfloat16_is_read_as_bits_and_float16_is_widened(tmp_path):
    values = np.array([[1.5, -2.25], [3e-5, 7.0]], np.float32)
    tensors = {"b": to_bfloat16(values), "h": values.astype(np.float16), "f": values}
    with open_source(_file(tmp_path / "x", tensors)) as reader:
        assert reader.read("b").dtype == np.uint16
        assert np.array_equal(reader.read("b"), to_bfloat16(values))
        assert np.array_equal(reader.read("h"), values.astype(np.float16).astype(np.float32))


def test_a_scalar_and_an_empty_tensor_are_read(tmp_path):
    source = _file(tmp_path / "x", {"s": np.float32(3).reshape(()), "e": np.zeros((0, 4), np.float32)})
    with open_source(source) as reader:
        assert reader.read("s") == 3 and reader.read("e").shape == (0, 4)


@pytest.mark.parametrize("second", [(0, 4), (0, 8), (4, 8), (6, 10)])
def test_tensors_that_share_bytes_are_refused_by_name_and_file(second, tmp_path, segment):
    """Such a file is a mistake of its writer, and one tensor would have the values of another."""
    header = f'{{"a": {_entry(shape=(2,), offsets=(0, 8))}, "b": {_entry("U8", (4,), second)}}}'
    source = _raw(tmp_path / "x", header.encode(), bytes(10))
    segment.write_bytes(Path(source.path).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(Path(source.path).read_bytes())
    for each in (source, SharedMemorySource(segment.name), FolderSource(str(tmp_path))):
        refused(each, r"tensor [ab]: of \S+ shares bytes")


def test_an_empty_tensor_may_lie_anywhere(tmp_path):
    header = f'{{"a": {_entry(shape=(2,), offsets=(0, 8))}, "b": {_entry(shape=(0,), offsets=(4, 4))}}}'
    with open_source(_raw(tmp_path / "x", header.encode(), bytes(8))) as reader:
        assert reader.read("b").size == 0


def test_a_tensor_read_from_shared_memory_is_a_copy(segment):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_safetensors(segment, {"w": values})
    with open_source(SharedMemorySource("/" + segment.name)) as reader:
        array = reader.read("w")
        segment.write_bytes(b"\xff" * segment.stat().st_size)
        assert np.array_equal(array, values)


def test_a_segment_that_is_cut_while_it_is_read_is_refused(segment):
    write_safetensors(segment, {"w": np.ones((1000, 10), np.float32)})
    with open_source(SharedMemorySource(segment.name)) as reader:
        os.truncate(segment, 2000)  # reading a mapping would now raise SIGBUS
        with pytest.raises(WeightUpdateRefused, match="cut short"):
            reader.read("w")


def test_nothing_beyond_nbytes_of_a_segment_is_read(segment):
    write_safetensors(segment, {"w": np.ones((3, 4), np.float32)})
    size = segment.stat().st_size
    with open(segment, "ab") as file:
        file.write(b"\xff" * 4096)
    with open_source(SharedMemorySource(segment.name, size)) as reader:
        assert reader.read("w").shape == (3, 4)
    for nbytes in (0, size - 4, size + 4097, -5):
        refused(SharedMemorySource(segment.name, nbytes), segment.name)


def test_reading_a_segment_neither_unlinks_nor_tracks_it(segment, monkeypatch):
    monkeypatch.delitem(sys.modules, "multiprocessing.shared_memory", raising=False)  # another test may import it
    monkeypatch.setattr(resource_tracker, "register", lambda *args: pytest.fail("the tracker would unlink it"))
    write_safetensors(segment, {"w": np.ones(4, np.float32)})
    with open_source(SharedMemorySource(segment.name)) as reader:
        reader.read("w")
    assert segment.exists() and "multiprocessing.shared_memory" not in sys.modules


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "../etc/passwd", "/a/b", "a\0b", "no-such-segment"])
def test_a_segment_name_with_a_path_is_refused(name):
    refused(SharedMemorySource(name))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    for source in (FolderSource(str(tmp_path)), FileSource(str(tmp_path / "model.safetensors"))):
        refused(source, "not a regular file")


class _Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was executed')",)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_pickle_is_never_opened_whatever_its_name(name, tmp_path, segment):
    (tmp_path / name).write_bytes(pickle.dumps({"w": _Bomb()}))
    segment.write_bytes(pickle.dumps({"w": _Bomb()}))
    sources = (FolderSource(str(tmp_path)), FileSource(str(tmp_path / name)), SharedMemorySource(segment.name))
    for source in sources:
        refused(source)


def test_a_header_is_bounded(tmp_path):
    path = tmp_path / "x"
    with open(path, "wb") as file:  # sparse: it takes no space
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    refused(FileSource(str(path)), "cannot hold the header")


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_a_checksum_is_that_of_the_bytes_in_the_source(kind, tmp_path):
    values = np.linspace(-3, 5, 60, dtype=np.float32).reshape(6, 10)
    stored = to_bfloat16(values) if kind == "bfloat16" else values.astype(kind)
    right = hashlib.sha256(stored.tobytes()).hexdigest()
    with open_source(_file(tmp_path / "x", {"w": stored})) as reader:
        assert reader.read("w", right).shape == reader.read("w", right.upper()).shape == (6, 10)
        with pytest.raises(WeightUpdateRefused, match="tensor w: of x does not have the sha256"):
            reader.read("w", right[::-1])


def test_a_folder_that_a_pull_writes_to_or_has_left_unfinished_is_refused(tmp_path):
    write_checkpoint(tmp_path, SPEC)
    (tmp_path / SYNC).mkdir()
    (tmp_path / SYNC / LOCK).touch()
    refused(FolderSource(str(tmp_path)), "pull again")
    (tmp_path / SYNC / STATE).write_text('{"version": "000003"}')
    with open(tmp_path / SYNC / LOCK) as lock:
        with open_source(FolderSource(str(tmp_path))), pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused(FolderSource(str(tmp_path)), "is writing to it")


def test_no_file_stays_open_after_success_or_failure(tmp_path):
    good = write_checkpoint(tmp_path / "good", replace(SPEC, shards=4))
    bad = write_checkpoint(tmp_path / "bad", replace(SPEC, shards=4))
    os.truncate(bad / "model-00004-of-00004.safetensors", 100)
    before = sorted(os.listdir("/proc/self/fd"))
    with open_source(FolderSource(str(good))) as reader:
        reader.read("model.norm.weight")
    refused(FolderSource(str(bad)))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_damaged_header_is_refused_or_read(tmp_path):
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
    stored = to_bfloat16(values) if kind == "bfloat16" else values.astype(kind)
    with open_source(_file(tmp_path / "x", {"fine": stored[:2], "diverged": stored})) as reader:
        assert reader.read("fine").shape == (2, 700_000)
        with pytest.raises(WeightUpdateRefused, match="diverged.* not finite"):
            reader.read("diverged")


def _raw(path: Path, header: bytes, data: bytes = b"") -> FileSource:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return FileSource(str(path))


def _entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> str:
    return json.dumps({"dtype": dtype, "shape": shape, "data_offsets": offsets})


HUGE = 2**63 - 1
BAD_HEADERS = {
    "many dimensions": f'{{"w": {_entry(shape=[HUGE] * 30_000)}}}',
    "nine dimensions": f'{{"w": {_entry(shape=[1] * 9)}}}',
    "a shape of another size": f'{{"w": {_entry(shape=[2])}}}',
    "a product beyond all memory": f'{{"w": {_entry(shape=[HUGE] * 8)}}}',
    "a dimension beyond 64 bits": f'{{"w": {_entry(shape=[2**70])}}}',
    "thousands of digits": f'{{"w": {_entry(shape=[1])}}}'.replace("[1]", "[" + "1" * 3000 + "]"),
    "a negative dimension": f'{{"w": {_entry(shape=[-1])}}}',
    "a fraction": f'{{"w": {_entry(shape=[1.5])}}}',
    "an offset beyond 64 bits": f'{{"w": {_entry(offsets=[0, 2**70])}}}',
    "offsets backwards": f'{{"w": {_entry(offsets=[4, 0])}}}',
    "three offsets": f'{{"w": {_entry(offsets=[0, 4, 8])}}}',
    "a type that is no string": f'{{"w": {_entry(dtype=["F32"])}}}',
    "a key too many": '{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], "x": 1}}',
    "a key twice": '{"w": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    "a name twice": f'{{"w": {_entry()}, "w": {_entry()}}}',
    "a name twice, once escaped": f'{{"w": {_entry()}, "\\u0077": {_entry()}}}',
    "metadata twice, with a name between": f'{{"__metadata__": {{"a": "b"}}, "w": {_entry()}, "__metadata__": {{}}}}',
    "half of a surrogate pair": f'{{"\\ud800": {_entry()}}}',
    "a long name": f'{{"{"n" * 600_000}": {_entry()}, "x": 1}}',
    "a long type": f'{{"w": {_entry(dtype="F" * 600_000)}}}',
    "deep nesting": '{"w": ' * 20_000 + "1" + "}" * 20_000,
    "a list": "[1]",
    "many names": "{" + ",".join(f'"{i}":{{}}' for i in range(4 * MAX_TENSORS + 1)) + "}",
}


@pytest.mark.parametrize("header", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_a_hostile_header_is_refused_in_few_words(header, tmp_path):
    with pytest.raises(WeightUpdateRefused) as error:
        open_source(_raw(tmp_path / "x", header.encode(), bytes(4))).check({"w": (1,)})
    assert len(error.value.message) <= 800 and all(len(str(value)) <= 200 for value in error.value.detail.values())
    (error.value.message + repr(error.value.detail)).encode()


def test_more_tensors_than_any_model_has_are_refused_over_all_files(tmp_path):
    weight_map, half = {}, MAX_TENSORS // 2 + 1
    for file in ("a", "b"):
        names = [f"{file}{i}" for i in range(half)]
        header = "{" + ",".join(f'"{n}":{_entry(shape=[0], offsets=[0, 0])}' for n in names) + "}"
        _raw(tmp_path / file, header.encode())
        weight_map |= dict.fromkeys(names[:2], file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(FolderSource(str(tmp_path)), "too many tensors")


def test_an_index_with_too_many_files_is_refused_before_any_is_opened(tmp_path):
    weight_map = {f"t{i}": f"f{i}" for i in range(MAX_FILES + 1)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    refused(FolderSource(str(tmp_path)), f"names {MAX_FILES + 1} files")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"weight_map": {"w": 3}}', b"\xff", b"[" * 100_000, "large"])
def test_a_malformed_or_too_large_index_is_refused(content, tmp_path):
    with (tmp_path / INDEX).open("wb") as file:  # sparse: it takes no space
        file.truncate(MAX_JSON_BYTES + 1) if content == "large" else file.write(content)
    refused(FolderSource(str(tmp_path)), "index.json")


@pytest.mark.parametrize("name", [INDEX, CHECKSUMS])
def test_a_pipe_among_the_json_files_is_refused_and_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightUpdateRefused, match="not a regular file"), Folder(tmp_path) as folder:
        open_source(FolderSource(str(tmp_path))) if name == INDEX else read_checksums(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "BF16", "I8", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 4) | st.integers(), max_size=10) | JSON,
        "data_offsets": st.lists(st.integers(-1, 64) | st.integers(), max_size=3) | JSON,
    }
)


def read_or_refuse(source: Source, most_bytes: int) -> None:
    """Read all tensors of the source. The only error may be a refusal with a short message."""
    try:
        with open_source(source) as reader:
            assert sum(entry.nbytes for entry in reader.entries.values()) <= most_bytes
            for name, entry in reader.entries.items():
                if entry.dtype in DTYPES:
                    reader.read(name)
    except WeightUpdateRefused as error:
        assert len(error.message) <= 800
        error.message.encode()


@examples(400)
@given(st.dictionaries(st.text(max_size=8), ENTRIES | JSON, max_size=4) | JSON, st.binary(max_size=80))
def test_a_random_header_is_read_or_refused(tmp_path, header, data):
    source = _raw(tmp_path / "x", json.dumps(header).encode(), data)
    read_or_refuse(source, 10 * len(data))


@examples(400)
@given(st.data())
def test_a_valid_file_with_pieces_cut_out_doubled_or_changed_is_read_or_refused(tmp_path, data):
    path = tmp_path / "x"
    write_safetensors(path, {"v": np.ones((2, 3), np.float32), "w": np.ones(4, np.float16)})
    raw = path.read_bytes()
    for _ in range(data.draw(st.integers(1, 3))):
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(raw))] * 2)))
        raw = raw[:first] + data.draw(st.sampled_from([b"", raw[first:last] * 2]) | st.binary(max_size=9)) + raw[last:]
    path.write_bytes(raw)
    read_or_refuse(FileSource(str(path)), 10 * len(raw))


def test_a_link_is_followed_within_the_roots_and_never_out_of_them(tmp_path):
    inside, outside = tmp_path / "root", tmp_path / "outside"
    real = write_checkpoint(inside / "real", SPEC)
    secret = write_checkpoint(outside / "secret", SPEC)
    (inside / "link").symlink_to(real)
    (inside / "out").symlink_to(secret)
    blobs = inside / "blobs"
    blobs.mkdir()
    for name, target in (("fine", "../real"), ("bad", secret), ("pipe", "../pipes")):
        (inside / name).mkdir()
        (inside / name / "model.safetensors").symlink_to(f"{target}/model.safetensors")
    (inside / "pipes").mkdir()
    os.mkfifo(inside / "pipes" / "model.safetensors")
    roots = (str(inside),)
    for good in (real, inside / "link", inside / "fine"):
        with open_source(FolderSource(str(good)), roots) as reader:
            assert reader.read("model.norm.weight").shape == (64,)
    for bad in (inside / "out", secret, inside / "bad", inside / "real" / ".." / ".." / "outside" / "secret"):
        refused(FolderSource(str(bad)), "--model-root", roots)
    refused(FolderSource(str(inside / "pipe")), "not a regular file", roots)


def test_an_upload_or_a_segment_that_is_a_link_is_refused(tmp_path, segment):
    target = Path(_file(tmp_path / "x", {"w": np.ones(2, np.float32)}).path)
    (tmp_path / "link").symlink_to(target)
    segment.symlink_to(target)
    for source in (FileSource(str(tmp_path / "link")), SharedMemorySource(segment.name)):
        refused(source, "not a regular file")
