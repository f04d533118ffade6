"""When two requests are the same, and where their bodies differ.

Two requests are the same if method, path, query and body are. JSON is compared by its content. Ids that a client draws
anew in each run are not compared: the fields IGNORED, and every UUID, also in a path. Keys are not compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from blake3 import blake3

from fastdeploy.traffic.file import Exchange, Headers
from fastdeploy.traffic.headers import encoding_of, is_opaque
from fastdeploy.traffic.keys import KeyRemover

IGNORED = frozenset(("request_id", "req_id", "rid", "user", "hold_id"))
_UUID = re.compile(r"[0-9a-f]{8}(-?)[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{4}\1[0-9a-f]{12}", re.IGNORECASE)
ABSENT = "(absent)"
MAX_SHOWN_CHARS = 80


class FieldDifference(NamedTuple):
    """A place in a body at which a request is not the recorded one: ``messages[0].content``. recorded, now: the values
    as JSON, or ABSENT; long ones in part."""

    path: str
    recorded: str
    now: str

    def __str__(self) -> str:
        return f"{self.path or 'body'}: {self.recorded} in the recording, {self.now} now"


class Asked(NamedTuple):
    """What a request asks for. body: JSON without ignored fields, or text; for data its size and hash. key: equal for
    requests that are the same."""

    method: str
    path: str
    query: tuple[tuple[str, str], ...]
    body: Any
    key: bytes

    @property
    def route(self) -> tuple[str, str]:
        return self.method, self.path


def recorded_request(exchange: Exchange, ignored: Set[str]) -> Asked:
    """Return what a recorded request asks for. Its keys are removed already."""
    is_text = exchange.request is not None and not _is_data(exchange.headers)
    body = (
        _content(exchange.request or b"", ignored) if is_text else _data(exchange.request_size, exchange.request_hash)
    )
    return _asked(exchange.method, exchange.target, body, ignored)


class LiveBody:
    """The body of a request that arrives. limit: bytes of text that are held; more is compared by size and hash."""

    def __init__(self, headers: Headers, limit: int):
        self._is_text, self._limit = not _is_data(headers), limit
        self._text = bytearray()
        self._size, self._hash = 0, blake3()

    def add(self, data: bytes) -> None:
        self._size += len(data)
        self._hash.update(data)
        if self._is_text:
            self._text += data
        if self._size > self._limit:
            self._is_text, self._text = False, bytearray()

    def asked(self, method: str, target: str, headers: Headers, remover: KeyRemover, ignored: Set[str]) -> Asked:
        """Return what the request asks for, when its body is complete."""
        remover.headers(headers)
        target = remover.target(target)
        if self._is_text:
            body = _content(remover.body(bytes(self._text), side_is_reply=False), ignored)
        else:
            body = _data(self._size, self._hash.hexdigest())
        return _asked(method, target, body, ignored)


def differences(recorded: Asked, now: Asked) -> list[FieldDifference]:
    """Return where two requests of one route differ."""
    found = list(_compare("query", dict(recorded.query), dict(now.query)))
    try:
        return found + list(_compare("", recorded.body, now.body))
    except RecursionError:
        return [*found, FieldDifference("", "another body", "nested too deeply to be compared")]


def distance(recorded: Asked, now: Asked) -> int:
    """Return the number of values that only one of two requests has at a place."""
    return len(set(_leaves("", recorded.body)) ^ set(_leaves("", now.body)))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, content in value.items():
            yield from _leaves(f"{path}.{name}", content)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    else:
        yield path, value if isinstance(value, str | int | float | None) else type(value)


def _is_data(headers: Headers) -> bool:
    return is_opaque(headers) or encoding_of(headers) != ""


def _data(size: int, digest: str) -> dict[str, Any]:
    return {"size": size, "blake3": digest} if size else {}


def _content(body: bytes, ignored: Set[str]) -> Any:
    if not body:
        return {}  # to many routes the same as no fields
    try:
        return _without(json.loads(body), ignored)
    except (ValueError, RecursionError):
        return _without_ids(body.decode("utf-8", "replace"))


def _without(value: Any, ignored: Set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(content, ignored) for name, content in value.items() if name not in ignored}
    if isinstance(value, list):
        return [_without(item, ignored) if isinstance(item, dict | list | str) else item for item in value]
    return _without_ids(value) if isinstance(value, str) else value


def _without_ids(text: str) -> str:
    return _UUID.sub("(id)", text)


def _asked(method: str, target: str, body: Any, ignored: Set[str]) -> Asked:
    path, _, query = target.partition("?")
    path = _without_ids(path.rstrip("/") or "/")
    pairs = parse_qsl(query, keep_blank_values=True)
    query_pairs = tuple(sorted((name, _without_ids(value)) for name, value in pairs if name not in ignored))
    key = json.dumps([method, path, query_pairs, body], sort_keys=True).encode()
    return Asked(method, path, query_pairs, body, blake3(key).digest())


def _compare(path: str, recorded: Any, now: Any) -> Iterator[FieldDifference]:
    if isinstance(recorded, dict) and isinstance(now, dict):
        for name in recorded.keys() | now.keys():
            inner = f"{path}.{name}" if path else name
            if name not in recorded:
                yield FieldDifference(inner, ABSENT, _shown(now[name]))
            elif name not in now:
                yield FieldDifference(inner, _shown(recorded[name]), ABSENT)
            else:
                yield from _compare(inner, recorded[name], now[name])
    elif isinstance(recorded, list) and isinstance(now, list):
        for index, (one, other) in enumerate(zip(recorded, now, strict=False)):
            yield from _compare(f"{path}[{index}]", one, other)
        if len(recorded) != len(now):
            yield FieldDifference(f"{path}.length", str(len(recorded)), str(len(now)))
    elif recorded != now or type(recorded) is not type(now):
        yield FieldDifference(path, *_shown_apart(recorded, now))


def _shown_apart(recorded: Any, now: Any) -> tuple[str, str]:
    """Return two values as JSON. Of long texts, from shortly before the first place at which they differ."""
    if isinstance(recorded, str) and isinstance(now, str):
        same = next((i for i, (a, b) in enumerate(zip(recorded, now, strict=False)) if a != b), 0)
        start = max(same - MAX_SHOWN_CHARS // 2, 0)
        mark = "..." if start else ""
        return _shown(mark + recorded[start:]), _shown(mark + now[start:])
    return _shown(recorded), _shown(now)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."
