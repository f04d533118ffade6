"""A request with retain_s outlives its client, and is never run twice (known failure 19)."""

from __future__ import annotations

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.retention import CHOICE_BYTES, LOGPROB_BYTES, MIN_PRUNE, TOKEN_BYTES
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness


def ask(h: Harness, client: str = "a", body: str = "body", tokens: int = 20, n: int = 1, **fields) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
    fields = {"request_id": "r", "retain_s": 10.0, **fields}
    h.send(AddRequest(prompt_token_ids=PROMPT, sampling=params, n=n, fingerprint=body, **fields), client)


def hang_up(h: Harness, client: str = "a") -> None:
    h.send(m.CancelRequest("r"), client)


def replay(h: Harness, client: str) -> None:
    """What this client saw before it hung up is not part of what it sees now."""
    h.transport.sent[client].clear()


@pytest.mark.parametrize("client", ["a", "b"])
@pytest.mark.parametrize("rounds", [1, 4, 40])
def test_sent_again_it_gets_every_token_once_and_nothing_is_computed_twice(client, rounds):
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(rounds)
    hang_up(h)
    h.run_rounds(3)
    replay(h, "a")
    ask(h, client)
    h.run_out()
    h.run_rounds()
    stream = h.stream("r", client=client)
    assert stream.tokens == expected_tokens(PROMPT, 20) and stream.reason == "length"
    assert len(stream.logprobs) == 20
    assert [i for span in stream.spans for i in range(span.start, span.end)] == list(range(20))
    assert h.runner.computed_tokens == len(PROMPT) + 19


def test_it_survives_the_death_of_its_api_server():
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


def test_without_retain_s_a_hang_up_cancels():
    h = Harness()
    ask(h, retain_s=0.0)
    h.run_rounds(4)
    hang_up(h)
    h.run_rounds()
    assert not len(h.engine.lifecycle.requests) and h.runner.computed_tokens < len(PROMPT) + 8


def test_a_later_request_takes_over_and_the_earlier_is_told():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(5)
    ask(h, "b")
    h.run_out()
    assert h.rejected("r", "a").code == "attached_elsewhere"
    assert h.stream("r", client="b").tokens == expected_tokens(PROMPT, 20)
    assert not h.stream("r", client="a").finals


@pytest.mark.parametrize("fields", [{"body": "another"}, {"retain_s": 0.0}])
def test_the_id_with_another_body_or_without_retain_s_is_refused(fields):
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
    replay(h, "a")
    ask(h)
    h.run_rounds()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 20) and len(h.engine.retention) == 1
    h.now += 2.0
    h.run_rounds()
    assert not len(h.engine.retention)
    replay(h, "a")
    ask(h)
    h.run_rounds(3)
    assert 0 < len(h.stream("r").tokens) < 20, "it is a new request"


def test_the_oldest_results_go_first_when_there_are_too_many():
    h = Harness(max_retained=2)
    for i in range(4):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        h.send(AddRequest(f"r{i}", PROMPT, params, retain_s=100.0, fingerprint="f"))
        h.run_out()
    assert len(h.engine.retention) == 2
    h.transport.sent["a"].clear()
    for i in (0, 3):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        h.send(AddRequest(f"r{i}", PROMPT, params, retain_s=100.0, fingerprint="f"))
    h.engine.run_once(block=False)
    assert h.stream("r3").finals and not h.stream("r0").finals


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_attaching_is_no_new_request_to_a_paused_engine(mode):
    h = Harness()
    ask(h)
    h.run_rounds(6)
    hang_up(h)
    h.run_rounds()
    h.pause(mode=mode)
    replay(h, "a")
    ask(h)
    h.run_rounds()
    seen = len(h.stream("r").tokens)
    assert seen >= 6 and h.rejected("r") is None
    h.resume()
    h.run_out()
    stream = h.stream("r")
    assert stream.reason == ("abort" if mode == "abort" else "length")
    assert stream.tokens == expected_tokens(PROMPT, 20)[: len(stream.tokens)]
    assert len(stream.tokens) == (seen if mode == "abort" else 20)


def test_the_spans_of_a_detached_request_say_which_weights_made_what():
    h = Harness()
    ask(h)
    h.run_rounds(5)
    hang_up(h)
    h.run_rounds()
    h.update("/w1", version="v1")
    replay(h, "a")
    ask(h)
    h.run_out()
    versions = [span.version for span in h.stream("r").spans for _ in range(span.start, span.end)]
    assert versions == sorted(versions) and set(versions) == {"0", "v1"} and len(versions) == 20


def test_a_stop_string_found_before_the_hang_up_ends_the_replay_too():
    h = Harness()
    ask(h, n=2)
    h.run_rounds(5)
    h.send(m.CancelRequest("r", 0, "stop"))
    h.run_rounds(2)
    hang_up(h)
    h.run_rounds()
    replay(h, "a")
    ask(h, n=2)
    h.run_out()
    first, second = h.stream("r", 0), h.stream("r", 1)
    assert first.reason == "stop" and 0 < len(first.tokens) < 20
    assert second.reason == "length" and len(second.tokens) == 20


