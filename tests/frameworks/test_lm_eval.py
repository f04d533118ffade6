"""lm-eval (the evaluation harness) on a real server: its program runs two local tasks, with many prompts per call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.server import Server
from examples.embedded_model.arithmetic import problems
from fastdeploy.embedded import MODEL_DIR
from frameworks.conftest import model_of, run_program

pytestmark = pytest.mark.slow

PROBLEMS = problems(seed=5, n=10)
# Every fourth problem has a false solution for the exact match, so its score is known.
FALSE = {0, 4, 8}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
{own}
"""
GENERATE = """
doc_to_target: "{{target}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 300, temperature: 0.0}
"""
CHOOSE = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
"""


def answers(server: Server) -> list[str]:
    """Return the server's greedy answer to each problem, up to the end of its first line."""
    return [server.complete(problem.prompt, max_tokens=300, stop=["\n"])["text"] for problem in PROBLEMS]


def document(number: int, answer: str) -> dict[str, Any]:
    """Return a row of both tasks. The server's own answer is one of three choices, and the target of the other task,
    unless the row is in FALSE."""
    choices = [answer + "0", answer[:-1] + "##"]
    choices.insert(number % 3, answer)
    target = "false" if number in FALSE else answer
    return {"question": PROBLEMS[number].prompt, "target": target, "choices": choices, "label": number % 3}


def write_tasks(folder: Path, rows: list[dict[str, Any]]) -> None:
    data = folder / "rows.json"
    data.write_text(json.dumps(rows))
    generate = {"name": "worked_sums", "kind": "generate_until", "metric": "exact_match", "own": GENERATE}
    choose = {"name": "chosen_sums", "kind": "multiple_choice", "metric": "acc", "own": CHOOSE}
    for task in (generate, choose):
        (folder / f"{task['name']}.yaml").write_text(TASK.format(rows=data, **task))


def run_lm_eval(folder: Path, server: Server, tokenized: bool) -> dict[str, Any]:
    """Run both tasks. Return the "scores", and the "samples" of each task in the order of its rows."""
    arguments = {
        "model": model_of(server),
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": MODEL_DIR,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": tokenized,
        "max_length": 4096,
    }
    run_program(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
        "--batch_size", "4", "--include_path", folder, "--tasks", "worked_sums,chosen_sums",
        "--log_samples", "--output_path", folder / "out",
        HF_HOME=str(folder / "hub"),
    )  # fmt: skip
    [results] = (folder / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    samples = {}
    for task in scores:
        [log] = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        samples[task] = sorted(map(json.loads, log.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return {"scores": scores, "samples": samples}


@pytest.fixture(scope="module")
def rows(live: Server) -> list[dict[str, Any]]:
    return [document(number, answer) for number, answer in enumerate(answers(live))]


@pytest.fixture(scope="module", params=[True, False], ids=["token-ids", "text"])
def results(request: pytest.FixtureRequest, live: Server, rows, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lm-eval")
    write_tasks(folder, rows)
    return run_lm_eval(folder, live, tokenized=request.param)


def test_generated_answers_get_the_score_that_their_targets_give(results):
    right = [sample["exact_match"] for sample in results["samples"]["worked_sums"]]
    assert right == [float(number not in FALSE) for number in range(len(PROBLEMS))]
    assert results["scores"]["worked_sums"]["exact_match,none"] == pytest.approx(1 - len(FALSE) / len(PROBLEMS))


def test_each_choice_gets_the_log_probability_that_the_server_gives_its_tokens(results, live, rows):
    """The log probability of a choice is the sum over its tokens, computed here from ``prompt_logprobs``."""
    for row, sample in zip(rows, results["samples"]["chosen_sums"], strict=True):
        for number, (choice, [reply]) in enumerate(zip(row["choices"], sample["resps"], strict=True)):
            logprob, greedy = reply
            assert float(logprob) == pytest.approx(scored(live, row["question"], choice), abs=1e-4)
            assert greedy == str(number == row["label"]), "only the server's own answer is the likeliest at each token"


def test_the_likeliest_choice_is_chosen(results, rows, live):
    chosen = [sample["acc"] for sample in results["samples"]["chosen_sums"]]
    best = [max(row["choices"], key=lambda choice: scored(live, row["question"], choice)) for row in rows]
    right = [float(choice == row["choices"][row["label"]]) for choice, row in zip(best, rows, strict=True)]
    assert chosen == right and any(right)


def scored(server: Server, question: str, choice: str) -> float:
    """Return the log probability of ``choice`` after ``question``. One token is one character here."""
    ids = list((question + choice).encode())
    entries = server.complete(ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    pairs = list(zip(ids, entries, strict=True))[len(question) :]
    return sum(entry[str(token)]["logprob"] for token, entry in pairs)
