"""Deltas at the worker: good ones make exactly the weights of the trainer, and others change nothing."""

from __future__ import annotations

import gc
import hashlib
import json
import threading
import weakref
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import zstandard

from fastdeploy.core import delta_format
from fastdeploy.core.errors import OutOfSpace, WeightUpdateRefused, WrongOrder
from fastdeploy.core.fingerprint import fingerprint
from fastdeploy.core.weight_source import FolderSource, PartFormat
from fastdeploy.worker.model_runner import ModelRunner
from support.delta_trainer import Trainer
from support.deltas import over_all_of, payload, state_of, write_delta
from support.runner_ops import OPS
from support.step_driver import outputs, sleep, wake

Q, K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv")
K_BIAS, NORM = "model.layers.1.self_attn.k_proj.bias", "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ["float32", "bfloat16"]
FORMS = [(encoding, compression) for encoding in delta_format.ENCODINGS for compression in delta_format.COMPRESSIONS]


@pytest.fixture(params=sorted(OPS))
def make_trainer(request, checkpoints, tmp_path) -> Callable[..., Trainer]:
    def make(model: str = "qwen2", dtype: str = "bfloat16") -> Trainer:
        settings = {"dtype": dtype, "ops": OPS[request.param](dtype), "num_blocks": 96, "standby_weights": "on"}
        return Trainer(ModelRunner(str(checkpoints[model]), **settings), tmp_path, model)

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("encoding", "compression"), FORMS)
def test_a_delta_of_any_form_makes_the_weights_of_the_trainer(encoding, compression, dtype, make_trainer):
    trainer = make_trainer(dtype=dtype)
    runner, before = trainer.runner, outputs(trainer.runner)
    for _ in range(2):  # the second one changes the copy that missed the first one
        new = trainer.next_state()
        source, form = write_delta(trainer.folder / "part", trainer.state, new, encoding, compression)
        staging = trainer.begin()
        staging.add(source, {}, form=form)
        staged = staging.finish()
        trainer.check()
        runner.commit(staged.weights)
        trainer.state = new
        trainer.check()
    assert outputs(runner) != before


@pytest.mark.parametrize("names", [(Q,), (K, K_BIAS), (K_BIAS,), (NORM,), (EMBEDDING, HEAD), ()])
def test_what_a_delta_does_not_change_is_shared_with_the_old_weights(names, make_trainer):
    trainer = make_trainer()
    for share in (0.1, 2):
        old = trainer.runner.weights.values
        trainer.publish(trainer.next_state(*names, share=share) if names else dict(trainer.state))
        trainer.check()
        moved = {p.key for p in trainer.runner.model.parameters if set(p.tensors) & set(names)}
        new = trainer.runner.weights.values
        assert {key for key in new if new[key] is not old[key]} == moved


def test_a_refresh_applies_the_missed_delta_and_copies_nothing(make_trainer, monkeypatch):
    trainer = make_trainer()
    trainer.publish(trainer.next_state())
    trainer.runner.refresh_standby()
    copy = Mock(side_effect=AssertionError)
    monkeypatch.setattr(trainer.runner.ops, "copy_rows", copy)
    for refreshed in (True, False, True):
        trainer.publish(trainer.next_state(share=0.02))
        if refreshed:
            trainer.runner.refresh_standby()
        trainer.check()


def test_payloads_are_kept_for_the_standby_copy_only_while_they_are_small(make_trainer):
    trainer = make_trainer()
    runner = trainer.runner
    trainer.publish(trainer.next_state(share=0.02))
    weights = sum(value.nbytes for value in runner.weights.values.values() if hasattr(value, "out_features"))
    assert weights < runner.standby_nbytes < 1.25 * weights
    runner.refresh_standby()
    assert runner.standby_nbytes == weights
    trainer.publish(trainer.next_state(share=2), "dense", "zstd")
    assert runner.standby_nbytes == weights
    trainer.check()


def test_large_payloads_are_freed_once_they_are_applied(make_trainer, monkeypatch):
    trainer = make_trainer()
    apply, seen = trainer.runner.ops.apply_deltas, []

    def watched(items, stop, dtype):
        seen.extend(weakref.ref(item.payload) for item in items)
        return apply(items, stop, dtype)

    monkeypatch.setattr(trainer.runner.ops, "apply_deltas", watched)
    new = trainer.next_state(EMBEDDING, share=2)
    source, form = write_delta(trainer.folder / "part", trainer.state, new, "overwrite", "zstd")
    staging = trainer.begin()
    staging.add(source, {}, form=form)
    gc.collect()
    assert [one() for one in seen] == [None]


