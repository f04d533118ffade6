"""Reading JSON bodies. Unknown fields are refused, and harmless fields are dropped. An unsupported field that would
change the answer is refused by name, unless it has a neutral value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fastdeploy.core.errors import InvalidField
from fastdeploy.http.openapi import described, schema_of

# Dropped: bookkeeping of hosted services, and hints. None of them changes which tokens are sampled.
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls", "verbosity", "spaces_between_special_tokens", "stream_interval", "log_metrics",
    "guided_decoding_backend",
    # The replica that computes the request: there is only one behind this address.
    "data_parallel_rank", "routed_dp_rank",
    # Of a chat. A completion is plain text.
    "include_reasoning", "separate_reasoning", "stream_reasoning",
})  # fmt: skip
# Opening brackets in one body, those inside of strings included. An empty list costs 50 times as much as a number.
MAX_BRACKETS = 1 << 19
# Entries of one field, unless its type is Any. Pydantic checks all entries before it reports the first wrong one, and
# each wrong entry costs some microseconds.
MAX_ENTRIES = 65536
# Names of a request's session: ours; vLLM's and SkyRL's; SGLang's. The headers: SkyRL's, and that of slime and SGLang's
# router. OpenAI's ``user`` and SGLang's ``rid`` are no sessions.
SESSION_FIELDS = ("session", "session_id", "routing_key")
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
MAX_SESSION_CHARS = 256
# The integers that msgpack can carry.
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
# Pydantic puts the branch of a union into the location of an error.
UNION_BRANCHES = frozenset({"str", "int", "list[str]"})
UNKNOWN_FIELD = "unknown field"


class Body(BaseModel):
    """A body whose unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class LaxBody(BaseModel):
    """A body whose unknown fields are dropped, as the engines of the dialects do."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


BodyType = TypeVar("BodyType", bound=BaseModel)
Names = Mapping[str, str]  # our names of fields -> those of a dialect, where they differ
OURS: Names = {}


def body_fields(declared: type[msgspec.Struct], without: Collection[str] = (), names: Names = OURS) -> dict[str, Any]:
    """Return the fields of a struct of core for pydantic's create_model. Each may be absent or null. Their limits are
    described; core checks them."""
    fields: dict[str, Any] = {}
    schemas = schema_of(declared)["properties"]
    for name, kind in get_type_hints(declared).items():
        if name not in without:
            kind = Int64 if kind is int else kind
            default = Field(None, json_schema_extra={"default": schemas[name].get("default")})
            fields[names.get(name, name)] = Annotated[kind | None, described(schemas[name])], default
    return fields


def given_fields(body: BaseModel, declared: type[msgspec.Struct], names: Names = OURS) -> dict[str, Any]:
    """Return the fields of ``declared`` that a client has given in ``body``, by our names."""
    named = ((name, getattr(body, names.get(name, name), None)) for name in declared.__struct_fields__)
    return {name: value for name, value in named if value is not None}


def parse_json(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in ``raw``, or {} if ``raw`` is empty. Raises InvalidField for "body"."""
    if not raw.strip():
        return {}
    if raw.count(b"[") + raw.count(b"{") > MAX_BRACKETS:
        raise InvalidField("body", f"expected at most {MAX_BRACKETS} lists and objects")
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidField("body", f"expected JSON: {error}") from error
    except RecursionError as error:
        raise InvalidField("body", "JSON nested too deeply") from error
    if not isinstance(data, dict):
        raise InvalidField("body", "expected a JSON object")
    return data


async def read_json(request: Request) -> dict[str, Any]:
    """Read the body of ``request``, and return its JSON object. The body can be read only once. Unlike
    ``request.body()`` this function keeps no bytes: a request may live for minutes after its body was parsed."""
    return parse_json(b"".join([part async for part in request.stream()]))


async def read_generation(request: Request) -> dict[str, Any]:
    """Read the body of a request for tokens. Its session, however the client names it, is its field "session"; a field
    of the body wins over a header. Raises InvalidField."""
    data = await read_json(request)
    given = [(name, data.pop(name)) for name in SESSION_FIELDS if name in data]
    given += [(name, request.headers[name]) for name in SESSION_HEADERS if name in request.headers]
    name, session = next(((name, value) for name, value in given if value is not None), ("session", ""))
    if isinstance(session, bool) or not isinstance(session, int | str) or len(str(session)) > MAX_SESSION_CHARS:
        raise InvalidField(name, f"expected a number, or a string of at most {MAX_SESSION_CHARS} characters")
    return data | ({} if session == "" else {"session": str(session)})


def parse_body(data: dict[str, Any], kind: type[BodyType], unsupported: Mapping[str, tuple[Any, ...]]) -> BodyType:
    """Check ``data`` against ``kind``. A field that is null counts as absent.

    ``unsupported`` names fields that are refused, each with the neutral values that are accepted. Raises InvalidField
    for the first wrong field."""
    known = kind.model_fields
    kept = {}
    for field, value in data.items():
        if field in known:
            if value is not None:
                kept[field] = value
                if known[field].annotation is not Any:
                    _check_entries(field, value)
        elif field in unsupported:
            if not any(value == neutral and type(value) is type(neutral) for neutral in unsupported[field]):
                raise InvalidField(field, "not supported by this server")
        elif field not in IGNORED and kind.model_config.get("extra") == "forbid":
            raise InvalidField(field, UNKNOWN_FIELD)
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"] if part not in UNION_BRANCHES) or "body"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(field, UNKNOWN_FIELD if first["type"] == "extra_forbidden" else message) from error


def _check_entries(field: str, value: Any) -> None:
    if isinstance(value, (list, dict)) and len(value) > MAX_ENTRIES:
        raise InvalidField(field, f"expected at most {MAX_ENTRIES} entries, got {len(value)}")
