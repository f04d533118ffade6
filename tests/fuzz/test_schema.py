"""Valid and invalid requests that schemathesis makes from /openapi.json cause no internal error."""

from __future__ import annotations

import pytest
import requests
import schemathesis
from hypothesis import given

from fastdeploy.core.config import ServeConfig
from fastdeploy.http.app import create_app
from fuzz.fuzzed_server import CLIENT_TIMEOUT_S, FuzzedServer
from support.search import examples

DOCUMENT = create_app(type("Client", (), {})(), None, ServeConfig(model="m")).openapi()
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {operation.label: operation for operation in (found.ok() for found in SCHEMA.get_all_operations())}
del OPERATIONS["POST /v1/replicas/spool"]  # its answer does not end; see tests/e2e/test_fleet_hosts.py
del OPERATIONS["POST /v1/replicas/send"]  # 503 if nobody is at the address that it names
WRONG = schemathesis.GenerationMode.NEGATIVE


@pytest.mark.timeout(600)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_causes_an_internal_error(label: str, server: FuzzedServer):
    operation = OPERATIONS[label]
    cases = operation.as_strategy()
    if operation.query or operation.body:
        cases |= operation.as_strategy(generation_mode=WRONG)

    @examples(2)
    @given(cases)
    def send(case: schemathesis.Case) -> None:
        try:
            reply = case.call(base_url=server.url, timeout=CLIENT_TIMEOUT_S)
        except requests.exceptions.ReadTimeout:
            server.check_alive()
            return
        content_type = reply.headers.get("content-type", [""])[0]
        server.check_answer(reply.status_code, {"content-type": content_type}, reply.content)
        documented = operation.definition.raw["responses"]
        assert str(reply.status_code) in documented, f"{reply.status_code} is not among the documented answers"

    send()
