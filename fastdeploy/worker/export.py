"""Writing the weights that serve to a safetensors file."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from fastdeploy.core.errors import EngineError, OutOfSpace
from fastdeploy.core.files import new_locked_file, write_all
from fastdeploy.model_executor.ops.interface import Ops
from fastdeploy.model_executor.parameters import Parameter, Value, as_bytes, unpack

ALIGNMENT = 8  # bytes; the header is padded with spaces
DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def export_weights(ops: Ops, parameters: Sequence[Parameter], values: Mapping[str, Value], path: str) -> int:
    """Write every checkpoint tensor in the serving dtype to the new file ``path``, and return its bytes. The file is
    locked while it is written (see core/files.py). After an error there is no file. Raises OutOfSpace, or
    EngineError if the file cannot be written."""
    header, nbytes = _header(ops.dtype, parameters)
    try:
        with new_locked_file(path, 0o600) as file:
            try:
                os.posix_fallocate(file.fileno(), 0, len(header) + nbytes)  # a full disk is found at once
                write_all(file, header)
                for piece in _pieces(ops, parameters, values):
                    write_all(file, as_bytes(np.ascontiguousarray(piece)))
                assert file.tell() == len(header) + nbytes
            except BaseException:
                os.unlink(path)
                raise
    except OSError as error:
        kind = OutOfSpace if error.errno in NO_SPACE else EngineError
        raise kind(f"the weights cannot be written to {os.path.dirname(path)}: {error.strerror}") from error
    return len(header) + nbytes


def _header(dtype: str, parameters: Iterable[Parameter]) -> tuple[bytes, int]:
    """Return the beginning of the file, and the bytes of all tensors behind it."""
    name_of_dtype, width = DTYPES[dtype]
    table, end = {}, 0
    for parameter in parameters:
        for name in parameter.tensors:
            shape = parameter.shapes[name]
            begin, end = end, end + width * math.prod(shape)
            table[name] = {"dtype": name_of_dtype, "shape": shape, "data_offsets": (begin, end)}
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, end


def _pieces(ops: Ops, parameters: Iterable[Parameter], values: Mapping[str, Value]) -> Iterable[np.ndarray]:
    for parameter in parameters:
        for name in parameter.tensors:
            yield from unpack(ops, parameter, values[parameter.key], name)
