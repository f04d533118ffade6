"""The description of the routes that /openapi.json serves.

Routes read their bodies by hand, so FastAPI does not see their fields. A route says them next to its path::

    @router.post("/v1/pause", openapi_extra=takes(PauseBody, query=True))
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter, WithJsonSchema

from fastdeploy.core.errors import STATUS

Schema = dict[str, Any]
JSON, BYTES, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
ABOUT = "An LLM serving engine for RL rollouts: OpenAI's routes, and the control routes that trainers call."
# The answers of the HTTP side itself, beside those of fastdeploy.core.errors.
OF_HTTP = {404: "not_found", 405: "method_not_allowed"}
ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": ["string", "integer"]},
                "param": {"type": ["string", "null"]},
            },
        }
    },
}


def takes(kind: Any, *, query: bool = False, upload: Any = None) -> Schema:
    """``openapi_extra`` of a route with a JSON body.

    Args:
        kind: a pydantic model, a msgspec struct, a type, or a JSON schema.
        query: each field may be in the query too; the body wins.
        upload: the body may be the bytes of a safetensors file; then the fields of this kind are in the query.
    """
    schema = schema_of(kind)
    content = {JSON: {"schema": schema}}
    if upload is not None:
        content[BYTES] = {"schema": {"type": "string", "format": "binary"}}
    extra: Schema = {"requestBody": {"content": content, "required": not query and "required" in schema}}
    if query or upload is not None:
        extra["parameters"] = _parameters(schema if query else schema_of(upload))
    return extra


def asks(kind: Any) -> Schema:
    """``openapi_extra`` of a route without a body: the fields of ``kind`` in the query."""
    return {"parameters": _parameters(schema_of(kind))}


def streams() -> dict[int | str, Schema]:
    """``responses`` of a route that answers by JSON or, if asked for, by server-sent events."""
    return {200: {"content": {JSON: {"schema": {}}, EVENTS: {"schema": {"type": "string"}}}}}


def described(kind: Any) -> WithJsonSchema:
    """For ``Annotated[Any, described(kind)]``: a field that our own code checks, shown as one of type ``kind``."""
    return WithJsonSchema(schema_of(kind))


def schema_of(kind: Any) -> Schema:
    """The JSON schema of ``kind`` without references. A field that is not required may also be null."""
    return deepcopy(kind if isinstance(kind, dict) else _schema_of_type(kind))


@cache
def _schema_of_type(kind: Any) -> Schema:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        schema = msgspec.json.schema(kind)
    else:
        schema = TypeAdapter(kind).json_schema()
    return _whole(schema, schema.pop("$defs", {}))


def _whole(node: Any, definitions: dict[str, Schema]) -> Any:
    """``node`` with each reference replaced by what it names. Our models do not contain themselves."""
    if isinstance(node, list):
        return [_whole(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _whole(definitions[node["$ref"].rpartition("/")[2]], definitions)
    node = {key: _whole(value, definitions) for key, value in node.items() if not _is_title(key, value)}
    if isinstance(properties := node.get("properties"), dict):
        required = node.get("required", ())
        node["properties"] = {name: p if name in required else _or_null(p) for name, p in properties.items()}
    return node


def _is_title(key: str, value: Any) -> bool:
    """Titles are made of the names that they stand beside."""
    return key == "title" and isinstance(value, str)


def _or_null(schema: Schema) -> Schema:
    if not schema.keys() - {"default", "description"} or {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outer: Schema = {key: schema.pop(key) for key in ("default", "description") if key in schema}
    choices = schema.pop("anyOf", None) or [schema]
    return {"anyOf": [*choices, {"type": "null"}], **outer}


def _parameters(schema: Schema) -> list[Schema]:
    """The fields as query parameters. One that is a JSON object is written as JSON."""
    parameters = []
    for name, field in schema["properties"].items():
        choices = [choice for choice in field.get("anyOf", [field]) if choice != {"type": "null"}]
        kind = choices[0] if len(choices) == 1 else {"anyOf": choices}
        value = {"content": {JSON: {"schema": kind}}} if kind.get("type") == "object" else {"schema": kind}
        parameters.append({"name": name, "in": "query", "required": False, **value})
    return parameters


class DescribedApp(FastAPI):
    """An application whose description has the error answers of every operation too."""

    def openapi(self) -> Schema:
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, description=ABOUT, routes=self.routes)
            self.openapi_schema = _with_errors(document)
        return self.openapi_schema


def _with_errors(document: Schema) -> Schema:
    codes: dict[int, list[str]] = {status: [code] for status, code in OF_HTTP.items()}
    for code, status in STATUS.items():
        codes.setdefault(status, []).append(code)
    components = document.setdefault("components", {})
    components["schemas"] = {"Error": ERROR}
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    components["responses"] = {
        str(status): {"description": ", ".join(sorted(names)), "content": content} for status, names in codes.items()
    }
    references = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(codes)}
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"] = {**references, **operation["responses"]}
    return document
