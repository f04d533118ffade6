"""SGLang's weight routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as safetensors_bytes

from fastdeploy.core.weight_source import FileSource, FolderSource
from fastdeploy.inter_communicator import messages as m

REPORT = {"status": "committed", "version": "7", "weight_epoch": 3, "state": "running", "requests_in_flight": 2}
OPENED = {"session_id": "s-1", "lease_s": 300.0}
UPLOAD = safetensors_bytes({"w": np.arange(4, dtype=np.float32)})
OTHER = safetensors_bytes({"v": np.ones(2, np.float32)})


class Weights:
    """Answers weight calls, records their order, and reads the tensors of the files that they name.

    open_by: the owner of the session that is open. failures: by the name of the call."""

    def __init__(self, stack, open_by: str = "", **failures: m.Failure):
        self.calls: list = []
        self.tensors: list[dict] = []
        self.paths: list[str] = []
        self._open_by, self._failures = open_by, failures
        replies = {
            m.UpdateWeightsArgs: REPORT, m.CommitUpdateArgs: REPORT, m.BeginUpdateArgs: OPENED,
            m.UpdatePartArgs: {"session_id": "s-1"}, m.AbortUpdateArgs: {}, m.AbortArgs: {}, m.PauseArgs: {},
            m.ResumeArgs: {}, m.ResetCacheArgs: {}, m.WeightInfoArgs: {"checksums": {"w": "00"}, "checksum": "11"},
        }  # fmt: skip
        for kind, result in replies.items():
            stack.engine.replies[kind] = lambda call, result=result: self._reply(call, result)

    def _reply(self, call: m.Call, result: dict) -> m.Reply:
        if getattr(call.args, "session_id", "") is None and call.args.placed_by != self._open_by:
            if isinstance(call.args, m.CommitUpdateArgs):
                return m.Reply(call.call_id, {}, m.Failure("wrong_order", "no weight update is open"))
            return m.Reply(call.call_id, {"session_id": None})
        source = getattr(call.args, "source", None)
        if isinstance(source, FileSource):
            self.paths.append(source.path)
            self.tensors.append(load_file(source.path))
        self.calls.append(call.args)
        return m.Reply(call.call_id, result, self._failures.get(type(call.args).__name__))

    @property
    def kinds(self) -> list[str]:
        return [type(call).__name__.removesuffix("Args") for call in self.calls]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def refused(reply, *words: str) -> dict:
    """Assert status 400, both in SGLang's shape and in that of every other route."""
    body = reply.json()
    assert reply.status_code == 400 and body["success"] is False, reply.text
    assert body["message"] == body["error"]["message"] and body["error"]["code"]
    for word in words:
        assert word in body["message"], body["message"]
    return body


# ---------------------------------------------------------------------- from a folder


def test_a_folder_becomes_one_update_that_aborts_nothing(stack):
    """known failure 26: the body is that of slime"""
    weights = Weights(stack)
    body = {"model_path": "/ckpt/7", "load_format": None, "weight_version": "7", "flush_cache": True}
    reply = stack.post("/update_weights_from_disk", **body)
    assert reply.status_code == 200 and "content-length" in reply.headers
    assert reply.json().items() >= {"success": True, "num_paused_requests": 0}.items() and reply.json()["message"]
    assert weights.calls == [m.UpdateWeightsArgs(FolderSource("/ckpt/7"), version="7"), m.ResetCacheArgs()]
    stack.post("/update_weights_from_disk", model_path="/ckpt/7", weight_version=8, flush_cache=False)
    assert weights.calls[2:] == [m.UpdateWeightsArgs(FolderSource("/ckpt/7"), version="8")]


