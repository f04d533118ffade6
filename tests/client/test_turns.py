"""The prompt of a later turn begins with the known ids of the turn before, whatever the chat template does to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fastdeploy.client.tokenizer import Tokenizer, _byte_alphabet
from fastdeploy.client.turns import KnownTurn, common_beginning, extend
from fastdeploy.core.errors import InvalidField

# As Qwen3: the reasoning of earlier turns is left out, tool calls are written anew, tool results are a user's.
CHATML = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<start>user\n<result>{{ m.content }}</result>"
    "{% else %}<start>{{ m.role }}\n"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content }}<call>{{ c.function.name }}</call>{% endfor %}"
    "{% endif %}{% if not (loop.last and continued) %}{{ '<end>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\\n' }}{% endif %}"
)
# As GLM: a turn has no end of its own. The model samples the beginning of the next message, and stops there.
OPENINGS = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
# As gpt-oss: a turn ends in one way as the last message, and in another way before later messages.
TWO_ENDS = (
    "{% for m in messages %}<start>{{ m.role }}<message>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<return>{% else %}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% endif %}"
)
# As Llama 3.1: a message with a tool call has no text.
CALL_ONLY = (
    "{% for m in messages %}<start>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
)
# As Mistral: a message has a text or a tool call.
ONE_OF_BOTH = CALL_ONLY.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.tool_calls and m.content %}{{ raise_exception('two contents') }}{% endif %}",
)
# As Gemma 4: the text of a message follows the results of its tool calls, which open with the token that ended it.
TEXT_LAST = (
    "{% for m in messages %}{% if m.role != 'tool' %}<start>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<return>"
    "{% for r in messages[loop.index:] %}{{ r.content if r.role == 'tool' }}{% endfor %}{% endif %}"
    "{% if m.content %}{{ m.content }}<end>{% endif %}{% endif %}{% endfor %}"
)
# As gpt-oss: a message with a tool call has a text or a reasoning, and only the last message has a reasoning.
REASONED = (
    "{% for m in messages %}"
    "{% if m.tool_calls and m.content and m.reasoning_content %}{{ raise_exception('two contents') }}{% endif %}"
    "<start>{{ m.role }}\n{{ m.reasoning_content if loop.last }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<end>{% endfor %}"
)
# Writes a tool call only while its result is not known.
REWRITTEN = (
    "{% for m in messages %}{% if m.tool_calls and loop.last %}<start>calls{{ m.tool_calls[0].function.name }}<end>"
    "{% elif not m.tool_calls %}<start>{{ m.content }}<end>{% endif %}{% endfor %}"
)
REFUSING = "{% for m in messages %}{% if m.role == 'evil' %}{{ raise_exception('no evil') }}{% endif %}{% endfor %}"
SPECIALS = ["<start>", "<end>", "<return>", "<message>", "<user>", "<assistant>", "<tool>", "<bot>", "<eos>"]
CALL = {"function": {"name": "add", "arguments": "{}"}}
ASK, MORE = {"role": "user", "content": "1+1?"}, {"role": "user", "content": "more"}
RESULT = {"role": "tool", "content": "2"}


def make(folder, template: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    vocab = _byte_alphabet()
    merges = [("m", "o"), ("mo", "r"), ("o", "r")]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Tokenizer(str(folder))


def ids_of(tokenizer: Tokenizer, *texts: str) -> list[int]:
    return [token for text in texts for token in tokenizer.encode_now(text, add_special_tokens=False)]


def extended(
    tokenizer: Tokenizer, turn: list[dict], new: list[dict], known: list[int], **options: Any
) -> list[int] | None:
    template = {"add_generation_prompt": True, "continue_final_message": False, "variables": {}} | options
    ends = ids_of(tokenizer, "<eos><end><return><user><tool>")
    return asyncio.run(extend(tokenizer, turn + new, KnownTurn(len(turn), known), ends, **template))


NEXT = "<start>user\nmore<end>\n<start>assistant\n"
RESULTED = "<start>user\n<result>2</result><end>\n<start>assistant\n"
TURNS = {
    "text": ({"content": "2"}, MORE, NEXT),
    "text that was sampled in other words": ({"content": "mor", "reasoning_content": "hm"}, MORE, NEXT),
    "an empty text": ({"content": ""}, MORE, NEXT),
    "a text like an end": ({"content": "<end>\n<start>user\nmore"}, MORE, NEXT),
    "a tool call": ({"content": "", "tool_calls": [CALL]}, RESULT, RESULTED),
    "text and tool calls": ({"content": "so", "tool_calls": [CALL, CALL]}, RESULT, RESULTED),
    "a tool call without its result": ({"content": "", "tool_calls": [CALL]}, MORE, NEXT),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize(
    ("sampled", "between"), [(["<end>"], "\n"), ([], "<end>\n"), (["<eos>"], "\n"), (["m", "or"], "<end>\n")],
    ids=["ended", "cut", "ended by another token", "cut within a word"],
)  # fmt: skip
def test_the_known_ids_come_first_and_the_end_of_the_turn_once(tmp_path, name, sampled, between):
    tokenizer = make(tmp_path, CHATML)
    message, new, rest = TURNS[name]
    known = [77, *ids_of(tokenizer, *sampled)]
    got = extended(tokenizer, [ASK, {"role": "assistant", **message}], [new], known)
    assert got == known + ids_of(tokenizer, between + rest)


def test_the_ids_are_those_of_the_whole_text_if_the_model_sampled_as_the_tokenizer_does(tmp_path):
    tokenizer = make(tmp_path, CHATML)
    turn = [ASK, {"role": "assistant", "content": "2"}]
    known = ids_of(tokenizer, "<start>user\n1+1?<end>\n<start>assistant\n2<end>")
    whole = asyncio.run(tokenizer.chat_text([*turn, MORE], True, False, {}))
    assert extended(tokenizer, turn, [MORE], known) == ids_of(tokenizer, whole)


@pytest.mark.parametrize(
    ("template", "sampled", "rest"),
    [
        (OPENINGS, "2<user>", "\nmore<bot>"),
        (OPENINGS, "2<tool>", "<user>\nmore<bot>"),
        (OPENINGS, "2", "<user>\nmore<bot>"),
        (TWO_ENDS, "2<return>", "<start>user<message>more<end><start>assistant"),
        (TWO_ENDS, "2", "<end><start>user<message>more<end><start>assistant"),
    ],
)
def test_a_template_without_ends_or_with_two_kinds_of_them(tmp_path, template, sampled, rest):
    tokenizer = make(tmp_path, template)
    known = ids_of(tokenizer, sampled)
    got = extended(tokenizer, [ASK, {"role": "assistant", "content": "2"}], [MORE], known)
    assert got == known + ids_of(tokenizer, rest)


@pytest.mark.parametrize(("template", "content"), [(CALL_ONLY, "x"), (ONE_OF_BOTH, "")])
def test_a_template_that_writes_a_tool_call_in_place_of_the_text(tmp_path, template, content):
    tokenizer = make(tmp_path, template)
    known = ids_of(tokenizer, "add<end>")
    got = extended(tokenizer, [ASK, {"role": "assistant", "content": content, "tool_calls": [CALL]}], [RESULT], known)
    assert got == known + ids_of(tokenizer, "<start>tool\n2<end><start>assistant\n")


def test_a_template_that_writes_the_text_behind_the_results_of_its_tool_calls(tmp_path):
    tokenizer = make(tmp_path, TEXT_LAST)
    known = ids_of(tokenizer, "add<return>")
    got = extended(tokenizer, [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}], [RESULT], known)
    assert got == known + ids_of(tokenizer, "2")


def test_a_template_that_takes_no_text_beside_reasoning(tmp_path):
    tokenizer = make(tmp_path, REASONED)
    turn = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}
    assert extended(tokenizer, [ASK, turn], [RESULT], [77]) == [77, *ids_of(tokenizer, "<end><start>tool\n2<end>")]


def test_none_if_the_template_writes_the_turn_in_another_way_once_messages_follow(tmp_path):
    tokenizer = make(tmp_path, REWRITTEN)
    turn = [ASK, {"role": "assistant", "content": "x", "tool_calls": [CALL]}]
    assert extended(tokenizer, turn, [RESULT], [1]) is None


def test_a_turn_that_is_continued_is_its_ids_alone(tmp_path):
    tokenizer = make(tmp_path, CHATML)
    options = {"add_generation_prompt": False, "variables": {"continued": True}}
    assert extended(tokenizer, [ASK, {"role": "assistant", "content": "2"}], [], [77, 78], **options) == [77, 78]


def test_a_conversation_that_the_template_refuses_is_an_error(tmp_path):
    tokenizer = make(tmp_path, REFUSING)
    with pytest.raises(InvalidField, match="no evil"):
        extended(tokenizer, [ASK, {"role": "assistant", "content": "2"}], [{"role": "evil", "content": ""}], [1])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("", "x", ""), ("abc", "abd", "ab"), ("ab", "abc", "ab"), ("xab", "ab", ""), ("é", "é", "é")],
)
@st.composite
def turns(draw) -> list[tuple[str, str, bool]]:
    """Draw turns: what is asked, what is sampled, and whether the turn was cut before its end."""
    text = st.text(st.sampled_from("more \n<end>é"), max_size=8)
    return draw(st.lists(st.tuples(text, text, st.booleans()), min_size=1, max_size=4))


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> Tokenizer:
    return make(tmp_path_factory.mktemp("chatml"), CHATML)


@given(turns())
def test_each_turn_of_a_conversation_begins_with_the_ids_of_the_turn_before_and_has_the_text_of_all(chatml, drawn):
    """The sampled tokens are single bytes, which the tokenizer would merge."""
    messages: list[dict] = []
    known: list[int] = []
    for asked, sampled, cut in drawn:
        messages.append({"role": "user", "content": asked})
        whole = asyncio.run(chatml.chat_text(messages, True, False, {}))
        prompt = extended(chatml, messages[:-1], messages[-1:], known) if known else ids_of(chatml, whole)
        assert prompt is not None and prompt[: len(known)] == known
        assert chatml.decode(prompt, skip_special_tokens=False) == whole
        messages.append({"role": "assistant", "content": sampled})
        known = prompt + [*sampled.encode()] + ([] if cut else ids_of(chatml, "<end>"))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [("", "x", ""), ("abc", "abd", "ab"), ("ab", "abc", "ab"), ("xab", "ab", ""), ("é", "é", "é")],
)
def test_what_two_texts_begin_with(a, b, expected):
    assert common_beginning(a, b) == common_beginning(b, a) == expected
