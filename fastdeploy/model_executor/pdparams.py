"""Reading of .pdparams files without unpickling them.

paddle.save writes a pickle of a dictionary {name: array}. A pickle is a program that may call anything. This module
runs no such program and makes no object of it: it follows the few instructions that such a dictionary needs, notes
where the bytes of each array lie in the file, and refuses every other instruction.
"""

from __future__ import annotations

import math
import os
import pickletools
from typing import Any, NamedTuple

# Of a program, without the bytes of arrays. An array takes about 200 bytes and 35 instructions.
MAX_PROGRAM_BYTES, MAX_INSTRUCTIONS = 8 << 20, 1 << 20
TOO_LONG = "its instructions are too long for a dictionary of arrays"
WINDOW = 1 << 16  # bytes that are read at once
MAX_TEXT_BYTES = 4096
MAX_RANK, MAX_DIM = 8, 1 << 63
# Entries of the dictionary that are no tensors: paddle.save adds the first one.
NAME_TABLE, SPLIT_TABLE = "StructuredToParameterName@@", "UnpackBigParamInfor@@"
# Types of numpy, and what their values are in a file of safetensors. Paddle keeps bfloat16 as uint16.
DTYPES = {"f4": "F32", "f2": "F16", "u2": "BF16"}
RECONSTRUCT, ARRAY, DTYPE, TUPLE, DICT = "_reconstruct", "ndarray", "dtype", "tuple", "OrderedDict"
GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy", "ndarray"): ARRAY,
    ("numpy", "dtype"): DTYPE,
    ("builtins", "tuple"): TUPLE,
    ("__builtin__", "tuple"): TUPLE,
    ("collections", "OrderedDict"): DICT,
}
OPCODES = {code.code.encode("latin-1"): code.name for code in pickletools.opcodes}


class PickledArray(NamedTuple):
    """An array of a file, in C order. dtype: of safetensors, or of numpy if it is none of DTYPES. offset: of its bytes,
    from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Global:
    """One of GLOBALS. It is a name only, and calls nothing."""

    def __init__(self, name: str):
        self.name = name


class _Bytes(NamedTuple):
    offset: int
    nbytes: int


class _Type:
    """An object of numpy.dtype."""

    def __init__(self, code: str):
        self.code = code

    def build(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "|", "="):
            order = state[1] if isinstance(state[1], str) else type(state[1]).__name__
            raise ValueError(f"an array has the byte order {order[:20]!r}, expected little-endian")


class _Array:
    """An object of numpy.ndarray; ``found`` is None until its state is known."""

    found: PickledArray | None = None

    def build(self, state: tuple[Any, ...]) -> None:
        _, shape, kind, in_fortran_order, raw = state
        if not (isinstance(kind, _Type) and isinstance(raw, _Bytes) and isinstance(shape, tuple)):
            raise ValueError("an array is not as numpy writes it")
        if len(shape) > MAX_RANK or not all(type(n) is int and 0 <= n < MAX_DIM for n in shape):
            # Never shown: the text of tuples in tuples, each of which is there twice, would fill the memory.
            raise ValueError(f"an array has a shape that is not up to {MAX_RANK} sizes")
        if in_fortran_order and len(shape) > 1:
            raise ValueError("an array is in Fortran order, expected C order (numpy.ascontiguousarray)")
        if math.prod(shape) * _itemsize(kind.code) != raw.nbytes:
            raise ValueError(f"{raw.nbytes} bytes do not make an array of {kind.code} of shape {list(shape)}")
        self.found = PickledArray(DTYPES.get(kind.code, f"numpy {kind.code}"), shape, *raw)


def is_pickle(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` (9 bytes) is a pickle of protocol 2 or newer. A safetensors file
    has "{" after a length of 8 bytes."""
    return head[:1] == b"\x80" and head[8:9] != b"{"


def read_arrays(fd: int) -> dict[str, PickledArray]:
    """Return the arrays of an open file by name. Raises ValueError for a file that is anything but a dictionary of
    arrays or Paddle tensors, and OSError."""
    try:
        found = _Program(fd).run()
    except (IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"its instructions do not fit together ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected a dictionary of arrays, got {type(found).__name__}")
    if SPLIT_TABLE in found:
        raise ValueError("it has arrays in slices, as protocols 2 and 3 write them: save it with protocol 4")
    return {name: _array(name, value) for name, value in found.items() if name != NAME_TABLE}


def _array(name: Any, value: Any) -> PickledArray:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        value = value[1]  # a Paddle tensor: its own name, and its values
    if not isinstance(name, str) or not isinstance(value, _Array) or value.found is None:
        kind = "a dictionary" if isinstance(value, dict) else "no array"
        raise ValueError(f"{str(name)[:200]!r} is {kind}, expected a dictionary of arrays only")
    return value.found


def _itemsize(code: str) -> int:
    digits = code.lstrip("<|=>")[1:]
    if not (code[:1] in "fuib" and digits.isdecimal() and len(digits) <= 2):
        raise ValueError(f"an array has the type {code!r}")
    return int(digits)


def _add(table: Any, keys: list[Any], values: list[Any]) -> None:
    if type(table) is not dict or not all(isinstance(key, str) for key in keys):
        raise ValueError("expected a dictionary whose keys are texts")
    for key, value in zip(keys, values, strict=True):
        if key in table:
            raise ValueError(f"the name {key[:200]!r} appears twice")
        table[key] = value


