"""Deltas of weights, fingerprints of results, and begins that are repeated.

The weights of the fake runner are a number. A part "d<k>" adds k to it."""

from __future__ import annotations

import weakref

import pytest

from engine.weight_calls import OVERWRITE, assert_serves, base_of, begin, chunk, commit
from fastdeploy.core.runner import Staged
from fastdeploy.core.weight_source import DeltaBase, FolderSource, PartFormat
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import FakeStaging, expected_tokens, fingerprint_of, tensor_fingerprint
from support.harness import PROMPT, Harness, one_running


def shown(h: Harness) -> str:
    """Return the fingerprint that the engine shows."""
    return h.ask(m.WeightInfoArgs()).result["fingerprint"]


# ---------------------------------------------------------------------- deltas that are committed


def test_a_delta_changes_the_weights_that_serve_while_requests_run():
    h = one_running(30)
    h.update("/w5", version="v1")
    opened = h.ask(m.BeginUpdateArgs(base=base_of(5), fingerprint=fingerprint_of(12))).result
    assert opened.items() >= {
        "version": "v1", "weight_epoch": 1, "boot_id": "boot", "fingerprint": fingerprint_of(5), "dtype": "float32",
    }.items()  # fmt: skip
    session = opened["session_id"]
    assert chunk(h, session, "/d3", form=PartFormat("overwrite")).failure is None
    assert chunk(h, session, "/d4", form=OVERWRITE).result["tensors_received"] == 6
    assert h.runner.weights == 5, "nothing changes before the commit"
    report = commit(h, session).result
    assert (report["weight_epoch"], report["fingerprint"]) == (2, fingerprint_of(12)) and shown(h) == fingerprint_of(12)
    h.run_out()
    assert_serves(h, 12)


