"""References of torch: stored in tests/support/oracles, else computed in a process of their own, since Paddle and torch
do not live in one process. ``make oracles`` stores them anew."""

from __future__ import annotations

import hashlib
import io
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

Result = TypeVar("Result")
Mode = Literal["stored", "check", "record"]
MODES: tuple[Mode, ...] = ("stored", "check", "record")
STORE = Path(__file__).with_name("oracles")
TIMEOUT_S = 110
TOLERANCE = 1e-4  # between two versions of torch, or two instruction sets of it


class TorchProcess:
    """References for a whole test session. ``run`` calls a function of a module in ``tests`` that imports no Paddle.

    mode: "stored" takes a result from the store and starts torch only for one that is not there. "check" computes each
    result and compares it with the stored one. "record" computes each result and stores it.
    """

    def __init__(self, mode: Mode = "stored") -> None:
        self._mode = mode
        self._process: BaseProcess | None = None

    def run(self, function: Callable[..., Result], *args: Any, **more: Any) -> Result:
        """Return ``function(*args, **more)``. Folders are told apart by what is in them.

        Raises: AssertionError with the traceback of whatever the function raised, after TIMEOUT_S, or if the stored
        result is not the one that torch computes now."""
        file = STORE / f"{function.__name__}-{_digest((args, more))}"
        if self._mode == "stored" and file.exists():
            return _decode(file.read_bytes())
        result = self.compute(function, *args, **more)
        if self._mode == "record":
            STORE.mkdir(exist_ok=True)
            file.write_bytes(_encode(result))
        elif self._mode == "check":
            assert file.exists(), f"{file.name} is not stored: run make oracles"
            _compare(_decode(_encode(result)), _decode(file.read_bytes()), file.name)
        return result

    def compute(self, function: Callable[..., Result], *args: Any, **more: Any) -> Result:
        """As ``run``, but nothing is stored: for arguments that depend on the machine, or a function that is called for
        what it does."""
        if self._process is None:
            context = get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send((function, args, more))
        if not self._connection.poll(TIMEOUT_S):
            self.close()  # the next call starts another process
            raise AssertionError(f"{function.__name__} takes longer than {TIMEOUT_S} s")
        result, failure = self._connection.recv()
        assert failure is None, failure
        return result

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)  # the models are too small to share
    while True:
        try:
            function, args, more = connection.recv()
        except EOFError:  # the test session is over, or was killed
            return
        try:
            reply = (function(*args, **more), None)
        except Exception:
            reply = (None, traceback.format_exc())
        connection.send(reply)


def _digest(args: Any) -> str:
    """Digest of arguments. A folder counts with the names and bytes of its files, and not with its place."""

    def plain(value: Any) -> Any:
        if isinstance(value, Path):
            return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(value.iterdir()) if f.is_file()}
        if is_dataclass(value) and not isinstance(value, type):
            return plain(asdict(value))
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(msgspec.json.encode(plain(args))).hexdigest()[:16]


def _encode(result: Any) -> bytes:
    def extension(array: Any) -> msgspec.msgpack.Ext:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        return msgspec.msgpack.Ext(1, file.getvalue())

    return zlib.compress(msgspec.msgpack.encode(result, enc_hook=extension), 9)


def _decode(data: bytes) -> Any:
    return msgspec.msgpack.decode(
        zlib.decompress(data), ext_hook=lambda _, raw: np.load(io.BytesIO(raw), allow_pickle=False)
    )


def _compare(now: Any, stored: Any, where: str) -> None:
    if isinstance(now, np.ndarray) and now.dtype.kind == "f":
        np.testing.assert_allclose(now, stored, atol=TOLERANCE, rtol=TOLERANCE, err_msg=where)
    elif isinstance(now, np.ndarray):
        np.testing.assert_array_equal(now, stored, err_msg=where)
    elif isinstance(now, dict | list):
        keys = list(now) if isinstance(now, dict) else range(len(now))
        assert len(now) == len(stored), where
        for key in keys:
            _compare(now[key], stored[key], f"{where}: {key}")
    else:
        assert now == stored, where
