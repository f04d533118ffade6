"""A request with retain_s is kept when its client disconnects, and is never computed twice."""

from __future__ import annotations

import pytest

from fastdeploy.engine.requests.retention import CHOICE_BYTES, LOGPROB_BYTES, MIN_PRUNE, TOKEN_BYTES
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness


def ask(h: Harness, client: str = "a", body: str = "body", tokens: int = 20, **fields) -> None:
    """Send request "r", or the one that ``fields`` name."""
    fields = {"request_id": "r", "retain_s": 10.0, "fingerprint": body, "logprobs": 0, "max_tokens": tokens, **fields}
    h.add(prompt=PROMPT, client=client, **fields)


def detached(rounds: int = 5, **fields) -> Harness:
    """Return a harness whose client "a" disconnected after some rounds of request "r". Client "b" is connected too."""
    h = Harness()
    h.connect("b")
    ask(h, **fields)
    h.run_rounds(rounds)
    hang_up(h)
    return h


def hang_up(h: Harness) -> None:
    """Disconnect client "a" from request "r", and forget what it has received."""
    h.send(m.CancelRequest("r"))
    h.run_rounds()
    forget(h)


def forget(h: Harness) -> None:
    """Forget what client "a" has received."""
    h.transport.sent["a"].clear()


@pytest.mark.parametrize("client", ["a", "b"])
@pytest.mark.parametrize("rounds", [1, 4, 40])
def test_a_repeated_request_gets_every_token_once_and_nothing_is_computed_twice(client, rounds):
    h = detached(rounds)
    ask(h, client)
    h.run_out()
    h.run_rounds()
    stream = h.stream("r", client=client)
    assert stream.tokens == expected_tokens(PROMPT, 20) and stream.reason == "length"
    assert len(stream.logprobs) == 20
    assert [i for span in stream.spans for i in range(span.start, span.end)] == list(range(20))
    assert h.runner.computed_tokens == len(PROMPT) + 19


def test_a_retained_request_survives_its_api_server():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(4)
    h.transport.gone.add("a")
    h.now += 2.0  # a heartbeat finds it
    h.run_rounds(2)
    ask(h, "b")
    h.run_out()
    assert h.stream("r", client="b").tokens == expected_tokens(PROMPT, 20)


def test_without_retain_s_a_disconnect_cancels_the_request():
    h = detached(retain_s=0.0)
    assert not len(h.engine.lifecycle.requests) and h.runner.computed_tokens < len(PROMPT) + 8


def test_a_repeated_request_takes_over_from_the_client_that_is_connected():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(5)
    ask(h, "b")
    h.run_out()
    assert h.rejected("r", "a").code == "attached_elsewhere"
    assert h.stream("r", client="b").tokens == expected_tokens(PROMPT, 20)
    assert not h.stream("r", client="a").finals


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("has_died", [False, True])
def test_a_repeated_request_takes_over_from_its_rest_that_came_from_a_lost_engine(rounds, has_died):
    h = Harness()
    h.connect("b")
    ask(h, request_id="rest", group="r", retain_s=0.0, tokens=30)
    h.run_rounds(rounds)
    if has_died:  # not noticed yet
        h.transport.gone.add("a")
    ask(h, "b")
    h.run_out()
    if not has_died:
        assert h.rejected("rest", "a").code == "attached_elsewhere"
    assert not h.stream("rest").finals
    assert h.stream("r", client="b").tokens == expected_tokens(PROMPT, 20)


def test_an_engine_tells_when_a_client_has_asked_last_for_a_request_whose_tokens_it_has(monkeypatch):
    def told(name: str) -> dict[str, float]:
        h.run_rounds()
        return h.engine.lifecycle.describe_retained(m.RetainedArgs(name))

    h, now = Harness(), 1000.0
    monkeypatch.setattr("time.time", lambda: now)
    ask(h, request_id="rest", group="x", retain_s=0.0)
    assert told("x") == {"known": True, "kept_s": None} and told("r") == {"known": False, "kept_s": None}
    ask(h)
    h.run_rounds()
    now += 5.0
    assert told("r") == {"known": True, "kept_s": 5.0}
    hang_up(h)
    ask(h)
    assert told("r") == {"known": True, "kept_s": 0.0}