class _Program:
    """The instructions of one file. marks: the lists that were begun before the present one, ``stack``."""

    def __init__(self, fd: int):
        self._fd, self._size = fd, os.fstat(fd).st_size
        self._at = 0  # of the next byte
        self._window, self._start = b"", 0
        self._read = 0  # bytes of instructions so far
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Follow all instructions, and return the object that they describe."""
        count = 0
        while (code := self._take(1)) != b".":
            self._do(code)
            if (count := count + 1) > MAX_INSTRUCTIONS:
                raise ValueError(TOO_LONG)
        if self._at != self._size:
            raise ValueError(f"it ends after {self._at} of {self._size} bytes: overwritten, or not of paddle.save")
        return self._stack.pop()

    def _do(self, code: bytes) -> None:
        stack = self._stack
        match code:
            case b"\x80":
                if (protocol := self._take(1)[0]) > 4:
                    raise ValueError(f"it has the pickle protocol {protocol}, expected 2 to 4")
            case b"\x95":  # FRAME: a length that only helps to read ahead
                self._take(8)
            case b"}":
                stack.append({})
            case b")":
                stack.append(())
            case b"N" | b"\x88" | b"\x89":
                stack.append({b"N": None, b"\x88": True, b"\x89": False}[code])
            case b"J" | b"K" | b"M":
                size = {b"J": 4, b"K": 1, b"M": 2}[code]
                stack.append(int.from_bytes(self._take(size), "little", signed=code == b"J"))
            case b"\x8a":
                stack.append(int.from_bytes(self._take(self._number(1)), "little", signed=True))
            case b"\x8c" | b"X":
                stack.append(self._take(self._number(1 if code == b"\x8c" else 4)).decode())
            case b"C" | b"B" | b"\x8e":
                self._skip({b"C": 1, b"B": 4, b"\x8e": 8}[code])
            case b"(":
                self._marks.append(stack)
                self._stack = []
            case b"t":
                self._stack = [*self._marks.pop(), tuple(stack)]
            case b"\x85" | b"\x86" | b"\x87":
                count = code[0] - 0x84
                stack[-count:] = [tuple(stack[-count:])]
            case b"\x94":
                self._memo[len(self._memo)] = stack[-1]
            case b"q" | b"r":
                self._memo[self._number(1 if code == b"q" else 4)] = stack[-1]
            case b"h" | b"j":
                stack.append(self._memo[self._number(1 if code == b"h" else 4)])
            case b"c":
                stack.append(self._find(self._line(), self._line()))
            case b"\x93":
                name, module = stack.pop(), stack.pop()
                stack.append(self._find(module, name))
            case b"R":
                arguments = stack.pop()
                stack[-1] = self._call(stack[-1], arguments)
            case b"b":
                state = stack.pop()
                stack[-1].build(state)
            case b"s":
                value, key = stack.pop(), stack.pop()
                _add(stack[-1], [key], [value])
            case b"u":
                self._stack = self._marks.pop()
                _add(self._stack[-1], stack[::2], stack[1::2])
            case _:
                name = OPCODES.get(code, code.hex())
                raise ValueError(f"it has the pickle instruction {name}, which a dictionary of arrays does not need")

    def _find(self, module: Any, name: Any) -> _Global:
        if not (isinstance(module, str) and isinstance(name, str)):  # a hash of nested tuples could end the process
            raise ValueError("it asks for an object whose name is no text")
        if (module, name) not in GLOBALS:
            what = f"{module}.{name}"[:200]
            hint = " (save it with protocol 4)" if what == "_codecs.encode" else ""
            raise ValueError(f"it asks for {what!r}; only arrays are allowed, and nothing of the file is run{hint}")
        return _Global(GLOBALS[module, name])

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")
        match function.name:
            case "_reconstruct" if isinstance(arguments[0], _Global) and arguments[0].name == ARRAY:
                return _Array()
            case "dtype":
                if not isinstance(arguments[0], str):
                    raise ValueError("an array has no simple type")
                return _Type(arguments[0])
            case "tuple":
                [items] = arguments
                if not isinstance(items, tuple):
                    raise ValueError("it makes a tuple of what is none")
                return items
            case "OrderedDict" if not arguments:
                return {}
        raise ValueError(f"it calls {function.name} with other arguments than numpy does")

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, count: int) -> bytes:
        """Return the next bytes of the program."""
        self._read += count
        if count > MAX_TEXT_BYTES or self._read > MAX_PROGRAM_BYTES:
            raise ValueError(TOO_LONG)
        first = self._at - self._start
        if first + count > len(self._window):
            self._start, first = self._at, 0
            self._window = os.pread(self._fd, WINDOW, self._at)
        self._at += count
        if len(taken := self._window[first : first + count]) < count:
            raise ValueError(f"it is cut short: it ends after {self._size} bytes")
        return taken

    def _skip(self, size_of_length: int) -> None:
        """Push the place of bytes, which are not read."""
        length = self._number(size_of_length)
        if length > self._size - self._at:
            raise ValueError(f"it is cut short: it has {self._size} bytes, expected {self._at + length}")
        self._stack.append(_Bytes(self._at, length))
        self._at += length

    def _line(self) -> str:
        text = b""
        while (byte := self._take(1)) != b"\n":
            text += byte
            if len(text) > MAX_TEXT_BYTES:
                raise ValueError(TOO_LONG)
        return text.decode()
