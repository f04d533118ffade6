"""check_sync against a real server, and against the gateway of two: equal weights, planted faults, and updates in the
middle of the check. Requests go on meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from e2e.fleet_server import KINDS, FleetServer, server_of
from e2e.server import Server, in_background
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.rl.check_sync import BehaviourReport, SyncReport, Verdict, check_sync, own_engine
from fastdeploy.rl.check_sync.own_engine import OwnEngine
from fastdeploy.rl.sync_client import SyncRolloutClient
from rl.embedded_weights import embedded_weights

Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"
State = dict[str, np.ndarray]


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with server_of(request.param, "--max-num-seqs", "2", "--num-gpu-blocks-override", "128") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[SyncRolloutClient]:
    with SyncRolloutClient(server.url) as client:
        yield client


def state(step: int) -> State:
    """Return the weights of a trainer after so many updates, each of 2 % of the values."""
    tensors, rng = embedded_weights(), np.random.default_rng(5)
    for _ in range(step):
        tensors = {n: (t * (1 + 0.02 * (rng.random(t.shape) < 0.02))).astype(np.float32) for n, t in tensors.items()}
    return tensors


def check(server: Server, weights: State | Path | str, **options) -> SyncReport:
    model = MODEL_DIR if isinstance(weights, dict) else None
    return check_sync(server.url, weights, model=model, answers=False, **options)


def test_equal_weights_are_equal_and_move_no_tensor(server, client, monkeypatch):
    client.publish(state(1), version="step-1")
    monkeypatch.setattr(OwnEngine, "values", None)
    monkeypatch.setattr(OwnEngine, "digests", None)
    report = check(server, state(1))
    assert (report.verdict, report.ok, report.exit_status) == (Verdict.EQUAL, True, 0), report.how
    assert (report.tensors, report.state.version, report.state.dtype) == (len(state(1)), "step-1", "bfloat16")
    assert report.fingerprint == report.state.fingerprint == server.get("/v1/weights").result["fingerprint"]
    assert len(report.state.replicas) == (2 if isinstance(server, FleetServer) else 0)


def test_tensors_that_differ_are_named_in_the_order_of_the_model(server, client):
    wrong = state(1)
    wrong[Q] = np.ascontiguousarray(wrong[Q].T).reshape(wrong[Q].shape)
    wrong[UP] = state(0)[UP]
    client.publish(wrong, version="wrong")
    report = check(server, state(1), previous=[state(0)])
    assert [(one.tensor, one.kind) for one in report.differences] == [(UP, "stale"), (Q, "transposed")]
    assert (report.exit_status, report.state.version) == (1, "wrong")
    assert report.how == f"2 of 46 tensors differ (1 stale, 1 transposed). The first is {UP}."
    first = report.differences[0]
    assert first.how == "the values are those of 1 update before"
    assert first.changed < 0.03 * first.values and 0 < first.relative < 0.03


def test_memory_that_has_other_values_than_were_sent_is_found_when_answers_are_not_ours_to_the_bit(
    server, client, monkeypatch
):
    client.publish(state(1))
    unclear = BehaviourReport(Verdict.EQUAL, "within the bound", statistic=1.0)
    monkeypatch.setattr("fastdeploy.rl.check_sync.check.check_behaviour", lambda *args: unclear)
    report = check_sync(server.url, state(1), model=MODEL_DIR)
    assert report.ok, report.how
    found = own_engine.weight_info

    def damaged(*args) -> own_engine.WeightInfo:
        info = found(*args)
        return msgspec.structs.replace(info, checksums=info.checksums | {Q: "other"})

    monkeypatch.setattr(own_engine, "weight_info", damaged)
    report = check_sync(server.url, state(1), model=MODEL_DIR)
    assert [(one.tensor, one.kind) for one in report.differences] == [(Q, "damaged")] and report.exit_status == 1


def test_tensors_that_only_one_side_has_differ(server, client, tmp_path):
    client.publish(state(1))
    config = json.loads((MODEL_DIR / "config.json").read_text())
    untied = config | {"tie_word_embeddings": False, "num_hidden_layers": config["num_hidden_layers"] - 1}
    (tmp_path / "config.json").write_text(json.dumps(untied))
    last = f".layers.{config['num_hidden_layers'] - 1}."
    weights = {name: values for name, values in state(1).items() if last not in name}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    report = check_sync(server.url, weights, model=tmp_path, answers=False)
    kinds = {one.kind: one.tensor for one in report.differences}
    assert report.exit_status == 1 and kinds.keys() == {"missing", "unexpected"}
    assert kinds["missing"] == "lm_head.weight" and last in kinds["unexpected"]


def test_a_tensor_that_no_update_has_reached_is_that_of_the_base_model(server, client):
    client.publish(state(2) | {UP: state(0)[UP]})
    report = check(server, state(2))
    assert [(one.tensor, one.kind) for one in report.differences] == [(UP, "never updated")]


def test_a_history_tells_how_stale_weights_are(server, client, tmp_path):
    history = tmp_path / "history.json"
    client.publish(state(1))
    assert check(server, state(1), history=history).ok and check(server, state(1), history=history).ok
    for step in (2, 3):
        report = check(server, state(step), history=history)
        assert {one.how for one in report.differences} == {
            f"the values are those of {step - 1} update{'s' if step > 2 else ''} before"
        }
    check(server, {Q: state(2)[Q]}, history=history)  # a part of the weights is not kept
    assert "of 2 updates before" in check(server, state(3), history=history).differences[0].how
    client.publish(state(3))
    assert check(server, state(3), history=history).ok


def test_an_update_in_the_middle_of_the_check_lets_it_begin_again(server, client, monkeypatch):
    client.publish(state(1))
    exported, updates = OwnEngine._exported, []

    def interrupted(engine: OwnEngine, names: list[str]):
        if not updates:
            updates.append(client.publish(state(2)))
        return exported(engine, names)

    monkeypatch.setattr(OwnEngine, "_exported", interrupted)
    report = check(server, state(2))
    assert updates and report.ok and report.state.weight_epoch == updates[0].report["weight_epoch"]


def test_updates_without_end_leave_the_question_open(server, client, monkeypatch):
    client.publish(state(1))
    found = OwnEngine.changed

    def interrupted(engine: OwnEngine) -> str | None:
        client.publish(state(1))
        return found(engine)

    monkeypatch.setattr(OwnEngine, "changed", interrupted)
    report = check(server, state(1))
    assert (report.verdict, report.exit_status) == (Verdict.UNKNOWN, 2) and "committed during" in report.how


def test_requests_go_on_during_a_check_and_an_open_update_is_told(server, client):
    client.publish(state(1))
    begun = server.post("/v1/weights/begin", {"version": "next"}).result["session_id"]
    body = {"prompt": list(range(40, 60)), "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    running = in_background(server.post, "/v1/completions", body)
    done = threading.Event()
    running.add_done_callback(lambda _: done.set())
    reports = []
    while not done.is_set():
        reports.append(check(server, state(1)))
    assert all(report.ok and begun in report.notes[0] for report in reports), reports[0].notes
    assert running.result(60).ok()["usage"]["completion_tokens"] == 300
    server.post("/v1/weights/abort", {"session_id": begun}).ok()


def test_a_paused_server_is_compared_by_its_tensors_alone(server, client):
    client.publish(state(1), version="step-1")
    server.post("/v1/pause", {"mode": "keep"}).ok()
    report = check_sync(server.url, state(1), model=MODEL_DIR)
    server.post("/v1/resume").ok()
    assert report.ok and "paused" in report.behaviour.how


def test_a_part_of_the_weights_is_compared_and_the_rest_is_open(server, client):
    client.publish(state(1))
    report = check(server, {Q: state(1)[Q]})
    assert (report.verdict, report.tensors) == (Verdict.UNKNOWN, 1)
    assert "45 of 46 tensors are not among the trainer's weights" in report.how
    assert check(server, {Q: state(2)[Q]}).exit_status == 1


def test_weights_that_no_server_takes_and_weights_that_sleep_leave_the_question_open(server, client):
    report = check(server, state(1) | {"v_head.weight": np.zeros(4, np.float32)})
    assert report.exit_status == 2 and "v_head.weight" in report.how
    client.sleep("weight")
    report = check(server, state(1))
    client.wake()
    assert report.exit_status == 2 and "the weights sleep" in report.how
