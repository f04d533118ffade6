"""Which messages, and which fields of them, the process of one version of this package knows.

Processes of two versions work together as long as each sends only what the other one knows. msgspec ignores a field
that it does not know, so a process that sent one would get an answer to another question. Therefore each process tells
in its Welcome what it knows, and the sender compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import msgspec
from msgspec import inspect

from fastdeploy.inter_communicator import messages as m

# By the name of each struct: its fields, and whether a message must have the field.
Known: TypeAlias = Mapping[str, Mapping[str, bool]]
# What a gateway sends to bring an engine into its fleet, and to make requests there. The first two tell what is known.
NEEDED = ("Hello", "ModelInfoArgs", "Call", "LeadArgs", "FleetStateArgs", "AddRequest", "CancelRequest", "FenceAck")


@cache
def known_messages() -> dict[str, dict[str, bool]]:
    """Return what this process knows: every message in both directions, and every struct inside of them."""
    return _structs_of(m.ToEngine) | _structs_of(m.ToClient)


@cache
def _sent_by_engines() -> dict[str, dict[str, bool]]:
    return _structs_of(m.ToClient)


def _structs_of(kind: Any) -> dict[str, dict[str, bool]]:
    found: dict[str, dict[str, bool]] = {}
    _add_structs(inspect.type_info(kind), found)
    return found


def _add_structs(kind: inspect.Type, found: dict[str, dict[str, bool]]) -> None:
    """Add every struct in ``kind``, a type as msgspec describes it."""
    if isinstance(kind, inspect.StructType):
        if kind.cls.__name__ in found:
            return
        found[kind.cls.__name__] = {field.name: field.required for field in kind.fields}
        for field in kind.fields:
            _add_structs(field.type, found)
        return
    for inner in (getattr(kind, slot) for slot in kind.__struct_fields__):
        for one in inner if isinstance(inner, tuple) else (inner,):
            if isinstance(one, inspect.Type):
                _add_structs(one, found)


def lacking(message: msgspec.Struct, known: Known) -> list[str]:
    """Return what a process that knows ``known`` does not understand of ``message``: the name of a struct, or
    "struct.field". A field that has its default is not sent, or means what its absence means. A field that the other
    process must have, and that the message does not have, is returned too."""
    return list(dict.fromkeys(_lacking(message, known)))


def _lacking(value: Any, known: Known) -> Iterator[str]:
    if isinstance(value, msgspec.Struct):
        name = type(value).__name__
        if name not in known:
            yield name
            return
        fields = msgspec.structs.fields(value)
        yield from _missing(name, known[name], {field.name for field in fields})
        for field in fields:
            content = getattr(value, field.name)
            if field.required or content != _default(field):
                if field.name not in known[name]:
                    yield f"{name}.{field.name}"
                yield from _lacking(content, known)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], msgspec.Struct):
        for one in value:
            yield from _lacking(one, known)


def _default(field: msgspec.structs.FieldInfo) -> Any:
    has_factory = field.default_factory is not msgspec.NODEFAULT
    return field.default_factory() if has_factory else field.default


def _missing(name: str, theirs: Mapping[str, bool], ours: set[str]) -> Iterator[str]:
    """Yield each field that every message of another process must have, and that ours do not have."""
    yield from (f"{name}.{field}" for field, required in theirs.items() if required and field not in ours)


def cannot(known: Known) -> list[str]:
    """Return all that this process knows and one that knows ``known`` does not: names of structs, and of fields as
    "struct.field"."""
    unknown: list[str] = []
    for name, fields in known_messages().items():
        if name not in known:
            unknown.append(name)
        else:
            unknown += [f"{name}.{field}" for field in fields if field not in known[name]]
            unknown += _missing(name, known[name], set(fields))
    return unknown


def foreign_to(known: Known) -> list[str]:
    """Return why a gateway of this version cannot use an engine that knows ``known`` at all: messages of NEEDED that it
    does not know, fields that it must have in them, and fields that this gateway must have in what the engine sends.
    None = it can, apart from what :func:`cannot` returns."""
    ours = known_messages()
    reasons = [name for name in NEEDED if name not in known]
    for name in NEEDED:
        reasons += _missing(name, known.get(name, {}), set(ours[name]))
    for name, fields in _sent_by_engines().items():
        if name in known:
            reasons += _missing(name, fields, set(known[name]))
    return reasons
