"""A command of FastDeploy's documentation starts a server here, which its clients and our commands can talk to."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from e2e.server import Server
from fastdeploy.entrypoints.cli.main import main
from fastdeploy.testing.process import free_port

KEY = "a-key-of-the-command-line"
METRICS_PORT = free_port()
FLAGS = (
    "--metrics-port", str(METRICS_PORT), "--engine-worker-queue-port", "8182", "--cache-queue-port", "8183",
    "--tensor-parallel-size", "1", "--max-model-len", "96", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.1",
    "--max-concurrency", "64", "--kv-cache-ratio", "0.75", "--enable-logprob", "--dynamic-load-weight",
    "--load-strategy", "ipc_snapshot", "--reasoning-parser", "ernie-x1", "--tool-call-parser", "ernie-x1",
    "--graph-optimization-config", '{"use_cudagraph": true}', "--workers", "1", "--api-key", KEY,
)  # fmt: skip


class FastDeployServer(Server):
    """The server as FastDeploy's users start it."""

    words = ("fastdeploy.entrypoints.openai.api_server",)

    def __init__(self, *flags: str):
        super().__init__(*flags, key=KEY)
        self.http.headers["Authorization"] = f"Bearer {KEY}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "short.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with FastDeployServer(*FLAGS, "--chat-template", str(template)) as server:
        yield server


def test_an_openai_client_chats_with_it_in_fastdeploys_form(server: Server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY) as client:
        reply = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "7*8="}], max_tokens=4, logprobs=True
        )
    assert reply.usage is not None and reply.usage.prompt_tokens == 4, "the chat template of the flag is not used"
    assert reply.choices[0].logprobs is not None
    assert hasattr(reply.choices[0].message, "completion_token_ids"), "not FastDeploy's form"


def test_its_settings_are_those_of_the_flags(server: Server):
    info = server.get("/server_info").ok()
    wanted = {"max_model_len": 96, "max_num_seqs": 32, "max_connections": 64, "reasoning_parser": "ernie45"}
    assert {name: info[name] for name in wanted} == wanted
    assert httpx.get(server.url + "/v1/models", headers={"Authorization": "Bearer other"}).status_code == 401


def test_metrics_have_a_port_of_their_own(server: Server):
    text = httpx.get(f"http://127.0.0.1:{METRICS_PORT}/metrics").text
    assert "fastdeploy:num_requests_running" in text


def test_one_line_of_the_log_tells_which_flags_have_no_effect(server: Server):
    [line] = [line for line in server.log_path.read_text().splitlines() if "without effect" in line]
    given = ("--engine-worker-queue-port", "--cache-queue-port", "--kv-cache-ratio", "--enable-logprob")
    assert all(flag in line for flag in given)
    assert "--max-concurrency" not in line and "--tensor-parallel-size" not in line


def test_chat_and_complete_talk_to_it(server: Server, capsys: pytest.CaptureFixture[str], monkeypatch):
    words = ["--url", server.url, "--max-tokens", "3"]
    assert main(["chat", *words, "--api-key", KEY, "-q", "1+2="]) == 0
    assert capsys.readouterr().out.strip()
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+2=\n\n3+4=\n"))
    assert main(["complete", *words]) == 0
    assert len(capsys.readouterr().out.replace("> ", "").splitlines()) == 2
    assert main(["chat", *words, "--api-key", "wrong", "-q", "1"]) == 1
    assert "HTTP 401" in capsys.readouterr().err


def test_bench_serve_measures_it(server: Server, tmp_path: Path):
    words = ["bench", "serve", "--base-url", server.url, "--api-key", KEY, "--num-prompts", "4"]
    few = ["--random-input-len", "5", "--random-output-len", "6", "--max-concurrency", "2"]
    assert main([*words, *few, "--result-dir", str(tmp_path), "--result-filename", "r.json"]) == 0
    (tmp_path / "chats").write_text('{"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 5}\n')
    chats = ["--dataset-name", "EBChat", "--dataset-path", str(tmp_path / "chats"), "--ignore-eos"]
    assert main([*words, *chats, "--result-dir", str(tmp_path), "--result-filename", "r.json"]) == 0
    assert '"total_output_tokens": 20' in (tmp_path / "r.json").read_text()


def test_a_server_that_does_not_answer_is_told_in_one_line(capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", f"http://127.0.0.1:{free_port()}", "-q", "1"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("fastdeploy: http://127.0.0.1:")
