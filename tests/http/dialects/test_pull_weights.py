"""SGLang's /pull_weights over real HTTP: whole versions, and the rules of the local folder."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from fastdeploy.http.checkpoint_deltas import local as local_folder
from fastdeploy.http.checkpoint_deltas import pulls
from support.published_deltas import load_folder, make_model, next_step, publish_slime, same

INDEX = "model.safetensors.index.json"


def refused(reply, *words: str) -> None:
    """Assert a 400 whose message has these words."""
    assert reply.status_code == 400, reply.text
    for word in words:
        assert word in reply.json()["message"], reply.text


@pytest.fixture
def pull(make_stack, tmp_path):
    """Return ``pull(version)``, which pulls from tmp_path/published into tmp_path/root/local."""
    (tmp_path / "root").mkdir()
    stack = make_stack(model_roots=(str(tmp_path),), pull_root=str(tmp_path / "root"))
    for version in (1, 2):
        folder = tmp_path / "published" / f"weight_v{version:06d}"
        folder.mkdir(parents=True)
        (folder / f"model-{version}.safetensors").write_bytes(bytes([version]) * 8)
        (folder / INDEX).write_text("{}")
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
        assert names(local) == ["config.json", f"model-{version}.safetensors", INDEX]
        assert (local / "config.json").read_text() == str(version)
    assert pull(0).json()["success"] is True, "version 0 is the model that the server started with"
    assert names(local) == names(Path(model_dir))
    assert json.loads((local / ".weight_sync" / "state.json").read_text())["version"] == "000000"


def test_a_pull_of_a_missing_or_incomplete_version_is_refused(pull, tmp_path):
    refused(pull(7), "version 7")
    third = tmp_path / "published" / "weight_v000003"
    third.mkdir()
    refused(pull(3), "no checkpoint files")
    (third / "model-00000-of-00002.safetensors").touch()
    refused(pull(3), "index.json: is missing")
    for text in ("{", "[]", '{"metadata": 3}', '{"metadata": {"delta_encoding": "xor"}}'):
        (third / INDEX).write_text(text)
        refused(pull(3), INDEX)
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
    modes = {"config.json": 0o600, "model-1.safetensors": 0o4777, "tokenizer.json": 0o440, INDEX: 0o600}
    for name, mode in modes.items():
        (folder / name).touch()
        (folder / name).chmod(mode)
    assert pull(1).json()["success"] is True and names(local) == sorted(modes)
    for name, mode in modes.items():
        copied = (local / name).stat().st_mode & 0o7777
        assert copied & ~(mode | 0o200) == 0 and copied & ~0o644 == 0, name


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
    assert names(local) == ["config.json", "model-1.safetensors", "model-2.safetensors", INDEX]
    assert (local / "model-2.safetensors").read_text() == "mine" and (local / "config.json").read_text() == "1"
    for text in ('["../../secret", "id_rsa"]', "{", "[3]"):
        (local / ".weight_sync" / "files.json").write_text(text)
        refused(pull(2), "local_checkpoint_dir" if "secret" in text else "files.json")


def test_the_next_pull_completes_one_that_failed(pull, tmp_path, monkeypatch):
    local = tmp_path / "root" / "local"
    assert pull(1).json()["success"] is True
    real, calls = local_folder.copy_bytes, []

    def fail_at_the_second(*args):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    monkeypatch.setattr(local_folder, "copy_bytes", fail_at_the_second)
    reply = pull(2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (507, "out_of_space")
    assert not (local / ".weight_sync" / "state.json").exists(), "half one version and half another"
    assert pull(2).json()["success"] is True and names(local) == ["config.json", "model-2.safetensors", INDEX]


def test_a_pull_that_hangs_is_given_up_and_only_max_pulls_may_hang(make_stack, tmp_path, monkeypatch):
    stack = make_stack(model_roots=("/",), pull_root=str(tmp_path), stage_timeout_s=0.2)
    repaired, ended = threading.Event(), threading.Semaphore(0)
    real = pulls.pull_version

    def hang(*args):
        assert repaired.wait(60)
        try:
            real(*args)
        finally:
            ended.release()

    monkeypatch.setattr(pulls, "pull_version", hang)
    body = {"local_checkpoint_dir": str(tmp_path / "x"), "source_dir": "/tmp", "target_version": 0}
    for _ in range(pulls.MAX_PULLS):
        reply = stack.post("/pull_weights", **body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "staging_timeout")
    assert stack.post("/pull_weights", **body).json()["error"]["code"] == "update_in_progress"
    repaired.set()
    for _ in range(pulls.MAX_PULLS):
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


def test_a_delta_is_applied_and_a_wrong_one_is_a_400_that_names_the_tensor(pull, tmp_path):
    source, local = tmp_path / "deltas", tmp_path / "root" / "local"
    steps = [make_model(source / "weight_v000001")]
    for version in (2, 3):
        steps.append(next_step(steps[-1], version))
        folder = publish_slime(source, version, *steps[-2:])
    assert pull(2, source=str(source)).json()["success"] is True and same(load_folder(local), steps[1])
    (folder / "model-00000-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    refused(pull(3, source=str(source)), "version 3", "tensor a")
    assert same(load_folder(local), steps[1])
