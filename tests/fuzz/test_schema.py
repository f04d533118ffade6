"""Requests made from /openapi.json, right and wrong ones, by schemathesis: none is an error of the server's own."""

from __future__ import annotations

import pytest
import requests
import schemathesis

from fastdeploy.config import ServeConfig
from fastdeploy.entrypoints.openai.api_server import create_app
from fuzz.effort import EXAMPLES, effort
from fuzz.victim import PATIENCE_S, Victim

DOCUMENT = create_app(type("Client", (), {})(), None, ServeConfig(model="m")).openapi()
# Its list of cases for every single constraint takes most of the time: in the long form only.
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": EXAMPLES > 0}}})
schema = schemathesis.openapi.from_dict(DOCUMENT, config=CONFIG)


@pytest.mark.timeout(600)
@schema.parametrize()
@effort(few=2)
def test_no_request_is_an_error_of_the_servers_own(case: schemathesis.Case, victim: Victim):
    try:
        reply = case.call(base_url=victim.url, timeout=PATIENCE_S)
    except requests.exceptions.ReadTimeout:
        victim.check_alive()
        return
    content_type = reply.headers.get("content-type", [""])[0]
    victim.check_answer(reply.status_code, {"content-type": content_type}, reply.content)
    documented = case.operation.definition.raw["responses"]
    assert str(reply.status_code) in documented, f"{reply.status_code} is not among the documented answers"
