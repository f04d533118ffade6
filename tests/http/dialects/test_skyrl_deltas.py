"""SkyRL's checkpoint deltas over real HTTP, before a scripted engine. tests/frameworks/test_skyrl_deltas.py has SkyRL's
own trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fastdeploy.core.weight_source import FolderSource
from fastdeploy.inter_communicator import messages as m
from support.http_calls import answer, refused
from support.published_deltas import CHECKSUMS, Tensors, load_folder, make_model, next_step, publish_skyrl, same


class Run:
    """A run of SkyRL against one server. steps: the tensors of each version, 0 = the model."""

    def __init__(self, stack, folder: Path):
        self.stack, self.model, self.sync, self.local = (
            stack,
            folder / "base",
            folder / "sync",
            folder / "root" / "skyrl",
        )
        self.steps: list[Tensors] = [make_model(self.model)]

    def init(self, **fields):
        own = {"base_model_path": str(self.model), "local_checkpoint_dir": str(self.local)}
        info = own | {"cloud_download_workers": 4, "checkpoint_load_format": "vllm_multi_thread_safetensors"} | fields
        return self.stack.post("/init_weight_transfer_engine", init_info=info)

    def publish(self, **fields) -> Path:
        """Publish the next version."""
        self.steps.append(next_step(self.steps[-1], len(self.steps)))
        return publish_skyrl(self.sync, len(self.steps) - 1, *self.steps[-2:], **fields)

    def fetch(self, version: int, **fields):
        return self.stack.post("/fetch_weights", **{"target_version": version, "sync_dir": str(self.sync)} | fields)

    def fetched(self, version: int) -> None:
        reply = self.fetch(version)
        assert reply.status_code == 200, reply.text
        assert reply.json()["status"] == "ok" and reply.json()["result"][0]["target_version"] == version
        assert same(load_folder(self.local / "weights"), self.steps[version])

    def update(self, version: int):
        info = {"target_version": version, "version": version, "sync_dir": str(self.sync), "uri": "x"}
        return self.stack.post("/update_weights", update_info=info)


@pytest.fixture
def run(make_stack, tmp_path) -> Run:
    (tmp_path / "root").mkdir()
    return Run(make_stack(model_roots=(str(tmp_path),), pull_root=str(tmp_path / "root")), tmp_path)


def test_each_version_is_fetched_and_then_loaded_from_the_local_checkpoint(run):
    answer(run.stack, m.UpdatePartArgs, {"session_id": "s", "tensors": 3})
    assert run.init().status_code == 200
    for version in (1, 2, 3):
        run.publish()
        run.fetched(version)
        assert run.update(version).status_code == 200
        args = run.stack.engine.expect(m.UpdatePartArgs).args
        assert (args.source, args.version) == (FolderSource(str(run.local / "weights")), str(version))
    by_rpc = {"method": "update_weights_disk", "kwargs": {"update_info": {"target_version": 3}}}
    assert run.stack.post("/collective_rpc", **by_rpc).status_code == 200
    assert run.stack.engine.expect(m.UpdatePartArgs).args.version == "3"


def test_another_api_server_of_the_same_server_knows_the_setup(run, make_stack, tmp_path):
    run.publish()
    reply = run.fetch(1)
    assert (reply.status_code, reply.json()["error"]["code"]) == (409, "wrong_order")
    assert "/init_weight_transfer_engine" in reply.json()["error"]["message"]
    assert run.init().status_code == 200
    run.stack.restart_server()
    run.fetched(1)
    run.stack = make_stack(model_roots=(str(tmp_path),), pull_root=str(tmp_path / "root"))
    assert run.fetch(1).status_code == 409, "another server, below the same root"


def test_a_chain_is_fetched_in_one_call_and_the_target_may_have_an_address_of_its_own(run):
    run.init()
    for _ in range(3):
        last = run.publish()
    run.fetched(2)
    elsewhere = last.rename(run.sync / "elsewhere")
    refused(run.fetch(3), "version 3")
    assert run.fetch(3, uri=str(elsewhere)).status_code == 200
    assert same(load_folder(run.local / "weights"), run.steps[3])
    run.fetched(1)


def test_an_update_of_a_version_that_was_not_fetched_is_refused(run):
    run.init()
    for found in ("no whole version", "version 1"):
        reply = run.update(2)
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "wrong_order")
        assert found in reply.json()["error"]["message"]
        if len(run.steps) == 1:
            run.publish()
            run.fetched(1)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"local_checkpoint_dir": "/usr/x"}, "local_checkpoint_dir"),
     ({"local_checkpoint_dir": "x"}, "local_checkpoint_dir"),
     ({"local_checkpoint_dir": 3}, "local_checkpoint_dir"), ({"base_model_path": "/usr"}, "base_model_path"),
     ({"base_model_path": "some/model"}, "base_model_path"), ({"base_model_path": None}, "base_model_path")],
)  # fmt: skip
def test_a_wrong_setup_is_refused_by_the_name_of_its_field(run, fields, field):
    refused(run.init(**fields), field)
    assert run.fetch(1).status_code == 409


def test_the_model_of_the_server_may_be_named_as_clients_name_it(run, model_dir):
    for name in ("tiny", model_dir, model_dir + "/"):
        assert run.init(base_model_path=name).status_code == 200
        assert run.fetch(0).status_code == 200
        assert (run.local / "weights" / "tokenizer.json").exists()


def test_without_a_root_to_write_to_the_first_call_says_which_flag_gives_one(module_stack):
    info = {"base_model_path": "/m", "local_checkpoint_dir": "/tmp/x"}
    refused(module_stack.post("/init_weight_transfer_engine", init_info=info), "local_checkpoint_dir", "--pull-root")
    refused(module_stack.post("/fetch_weights", target_version=1), "local_checkpoint_dir", "--pull-root")


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"sync_dir": "sync"}, "sync_dir"), ({"uri": "x"}, "uri"),
     ({"sync_dir": None}, "sync_dir"), ({"sync_dir": "/usr"}, "version 1"), ({"target_version": -1}, "target_version"),
     ({"target_version": 10**9}, "target_version"), ({"target_version": None}, "target_version")],
)  # fmt: skip
def test_a_wrong_fetch_is_refused_by_name(run, fields, field):
    run.init()
    run.publish()
    refused(run.fetch(1, **fields), field)
    assert not (run.local / "weights" / ".weight_sync" / "state.json").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"base_version": 5}, ("base_version", "expected 1")), ({"version": 3}, ("version: expected 2",)),
     ({"tensors": [{"name": "a"}]}, ("manifest.json",)), ({"tensors": "a"}, ("manifest.json",))],
)  # fmt: skip
def test_a_wrong_manifest_is_refused_and_the_local_checkpoint_stays(run, fields, words):
    run.init()
    run.publish()
    run.fetched(1)
    run.publish(**fields)
    refused(run.fetch(2), "version 2", *words)
    assert same(load_folder(run.local / "weights"), run.steps[1])
    assert run.fetch(1).status_code == 200


def change(folder: Path, **fields) -> None:
    """Change the record of the first tensor."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"][0] |= fields
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"name": "b"}, ("tensor b comes twice",)), ({"name": "z"}, ("tensor z", "not in the local checkpoint")),
     ({"payload_file": "../x"}, ("../x",)), ({"payload_key": "z"}, ("tensor a", "'z'")),
     ({"checksum_algorithm": "crc32"}, ("checksum of a", "crc32")), ({"checksum": "00"}, ("tensor a", "xxh3-128"))],
)  # fmt: skip
def test_a_wrong_record_is_refused_by_name(run, fields, words):
    run.init()
    change(run.publish(), **fields)
    refused(run.fetch(1), "version 1", *words)
    right = {"name": "a", "payload_file": "delta-rank00000-file000000.safetensors", "payload_key": "a"}
    sha256 = CHECKSUMS["sha256"](run.steps[1]["a"].tobytes())
    change(run.sync / "delta-00000001", **right, checksum_algorithm="sha256", checksum=sha256)
    run.fetched(1)


def test_a_version_without_changes_has_no_payload_file(run):
    run.init()
    run.steps.append(run.steps[0])
    publish_skyrl(run.sync, 1, *run.steps)
    run.fetched(1)


@pytest.mark.parametrize("field", ["sync_dir", "uri"])
def test_a_cloud_address_is_refused_as_one(run, field):
    run.init()
    for address in ("gs://bucket/x", "s3://bucket/x"):
        refused(run.fetch(1, **{field: address}), field, "cloud")
