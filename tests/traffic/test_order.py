"""Which requests came on the other side of a control call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.traffic.order import Span, flips, is_control
from support.search import examples

TIMES = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@examples(150)
@given(st.lists(st.tuples(st.booleans(), TIMES, TIMES), max_size=7))
def test_the_requests_that_are_found_are_those_of_a_comparison_of_all_pairs(drawn):
    spans = [Span(str(index), *fields) for index, fields in enumerate(drawn)]
    found = {(flip.request.name, flip.call.name, flip.after) for flip in flips(spans)}
    all_pairs = set()
    for one in spans:
        for call in (span for span in spans if span.control):
            if call.recorded[1] < one.recorded[0] and one.now[1] < call.now[0]:
                all_pairs.add((one.name, call.name, False))
            if one.recorded[1] < call.recorded[0] and call.now[1] < one.now[0] and not one.control:
                all_pairs.add((one.name, call.name, True))
    assert found <= all_pairs
    assert {name for name, _, _ in found} == {name for name, _, _ in all_pairs}


def test_the_control_calls_are_those_that_change_the_engine():
    calls = ("/pause", "/v1/resume", "/pause_generation", "/continue_generation", "/update_weights_from_disk",
             "/v1/weights/commit", "/v1/load_lora_adapter", "/wake_up", "/flush_cache", "/abort_request")  # fmt: skip
    assert all(is_control("POST", path) for path in calls)
    others = (("POST", "/v1/chat/completions"), ("POST", "/generate"), ("GET", "/v1/weights"), ("POST", "/v1/renew"))
    assert not any(is_control(*one) for one in others)