def test_abort_all_aborts_only_when_the_new_weights_are_ready(stack):
    """AReaL sends abort_all_requests. The pause has a hold of its own, so that an earlier pause continues."""
    weights = Weights(stack)
    assert stack.post("/update_weights_from_disk", model_path="/ckpt/7", abort_all_requests=True).status_code == 200
    assert weights.kinds == ["BeginUpdate", "UpdatePart", "Pause", "CommitUpdate", "Resume", "ResetCache"]
    pause, resume = weights.calls[2], weights.calls[4]
    assert (pause.mode, pause.admission, pause.hold_id) == ("abort", "hold", resume.hold_id) and pause.hold_id
    assert pause.ttl_s is not None, "the hold ends even if this process dies before it resumes"


def test_a_bad_folder_aborts_no_request_and_ends_its_session(stack):
    weights = Weights(stack, UpdatePartArgs=m.Failure("weight_update_refused", "w.safetensors: header too large"))
    body = refused(stack.post("/update_weights_from_disk", model_path="/bad", abort_all_requests=True), "header")
    assert body["num_paused_requests"] == 0
    assert weights.kinds == ["BeginUpdate", "UpdatePart", "AbortUpdate"]


def test_a_failed_commit_releases_its_hold(stack):
    weights = Weights(stack, CommitUpdateArgs=m.Failure("version_conflict", "not the expected version"))
    refused(stack.post("/update_weights_from_disk", model_path="/ckpt", abort_all_requests=True), "expected")
    assert weights.kinds[-2:] == ["Resume", "AbortUpdate"]


@pytest.mark.parametrize("code", ["update_in_progress", "wrong_order", "invalid_field", "weight_update_refused"])
def test_every_refusal_of_an_update_is_a_400_in_sglangs_shape(stack, code):
    Weights(stack, UpdateWeightsArgs=m.Failure(code, "because"))
    body = refused(stack.post("/update_weights_from_disk", model_path="/ckpt"), "because")
    assert body["num_paused_requests"] == 0 and body["error"]["code"] == code


def test_an_error_of_the_server_keeps_its_status(stack):
    Weights(stack, UpdateWeightsArgs=m.Failure("out_of_space", "no room"))
    reply = stack.post("/update_weights_from_disk", model_path="/ckpt")
    assert reply.status_code == 507 and reply.json()["success"] is False


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "model_path"), ({"model_path": "/c", "load_format": "dummy"}, "load_format"),
     ({"model_path": "/c", "manifest": {"a": 1}}, "manifest"),
     ({"model_path": "/c", "weight_version": ""}, "weight_version")],
)  # fmt: skip
def test_a_folder_request_that_cannot_be_honoured_names_its_field(module_stack, body, field):
    refused(module_stack.post("/update_weights_from_disk", **body), field)


# ---------------------------------------------------------------------- from tensors


def test_safetensors_bytes_update_the_tensors_that_arrive(stack):
    """The file of the upload is removed before the reply."""
    weights = Weights(stack)
    body = {"serialized_named_tensors": [b64(UPLOAD)], "load_format": "flattened_bucket", "flush_cache": False}
    reply = stack.post("/update_weights_from_tensor", **body, weight_version="7")
    assert reply.status_code == 200 and reply.json()["success"] is True
    (update,) = weights.calls
    assert (update.version, update.partial) == ("7", True)
    assert weights.tensors[0]["w"].tolist() == [0, 1, 2, 3]
    assert not Path(weights.paths[0]).exists()


def test_entries_of_several_ranks_are_one_update_and_equal_ones_count_once(stack):
    weights = Weights(stack)
    entries = [b64(UPLOAD), b64(UPLOAD), b64(OTHER)]
    assert stack.post("/update_weights_from_tensor", serialized_named_tensors=entries).status_code == 200
    assert weights.kinds == ["BeginUpdate", "UpdatePart", "UpdatePart", "CommitUpdate", "ResetCache"]
    assert [list(t) for t in weights.tensors] == [["w"], ["v"]]


