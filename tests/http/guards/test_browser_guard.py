"""Web pages of other origins cannot use the server, and programs can."""

from __future__ import annotations

import pytest

from fastdeploy.core.config import ServeConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.http.guards.browser_guard import PagePolicy, host_name, refusal
from fastdeploy.http.guards.keys import Keys
from fastdeploy.inter_communicator import messages as m
from support.fake_engine_server import reply_with
from support.http_calls import answer, exchange

OWN = "127.0.0.1:8180"
EVIL = {"origin": "http://evil.example"}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def code(method: str = "POST", host: str | None = OWN, bound: str = "127.0.0.1", settings=None, **headers: str):
    """Return the code of the refusal, or None. Underscores in header names stand for hyphens."""
    policy = PagePolicy.of(ServeConfig(model="m", host=bound, **(settings or {})))
    given = ({} if host is None else {"host": host}) | headers
    error = refusal(method, [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()], policy)
    return error and error.code


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8180", "localhost", "LOCALHOST:1", "localhost.:80", "[::1]:8180", "::1", "127.8.0.1:80", "", None],
)
def test_loopback_names_are_answered_on_loopback(host):
    assert code(host=host) is None


@pytest.mark.parametrize("host", ["0.0.0.0:8180", "[::]:8180"])
def test_the_address_of_all_interfaces_is_answered_to_programs_and_to_no_browser(host):
    """Browsers send no Sec-Fetch-Site there, so an image of any page could call /clear_load_weight."""
    for bound in ("127.0.0.1", "0.0.0.0"):
        assert code("GET", host=host, bound=bound, user_agent="curl/8.5.0") is None
        assert code("GET", host=host, bound=bound, user_agent="Mozilla/5.0 (X11; Linux x86_64)") == "forbidden"
    assert code("GET", host=OWN, user_agent="Mozilla/5.0 (X11; Linux x86_64)") is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8180", "localhost.evil.example", "10.0.0.5", "[::2]:1"])
def test_other_names_are_refused_on_loopback_only_and_can_be_allowed(host):
    assert code(host=host) == "forbidden"
    assert code(host=host, bound="0.0.0.0") is None
    assert code(host=host, settings={"allowed_hosts": ("a", host_name(host).upper())}) is None
    assert code(host=host, settings={"allowed_hosts": ("*",)}) is None
    assert code(host=host, bound="0.0.0.0", settings={"allowed_hosts": ("a",)}) == "forbidden"
    assert code(host="localhost:8180", bound="0.0.0.0", settings={"allowed_hosts": ("a",)}) is None


@pytest.mark.parametrize(
    "host",
    ["[::1].evil.example", "[localhost]evil.example", "[localhost]", "[::1]evil:80", "[::1]:80.evil.example", "[::1",
     "localhost:80.evil.example", "localhost]", "127.0.0.1:evil.example", "localhost:1:2", "x[::1]", "[::1]]"],
)  # fmt: skip
def test_a_host_that_only_begins_like_loopback_is_refused(host):
    assert code(host=host) == "forbidden"
    assert code(host=host, bound="0.0.0.0", settings={"allowed_hosts": ("::1", "localhost", "a")}) == "forbidden"