@pytest.mark.parametrize("first", [Q, K])
def test_a_linear_that_was_written_in_part_is_copied_by_the_refresh(first, make_trainer):
    trainer = make_trainer()
    new, staging = trainer.next_state(Q, K, share=0.02), trainer.begin()
    for name in (first, K if first == Q else Q):
        if name == Q:
            staging.add(trainer.source({Q: new[Q]}), {})
        else:
            source, form = write_delta(trainer.folder / "part", {K: trainer.state[K]}, {K: new[K]})
            staging.add(source, {}, form=form)
    trainer.runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.runner.refresh_standby()
    trainer.publish(trainer.next_state(Q, K))
    trainer.check()


def test_parts_of_different_forms_make_one_delta(make_trainer):
    trainer = make_trainer()
    new, staging = trainer.next_state(), trainer.begin()
    for (encoding, compression), name in zip(FORMS * 2, [Q, K, V, NORM, K_BIAS, EMBEDDING], strict=False):
        part = trainer.state | {name: new[name]}
        source, form = write_delta(trainer.folder / "part", trainer.state, part, encoding, compression)
        staging.add(source, {}, form=form)
    rest = {name: new[name] for name in new if name not in (Q, K, V, NORM, K_BIAS, EMBEDDING)}
    staging.add(trainer.source(rest), {})
    runner = trainer.runner
    runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.check()
    runner.refresh_standby()
    trainer.publish(trainer.next_state())
    trainer.check()


def test_plain_tensors_of_other_float_types_are_rounded(make_trainer):
    trainer = make_trainer()
    new = np.random.default_rng(1).standard_normal(trainer.state[Q].shape).astype(np.float32)
    half = new.astype(np.float16)
    staging = trainer.begin()
    staging.add(trainer.source({Q: new, K: half[:32]}), {})
    trainer.runner.commit(staging.finish().weights)
    trainer.state |= state_of({Q: new, K: half[:32].astype(np.float32)}, "bfloat16")
    trainer.check()


def test_a_delta_needs_complete_weights(make_trainer):
    trainer = make_trainer()
    sleep(trainer.runner, "weight", discard=True)
    with pytest.raises(WrongOrder, match="asleep"):
        trainer.begin()
    wake(trainer.runner, "weight")
    with pytest.raises(WrongOrder, match="a delta needs complete weights"):
        trainer.begin()


def dense_of(trainer: Trainer) -> np.ndarray:
    return payload("dense", trainer.state[Q], trainer.next_state(Q)[Q])


def overwrite_of(index: list[int], value: int = 1) -> np.ndarray:
    return delta_format.overwrite(np.array(index), np.full(len(index), value, np.uint16))


