"""Exported weights: a safetensors file that gives another runner the same weights, bit for bit."""

from __future__ import annotations

import errno
import os

import pytest

from fastdeploy.core.errors import EngineError, InvalidField, OutOfSpace, WrongOrder
from fastdeploy.core.fingerprint import fingerprint
from fastdeploy.core.weight_source import FileSource
from fastdeploy.model_executor.safetensors_source import open_source
from support.specs import SPECS
from support.step_driver import outputs, update
from worker.architectures import with_ops_by_architecture
from worker.new_weights import new_tensors, stored


@pytest.mark.parametrize(("make_runner", "name"), with_ops_by_architecture(), indirect=["make_runner"])
def test_an_exported_file_gives_another_runner_the_same_weights(name, make_runner, part, tmp_path):
    spec, path = SPECS[name], tmp_path / "export.safetensors"
    source, other = make_runner(name), make_runner(name)
    update(source, part({n: stored(t, spec) for n, t in new_tensors(spec).items()}))
    assert source.fingerprint != other.fingerprint
    assert source.export(str(path)) == path.stat().st_size
    update(other, FileSource(str(path)))
    assert other.fingerprint == source.fingerprint and other.checksums() == source.checksums()
    assert outputs(other) == outputs(source)


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_bf16"])
def test_the_file_has_the_tensors_and_types_of_the_checkpoint(name, make_runner, tmp_path):
    spec, path = SPECS[name], tmp_path / "export.safetensors"
    make_runner(name).export(str(path))
    expected = {n: stored(tensor, spec) for n, tensor in new_tensors(spec, spec.seed).items()}
    with open_source(FileSource(str(path))) as reader:
        reader.check({n: tensor.shape for n, tensor in expected.items()})
        assert {n: reader.read_bytes(n).tobytes() for n in expected} == {n: t.tobytes() for n, t in expected.items()}


def test_an_export_of_some_tensors_has_these_only_in_the_order_of_the_model(make_runner, tmp_path):
    runner, path = make_runner("qwen2"), tmp_path / "export.safetensors"
    first, second = list(runner.fingerprints)[3], list(runner.fingerprints)[1]
    runner.export(str(path), [first, second])
    with open_source(FileSource(str(path))) as reader:
        assert list(reader.entries) == [second, first]
        for name in reader.entries:
            assert fingerprint(reader.read(name)).hex == runner.fingerprints[name]
    with pytest.raises(InvalidField, match=r"tensors: 'other\.weight' is not a tensor of this model"):
        runner.export(str(tmp_path / "other.safetensors"), [first, "other.weight"])
    assert os.listdir(tmp_path) == [path.name]


def test_an_export_that_fails_leaves_no_file(make_runner, tmp_path, monkeypatch):
    runner, path = make_runner("qwen2"), tmp_path / "export.safetensors"
    path.write_text("another file")
    with pytest.raises(EngineError, match="cannot be written"):
        runner.export(str(path))
    assert path.read_text() == "another file"

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutOfSpace):
        runner.export(str(tmp_path / "other.safetensors"))
    assert os.listdir(tmp_path) == [path.name]


def test_weights_that_are_not_there_cannot_be_exported(make_runner, tmp_path):
    runner = make_runner("qwen2")
    runner.sleep(["weight"], None)
    with pytest.raises(WrongOrder):
        runner.export(str(tmp_path / "export.safetensors"))
    assert os.listdir(tmp_path) == []
