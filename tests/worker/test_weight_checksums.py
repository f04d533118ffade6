"""Checksums (sha256) of new weights and of the weights that serve."""

from __future__ import annotations

import json
import threading

import pytest

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.testing.checkpoints import random_tensors, write_checkpoint
from support.specs import SPECS
from support.step_driver import outputs, update
from worker.new_weights import KV_B, SPEC, K, Q, V, new_tensors, sha, stored


def test_a_checksum_that_does_not_match_or_names_nothing_is_refused(make_runner, part):
    runner, new = make_runner("qwen2"), new_tensors()
    source = part({Q: new[Q], K: new[K]})
    assert runner.begin_update(True, False).add(source, {Q: sha(new[Q])}).tensors == 2
    for checksums, named in (({Q: sha(new[K])}, Q), ({V: sha(new[V])}, V)):
        with pytest.raises(WeightUpdateRefused, match=named):
            runner.begin_update(True, False).add(source, checksums)
    assert runner.begin_update(True, False).add(source, {n: sha(new[n]) for n in (Q, K)}, True).tensors == 2
    with pytest.raises(WeightUpdateRefused, match=K):
        runner.begin_update(True, False).add(source, {Q: sha(new[Q])}, True)


def test_tensors_with_a_checksum_are_staged_like_those_without(make_runner, part, fresh):
    runner, new = make_runner("qwen2"), new_tensors()
    staging = runner.begin_update(False, False)
    staging.add(part(new), {name: sha(array) for name, array in list(new.items())[::2]})
    runner.commit(staging.finish().weights)
    assert outputs(runner) == fresh(SPEC, new)


def test_verify_checksum_asks_for_a_checksum_of_every_tensor_of_a_folder(make_runner, tmp_path):
    runner, new = make_runner("qwen2"), new_tensors()
    folder = write_checkpoint(tmp_path / "c", SPEC, new)
    table, source = {name: sha(array) for name, array in new.items()}, FolderSource(str(folder))

    def add(text: str | None, given=None):
        if text is not None:
            (folder / "checksums.json").write_text(text)
        return runner.begin_update(False, False).add(source, given or {}, True)

    with pytest.raises(WeightUpdateRefused, match="checksums.json"):
        add(None)
    assert add(json.dumps(table)).tensors == len(new)
    refused = {
        "[]": "checksums.json",
        "{": "checksums.json",
        json.dumps(table | {Q: 5}): "checksums.json",
        json.dumps({name: value for name, value in table.items() if name != Q}): Q,
        json.dumps(table | {Q: table[K]}): Q,
    }
    for text, named in refused.items():
        with pytest.raises(WeightUpdateRefused, match=named):
            add(text)
    with pytest.raises(WeightUpdateRefused, match=Q):
        add(json.dumps(table), {Q: table[K]})


@pytest.mark.parametrize("name", SPECS)
def test_checksums_are_those_of_the_folders_tensors(name, make_runner, part):
    runner, spec = make_runner(name), SPECS[name]
    expected = {name: sha(stored(array, spec)) for name, array in random_tensors(spec).items()}
    assert runner.checksums() == expected
    changed = KV_B if KV_B in expected else K
    new = stored(new_tensors(spec)[changed], spec)
    update(runner, part({changed: new}), partial=True)
    assert runner.checksums() == expected | {changed: sha(new)}


def test_checksums_never_unpack_a_whole_tensor_of_a_large_model(make_runner, monkeypatch):
    runner = make_runner("qwen2")
    monkeypatch.setattr("fastdeploy.model_executor.parameters.SLICE", 10)
    expected, rows, unpack = runner.checksums(), [], runner.ops.unpack_linear

    def counting(weight, first=0, last=None):
        piece = unpack(weight, first, last)
        rows.append(len(piece))
        return piece

    monkeypatch.setattr(runner.ops, "unpack_linear", counting)
    assert runner.checksums() == expected
    assert max(rows) == 10


def test_checksums_run_beside_steps_and_describe_one_set_of_weights(make_runner, tmp_path):
    runner, found = make_runner("qwen2"), []
    before, old = outputs(runner), runner.checksums()
    folder = write_checkpoint(tmp_path / "c", SPEC, new_tensors())
    new = make_runner(folder).checksums()
    thread = threading.Thread(target=lambda: found.extend(runner.checksums() for _ in range(20)))
    thread.start()
    assert outputs(runner) == before
    update(runner, folder)
    thread.join()
    assert len(found) == 20 and all(one in (old, new) for one in found) and runner.checksums() == new
