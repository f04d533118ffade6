"""A pytest plugin for a framework's own tests: between two tests our server is brought back to its start, and each
test's report has the property ``requests``, the number of requests that the test made to the server."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

URL = os.environ["FASTDEPLOY_URL"]


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Make a call of our server, and return the result in its reply."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    return answer.get("result", answer)


def num_answered() -> int:
    """Return the number of requests that the server has answered, without those of this module."""
    with urllib.request.urlopen(URL + "/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        int(float(line.rpartition(" ")[2]))
        for line in lines
        if line.startswith("http_requests_total") and not any(f'path="{path}"' in line for path in CONTROL)
    )


CONTROL = ("/metrics", "/v1/weights", "/v1/wakeup", "/v1/reset", "/v1/is_paused", "/v1/resume", "/v1/update_weights")


def reset(base: dict[str, Any]) -> None:
    """Bring the server to the state of its start. base: what /v1/weights told at the start."""
    serves = call("GET", "/v1/weights")
    if serves["asleep"]:
        call("POST", "/v1/wakeup", {})
    call("POST", "/v1/reset", {"version": base["version"]})
    if serves["fingerprint"] != base["fingerprint"]:
        model = os.environ["FASTDEPLOY_MODEL"]
        call("POST", "/v1/update_weights", {"model_path": model, "version": base["version"]})
    for hold in call("GET", "/v1/is_paused")["holds"]:
        call("POST", "/v1/resume", {"hold_id": hold["id"]})


@pytest.fixture(scope="session")
def fastdeploy_base() -> dict[str, Any]:
    return call("GET", "/v1/weights")


@pytest.fixture(autouse=True)
def fastdeploy_between(fastdeploy_base: dict[str, Any], record_property: Any) -> Iterator[None]:
    before = num_answered()
    yield
    record_property("requests", num_answered() - before)
    reset(fastdeploy_base)
