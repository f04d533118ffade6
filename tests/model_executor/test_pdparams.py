"""A .pdparams file is read as a table of arrays; nothing of it is ever run."""

from __future__ import annotations

import collections
import os
import pickle
import random
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.model_executor import pdparams
from fastdeploy.model_executor.safetensors_source import open_source

ARRAYS = {
    "matrix": np.arange(4000, dtype=np.float32).reshape(8, 500),
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "bits": np.arange(300, dtype=np.uint16),
    "none": np.zeros((0, 4), np.float32),
}


def arrays_of(path: Path) -> dict[str, pdparams.PickledArray]:
    fd = os.open(path, os.O_RDONLY)
    try:
        return pdparams.read_arrays(fd)
    finally:
        os.close(fd)


def refusal(path: Path, raw: bytes) -> str:
    path.write_bytes(raw)
    with pytest.raises(ValueError) as error:
        arrays_of(path)
    return str(error.value)


@pytest.mark.parametrize("protocol", [3, 4])
@pytest.mark.parametrize("kind", ["tensors", "state", "arrays", "ordered", "named tensors"])
def test_what_paddle_saves_is_found_at_its_place(tmp_path, kind, protocol):
    path = tmp_path / "model_state.pdparams"
    layer = paddle.nn.Linear(5, 3)
    saved, wanted = {
        "tensors": ({n: paddle.to_tensor(a) for n, a in ARRAYS.items() if n in ("matrix", "half")}, None),
        "state": (layer.state_dict(), None),
        "arrays": (dict(ARRAYS), ARRAYS),
        "ordered": (collections.OrderedDict(ARRAYS), ARRAYS),
        "named tensors": ({"matrix": paddle.to_tensor(ARRAYS["matrix"]), "none": ARRAYS["none"]}, None),
    }[kind]
    wanted = wanted or {name: np.asarray(value) for name, value in saved.items()}
    paddle.save(saved, str(path), protocol=protocol)
    found, raw = arrays_of(path), path.read_bytes()
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        _, shape, offset, nbytes = found[name]
        assert shape == array.shape and raw[offset : offset + nbytes] == array.tobytes()


def test_bfloat16_of_paddle_is_bfloat16(tmp_path):
    path = tmp_path / "model_state.pdparams"
    paddle.save({"w": paddle.to_tensor([[1.0, -2.5]]).astype("bfloat16")}, str(path))
    with open_source(FolderSource(str(tmp_path))) as reader:
        assert reader.has_pdparams and reader.entries["w"].dtype == "BF16"
        assert reader.read("w").tolist() == [[0x3F80, 0xC020]]


class Evil:
    """An object whose unpickling would make a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, protocol):
    path, made = tmp_path / "model_state.pdparams", tmp_path / "made"
    path.write_bytes(pickle.dumps({"w": Evil(made), "v": ARRAYS["matrix"]}, protocol=protocol))
    with pytest.raises(WeightUpdateRefused, match="model_state.pdparams: is refused") as error:
        open_source(FolderSource(str(tmp_path)))
    assert not made.exists() and error.value.detail == {"file": "model_state.pdparams"}
    if protocol == 4:
        assert "'io.open'" in str(error.value) and "nothing of the file is run" in str(error.value)


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        ({"model": {"w": ARRAYS["matrix"]}}, "'model' is a dictionary"),
        ({"w": 3}, "'w' is no array"),
        ({"w": np.asfortranarray(ARRAYS["matrix"])}, "Fortran order"),
        ({"w": ARRAYS["matrix"].astype(">f4")}, "byte order '>'"),
        ({"w": np.array([{}], object)}, "BUILD|EMPTY_LIST|object|type 'O8'"),
        ([ARRAYS["matrix"]], "EMPTY_LIST|instruction"),
        ({1: ARRAYS["matrix"]}, "keys are texts"),
        ({"w": ARRAYS["matrix"], pdparams.SPLIT_TABLE: {}}, "in slices"),
    ],
)
def test_anything_but_a_dictionary_of_arrays_is_refused(tmp_path, saved, why):
    path = tmp_path / "w.pdparams"
    with pytest.raises(ValueError, match=why):
        raise ValueError(refusal(path, pickle.dumps(saved, protocol=4)))


def test_hostile_instructions_are_refused_in_bounded_time_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(pdparams, "MAX_INSTRUCTIONS", 1 << 17)
    path, mib = tmp_path / "w.pdparams", 1 << 20
    head = b"\x80\x04"
    for raw in (
        head,
        head + b"}" * (2 * mib) + b".",  # millions of objects
        head + b")" + b"\x85" * 100_000 + b"\x94h\x00\x93.",  # tuples in tuples, asked for as a name
        head + b"}(" + b")" + b"\x85" * 100_000 + b"Nu.",  # and as a key
        head + b"c" + b"a" * mib,
        head + b"X\xff\xff\xff\xff",
        head + b"\x8e" + b"\xff" * 8,
        head + b"h\x07.",
        head + b"." + b"." * 9,
        head + b"(((",
        head + b"\x8cq" + b"a" * 5,
    ):
        assert refusal(path, raw)


@pytest.mark.parametrize(("place", "old"), [("shape", b"K\x03\x85\x94"), ("byte order", b"\x8c\x01<\x94")])
def test_tuples_in_tuples_are_never_shown(tmp_path, place, old):
    """24 instructions make a tuple whose text has millions of characters; 40 would fill any memory."""
    whole = pickle.dumps({"a": np.zeros((3,), np.float32)}, protocol=4)
    assert whole.count(old) == 1
    hostile = whole.replace(old, b"K\x01\x85q\xc8" + b"h\xc8\x86q\xc8" * 24)
    why = refusal(tmp_path / "w.pdparams", hostile)
    assert place in why and len(why) < 500


def test_a_damaged_file_is_refused_or_read_within_its_bounds(tmp_path):
    path = tmp_path / "w.pdparams"
    whole = pickle.dumps({name: array[:2] for name, array in ARRAYS.items()}, protocol=4)
    rng = random.Random(0)
    for _ in range(1500):
        raw = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        if rng.random() < 0.2:
            del raw[rng.randrange(len(raw)) :]
        path.write_bytes(raw)
        try:
            found = arrays_of(path)
        except ValueError:
            continue
        assert all(one.offset >= 0 and one.offset + one.nbytes <= len(raw) for one in found.values())
