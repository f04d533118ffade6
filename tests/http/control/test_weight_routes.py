"""Native weight routes over real HTTP: the calls that reach the engine, and the replies."""

from __future__ import annotations

import json

import pytest

from fastdeploy.core.weight_source import DeltaBase, FolderSource, PartFormat, SharedMemorySource
from fastdeploy.inter_communicator import messages as m
from support.http_calls import OCTETS, answer
from support.upload_engine import SESSION, UploadEngine


def assert_invalid(reply, field: str) -> None:
    assert reply.status_code == 400, reply.text
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == ("invalid_field", field)


BASE, RESULT, OF_A = "b" * 64, "c" * 64, "d" * 32
CASES = [
    (
        "/v1/update_weights",
        {"model_path": "/m", "version": 7, "expected_version": "6", "kv": "recompute", "partial": True,
         "checksums": {"a": "ff"}, "verify_checksum": True},
        m.UpdateWeightsArgs(FolderSource("/m"), "7", "6", "recompute", True, {"a": "ff"}, True),
    ),
    ("/v1/update_weights", {"model_path": "/m"}, m.UpdateWeightsArgs(FolderSource("/m"))),
    ("/v1/update_weights", {"model_path": "/m", "version": None, "kv": None}, m.UpdateWeightsArgs(FolderSource("/m"))),
    ("/v1/update_weights", {"shared_memory": "/s"}, m.UpdateWeightsArgs(SharedMemorySource("/s"))),
    ("/v1/update_weights", {"shared_memory": "s", "nbytes": 9}, m.UpdateWeightsArgs(SharedMemorySource("s", 9))),
    ("/v1/update_weights", {"version": "v"}, m.SetVersionArgs("v")),
    ("/v1/update_weights", {"version": 8}, m.SetVersionArgs("8")),
    ("/v1/weights/begin", {}, m.BeginUpdateArgs()),
    (
        "/v1/weights/begin",
        {"version": 1, "expected_version": 0, "kv": "recompute", "partial": True, "lease_s": 9},
        m.BeginUpdateArgs("1", "0", "recompute", True, 9.0),
    ),
    (
        "/v1/weights/begin",
        {"base_fingerprint": BASE, "base_epoch": 3, "base_version": 2, "fingerprint": RESULT, "idempotency_key": "k"},
        m.BeginUpdateArgs(base=DeltaBase(BASE, 3, "2"), fingerprint=RESULT, idempotency_key="k"),
    ),
    ("/v1/weights/begin", {"base_fingerprint": BASE}, m.BeginUpdateArgs(base=DeltaBase(BASE))),
    (
        "/v1/update_weights",
        {"model_path": "/m", "base_fingerprint": BASE, "fingerprint": RESULT, "encoding": "overwrite",
         "compression": "zstd", "fingerprints": {"a": OF_A}, "timeout_s": 5},
        m.UpdateWeightsArgs(FolderSource("/m"), timeout_s=5.0, form=PartFormat("overwrite", "zstd", {"a": OF_A}),
                            base=DeltaBase(BASE), fingerprint=RESULT),
    ),
    (
        "/v1/weights/chunk",
        {"session_id": "s", "shared_memory": "x", "encoding": "overwrite", "fingerprints": {"a": OF_A}},
        m.UpdatePartArgs("s", SharedMemorySource("x"), form=PartFormat("overwrite", "none", {"a": OF_A})),
    ),
    ("/v1/weights/commit", {"session_id": "s", "fingerprint": RESULT}, m.CommitUpdateArgs("s", fingerprint=RESULT)),
    (
        "/v1/weights/chunk",
        {"session_id": "s", "model_path": "/m", "checksums": {"a": "ff"}, "verify_checksum": True},
        m.UpdatePartArgs("s", FolderSource("/m"), checksums={"a": "ff"}, verify_checksum=True),
    ),
    ("/v1/weights/chunk", {"session_id": "s", "shared_memory": "x", "layout": "paddle"},
     m.UpdatePartArgs("s", SharedMemorySource("x"), form=PartFormat(layout="paddle"))),
    ("/v1/weights/chunk", {"session_id": "s", "shared_memory": "x", "nbytes": 3},
     m.UpdatePartArgs("s", SharedMemorySource("x", 3))),
    ("/v1/weights/commit", {"session_id": "s"}, m.CommitUpdateArgs("s")),
    ("/v1/weights/commit", {"session_id": "s", "version": 3, "kv": "keep"}, m.CommitUpdateArgs("s", "3", "keep")),
    ("/v1/weights/abort", {}, m.AbortUpdateArgs()),
    ("/v1/weights/abort", {"session_id": "s"}, m.AbortUpdateArgs("s")),
    ("/v1/sleep", {}, m.SleepArgs()),
    ("/v1/sleep", {"tags": ["weight", "kv_cache"], "mode": "abort", "discard": True, "timeout_s": 3},
     m.SleepArgs(("weight", "kv_cache"), "abort", True, 3.0)),
    ("/v1/wakeup", {}, m.WakeArgs()),
    ("/v1/wakeup", {"tags": ["weight"]}, m.WakeArgs(("weight",))),
    ("/v1/reset", {}, m.ResetArgs()),
    ("/v1/reset", {"version": 0}, m.ResetArgs("0")),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "args"), CASES, ids=str)
