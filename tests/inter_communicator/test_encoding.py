"""Encoding of messages with text or numbers that cannot be encoded."""

from __future__ import annotations

import msgspec
import pytest

from fastdeploy.core.outputs import Logprob
from fastdeploy.inter_communicator import messages as m
from fastdeploy.inter_communicator.zmq_transport import encode


def sent(message: m.ToClient) -> m.ToClient:
    return msgspec.msgpack.decode(encode(message), type=m.ToClient)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            m.Reply(1, {"a\ud800": ["\udcff", 1.5, None]}, m.Failure("c", "tensor '\ud800'", {"param": "\udc80"})),
            m.Reply(1, {"a?": ["?", 1.5, None]}, m.Failure("c", "tensor '?'", {"param": "?"})),
        ),
        (m.Rejected("r", m.Failure("c", "\ud800 é")), m.Rejected("r", m.Failure("c", "? é"))),
        (
            m.Outputs(
                [m.Output("r", 0, [5], [Logprob.of(-1.0, ((7, -2.0),))], finish_reason="abort", message="\ud800")]
            ),
            m.Outputs([m.Output("r", 0, [5], [Logprob.of(-1.0, ((7, -2.0),))], finish_reason="abort", message="?")]),
        ),
    ],
)
def test_text_that_utf_8_cannot_hold_is_replaced_and_the_rest_is_whole(message, expected):
    assert sent(message) == expected


@pytest.mark.parametrize("value", [2**70, object(), "\ud800" + str(2**70)])
def test_a_reply_that_cannot_be_encoded_becomes_an_error_to_the_same_caller(value):
    result = {"nbytes": value, "big": 2**70}
    reply = sent(m.Reply(7, result))
    assert (reply.call_id, reply.result, reply.failure.code) == (7, {}, "internal_error")
    rejected = sent(m.Rejected("r", m.Failure("c", "m", result)))
    assert (rejected.request_id, rejected.failure.code) == ("r", "internal_error")


def test_an_output_that_cannot_be_encoded_raises():
    with pytest.raises(OverflowError):
        encode(m.Outputs([m.Output("r", 0, [2**70])]))
