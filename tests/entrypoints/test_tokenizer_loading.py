"""A tokenizer that cannot be loaded is refused by the name of its file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.tokenizer import load_tokenizer
from fastdeploy.errors import InvalidField


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    return tmp_path


def test_the_folder_as_it_is_loads(folder):
    assert load_tokenizer(str(folder)).encode_now("a")


def test_a_folder_without_a_tokenizer_is_no_error(tmp_path):
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("tokenizer.json", '{"version": "1.0", "trunc', "is not JSON"),
        ("tokenizer.json", "", "is not JSON"),
        ("tokenizer.json", "[]", "expected a JSON object"),
        ("tokenizer.json", "{}", "no tokenizer can be made of it"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "Unheard"}}', "no tokenizer can be made of it"),
        ("tokenizer.json", "[" * 100_000, "is not JSON"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("special_tokens_map.json", "{", "is not JSON"),
    ],
)
def test_a_broken_file_is_named(folder, file, text, why):
    (folder / file).write_text(text)
    with pytest.raises(InvalidField) as info:
        load_tokenizer(str(folder))
    assert info.value.field == file and why in str(info.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_in_the_place_of_a_file_is_refused_unopened(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(InvalidField, match="not a regular file"):
        load_tokenizer(str(folder))


def test_a_link_to_a_file_is_followed(folder):
    (folder / "tokenizer.json").rename(folder / "blob")
    (folder / "tokenizer.json").symlink_to("blob")
    assert load_tokenizer(str(folder)).encode_now("a")
