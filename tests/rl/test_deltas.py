"""The snapshot of the last publication, and the difference of the next state from it."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy.core.delta_format import read_overwrite
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.fingerprint import fingerprint, over_all
from fastdeploy.rl import deltas
from fastdeploy.rl.deltas import Snapshot, counted, serving_values
from fastdeploy.rl.state_encoding import HostTensor, host_tensors

RNG = np.random.default_rng(3)


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even, value by value: an independent reference."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    low, high = bits & 0xFFFF, bits >> 16
    up = (low > 0x8000) | ((low == 0x8000) & (high % 2 == 1))
    return (high + up).astype(np.uint16)


def as_tensor(values: np.ndarray, dtype: str) -> HostTensor:
    """Return a tensor of a trainer. dtype: of safetensors."""
    if dtype == "BF16":
        values = bfloat16(values)
    values = values.astype({"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype])
    return HostTensor(dtype, values.shape, values.reshape(-1).view(np.uint8).data)


def served(tensor: HostTensor, dtype: str) -> np.ndarray:
    """Return the values that a server of ``dtype`` has, computed for the whole tensor at once."""
    source = np.frombuffer(tensor.data, {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype])
    if tensor.dtype == "BF16":
        return source if dtype == "bfloat16" else (source.astype(np.uint32) << 16).view(np.float32)
    return bfloat16(source.astype(np.float32)) if dtype == "bfloat16" else source.astype(np.float32)


def snapshot(state: dict[str, HostTensor], dtype: str) -> Snapshot:
    values = {name: served(tensor, dtype).copy() for name, tensor in state.items()}
    fingerprints = {name: fingerprint(array) for name, array in values.items()}
    return Snapshot.of(dtype, values, fingerprints, values.keys())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(deltas, "PIECE", 1000)


@pytest.mark.parametrize("source", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.9])
def test_the_difference_makes_the_new_state_of_the_old(source, dtype, share):
    values = {"w": RNG.normal(size=(70, 51)), "b": RNG.normal(size=1), "c": RNG.normal(size=12)}
    new = {name: np.where(RNG.random(v.shape) < share, v * 1.5, v) for name, v in values.items()}
    new["c"] = -values["c"]
    old_state, state = ({n: as_tensor(v, source) for n, v in d.items()} for d in (values, new))
    kept = snapshot(old_state, dtype)
    base = kept.fingerprint
    difference = kept.difference(state)
    expected = {name: served(tensor, dtype) for name, tensor in state.items()}
    assert difference.fingerprint == over_all({name: fingerprint(v) for name, v in expected.items()})
    changed = {name: np.flatnonzero(v != served(old_state[name], dtype)) for name, v in expected.items()}
    assert difference.changed_values == sum(index.size for index in changed.values())
    for name, index in changed.items():
        if not index.size:
            assert name not in difference.changes
        elif (found := difference.changes[name]).payload is not None:
            at, bits = read_overwrite(found.payload, expected[name].size, expected[name].itemsize)
            assert at.tolist() == index.tolist()
            assert bits.tobytes() == expected[name][index].tobytes()
    assert difference.changes["c"].payload is None, "most values changed: the whole is smaller"
    assert kept.fingerprint == base, "nothing is taken over before the servers have committed"
    kept.advance(state, difference)
    assert kept.fingerprint == difference.fingerprint and kept.difference(state).changes == {}
    back = kept.difference(old_state)
    assert back.fingerprint == base
    kept.advance(old_state, back)
    assert kept.difference(old_state).changes == {}


def test_a_payload_is_never_larger_than_the_whole_tensor():
    old = np.zeros(3000, np.float32)
    kept = snapshot({"w": as_tensor(old, "F32")}, "bfloat16")
    for num_changed in range(1990, 2010):
        new = old.copy()
        new[RNG.permutation(old.size)[:num_changed]] = 1.0
        difference = kept.difference({"w": as_tensor(new, "F32")})
        assert difference.nbytes == min(4 + 3 * num_changed, 2 * old.size) and difference.changed_values == num_changed


def test_a_change_from_zero_to_minus_zero_is_a_change():
    kept = snapshot({"w": as_tensor(np.zeros(5), "F32")}, "float32")
    state = {"w": as_tensor(np.array([0.0, -0.0, 0.0, 0.0, 0.0]), "F32")}
    assert kept.difference(state).changed_values == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("bits", [None, 0xFFFFFFFF, 0x7FFFFFFF])
def test_values_that_have_no_bfloat16_are_refused_by_name(bad, bits):
    new = np.zeros(2500, np.float32)
    new[2100] = bad
    if bits is not None:  # a NaN that the integers of rounding would turn into a zero
        new.view(np.uint32)[2100] = bits
    kept = snapshot({"layer.3": as_tensor(np.zeros(2500), "F32")}, "bfloat16")
    with pytest.raises(InvalidField, match="layer.3"):
        kept.difference({"layer.3": as_tensor(new, "F32")})
    with pytest.raises(InvalidField, match="layer.3"):
        serving_values("layer.3", as_tensor(new, "F32"), "bfloat16")


def test_a_state_with_other_names_or_sizes_does_not_fit():
    state = {name: as_tensor(np.ones(4), "F32") for name in "ab"}
    kept = snapshot(state, "float32")
    assert kept.fits(state, False) and kept.fits({"a": state["a"]}, True)
    for other in ({"a": state["a"]}, state | {"c": state["a"]}, state | {"a": as_tensor(np.ones(5), "F32")}):
        assert not kept.fits(other, False)
    assert not kept.fits({"c": state["a"]}, True)


def test_a_tied_tensor_is_found_by_the_fingerprint_of_the_server_and_not_sent_again():
    names = ["embed", "head", "norm1", "norm2"]
    values = dict(zip(names, [RNG.normal(size=9)] * 2 + [np.ones(3)] * 2, strict=True))
    state = {name: as_tensor(v, "F32") for name, v in values.items()}
    arrays = {name: served(t, "float32").copy() for name, t in state.items()}
    prints = {name: fingerprint(v) for name, v in arrays.items()}
    at_server = over_all({name: value for name, value in prints.items() if name != "head"})
    assert counted(prints, over_all(prints)) == tuple(names)
    assert counted(prints, over_all({})) == ()
    assert (found := counted(prints, at_server)) == ("embed", "norm1", "norm2")
    kept = Snapshot.of("float32", arrays, prints, found)
    assert kept.fits(state, False) and kept.fingerprint == at_server
    moved = state | {name: as_tensor(values["embed"] + 1, "F32") for name in ("embed", "head")}
    assert kept.difference(moved).changes.keys() == {"embed"}
    shared = state | dict.fromkeys(("embed", "head"), as_tensor(values["embed"] + 2, "F32"))
    assert kept.difference(shared).changes.keys() == {"embed"}
    with pytest.raises(InvalidField, match="head: expected the values of embed"):
        kept.difference(state | {"embed": moved["embed"]})
    with pytest.raises(InvalidField, match="head: expected embed beside it"):
        kept.difference({"head": state["head"]})


def test_a_scalar_and_a_tensor_without_values_are_compared():
    state = host_tensors({"s": np.float32(2), "e": np.zeros((0, 3), np.float32)})
    kept = snapshot(state, "bfloat16")
    assert kept.difference(state).changes == {}
    assert kept.difference(state | host_tensors({"s": np.float32(3)})).changes.keys() == {"s"}