def test_every_host_header_must_be_allowed():
    policy = PagePolicy.of(ServeConfig(model="m"))
    assert refusal("GET", [(b"host", OWN.encode()), (b"host", b"evil.example")], policy).code == "forbidden"


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("bound", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    "headers",
    [{"origin": origin} for origin in ("http://evil.example", "null", "", "http://127.0.0.1:3000",
                                       "http://127.0.0.1:8180.evil.example", "http://localhost:8180")]
    + [{"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}]
    + [{"origin": "http://evil.example", "sec_fetch_site": "same-origin"}],
)  # fmt: skip
def test_a_page_of_another_origin_is_refused(method, bound, headers):
    assert code(method, bound=bound, content_type="application/json", **headers) == "forbidden"


def test_an_empty_or_null_origin_does_not_match_a_missing_host():
    assert code(host=None, origin="null") == "forbidden"
    assert code(host="", origin="http://") == "forbidden"


@pytest.mark.parametrize("origin", [{}, {"origin": f"http://{OWN}"}])
@pytest.mark.parametrize("site", [{}, {"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"}])
def test_own_pages_typed_addresses_and_programs_are_answered(origin, site):
    headers = origin | site
    assert code("GET", **headers) is None and code("POST", **headers) is None


def test_pages_of_allowed_origins_are_answered():
    allowed = {"allowed_origins": ("http://localhost:3000",)}
    assert code(origin="http://localhost:3000", sec_fetch_site="same-site", settings=allowed) is None
    assert code(origin="http://localhost:3001", settings=allowed) == "forbidden"
    assert code(origin="http://evil.example", settings={"allowed_origins": ("*",)}) is None


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_only_content_types_of_programs_are_accepted(method):
    for content_type in ("application/json", "Application/JSON; charset=utf-8", "application/octet-stream",
                         "application/x-www-form-urlencoded"):  # fmt: skip
        assert code(method, content_type=content_type) is None
    for content_type in ("text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=x",
                         "application/csp-report", "application/json, text/plain", ""):  # fmt: skip
        assert code(method, content_type=content_type) == (None if method == "GET" else "unsupported_media_type")


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/"])
def test_an_invalid_origin_is_refused_at_start(origin):
    with pytest.raises(InvalidField, match="allowed_origins"):
        ServeConfig(model="m", allowed_origins=(origin,)).check()


def test_an_ipv6_server_answers_its_address():
    assert code(host="[::1]:8180", bound="::1") is None
    assert code(host="localhost:1", bound="::1") is None
    assert code(host="evil.example", bound="::1") == "forbidden"


@pytest.fixture(scope="module")
def served(make_module_stack):
    stack = make_module_stack()
    stack.script(reply_with([97]))
    for kind in (m.PauseArgs, m.ResetCacheArgs):
        answer(stack, kind)
    return stack


def control_calls(stack) -> int:
    calls = [message.args for message in stack.engine.seen.queue if isinstance(message, m.Call)]
    return sum(not isinstance(args, m.PauseStatusArgs) for args in calls)


def test_no_page_reaches_the_engine_on_any_route_that_changes_something(served):
    before = control_calls(served)
    for reply in (
        served.http.post("/v1/pause", content="{}", headers={**EVIL, "content-type": "text/plain"}),
        served.http.post("/v1/pause", content="{}", headers={"content-type": "text/plain"}),
        served.http.post("/v1/pause", headers=EVIL),
        served.http.post("/v1/pause", headers={"host": "evil.example"}),
        served.http.get("/flush_cache", headers={"sec-fetch-site": "cross-site"}),
        served.http.get("/flush_cache", headers={"sec-fetch-site": "same-site"}),
        served.http.post("/flush_cache", headers={"origin": "null"}),
    ):
        assert reply.status_code in (403, 415)
        assert reply.json()["error"]["type"] == "invalid_request_error" and int(reply.headers["content-length"])
    assert control_calls(served) == before
    assert served.http.post("/v1/pause").status_code == 200 and control_calls(served) == before + 1


def test_a_preflight_of_another_origin_gets_no_permission(served):
    for headers in (EVIL | PREFLIGHT, PREFLIGHT):
        reply = served.http.options("/v1/pause", headers=headers)
        assert reply.status_code in (403, 405)
        assert not any(name.startswith("access-control") for name in reply.headers)


@pytest.mark.parametrize("host", [b"", b"Host: localhost:1\r\n", b"Host: [::1]:8180\r\n"])
def test_http_1_0_with_and_without_host(served, host):
    head, body = exchange(served, b"GET /version HTTP/1.0\r\n" + host + b"\r\n")
    assert b" 200 " in head and "version" in body


def test_requests_of_curl_and_of_json_clients_are_answered(served):
    body = b'{"prompt": [97]}'
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {"content-type": "application/json"}, {}):
        assert served.http.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_an_allowed_origin_gets_cors_headers_also_with_an_error(make_stack):
    origin = {"origin": "http://localhost:3000"}
    stack = make_stack(allowed_origins=("http://localhost:3000",), keys=Keys(data=(b"key",)))
    stack.script(reply_with([97]))
    reply = stack.http.options("/v1/completions", headers=origin | PREFLIGHT)
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == origin["origin"]
    for headers, status in (({}, 401), ({"authorization": "Bearer key"}, 200)):
        reply = stack.http.post("/v1/completions", json={"prompt": [97]}, headers=origin | headers)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == origin["origin"]
    assert stack.http.options("/v1/completions", headers=EVIL | PREFLIGHT).status_code == 403
