"""Weight sessions at the worker: for any parts in any order, the weights become those of the trainer, or stay as they
were."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import tracemalloc
import uuid
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused, WrongOrder
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource
from fastdeploy.model_executor.safetensors_source import SafetensorsReader
from fastdeploy.worker import staging as staging_module
from fastdeploy.worker.model_runner import ModelRunner
from support.checkpoints import SPECS, Spec, bfloat16_bits, random_tensors, write_checkpoint, write_safetensors
from support.step_driver import outputs, stage, update

SPEC = replace(SPECS["qwen2"], shards=1)
Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, np.ndarray]


def new_tensors(spec=SPEC, seed: int = 99) -> Tensors:
    return random_tensors(replace(spec, seed=seed))


@pytest.fixture
def part(tmp_path: Path) -> Callable[[Tensors], FileSource]:
    """Write tensors to a file: one source per call."""
    count = itertools.count()

    def write(tensors: Tensors) -> FileSource:
        path = tmp_path / f"part-{next(count)}.safetensors"
        write_safetensors(path, tensors)
        return FileSource(str(path))

    return write


def stored(array: np.ndarray, spec: Spec) -> np.ndarray:
    """Return the tensor in the dtype of the checkpoint."""
    return bfloat16_bits(array) if spec.dtype == "bfloat16" else array


@pytest.fixture
def fresh(make_runner, tmp_path):
    """Return the outputs of a runner that starts with these tensors."""
    count = itertools.count()

    def outputs_of(spec, tensors):
        folder = write_checkpoint(tmp_path / f"{spec.dtype.replace('bfloat16', 'bf16')}-{next(count)}", spec, tensors)
        return outputs(make_runner(folder))

    return outputs_of


@pytest.mark.parametrize("order", ["as written", "reversed", "shuffled"])
def test_tensors_that_arrive_one_by_one_in_any_order_make_the_weights_that_were_sent(order, make_runner, part, fresh):
    runner, tensors = make_runner("qwen2"), new_tensors()
    before, names = outputs(runner), list(tensors)
    if order == "reversed":
        names.reverse()
    elif order == "shuffled":
        names = np.random.default_rng(1).permutation(names).tolist()
    staging = runner.begin_update(False, False)
    for name in names:
        receipt = staging.add(part({name: tensors[name]}), {})
        assert receipt == (1, tensors[name].nbytes)
    assert outputs(runner) == before
    runner.commit(staging.finish().weights)
    assert outputs(runner) == fresh(SPEC, tensors)


def test_a_fused_linear_is_packed_once_and_only_when_all_its_parts_are_there(make_runner, part, monkeypatch):
    runner, tensors = make_runner("qwen2"), new_tensors()
    packed, pack = [], runner.ops.pack_linear
    monkeypatch.setattr(runner.ops, "pack_linear", lambda parts, bias=None: packed.append(parts) or pack(parts, bias))
    staging = runner.begin_update(True, False)
    staging.add(part({Q: tensors[Q], V: tensors[V]}), {})
    biases = [name.replace("weight", "bias") for name in (Q, K, V)]
    staging.add(part({name: tensors[name] for name in biases}), {})
    assert packed == []
    staging.add(part({K: tensors[K]}), {})
    assert len(packed) == 1
    for part, name in zip(packed[0], (Q, K, V), strict=True):
        np.testing.assert_array_equal(part, tensors[name])


def test_only_tensors_that_wait_for_the_rest_of_their_linear_are_held_unpacked(make_runner, part, tmp_path):
    spec = replace(SPEC, layers=4, hidden=128, inner=512)
    runner = make_runner(write_checkpoint(tmp_path / "model", spec))
    sources = [part({name: array}) for name, array in new_tensors(spec).items()]
    largest = 4 * 2 * 512 * 128  # gate and up
    tracemalloc.start()
    try:
        staging = runner.begin_update(False, False)
        for source in sources:
            staging.add(source, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    total = sum(Path(source.path).stat().st_size for source in sources)
    assert peak < 3 * largest < total / 2  # tracemalloc sees numpy's arrays: the parts and their stacked copy


PARTIAL = {
    "one part of qkv": [Q],
    "a bias of qkv": [Q.replace("q_proj.weight", "k_proj.bias")],
    "one of gate and up": ["model.layers.0.mlp.up_proj.weight"],
    "the embedding": [EMBEDDING],
    "a norm": ["model.layers.0.input_layernorm.weight", "model.norm.weight"],
    "a bit of everything": [V, K.replace("weight", "bias"), "model.layers.0.mlp.down_proj.weight", EMBEDDING],
}


@pytest.mark.parametrize("names", PARTIAL.values(), ids=PARTIAL.keys())
@pytest.mark.parametrize("base", ["llama_tied", "qwen2_bf16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_partial_update_equals_a_start_on_the_mixture(base, names, in_place, make_runner, part, fresh):
    spec = replace(SPECS[base], shards=1)
    runner, old, new = make_runner(base), random_tensors(spec), new_tensors(spec)
    before = outputs(runner)
    update(runner, *(part({name: stored(new[name], spec)}) for name in names), partial=True, in_place=in_place)
    mixture = old | {name: new[name] for name in names}
    assert outputs(runner) == fresh(spec, mixture) != before


def test_a_partial_update_repacks_only_what_it_changed(make_runner, part, monkeypatch):
    runner, tensors = make_runner("qwen2"), new_tensors()
    packed, pack, old = [], runner.ops.pack_linear, runner.weights
    monkeypatch.setattr(runner.ops, "pack_linear", lambda parts, bias=None: packed.append(1) or pack(parts, bias))
    update(runner, part({Q: tensors[Q], "model.norm.weight": tensors["model.norm.weight"]}), partial=True)
    assert len(packed) == 1
    changed = {key for key, value in runner.weights.values.items() if value is not old.values[key]}
    assert changed == {"layers.1.qkv", "norm"}


def test_partial_updates_add_up_and_complete_from_what_serves_at_the_commit(make_runner, part, fresh):
    runner, tensors = make_runner("qwen2"), random_tensors(SPEC)
    for seed, name in enumerate((Q, K, V, Q, EMBEDDING), 70):
        tensors[name] = new_tensors(seed=seed)[name]
        update(runner, part({name: tensors[name]}), partial=True)
    assert outputs(runner) == fresh(SPEC, tensors)


def test_a_partial_folder_needs_no_config_but_must_not_have_another_models(make_runner, tmp_path, fresh):
    runner, new, folder = make_runner("qwen2"), new_tensors(), tmp_path / "part"
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", {Q: new[Q]})
    update(runner, folder, partial=True)
    assert outputs(runner) == fresh(SPEC, random_tensors(SPEC) | {Q: new[Q]})
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(WeightUpdateRefused, match="config.json"):
        update(runner, folder, partial=True)


@pytest.mark.parametrize("tensors", ["float32", "bfloat16", "mixed"])
def test_float32_tensors_are_rounded_to_nearest_even_on_every_way_in(tensors, make_runner, part, fresh, tmp_path):
    spec = replace(SPECS["qwen2_bf16"], shards=1)
    new = new_tensors(spec)
    expected = fresh(spec, new)  # written as bfloat16
    as_sent = {
        name: array if tensors == "float32" or (tensors == "mixed" and i % 2) else bfloat16_bits(array)
        for i, (name, array) in enumerate(new.items())
    }
    runner = make_runner("qwen2_bf16")
    update(runner, part(as_sent))
    assert outputs(runner) == expected
    float32_folder = write_checkpoint(tmp_path / "f32", replace(spec, dtype="float32"), new)
    at_start = ModelRunner(str(float32_folder), dtype="bfloat16", num_blocks=96, ops=type(runner.ops)("bfloat16"))
    assert outputs(at_start) == expected
    assert at_start.checksums() == runner.checksums()
    update(at_start, write_checkpoint(tmp_path / "base", spec))
    update(at_start, part(as_sent), partial=True)
    assert outputs(at_start) == expected


def test_a_value_that_bfloat16_cannot_hold_is_refused(make_runner, part):
    runner = make_runner("qwen2_bf16")
    array = new_tensors(SPECS["qwen2_bf16"])[Q]
    array[0, 0] = 3.4e38  # finite, but rounds to infinity
    with pytest.raises(WeightUpdateRefused, match=Q):
        stage(runner, part({Q: array}), partial=True)


TIED = replace(SPECS["qwen2_tied"], shards=1)


def test_an_update_of_a_tied_embedding_changes_the_head_too(make_runner, part, fresh):
    runner, new = make_runner("qwen2_tied"), new_tensors(TIED)
    update(runner, part({EMBEDDING: new[EMBEDDING]}), partial=True)
    assert runner.weights.lm_head is runner.weights.embedding
    assert outputs(runner) == fresh(TIED, random_tensors(TIED) | {EMBEDDING: new[EMBEDDING]})


@pytest.mark.parametrize("order", [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("name", ["qwen2_tied", "qwen2_bf16"])
def test_the_head_of_a_tied_model_must_be_the_embedding_that_arrives_before_or_after_it(name, order, make_runner, part):
    runner, spec = make_runner(name), SPECS[name]
    embedding = new_tensors(spec)[EMBEDDING]
    before = outputs(runner)
    serving = random_tensors(spec)[EMBEDDING]
    for head in (embedding, embedding * 2, serving):
        staging = runner.begin_update(True, False)
        first, second = (part({name: {HEAD: head, EMBEDDING: embedding}[name]}) for name in order)
        staging.add(first, {})
        with nullcontext() if head is embedding else pytest.raises(WeightUpdateRefused, match=HEAD):
            staging.add(second, {})
    assert outputs(runner) == before


def test_the_head_of_a_tied_model_alone_must_be_the_embedding_that_serves(make_runner, part):
    runner, old = make_runner("qwen2_tied"), random_tensors(TIED)
    stage(runner, part({HEAD: old[EMBEDDING]}), partial=True)
    with pytest.raises(WeightUpdateRefused, match=HEAD):
        stage(runner, part({HEAD: old[EMBEDDING] + 1}), partial=True)


def test_a_whole_tied_checkpoint_may_carry_the_head_if_it_is_the_embedding(make_runner, tmp_path):
    tensors = random_tensors(TIED)
    update(make_runner("qwen2_tied"), write_checkpoint(tmp_path / "a", TIED, tensors | {HEAD: tensors[EMBEDDING]}))
    other = write_checkpoint(tmp_path / "b", TIED, tensors | {HEAD: tensors[EMBEDDING] + 1})
    with pytest.raises(WeightUpdateRefused, match=HEAD):
        make_runner(other)


@pytest.mark.parametrize("kind", ["file", "shared memory"])
def test_every_kind_of_damage_in_a_chunk_is_refused_by_name_and_changes_nothing(kind, make_runner, tmp_path):
    runner, new = make_runner("qwen2"), new_tensors()
    before, weights = outputs(runner), runner.weights
    name = f"fastdeploy-test-{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name if kind == "shared memory" else tmp_path / name
    source = SharedMemorySource(name) if kind == "shared memory" else FileSource(str(path))
    diverged = new[K].copy()
    diverged[-1, -1] = np.nan
    damages = {
        "surplus": ({K: new[K], "model.layers.7.mlp.down_proj.weight": new[K]}, "layers.7"),
        "shape": ({K: new[K][:-1]}, K),
        "dtype": ({K: new[K].astype(np.int8)}, K),
        "nan": ({Q: new[Q], K: diverged}, K),
        "twice": ({V: new[V]}, V),
    }
    try:
        for tensors, named in damages.values():
            staging = runner.begin_update(True, False)
            write_safetensors(path, {V: new[V]})
            staging.add(source, {})
            write_safetensors(path, tensors)
            with pytest.raises(WeightUpdateRefused, match=named):
                staging.add(source, {})
            with pytest.raises(WeightUpdateRefused, match="begin again"):
                staging.finish()
            staging.abandon()
            assert runner.weights is weights
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(WeightUpdateRefused, match=name):
            runner.begin_update(True, False).add(source, {})
    finally:
        path.unlink()
    assert outputs(runner) == before


def test_a_full_update_that_lacks_a_tensor_names_it(make_runner, part):
    runner, tensors = make_runner("qwen2"), new_tensors()
    for gone in (K, "model.norm.weight", HEAD):
        with pytest.raises(WeightUpdateRefused, match=gone) as error:
            stage(runner, part({name: array for name, array in tensors.items() if name != gone}))
        assert error.value.detail == {"tensor": gone}


def sha(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


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


def test_a_lack_of_memory_while_staging_is_reported_and_changes_nothing(make_runner, part, monkeypatch):
    runner = make_runner("qwen2")
    before = outputs(runner)

    with monkeypatch.context() as patch:
        patch.setattr(runner.ops, "pack_linear", Mock(side_effect=MemoryError("no memory for a packed weight")))
        with pytest.raises(OutOfSpace):
            stage(runner, part(new_tensors()))
    assert outputs(runner) == before


def test_in_place_never_holds_a_linear_twice(make_runner, tmp_path, monkeypatch):
    runner, folder = make_runner("qwen2"), write_checkpoint(tmp_path / "c", SPEC, new_tensors())
    fresh = outputs(make_runner(folder))
    linears = [weakref.ref(value) for value in runner.weights.values.values() if hasattr(value, "out_features")]
    total, alive, pack, made = len(linears), [], runner.ops.pack_linear, []

    def counting(parts, bias=None):
        alive.append(sum(linear() is not None for linear in linears) + len(made))
        made.append(1)
        return pack(parts, bias)

    monkeypatch.setattr(runner.ops, "pack_linear", counting)
    staged = stage(runner, folder, in_place=True)
    assert len(alive) == total and max(alive) == total - 1  # each linear is freed before its successor is packed
    runner.commit(staged)
    assert outputs(runner) == fresh


def test_nothing_executes_between_the_first_tensor_in_place_and_the_commit(make_runner, part, fresh):
    runner, new = make_runner("qwen2"), new_tensors()
    before = outputs(runner)
    staging = runner.begin_update(False, True)
    with pytest.raises(WeightUpdateRefused):  # the header is refused before weights are taken
        staging.add(part({"other": new[Q]}), {})
    assert runner.has_weights and outputs(runner) == before
    staging = runner.begin_update(False, True)
    staging.add(part({Q: new[Q]}), {})
    assert not runner.has_weights
    for call in (lambda: runner.execute(StepPlan(0, [], [])), runner.checksums):
        with pytest.raises(WrongOrder):
            call()
    staging.add(part({name: array for name, array in new.items() if name != Q}), {})
    runner.commit(staging.finish().weights)
    assert runner.has_weights and outputs(runner) == fresh(SPEC, new)


@pytest.mark.parametrize("how", ["refused", "abandoned", "missing"])
def test_after_a_failure_in_place_only_a_whole_update_makes_it_serve_again(how, make_runner, part, fresh):
    runner, new = make_runner("qwen2"), new_tensors()
    staging = runner.begin_update(False, True)
    if how == "refused":
        new_k = new[K].copy()
        new_k[0, 0] = np.inf
        with pytest.raises(WeightUpdateRefused):
            staging.add(part(new | {K: new_k}), {})
    else:
        staging.add(part({Q: new[Q], HEAD: new[HEAD]}), {})
    if how == "missing":
        with pytest.raises(WeightUpdateRefused):
            staging.finish()
    staging.abandon()
    with pytest.raises(WeightUpdateRefused):
        staging.finish()
    with pytest.raises(WrongOrder):
        runner.execute(StepPlan(0, [], []))
    with pytest.raises(WrongOrder):
        runner.begin_update(True, False)
    for in_place in (True, False):
        update(runner, part(new), in_place=in_place)
        assert outputs(runner) == fresh(SPEC, new)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_wide", "qwen3_bf16", "qwen2_bf16"])
def test_checksums_are_those_of_the_folders_tensors(name, make_runner, part):
    runner, spec = make_runner(name), SPECS[name]
    expected = {name: sha(stored(array, spec)) for name, array in random_tensors(spec).items()}
    assert runner.checksums() == expected
    new = stored(new_tensors(spec)[K], spec)
    update(runner, part({K: new}), partial=True)
    assert runner.checksums() == expected | {K: sha(new)}


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


@pytest.mark.parametrize("where", ["before it opens the source", "in a read"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_abandoned_add_that_hung_takes_no_weights_when_it_returns(where, in_place, make_runner, part, monkeypatch):
    runner, source = make_runner("qwen2"), part(new_tensors())
    before, entered, mended = outputs(runner), threading.Event(), threading.Event()
    owner, name = (staging_module, "open_source") if where.startswith("before") else (SafetensorsReader, "read")
    real = getattr(owner, name)

    def hang(*args):
        entered.set()
        assert mended.wait(60)
        return real(*args)

    monkeypatch.setattr(owner, name, hang)
    staging = runner.begin_update(False, in_place)
    errors: list[BaseException] = []

    def add() -> None:
        try:
            staging.add(source, {})
        except WeightUpdateRefused as error:
            errors.append(error)

    thread = threading.Thread(target=add)
    thread.start()
    assert entered.wait(60)
    staging.abandon()
    taken = not runner.has_weights
    assert taken == (in_place and where == "in a read")
    mended.set()
    thread.join(60)
    assert len(errors) == 1 and "given up" in errors[0].message
    assert runner.has_weights != taken and staging._packed == {}
    if not taken:
        assert outputs(runner) == before
    with pytest.raises(WeightUpdateRefused):
        staging.finish()
