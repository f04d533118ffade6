"""A file that arrives in pieces gives the same values as the whole file, wherever the pieces end."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint
from fastdeploy.core.weight_source import StreamSource
from fastdeploy.model_executor.ops.interface import Region
from fastdeploy.model_executor.ops.reference import ReferenceOps
from fastdeploy.model_executor.parameters import in_dtype
from fastdeploy.model_executor.safetensors_source import MAX_HEADER_BYTES
from fastdeploy.worker.stream import TensorStream
from support.search import examples

KINDS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
HALF = 4096


def values(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return random values, small enough for every dtype. BF16 is uint16 bits."""
    array = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return (array.view(np.uint32) >> 16).astype(np.uint16) if dtype == "BF16" else array.astype(KINDS[dtype])


def wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def safetensors(tensors: dict[str, np.ndarray], gap: int = 0) -> bytes:
    """Return the bytes of a file with these tensors, in this order, and ``gap`` bytes before each of them."""
    names = {np.dtype(kind): name for name, kind in KINDS.items()}
    header, data = {}, b""
    for name, array in tensors.items():
        data += bytes(gap)
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    return with_header(header, data)


def with_header(header: dict, data: bytes = b"") -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


class Model:
    """Three rows of a fused weight, a vector, and a tensor that is only checked."""

    def __init__(self, dtype: str):
        self.ops = ReferenceOps(dtype)
        self.fused = self.ops.new_linear(12, 5, bias=False)
        self.vector = np.zeros(7, np.float32)
        self.regions = {
            "q": Region(7, 5, self.fused, 0),
            "k": Region(4, 5, self.fused, 7),
            "norm": Region(1, 7, vector=self.vector),
            "alias": Region(3, 5),
        }
        self.staged = 0

    def stage(self, items):
        self.staged += len(items)
        found = self.ops.stage([item for _, item in items], np.zeros(1, np.int32))
        for (name, _), result in zip(items, found, strict=True):
            if result.problem is not None:
                raise WeightUpdateRefused(f"{name}: {result.problem}")
        return [result.fingerprint for result in found]

    def stream(self, checksums: dict[str, str] | None = None) -> TensorStream:
        return TensorStream(lambda reader: checksums or {}, self.regions.__getitem__, self.stage)


def pieces(file: Path, content: bytes, cuts: Iterable[int]) -> Iterator[StreamSource]:
    """Write ``content`` to ``file`` piece by piece, in two halves that are used in turn."""
    ends = sorted({*(cut for cut in cuts if cut < len(content)), len(content)})
    file.touch()
    start = 0
    for number, end in enumerate(ends):
        offset = number % 2 * HALF
        with file.open("r+b") as out:
            out.write(bytes([255]) * 2 * HALF)  # what an earlier piece left must not be used
            out.seek(offset)
            out.write(content[start:end])
        state = "complete" if end == len(content) else "open"
        yield StreamSource("upload-1", str(file), offset, end - start, start, state)
        start = end


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("stream") / "halves"


