"""The tiny models that the package makes: the same everywhere, whole, and served."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastdeploy.embedded import MODEL_DIR
from fastdeploy.testing import Server, serve
from fastdeploy.testing.models import MODELS, cache_folder, model_folder
from fastdeploy.testing.tensors import perturbed_copy

MADE = [name for name in MODELS if name != "qwen3"]


def test_the_same_bytes_are_made_on_every_machine(tmp_path):
    """The names have a digest of the content. They change when the models change, and not with the machine."""
    assert [model_folder(name, tmp_path).name for name in MADE] == [
        "llama-e38d05c57ad3",
        "ernie-5211e60aed43",
        "moe-b03b5134a198",
    ]


def test_many_processes_write_one_whole_folder(tmp_path):
    code = f"from fastdeploy.testing.models import model_folder; print(model_folder('moe', {str(tmp_path)!r}))"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert [process.returncode for process in running] == [0] * 4
    assert [folder.name for folder in tmp_path.iterdir()] == [model_folder("moe", tmp_path).name]


def test_a_folder_that_somebody_changed_is_refused(tmp_path):
    folder = model_folder("llama", tmp_path)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"{folder.name}: a file was changed; delete the folder"):
        model_folder("llama", tmp_path)


def test_a_name_that_is_none_of_the_models_is_refused(tmp_path):
    with pytest.raises(ValueError, match="model: expected one of qwen3, llama, ernie, moe, got 'gpt'"):
        model_folder("gpt", tmp_path)


def test_models_are_kept_in_the_cache_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fastdeploy" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "fastdeploy" / "models"


def test_qwen3_is_the_embedded_model():
    assert model_folder("qwen3") == MODEL_DIR


@pytest.mark.processes
@pytest.mark.parametrize("name", ["moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "ernie"))])
def test_a_model_answers_a_chat_and_takes_an_update(name, tmp_path):
    perturbed_copy(model_folder(name, tmp_path / "models"), tmp_path / "next", scale=0.3)
    with serve(name) as server:
        old = answer(server)
        update = {"model_path": str(tmp_path / "next"), "version": "step-1"}
        assert server.call("POST", "/v1/update_weights", update)[0] == 200
        new = answer(server)
    assert [choice["weight_versions"][0]["version"] for choice in (old, new)] == ["0", "step-1"]
    assert old["token_ids"] != new["token_ids"]


def answer(server: Server) -> dict:
    messages = [{"role": "user", "content": "12+34="}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    status, reply = server.call("POST", "/v1/chat/completions", body)
    assert status == 200 and len(reply["choices"][0]["token_ids"]) == 16, reply
    return reply["choices"][0]
