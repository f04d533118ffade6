"""A process in which torch computes references, since Paddle and torch do not live in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")
TIMEOUT_S = 110


class TorchProcess:
    """A process for a whole test session: to import torch and transformers takes longer than to compute most
    references. ``run`` calls a function of a module in ``tests`` that imports no Paddle."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = count()

    def run(self, function: Callable[..., Result], *args: Any, **more: Any) -> Result:
        """Return ``function(*args, **more)``, computed in the process; arguments and result are pickled.

        Raises: AssertionError with the traceback of whatever the function raised, or after TIMEOUT_S."""
        number = next(self._numbers)
        self._connection.send((number, function, args, more))
        answered = None
        while answered != number:  # an earlier call that timed out may be answered first
            assert self._connection.poll(TIMEOUT_S), f"{function.__name__} takes longer than {TIMEOUT_S} s"
            answered, result, failure = self._connection.recv()
        assert failure is None, failure
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)  # the models are too small to share
    while True:
        try:
            number, function, args, more = connection.recv()
        except EOFError:  # the test session is over, or was killed
            return
        try:
            reply = (number, function(*args, **more), None)
        except Exception:
            reply = (number, None, traceback.format_exc())
        connection.send(reply)
