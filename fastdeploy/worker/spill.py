"""Sleeping weights on disk. Their file has no name: it vanishes with the process, even one that is killed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from fastdeploy.core.errors import OutOfSpace
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.parameters import SLICE, Parameter, Value, as_bytes, as_linear

PIECE = 1 << 26  # bytes that are read or written at once, in about 0.1 s on a slow disk


@dataclass
class Spill:
    """Unpacked rows of all linears in the file ``fd``, in the order of ``linears``: (key, rows, columns, bias). Norms
    and biases, which are thousands of times smaller, stay in memory. nbytes: size of the file."""

    fd: int
    linears: list[tuple[str, int, int, np.ndarray | None]]
    vectors: dict[str, Value]
    nbytes: int

    def read(self, ops: Ops, beat: Callable[[], None]) -> dict[str, Value]:
        """Return the values with the bits that they had before the sleep. ``beat`` is called after each piece. Raises
        MemoryError."""
        dtype = np.uint16 if ops.dtype == "bfloat16" else np.float32
        values = dict(self.vectors)
        offset = 0
        for key, rows, columns, bias in self.linears:
            array = np.empty((rows, columns), dtype)
            _read_into(self.fd, as_bytes(array), offset, beat)
            offset += array.nbytes
            values[key] = ops.pack_linear([array], None if bias is None else [bias])
            del array  # freed before the next one is allocated
            beat()
        return values

    def close(self) -> None:
        """Free the file."""
        os.close(self.fd)


def spill(
    ops: Ops, parameters: Iterable[Parameter], values: Mapping[str, Value], folder: str, beat: Callable[[], None]
) -> Spill:
    """Write the values to a file in ``folder`` ("" = the temporary folder). ``beat`` is called after each piece. Raises
    OutOfSpace, and leaves no file then."""
    try:
        fd, path = tempfile.mkstemp(prefix="fastdeploy-", dir=folder or None)
        os.unlink(path)
    except OSError as error:
        raise OutOfSpace(f"the sleeping weights cannot be written to {folder!r}: {error.strerror}") from error
    linears: list[tuple[str, int, int, np.ndarray | None]] = []
    vectors, nbytes = {}, 0
    try:
        for parameter in parameters:
            if parameter.is_vector:
                vectors[parameter.key] = values[parameter.key]
                continue
            value = as_linear(values[parameter.key])
            linears.append((parameter.key, value.out_features, value.in_features, ops.unpack_bias(value)))
            for row in range(0, value.out_features, SLICE):
                piece = ops.unpack_linear(value, row, min(row + SLICE, value.out_features))
                nbytes += _write(fd, as_bytes(piece), beat)
    except (OSError, MemoryError) as error:
        os.close(fd)
        raise OutOfSpace(f"no room for the sleeping weights after {nbytes} bytes: {error}") from error
    return Spill(fd, linears, vectors, nbytes)


def _write(fd: int, data: memoryview, beat: Callable[[], None]) -> int:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done : done + PIECE])
        beat()
    return done


def _read_into(fd: int, buffer: memoryview, offset: int, beat: Callable[[], None]) -> None:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done : done + PIECE]], offset + done)
        if count == 0:
            raise OSError("the file of the sleeping weights was cut short")
        done += count
        beat()
