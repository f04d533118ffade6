"""Any damage of a delta is found: it is refused by name, or the values are those that were sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core import delta_format
from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.fingerprint import fingerprint
from fastdeploy.core.weight_source import FileSource, PartFormat
from fastdeploy.worker.model_runner import ModelRunner
from support.delta_trainer import Trainer
from support.deltas import State, changed, over_all_of, payload, write_delta
from support.runner_ops import OPS
from support.search import examples

K, V = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "kv")
K_BIAS, NORM = "model.layers.1.self_attn.k_proj.bias", "model.norm.weight"
DTYPES = ["float32", "bfloat16"]
FORMS = [(encoding, compression) for encoding in delta_format.ENCODINGS for compression in delta_format.COMPRESSIONS]


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Return a function that damages bytes: cuts them, flips bits, swaps or inserts pieces."""
    kind = draw(st.sampled_from(["cut", "flip", "swap", "insert", "repeat"]))
    first, second = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    more = draw(st.binary(min_size=1, max_size=8))
    bits = draw(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))

    def damaged(raw: bytes) -> bytes:
        a, b = sorted((int(first * len(raw)), int(second * len(raw))))
        match kind:
            case "cut":
                return raw[:a] + raw[b:]
            case "swap":
                return raw[b:] + raw[a:b] + raw[:a]
            case "insert":
                return raw[:a] + more + raw[a:]
            case "repeat":
                return raw[:b] + raw[a:]
        flipped = bytearray(raw)
        for at, bit in bits:
            flipped[int(at * len(raw))] ^= 1 << bit
        return bytes(flipped)

    return damaged


@pytest.fixture(scope="module")
def shared_trainers(checkpoints, tmp_path_factory) -> dict[tuple[str, str], Trainer]:
    def trainer(kind: str, dtype: str) -> Trainer:
        runner = ModelRunner(str(checkpoints["qwen2"]), dtype=dtype, ops=OPS[kind](dtype), num_blocks=96)
        return Trainer(runner, tmp_path_factory.mktemp("deltas"), "qwen2")

    return {(kind, dtype): trainer(kind, dtype) for kind in sorted(OPS) for dtype in DTYPES}


EACH_RUNNER = [(kind, dtype) for kind in sorted(OPS) for dtype in DTYPES]
ENCODED = [form for form in FORMS if form != ("dense", "none")]


def check_outcome(trainer: Trainer, new: State, source: FileSource, form: PartFormat, same: bool) -> str | None:
    """Send a part. Either it is refused, or it makes the state ``new``, as it must if ``same``. Afterwards the weights
    are as before, and the next delta works. Returns what the error names."""
    old, staging, named = trainer.state, trainer.begin(), None
    try:
        staging.add(source, {}, form=form)
        assert staging.finish().fingerprint == over_all_of(new)
    except WeightUpdateRefused as error:
        assert not same
        named = error.detail.get("tensor") or error.detail["file"]
    staging.abandon()
    trainer.check()
    for state in (new, old):
        trainer.publish(state, form.encoding, form.compression)
        trainer.check()
    return named


@pytest.mark.parametrize("which", EACH_RUNNER)
@examples(15)
@given(st.sampled_from(ENCODED), st.sampled_from([K, K_BIAS, NORM]), damages(), st.integers(0, 99))
def test_a_damaged_payload_is_refused_or_makes_the_same_values(shared_trainers, which, form, name, damaged, seed):
    trainer = shared_trainers[which]
    new = changed(trainer.state, np.random.default_rng(seed), 0.2, [name])
    raw = payload(form[0], trainer.state[name], new[name])
    if form[1] == "zstd":
        raw = delta_format.compress(raw)
    broken = np.frombuffer(damaged(raw.tobytes()), np.uint8)
    part = PartFormat(*form, fingerprints={name: fingerprint(new[name]).hex})
    source = trainer.source({name: broken})
    assert check_outcome(trainer, new, source, part, same=broken.tobytes() == raw.tobytes()) in (name, None)


@pytest.mark.parametrize("which", EACH_RUNNER)
@examples(15)
@given(st.sampled_from(ENCODED), damages(), st.integers(0, 99))
def test_a_damaged_file_is_refused_or_makes_the_same_values(shared_trainers, which, form, damaged, seed):
    trainer = shared_trainers[which]
    new = changed(trainer.state, np.random.default_rng(seed), 0.2, [K, V, NORM])
    source, part = write_delta(trainer.folder / "good", trainer.state, new, *form)
    raw = Path(source.path).read_bytes()
    broken = damaged(raw)
    Path(source.path).write_bytes(broken)
    check_outcome(trainer, new, source, part, same=broken == raw)
