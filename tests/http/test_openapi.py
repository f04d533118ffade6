"""/openapi.json describes the bodies and answers of the routes, and /docs shows it without other hosts."""

from __future__ import annotations

import re
import warnings

import pytest

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import STATUS
from fastdeploy.http.app import create_app
from fastdeploy.http.dialects import areal
from fastdeploy.http.dialects.fastdeploy import routes as fastdeploy
from fastdeploy.http.dialects.sglang import routes as sglang
from fastdeploy.http.openapi import schema_of, type_name

# POST routes that read no field.
WITHOUT_FIELDS = {
    "/resume", "/areal_pause_generation", "/areal_continue_generation", "/continue_generation", "/flush_cache",
    "/post_process_weights", "/ping", "/v1/replicas/add", "/v1/sessions/{session}", "/v1/sessions/{session}/abort",
}  # fmt: skip
# Routes whose body may be tensors, and a field that is then in the query.
UPLOADS = {
    "/v1/update_weights": "verify_checksum", "/v1/weights/chunk": "verify_checksum",
    "/update_weights": "verify_checksum", "/v1/adapters/load": "config",
}  # fmt: skip
JSON = "application/json"
EXAMPLES = {
    "prompt": "a", "messages": [{"role": "user", "content": "a"}], "token_ids": [1], "session_id": "s", "hold_id": "h",
    "request_ids": [], "tokens": [1], "lora_name": "a", "name": "a", "nbytes": 1,
    "to": {"name": "a", "url": "http://a"},
}  # fmt: skip


def describe() -> dict:
    app = create_app(type("Client", (), {})(), None, ServeConfig(model="m"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # FastAPI warns of operation ids that are not unique
        return app.openapi()


DOCUMENT = describe()
OPERATIONS = [(method, path, op) for path, item in DOCUMENT["paths"].items() for method, op in item.items()]
STRICT = [
    (method, path, op["requestBody"]["content"][JSON]["schema"])
    for method, path, op in OPERATIONS
    if op.get("requestBody", {}).get("content", {}).get(JSON, {}).get("schema", {}).get("additionalProperties") is False
]


def name(value):
    return value if isinstance(value, str) else ""


def test_operation_ids_are_unique():
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids) > 80


def test_every_operation_has_the_error_answers():
    for method, path, operation in OPERATIONS:
        assert {str(status) for status in STATUS.values()} <= operation["responses"].keys(), (method, path)
    shape = DOCUMENT["components"]["responses"]["400"]["content"][JSON]["schema"]
    assert shape == {"$ref": "#/components/schemas/Error"}
    assert DOCUMENT["components"]["schemas"]["Error"]["required"] == ["error"]


def test_every_route_that_reads_a_body_describes_it():
    bare = {path for method, path, op in OPERATIONS if method != "get" and "requestBody" not in op}
    absent = sglang.ABSENT.keys() | areal.ABSENT.keys() | fastdeploy.ABSENT.keys() | fastdeploy.NOT_HERE.keys()
    assert bare == WITHOUT_FIELDS | absent


@pytest.mark.parametrize(("method", "path", "schema"), STRICT, ids=name)
def test_a_strict_route_knows_all_described_fields_and_no_other(module_stack, method, path, schema):
    described = dict.fromkeys(schema["properties"]) | {name: EXAMPLES[name] for name in schema.get("required", ())}
    reply = module_stack.http.request(method, path, json={**described, "no_such_field": 1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "no_such_field")


def test_the_strict_routes_include_every_kind():
    assert {"/v1/completions", "/v1/pause", "/v1/weights/begin", "/inference/v1/generate"} <= {p for _, p, _ in STRICT}


def test_the_fields_of_a_completion():
    schema = DOCUMENT["paths"]["/v1/completions"]["post"]["requestBody"]["content"][JSON]["schema"]
    assert schema["required"] == ["prompt"]
    prompt = "string or list of integer or list of string or list of list of integer"
    assert type_name(schema["properties"]["prompt"]) == prompt
    assert {"type": "null"} in schema["properties"]["temperature"]["anyOf"]
    assert "text/event-stream" in DOCUMENT["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


def test_control_fields_may_be_in_the_query():
    pause = DOCUMENT["paths"]["/v1/pause"]["post"]
    mode = next(parameter for parameter in pause["parameters"] if parameter["name"] == "mode")
    assert mode["in"] == "query" and not mode["required"]
    assert mode["schema"]["enum"] == ["abort", "wait", "keep"]
    assert DOCUMENT["paths"]["/v1/weights"]["get"]["parameters"][0]["name"] == "checksums"
    assert "requestBody" not in DOCUMENT["paths"]["/v1/weights"]["get"]


def test_an_upload_is_described_beside_json():
    for path, field in UPLOADS.items():
        operation = DOCUMENT["paths"][path]["post"]
        assert operation["requestBody"]["content"].keys() == {JSON, "application/octet-stream"}
        assert field in {parameter["name"] for parameter in operation["parameters"]}


def test_descriptions_of_bodies_contain_no_reference():
    assert "$ref" not in str([schema for _, _, schema in STRICT])


def test_a_caller_may_change_the_schema_that_it_got():
    schema_of(int | str)["anyOf"].clear()
    assert len(schema_of(int | str)["anyOf"]) == 2


def test_the_docs_page_shows_every_route_and_needs_no_other_host(module_stack):
    reply = module_stack.http.get("/docs")
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/html")
    for _, path, _ in OPERATIONS:
        assert path in reply.text
    assert "hold_id" in reply.text
    assert not re.findall(r"(?:src|href)=\W?(?:https?:)?//", reply.text)


def test_openapi_json_is_served(module_stack):
    assert module_stack.http.get("/openapi.json").json()["paths"].keys() == DOCUMENT["paths"].keys()
