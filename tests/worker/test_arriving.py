"""Uploads that the worker stages while they arrive: the weights become those of the upload, or stay as they were."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.runner import ChunkReceipt, Staging
from fastdeploy.core.weight_source import PartFormat, StreamSource
from support.checkpoints import SPECS, random_tensors, write_safetensors
from support.step_driver import outputs
from worker.new_weights import EMBEDDING, HEAD, NORM, SPEC, K, Q, V, new_tensors, stored

PIECE = 10_007  # bytes; odd, so that pieces end within values
Tensors = dict[str, np.ndarray]


class Upload:
    """Sends a file to a staging piece by piece. number: of the upload."""

    def __init__(self, folder: Path, number: int, tensors: Tensors):
        self._name, self._file = f"upload-{number}", folder / f"upload-{number}"
        write_safetensors(self._file, tensors)
        self.content = self._file.read_bytes()
        self._half = folder / f"half-{number}"
        self._pieces = self._cut()

    def _cut(self) -> Iterator[StreamSource]:
        for start in range(0, len(self.content), PIECE):
            piece = self.content[start : start + PIECE]
            self._half.write_bytes(b"\xff" * 5 + piece)
            state = "complete" if start + PIECE >= len(self.content) else "open"
            yield StreamSource(self._name, str(self._half), 5, len(piece), start, state)

    def send(self, staging: Staging, count: int | None = None, **fields) -> ChunkReceipt:
        """Send the next pieces, or all that are left, and return the last receipt."""
        fields = {"checksums": {}} | fields
        return [staging.add(piece, **fields) for piece in itertools.islice(self._pieces, count)][-1]

    def break_off(self, staging: Staging) -> None:
        assert staging.add(StreamSource(self._name, "", 0, 0, 0, "broken"), {}) == (0, 0)


@pytest.fixture
def upload(tmp_path) -> Callable[[Tensors], Upload]:
    numbers = itertools.count()
    return lambda tensors: Upload(tmp_path, next(numbers), tensors)


def commit(runner, staging: Staging) -> None:
    runner.commit(staging.finish().weights)


@pytest.mark.parametrize("name", ["qwen2", "qwen2_bf16", "llama_tied"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_upload_in_pieces_equals_a_start_on_its_tensors(name, in_place, make_runner, upload, fresh):
    spec = replace(SPECS[name], shards=1)
    new = new_tensors(spec)
    runner = make_runner(name)
    staging = runner.begin_update(partial=False, in_place=in_place)
    receipt = upload({name: stored(array, spec) for name, array in new.items()}).send(staging)
    assert receipt.tensors == len(new)
    assert receipt.nbytes == sum(stored(array, spec).nbytes for array in new.values())
    commit(runner, staging)
    assert outputs(runner) == fresh(spec, new)


def test_two_uploads_at_the_same_time_and_a_file_make_one_update(make_runner, upload, part, fresh):
    new, runner = new_tensors(), make_runner("qwen2")
    names = sorted(new)
    staging = runner.begin_update(partial=False, in_place=False)
    first, second = (upload({name: new[name] for name in names[i::3]}) for i in (0, 1))
    assert first.send(staging, 3) == second.send(staging, 2) == (0, 0)
    staging.add(part({name: new[name] for name in names[2::3]}), {})
    assert first.send(staging).tensors == len(names[0::3]) and second.send(staging).tensors == len(names[1::3])
    commit(runner, staging)
    assert outputs(runner) == fresh(SPEC, new)


def test_tensors_of_an_upload_that_broke_off_count_as_not_arrived_and_may_be_sent_again(
    make_runner, upload, fresh, part
):
    new, runner = new_tensors(), make_runner("qwen2")
    before = outputs(runner)
    others = {name: array for name, array in new.items() if name not in (Q, EMBEDDING)}
    staging = runner.begin_update(partial=False, in_place=False)
    staging.add(part(others), {})
    broken = upload({Q: new_tensors(seed=1)[Q], EMBEDDING: new_tensors(seed=1)[EMBEDDING]})
    broken.send(staging, 2)
    broken.break_off(staging)
    upload({Q: new[Q]}).send(staging)
    assert outputs(runner) == before
    with pytest.raises(WeightUpdateRefused, match=f"{EMBEDDING}: is missing"):
        staging.finish()
    staging.abandon()
    assert outputs(runner) == before
    staging = runner.begin_update(partial=False, in_place=False)
    whole = upload(new)
    whole.send(staging, 2)
    whole.break_off(staging)
    upload(new).send(staging)
    commit(runner, staging)
    assert outputs(runner) == fresh(SPEC, new)


@pytest.mark.parametrize("arrived", [[], [V], [NORM]], ids=["nothing", "another part of qkv", "a norm"])
def test_a_partial_update_keeps_all_that_an_upload_overwrote_before_it_broke_off(
    arrived, make_runner, upload, part, fresh
):
    """The memory of the upload is that of the update: rows without a tensor are written again."""
    new, runner = new_tensors(), make_runner("qwen2")
    staging = runner.begin_update(partial=True, in_place=False)
    overwritten = {name: array for name, array in new_tensors(seed=1).items() if name not in arrived}
    broken = upload(overwritten)
    broken.send(staging, len(broken.content) // PIECE)  # all but the last piece
    broken.break_off(staging)
    if arrived:
        staging.add(part({name: new[name] for name in arrived}), {})
    commit(runner, staging)
    assert outputs(runner) == fresh(SPEC, random_tensors(SPEC) | {name: new[name] for name in arrived})


@pytest.mark.parametrize("seen_by", ["stream", "file"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_tensor_may_come_once(make_runner, upload, part, seen_by, complete):
    new, runner = new_tensors(), make_runner("qwen2")
    before = outputs(runner)
    staging = runner.begin_update(partial=True, in_place=False)
    upload({K: new[K], Q: new[Q]}).send(staging, None if complete else 1)
    again = upload({Q: new[Q]})
    with pytest.raises(WeightUpdateRefused, match=f"{Q}: .*has arrived before"):
        again.send(staging) if seen_by == "stream" else staging.add(part({Q: new[Q]}), {})
    staging.abandon()
    assert outputs(runner) == before


BAD_VALUES = {
    "not finite": {Q: np.full((64, 64), np.nan, np.float32)},
    "not a tensor of this model": {Q: None, "x": np.zeros(3, np.float32)},
    "has shape": {Q: np.zeros((64, 65), np.float32)},
}


@pytest.mark.parametrize("why", BAD_VALUES)
def test_an_upload_that_is_refused_names_the_tensor_and_changes_nothing(make_runner, upload, why):
    new, runner = new_tensors(), make_runner("qwen2")
    before = outputs(runner)
    staging = runner.begin_update(partial=True, in_place=False)
    tensors = {name: new[name] if array is None else array for name, array in BAD_VALUES[why].items()}
    with pytest.raises(WeightUpdateRefused, match=why) as refused:
        upload(tensors).send(staging)
    assert refused.value.detail["tensor"] in BAD_VALUES[why]
    with pytest.raises(WeightUpdateRefused, match="begin again"):
        upload({K: new[K]}).send(staging)
    staging.abandon()
    assert outputs(runner) == before


def test_checksums_and_fingerprints_of_an_upload_are_checked(make_runner, upload):
    new, runner = new_tensors(), make_runner("qwen2")
    for fields, why in (
        ({"checksums": {Q: "00" * 32}}, "does not have the sha256"),
        ({"checksums": {"x": "00" * 32}}, "x: .*not in the source"),
        ({"verify_checksum": True}, f"{Q}: .*has no checksum"),
        ({"form": PartFormat(fingerprints={Q: "00" * 16})}, f"{Q}: .*expected 0000"),
    ):
        staging = runner.begin_update(partial=True, in_place=False)
        with pytest.raises(WeightUpdateRefused, match=why):
            upload({Q: new[Q]}).send(staging, **fields)
        staging.abandon()


def test_an_alias_in_an_upload_must_equal_its_tensor(make_runner, upload, fresh):
    spec = replace(SPECS["llama_tied"], shards=1)
    new = new_tensors(spec)
    runner = make_runner("llama_tied")
    staging = runner.begin_update(partial=False, in_place=False)
    upload({HEAD: new[EMBEDDING], **new}).send(staging)
    commit(runner, staging)
    assert outputs(runner) == fresh(spec, new)
    staging = runner.begin_update(partial=True, in_place=False)
    with pytest.raises(WeightUpdateRefused, match=f"{HEAD}: differs"):
        upload({HEAD: new_tensors(spec, seed=1)[EMBEDDING], EMBEDDING: new[EMBEDDING]}).send(staging)
    staging.abandon()
