"""Requests whose tokens are not sent one by one: nothing is lost, doubled or late where somebody must have it."""

from __future__ import annotations

from fastdeploy.core.request import FinishReason
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeRunner
from support.harness import PROMPT, Harness, Stream

INTERVAL_S, STEP_S = 1.0, 0.03125


def run(h: Harness, steps: int) -> None:
    """Run steps that take STEP_S each."""
    for _ in range(steps):
        h.now += STEP_S
        h.run_rounds()


def running(steps: int = 11, **fields) -> Harness:
    """Return a harness whose request "r" has tokens that wait for its interval."""
    h = Harness()
    h.add("r", PROMPT, max_tokens=40, output_interval_s=INTERVAL_S, **fields)
    run(h, steps)
    assert len(h.stream("r").tokens) < made(h), "some tokens wait"
    return h


def made(h: Harness, request_id: str = "r") -> int:
    """Return how many tokens the engine has made for a request."""
    return h.engine.lifecycle.requests.get(request_id)[0].num_output_tokens


def undisturbed(tokens: int, **fields) -> Stream:
    """Return a request whose tokens are sent one by one."""
    h = Harness()
    h.add("r", PROMPT, max_tokens=tokens, **fields)
    h.run_out()
    return h.stream("r")


def assert_delivered(stream: Stream, tokens: int) -> None:
    whole = undisturbed(tokens, logprobs=1)
    assert stream.tokens == whole.tokens
    assert stream.logprobs in (whole.logprobs, [])
    assert [(span.start, span.end) for span in stream.spans][-1][1] == tokens


def test_three_hundred_tokens_take_a_message_for_each_interval_and_are_those_of_a_stream():
    h = Harness(FakeRunner(max_model_len=512, num_blocks=128))
    h.add("r", PROMPT, max_tokens=300, output_interval_s=INTERVAL_S, logprobs=1)
    run(h, 305)
    messages = h.sent(m.Outputs)
    assert len(messages) <= 2 + 300 * STEP_S / INTERVAL_S
    assert len(messages[0].outputs[0].token_ids) == 1, "the first token is sent at once"
    streamed = Harness(FakeRunner(max_model_len=512, num_blocks=128))
    streamed.add("r", PROMPT, max_tokens=300, logprobs=1)
    streamed.run_out()
    one, other = h.stream("r"), streamed.stream("r")
    assert (one.tokens, one.logprobs, one.reason) == (other.tokens, other.logprobs, other.reason)
    assert all(len(message.outputs[0].spans) == 1 for message in messages), "spans of equal labels are one"
    assert len(streamed.sent(m.Outputs)) == 300


def test_requests_with_one_interval_share_their_messages():
    h = Harness()
    for i in range(4):
        h.add(f"r{i}", [*PROMPT, i], max_tokens=60, output_interval_s=INTERVAL_S)
        run(h, 3)
    seen = len(h.sent(m.Outputs))
    run(h, 32)
    assert [len(message.outputs) for message in h.sent(m.Outputs)[seen:]] == [4]


def test_an_abort_returns_all_tokens_that_were_made():
    h = running(logprobs=1)
    tokens = made(h)
    reply = h.ask(m.AbortArgs(request_ids=["r"]))
    assert reply.result["aborted"] == [{"request_id": "r", "output_token_count": tokens}]
    sent = h.transport.sent["a"]
    assert sent[-2].outputs[0].finish_reason == "abort" and sent[-1] is reply, "the tokens come before the reply"
    assert_delivered(h.stream("r"), tokens)


def test_a_pause_that_aborts_returns_all_tokens_that_were_made():
    h = running()
    tokens = made(h)
    reply = h.pause(mode="abort")
    assert reply.result["tokens_returned"] == tokens
    assert_delivered(h.stream("r"), tokens)


def test_a_pause_that_keeps_requests_has_delivered_all_tokens_before_its_fence():
    h = running()
    tokens = made(h)
    h.pause(mode="keep")
    sent = h.transport.sent["a"]
    kinds = [type(message) for message in sent]
    assert m.Outputs not in kinds[kinds.index(m.Fence) :]
    assert_delivered(h.stream("r"), tokens)
    h.resume()
    run(h, 60)
    assert_delivered(h.stream("r"), 40)


def test_a_pause_of_another_adapter_does_not_deliver_early():
    h = running()
    h.load_adapter("alice", 1)
    before = len(h.stream("r").tokens)
    h.pause(mode="keep", scope="adapter:alice")
    assert len(h.stream("r").tokens) == before


def test_a_deadline_returns_all_tokens_that_were_made():
    h = running(deadline_s=30.0)
    tokens = made(h)
    h.now += 31.0
    h.run_rounds()
    assert h.stream("r").finals[0].stop_reason == "deadline"
    assert_delivered(h.stream("r"), tokens)


def test_the_end_of_the_engine_returns_all_tokens_that_were_made():
    h = running()
    tokens = made(h)
    h.engine.lifecycle.end_all(FinishReason.ABORT, "the server is shutting down")
    assert_delivered(h.stream("r"), tokens)


def test_a_client_that_is_dismissed_has_all_tokens_that_were_made():
    h = running()
    tokens = made(h)
    h.engine.delivery.dismiss("a")
    assert_delivered(h.stream("r"), tokens)
    assert isinstance(h.transport.sent["a"][-1], m.Goodbye)


def test_a_stream_that_attaches_gets_what_waited_and_then_each_step():
    h = running(retain_s=60.0, fingerprint="f")
    tokens = made(h)
    h.connect("b")
    h.add("r", PROMPT, client="b", max_tokens=40, retain_s=60.0, fingerprint="f")
    run(h, 3)
    assert len(h.stream("r", client="b").tokens) == made(h) > tokens
    run(h, 60)
    assert_delivered(h.stream("r", client="b"), 40)


def test_new_weights_and_lost_kv_are_labelled_at_their_tokens():
    """The labels are those of a request whose tokens are sent one by one."""

    def labels(interval_s: float) -> list[tuple[int, int, int, bool]]:
        h = Harness()
        h.add("r", PROMPT, max_tokens=40, output_interval_s=interval_s)
        run(h, 6)
        h.update("w1")
        run(h, 6)
        h.ask(m.ResetCacheArgs(running=True))
        run(h, 60)
        whole = [(span.start, span.end, span.weight_epoch, span.recomputed) for span in h.stream("r").spans]
        merged = whole[:1]
        for span in whole[1:]:
            same = span[2:] == merged[-1][2:]
            merged[-1:] = [(merged[-1][0], span[1], *span[2:])] if same else [merged[-1], span]
        return merged

    assert labels(INTERVAL_S) == labels(0.0)
    assert [epoch for *_, epoch, _ in labels(INTERVAL_S)] == [0, 1, 1]


def test_a_preempted_request_keeps_the_tokens_that_wait():
    h = Harness(FakeRunner(num_blocks=6, block_size=4, max_model_len=24))
    h.add("first", PROMPT, max_tokens=16, output_interval_s=INTERVAL_S)
    h.add("second", PROMPT, max_tokens=16, output_interval_s=INTERVAL_S)
    run(h, 90)
    assert h.engine.scheduler.num_preemptions
    for name in ("first", "second"):
        assert h.stream(name).tokens == undisturbed(16).tokens
