"""The checks of a soak find what they are there for, and nothing else."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from acceptance import soak
from acceptance.lib.ledger import Ledger, Versions, Witness
from acceptance.lib.soak import plan
from acceptance.lib.soak.flat import ENOUGH, WARM_UP, Samples, files_under, process_holds
from acceptance.lib.soak.policy import Policy
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.rollout import Rollout, TokenSpan

BOOT = "boot-1"


def rollout(*spans: TokenSpan, tokens: int = 10) -> Rollout:
    return Rollout([1, 2], list(range(tokens)), [0.0] * tokens, list(spans), "length", None, "", 0)


def span(version: str, weight_epoch: int, start: int = 0, end: int = 10, boot_id: str = BOOT) -> TokenSpan:
    return TokenSpan(version, weight_epoch, start, end, boot_id=boot_id)


# ---------------------------------------------------------------------- growth


def samples(values: list[float], quantity: str = "files", step: int = 1) -> Samples:
    found = Samples()
    for number, value in enumerate(values):
        found.add(number * step, "engine", 1, {quantity: value})
    return found


def test_a_leak_of_one_file_in_each_cycle_is_found():
    leak = [14.0 + n for n in range(WARM_UP + ENOUGH)]
    assert len(samples(leak).problems()) == 1


def test_a_leak_of_one_file_in_fifty_cycles_is_found_over_a_long_run():
    leak = [14.0 + n * 10 // 50 for n in range(60)]
    assert len(samples(leak, step=10).problems()) == 1


def test_a_descriptor_that_leaks_is_found_in_a_real_process():
    kept, found = [], Samples()
    for number in range(WARM_UP + ENOUGH):
        kept.append(os.open("/dev/null", os.O_RDONLY))
        found.add(number, "clients", os.getpid(), process_holds(os.getpid()))
    for fd in kept:
        os.close(fd)
    assert any("files grows" in problem for problem in found.problems())


@pytest.mark.parametrize("quantity", ["rss_mb", "sockets", "files"])
def test_noise_a_warm_up_and_a_smaller_process_are_no_leak(quantity: str):
    rng = np.random.default_rng(0)
    flat = 300 + rng.uniform(-1, 1, 40)
    flat[:WARM_UP] -= 200  # the caches fill
    assert not samples(list(flat), quantity, step=10).problems()
    assert not samples([300.0 - n for n in range(40)], quantity).problems()


def test_another_process_has_a_baseline_of_its_own():
    found = Samples()
    for number in range(40):
        found.add(number, "engine", number // 10, {"rss_mb": 300 + 50 * (number // 10)})
    assert not found.problems()
    assert [row["processes"] for row in found.summary()] == [4]


def test_a_kv_block_that_stays_in_use_is_found():
    assert samples([0.0] * 5 + [1.0] * 5, "kv_blocks").problems()
    assert not samples([0.0] * 10, "kv_blocks").problems()


def test_files_are_counted_with_their_bytes(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"0" * 1000)
    (tmp_path / "y").write_bytes(b"0" * 500)
    assert files_under([tmp_path / "a", tmp_path / "y", tmp_path / "gone"]) == (2, 0.0015)


# ---------------------------------------------------------------------- ledger


@pytest.fixture
def ledger() -> Ledger:
    """Return a ledger that balances: a whole rollout, and one that was broken after 4 tokens and went on."""
    found = Ledger()
    for name in ("whole", "broken"):
        found.begin(name)
        found.accept(name, [span("1", 1)], 10)
    found.read_back("broken", BOOT, received=[0, 1, 2, 3], kept=[0, 1, 2, 3, 4, 5])
    return found


def test_a_balanced_ledger_has_no_problem(ledger: Ledger):
    ledger.balance(BOOT, 22)
    assert not ledger.problems


@pytest.mark.parametrize(("generated", "what"), [(23, "1 lost"), (21, "1 more than")])
def test_one_lost_token_and_one_doubled_token_are_found(ledger: Ledger, generated: int, what: str):
    ledger.balance(BOOT, generated)
    assert len(ledger.problems) == 1 and what in ledger.problems[0]


def test_a_token_that_differs_from_what_the_engine_has_made_is_found(ledger: Ledger):
    ledger.read_back("broken", BOOT, received=[0, 1, 1], kept=[0, 1, 2])
    assert "the client has" in ledger.problems[0]


def test_a_second_final_output_and_a_missing_one_are_found(ledger: Ledger):
    ledger.accept("whole", [span("1", 1)], 10)
    ledger.begin("lost")
    ledger.balance(BOOT, 22)
    assert "second final output" in ledger.problems[0] and "without a final output" in ledger.problems[1]


def test_spans_must_cover_each_token_once():
    for spans in ([span("1", 1, 0, 9)], [span("1", 1, 0, 6), span("2", 2, 5, 10)], [span("1", 1, 1, 10)]):
        found = Ledger()
        found.begin("a")
        found.accept("a", spans, 10)
        assert found.problems, spans


def test_a_killed_engine_may_take_the_tokens_of_one_step_along_and_no_more(ledger: Ledger):
    ledger.balance_killed(BOOT, 22 + 8, step_tokens=8)
    assert not ledger.problems and ledger.missing == 8
    ledger.balance_killed(BOOT, 22 + 9, step_tokens=8)
    assert len(ledger.problems) == 1


# ---------------------------------------------------------------------- versions


@pytest.fixture
def versions() -> Versions:
    """Return a history: start weights "0", version "1" committed at t = 10, "2" begun at t = 20."""
    found = Versions(Ledger(), first_boot=BOOT, first_version="0")
    found.publishing("1", 9.0)
    found.published("1", BOOT, 1, 10.0)
    found.publishing("2", 20.0)
    return found


RIGHT = [
    Witness("before", rollout(span("0", 0)), 1.0, 5.0),
    Witness("across", rollout(span("0", 0, 0, 5), span("1", 1, 5, 10)), 8.0, 12.0),
    Witness("after", rollout(span("1", 1)), 11.0, 12.0),
    Witness("not yet told", rollout(span("2", 2)), 11.0, 22.0),
    Witness("another engine", rollout(span("1", 1, boot_id="boot-2")), 30.0, 31.0),
]
WRONG = {
    "after 1 was committed": Witness("old", rollout(span("0", 0)), 11.0, 12.0),
    "after a token of": Witness("back", rollout(span("1", 1, 0, 5), span("0", 0, 5, 10)), 8.0, 12.0),
    "was not published": Witness("early", rollout(span("2", 2)), 11.0, 19.0),
    "and was": Witness("two labels", rollout(span("2", 1)), 11.0, 22.0),
    "a restarted engine began with": Witness("lost weights", rollout(span("0", 0, boot_id="boot-2")), 30.0, 31.0),
}


@pytest.mark.parametrize("witness", RIGHT, ids=lambda witness: witness.name)
def test_right_spans_are_accepted(versions: Versions, witness: Witness):
    versions.check(witness)
    assert not versions.ledger.problems


@pytest.mark.parametrize("what", WRONG)
def test_a_token_of_the_wrong_weights_is_found(versions: Versions, what: str):
    versions.check(WRONG[what])
    assert any(what in problem for problem in versions.ledger.problems)


def test_what_was_committed_last_is_never_forgotten(versions: Versions):
    versions.forget_before(100.0)
    versions.check(replace_times(WRONG["after 1 was committed"], 101.0, 102.0))
    assert versions.ledger.problems


def replace_times(witness: Witness, began: float, ended: float) -> Witness:
    return witness._replace(began=began, ended=ended)


# ---------------------------------------------------------------------- plan and weights


def test_every_run_kills_each_kind_of_process_and_has_cycles_between_kills():
    short, long = plan.kills(0, 15), plan.kills(0, 1000)
    assert Counter(short.values()) == dict.fromkeys(plan.VICTIMS, 1)
    assert len(set(Counter(long.values()).values())) == 1 and len(long) == 90
    assert all(b - a >= 2 for found in (short, long) for a, b in zip(sorted(found), sorted(found)[1:], strict=False))


def test_every_kind_of_cycle_happens():
    cycles = [plan.cycle(0, number) for number in range(200)]
    assert {c.mode for c in cycles} == {None, "abort", "wait", "keep"}
    assert {(c.update, c.via, c.kv) for c in cycles} >= {
        ("delta", "upload", "keep"),
        ("partial", "folder", "recompute"),
    }
    assert any(c.sleeps for c in cycles) and any(c.adapter for c in cycles)


def test_the_weights_of_a_step_do_not_depend_on_how_a_process_came_to_it():
    walked, jumped = Policy(3, MODEL_DIR), Policy(3, MODEL_DIR)
    for step in range(1, 9):
        walked.go_to(step)
    jumped.go_to(12)
    jumped.go_to(8)
    assert all(np.array_equal(walked.state[name], jumped.state[name]) for name in walked.state)
    before = Policy(3, MODEL_DIR)
    before.go_to(7)
    assert any(not np.array_equal(walked.state[name], before.state[name]) for name in walked.state)


def test_a_report_is_printed_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    content = {
        "options": {"seed": 4},
        "seconds": 90.0,
        "problems": [],
        "seen": {"engine killed": 3},
        "ledger": dict.fromkeys(soak.LEDGER, 7),
        "resources": samples([1.0] * 10).summary(),
    }
    (tmp_path / "soak.json").write_text(json.dumps(content))
    assert soak.main(["--report", str(tmp_path / "soak.json")]) == 0
    out = capsys.readouterr().out
    assert "| engine killed | 3 |" in out and "| engine | open files | 1 | 1 | +0.0 | 5 | 9 |" in out


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_a_short_soak_finds_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "soak.json"
    status = soak.main(["--cycles", "15", "--audit-every", "5", "--out", str(file)])
    assert status == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    seen, ledger = report["seen"], report["ledger"]
    assert seen["cycles"] == 15 and all(seen[f"{victim} killed"] == 1 for victim in ("trainer", "engine", "api"))
    assert ledger["engines"] == 2 and ledger["rollouts"] > 0 and seen["tokens compared"] > 0
