"""The description of the routes: /openapi.json, and /docs, an HTML page of it that loads nothing from other hosts.

Routes parse their bodies themselves, so FastAPI does not know the fields. A route declares them beside its path::

    @router.post("/v1/pause", openapi_extra=takes(PauseBody, query=True))
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from html import escape
from itertools import groupby
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter, WithJsonSchema

from fastdeploy.core.errors import STATUS

Schema = dict[str, Any]
JSON, BYTES, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
ABOUT = "An LLM serving engine for RL rollouts: OpenAI's routes, and the control routes that trainers call."
# Status and code of the errors that fastdeploy.core.errors does not have.
HTTP_ERRORS = {404: "not_found", 405: "method_not_allowed"}
ERROR_FIELDS = {"message": "string", "type": "string", "code": ["string", "integer"], "param": ["string", "null"]}
ERROR: Schema = {
    "type": "object",
    "required": ["message", "type", "code"],
    "properties": {name: {"type": kind} for name, kind in ERROR_FIELDS.items()},
}
ERROR_BODY: Schema = {"type": "object", "required": ["error"], "properties": {"error": ERROR}}


def takes(kind: Any, *, query: bool = False, upload: Any = None) -> Schema:
    """Return the ``openapi_extra`` of a route with a JSON body.

    kind: a pydantic model, a msgspec struct, a type, or a JSON schema. query: each field may be in the query too, and
    the body wins. upload: the body may be the bytes of a safetensors file; then the fields of this kind are in the
    query."""
    schema = _shared_schema(kind)
    content = {JSON: {"schema": schema}}
    if upload is not None:
        content[BYTES] = {"schema": {"type": "string", "format": "binary"}}
    extra: Schema = {"requestBody": {"content": content, "required": not query and "required" in schema}}
    if query or upload is not None:
        extra["parameters"] = _parameters(schema if query else _shared_schema(upload))
    return extra


def asks(kind: Any) -> Schema:
    """Return the ``openapi_extra`` of a route without a body: the fields of ``kind`` in the query."""
    return {"parameters": _parameters(_shared_schema(kind))}


def streams() -> dict[int | str, Schema]:
    """Return the ``responses`` of a route that answers in JSON or, on demand, in server-sent events."""
    return {200: {"content": {JSON: {"schema": {}}, EVENTS: {"schema": {"type": "string"}}}}}


def described(kind: Any) -> WithJsonSchema:
    """Describe a field that our own code checks as one of type ``kind``: ``Annotated[Any, described(kind)]``."""
    return WithJsonSchema(schema_of(kind))


def schema_of(kind: Any) -> Schema:
    """Return the JSON schema of ``kind`` without references. A field that is not required may also be null. The caller
    may change it."""
    return deepcopy(_shared_schema(kind))


def _shared_schema(kind: Any) -> Schema:
    """Return what ``schema_of`` does, for a caller that does not change it: a copy takes long."""
    return kind if isinstance(kind, dict) else _schema_of_type(kind)


@cache
def _schema_of_type(kind: Any) -> Schema:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        schema = msgspec.json.schema(kind)
    else:
        schema = TypeAdapter(kind).json_schema()
    return _resolved(schema, schema.pop("$defs", {}))


def _resolved(node: Any, definitions: dict[str, Schema]) -> Any:
    """Return ``node`` with each reference replaced by its definition, and without titles, which repeat names. No
    definition may contain itself."""
    if isinstance(node, list):
        return [_resolved(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _resolved(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kept = {key: value for key, value in node.items() if key != "title" or not isinstance(value, str)}
    node = {key: _resolved(value, definitions) for key, value in kept.items()}
    if isinstance(properties := node.get("properties"), dict):
        required = node.get("required", ())
        node["properties"] = {name: p if name in required else _or_null(p) for name, p in properties.items()}
    return node


def _or_null(schema: Schema) -> Schema:
    if not schema.keys() - {"default", "description"} or {"type": "null"} in schema.get("anyOf", ()):
        return schema
    outer: Schema = {key: schema.pop(key) for key in ("default", "description") if key in schema}
    choices = schema.pop("anyOf", None) or [schema]
    return {"anyOf": [*choices, {"type": "null"}], **outer}


def _parameters(schema: Schema) -> list[Schema]:
    """Return the fields of ``schema`` as query parameters. An object is written as JSON."""
    parameters = []
    for name, field in schema["properties"].items():
        choices = [choice for choice in field.get("anyOf", [field]) if choice != {"type": "null"}]
        kind = choices[0] if len(choices) == 1 else {"anyOf": choices}
        value = {"content": {JSON: {"schema": kind}}} if kind.get("type") == "object" else {"schema": kind}
        parameters.append({"name": name, "in": "query", "required": False, **value})
    return parameters


class DescribedApp(FastAPI):
    """An application whose description also has the error answers of every operation."""

    def openapi(self) -> Schema:
        if self.openapi_schema is None:
            document = get_openapi(title=self.title, version=self.version, description=ABOUT, routes=self.routes)
            self.openapi_schema = _with_errors(document)
        return self.openapi_schema


def _with_errors(document: Schema) -> Schema:
    codes: dict[int, list[str]] = {status: [code] for status, code in HTTP_ERRORS.items()}
    for code, status in STATUS.items():
        codes.setdefault(status, []).append(code)
    components = document.setdefault("components", {})
    components["schemas"] = {"Error": ERROR_BODY}
    content = {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    components["responses"] = {
        str(status): {"description": ", ".join(sorted(names)), "content": content} for status, names in codes.items()
    }
    references = {str(status): {"$ref": f"#/components/responses/{status}"} for status in sorted(codes)}
    for item in document["paths"].values():
        for operation in item.values():
            operation["responses"] = {**references, **operation["responses"]}
    return document


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .2rem 0; }
code, summary { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td { border: 1px solid #8884; padding: .15rem .5rem; vertical-align: top; }
.method { display: inline-block; width: 4rem; font-weight: bold; }
"""


