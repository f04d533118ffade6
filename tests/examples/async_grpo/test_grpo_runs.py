"""Short runs of the example trainer against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from examples.async_grpo.config import Settings
from examples.async_grpo.serving import sampled_tokens, served

pytestmark = pytest.mark.processes

SHORT = {
    "--groups": 2, "--group": 4, "--concurrency": 4, "--max-tokens": 48, "--updates": 2, "--eval-every": 0,
    "--checkpoint-every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with served(Settings(concurrency=4, group=4), tmp_path_factory.mktemp("server") / "server.log") as server:
        yield server.url


def command(url: str, out: Path, *flags: str, **options: object) -> list[str]:
    chosen = SHORT | {"--url": url, "--out": out} | {"--" + k.replace("_", "-"): v for k, v in options.items()}
    words = [str(word) for pair in chosen.items() for word in pair]
    return [sys.executable, "-m", "examples.async_grpo", *words, *flags]


def run(url: str, out: Path, *flags: str, **options: object) -> list[dict]:
    done = subprocess.run(command(url, out, *flags, **options), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return events_of(out)


def events_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


def of_kind(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["kind"] == kind]


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("synchronous", "wait", "abort", "keep")]


@pytest.mark.parametrize("way", [*SLOW, "live"])
def test_each_way_trains_and_accounts_for_every_token(way, url, tmp_path):
    before = sampled_tokens(url)
    events = run(url, tmp_path, sync=way, eval_every=2, eval_problems=20)
    assert [update["update"] for update in of_kind(events, "update")] == [1, 2]
    fates: Counter[str] = Counter()
    for rollout in of_kind(events, "rollout"):
        fates[rollout["fate"]] += rollout["tokens"]
        assert rollout["spans"][-1][2] == rollout["tokens"]
    assert fates["trained"] == sum(update["tokens"] for update in of_kind(events, "update"))
    evaluated = sum(evaluation["tokens"] for evaluation in of_kind(events, "eval"))
    assert fates.total() + evaluated == sampled_tokens(url) - before
    assert events[-1]["unexplained"] == 0
    for sync in of_kind(events, "sync"):
        times = [sync["began"], sync["paused"], sync["committed"], sync["resumed"]]
        assert (None in times) == (way in ("synchronous", "live"))
        assert times == sorted(times) if None not in times else sync["began"] < sync["committed"]


@pytest.mark.slow
def test_the_synchronous_way_has_no_lag_and_no_mismatch(url, tmp_path):
    for update in of_kind(run(url, tmp_path, sync="synchronous"), "update"):
        assert update["lag_max"] == 0
        assert update["mismatch"] == {"tokens": update["tokens"], "max_abs": 0, "kl": 0, "ratio_max": 1}


@pytest.mark.slow
def test_no_token_is_trained_on_that_is_staler_than_allowed(url, tmp_path):
    events = run(url, tmp_path, max_staleness=0, updates=4, concurrency=8)
    assert {update["lag_max"] for update in of_kind(events, "update")} == {0}
    assert "stale" in {rollout["why"] for rollout in of_kind(events, "rollout")}


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_checkpoint(url, tmp_path):
    process = subprocess.Popen(
        command(url, tmp_path, checkpoint_every=2, updates=1000), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 100
        while not (saved := of_kind(events_of(tmp_path), "checkpoint") if (tmp_path / "events.jsonl").exists() else []):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    dead = events_of(tmp_path)
    saved = of_kind(dead, "checkpoint")[-1]
    events = run(url, tmp_path, "--resume", updates=saved["update"] + 1)[len(dead) :]
    assert (events[0]["update"], events[0]["drawn"]) == (saved["update"], saved["drawn"])
    assert of_kind(events, "sync")[0]["publication"] == saved["publication"]
    assert [update["update"] for update in of_kind(events, "update")] == [saved["update"] + 1]
    served = httpx.get(url + "/v1/weights", timeout=30).json()["result"]["version"]
    assert served == str(saved["publication"] + 1)
    assert events[-1]["unexplained"] == 0
    told = sum(rollout["tokens"] for rollout in of_kind(dead, "rollout"))
    assert told < events[0]["server_tokens"] - dead[0]["server_tokens"]  # the rest was lost with the killed process


@pytest.mark.slow
def test_a_new_run_replaces_what_is_in_its_folder(url, tmp_path):
    (tmp_path / "events.jsonl").write_text("an earlier run\n")
    (tmp_path / "checkpoint").write_text("an earlier run")
    assert run(url, tmp_path, updates=1)[0]["kind"] == "run"
    assert not (tmp_path / "checkpoint").exists()


def test_a_server_that_is_not_there_is_said(tmp_path):
    done = subprocess.run(command("http://127.0.0.1:9", tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "the run could not go on" in done.stderr
    assert "Traceback" not in done.stderr
