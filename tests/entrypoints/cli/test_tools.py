"""Commands that need no server: ``tokenizer`` and ``collect-env``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy.entrypoints.cli.main import main


def test_the_tokenizer_of_a_model_encodes_and_decodes(capsys: pytest.CaptureFixture[str]):
    assert main(["tokenizer", "--encode", "1+2="]) == 0
    ids = capsys.readouterr().out
    assert json.loads(ids) == [49, 43, 50, 61]
    assert main(["tokenizer", "--decode", ids, "-vs", "--info"]) == 0
    text, size, *info = capsys.readouterr().out.splitlines()
    assert (text, int(size)) == ("1+2=", 272)
    assert json.loads("".join(info))["special_tokens"]["<|end|>"] == 257


@pytest.mark.parametrize("name", ["vocabulary.json", "vocabulary.txt"])
def test_the_vocabulary_is_written_in_the_order_of_the_ids(name: str, tmp_path: Path):
    assert main(["tokenizer", "--vocab-export", str(tmp_path / name)]) == 0
    text = (tmp_path / name).read_text()
    ids = list(json.loads(text).values()) if name.endswith("json") else [int(x.split()[0]) for x in text.splitlines()]
    assert ids == sorted(ids) and len(ids) == 272


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "--encode: expected one of --encode, --decode"),
        (["--decode", "1,x"], "--decode: expected token ids below 272"),
        (["--decode", "272"], "--decode: expected token ids below 272"),
        (["--model", "baidu/ERNIE-4.5-0.3B-PT", "-e", "a"], "--model: expected the folder of a model"),
    ],
)
def test_a_bad_flag_of_the_tokenizer_is_refused(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["tokenizer", *flags])
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_the_environment_is_told_without_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTDEPLOY_API_KEY", "secret")
    monkeypatch.setenv("FASTDEPLOY_CPU_THREADS", "2")
    assert main(["collect-env"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["FASTDEPLOY_API_KEY"] == "(set)" and told["FASTDEPLOY_CPU_THREADS"] == "2"
    assert {"fastdeploy", "python", "paddlepaddle", "CPU", "cores", "memory"} <= told.keys()