def test_a_rest_with_another_body_keeps_its_id():
    h = Harness()
    h.connect("b")
    ask(h, request_id="rest", group="r", retain_s=0.0, body="another")
    h.run_rounds(5)
    ask(h, "b")
    h.run_out()
    assert h.rejected("r", "b").code == "duplicate_request_id"
    assert h.stream("rest").tokens == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize("fields", [{"body": "another"}, {"retain_s": 0.0}])
def test_a_retained_id_with_another_body_or_without_retain_s_is_refused(fields):
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(3)
    ask(h, "b", **fields)
    h.run_out()
    assert h.rejected("r", "b").code == "duplicate_request_id"
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20)


def test_a_result_is_kept_for_retain_s_after_its_end_and_no_longer():
    h = Harness()
    ask(h)
    h.run_out()
    h.now += 9.0
    h.run_rounds()
    forget(h)
    ask(h)
    h.run_rounds()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20) and len(h.engine.retention) == 1
    h.now += 2.0
    h.run_rounds()
    assert not len(h.engine.retention)
    forget(h)
    ask(h)
    h.run_rounds(3)
    assert 0 < len(h.stream("r").tokens) < 20, "a new request"


def test_the_oldest_results_are_dropped_when_there_are_too_many():
    h = Harness(max_retained=2)
    for i in range(4):
        ask(h, request_id=f"r{i}", tokens=2)
        h.run_out()
    assert len(h.engine.retention) == 2
    assert_only_r3_is_retained(h, tokens=2)


def assert_only_r3_is_retained(h: Harness, tokens: int) -> None:
    """Assert that of r0 and r3 only the result of r3 is still there."""
    forget(h)
    for i in (3, 0):
        ask(h, request_id=f"r{i}", tokens=tokens)
    h.engine.run_once(block=False)
    assert h.stream("r3").finals and not h.stream("r0").finals


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_paused_engine_replays_a_retained_request(mode):
    h = detached(6)
    h.pause(mode=mode)
    forget(h)
    ask(h)
    h.run_rounds()
    seen = len(h.stream("r").tokens)
    assert seen >= 6 and h.rejected("r") is None
    h.resume()
    h.run_out()
    stream = h.stream("r")
    assert (stream.reason, len(stream.tokens)) == (("abort", seen) if mode == "abort" else ("length", 20))
    assert stream.tokens == expected_tokens(PROMPT, 20)[: len(stream.tokens)]


def test_the_spans_of_a_detached_request_name_the_weights_of_each_token():
    h = detached()
    h.update("/w1", version="v1")
    ask(h)
    h.run_out()
    versions = [span.version for span in h.stream("r").spans for _ in range(span.start, span.end)]
    assert versions == sorted(versions) and set(versions) == {"0", "v1"} and len(versions) == 20


def test_a_stop_string_found_before_the_disconnect_ends_the_replay_too():
    h = Harness()
    ask(h, n=2)
    h.run_rounds(5)
    h.send(m.CancelRequest("r", 0, "stop"))
    h.run_rounds(2)
    hang_up(h)
    ask(h, n=2)
    h.run_out()
    first, second = h.stream("r", 0), h.stream("r", 1)
    assert first.reason == "stop" and 0 < len(first.tokens) < 20
    assert second.reason == "length" and len(second.tokens) == 20


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_stop_string_that_the_api_server_found_is_replayed_after_the_tokens(rounds):
    """A replay of both at once would hide the last token, as if that token were a stop id."""
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(5)
    h.send(m.CancelRequest("r", 0, "stop"))
    h.run_rounds(rounds)
    ask(h, "b")
    h.run_rounds()
    tokens, end = (output for message in h.sent(m.Outputs, "b") for output in message.outputs)
    assert tokens.token_ids == h.stream("r", client="a").tokens and tokens.finish_reason is None
    assert end.finish_reason == "stop" and not end.token_ids


def test_two_clients_may_fetch_one_result_at_once():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_out()
    forget(h)
    ask(h, "b")
    ask(h, "a")
    h.run_rounds()
    for client in "ab":
        assert h.rejected("r", client) is None
        assert h.stream("r", client=client).tokens == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize("ended", [False, True])
