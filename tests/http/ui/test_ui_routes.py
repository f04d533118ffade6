"""The page /ui: its files, its policy, and who may read its event stream."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fastdeploy.http.ui
from fastdeploy.http.guards.keys import NO_KEYS, Keys
from fastdeploy.inter_communicator import messages as m
from support.http_calls import answer

FOLDER = Path(fastdeploy.http.ui.__file__).parent
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css"))
KEYS = Keys((b"data",), (b"control",))
STATE = {"boot_id": "boot-1", "phase": "running"}


def reply(next_event: int = 0) -> dict:
    return {"now": 1.0, "next": next_event, "events": [], "lost": 0, "state": STATE, "requests": []}


def test_the_page_and_its_files_are_served_with_a_strict_policy(module_stack):
    page = module_stack.http.get("/ui")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    for name in FILES:
        file = module_stack.http.get(f"/ui/{name}")
        assert file.content == (FOLDER / name).read_bytes()
        assert file.headers["content-type"].startswith("text/javascript" if name.endswith("js") else "text/css")
        assert file.headers["x-content-type-options"] == "nosniff"


def test_the_page_names_only_files_of_this_server_and_has_no_inline_code():
    html = (FOLDER / "index.html").read_text()
    assert set(re.findall(r'(?:src|href)="(/[^"]+)"', html)) <= {f"/ui/{name}" for name in FILES}
    assert "style=" not in html and not re.search(r"<script>|\son\w+=", html)
    for name in FILES:
        text = (FOLDER / name).read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)\w", text), name
        assert "innerHTML" not in text and "eval(" not in text, f"{name}: text of a server could become code"


@pytest.mark.parametrize(
    "bad", ["http://a b", "javascript:1", "http://a/x", "http://a;script-src *", "*", "ftp://a", "http://" + 254 * "a"]
)
def test_only_origins_that_are_named_may_be_asked_by_the_page(module_stack, bad):
    both = module_stack.http.get("/ui", params={"server": ["http://10.0.0.2:8180", "https://[::1]:1"]})
    assert "connect-src 'self' http://10.0.0.2:8180 https://[::1]:1;" in both.headers["content-security-policy"]
    refused = module_stack.http.get("/ui", params={"server": bad})
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("server: ")


@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [(NO_KEYS, None, 200), (KEYS, None, 401), (KEYS, "wrong", 401), (KEYS, "data", 200), (KEYS, "control", 200),
     (Keys(control=(b"control",)), None, 401), (Keys(control=(b"control",)), "control", 200)],
)  # fmt: skip
def test_the_page_is_open_and_its_stream_needs_a_key_if_there_are_keys(make_stack, keys, given, status):
    stack = make_stack(keys=keys)
    answer(stack, m.EventsArgs, reply())
    headers = {} if given is None else {"authorization": f"Bearer {given}"}
    for path in ("/ui", *(f"/ui/{name}" for name in FILES)):
        assert stack.http.get(path).status_code == 200
    with stack.http.stream("GET", "/ui/events", headers=headers) as stream:
        assert stream.status_code == status
        if status == 200:
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert next(stream.iter_lines()).startswith("data: {")


def test_a_page_of_another_origin_gets_neither_the_page_nor_the_stream(module_stack):
    for path in ("/ui", "/ui/events"):
        assert module_stack.http.get(path, headers={"origin": "http://evil.example"}).status_code == 403
        assert module_stack.http.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_the_routes_of_the_page_are_not_in_the_description_of_the_api(module_stack):
    """A program that calls each described route would read the stream for ever."""
    assert not [path for path in module_stack.http.get("/openapi.json").json()["paths"] if path.startswith("/ui")]


def test_head_of_the_stream_does_not_hold_the_connection(module_stack):
    assert module_stack.http.head("/ui").status_code == 200
    assert module_stack.http.head("/ui/events").status_code == 405
    assert module_stack.http.get("/ui").status_code == 200
