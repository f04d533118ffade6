"""Answers from a recording, and what is different in the new run."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from fastdeploy.traffic.file import Exchange, Opening, Outcome, Recording
from traffic.wire import replayed

COMPLETIONS = "/v1/completions"


def recording(*exchanges: Exchange) -> Recording:
    for number, exchange in enumerate(exchanges, 1):
        exchange.id = number
    return Recording(Opening(version="1", upstream="http://a", began=0.0), list(exchanges), True, 100.0)


def made(
    at: float, target: str = COMPLETIONS, body: object = None, reply: object = None, method: str = "POST", **fields
) -> Exchange:
    """Return an exchange that began at a time and took half a second."""
    request = b"" if body is None else json.dumps(body).encode()
    exchange = Exchange(0, at, method, target, [("content-type", "application/json")], request, len(request), "")
    exchange.sent, exchange.status, exchange.answered, exchange.ended = at + 0.1, 200, at + 0.2, at + 0.5
    data = json.dumps({"at": at} if reply is None else reply).encode()
    exchange.reply_headers = [("content-type", "application/json"), ("content-length", str(len(data)))]
    exchange.pieces, exchange.reply_size, exchange.outcome = [(at + 0.4, data)], len(data), Outcome.COMPLETE
    for name, value in fields.items():
        setattr(exchange, name, value)
    return exchange


def kinds(app) -> list[str]:
    return [one.kind.value for one in app.report().differences]


async def test_the_same_request_is_answered_in_the_recorded_order_whatever_ids_it_has(request_client):
    body = {"prompt": [1, 2], "n": 1}
    found = recording(made(1, body=body), made(2, body=body | {"prompt": [3]}), made(3, body=body))
    async with replayed(found) as (url, app), request_client(url) as http:
        answers = [
            await http.post(COMPLETIONS, json={"n": 1, "prompt": prompt, "user": str(i), "request_id": f"r{i}"})
            for i, prompt in enumerate(([3], [1, 2], [1, 2]))
        ]
        assert [answer.json()["at"] for answer in answers] == [2, 1, 3]
        report = (await http.get("/replay/report")).json()
    assert report == {"same": True, "requests": 3, "matched": 3, "recorded": 3, "differences": []}


@pytest.fixture
def request_client():
    return lambda url: httpx.AsyncClient(base_url=url)


async def test_a_uuid_is_no_difference_in_a_body_a_query_or_a_path(request_client):
    old, new = "0b5e0a3c-5d3e-4c0e-9d53-3b6b7c7f0a11", "11111111-2222-3333-4444-555555555555"
    exchange = made(1, f"/v1/sessions/{old}/x?hold=a-{old}", {"hold": f"client-{old.replace('-', '')}"})
    async with replayed(recording(exchange)) as (url, app), request_client(url) as http:
        target = f"/v1/sessions/{new}/x?hold=a-{new}"
        assert (await http.post(target, json={"hold": f"client-{new.replace('-', '')}"})).status_code == 200
    assert app.report().same


async def test_a_request_that_was_not_recorded_is_refused_with_the_fields_that_differ(request_client):
    near = {"messages": [{"role": "user", "content": "a long question, 17+4?"}], "seed": 1, "prompt": [1, 2, 3]}
    found = recording(made(1, body={"x": [{}] * 9}), made(2, body=near))
    async with replayed(found) as (url, app), request_client(url) as http:
        other = {"messages": [{"role": "user", "content": "a long question, 18+4?"}], "prompt": [1, 5], "top_k": 3}
        refused = await http.post(COMPLETIONS, json=other)
    error = refused.json()["error"]
    assert refused.status_code == 409 and "(#2)" in error["message"]
    shown = {one["path"]: (one["recorded"], one["now"]) for one in error["differences"]}
    assert shown == {
        "messages[0].content": ('"a long question, 17+4?"', '"a long question, 18+4?"'),
        "seed": ("1", "(absent)"),
        "top_k": ("(absent)", "3"),
        "prompt[1]": ("2", "5"),
        "prompt.length": ("3", "2"),
    }
    assert kinds(app) == ["body", "never_asked"], "the nearest one is not told again as never asked"


async def test_a_request_that_comes_too_often_and_an_unknown_route_are_differences(request_client):
    async with replayed(recording(made(1, body={"n": 1}))) as (url, app), request_client(url) as http:
        statuses = [(await http.post(COMPLETIONS, json={"n": 1})).status_code for _ in range(2)]
        statuses.append((await http.post("/generate", json={})).status_code)
    assert statuses == [200, 409, 404] and kinds(app) == ["asked_more_often", "unknown_route"]


async def test_loose_answers_with_the_next_one_of_the_route_and_still_tells_the_difference(request_client):
    found = recording(made(1, body={"n": 1}), made(2, body={"n": 2}))
    async with replayed(found, loose=True) as (url, app), request_client(url) as http:
        answers = [(await http.post(COMPLETIONS, json={"n": n})).json()["at"] for n in (7, 2, 8)]
    assert answers == [1, 2, 2] and kinds(app) == ["body"] * 2


async def test_the_answer_to_a_poll_is_that_after_as_many_control_calls(request_client):
    def poll(at, version):
        return made(at, "/get_weight_version", method="GET", reply={"version": version})

    found = recording(poll(1, 0), poll(2, 0), made(3, "/update_weights", {"v": 1}), poll(4, 1), poll(5, 2))
    async with replayed(found) as (url, app), request_client(url) as http:

        async def version():
            return (await http.get("/get_weight_version")).json()["version"]

        before = await version()
        await http.post("/update_weights", json={"v": 1})
        after = [await version() for _ in range(3)]
    assert (before, after) == (0, [1, 2, 2]) and app.report().same


async def test_a_request_on_the_other_side_of_a_control_call_is_told(request_client):
    found = recording(made(1, body={"n": 1}), made(2, "/pause"), made(3, body={"n": 2}))
    async with replayed(found) as (url, app), request_client(url) as http:
        await http.post("/pause")
        await http.post(COMPLETIONS, json={"n": 1})
        await http.post(COMPLETIONS, json={"n": 2})
    (difference,) = app.report().differences
    assert difference.text == ("POST /v1/completions (#1) came after POST /pause (#2); before it in the recording")


async def test_a_client_that_leaves_earlier_or_stays_longer_is_told(request_client, monkeypatch):
    monkeypatch.setattr("fastdeploy.traffic.replay.STAY_S", 0.05)
    whole = made(1, body={"n": 1}, pieces=[(1.2, b"{"), (1e6, b"}")])
    left = made(2, body={"n": 2}, outcome=Outcome.CLIENT_LEFT, reply_size=None, reply_headers=[])
    async with replayed(recording(whole, left), speed=1.0) as (url, app), request_client(url) as http:
        async with http.stream("POST", COMPLETIONS, json={"n": 1}) as reply:
            assert await anext(reply.aiter_raw()) == b"{"
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(COMPLETIONS, json={"n": 2})
        while len(kinds(app)) < 2:
            await asyncio.sleep(0.01)
    assert sorted(kinds(app)) == ["client_left", "client_stayed"]


async def test_a_reply_that_broke_off_breaks_off_again_and_one_that_never_came_is_a_504(request_client):
    cut = made(1, body={"n": 1}, outcome=Outcome.UPSTREAM_FAILED, reply_size=None)
    cut.reply_headers = [("content-length", "100")]
    none = made(2, body={"n": 2}, status=None, outcome=None, ended=None, pieces=[], reply_size=None)
    async with replayed(recording(cut, none)) as (url, app), request_client(url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(COMPLETIONS, json={"n": 1})
        reply = await http.post(COMPLETIONS, json={"n": 2})
    assert reply.status_code == 504 and "the recording ends before" in reply.json()["error"]["message"]
    assert app.report().same


async def test_data_is_compared_by_its_hash_and_a_reply_that_was_not_kept_is_told(request_client):
    data = [("content-type", "application/octet-stream")]
    upload = made(1, "/upload", headers=data, request=None, request_size=3)
    upload.request_hash = "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85"  # blake3 of "abc"
    export = made(2, "/export", reply_kept=False, reply_size=10, pieces=[])
    async with replayed(recording(upload, export)) as (url, app), request_client(url) as http:
        for content in (b"abd", b"abc"):
            reply = await http.post("/upload", content=content, headers=dict(data))
            assert reply.status_code == (200 if content == b"abc" else 409)
        assert (await http.post("/export")).status_code == 501
    assert kinds(app) == ["body", "not_kept"]


async def test_pieces_come_with_the_recorded_pauses_or_at_once(request_client):
    stream = made(1, body={"n": 1}, reply_headers=[])
    stream.pieces = [(1.2, b"a"), (1.6, b"b"), (1.9, b"c")]
    for speed in (0.0, 2.0):
        async with replayed(recording(stream), speed=speed) as (url, _), request_client(url) as http:
            begin, times = asyncio.get_running_loop().time(), []
            async with http.stream("POST", COMPLETIONS, json={"n": 1}) as reply:
                async for piece in reply.aiter_raw():
                    times += [asyncio.get_running_loop().time() - begin] * len(piece)
        assert len(times) == 3
        if speed:  # never earlier than half of the recorded times since the end of the request
            assert all(time >= (at - 1.1) / speed for time, (at, _) in zip(times, stream.pieces, strict=True))


async def test_a_field_can_be_left_out_of_the_comparison(request_client):
    found = recording(made(1, "/update_weights?step=1", {"info": {"path": "/tmp/1", "n": 1}}))
    for ignored, status in ((frozenset(("path", "step")), 200), (frozenset(("path",)), 409)):
        async with replayed(found, ignored=ignored) as (url, app), request_client(url) as http:
            body = {"info": {"path": "/tmp/2", "n": 1}}
            assert (await http.post("/update_weights?step=2", json=body)).status_code == status


async def test_a_key_is_no_difference(request_client):
    found = recording(made(1, "/x?api_key=[removed]", {"api_key": "[removed]", "again": "say [removed]"}))
    async with replayed(found) as (url, app), request_client(url) as http:
        body = {"api_key": "new-key-12345", "again": "say new-key-12345"}
        assert (await http.post("/x?api_key=other-key-1", json=body)).status_code == 200
    assert app.report().same
