"""GET /docs: the routes of /openapi.json on one HTML page, which loads nothing from other hosts."""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
summary { cursor: pointer; padding: .2rem 0; }
code, summary { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5rem 0 1rem; }
td { border: 1px solid #8884; padding: .15rem .5rem; vertical-align: top; }
.method { display: inline-block; width: 4rem; font-weight: bold; }
"""


def add_docs_page(app: FastAPI) -> None:
    @app.get("/docs", include_in_schema=False)
    def docs() -> HTMLResponse:
        return HTMLResponse(page(app.openapi()))


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
