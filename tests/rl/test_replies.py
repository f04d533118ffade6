"""Parsing of streams and errors. Only a newline ends a line of a stream, whatever the text of a token is."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.errors import QueueFull
from fastdeploy.rl.client import RolloutClient
from fastdeploy.rl.connection import LineReader, read_events, reply_error
from fastdeploy.rl.errors import MalformedReply, Unreachable, is_busy, is_retryable
from rl.real_server import real_server
from support.tiny_tokenizer import save_tokenizer

# All characters but "\n" that end a line for str.splitlines.
SEPARATORS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


def read(chunks: list[bytes]) -> list:
    async def go():
        async def each():
            for chunk in chunks:
                yield chunk

        return [event async for event in read_events(each())]

    return asyncio.run(go())


@given(text=st.text(st.sampled_from("a\u00e9" + SEPARATORS)), cuts=st.lists(st.integers(0, 200)))
def test_any_text_arrives_complete_wherever_its_bytes_are_cut(text, cuts):
    event = {"choices": [{"text": text}]}
    line = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
    sent = line + b": keep-alive\n\n" + line.replace(b"\n", b"\r\n") + b"data: [DONE]\n\n"
    ends = sorted({min(cut, len(sent)) for cut in cuts} | {len(sent)})
    chunks = [sent[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    assert read(chunks) == [event, None, event]


def test_a_line_without_end_is_refused_before_it_fills_the_memory():
    reader = LineReader(max_bytes=100)
    assert reader.feed(b"x" * 100) == [] and reader.feed(b"\n" + b"y" * 100) == [b"x" * 100]
    with pytest.raises(MalformedReply, match="100 bytes"):
        reader.feed(b"y")
    with pytest.raises(MalformedReply):
        LineReader(max_bytes=100).feed(b"x" * 101 + b"\n")


async def test_the_client_reads_text_with_every_separator(tmp_path):
    """Tokens of this tokenizer are bytes, which the real server writes unchanged."""
    save_tokenizer(tmp_path)
    script = list(SEPARATORS.encode())

    with real_server(tokenizer=load_tokenizer(str(tmp_path)), runner={"script": script}) as server:
        async with RolloutClient(server.url, max_failures=0) as client:
            rollout = await client.generate([97], {"max_tokens": len(script), "ignore_eos": True})
    assert rollout.text == SEPARATORS and rollout.token_ids == script and rollout.num_resumes == 0


@pytest.mark.parametrize(
    "header, expected",
    [("7", 7.0), ("0.5", 0.5), ("1e9", 60.0), ("-3", 0.0), ("inf", None), ("nan", None), ("Fri, 31 Dec", None)],
)
def test_a_retry_after_is_a_bounded_number_of_seconds_or_none(header, expected):
    error = reply_error(503, {"retry-after": header}, b"{}")
    assert error.detail.get("retry_after") == expected
    body = json.dumps({"error": {"code": "queue_full", "message": "m", "retry_after": header}}).encode()
    assert reply_error(429, {}, body).detail.get("retry_after") == expected


def test_the_refusals_of_health_and_ready_are_different_errors():
    """A client that waits for a server repeats its call while there is no engine."""
    errors = [reply_error(503, {}, json.dumps({"status": s}).encode()) for s in ("no engine", "rejecting new requests")]
    assert [error.code for error in errors] == ["engine_dead", "rejecting_new_requests"]
    assert all(is_retryable(error) for error in errors)


def test_a_busy_server_may_be_asked_again_and_a_wrong_key_may_not():
    full = reply_error(429, {"retry-after": "2"}, b'{"error": {"code": "queue_full", "message": "m"}}')
    assert isinstance(full, QueueFull) and is_busy(full) and is_retryable(full)
    proxys = reply_error(429, {"retry-after": "2"}, b"<html>slow down</html>")
    assert is_busy(proxys) and is_retryable(proxys) and proxys.detail["retry_after"] == 2.0
    assert isinstance(reply_error(502, {}, b"<html>"), Unreachable)
    for status in (401, 403, 404):
        error = reply_error(status, {"retry-after": "2"}, b'{"error": {"code": "x", "message": "m"}}')
        assert not is_busy(error) and not is_retryable(error)