def test_a_body_becomes_a_call_of_the_engine_and_the_reply_carries_the_result(module_stack, path, body, args):
    answer(module_stack, type(args), {"told": 1})
    reply = module_stack.post(path, **body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["result"] == {"told": 1} and reply.json()["status"] == "success"
    assert reply.json()["error_message"] is None and reply.json()["request_id"]
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert module_stack.engine.expect(type(args)).args == args


@pytest.mark.parametrize(
    ("query", "args"),
    [
        ("/v1/sleep?tags=weight,kv_cache&mode=wait", m.SleepArgs(("weight", "kv_cache"), "wait")),
        ("/v1/sleep?tags=weight&tags=kv_cache&discard=true", m.SleepArgs(("weight", "kv_cache"), discard=True)),
        ("/v1/sleep/?tags=weight", m.SleepArgs(("weight",))),
        ("/v1/wakeup?tags=kv_cache", m.WakeArgs(("kv_cache",))),
        ("/v1/weights/begin?partial=true&lease_s=4.5", m.BeginUpdateArgs(partial=True, lease_s=4.5)),
        (f"/v1/weights/begin?base_fingerprint={BASE}&base_epoch=7&idempotency_key=k",
         m.BeginUpdateArgs(base=DeltaBase(BASE, 7), idempotency_key="k")),
        ("/v1/weights/commit?session_id=s&version=3", m.CommitUpdateArgs("s", "3")),
        ("/v1/update_weights?model_path=/m&version=3", m.UpdateWeightsArgs(FolderSource("/m"), "3")),
        ("/v1/reset?version=3", m.ResetArgs("3")),
    ],
)  # fmt: skip
def test_a_query_may_replace_the_body(module_stack, query, args):
    answer(module_stack, type(args))
    assert module_stack.http.post(query).status_code == 200
    assert module_stack.engine.expect(type(args)).args == args


def test_an_upload_takes_its_fields_from_the_query(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    UploadEngine(stack.engine)
    sums = json.dumps({"a": "ff"})
    query = {"version": "7", "kv": "recompute", "partial": "true", "checksums": sums}
    assert stack.http.post("/v1/update_weights", params=query, content=b"{x", headers=OCTETS).status_code == 200
    begin = m.BeginUpdateArgs("7", kv="recompute", partial=True, ends_with_client=True)
    assert stack.engine.expect(m.BeginUpdateArgs).args == begin
    args = stack.engine.expect(m.UpdatePartArgs).args
    assert args == m.UpdatePartArgs(SESSION, args.source, checksums={"a": "ff"})
    query = {"session_id": "s", "checksums": sums, "verify_checksum": "true"}
    assert stack.http.post("/v1/weights/chunk", params=query, content=b"x", headers=OCTETS).status_code == 200
    args = stack.engine.expect(m.UpdatePartArgs).args
    assert args == m.UpdatePartArgs("s", args.source, checksums={"a": "ff"}, verify_checksum=True)


def test_an_uploaded_delta_takes_its_fields_from_the_query_and_is_checked_before_it_is_received(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    UploadEngine(stack.engine)
    answer(stack, m.CheckUpdateArgs, {"session_id": None})
    of_part = {"encoding": "overwrite", "compression": "zstd", "fingerprints": json.dumps({"a": OF_A})}
    form = PartFormat("overwrite", "zstd", {"a": OF_A})
    query = {"base_fingerprint": BASE, "base_version": "2", "fingerprint": RESULT, **of_part}
    assert stack.http.post("/v1/update_weights", params=query, content=b"x", headers=OCTETS).status_code == 200
    base = DeltaBase(BASE, version="2")
    begin = m.BeginUpdateArgs(base=base, fingerprint=RESULT)
    assert stack.engine.expect(m.CheckUpdateArgs).args == m.CheckUpdateArgs(begin=begin, form=form)
    args = stack.engine.expect(m.UpdatePartArgs).args
    assert args == m.UpdatePartArgs(SESSION, args.source, form=form)
    query = {"session_id": "s", **of_part}
    assert stack.http.post("/v1/weights/chunk", params=query, content=b"x", headers=OCTETS).status_code == 200
    assert stack.engine.expect(m.CheckUpdateArgs).args == m.CheckUpdateArgs("s", form=form)
    args = stack.engine.expect(m.UpdatePartArgs).args
    assert args == m.UpdatePartArgs("s", args.source, form=form)


def test_a_delta_against_other_weights_is_a_409_that_describes_what_serves(module_stack):
    serves = {"version": "7", "weight_epoch": 3, "boot_id": "b", "fingerprint": RESULT}
    answer(module_stack, m.BeginUpdateArgs, {}, m.Failure("base_mismatch", "because", serves))
    reply = module_stack.post("/v1/weights/begin", base_fingerprint=BASE)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (409, "base_mismatch") and serves.items() <= error.items()


def test_info_with_and_without_checksums_and_fingerprints(module_stack):
    answer(module_stack, m.WeightInfoArgs, {"version": "0"})
    for query, checksums, fingerprints in (
        ("", False, False),
        ("/", False, False),
        ("?checksums=true", True, False),
        ("?fingerprints=true", False, True),
    ):
        assert module_stack.http.get(f"/v1/weights{query}").json()["result"] == {"version": "0"}
        asked = m.WeightInfoArgs(checksums, fingerprints)
        assert module_stack.engine.expect(m.WeightInfoArgs).args == asked


# Path -> pairs of a body and its wrong field.
BAD = {
    "/v1/update_weights": [
        ({}, "model_path"), ({"version": None}, "model_path"), ({"kv": "keep"}, "model_path"),
        ({"model_path": "/m", "shared_memory": "s"}, "model_path"), ({"model_path": ""}, "model_path"),
        ({"model_path": "/m", "kv": "x"}, "kv"), ({"model_path": "/m", "checksums": {"a": 1}}, "checksums.a"),
        ({"model_path": "/m", "nbytes": -1}, "nbytes"), ({"model_path": "/m", "serialized": "x"}, "serialized"),
        ({"model_path": "/m", "in_place": True}, "in_place"),
        ({"version": "v", "base_fingerprint": BASE}, "base_fingerprint"), ({"version": "v", "kv": "recompute"}, "kv"),
        ({"version": "v", "fingerprint": RESULT}, "fingerprint"), ({"version": "v", "encoding": "xor"}, "encoding"),
        ({"model_path": "/m", "fingerprints": {"a": "d"}}, "fingerprints.a"),
        ({"model_path": "/m", "compression": "gzip"}, "compression"),
        ({"model_path": "/m", "base_epoch": 1}, "base_fingerprint"),
        ({"version": "v", "expected_version": "u"}, "expected_version"), ({"version": "x" * 257}, "version"),
        *(({"model_path": "/m", "version": version}, "version") for version in ("", True, [1], 1.5, 10**4000)),
    ],
    "/v1/weights/begin": [
        ({"lease_s": 0}, "lease_s"), ({"lease_s": 86401}, "lease_s"), ({"lora_name": "a"}, "lora_name"),
        ({"model_path": "/m"}, "model_path"),
        *(({"base_fingerprint": value}, "base_fingerprint") for value in ("", "b" * 63, "B" * 64, BASE + "\n", 7)),
        ({"base_fingerprint": BASE, "base_epoch": -1}, "base_epoch"),
        ({"base_fingerprint": BASE, "base_epoch": 2**63}, "base_epoch"),
        ({"base_fingerprint": BASE, "base_version": ""}, "base_version"),
        ({"base_version": "1"}, "base_fingerprint"), ({"fingerprint": "x" * 64}, "fingerprint"),
        ({"idempotency_key": ""}, "idempotency_key"), ({"idempotency_key": "k" * 257}, "idempotency_key"),
    ],
    "/v1/weights/chunk": [
        ({"model_path": "/m"}, "session_id"), ({"session_id": "s"}, "model_path"),
        ({"session_id": "s", "model_path": "/m", "encoding": "sparse"}, "encoding"),
        ({"session_id": "s", "model_path": "/m", "fingerprints": [1]}, "fingerprints"),
        ({"session_id": "s", "model_path": "/m", "layout": "torch"}, "layout"),
    ],
    "/v1/weights/commit": [
        ({}, "session_id"), ({"session_id": "s", "kv": "x"}, "kv"),
        ({"session_id": "s", "fingerprint": RESULT + "0"}, "fingerprint"),
    ],
    "/v1/sleep": [
        ({"tags": ["weights"]}, "tags.0"), ({"tags": [1]}, "tags.0"), ({"tags": {"weight": 1}}, "tags"),
        ({"mode": "nap"}, "mode"), ({"level": 1}, "level"),
    ],
    "/v1/wakeup": [({"tags": ["x"]}, "tags.0")],
    "/v1/reset": [({"version": ""}, "version")],
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "field"), [(path, *case) for path in BAD for case in BAD[path]], ids=str)
def test_a_wrong_call_is_a_400_that_names_the_field(module_stack, path, body, field):
    assert_invalid(module_stack.post(path, **body), field)


def test_an_upload_with_another_source_or_malformed_checksums_is_a_400(make_stack, tmp_path):
    stack = make_stack(upload_dir=str(tmp_path))
    for path in ("/v1/update_weights?model_path=/m", "/v1/weights/chunk?session_id=s&shared_memory=x"):
        assert_invalid(stack.http.post(path, content=b"x", headers=OCTETS), "model_path")
    for field in ("checksums", "fingerprints"):
        assert_invalid(stack.http.post(f"/v1/update_weights?{field}=a", content=b"x", headers=OCTETS), field)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "status"),
    [("weight_update_refused", 400), ("update_in_progress", 409), ("session_not_found", 404), ("session_expired", 409),
     ("version_conflict", 409), ("wrong_order", 409), ("out_of_space", 507), ("resume_refused", 409)],
)  # fmt: skip
def test_a_call_that_the_engine_refuses_has_its_status_and_the_report(module_stack, code, status):
    answer(module_stack, m.CommitUpdateArgs, {"version": "0"}, m.Failure(code, "because", {"tensor": "a"}))
    reply = module_stack.post("/v1/weights/commit", session_id="s")
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["message"]) == (status, code, "because")
    assert error["tensor"] == "a" and error["report"] == {"version": "0"}
