"""Files of the weights that serve: the sleeping weights on disk, and exports as safetensors.

The file of sleeping weights has no name: it vanishes with the process, even one that is killed.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np

from fastdeploy.core.errors import EngineError, InvalidField, OutOfSpace, WrongOrder
from fastdeploy.core.files import new_locked_file, write_all
from fastdeploy.core.serving_dtype import dtype_of
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.parameters import SLICE, Parameter, Value, as_bytes, as_linear, unpack

PIECE = 1 << 26  # bytes of a spill that are read or written at once, in about 0.1 s on a slow disk
ALIGNMENT = 8  # bytes; the header of an export is padded with spaces
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Check = Callable[[], None]  # raises WrongOrder once the copy is abandoned
Copy = TypeVar("Copy")


class SpillMove(Generic[Copy]):
    """Implements ``WeightMove`` (core/runner.py). work: makes the copy, and calls its argument between pieces."""

    def __init__(self, work: Callable[[Check], Copy]):
        self._work: Callable[[Check], Copy] | None = work  # refers to the weights that serve
        self._copy: Copy | None = None
        self._abandoned = False
        self._lock = threading.Lock()

    def run(self) -> None:
        """See ``WeightMove.run``."""
        work, self._work = self._work, None
        self._check()
        assert work is not None
        copy = work(self._check)
        with self._lock:
            self._check()
            self._copy = copy

    def result(self) -> Copy:
        """Return the copy, and keep no reference to it. ``run`` must have ended."""
        copy, self._copy = self._copy, None
        assert copy is not None
        return copy

    def abandon(self) -> None:
        """See ``WeightMove.abandon``."""
        with self._lock:
            self._abandoned = True
            self._work = self._copy = None

    def _check(self) -> None:
        if self._abandoned:
            raise WrongOrder("this copy of the weights was given up while it was made")


class Spill:
    """Unpacked rows of all linears in the file ``fd``, in the order of ``linears``: (key, rows, columns, bias). Norms
    and biases, which are thousands of times smaller, stay in memory. nbytes: memory of all linears when they serve. The
    file is freed with the last reference to the spill: a read that hangs must not come back to another file of the same
    number."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.linears: list[tuple[str, int, int, np.ndarray | None]] = []
        self.vectors: dict[str, Value] = {}
        self.nbytes = 0
        self.close = weakref.finalize(self, os.close, fd)

    def read(self, ops: Ops, check: Check) -> dict[str, Value]:
        """Return the values with the bits that they had before the sleep. ``check`` is called after each piece. Raises
        MemoryError, and EngineError if the file cannot be read."""
        dtype = np.uint16 if ops.dtype == "bfloat16" else np.float32
        values = dict(self.vectors)
        offset = 0
        for key, rows, columns, bias in self.linears:
            array = np.empty((rows, columns), dtype)
            _read_into(self.fd, as_bytes(array), offset, check)
            offset += array.nbytes
            values[key] = ops.pack_linear([array], None if bias is None else [bias])
            del array  # freed before the next one is allocated
            check()
        return values

    def add(self, ops: Ops, parameter: Parameter, value: Value, check: Check) -> None:
        """Append the value of one parameter. ``check`` is called after each piece. Raises OSError or MemoryError."""
        if parameter.is_vector:
            self.vectors[parameter.key] = value
            return
        linear = as_linear(value)
        self.linears.append((parameter.key, linear.out_features, linear.in_features, ops.unpack_bias(linear)))
        for row in range(0, linear.out_features, SLICE):
            piece = ops.unpack_linear(linear, row, min(row + SLICE, linear.out_features))
            _write(self.fd, as_bytes(piece), check)
        self.nbytes += linear.nbytes


def spill(ops: Ops, parameters: Iterable[Parameter], values: Mapping[str, Value], folder: str, check: Check) -> Spill:
    """Write the values to a file in ``folder`` ("" = the temporary folder). Raises OutOfSpace, and leaves no file
    then."""
    try:
        fd, path = tempfile.mkstemp(prefix="fastdeploy-", dir=folder or None)
        written = Spill(fd)
        os.unlink(path)
    except OSError as error:
        raise OutOfSpace(f"the sleeping weights cannot be written to {folder!r}: {error.strerror}") from error
    try:
        for parameter in parameters:
            written.add(ops, parameter, values[parameter.key], check)
    except (OSError, MemoryError) as error:
        size = os.fstat(written.fd).st_size
        written.close()
        raise OutOfSpace(f"no room for the sleeping weights after {size} bytes: {error}") from error
    return written


def _write(fd: int, data: memoryview, check: Check) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, data[done : done + PIECE])
        check()


def _read_into(fd: int, buffer: memoryview, offset: int, check: Check) -> None:
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done : done + PIECE]], offset + done)
        except OSError as error:
            raise EngineError(f"the file of the sleeping weights cannot be read: {error.strerror}") from error
        if count == 0:
            raise EngineError("the file of the sleeping weights was cut short")
        done += count
        check()


def export_weights(
    ops: Ops, parameters: Sequence[Parameter], values: Mapping[str, Value], path: str, tensors: Collection[str] = ()
) -> int:
    """Write checkpoint tensors in the serving dtype to the new file ``path``, and return its bytes. tensors: names;
    none = all. The file is locked while it is written (see core/files.py). After an error there is no file. Raises
    OutOfSpace, EngineError if the file cannot be written, or InvalidField for an unknown name."""
    wanted = {name: parameter for parameter in parameters for name in parameter.tensors}
    if tensors:
        if unknown := sorted(set(tensors) - wanted.keys()):
            raise InvalidField("tensors", f"{unknown[0]!r} is not a tensor of this model")
        wanted = {name: parameter for name, parameter in wanted.items() if name in tensors}
    header, nbytes = _header(ops.dtype, wanted)
    try:
        with new_locked_file(path, 0o600) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)  # a full disk is found at once
                write_all(file, header)
                for piece in _pieces(ops, wanted, values):
                    write_all(file, as_bytes(np.ascontiguousarray(piece)))
                assert file.tell() == len(header) + nbytes
            except BaseException:
                os.unlink(path)
                raise
    except OSError as error:
        kind = OutOfSpace if error.errno in NO_SPACE else EngineError
        raise kind(f"the weights cannot be written to {os.path.dirname(path)}: {error.strerror}") from error
    return len(header) + nbytes


def _header(dtype: str, tensors: Mapping[str, Parameter]) -> tuple[bytes, int]:
    """Return the beginning of the file, and the bytes of all tensors behind it. tensors: name and parameter of each."""
    table, end = {}, 0
    for name, parameter in tensors.items():
        shape = parameter.shapes[name]
        name_of_dtype, width = DTYPES[dtype_of(name, dtype)]
        begin, end = end, end + width * math.prod(shape)
        table[name] = {"dtype": name_of_dtype, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end


def _pieces(ops: Ops, tensors: Mapping[str, Parameter], values: Mapping[str, Value]) -> Iterable[np.ndarray]:
    for name, parameter in tensors.items():
        yield from unpack(ops, parameter, values[parameter.key], name)
