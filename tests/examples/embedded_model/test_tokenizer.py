"""The tokenizer keeps any text, and every way of making a prompt gives the ids that training used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from examples.embedded_model import tokenizer
from fastdeploy.embedded import MODEL_DIR
from support.torch_generation import tokenize
from support.torch_process import TorchProcess

COMMITTED = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
TEXT = st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\t#+=0129<|>")))


@given(TEXT)
def test_any_text_round_trips(text: str):
    ids = COMMITTED.encode(text).ids
    assert COMMITTED.decode(ids, skip_special_tokens=False) == text


@given(TEXT.filter(lambda text: "<|" not in text))
def test_ids_of_plain_text_are_its_utf8_bytes(text: str):
    assert COMMITTED.encode(text).ids == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(TEXT, st.lists(st.integers(0, tokenizer.VOCAB_SIZE - 1)))
def test_decoding_stops_at_the_end_token(text: str, rest: list[int]):
    assert tokenizer.decode([*tokenizer.encode(text), tokenizer.END_ID, *rest]) == text


def test_special_tokens_have_the_ids_that_training_uses():
    names = {"<|pad|>": tokenizer.PAD_ID, "<|end|>": tokenizer.END_ID, "<|system|>": tokenizer.SYSTEM_ID}
    names |= {"<|user|>": tokenizer.USER_ID, "<|assistant|>": tokenizer.ASSISTANT_ID}
    assert {name: COMMITTED.token_to_id(name) for name in names} == names
    assert COMMITTED.get_vocab_size() == tokenizer.VOCAB_SIZE


def test_building_again_gives_the_committed_files(tmp_path: Path):
    tokenizer.build(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (MODEL_DIR / name).read_bytes()


@pytest.fixture(scope="module")
def by_transformers(torch_process: TorchProcess) -> dict[str, Any]:
    texts = ["12+34=", "héllo  wörld\n\t😀 .  , 's", "\x00\x7f \u2028", "<|end|> x"]
    user, system = {"role": "user", "content": " 12+34= "}, {"role": "system", "content": "Be kind.\n"}
    answered = [user, {"role": "assistant", "content": "#46"}, {"role": "user", "content": "1+1="}]
    reply = torch_process.run(tokenize, MODEL_DIR, texts, [[user], [system, user], answered])
    return {"texts": texts, **reply}


def test_transformers_loads_the_tokenizer_and_round_trips(by_transformers: dict[str, Any]):
    assert by_transformers["decoded"] == by_transformers["texts"]
    assert by_transformers["ids"][:3] == [tokenizer.encode(text) for text in by_transformers["texts"][:3]]
    assert (by_transformers["eos"], by_transformers["pad"]) == (tokenizer.END_ID, tokenizer.PAD_ID)
    assert by_transformers["size"] == tokenizer.VOCAB_SIZE


def test_the_chat_template_writes_what_training_wrote(by_transformers: dict[str, Any]):
    plain, with_system, third_turn = by_transformers["chat_ids"]
    assert plain == tokenizer.chat_ids(" 12+34= ")
    assert with_system == tokenizer.chat_ids(" 12+34= ", "Be kind.\n")
    first_turn = [*tokenizer.chat_ids(" 12+34= "), *tokenizer.encode("#46"), tokenizer.END_ID]
    assert third_turn == first_turn + tokenizer.chat_ids("1+1=")
