"""Texts of errors: long or broken text of a client, and URLs with passwords."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import (
    MAX_MESSAGE_CHARS,
    MAX_NAME_CHARS,
    InvalidField,
    WeightUpdateRefused,
    from_wire,
    shown_url,
)


@pytest.mark.parametrize("text", ["n" * 10**6, "\ud800", "a" * 900 + "\udfff"], ids=["long", "half a pair", "both"])
def test_a_long_or_broken_message_is_shortened_and_can_be_encoded(text):
    error = WeightUpdateRefused(f"tensor {text}: is not a tensor of this model", tensor=text, nbytes=3)
    assert len(error.message) <= MAX_MESSAGE_CHARS and len(error.detail["tensor"]) <= MAX_NAME_CHARS
    assert error.message.startswith("tensor ") and error.message.endswith(": is not a tensor of this model")
    (error.message + error.detail["tensor"]).encode()
    again = from_wire(error.code, error.message, error.detail)
    assert (again.message, again.detail, str(again)) == (error.message, error.detail, error.message)


def test_a_long_field_name_is_shortened():
    error = InvalidField("f" * 10**6, "unknown field")
    assert error.field == error.detail["param"] and len(error.field) <= MAX_NAME_CHARS
    assert error.message.endswith("unknown field")


def test_a_short_message_is_unchanged():
    error = InvalidField("kv", "expected keep or recompute, got 'größer'")
    assert error.message == "kv: expected keep or recompute, got 'größer'" and error.field == "kv"


@pytest.mark.parametrize("url", ["http://me:secret@host:1/v1", "http://me:sec/r@et@host:1/v1", "http://host:1/v1"])
def test_a_url_is_shown_without_user_and_password(url):
    assert shown_url(url) == "http://host:1/v1"
    assert shown_url("me:secret@host") == "host"
