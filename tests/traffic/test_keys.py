"""The removal of keys: none is left, and nothing else is changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.traffic.keys import REMOVED, KeyRemover
from support.search import examples

SECRET_NAMES = st.sampled_from(
    ["api_key", "apiKey", "API-KEY", "openai_api_key", "access_token", "token", "Authorization", "hf_token",
     "control_key", "client_secret", "password", "x-api-key"]
)  # fmt: skip
# Keys of an alphabet of their own, so that they are not in other texts by chance.
KEYS = st.text('ΣΩжя"\\/&%+ é', min_size=8, max_size=20)
PLAIN_NAMES = st.sampled_from(["prompt", "max_tokens", "content", "logprobs", "tokens", "key", "model", "author"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab {}[]:,'", max_size=12)


def trees(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN_NAMES, inner, max_size=3),
        max_leaves=8,
    )


@examples(80)
@given(trees(SCALARS), st.lists(st.tuples(SECRET_NAMES, KEYS), min_size=1, max_size=3), st.data())
def test_a_key_in_json_is_removed_at_every_depth_and_wherever_it_stands_again(tree, keys, data):
    body = {"plain": tree, "again": f"no such key: {keys[0][1]}"}
    for name, key in keys:
        wrapped = data.draw(st.sampled_from([key, [key], {"value": key}]))
        body = data.draw(st.sampled_from([{name: wrapped, "a": body}, {"a": [1, body, {name: wrapped}]}]))
    ascii_only = data.draw(st.booleans())
    cleaned = KeyRemover().body(json.dumps(body, ensure_ascii=ascii_only).encode(), side_is_reply=False)
    text = json.dumps(json.loads(cleaned), ensure_ascii=False)
    for _, key in keys:
        assert json.dumps(key, ensure_ascii=False)[1:-1] not in text
    assert REMOVED in text


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"body": json.dumps({"first": "x", "api_key": "ΣΩжяΣΩжя"})}),
        json.dumps({"pwd": "ΣΩжяΣΩжя"}),
        "client_secret=ΣΩжяΣΩжя&grant=1",
        "grant=1&cl%69ent_secret=ΣΩжяΣΩжя",
    ],
)
def test_a_key_in_json_as_text_and_in_each_field_of_a_form_is_removed(text):
    cleaned = KeyRemover().body(text.replace("ΣΩжя", "wxyz").encode(), side_is_reply=False).decode()
    assert "wxyz" not in cleaned and REMOVED in cleaned


def test_of_a_cookie_that_is_set_the_value_is_a_key_and_its_attributes_are_not():
    remover = KeyRemover()
    assert remover.headers([("Set-Cookie", "sid=abcdefghij; Path=/v1/completions; SameSite=Strict")])[0][1] == REMOVED
    assert remover.known(b"sid abcdefghij, POST /v1/completions") == f"sid {REMOVED}, POST /v1/completions".encode()


@examples(40)
@given(trees(SCALARS))
def test_json_without_keys_is_unchanged_to_the_byte(tree):
    body = json.dumps({"api_keys_in_use": None, "password": "", "rest": tree}, indent=1).encode()
    assert KeyRemover().body(body, side_is_reply=True) == body


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"logprobs": {"content": [{"token": "Hello you", "logprob": -1.0}]}}]},
        {"max_tokens": 12345678, "stop_token_ids": [1], "eos_token": "<|endoftext|>", "tokens": ["abcdefghij"]},
        {"prompt": "the key of C, a token? secret: none. a=b&c=d me@host"},
    ],
)
def test_words_that_only_look_like_keys_stay(body):
    raw = json.dumps(body).encode()
    assert KeyRemover().body(raw, side_is_reply=True) == raw


def test_a_short_value_is_removed_only_where_its_name_says_what_it_is():
    remover = KeyRemover()
    assert remover.headers([("authorization", "Bearer none"), ("x", "none")]) == [
        ("authorization", REMOVED),
        ("x", "none"),
    ]
    assert remover.body(b'{"api_key": "none", "tool_choice": "none"}', False) == (
        b'{"api_key": "[removed]", "tool_choice": "none"}'
    )


def test_json_that_is_nested_too_deeply_is_removed_as_a_whole():
    body = b'{"api_key": "12345678", "a": ' + b"[" * 5000 + b"]" * 5000 + b"}"
    assert KeyRemover().body(body, side_is_reply=False) == REMOVED.encode()


@pytest.mark.parametrize(
    ("target", "cleaned"),
    [
        ("/v1/x?api_key=12345678&n=1", "/v1/x?api_key=[removed]&n=1"),
        ("/x?api%5Fkey=1&key=2&max_tokens=3", "/x?api%5Fkey=[removed]&key=[removed]&max_tokens=3"),
        ("/x?url=http://me:pass@host/", "/x?url=http://[removed]@host/"),
        ("/x?a=1&&b", "/x?a=1&&b"),
    ],
)
def test_a_query_keeps_all_but_its_keys(target, cleaned):
    assert KeyRemover().target(target) == cleaned