def test_deltas_follow_each_other_and_each_names_the_weights_before_it():
    h = Harness()
    for weights in range(0, 30, 10):
        session = begin(h, base=base_of(weights, weight_epoch=weights // 10, version=str(weights // 10)))
        chunk(h, session, "/d10", form=OVERWRITE)
        assert commit(h, session, fingerprint=fingerprint_of(weights + 10)).failure is None
    assert_serves(h, 30)


def test_a_delta_may_come_in_one_call():
    h = Harness()
    args = {"base": base_of(0), "fingerprint": fingerprint_of(4), "form": OVERWRITE}
    assert h.update("/d4", **args).failure is None and h.runner.weights == 4
    refused = h.update("/d4", **args).failure
    assert refused.code == "base_mismatch" and h.runner.weights == 4, "the delta was applied already"


def test_the_kv_of_a_delta_may_be_recomputed():
    h = one_running(rounds=5)
    session = begin(h, base=base_of(0), fingerprint=fingerprint_of(7), kv="recompute")
    chunk(h, session, "/d7-recompute", form=OVERWRITE)
    assert commit(h, session).result["tokens_to_recompute"] > 0
    h.run_out()
    assert h.stream("r").reason == "length"


# ---------------------------------------------------------------------- other bases


@pytest.mark.parametrize(
    ("base", "field"),
    [(base_of(6), "base_fingerprint"), (base_of(5, weight_epoch=0), "base_epoch"),
     (base_of(5, version="v0"), "base_version")],
)  # fmt: skip
def test_another_base_is_refused_with_what_serves_and_touches_nothing(base, field):
    h = Harness()
    h.update("/w5", version="v1")
    stagings = len(h.runner.stagings)
    serves = {"version": "v1", "weight_epoch": 1, "boot_id": "boot", "fingerprint": fingerprint_of(5)}
    begin_args = m.BeginUpdateArgs(base=base, fingerprint=fingerprint_of(9))
    one_call = m.UpdateWeightsArgs(FolderSource("/d4"), base=base, fingerprint=fingerprint_of(9))
    for args in (begin_args, m.CheckUpdateArgs(begin=begin_args), one_call):
        refused = h.failure(args)
        assert refused.code == "base_mismatch" and field in refused.message
        assert refused.detail == serves
    assert len(h.runner.stagings) == stagings and h.engine.weights.session is None
    assert_serves(h, 5)


def test_without_complete_weights_no_base_serves():
    h = Harness()
    h.ask(m.SleepArgs(("weight",), discard=True), rounds=20)
    h.ask(m.WakeArgs(("weight",)))
    refused = h.failure(m.BeginUpdateArgs(base=base_of(0)))
    assert refused.code == "base_mismatch" and refused.detail["fingerprint"] is None
    assert h.update("/w1", fingerprint=fingerprint_of(1)).failure is None


def test_the_base_is_checked_again_at_the_commit_and_before_the_weights_are_replaced():
    h = Harness()
    session = begin(h, base=base_of(0, version="0"), fingerprint=fingerprint_of(4))
    chunk(h, session, "/d4", form=OVERWRITE)
    h.ask(m.SetVersionArgs("other"))
    assert commit(h, session).failure.code == "base_mismatch"
    assert h.engine.weights.session.id == session, "the session is still open"
    h.ask(m.SetVersionArgs("0"))
    h.runner.may_stage.clear()
    call = h.call(m.CommitUpdateArgs(session))
    h.run_rounds()
    h.ask(m.SetVersionArgs("other"))
    h.runner.may_stage.set()
    h.run_rounds(3)
    assert h.reply(call).failure.code == "base_mismatch" and h.engine.weights.session is None
    assert_serves(h, 0)


# ---------------------------------------------------------------------- wrong results


@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("one_call", [True, False])
def test_a_result_that_is_not_the_one_named_is_refused_and_the_old_weights_serve_on(delta, one_call):
    h = Harness()
    h.add("r", PROMPT, max_tokens=30)
    folder, base = ("/d4", base_of(0)) if delta else ("/w4", None)
    if one_call:
        failure = h.update(folder, base=base, fingerprint=fingerprint_of(9)).failure
    else:
        session = begin(h, base=base, fingerprint=fingerprint_of(9))
        chunk(h, session, folder)
        failure = commit(h, session).failure
        late = h.failure(m.CommitUpdateArgs(session))
        assert (late.code, late.message) == (failure.code, failure.message)
    assert failure.code == "weight_update_refused"
    named = {"param": "fingerprint", "expected": fingerprint_of(9), "got": fingerprint_of(4)}
    assert failure.detail == named
    h.run_rounds(2)
    assert (
        h.runner.stagings[0].abandoned and h.engine.weights.session is None and h.metric("weight_updates_failed") == 1
    )
    h.run_out()
    assert h.stream("r").tokens == expected_tokens(PROMPT, 30)
    assert h.update("/w1").failure is None


def test_the_fingerprint_of_the_commit_replaces_that_of_begin():
    h = Harness()
    session = begin(h, base=base_of(0), fingerprint=fingerprint_of(9))
    chunk(h, session, "/d4", form=OVERWRITE)
    assert commit(h, session, fingerprint=fingerprint_of(4)).failure is None
    assert_serves(h, 4)


def test_weights_with_another_fingerprint_than_named_are_freed(monkeypatch):
    class Large: ...

    made = []

    def finish(staging):
        made.append(weakref.ref(large := Large()))
        return Staged(large, fingerprint_of(4))

    monkeypatch.setattr(FakeStaging, "finish", finish)
    h = Harness()
    assert h.update("/w4", fingerprint=fingerprint_of(9)).failure.code == "weight_update_refused"
    h.run_rounds(2)
    assert made[0]() is None


def test_a_part_whose_tensor_has_another_fingerprint_than_named_is_refused_and_names_the_tensor():
    h = Harness()
    session = begin(h, base=base_of(0), fingerprint=fingerprint_of(4))
    right = PartFormat("overwrite", "none", {"weights": tensor_fingerprint(1)})
    assert chunk(h, session, "/d1", form=right).failure is None
    refused = chunk(h, session, "/d3", form=right).failure
    assert refused.code == "weight_update_refused" and "tensor weights" in refused.message
    assert h.failure(m.CommitUpdateArgs(session)).code == "session_not_found"
    assert_serves(h, 0)


# ---------------------------------------------------------------------- invalid fields


@pytest.mark.parametrize(
    ("args", "field"),
    [({"base": DeltaBase("x")}, "base_fingerprint"), ({"base": DeltaBase("B" * 64)}, "base_fingerprint"),
     ({"base": base_of(0, version="")}, "base_version"), ({"fingerprint": "0" * 63}, "fingerprint"),
     ({"base": base_of(0), "partial": True}, "partial"),
     ({"idempotency_key": ""}, "idempotency_key"), ({"idempotency_key": "k" * 257}, "idempotency_key")],
)  # fmt: skip
def test_a_begin_with_an_invalid_field_opens_no_session(args, field):
    h = Harness()
    for call in (m.BeginUpdateArgs(**args), m.CheckUpdateArgs(begin=m.BeginUpdateArgs(**args))):
        h.assert_refused(call, field)
    assert h.engine.weights.session is None and not h.runner.stagings


def test_a_delta_must_name_its_result():
    h = Harness()
    h.assert_refused(m.UpdateWeightsArgs(FolderSource("/d4"), base=base_of(0)), "fingerprint")
    h.assert_refused(m.CheckUpdateArgs(begin=m.BeginUpdateArgs(base=base_of(0))), "fingerprint")
    session = begin(h, base=base_of(0))
    chunk(h, session, "/d4", form=OVERWRITE)
    h.assert_refused(m.CommitUpdateArgs(session), "fingerprint")
    h.assert_refused(m.CommitUpdateArgs(session, fingerprint="4"), "fingerprint")
    assert commit(h, session, fingerprint=fingerprint_of(4)).failure is None


FORMS = [
    (base_of(0), PartFormat("sparse"), "encoding"),
    (base_of(0), PartFormat("overwrite", "gzip"), "compression"),
    (base_of(0), PartFormat("overwrite", "none", {"a": "d" * 31}), "fingerprints"),
    (base_of(0), PartFormat("overwrite", "none", {"a": "D" * 32}), "fingerprints"),
    (None, PartFormat("dense", "none", {str(i): "d" * 32 for i in range(32_769)}), "fingerprints"),
    (None, PartFormat("overwrite"), "encoding"),
    (None, PartFormat("overwrite", "zstd"), "encoding"),
    (None, PartFormat("dense", "zstd"), "compression"),
    (None, PartFormat(layout="torch"), "layout"),
    (base_of(0), PartFormat("overwrite", layout="paddle"), "layout"),
    (base_of(0), PartFormat("dense", "zstd", layout="paddleformers"), "layout"),
]


@pytest.mark.parametrize(("base", "form", "field"), FORMS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_form_that_the_session_does_not_take_is_refused_and_the_session_goes_on(base, form, field):
    h = Harness()
    one_call = m.UpdateWeightsArgs(FolderSource("/d4"), base=base, fingerprint=fingerprint_of(4), form=form)
    begin_args = m.BeginUpdateArgs(base=base, fingerprint=fingerprint_of(4))
    for args in (one_call, m.CheckUpdateArgs(begin=begin_args, form=form)):
        h.assert_refused(args, field)
    session = begin(h, base=base, fingerprint=fingerprint_of(4))
    for args in (m.UpdatePartArgs(session, FolderSource("/d4"), form=form), m.CheckUpdateArgs(session, form=form)):
        h.assert_refused(args, field)
    chunk(h, session, "/d4" if base else "/w4")
    assert commit(h, session).failure is None
    assert_serves(h, 4)


# ---------------------------------------------------------------------- a begin that is repeated


def test_a_begin_with_the_key_of_the_open_session_gets_its_reply_again_and_renews_its_lease():
    h = Harness()
    args = m.BeginUpdateArgs(lease_s=5.0, idempotency_key="k", version="v")
    first = h.ask(args).result
    chunk(h, first["session_id"], "/w1")
    h.now += 4.0
    h.ask(m.SetVersionArgs("other"))
    assert h.ask(args).result == first and len(h.runner.stagings) == 1
    h.now += 4.0
    h.run_rounds()
    assert commit(h, first["session_id"]).result["tensors"] == 3, "the session goes on"


def test_a_repeated_begin_must_have_the_fields_of_the_first():
    h = Harness()
    session = begin(h, idempotency_key="k")
    h.assert_refused(m.BeginUpdateArgs(idempotency_key="k", partial=True), "idempotency_key")
    for args in (m.BeginUpdateArgs(), m.BeginUpdateArgs(idempotency_key="other")):
        assert h.failure(args).code == "update_in_progress"
    assert h.engine.weights.session.id == session


def test_a_begin_with_the_key_of_an_ended_session_gets_the_reason_of_its_end():
    h = Harness()
    session = begin(h, idempotency_key="committed")
    chunk(h, session, "/w1")
    commit(h, session)
    begin(h, idempotency_key="expired", lease_s=1.0)
    h.now += 2.0
    h.run_rounds(2)
    begin(h, idempotency_key="aborted")
    h.ask(m.AbortUpdateArgs())
    for key, code in (
        ("committed", "session_not_found"),
        ("expired", "session_expired"),
        ("aborted", "session_not_found"),
    ):
        lease = {"lease_s": 1.0} if key == "expired" else {}
        refused = h.failure(m.BeginUpdateArgs(idempotency_key=key, **lease))
        assert refused.code == code and key in refused.message.replace("the lease of", "expired")
    assert h.engine.weights.session is None


def test_a_key_whose_begin_was_refused_may_be_used_again():
    h = Harness()
    assert h.failure(m.BeginUpdateArgs(idempotency_key="k", expected_version="7")).code == "version_conflict"
    begin(h, idempotency_key="k")


def test_only_the_latest_ended_sessions_keep_their_keys():
    h = Harness()
    for number in range(70):
        begin(h, idempotency_key=f"k{number}")
        h.ask(m.AbortUpdateArgs())
    assert h.failure(m.BeginUpdateArgs(idempotency_key="k69")).code == "session_not_found"
    begin(h, idempotency_key="k0")


# ---------------------------------------------------------------------- while the weights sleep


@pytest.mark.parametrize("discard", [True, False])
def test_a_publish_to_weights_that_sleep_says_how_to_wake_them(discard):
    h = Harness()
    h.ask(m.SleepArgs(("weight",), discard=discard), rounds=20)
    assert (info := h.ask(m.WeightInfoArgs()).result)["fingerprint"] is None and info["dtype"] == "float32"
    for args in (
        m.BeginUpdateArgs(),
        m.BeginUpdateArgs(partial=True, placed_by="sglang"),
        m.BeginUpdateArgs(base=base_of(0)),
        m.UpdateWeightsArgs(FolderSource("/w1")),
        m.CheckUpdateArgs(begin=m.BeginUpdateArgs(partial=True), placed_by="sglang"),
    ):
        refused = h.failure(args)
        assert refused.code == "wrong_order"
        assert "/v1/wakeup with tags=weight" in refused.message and "discard" in refused.message
    assert h.ask(m.WakeArgs(("weight",)), rounds=5).failure is None
    assert h.update("/w1").failure is None
