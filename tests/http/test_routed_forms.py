"""The routing of tokens in the form of each caller, read by the caller's own steps."""

from __future__ import annotations

import asyncio
import base64
import io
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdeploy.client.pace import Pace
from fastdeploy.core.experts import ExpertsInfo, RoutedExperts
from fastdeploy.http import routed_experts
from fastdeploy.http.routed_experts import ENCODERS, Form

DENSE_FIRST = ExpertsInfo(layers=(1, 2, 4), num_layers=5, num_experts=128, top_k=2)
ALL = ExpertsInfo(layers=(0, 1), num_layers=2, num_experts=128, top_k=3)
MANY = ExpertsInfo(layers=(0, 1), num_layers=2, num_experts=384, top_k=3)


def some_rows(info: ExpertsInfo, num_rows: int = 100, start: int = 0, largest: int | None = None) -> RoutedExperts:
    shape = num_rows, len(info.layers), info.top_k
    ids = np.random.default_rng(0).integers(0, (largest or info.num_experts - 1) + 1, shape)
    ids.flat[-1] = largest or info.num_experts - 1
    return RoutedExperts(info, ids.astype(info.dtype).tobytes(), start)


def encoded(form: Form, routed: RoutedExperts) -> tuple[Any, bytes]:
    """Return the value as a client reads it, and the bytes of a reply that has it."""

    async def encode() -> Any:
        return await ENCODERS[form](Pace(asyncio.Lock()), routed)

    reply = msgspec.json.encode({"routed_experts": asyncio.run(encode())})
    return msgspec.json.decode(reply)["routed_experts"], reply


def of_all_layers(routed: RoutedExperts) -> np.ndarray:
    """Return the rows with the zeros that vLLM and SGLang have for layers without experts."""
    info = routed.info
    array = np.zeros((routed.num_rows, info.num_layers, info.top_k), np.int64)
    array[:, info.layers] = routed.array()
    return array


@pytest.fixture(params=[1, 3, 7, 1 << 16])
def slice_bytes(request, monkeypatch) -> None:
    """Slices of many sizes: a row that is cut at a wrong place would change the text of all that follow."""
    monkeypatch.setattr(routed_experts, "SLICE_BYTES", request.param)


@pytest.mark.usefixtures("slice_bytes")
@pytest.mark.parametrize(("info", "dtype"), [(DENSE_FIRST, np.uint8), (ALL, np.uint8), (MANY, np.uint16)])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 100])
def test_vllms_clients_load_a_npy_file_with_a_row_of_zeros_for_each_dense_layer(info, dtype, num_rows):
    routed = some_rows(info, num_rows) if num_rows else RoutedExperts(info, b"")
    value, _ = encoded(Form.VLLM, routed)
    raw = base64.b64decode(value, validate=True)
    array = np.load(io.BytesIO(raw), allow_pickle=False)
    assert array.dtype == dtype and np.array_equal(array, of_all_layers(routed))
    assert (raw[8] | raw[9] << 8) + 10 == 192 and raw[191:192] == b"\n", "the rows are aligned, as numpy writes them"


@pytest.mark.parametrize(("info", "dtype"), [(DENSE_FIRST, "uint8"), (MANY, "uint16")])
def test_prime_rl_cuts_the_base64_text_out_of_the_reply(info, dtype):
    """renderers and verifiers search the bytes of the reply before they read its JSON."""
    routed = some_rows(info, start=7)
    _, reply = encoded(Form.PRIME_RL, routed)
    prefix = b'"routed_experts":{"data":"'
    begin = reply.index(prefix) + len(prefix)
    end = reply.index(b'"', begin)
    rest = msgspec.json.decode(reply[:begin] + reply[end:])["routed_experts"]
    assert (rest.pop("data"), rest["start"], rest["dtype"]) == ("", 7, dtype)
    array = np.frombuffer(base64.b64decode(reply[begin:end]), np.dtype(rest["dtype"])).reshape(rest["shape"])
    assert np.array_equal(array, of_all_layers(routed))


@pytest.mark.parametrize(("info", "largest", "dtype"), [
    (DENSE_FIRST, 127, np.uint8), (MANY, 383, np.int16), (MANY, 256, np.int16), (MANY, 255, np.uint8),
    (ExpertsInfo((0,), 1, 40000, 1), 39999, np.int32),
])  # fmt: skip
def test_skyrl_takes_only_the_smallest_type_that_holds_the_ids_there_are(info, largest, dtype):
    routed = some_rows(info, largest=largest)
    value, _ = encoded(Form.SKYRL, routed)
    assert list(value) == ["data", "shape", "dtype"] and value["dtype"] == np.dtype(dtype).name
    data = base64.b64decode(value["data"], validate=True)
    array = np.frombuffer(data, dtype).reshape(value["shape"])
    assert np.array_equal(array, of_all_layers(routed))
    smaller = {np.int16: np.uint8, np.int32: np.int16}.get(dtype)
    assert smaller is None or array.max() > np.iinfo(smaller).max


@pytest.mark.usefixtures("slice_bytes")
@pytest.mark.parametrize("info", [DENSE_FIRST, ALL, MANY])
def test_slime_and_areal_count_the_int32_ids_of_sglang(info):
    """slime: (tokens - 1 - start) x layers of the model x top_k. AReaL: a whole number for each token."""
    routed = some_rows(info)
    value, _ = encoded(Form.SGLANG, routed)
    flat = np.frombuffer(base64.b64decode(value.encode("ascii")), dtype=np.int32)
    assert flat.size == 100 * info.num_layers * info.top_k
    assert np.array_equal(flat.reshape(100, info.num_layers, info.top_k), of_all_layers(routed))
    assert flat.reshape(100, -1).shape[1] == info.num_layers * info.top_k


@pytest.mark.usefixtures("slice_bytes")
@pytest.mark.parametrize(("num_experts", "dtype"), [(128, "int8"), (129, "int16"), (384, "int16")])
def test_nemo_rl_reads_an_envelope_with_a_row_for_the_last_token_too(num_experts, dtype):
    routed = some_rows(ExpertsInfo((1, 2), 3, num_experts, 4), 10)
    value, _ = encoded(Form.NEMO_RL, routed)
    magic, name, shape, data = value.split(":", 3)
    assert (magic, name, shape) == ("nrlre1", dtype, "11x3x4")
    raw = bytearray(base64.b64decode(data, validate=True))
    array = np.frombuffer(raw, np.dtype(name)).reshape(11, 3, 4)
    assert np.array_equal(array[:10], of_all_layers(routed))
    assert array[10].tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("info", [DENSE_FIRST, MANY])
def test_our_own_form_has_the_layers_with_experts_and_says_which_they_are(info):
    routed = some_rows(info, start=5)
    value, _ = encoded(Form.NATIVE, routed)
    assert base64.b64decode(value["data"]) == routed.data and value["start"] == 5
    assert value["shape"] == [100, len(info.layers), info.top_k] and value["dtype"] == info.dtype.name
    told = value["layers"], value["num_layers"], value["num_experts"]
    assert told == (list(info.layers), info.num_layers, info.num_experts)


def test_the_event_loop_runs_while_a_large_array_is_written():
    routed = some_rows(ExpertsInfo(tuple(range(16)), 16, 128, 8), 20_000)

    async def write() -> int:
        turns, done = 0, False

        async def others() -> None:
            nonlocal turns
            while not done:
                turns += 1
                await asyncio.sleep(0)

        other = asyncio.ensure_future(others())
        await ENCODERS[Form.SGLANG](Pace(asyncio.Lock()), routed)
        done = True
        await other
        return turns

    assert asyncio.run(write()) > 50
