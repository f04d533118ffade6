"""The streamed text is the decoding of all ids, for every kind of tokenizer."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.client.choice import Choice, TextOptions
from fastdeploy.client.detokenizer import IncrementalDecoder
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.inter_communicator.messages import Output
from support.search import examples
from support.tokenizers_of_all_kinds import KINDS, make_tokenizer, telling_ids


@pytest.fixture(scope="module", params=list(KINDS))
def any_tokenizer(request, tmp_path_factory) -> Tokenizer:
    return make_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


def behind(tokenizer: Tokenizer, ids: list[int], cut: int, skip: bool) -> str:
    """Return the decoding of all ids without that of the first ``cut``. A character over the cut counts behind it."""
    before, whole = tokenizer.decode(ids[:cut], skip), tokenizer.decode(ids, skip)
    return whole[len(os.path.commonprefix((before, whole))) :]


def streamed(tokenizer: Tokenizer, ids: list[int], cut: int, at_once: int, skip: bool) -> str:
    """Return the text behind the first ``cut`` ids, of which ``at_once`` come together and the others one by one."""
    decoder = IncrementalDecoder(tokenizer, ids, skip, cut)
    text = decoder.extend(ids[cut : cut + at_once]) if at_once else ""
    return text + "".join(map(decoder.push, ids[cut + at_once :])) + decoder.rest()


@examples(60)
@given(data=st.data(), skip=st.booleans())
def test_the_streamed_text_is_the_decoding_of_all_ids_at_every_cut(any_tokenizer, data, skip):
    ids = data.draw(st.lists(st.sampled_from(telling_ids(any_tokenizer)), max_size=14))
    for cut in range(len(ids) + 1):
        wanted = behind(any_tokenizer, ids, cut, skip)
        for at_once in {0, 1, (len(ids) - cut) // 2, len(ids) - cut}:
            assert streamed(any_tokenizer, ids, cut, at_once, skip) == wanted, (ids, cut, at_once)


@examples(100)
@given(
    data=st.data(),
    stops=st.lists(st.text(alphabet="ab é😀.", min_size=1, max_size=3), min_size=1, max_size=2),
    options=st.fixed_dictionaries({"skip_special_tokens": st.booleans(), "include_stop": st.booleans()}),
)
def test_a_stop_string_ends_the_choice_at_the_token_that_completes_it(any_tokenizer, data, stops, options):
    """A stop string may begin with the space that follows a special token, and may consist of byte tokens."""
    ids = data.draw(st.lists(st.sampled_from(telling_ids(any_tokenizer)), max_size=14))
    told = [
        i + 1 for i, token in enumerate(ids) if token not in any_tokenizer.byte_tokens and any_tokenizer.decode([token])
    ]
    cut = data.draw(st.sampled_from([0, *told]))  # of a prompt whose text no later token changes
    choice, shown = Choice(any_tokenizer, ids[:cut], TextOptions(tuple(stops), **options)), ""
    for token in ids[cut:]:
        if choice.finish_reason is None:
            shown += choice.feed(Output("r", 0, [token])).text
    if choice.finish_reason is None:
        shown += choice.feed(Output("r", 0, finish_reason="length")).text
    assert shown == choice.text
    for end in range(cut, len(ids) + 1):
        text = behind(any_tokenizer, ids[:end], cut, options["skip_special_tokens"])
        if hits := [(text.index(stop), order) for order, stop in enumerate(stops) if stop in text]:
            start, order = min(hits)
            length = len(stops[order]) if options["include_stop"] else 0
            assert (choice.stop_reason, choice.token_ids) == (stops[order], ids[cut:end])
            assert choice.text == text[: start + length]
            return
    assert (choice.finish_reason, choice.token_ids, choice.text) == ("length", ids[cut:], text)


@pytest.mark.parametrize(
    ("pieces", "stop", "taken", "text"),
    [
        pytest.param(["a", "</s>", "▁a", "."], " a", 3, "a", id="the space after a skipped special token"),
        pytest.param(["a", "</s>", "▁a", "."], "</s> a", 4, "a a.", id="a skipped token is no text"),
        pytest.param(["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xF0>"], "😀", 5, "a", id="bytes"),
        pytest.param(["<0x61>", "<0x61>", "<0xFF>", "a"], "aa", 2, "", id="bytes that a later one would have made bad"),
        pytest.param(["<0x61>", "<0xFF>", "<0x61>", "a", "a"], "aa", 5, "\ufffd" * 3, id="bytes beside a bad one"),
    ],
)
def test_stop_strings_of_sentence_piece(tmp_path, pieces, stop, taken, text):
    tokenizer = make_tokenizer("llama", tmp_path)
    ids = [tokenizer._hf.get_vocab()[piece] for piece in pieces]
    choice = Choice(tokenizer, [], TextOptions((stop,)))
    for token in ids:
        if choice.finish_reason is None:
            choice.feed(Output("r", 0, [token]))
    if choice.finish_reason is None:
        choice.feed(Output("r", 0, finish_reason="length"))
    assert (len(choice.token_ids), choice.text) == (taken, text)


@pytest.mark.parametrize("at_once", [False, True])
def test_the_work_for_a_token_does_not_grow_with_the_text(any_tokenizer, monkeypatch, at_once):
    """Count the ids that are decoded: the count is the same on every machine."""
    decoded: list[int] = []
    decode = any_tokenizer.decode
    monkeypatch.setattr(any_tokenizer, "decode", lambda ids, skip: decoded.append(len(ids)) or decode(ids, skip))
    ids = (telling_ids(any_tokenizer) * 1000)[:3000] + list(any_tokenizer.byte_tokens) * 12
    decoder = IncrementalDecoder(any_tokenizer, [])
    if at_once:
        decoder.extend(ids)
    else:
        for token in ids:
            decoder.push(token)
    decoder.rest()
    assert len(ids) / 2 < sum(decoded) <= 12 * len(ids)
