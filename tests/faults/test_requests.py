"""Faults of requests: what the client sees, that each is counted and named, and that the server is sound afterwards.

The engine is the real one, on a fake runner."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from e2e.server import until
from support.engine_stack import engine_stack
from support.fake_runner import FakeRunner, expected_tokens
from support.http_stack import Server

PROMPT, COUNT = [5, 6, 7], 6
VOCAB = 272  # with the special tokens of a chat
TOKENS = expected_tokens(PROMPT, COUNT, vocab=VOCAB)
BROKEN = (httpx.RemoteProtocolError, httpx.ReadError)


@pytest.fixture(scope="module")
def server(model_dir, tokenizer, tmp_path_factory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("faults"))
    settings = {"faults": "on", "faults_dir": folder, "keepalive_s": 0.05}
    with engine_stack(model_dir, tokenizer, FakeRunner(vocab=VOCAB), **settings) as server:
        yield server


@pytest.fixture(autouse=True)
def sound_afterwards(server) -> Iterator[None]:
    yield
    server.http.delete("/v1/faults")
    assert complete(server).ids == TOKENS
    status = server.http.get("/v1/is_paused").json()["result"]
    assert not status["is_paused"] and not status["rejecting_new_requests"]


class Got(NamedTuple):
    """What a client has of an answer. end: how it ended. text: all bytes that came."""

    status: int
    injected: str | None
    ids: list[int]
    end: str
    text: str = ""
    spans: tuple[Any, ...] = ()
    logprobs: tuple[float, ...] = ()


def complete(server: Server, fault: str | None = None, stream: bool = False, **fields: Any) -> Got:
    """Make a completion, and return what came of it."""
    body = {"prompt": PROMPT, "max_tokens": COUNT, "return_token_ids": True, "logprobs": 0, "stream": stream, **fields}
    headers = {} if fault is None else {"X-Fault": fault}
    text, status, injected, end = "", 0, None, "complete"
    try:
        with server.http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
            status, injected = reply.status_code, reply.headers.get("x-fault-injected")
            for part in reply.iter_text():
                text += part
    except BROKEN:
        end = "broken"
    lines = [line.removeprefix("data: ") for line in text.split("\n")] if stream else [text]
    events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    choices = [choice for event in events for choice in event.get("choices", [])]
    return Got(
        status,
        injected,
        [token for choice in choices for token in choice["token_ids"]],
        end,
        text,
        tuple(span for choice in choices for span in choice["weight_versions"]),
        tuple(value for choice in choices for value in (choice["logprobs"] or {}).get("token_logprobs", [])),
    )


def counted(server: Server, fault: str) -> float:
    text = server.http.get("/metrics").text
    found = re.search(rf'fastdeploy:faults_injected_total{{fault="{fault}"}} (\S+)', text)
    assert found, fault
    return float(found[1])


def no_answer(got: Got) -> None:
    assert (got.end, got.status, got.text) == ("broken", 0, "")


def no_token(got: Got) -> None:
    """Comments may have come while the first token was computed."""
    assert got.end == "broken" and "data:" not in got.text


def all_tokens(got: Got) -> None:
    assert (got.end, got.status, got.ids) == ("complete", 200, TOKENS)


def has_tokens(count: int) -> Callable[[Got], None]:
    def check(got: Got) -> None:
        assert (got.end, got.status, got.ids) == ("broken", 200, TOKENS[:count])
        assert got.text.endswith("\n\n")

    return check


def half_an_event(got: Got) -> None:
    assert (got.end, got.status, got.ids) == ("broken", 200, TOKENS[:2])
    assert not got.text.endswith("\n") and "data: {" in got.text.rpartition("\n\n")[2]


def half_a_body(got: Got) -> None:
    assert (got.end, got.status) == ("broken", 200) and got.text.startswith("{") and not got.text.endswith("}")


def refused(status: int) -> Callable[[Got], None]:
    def check(got: Got) -> None:
        assert got.status == status and json.loads(got.text)["error"]["message"] == "an injected fault (http_error)"

    return check


def wrong_labels(got: Got) -> None:
    all_tokens(got)
    assert {(span["version"], span["weight_epoch"]) for span in got.spans} == {("zz", 4)}


def wrong_logprobs(got: Got) -> None:
    all_tokens(got)
    assert [round(value + 3, 3) for value in got.logprobs] == LOGPROBS


LOGPROBS: list[float] = []
# The fault, what a client sees of an answer in one body, and of one in a stream.
CASES = [
    ("stream_cut; when=before", no_answer, no_token),
    ("stream_cut; tokens=2", no_answer, has_tokens(2)),
    ("stream_cut; tokens=2; when=middle", half_a_body, half_an_event),
    ("stream_stalled; tokens=2; seconds=0.3", all_tokens, all_tokens),
    ("slow_tokens; seconds=0.01", all_tokens, all_tokens),
    ("version_wrong; label=zz; epochs=4", wrong_labels, wrong_labels),
    ("logprobs_wrong; add=-3", wrong_logprobs, wrong_logprobs),
    *((f"http_error; status={status}", refused(status), refused(status)) for status in (429, 500, 502, 503, 504)),
    ("reply_lost", no_answer, no_answer),
]


@pytest.mark.parametrize("stream", [False, True], ids=["body", "stream"])
@pytest.mark.parametrize(("fault", "in_body", "in_stream"), CASES, ids=[case[0] for case in CASES])
def test_a_fault_of_a_request_is_seen_counted_and_named(server, fault, in_body, in_stream, stream):
    LOGPROBS[:] = [round(value, 3) for value in complete(server).logprobs]
    name = fault.partition(";")[0]
    before = counted(server, name)
    got = complete(server, fault, stream)
    (in_stream if stream else in_body)(got)
    assert got.injected == (name if got.status else None)
    assert counted(server, name) == before + 1
    last = server.http.get("/v1/faults").json()["result"]["happened"][-1]
    assert (last["fault"], last["rule"], last["path"], last["acted"]) == (name, "X-Fault", "/v1/completions", True)


def test_a_stalled_stream_sends_not_even_comments(server):
    text = complete(server, "stream_stalled; tokens=2; seconds=1", stream=True).text
    silence = text.split("data: ")[2]  # from the second token to the third, which was made meanwhile
    assert ": keep-alive" not in silence


def test_a_stream_that_stalls_for_ever_goes_on_when_the_faults_are_disarmed(server):
    found: list[Got] = []
    asking = threading.Thread(target=lambda: found.append(complete(server, "stream_stalled; seconds=0", stream=True)))
    asking.start()
    while not counted_now(server, "stream_stalled"):
        pass
    assert not found
    server.http.delete("/v1/faults")
    asking.join(20)
    all_tokens(found[0])


def counted_now(server: Server, fault: str) -> bool:
    happened = server.http.get("/v1/faults").json()["result"]["happened"]
    return any(one["fault"] == fault and one["acted"] for one in happened)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 2}),
        ("/v1/completions", {"prompt": [PROMPT, PROMPT], "max_tokens": 4, "n": 2}),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4}}),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}),
        ("/skyrl/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_the_requests_of_every_dialect_have_the_faults(server, path, body):
    with pytest.raises(BROKEN):
        server.http.post(path, json=body, headers={"X-Fault": "stream_cut; tokens=2"})
    reply = server.http.post(path, json=body, headers={"X-Fault": "version_wrong; label=zz"})
    assert (reply.status_code, reply.headers["x-fault-injected"]) == (200, "version_wrong")
    assert '"zz"' in reply.text
    assert "x-fault-injected" not in server.http.post(path, json=body).headers


def test_n_choices_count_together(server):
    got = complete(server, "stream_cut; tokens=5", stream=True, n=3)
    assert (got.end, len(got.ids)) == ("broken", 5)


def test_refusals_have_the_retry_after_of_the_server(server):
    def retry_after(fault: str) -> str | None:
        return server.http.post("/v1/completions", json={}, headers={"X-Fault": fault}).headers.get("retry-after")

    assert [retry_after(f"http_error; status={status}") for status in (429, 503, 500)] == ["1", "2", None]
    assert retry_after("http_error; status=429; retry_after=9") == "9"


def test_an_armed_burst_is_for_its_requests_alone(server):
    arm(server, {"fault": "http_error", "status": "429", "after": 1, "times": 2})
    assert [complete(server).status for _ in range(5)] == [200, 429, 429, 200, 200]
    assert server.http.get("/health").status_code == 200


def arm(server: Server, rules: Any) -> list[dict[str, Any]]:
    reply = server.http.post("/v1/faults", json=rules)
    assert reply.status_code == 200, reply.text
    return reply.json()["result"]["armed"]


def test_the_same_requests_get_the_same_faults_whatever_the_timing(server):
    def run(slow: str | None) -> list[int]:
        server.http.delete("/v1/faults")
        arm(server, {"seed": 5, "rules": [{"fault": "stream_cut", "probability": 0.4, "times": 0}]})
        found = [complete(server, slow if i % 3 else None).end for i in range(16)]
        return [i for i, end in enumerate(found) if end == "broken"]

    first = run(None)
    assert 0 < len(first) < 16
    assert first == run(None) == run("slow_tokens; seconds=0.002")


def test_replies_come_in_another_order(server):
    done: list[str] = []

    def ask(name: str, fault: str | None = None) -> None:
        assert complete(server, fault).ids == TOKENS
        done.append(name)

    first = threading.Thread(target=ask, args=("first", "replies_reordered; replies=2; seconds=20"))
    first.start()
    while not any(one["fault"] == "replies_reordered" for one in view(server)["happened"]):
        pass
    ask("second")
    assert done == ["second"]
    ask("third")
    first.join(20)
    assert sorted(done) == ["first", "second", "third"]


@pytest.mark.parametrize(
    "fault", ["stream_stalled; seconds=0", "slow_tokens; seconds=1000", "replies_reordered; replies=9; seconds=1000"]
)
def test_an_answer_that_is_late_comes_when_the_faults_are_disarmed(server, fault):
    def ask() -> None:
        found.append(complete(server, fault))

    found: list[Got] = []
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    until(lambda: any(one["acted"] for one in view(server)["happened"]), 20, "the answer is late")
    server.http.delete("/v1/faults").raise_for_status()
    asking.join(20)
    assert found[0].ids == TOKENS


def view(server: Server) -> dict[str, Any]:
    return server.http.get("/v1/faults").json()["result"]


def test_a_request_that_gives_no_occasion_for_its_fault_says_so(server):
    for fault in ("pause_hangs", "stream_cut; tokens=1000", "logprobs_wrong"):
        before = counted(server, name := fault.partition(";")[0])
        assert complete(server, fault, logprobs=None).injected == "none"
        assert counted(server, name) == before


def test_a_bad_header_is_refused_before_the_request_is_read(server):
    got = complete(server, "nonsense")
    assert got.status == 400
    error = json.loads(got.text)["error"]
    assert error["param"] == "X-Fault" and "expected one of death" in error["message"]


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"fault": "nonsense"}, "fault"),
        ([{"fault": "stream_cut"}, {"fault": "stream_cut", "tokens": -1}], "rules[1].tokens"),
        ({"rules": [{"fault": "death", "of": "replica"}]}, "of"),
        ("text", "rules"),
    ],
)
def test_bad_rules_are_refused_by_the_field_and_none_is_armed(server, rules, param):
    reply = server.http.post("/v1/faults", json=rules)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert view(server)["armed"] == []
    assert server.http.post("/v1/faults", content=b"{").json()["error"]["param"] == "body"


def test_rules_are_listed_with_their_counts_and_disarmed_by_their_names(server):
    arm(server, [{"fault": "stream_cut", "name": "cut", "after": 1}, {"fault": "slow_tokens", "seconds": 0.001}])
    complete(server)
    assert [(rule["name"], rule["matched"], rule["fired"]) for rule in view(server)["armed"]] == [
        ("cut", 1, 0),
        ("rule-2", 1, 1),
    ]
    assert server.http.delete("/v1/faults?rule=cut").json()["result"] == {"disarmed": ["cut"]}
    assert complete(server).end == "complete"
    assert server.http.delete("/v1/faults?rule=cut").json()["error"]["param"] == "rule"


def test_a_clock_jumps_until_the_faults_are_disarmed(server, monkeypatch):
    """The clock of this process is left alone; that of the engine's is told in a file."""
    server.http.post("/v1/completions", json={}, headers={"X-Fault": "clock_jump; seconds=-50; of=api_server"})
    server.http.post("/v1/completions", json={}, headers={"X-Fault": "clock_jump; seconds=-10; of=api_server"})
    assert view(server)["counts"]["clock_jump"] >= 2
    # tests/e2e/test_faults.py sees the clocks themselves


