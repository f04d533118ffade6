"""SGLang's weight routes over real HTTP, before a scripted engine."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save as safetensors_bytes

from fastdeploy.core.weight_source import FileSource, FolderSource
from fastdeploy.http.dialects.sglang import pull_weights as sglang_pull
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
            m.UpdateChunkArgs: {"session_id": "s-1"}, m.AbortUpdateArgs: {}, m.AbortArgs: {}, m.PauseArgs: {},
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
    assert weights.kinds == ["BeginUpdate", "UpdateChunk", "Pause", "CommitUpdate", "Resume", "ResetCache"]
    pause, resume = weights.calls[2], weights.calls[4]
    assert (pause.mode, pause.admission, pause.hold_id) == ("abort", "hold", resume.hold_id) and pause.hold_id
    assert pause.ttl_s is not None, "the hold ends even if this process dies before it resumes"


def test_a_bad_folder_aborts_no_request_and_ends_its_session(stack):
    weights = Weights(stack, UpdateChunkArgs=m.Failure("weight_update_refused", "w.safetensors: header too large"))
    body = refused(stack.post("/update_weights_from_disk", model_path="/bad", abort_all_requests=True), "header")
    assert body["num_paused_requests"] == 0
    assert weights.kinds == ["BeginUpdate", "UpdateChunk", "AbortUpdate"]


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
    assert weights.kinds == ["BeginUpdate", "UpdateChunk", "UpdateChunk", "CommitUpdate", "ResetCache"]
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
    assert weights.kinds == ["UpdateChunk", "UpdateChunk", "CommitUpdate", "ResetCache"]
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


# ---------------------------------------------------------------------- published folders


@pytest.fixture
def pull(make_stack, tmp_path):
    """Return ``pull(version)``, which pulls from tmp_path/published into tmp_path/root/local."""
    (tmp_path / "root").mkdir()
    stack = make_stack(model_roots=(str(tmp_path),), pull_root=str(tmp_path / "root"))
    for version in (1, 2):
        folder = tmp_path / "published" / f"weight_v{version:06d}"
        folder.mkdir(parents=True)
        (folder / f"model-{version}.safetensors").write_bytes(bytes([version]) * 8)
        (folder / "config.json").write_text(str(version))

    def call(version: int, local: str = "root/local", source: str | None = None):
        where = {"local_checkpoint_dir": str(tmp_path / local), "source_dir": source or str(tmp_path / "published")}
        return stack.post("/pull_weights", **where, target_version=version)

    return call


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_file())


def test_a_pull_makes_the_local_folder_a_copy_of_that_version(pull, tmp_path, model_dir):
    local = tmp_path / "root" / "local"
    for version in (1, 2):
        assert pull(version).json()["success"] is True
        assert names(local) == ["config.json", f"model-{version}.safetensors"]
        assert (local / "config.json").read_text() == str(version)
    assert pull(0).json()["success"] is True, "version 0 is the model that the server started with"
    assert names(local) == names(Path(model_dir))
    assert json.loads((local / ".weight_sync" / "state.json").read_text()) == {"version": "000000"}


def test_a_pull_of_a_missing_or_incomplete_version_is_refused(pull, tmp_path):
    refused(pull(7), "version 7")
    delta = tmp_path / "published" / "weight_v000003"
    delta.mkdir()
    refused(pull(3), "no checkpoint files")
    for text in ('{"metadata": {"delta_encoding": "xor"}}', "{", "[]", '{"metadata": 3}'):
        (delta / "model.safetensors.index.json").write_text(text)
        refused(pull(3), "delta" if "delta" in text else "index.json")
    for version in (-1, 2**70, 10**30):
        refused(pull(version), "target_version")
    assert not list((tmp_path / "root").iterdir())


@pytest.mark.parametrize("path", ["", "~", "a/b", "/" + "x" * 5000, "/a\0b"], ids=ascii)
def test_an_impossible_path_is_refused_by_the_name_of_its_field(pull, tmp_path, path):
    refused(pull(1, source=path or " "), "source_dir")
    local = path if path.startswith("/") else "/" if not path else "../" + path
    refused(pull(1, local=local), "local_checkpoint_dir")


def test_without_a_root_to_write_to_the_route_says_which_flag_gives_it_one(module_stack, tmp_path):
    where = {"local_checkpoint_dir": str(tmp_path / "x"), "source_dir": str(tmp_path)}
    refused(module_stack.post("/pull_weights", **where, target_version=0), "--pull-root")
    assert not (tmp_path / "x").exists()


def test_only_checkpoint_files_are_copied_and_none_gets_wider_permissions(pull, tmp_path):
    folder, local = tmp_path / "published" / "weight_v000001", tmp_path / "root" / "local"
    for name in ("authorized_keys", "train.py", ".hidden.safetensors", "notes.json", "optimizer.pt"):
        (folder / name).write_text("x")
    (folder / "sub.safetensors").mkdir()
    refused(pull(1), "not a regular file")
    (folder / "sub.safetensors").rmdir()
    modes = {"config.json": 0o600, "model-1.safetensors": 0o4777, "tokenizer.json": 0o440}
    for name, mode in modes.items():
        (folder / name).touch()
        (folder / name).chmod(mode)
    assert pull(1).json()["success"] is True and names(local) == sorted(modes)
    for name, mode in modes.items():
        copied = (local / name).stat().st_mode & 0o7777
        assert copied & ~mode == 0 and copied & ~0o644 == 0, name
    assert pull(1).json()["success"] is True, "a read-only copy is replaced"


def test_no_link_leads_a_pull_out_of_where_it_reads_and_writes(pull, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    for name in ("id_rsa", "config.json"):
        (secret / name).write_text("s")
    folder = tmp_path / "published" / "weight_v000001"
    link = folder / "model.safetensors"
    for target in (secret / "id_rsa", "/etc/hostname", "../../secret/id_rsa"):
        link.symlink_to(target)
        refused(pull(1), "cannot be copied")
        link.unlink()
    os.mkfifo(link)
    refused(pull(1), "not a regular file")
    link.unlink()
    (tmp_path / "published" / "weight_v000004").symlink_to(secret)
    refused(pull(4), "version 4")
    link.symlink_to("../weight_v000002/model-2.safetensors")
    assert pull(1).json()["success"] is True, "a shard may be shared by versions"
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "root" / "link").symlink_to(outside)
    for local in ("root/link", "root/link/x"):
        refused(pull(2, local=local), "local_checkpoint_dir")
    (tmp_path / "root" / "mine").mkdir()
    (tmp_path / "root" / "mine" / ".weight_sync").symlink_to(outside)
    refused(pull(2, local="root/mine"), "cannot be copied")
    assert not list(outside.iterdir())


def test_a_file_that_no_pull_has_made_is_never_touched(pull, tmp_path):
    local = tmp_path / "root" / "local"
    assert pull(1).json()["success"] is True
    (local / "model-2.safetensors").write_text("mine")
    refused(pull(2), "model-2.safetensors")
    assert names(local) == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    assert (local / "model-2.safetensors").read_text() == "mine" and (local / "config.json").read_text() == "1"
    for text in ('["../../secret", "id_rsa"]', "{", "[3]"):
        (local / ".weight_sync" / "files.json").write_text(text)
        refused(pull(2), "local_checkpoint_dir" if "secret" in text else "files.json")


def test_the_next_pull_completes_one_that_failed(pull, tmp_path, monkeypatch):
    local = tmp_path / "root" / "local"
    assert pull(1).json()["success"] is True
    real, calls = sglang_pull._copy_bytes, []

    def fail_at_the_second(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(sglang_pull, "_copy_bytes", fail_at_the_second)
    reply = pull(2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not (local / ".weight_sync" / "state.json").exists(), "half one version and half another"
    assert pull(2).json()["success"] is True and names(local) == ["config.json", "model-2.safetensors"]


def test_a_pull_that_hangs_is_given_up_and_only_max_pulls_may_hang(make_stack, tmp_path, monkeypatch):
    stack = make_stack(model_roots=("/",), pull_root=str(tmp_path), stage_timeout_s=0.2)
    repaired, ended = threading.Event(), threading.Semaphore(0)
    real = sglang_pull.pull_weights

    def hang(config, local_dir, source_dir, version, given_up):
        assert repaired.wait(60)
        try:
            real(config, local_dir, source_dir, version, given_up)
        finally:
            ended.release()

    monkeypatch.setattr(sglang_pull, "pull_weights", hang)
    body = {"local_checkpoint_dir": str(tmp_path / "x"), "source_dir": "/tmp", "target_version": 0}
    for _ in range(sglang_pull.MAX_PULLS):
        reply = stack.post("/pull_weights", **body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "staging_timeout")
    assert stack.post("/pull_weights", **body).json()["error"]["code"] == "update_in_progress"
    repaired.set()
    for _ in range(sglang_pull.MAX_PULLS):
        assert ended.acquire(timeout=60)
    assert names(tmp_path / "x") == []


def test_a_pull_stays_below_the_roots_and_overwrites_nothing_of_others(pull, tmp_path):
    refused(pull(1, source="/usr"), "source_dir")
    for local in ("/usr/share/x", "elsewhere", "root/../elsewhere", "root2/x"):
        refused(pull(1, local=local), "local_checkpoint_dir")
    foreign = tmp_path / "root" / "mine" / "notes.txt"
    foreign.parent.mkdir()
    foreign.write_text("x")
    refused(pull(1, local="root/mine"), "local_checkpoint_dir")
    assert names(foreign.parent) == ["notes.txt"]
