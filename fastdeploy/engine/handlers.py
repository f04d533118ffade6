"""The handlers of control calls: which method of the engine's parts handles which call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fastdeploy.inter_communicator import messages as m

Method = TypeVar("Method", bound=Callable[..., dict[str, Any] | None])


class Handler(Protocol):
    """The function that handles one call of a client. It returns the result, or None if it calls ``answer`` itself, at
    once or later. It raises the error of a call that is refused."""

    def __call__(self, args: Any, client: str, answer: Callable[..., None]) -> dict[str, Any] | None: ...


def handles(call: type[m.Args]) -> Callable[[Method], Method]:
    """Mark a method of a part of the engine as the handler of a call. Its parameters after ``args`` say what else it
    needs of a :class:`Handler`: client, answer, both or none."""

    def mark(method: Method) -> Method:
        method.__dict__["handles"] = call
        return method

    return mark


def handlers_of(*parts: object) -> dict[type, Handler]:
    """Return the handlers that ``parts`` have, by call. Each control call of engines must have exactly one."""
    marked = [(part, method) for part in parts for method in vars(type(part)).values() if hasattr(method, "handles")]
    calls = [method.handles for _, method in marked]
    expected = {call: 0 if call.gateways_only else 1 for call in m.Args.__subclasses__()}
    missing = [call.__name__ for call, number in expected.items() if calls.count(call) != number]
    assert not missing, f"not one handler, but none or several: {missing}"
    return {method.handles: _as_handler(method.__get__(part)) for part, method in marked}


def _as_handler(method: Callable[..., dict[str, Any] | None]) -> Handler:
    needs = [name for name in inspect.signature(method).parameters if name != "args"]

    def handle(args: Any, client: str, answer: Callable[..., None]) -> dict[str, Any] | None:
        given: dict[str, Any] = {"client": client, "answer": answer}
        return method(args, **{name: given[name] for name in needs})

    return handle
