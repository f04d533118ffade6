"""verifiers, with renderers, on a real server: its program vf-eval plays an environment (verifiers_sums.py). Its train
client makes token ids of messages and sends them to /inference/v1/generate, its eval client sends the messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import ROOT, model_of, run_program

pytestmark = pytest.mark.slow

FOLDER = ROOT / "tests" / "frameworks"
QUESTIONS = {"12+34=": "46", "7+5=": "12", "85-9=": "76"}
ROLLOUTS = 2
TRAIN = (
    "--client.type", "train", "--client.renderer-model-name", MODEL_DIR,
    "--client.renderer.name", "custom", "--client.renderer.import-path", "verifiers_sums.SumsRenderer",
)  # fmt: skip


def traces(server: Server, folder: Path, *client: Any) -> list[dict[str, Any]]:
    """Run vf-eval, and return the trace of each rollout."""
    run_program(
        "vf-eval", "verifiers_sums", "--model", model_of(server),
        "--client.base-url", f"{server.url}/v1", "--client.api-key-var", "NO_KEY", *client,
        "--env.agent.runtime.type", "subprocess", "--sampling.temperature", "0", "--sampling.max-tokens", "60",
        "--num-rollouts", ROLLOUTS, "--no-push", "--no-rich", "--output-dir", folder, "--run.dir", "run",
        HOME=str(folder), HF_HOME=str(folder / "hub"), PYTHONPATH=f"{ROOT}:{FOLDER}",
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "run" / "traces.jsonl").read_text().splitlines()]
    return [trace for row in rows for trace in row["traces"]]


@pytest.fixture(scope="module")
def by_token_ids(live: Server, tmp_path_factory) -> list[dict[str, Any]]:
    return traces(live, tmp_path_factory.mktemp("train"), *TRAIN)


@pytest.fixture(scope="module")
def by_messages(live: Server, tmp_path_factory) -> list[dict[str, Any]]:
    return traces(live, tmp_path_factory.mktemp("eval"), "--client.type", "eval")


@pytest.mark.parametrize("client", ["by_token_ids", "by_messages"])
def test_every_rollout_ends_without_an_error_and_gets_its_reward(client, live, request):
    played = request.getfixturevalue(client)
    assert [trace["errors"] for trace in played] == [[]] * len(QUESTIONS) * ROLLOUTS
    for trace in played:
        question, first, second, last = trace["nodes"]
        assert [node["sampled"] for node in trace["nodes"]] == [False, True, False, True]
        assert question["message"]["content"] in QUESTIONS and second["message"]["content"] == "3+5="
        body = {"messages": [question["message"]], "temperature": 0, "max_tokens": 60}
        answer = live.post("/v1/chat/completions", body).ok()["choices"][0]["message"]["content"]
        assert first["message"]["content"] == answer and last["message"]["content"]
        right = answer.endswith("#" + QUESTIONS[question["message"]["content"]])
        assert trace["rewards"]["is_right"]["score"] == float(right)
    assert any(trace["rewards"]["is_right"]["score"] for trace in played)


def test_sampled_tokens_have_the_log_probabilities_of_the_server(by_token_ids, live):
    """The second turn goes on from the tokens of the first, and both are scored in one pass."""
    for trace in by_token_ids:
        ids = [token for node in trace["nodes"] for token in node["token_ids"]]
        mask = [sampled for node in trace["nodes"] for sampled in node["mask"]]
        logprobs = [logprob for node in trace["nodes"] for logprob in node["logprobs"]]
        entries = live.complete(ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
        scored = [
            entry[str(token)]["logprob"] for token, entry, sampled in zip(ids, entries, mask, strict=True) if sampled
        ]
        assert logprobs == pytest.approx(scored, abs=1e-3)
        assert len(logprobs) == trace["num_output_tokens"] > 2
