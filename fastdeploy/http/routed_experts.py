"""The routing of tokens (core/experts.py) in the form of each caller. docs/experts.md describes the forms.

An array is written in slices: the rows of a slice get the type and the layers of the form, and their base64 text is
appended to the reply. So no array is copied as a whole, and the event loop runs between two slices.
"""

from __future__ import annotations

import binascii
import enum
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy.client.pace import Pace
from fastdeploy.core.config import ROUTED_EXPERTS_FORMATS
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import ExpertsInfo, RoutedExperts
from fastdeploy.http.context import ServingContext

BYTES_PER_WORK = 128  # base64 text that is made in one unit of Pace
SLICE_BYTES = 1 << 16
NPY_HEADER = 192  # bytes; a multiple of 64, as numpy wants it, and of 3, so that base64 text may be cut behind it
UINT8, INT8, INT16, INT32 = map(np.dtype, ("u1", "i1", "<i2", "<i4"))


class Form(enum.StrEnum):
    """The forms, by the names of those that --routed-experts-format may have."""

    NATIVE = "native"
    VLLM = ROUTED_EXPERTS_FORMATS[0]
    PRIME_RL = ROUTED_EXPERTS_FORMATS[1]
    NEMO_RL = ROUTED_EXPERTS_FORMATS[2]
    SGLANG = "sglang"
    SKYRL = "skyrl"


class Array(NamedTuple):
    """The rows as they are written: of type ``dtype``, [num_rows, num_layers, top_k], in C order, little-endian.

    all_layers: those of layers without experts too, which are zeros; else the experts layers alone. padded: a last row
    for the last token, which has no routing: the experts 0, 1, 2, ... in each layer."""

    routed: RoutedExperts
    dtype: np.dtype
    all_layers: bool = True
    padded: bool = False

    @property
    def shape(self) -> list[int]:
        info = self.routed.info
        layers = info.num_layers if self.all_layers else len(info.layers)
        return [self.routed.num_rows + self.padded, layers, info.top_k]

    def part(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from ``start`` to ``stop``."""
        (num_rows, num_layers, top_k), info = self.shape, self.routed.info
        rows = self.routed.array()[start:stop]
        stop = min(stop, num_rows)
        if num_layers == len(info.layers) and stop - start == len(rows):
            return np.ascontiguousarray(rows, self.dtype)
        part = np.zeros((stop - start, num_layers, top_k), self.dtype)
        part[: len(rows), info.layers if self.all_layers else slice(None)] = rows
        part[len(rows) :] = np.arange(top_k)
        return part

    async def text(self, pace: Pace, prefix: bytes = b"", head: bytes = b"") -> msgspec.Raw:
        """Return a JSON string: ``prefix``, and the base64 text of ``head`` and of the rows. head: of a length that 3
        divides."""
        num_rows, num_layers, top_k = self.shape
        row = num_layers * top_k * self.dtype.itemsize
        parts = [b'"', prefix, _base64(head)]
        step = 3 * max(SLICE_BYTES // (3 * row), 1)  # three rows have a length that 3 divides
        for start in range(0, num_rows, step):
            parts.append(_base64(self.part(start, start + step).data))
            await pace.spend(len(parts[-1]) // BYTES_PER_WORK)
        return msgspec.Raw(b"".join([*parts, b'"']))


def _base64(data: bytes | memoryview) -> bytes:
    return binascii.b2a_base64(data, newline=False)


async def native(pace: Pace, routed: RoutedExperts) -> dict[str, Any]:
    """Return our own form: the rows of the experts layers, what they are about, and the position of the first row."""
    info, array = routed.info, Array(routed, routed.info.dtype, all_layers=False)
    about = {"layers": info.layers, "num_layers": info.num_layers, "num_experts": info.num_experts}
    return await _described(pace, array, start=routed.start) | about


async def vllm(pace: Pace, routed: RoutedExperts) -> msgspec.Raw:
    """Return vLLM's form: a .npy file as base64 text. Its type is that of ExpertsInfo."""
    array = Array(routed, routed.info.dtype)
    return await array.text(pace, head=npy_header(array.dtype, array.shape))


def npy_header(dtype: np.dtype, shape: list[int]) -> bytes:
    """Return the beginning of a .npy file of version 1.0, before its rows in C order."""
    about = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': ({', '.join(map(str, shape))}), }}"
    text = about.ljust(NPY_HEADER - 11) + "\n"
    assert len(text) == NPY_HEADER - 10
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


async def prime_rl(pace: Pace, routed: RoutedExperts) -> dict[str, Any]:
    """Return prime-rl's form. Its client looks for the base64 text in the first field."""
    return await _described(pace, Array(routed, routed.info.dtype), start=routed.start)


async def skyrl(pace: Pace, routed: RoutedExperts) -> dict[str, Any]:
    """Return SkyRL's form. Its client takes no other type than the smallest of these that holds the ids there are."""
    largest = 0 if routed.info.num_experts <= 256 else routed.array().max(initial=0)
    dtype = next(dtype for dtype in (UINT8, INT16, INT32) if largest <= np.iinfo(dtype).max)
    return await _described(pace, Array(routed, dtype))


async def _described(pace: Pace, array: Array, **fields: int) -> dict[str, Any]:
    """Return an array as an object whose first field is its base64 text."""
    return {"data": await array.text(pace), "shape": array.shape, **fields, "dtype": array.dtype.name}


async def sglang(pace: Pace, routed: RoutedExperts) -> msgspec.Raw:
    """Return SGLang's form: int32 as base64 text, without a shape."""
    return await Array(routed, INT32).text(pace)


async def nemo_rl(pace: Pace, routed: RoutedExperts) -> msgspec.Raw:
    """Return NeMo-RL's form: type, shape and base64 text in one string, with a row for the last token too."""
    array = Array(routed, _signed(routed.info), padded=True)
    shape = "x".join(map(str, array.shape))
    return await array.text(pace, f"nrlre1:{array.dtype.name}:{shape}:".encode())


def _signed(info: ExpertsInfo) -> np.dtype:
    """Return the smallest signed type for the ids of experts."""
    return next(dtype for dtype in (INT8, INT16, INT32) if info.num_experts - 1 <= np.iinfo(dtype).max)


ENCODERS: Mapping[Form, Callable[[Pace, RoutedExperts], Awaitable[Any]]] = {
    Form.NATIVE: native,
    Form.VLLM: vllm,
    Form.PRIME_RL: prime_rl,
    Form.NEMO_RL: nemo_rl,
    Form.SGLANG: sglang,
    Form.SKYRL: skyrl,
}


class Asked(NamedTuple):
    """A request for the routing. field, start_field: the client's names of what it asks for, and of the position of the
    first row."""

    form: Form
    field: str
    start_field: str
    start: int

    def sampling(self, context: ServingContext, prompt_tokens: int) -> dict[str, Any]:
        """Return the fields of SamplingParams. Raises InvalidField."""
        if not context.client.model_info.get("routed_experts"):
            raise InvalidField(self.field, "expected a server with --enable-return-routed-experts")
        if not 0 <= self.start <= prompt_tokens:
            expected = f"expected 0 to {prompt_tokens} (the length of the prompt)"
            raise InvalidField(self.start_field, f"{expected}, got {self.start}")
        return {"routed_experts": True, "routed_experts_start": self.start}


def form_of_server(context: ServingContext) -> Form | None:
    """Return the form in which this server returns the routing without being asked, as vLLM does; None = it does not.
    The clients of these forms cannot ask for it."""
    if context.config.routed_experts_format == "none" or not context.client.model_info.get("routed_experts"):
        return None
    return Form(context.config.routed_experts_format)