BOMB = np.frombuffer(zstandard.ZstdCompressor().compress(bytes(1 << 30)), np.uint8)
COMPRESSED = delta_format.compress
OVERWRITE, ZSTD = PartFormat("overwrite"), PartFormat("dense", "zstd")
ZSTD_OVERWRITE = PartFormat("overwrite", "zstd")
NAMED_Q, NAMED_K = (PartFormat("overwrite", fingerprints={name: "0" * 32}) for name in (Q, K))
REFUSED = {
    "unknown name": (lambda t: {"other": dense_of(t)}, ZSTD, "not a tensor of this model", "other"),
    "arrived before": (
        lambda t: {Q: overwrite_of([1]), HEAD: overwrite_of([1])},
        OVERWRITE,
        "arrived before",
        HEAD,
    ),
    "no payload": (lambda t: {Q: t.state[Q]}, OVERWRITE, r"dtype BF16 .* expected a payload: U8", Q),
    "two dimensions": (lambda t: {Q: dense_of(t).reshape(2, -1)}, ZSTD, r"shape \[2, 4096\]", Q),
    "long content": (lambda t: {Q: COMPRESSED(np.append(dense_of(t), np.uint8(0)))}, ZSTD, "at most 8192 bytes", Q),
    "float32 values": (
        lambda t: {Q: np.zeros(16384, np.uint8)},
        PartFormat("dense", "zstd"),
        "expected a zstd frame",
        Q,
    ),
    "long overwrite": (lambda t: {Q: np.zeros(12293, np.uint8)}, OVERWRITE, "at most 12292 bytes, got 12293", Q),
    "no count": (lambda t: {Q: np.zeros(3, np.uint8)}, OVERWRITE, "number of values in 4 bytes", Q),
    "index too large": (lambda t: {Q: overwrite_of([1, 4096])}, OVERWRITE, "ascending indices below 4096", Q),
    "index twice": (lambda t: {Q: overwrite_of([1, 1])}, OVERWRITE, "ascending indices", Q),
    "cut overwrite": (lambda t: {Q: overwrite_of([1, 9])[:-1]}, OVERWRITE, "for 2 values", Q),
    "not finite": (lambda t: {Q: overwrite_of([7], 0x7F80)}, OVERWRITE, "values that are not finite", Q),
    "dense not finite": (lambda t: {Q: COMPRESSED(np.full(4096, 0x7F80, "<u2").view(np.uint8))}, ZSTD, "not finite", Q),
    "no frame": (lambda t: {Q: dense_of(t)}, ZSTD, "expected one whole zstd frame", Q),
    "cut frame": (lambda t: {Q: COMPRESSED(dense_of(t))[:-1]}, ZSTD, "expected one whole zstd frame", Q),
    "two frames": (lambda t: {Q: np.tile(COMPRESSED(overwrite_of([1])), 2)}, ZSTD_OVERWRITE, "one whole zstd frame", Q),
    "short content": (lambda t: {Q: COMPRESSED(dense_of(t)[1:])}, ZSTD, "expected 8192 bytes, got 8191", Q),
    "bomb": (lambda t: {K_BIAS: BOMB[:60]}, ZSTD, "at most 64 bytes, the zstd frame has 1073741824", K_BIAS),
    "large bomb": (lambda t: {Q: BOMB}, ZSTD, "expected a zstd frame of at most 8", Q),
    "fingerprint": (
        lambda t: {Q: overwrite_of([1])},
        NAMED_Q,
        "expected 000",
        Q,
    ),
    "no such tensor": (
        lambda t: {Q: overwrite_of([1])},
        NAMED_K,
        "not in the source",
        K,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_part_is_refused_by_name_and_changes_nothing(case, make_trainer):
    trainer = make_trainer()
    payloads, form, why, tensor = REFUSED[case]
    trainer.check_refused(payloads(trainer), form, why, tensor)


def test_a_bomb_is_refused_before_memory_is_allocated(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(zstandard.ZstdDecompressor, "decompress", Mock(side_effect=AssertionError))
    trainer.check_refused({K_BIAS: BOMB[:60]}, ZSTD, "at most 64 bytes", K_BIAS)


def test_the_sha256_of_a_payload_is_checked(make_trainer):
    trainer = make_trainer()
    new = trainer.next_state(Q)
    source, form = write_delta(trainer.folder / "part", trainer.state, new, "overwrite", "zstd")
    frame = delta_format.compress(payload("overwrite", trainer.state[Q], new[Q]))
    for checksums, why in (
        ({Q: "0" * 64}, "does not have the sha256"),
        ({K: "0" * 64}, "not in the source"),
        ({}, "no"),
    ):
        staging = trainer.begin()
        with pytest.raises(WeightUpdateRefused, match=why):
            staging.add(source, checksums, verify_checksum=True, form=form)
        staging.abandon()
    staging = trainer.begin()
    staging.add(source, {Q: hashlib.sha256(frame).hexdigest()}, verify_checksum=True, form=form)
    trainer.runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.check()


def test_the_config_and_the_eos_ids_of_a_folder_count(make_trainer, checkpoints, tmp_path):
    trainer = make_trainer()
    new = trainer.next_state(Q)
    write_delta(tmp_path / "model.safetensors", trainer.state, new)
    config = json.loads((checkpoints["qwen2"] / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    for theta, refused in ((1.0, True), (config["rope_theta"], False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": theta}))
        staging = trainer.begin()
        if refused:
            with pytest.raises(WeightUpdateRefused, match="config.json: rope_theta"):
                staging.add(FolderSource(str(tmp_path)), {}, form=OVERWRITE)
            staging.abandon()
    staging.add(FolderSource(str(tmp_path)), {}, form=OVERWRITE)
    staged = staging.finish()
    assert staged.eos_token_ids == (5, 7) and staged.fingerprint == over_all_of(new)


ALIAS = "lm_head.weight"


@pytest.mark.parametrize("order", ["one part", "alias first", "alias last"])
@pytest.mark.parametrize("encoding", ["overwrite", "dense"])
def test_an_alias_may_come_with_the_payload_of_its_tensor(encoding, order, make_trainer):
    trainer = make_trainer("llama_tied")
    new = trainer.next_state(EMBEDDING)
    one = payload(encoding, trainer.state[EMBEDDING], new[EMBEDDING])
    compression = "zstd" if encoding == "dense" else "none"
    one = delta_format.compress(one) if encoding == "dense" else one
    both = {EMBEDDING: one, ALIAS: one}
    names = [ALIAS, EMBEDDING] if order == "alias first" else [EMBEDDING, ALIAS]
    staging = trainer.begin()
    for part in [names] if order == "one part" else [[name] for name in names]:
        form = PartFormat(encoding, compression, fingerprints={name: fingerprint(new[EMBEDDING]).hex for name in part})
        staging.add(trainer.source({name: both[name] for name in part}), {}, form=form)
    trainer.runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.check()


def test_an_alias_that_differs_from_its_tensor_is_refused(make_trainer):
    trainer = make_trainer("llama_tied")
    new, other = trainer.next_state(EMBEDDING), trainer.next_state(EMBEDDING)
    one, two = (payload("overwrite", trainer.state[EMBEDDING], state[EMBEDDING]) for state in (new, other))
    named = PartFormat("overwrite", fingerprints={ALIAS: "0" * 32})
    for payloads, form in (
        ({ALIAS: one}, OVERWRITE),
        ({ALIAS: one, EMBEDDING: two}, OVERWRITE),
        ({ALIAS: one, EMBEDDING: one}, named),
    ):
        staging = trainer.begin()
        staging.add(trainer.source(payloads), {}, form=form)
        with pytest.raises(WeightUpdateRefused, match="tie_word_embeddings|expected 0000") as caught:
            staging.finish()
        assert caught.value.detail["tensor"] == ALIAS
        staging.abandon()
        trainer.check()
    staging = trainer.begin()
    staging.add(trainer.source({ALIAS: one}), {}, form=OVERWRITE)
    with pytest.raises(WeightUpdateRefused, match="arrived before"):
        staging.add(trainer.source({ALIAS: one}), {}, form=OVERWRITE)
    staging.abandon()
    staging = trainer.begin()
    with pytest.raises(WeightUpdateRefused, match=f"{ALIAS}: differs from {EMBEDDING}"):
        staging.add(trainer.source({EMBEDDING: new[EMBEDDING], ALIAS: other[EMBEDDING]}), {})
    staging.abandon()
    staging = trainer.begin()
    staging.add(trainer.source({EMBEDDING: new[EMBEDDING]}), {})
    staging.add(trainer.source({ALIAS: new[EMBEDDING]}), {})
    trainer.runner.commit(staging.finish().weights)
    trainer.state = new
    trainer.check()


def test_memory_that_an_abandoned_add_may_write_to_is_never_used_again(make_trainer, monkeypatch):
    trainer = make_trainer()
    runner, ops = trainer.runner, trainer.runner.ops
    trainer.publish(trainer.next_state())
    runner.refresh_standby()
    entered, mended, apply, errors = threading.Event(), threading.Event(), ops.apply_deltas, []

    def hang(items, stop, dtype):
        entered.set()
        assert mended.wait(60)
        return apply(items, np.zeros(1, np.int32))  # writes all the same

    monkeypatch.setattr(ops, "apply_deltas", hang)
    hung_state, staging = trainer.next_state(share=2), trainer.begin()
    source, form = write_delta(trainer.folder / "hung", trainer.state, hung_state)

    def add() -> None:
        try:
            staging.add(source, {}, form=form)
        except WeightUpdateRefused as error:
            errors.append(error.message)

    thread = threading.Thread(target=add)
    thread.start()
    assert entered.wait(60)
    staging.abandon()
    monkeypatch.setattr(ops, "apply_deltas", apply)
    trainer.publish(trainer.next_state())
    trainer.publish(trainer.next_state())
    mended.set()
    thread.join(60)
    assert errors == ["this update was given up while it was read"]
    trainer.check()
    trainer.publish(trainer.next_state())
    trainer.check()


def test_without_memory_for_the_standby_copy_a_delta_is_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    source, form = write_delta(trainer.folder / "part", trainer.state, trainer.next_state())
    with monkeypatch.context() as patch:
        patch.setattr(trainer.runner.ops, "new_linear", Mock(side_effect=MemoryError("no memory")))
        staging = trainer.begin()
        with pytest.raises(OutOfSpace):
            staging.add(source, {}, form=form)
        staging.abandon()
    trainer.check()
    trainer.publish(trainer.next_state())
    trainer.check()


@pytest.mark.parametrize("form", [form for form in FORMS if form != ("dense", "none")])
def test_payloads_that_were_exchanged_are_refused(form, make_trainer):
    trainer = make_trainer()
    new = trainer.next_state(K, V)
    names = {K: V, V: K}
    payloads = {name: payload(form[0], trainer.state[names[name]], new[names[name]]) for name in names}
    if form[1] == "zstd":
        payloads = {name: delta_format.compress(one) for name, one in payloads.items()}
    part = PartFormat(*form, fingerprints={name: fingerprint(new[name]).hex for name in names})
    staging = trainer.begin()
    with pytest.raises(WeightUpdateRefused, match="has the fingerprint"):
        staging.add(trainer.source(payloads), {}, form=part)
    staging.abandon()
    trainer.check()