def test_an_end_that_the_api_server_found_is_replayed_apart_from_the_tokens():
    """Else the last token, which completed the stop string, would be taken for a stop id and be no text."""
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(5)
    h.send(m.CancelRequest("r", 0, "stop"))
    h.run_rounds()
    ask(h, "b")
    h.run_rounds()
    tokens, end = (o for x in h.transport.sent["b"] if isinstance(x, m.Outputs) for o in x.outputs)
    assert tokens.token_ids == h.stream("r", client="a").tokens and tokens.finish_reason is None
    assert end.finish_reason == "stop" and not end.token_ids


def test_who_attaches_in_the_moment_of_a_stop_is_told_of_the_end():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_rounds(5)
    h.send(m.CancelRequest("r", 0, "stop"))
    ask(h, "b")
    h.run_rounds()
    assert h.stream("r", client="b").reason == "stop"


def test_a_result_may_be_fetched_by_several_at_once_and_nobody_is_turned_away():
    h = Harness()
    h.connect("b")
    ask(h)
    h.run_out()
    replay(h, "a")
    ask(h, "b")
    ask(h, "a")
    h.run_rounds()
    assert h.rejected("r", "a") is None and h.rejected("r", "b") is None
    for client in "ab":
        assert h.stream("r", client=client).tokens == expected_tokens(PROMPT, 20)


@pytest.mark.parametrize("ended", [False, True])
def test_prompts_sent_together_belong_to_one_body(ended):
    h = Harness()
    ask(h, request_id="r-0", group="r")
    ask(h, request_id="r-1", group="r")
    h.run_out() if ended else h.run_rounds(3)
    ask(h, request_id="r-2", group="r", body="another")
    ask(h, request_id="r", body="another")
    h.run_rounds()
    assert [h.rejected(name).code for name in ("r-2", "r")] == ["duplicate_request_id"] * 2
    replay(h, "a")
    for i in (0, 1):
        ask(h, request_id=f"r-{i}", group="r")
    h.run_out()
    h.run_rounds()
    assert h.stream("r-0").tokens == h.stream("r-1").tokens == expected_tokens(PROMPT, 20)


def test_a_trainer_that_starts_over_gets_no_answer_of_its_run_before():
    h = Harness()
    ask(h)
    h.run_out()
    h.ask(m.ResetArgs())
    assert not len(h.engine.retention)
    replay(h, "a")
    ask(h)
    h.run_rounds(3)
    assert 0 < len(h.stream("r").tokens) < 20


def test_what_was_dropped_before_its_time_is_forgotten_altogether():
    h = Harness(max_retained=1)
    for i in range(2 * MIN_PRUNE + 3):
        ask(h, request_id=f"r{i}", tokens=1, retain_s=80000.0)
        h.engine.run_once(block=False)
    assert len(h.engine.retention) == 1 and len(h.engine.retention._expiries) <= 3


def test_a_retained_request_without_a_fingerprint_is_refused():
    h = Harness()
    ask(h, body="")
    h.run_rounds()
    assert h.rejected("r").detail["param"] == "fingerprint"


def test_an_abort_ends_a_detached_request_and_its_result_stays():
    h = Harness()
    ask(h)
    h.run_rounds(5)
    hang_up(h)
    h.run_rounds()
    count = h.ask(m.AbortArgs(["r"])).result["aborted"][0]["output_token_count"]
    replay(h, "a")
    ask(h)
    h.run_rounds()
    assert h.stream("r").reason == "abort" and len(h.stream("r").tokens) == count > 0


def test_retain_s_out_of_range_is_refused():
    h = Harness()
    ask(h, retain_s=1e9)
    h.run_rounds()
    assert h.rejected("r").detail["param"] == "retain_s"


ONE_RESULT = CHOICE_BYTES + len(PROMPT) * TOKEN_BYTES + 20 * (TOKEN_BYTES + LOGPROB_BYTES)


def with_room_for(h: Harness, nbytes: int) -> None:
    h.engine.retention._max_bytes = nbytes


def test_the_oldest_results_go_first_when_they_take_too_many_bytes():
    h = Harness()
    with_room_for(h, 2 * ONE_RESULT)
    for i in range(4):
        ask(h, request_id=f"r{i}")
        h.run_out()
    assert h.engine.retention.nbytes == 2 * ONE_RESULT
    assert h.metric("retained_results_dropped") == 2
    replay(h, "a")
    for i in (3, 0):
        ask(h, request_id=f"r{i}")
    h.engine.run_once(block=False)
    assert h.stream("r3").finals and not h.stream("r0").finals, "r0 is a new request"


def test_results_of_live_requests_count_and_push_ended_ones_out_but_are_never_dropped():
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
    replay(h, "a")
    ask(h, request_id="large", tokens=40)
    h.run_out()
    assert h.stream("large").tokens == expected_tokens(PROMPT, 40)


def test_while_live_results_take_all_memory_further_ones_are_refused_with_the_reason():
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
    assert h.rejected("later") is None, "there is room again"