SHAPES = {"q": (7, 5), "k": (4, 5), "norm": (7,), "alias": (3, 5)}
FILES = st.tuples(
    st.permutations(list(SHAPES)),
    st.lists(st.sampled_from(list(KINDS)), min_size=4, max_size=4),
    st.sampled_from([0, 0, 3]),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@examples(150)
@given(FILES, st.lists(st.integers(0, 900), max_size=12), st.booleans())
@example((list(SHAPES), ["F32", "F16", "BF16", "F32"], 0), range(2000), False)
@example((list(SHAPES), ["BF16", "F32", "F16", "BF16"], 3), range(2000), True)
def test_any_pieces_give_the_values_and_fingerprints_of_the_whole_file(file, dtype, content, cuts, hashed):
    order, kinds, gap = content
    tensors = {n: values(SHAPES[n], kind, seed) for seed, (n, kind) in enumerate(zip(order, kinds, strict=True))}
    sums = {n: hashlib.sha256(t.tobytes()).hexdigest() for n, t in tensors.items()} if hashed else {}
    model = Model(dtype)
    stream = model.stream(sums)
    for piece in pieces(file, safetensors(tensors, gap), cuts):
        stream.add(piece)
    expected = {name: in_dtype(wide(array), dtype) for name, array in tensors.items()}
    assert stream.fingerprints == {name: fingerprint(array) for name, array in expected.items()}
    rows = model.ops.unpack_linear(model.fused)
    assert (rows[:7] == expected["q"]).all() and (rows[7:11] == expected["k"]).all() and not rows[11:].any()
    assert (in_dtype(model.vector, dtype) == expected["norm"]).all()


WHOLE = safetensors({"q": values((7, 5), "F32", 0), "norm": values((7,), "F16", 1)})


@pytest.mark.parametrize("cuts", [(), range(2000)], ids=["one piece", "bytes"])
@pytest.mark.parametrize("length", [0, 4, 8, 40, len(WHOLE) - 15, len(WHOLE) - 1])
def test_an_upload_that_ends_too_early_is_refused(file, length, cuts):
    stream = Model("float32").stream()
    with pytest.raises(WeightUpdateRefused, match="upload.*cut short"):
        for piece in pieces(file, WHOLE[:length], cuts):
            stream.add(piece)


@pytest.mark.parametrize("cuts", [(), range(2000)], ids=["one piece", "bytes"])
def test_an_upload_with_bytes_behind_its_last_tensor_is_refused(file, cuts):
    stream = Model("float32").stream()
    with pytest.raises(WeightUpdateRefused, match="upload.*more than"):
        for piece in pieces(file, WHOLE + b"x", cuts):
            stream.add(piece)


ENTRY = {"dtype": "F32", "shape": [7, 5], "data_offsets": [0, 140]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "not in safetensors format"),
        (b"\xff" * 8, "not in safetensors format"),
        ((2).to_bytes(8, "little") + b"[]", "broken header"),
        (with_header({"q": {**ENTRY, "shape": [7, 4]}}), "q: .*do not make"),
        (with_header({"q": ENTRY, "k": {**ENTRY, "shape": [4, 5], "data_offsets": [80, 160]}}), "k: .*shares bytes"),
        (with_header({"q": ENTRY, "k": {**ENTRY, "shape": [4, 5], "data_offsets": [0, 80]}}), "shares bytes"),
    ],
)
def test_a_header_that_is_not_valid_is_refused_before_any_value_is_staged(file, content, why):
    model = Model("float32")
    stream = model.stream()
    with pytest.raises(WeightUpdateRefused, match=why):
        for piece in pieces(file, content + bytes(2000), [len(content)]):
            stream.add(piece)
    assert model.staged == 0


def test_the_check_of_the_header_comes_before_any_value_is_staged(file):
    model = Model("float32")

    def refuse(reader):
        assert reader.entries["q"].shape == (7, 5)
        raise WeightUpdateRefused("q: an unknown tensor")

    stream = TensorStream(refuse, model.regions.__getitem__, model.stage)
    with pytest.raises(WeightUpdateRefused, match="unknown"):
        stream.add(next(pieces(file, WHOLE, [])))
    assert model.staged == 0


@pytest.mark.parametrize("cuts", [(), range(2000), (200,)])
def test_a_tensor_with_another_checksum_is_refused_by_name(file, cuts):
    stream = Model("float32").stream({"norm": "00" * 32})
    with pytest.raises(WeightUpdateRefused, match=r"norm: .*sha256 0000"):
        for piece in pieces(file, WHOLE, cuts):
            stream.add(piece)


def test_whole_rows_are_staged_from_the_file_and_only_rows_that_are_cut_from_memory(file):
    """The values of a large piece must not be copied on the way."""
    model = Model("float32")
    seen = []

    def stage(items):
        seen.extend((name, item.memory is None, item.region.rows) for name, item in items)
        return model.stage(items)

    stream = TensorStream(lambda reader: {}, model.regions.__getitem__, stage)
    start = len(WHOLE) - 14 - 140
    for piece in pieces(file, WHOLE, [start + 3 * 20 + 7]):
        stream.add(piece)
    assert seen == [("q", True, 3), ("q", False, 1), ("q", True, 3), ("norm", True, 1)]


def test_a_file_that_is_gone_is_refused(file):
    source = next(pieces(file, WHOLE, []))
    file.unlink()
    with pytest.raises(WeightUpdateRefused, match="cannot be opened"):
        Model("float32").stream().add(source)


def test_an_upload_without_tensors_may_be_empty(file):
    stream = Model("float32").stream()
    for piece in itertools.chain(pieces(file, with_header({}), range(20))):
        stream.add(piece)
    assert stream.reader is not None and stream.fingerprints == {}
