"""Bodies that no schema describes: fields of other types, broken JSON and other bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.fuzzed_server import FuzzedServer
from fuzz.test_schema import DOCUMENT
from support.search import examples

JSON = "application/json"
ODD = [
    None, True, 0, -1, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, -0.0, float("nan"), float("inf"),
    "", "\0", "\ud800", "\u2028", "../..", "/dev/zero", "/proc/self/mem", "0", "-1", "NaN", "x" * 5000,
    [], {}, [[]], [None], {"": None}, [0] * 5000,
]  # fmt: skip
VALUES = st.recursive(
    st.sampled_from(ODD) | st.integers() | st.floats() | st.text(max_size=20) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


def field_names(operation: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    return sorted(content.get(JSON, {}).get("schema", {}).get("properties", {}))


POSTS = [(path, field_names(item["post"])) for path, item in DOCUMENT["paths"].items() if "post" in item]


def odd_bodies(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw objects with known and unknown fields and odd values."""
    known = st.sampled_from(names) if names else st.text(max_size=8)
    return st.dictionaries(known | st.text(max_size=8), VALUES, max_size=5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("path", "names"), POSTS, ids=[path for path, _ in POSTS])
def test_odd_values_for_known_fields_cause_no_internal_error(server: FuzzedServer, path: str, names: list[str]):
    @examples(2)
    @given(odd_bodies(names))
    def send(body: dict[str, Any]) -> None:
        server.send("POST", path, content=json.dumps(body).encode(), headers={"content-type": JSON})

    send()


@pytest.mark.timeout(600)
@examples(40)
@given(
    path=st.sampled_from([path for path, _ in POSTS]),
    content=st.binary(max_size=60)
    | st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"1" * 100_000, b'{"a":1,"a":2}', b"\xff", b"null", b"nan"]),
    kind=st.sampled_from([JSON, "application/octet-stream", "text/plain", "", "multipart/form-data", "\xff"]),
)
def test_bytes_that_are_no_json_object_cause_no_internal_error(
    server: FuzzedServer, path: str, content: bytes, kind: str
):
    server.send("POST", path, content=content, headers={"content-type": kind.encode("latin-1")})


@pytest.mark.timeout(600)
@examples(30)
@given(
    path=st.sampled_from(sorted(DOCUMENT["paths"])),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "\x21ODD"]),
    query=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=4),
)
def test_any_method_and_query_on_any_route_causes_no_internal_error(
    server: FuzzedServer, path: str, method: str, query: dict[str, str]
):
    query = {k: v for k, v in query.items() if (k + v).isprintable()}
    server.send(method, path, params=query)