class MakesFolder:
    """Makes the folder ``path`` if a pickle of this object is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_never_run(stack, tmp_path, protocol):
    """known failure 30: as SGLang's own clients serialise tensors"""
    weights = Weights(stack)
    pickled = pickle.dumps(MakesFolder(tmp_path / "pwned"), protocol)
    refused(stack.post("/update_weights_from_tensor", serialized_named_tensors=[b64(pickled)]), "pickle", "safetensors")
    refused(stack.post("/update_weights_from_tensor", serialized_named_tensors=[b64(UPLOAD), b64(pickled)]), "[1]")
    assert not (tmp_path / "pwned").exists() and weights.calls == []


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"serialized_named_tensors": [b64(b"PK\x03\x04" + bytes(64))]}, "pickle"),
        ({"serialized_named_tensors": [b64(b"nonsense" * 9)]}, "safetensors"),
        ({"serialized_named_tensors": [b64(b"")]}, "safetensors"),
        ({"serialized_named_tensors": ["%%%"]}, "base64"),
        ({"serialized_named_tensors": []}, "at least one"),
        ({}, "serialized_named_tensors"),
        ({"serialized_named_tensors": [b64(UPLOAD)], "load_format": "delta"}, "load_format"),
        ({"serialized_named_tensors": [b64(UPLOAD)], "selector": "draft"}, "selector"),
        ({"serialized_named_tensors": [b64(UPLOAD)], "weight_version": ""}, "weight_version"),
    ],
)
def test_an_upload_that_cannot_be_taken_says_why(module_stack, body, word):
    refused(module_stack.post("/update_weights_from_tensor", **body), word)


def test_a_safetensors_file_that_begins_like_a_pickle_is_taken(stack):
    """The first byte of a safetensors file is the lowest byte of its header's length."""
    weights = Weights(stack)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(0x80)
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    assert data[:1] == b"\x80"
    assert stack.post("/update_weights_from_tensor", serialized_named_tensors=[b64(data)]).status_code == 200
    assert weights.kinds[0] == "UpdateWeights"


# ---------------------------------------------------------------------- sessions


def test_begin_and_end_make_one_update_of_all_buckets(stack):
    weights = Weights(stack)
    assert stack.post("/begin_weight_update", selector="all").json()["success"] is True
    (begun,) = weights.calls
    assert (begun.partial, begun.placed_by) == (True, "sglang")
    weights = Weights(stack, open_by="sglang")
    stack.post("/update_weights_from_tensor", serialized_named_tensors=[b64(UPLOAD)], weight_version="7")
    stack.post("/update_weights_from_disk", model_path="/ckpt")
    assert stack.post("/end_weight_update").json()["success"] is True
    assert weights.kinds == ["UpdatePart", "UpdatePart", "CommitUpdate", "ResetCache"]
    assert weights.calls[0].version == "7"
    assert {(call.session_id, call.placed_by) for call in weights.calls[:3]} == {(None, "sglang")}


def test_tensors_never_go_into_the_session_of_another_trainer(stack):
    failure = m.Failure("update_in_progress", "another session is open")
    weights = Weights(stack, open_by="native", UpdateWeightsArgs=failure)
    refused(stack.post("/update_weights_from_tensor", serialized_named_tensors=[b64(UPLOAD)]), "another")
    assert weights.kinds == ["UpdateWeights"]
    refused(stack.post("/end_weight_update"), "no weight update is open")


# ---------------------------------------------------------------------- what there is not


@pytest.mark.parametrize(
    "path", ["/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group",
             "/update_weights_from_ipc", "/start_profile"],
)  # fmt: skip
def test_a_route_of_a_missing_feature_is_a_400_with_the_reason(module_stack, path):
    body = refused(module_stack.post(path, group_name="g"), path.removeprefix("/"))
    assert "no " in body["message"]


def test_checksums_have_the_shape_of_sglangs_checker(stack):
    Weights(stack)
    body = stack.post("/weights_checker", action="checksum").json()
    assert body["success"] and body["ranks"][0]["checksums"] == {"w": "00"} and body["per_engine_checksum"] == "11"
    refused(stack.post("/weights_checker", action="reset_tensors"), "action")
    assert stack.post("/post_process_weights", post_process_quantization=True).json()["success"] is True
