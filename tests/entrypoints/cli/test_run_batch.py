"""``fastdeploy run-batch``: every line is answered in its place, and a bad line is refused before a server starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fastdeploy.entrypoints.cli.main import main
from fastdeploy.entrypoints.cli.run_batch import serve_flags

COMPLETION = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "1+2=", "max_tokens": 4}}


def write(path: Path, *entries: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return str(path)


def test_every_request_is_answered_in_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    chat = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
    file = write(
        tmp_path / "in.jsonl",
        COMPLETION,
        COMPLETION | {"custom_id": "bad", "body": {"prompt": "1", "max_tokens": -1}},
        COMPLETION | {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
    )
    out = tmp_path / "out.jsonl"
    flags = ["--max-model-len", "64", "--api-key", "a-key", "--tensor-parallel-size", "1", "--swap-space", "2"]
    assert main(["run-batch", "-i", file, "-o", str(out), *flags]) == 1, "the exit status of a refused request"
    first, bad, last = map(json.loads, out.read_text().splitlines())
    assert [line["custom_id"] for line in (first, bad, last)] == ["a", "bad", "chat"]
    assert first["response"]["body"]["usage"]["completion_tokens"] == 4 and first["error"] is None
    assert bad["response"]["status_code"] == 400 and "max_tokens" in bad["error"]["message"]
    assert last["response"]["body"]["object"] == "chat.completion"
    assert "3 answers, 1 of them failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"custom_id": 3}, "line 2: expected an object with custom_id, a text"),
        ({"custom_id": "a"}, "expected a custom_id once, got 'a' in several lines"),
        ({"custom_id": "b", "method": "GET"}, "line 2: expected method POST and url"),
        ({"custom_id": "b", "url": "/v1/embeddings"}, "line 2: expected method POST and url /v1/chat/completions or"),
        ({"custom_id": "b", "body": {"stream": True}}, "line 2: expected body, an object without stream"),
    ],
)
def test_a_bad_line_is_refused_before_a_server_starts(change, told, tmp_path, capsys):
    file = write(tmp_path / "in.jsonl", COMPLETION, COMPLETION | change)
    with pytest.raises(SystemExit) as caught:
        main(["run-batch", "-i", file, "-o", "/nowhere/out"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and "argument --input-file: " in line and told in line


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["-o", "x"], "--input-file: expected a file"),
        (["-i", "/nowhere", "-o", "x"], "--input-file: expected a local file, got '/nowhere'"),
        (["-i", "x", "-o", "x", "-tp", "2"], "--tensor-parallel-size: '2' is refused here"),
    ],
)
def test_a_bad_flag_is_refused_before_a_server_starts(flags, told, capsys):
    with pytest.raises(SystemExit):
        main(["run-batch", *flags])
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_the_server_gets_all_flags_but_those_of_the_files():
    given = ["-i", "a", "--model", "m", "--output-file=b", "--kv-cache-ratio", "0.5", "--output-tmp-dir", "/tmp"]
    assert serve_flags(given) == ["--model", "m", "--kv-cache-ratio", "0.5"]
