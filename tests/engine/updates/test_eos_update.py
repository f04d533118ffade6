"""An update whose source names EOS ids changes them for every later token."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.fleet_calls import prepare
from engine.weight_calls import begin, chunk, commit
from fastdeploy.core.served_weights import CommittedState
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import EOS, expected_tokens, fingerprint_of, next_token
from support.harness import PROMPT, Harness

FIRST = expected_tokens(PROMPT, 3, weights=1)  # the third token is the EOS id of the updates
FOLDER = f"/w1-eos{FIRST[-1]}"


def eos_ids(h: Harness) -> list[int]:
    return list(h.ask(m.ModelInfoArgs()).result["eos_token_ids"])


def test_new_requests_end_at_the_new_ids():
    h = Harness()
    assert eos_ids(h) == [EOS]
    assert h.update(FOLDER).failure is None
    assert eos_ids(h) == [FIRST[-1]]
    h.add("r", PROMPT, max_tokens=12, ignore_eos=False)
    h.add("ignores", PROMPT, max_tokens=12, ignore_eos=True)
    h.run_out()
    assert h.stream("r").tokens == FIRST and h.stream("r").reason == "stop"
    assert h.stream("ignores").tokens == expected_tokens(PROMPT, 12, weights=1)


def paused_with(**fields) -> tuple[Harness, list[int]]:
    """Return a paused harness whose request "r" has some tokens, and the prompt with these tokens."""
    h = Harness()
    h.add("r", PROMPT, max_tokens=20, ignore_eos=False, **fields)
    h.run_rounds(4)
    h.pause(mode="keep")
    done = h.stream("r").tokens
    assert done and EOS not in done
    return h, PROMPT + done


def ends_after(h: Harness, folder: str, **args) -> list[int]:
    """Update, resume, and return the tokens of request "r"."""
    assert h.update(folder, **args).failure is None
    h.resume()
    h.run_out()
    return h.stream("r").tokens


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_running_request_ends_at_the_new_ids(kv):
    h, tokens = paused_with()
    later = expected_tokens(tokens, 3, weights=1)
    assert ends_after(h, f"/w1-eos{later[-1]}", kv=kv) == tokens[len(PROMPT) :] + later
    assert h.stream("r").reason == "stop"


def test_an_old_id_ends_a_request_no_more():
    h, tokens = paused_with()
    later = expected_tokens(tokens, 20, weights=2)
    h.engine.scheduler.set_eos((later[1],))
    assert len(ends_after(h, "/w2-eos999999")) == 20 and h.stream("r").reason == "length"


def test_a_running_request_draws_no_new_id_before_min_tokens_and_keeps_its_kv():
    h, tokens = paused_with(min_tokens=12)
    eos = expected_tokens(tokens, 2, weights=1)[-1]
    expected = list(tokens)
    while len(expected) < len(PROMPT) + 20:
        banned = (eos,) if len(expected) < len(PROMPT) + 12 else ()
        expected.append(next_token(expected, 1, 1000, banned))
    computed = h.runner.computed_tokens
    assert ends_after(h, f"/w1-eos{eos}") == expected[len(PROMPT) :]
    assert h.runner.computed_tokens - computed == len(expected) - len(tokens), "no KV is computed again"


def test_without_ids_of_the_source_and_after_a_failed_update_the_ids_stay():
    h = Harness()
    h.update(FOLDER)
    for folder, args in (("/w2", {}), ("/w1", {"partial": True}), ("/bad", {}), (FOLDER, {"expected_version": "x"})):
        h.update(folder, **args)
        assert eos_ids(h) == [FIRST[-1]], folder
    session = begin(h)
    chunk(h, session, "/w1-eos7")
    assert eos_ids(h) == [FIRST[-1]], "nothing is committed"
    assert commit(h, session).failure is None
    assert eos_ids(h) == [7]


def test_ids_outlive_a_sleep_and_a_reset():
    h = Harness()
    h.update(FOLDER)
    h.ask(m.SleepArgs(), rounds=5)
    h.ask(m.WakeArgs(), rounds=5)
    h.ask(m.ResetArgs())
    assert eos_ids(h) == [FIRST[-1]]


def test_a_result_that_is_kept_does_not_change():
    h = Harness()
    fields = {"max_tokens": 12, "retain_s": 100.0, "fingerprint": "f", "ignore_eos": False}
    h.add("r", PROMPT, **fields)
    h.run_out()
    before = h.stream("r").tokens
    h.update(f"/w1-eos{before[2]}")
    h.transport.sent["a"].clear()
    h.add("r", PROMPT, **fields)
    h.run_rounds()
    assert h.stream("r").tokens == before and len(before) == 12


def test_a_commit_or_a_label_of_a_fleet_sets_the_ids_whatever_the_source_names():
    h = Harness()
    session = begin(h)
    chunk(h, session, FOLDER)
    report = commit(h, session, weight_epoch=4, eos_token_ids=(5, 6)).result
    expected = {"version": "4", "weight_epoch": 4, "fingerprint": fingerprint_of(1), "eos_token_ids": [5, 6]}
    for result in (report, h.ask(m.FleetStateArgs()).result, h.ask(m.WeightInfoArgs()).result):
        assert CommittedState.of(result)._asdict() == expected | {"eos_token_ids": (5, 6)}
    assert h.ask(m.SetVersionArgs("joined", 9, (8,))).failure is None
    assert CommittedState.of(h.ask(m.FleetStateArgs()).result) == ("joined", 9, fingerprint_of(1), (8,))
    h.ask(m.SetVersionArgs("relabelled"))
    assert eos_ids(h) == [8]


def test_a_prepared_commit_and_an_export_tell_the_ids():
    h = Harness()
    session = begin(h)
    chunk(h, session, FOLDER)
    assert prepare(h, session).result["eos_token_ids"] == (FIRST[-1],)
    assert eos_ids(h) == [EOS]
    assert commit(h, session).failure is None
    exported = h.ask(m.ExportWeightsArgs(), rounds=5).result
    Path(exported["path"]).unlink()
    assert CommittedState.of(exported) == CommittedState.of(h.ask(m.FleetStateArgs()).result)