def page(document: dict[str, Any]) -> str:
    """Return the HTML page of an OpenAPI document: its operations, grouped by tag."""
    operations = [
        (operation.get("tags", ["Other"])[0], method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    parts = [f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>"]
    about = escape(document["info"].get("description", ""))
    parts.append(f'<p>{about}</p><p>For programs: <a href="openapi.json">openapi.json</a></p>')
    for tag, group in groupby(operations, key=lambda operation: operation[0]):
        parts.append(f"<h2>{escape(tag)}</h2>")
        parts += [_operation(method, path, operation) for _, method, path, operation in group]
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {})
    schema = body.get("application/json", {}).get("schema", {})
    in_query = {parameter["name"]: parameter for parameter in operation.get("parameters", ())}
    in_body = schema.get("properties", {})
    required = schema.get("required", ())
    rows = [
        _row(name, field, "body or query" if name in in_query else "body", name in required)
        for name, field in in_body.items()
    ]
    rows += [_row(n, p.get("schema", {}), "query", p["required"]) for n, p in in_query.items() if n not in in_body]
    texts = [operation.get("description", ""), schema.get("description", "")]
    notes = "".join(f"<p>{escape(text)}</p>" for text in texts if text)
    if "application/octet-stream" in body:
        notes += "<p>The body may also be the bytes of a safetensors file; then the fields are in the query.</p>"
    table = f"<table>{''.join(rows)}</table>" if rows else ""
    head = f"<summary><span class=method>{method}</span>{escape(path)}</summary>"
    return f"<details>{head}{notes}{table}</details>"


def _row(name: str, field: dict[str, Any], place: str, required: bool) -> str:
    default = field.get("default")
    note = "required" if required else "" if default is None else f"default {json.dumps(default)}"
    cells = (f"<code>{escape(name)}</code>", escape(type_name(field)), place, escape(note))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def type_name(schema: dict[str, Any]) -> str:
    """Return a short name of a JSON schema without null: ``integer``, ``list of string``, ``"keep" or "wait"``."""
    if "anyOf" in schema:
        names = (type_name(choice) for choice in schema["anyOf"] if choice != {"type": "null"})
        return " or ".join(dict.fromkeys(names))
    if "enum" in schema or "const" in schema:
        return " or ".join(json.dumps(value) for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {type_name(schema.get('items', {}))}"
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else kind
