"""Loading a tokenizer, and errors that name the broken file."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.client.tokenizer import load_tokenizer
from fastdeploy.core.errors import InvalidField
from fastdeploy.embedded import MODEL_DIR


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, tmp_path)
    return tmp_path


def test_a_complete_folder_loads(folder):
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
def test_the_error_names_the_broken_file(folder, file, text, why):
    (folder / file).write_text(text)
    with pytest.raises(InvalidField) as info:
        load_tokenizer(str(folder))
    assert info.value.field == file and why in str(info.value)


def test_a_sentencepiece_model_alone_says_what_it_needs_and_runs_no_code_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    classes = {"AutoTokenizer": ["tokenization_ernie4_5.Ernie4_5_Tokenizer", None]}
    config = {"tokenizer_class": "Ernie4_5_Tokenizer", "auto_map": classes}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenization_ernie4_5.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest, find=importlib.util.find_spec: None if name == "sentencepiece" else find(name, *rest),
    )
    with pytest.raises(InvalidField, match=r"tokenizer.model.*sentencepiece, or a tokenizer.json") as info:
        load_tokenizer(str(tmp_path))
    assert info.value.field == "tokenizer.model" and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pipe_instead_of_a_file_is_refused_and_not_opened(folder, file):
    (folder / file).unlink(missing_ok=True)
    os.mkfifo(folder / file)
    with pytest.raises(InvalidField, match="not a regular file"):
        load_tokenizer(str(folder))


def test_a_link_to_a_file_is_followed(folder):
    (folder / "tokenizer.json").rename(folder / "blob")
    (folder / "tokenizer.json").symlink_to("blob")
    assert load_tokenizer(str(folder)).encode_now("a")


QUIET = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)  # as if not installed
from fastdeploy.client.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
assert len(tokenizer.encode_now("a " * 100_000)) > tokenizer._hf.model_max_length
import transformers
assert not transformers.utils.is_torch_available()
"""


@pytest.mark.processes
def test_loading_and_a_long_prompt_print_nothing(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 100}))
    done = subprocess.run([sys.executable, "-c", QUIET, str(folder)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