def test_all_prompts_of_a_group_must_have_the_same_body(ended):
    h = Harness()
    ask(h, request_id="r-0", group="r")
    ask(h, request_id="r-1", group="r")
    h.run_out() if ended else h.run_rounds(3)
    ask(h, request_id="r-2", group="r", body="another")
    ask(h, request_id="r", body="another")
    h.run_rounds()
    assert [h.rejected(name).code for name in ("r-2", "r")] == ["duplicate_request_id"] * 2
    forget(h)
    for i in (0, 1):
        ask(h, request_id=f"r-{i}", group="r")
    h.run_out()
    h.run_rounds()
    assert h.stream("r-0").tokens == h.stream("r-1").tokens == expected_tokens(PROMPT, 20)


def test_a_reset_drops_retained_results():
    h = Harness()
    ask(h)
    h.run_out()
    h.ask(m.ResetArgs())
    assert not len(h.engine.retention)
    forget(h)
    ask(h)
    h.run_rounds(3)
    assert 0 < len(h.stream("r").tokens) < 20


def test_the_expiry_of_a_dropped_result_is_removed():
    h = Harness(max_retained=1)
    for i in range(2 * MIN_PRUNE + 3):
        ask(h, request_id=f"r{i}", tokens=1, retain_s=80000.0)
        h.engine.run_once(block=False)
    assert len(h.engine.retention) == 1 and len(h.engine.retention._expiries) <= 3


@pytest.mark.parametrize(("field", "value"), [("fingerprint", ""), ("retain_s", 1e9)])
def test_an_invalid_field_of_a_retained_request_is_refused(field, value):
    h = Harness()
    ask(h, **{field: value})
    h.run_rounds()
    assert h.rejected("r").detail["param"] == field


def test_an_abort_ends_a_detached_request_and_its_result_stays():
    h = detached()
    count = h.ask(m.AbortArgs(["r"])).result["aborted"][0]["output_token_count"]
    ask(h)
    h.run_rounds()
    assert h.stream("r").reason == "abort" and len(h.stream("r").tokens) == count > 0


ONE_RESULT = CHOICE_BYTES + len(PROMPT) * TOKEN_BYTES + 20 * (TOKEN_BYTES + LOGPROB_BYTES)


def with_room_for(h: Harness, nbytes: int) -> None:
    h.engine.retention._max_bytes = nbytes


def test_the_oldest_results_are_dropped_when_they_take_too_many_bytes():
    h = Harness()
    with_room_for(h, 2 * ONE_RESULT)
    for i in range(4):
        ask(h, request_id=f"r{i}")
        h.run_out()
    assert h.engine.retention.nbytes == 2 * ONE_RESULT and h.metric("retained_results_dropped") == 2
    assert_only_r3_is_retained(h, tokens=20)


def test_results_of_live_requests_displace_ended_ones_and_are_never_dropped():
    h = Harness()
    with_room_for(h, 2 * ONE_RESULT)
    ask(h, request_id="ended")
    h.run_out()
    ask(h, request_id="live", tokens=40)
    h.run_out()
    assert len(h.engine.retention) == 1
    with_room_for(h, ONE_RESULT // 2)
    ask(h, request_id="large", tokens=40)
    h.run_rounds(20)
    assert h.engine.lifecycle.requests.get("large") and len(h.engine.retention) == 1
    forget(h)
    ask(h, request_id="large", tokens=40)
    h.run_out()
    assert h.stream("large").tokens == expected_tokens(PROMPT, 40)


def test_a_retained_request_is_refused_while_live_results_take_all_memory():
    h = Harness()
    with_room_for(h, ONE_RESULT // 2)
    ask(h, request_id="live", tokens=40)
    h.run_rounds(20)
    ask(h, request_id="more")
    ask(h, request_id="plain", retain_s=0.0)
    h.run_rounds()
    failure = h.rejected("more")
    assert failure.code == "queue_full" and "--max-retained-mb" in failure.message and failure.detail["retry_after"]
    assert h.rejected("plain") is None
    h.run_out()
    ask(h, request_id="later", tokens=1)
    h.run_rounds()
    assert h.rejected("later") is None, "space is free again"