# ---------------------------------------------------------------------- pauses


def test_a_pause_that_hangs_goes_on_when_the_faults_are_disarmed(server):
    replies: list[httpx.Response] = []

    def pause() -> None:
        headers = {"X-Fault": "pause_hangs; seconds=0"}
        replies.append(server.http.post("/pause?mode=keep", headers=headers))  # vLLM's

    pausing = threading.Thread(target=pause)
    pausing.start()
    while not counted_now(server, "pause_hangs"):
        pass
    assert not server.http.get("/v1/is_paused").json()["result"]["rejecting_new_requests"] and not replies
    server.http.delete("/v1/faults")
    pausing.join(20)
    assert (replies[0].status_code, replies[0].headers["x-fault-injected"]) == (200, "pause_hangs")
    assert server.http.get("/v1/is_paused").json()["result"]["is_paused"]
    server.post("/v1/resume")


def test_a_pause_that_times_out_leaves_nothing_paused(server):
    reply = server.http.post("/v1/pause", json={"mode": "keep"}, headers={"X-Fault": "pause_times_out"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "pause_timeout")
    assert counted(server, "pause_times_out") >= 1


@pytest.mark.parametrize(("how", "paused"), [("draining", True), ("never", False)])
def test_a_pause_is_acknowledged_early(server, how, paused):
    true = server.post("/v1/pause", mode="keep").json()["result"]
    server.post("/v1/resume")
    headers = {"X-Fault": f"pause_acknowledged_early; how={how}"}
    reply = server.http.post("/v1/pause", json={"mode": "keep"}, headers=headers)
    result = reply.json()["result"]
    assert reply.status_code == 200 and result["is_paused"] and result["status"] == "paused"
    assert true.keys() <= result.keys()
    while server.http.get("/v1/is_paused").json()["result"]["is_paused"] is not paused:
        pass
    server.post("/v1/resume")
