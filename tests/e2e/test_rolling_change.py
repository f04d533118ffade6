"""A rolling change: every process of a fleet is replaced while clients stream and a trainer commits versions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.fleet_server import FleetServer
from e2e.server import SMALL, perturbed, until
from fastdeploy.core.process import VERSION, is_alive
from fastdeploy.embedded import MODEL_DIR

ROOT = Path(__file__).parents[2]
LESS = 'return {n: f for n, f in (_structs_of(m.ToEngine) | _structs_of(m.ToClient)).items() if n != "RenewArgs"}'
ROLL = (sys.executable, "-m", "fastdeploy", "roll")


class Load:
    """Clients of the openai package that stream one answer after the other. errors: of requests that failed. short:
    answers with other than ``max_tokens`` tokens. versions: labels of the weights of all tokens."""

    def __init__(self, url: str, num: int = 3):
        self.errors: list[str] = []
        self.short: list[int] = []
        self.versions: set[str] = set()
        self.num_done = 0
        self._url = url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num)]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int) -> None:
        client = openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0, timeout=90)
        k = 0
        while not self._ends.is_set():
            k += 1
            try:
                self._ask(client, [60 + i, 40 + k % 20, *range(40, 60)], max_tokens=(20, 150, 600)[k % 3])
            except Exception as error:
                self.errors.append(repr(error))
                return

    def _ask(self, client: openai.OpenAI, prompt: list[int], max_tokens: int) -> None:
        extra = {"ignore_eos": True, "return_token_ids": True, "stale_ok": True}
        chunks = client.completions.create(
            model="fastdeploy-embedded", prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=extra
        )
        num = 0
        for chunk in chunks:
            for choice in chunk.choices:
                fields = choice.model_extra or {}
                num += len(fields.get("token_ids") or ())
                self.versions |= {span["version"] for span in fields.get("weight_versions") or ()}
        if num != max_tokens:
            self.short.append(num)
        self.num_done += 1

    def end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(90)
            assert not thread.is_alive()


class Trainer(threading.Thread):
    """Commits one version after the other, each when a token of the last one was seen by ``load``. committed: their
    labels. errors: of commits."""

    def __init__(self, fleet: FleetServer, load: Load, folders: list[Path]):
        super().__init__(daemon=True)
        self.committed: list[str] = []
        self.errors: list[Any] = []
        self._fleet, self._load, self._folders = fleet, load, folders
        self._ends = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ends.is_set():
            version = f"step-{len(self.committed)}"
            folder = self._folders[len(self.committed) % len(self._folders)]
            try:
                reply = self._fleet.post("/v1/update_weights", {"model_path": str(folder), "version": version})
                if reply.status != 200:
                    self.errors.append(reply.body)
                    continue
                self.committed.append(version)
                until(lambda version=version: version in self._load.versions, 60, f"tokens of {version}")
            except Exception as error:
                self.errors.append(repr(error))

    def end(self) -> None:
        self._ends.set()
        self.join(90)
        assert not self.is_alive()


@pytest.fixture
def fleet() -> Iterator[FleetServer]:
    with FleetServer(2, *SMALL, "--gateways", "2") as fleet:
        yield fleet
        assert fleet.stop() == 0, fleet.log()
        assert fleet.leftovers() == []


def roll(fleet: FleetServer, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [*ROLL, fleet.url, "--drain-s", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def main_pids(fleet: FleetServer) -> set[int]:
    """Return the processes that serve: gateways, replicas and their engines."""
    return {
        pid
        for module in ("gateway", "replica_main", "engine_main", "api_server")
        for pid in fleet.pids(f"fastdeploy.entrypoints.{module}")
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_process_is_replaced_and_no_request_and_no_version_is_lost(fleet, tmp_path):
    before = main_pids(fleet)
    load = Load(fleet.url)
    trainer = Trainer(fleet, load, [perturbed(tmp_path / "other"), MODEL_DIR])
    until(lambda: load.num_done >= 3 and len(trainer.committed) >= 2, 60, "load")
    result = roll(fleet, "--set", "max-num-seqs=6")
    assert result.returncode == 0, (result.stdout, result.stderr, fleet.log())
    trainer.end()
    load.end()
    assert (load.errors, load.short, trainer.errors) == ([], [], []), fleet.log()
    assert set(trainer.committed) <= load.versions
    assert {entry["settings"] for entry in fleet.wait_members(2).values()} == {1}
    for name in ("replica-0", "replica-1"):
        line = Path(f"/proc/{fleet.replica_pid(name)}/cmdline").read_text()
        assert '"max_num_seqs":6' in line
    assert not any(is_alive(pid) for pid in before), "every process is another one"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_settings_that_do_not_work_are_taken_back_and_those_that_must_be_equal_are_refused(fleet):
    for flag, why in (
        ("max-model-len=100", "max_model_len: all replicas must have the same"),
        ("port=8000", "port: a rolling change cannot change it"),
        ("max-num-seqs=many", "max_num_seqs: expected a whole number, got 'many'"),
        ("no-such-flag=1", "no_such_flag: a rolling change cannot change it"),
    ):
        result = roll(fleet, "--set", flag)
        assert result.returncode == 1 and why in result.stderr, result.stderr
    before = main_pids(fleet)
    assert roll(fleet, "--set", "max-num-seqs=0").returncode == 1 and main_pids(fleet) == before

    load = Load(fleet.url, 2)
    result = roll(fleet, "--set", "block-size=17")
    load.end()
    assert result.returncode == 1 and "expected a multiple of 16, got 17" in result.stdout, result.stdout
    assert (load.errors, load.short) == ([], []), fleet.log()
    entries = fleet.wait_members(2)
    assert {entry["settings"] for entry in entries.values()} == {0}
    assert fleet.get("/v1/replicas").json["roll"]["phase"] == "failed"
    assert before & main_pids(fleet), "the replica that was not reached yet was left alone"


def copy_of_the_package(folder: Path, version: str) -> Path:
    """Make an older version in the new ``folder``: it does not know RenewArgs."""
    for path in (ROOT / "fastdeploy").rglob("*"):
        copy = folder / path.relative_to(ROOT)
        if path.is_file() and path.suffix != ".pyc":
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
    for name, old, new in (
        ("core/process.py", f'VERSION = "{VERSION}"', f'VERSION = "{version}"'),
        ("inter_communicator/known_messages.py", "return _structs_of(m.ToEngine) | _structs_of(m.ToClient)", LESS),
    ):
        copy, text = folder / "fastdeploy" / name, (ROOT / "fastdeploy" / name).read_text()
        assert text.count(old) == 1
        copy.unlink()
        copy.write_text(text.replace(old, new))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_version_is_rolled_out_and_until_then_a_call_that_the_old_one_lacks_is_refused(tmp_path, monkeypatch):
    link = tmp_path / "installed"
    link.symlink_to(copy_of_the_package(tmp_path / "old", "0.1.0"))
    monkeypatch.setenv("PYTHONPATH", str(link))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # not the package in the present folder
    with FleetServer(2, *SMALL) as fleet:
        assert {entry["software"] for entry in fleet.replicas().values()} == {"0.1.0"}
        (tmp_path / "next").symlink_to(ROOT)
        (tmp_path / "next").replace(link)
        gateway = fleet.gateway_pid
        os.kill(gateway, signal.SIGKILL)  # it comes back with the new version, which knows more than the engines
        until(lambda: not is_alive(gateway), 20, "the gateway is gone")
        fleet.wait_ready()
        entries = fleet.wait_members(2)
        assert [(entry["software"], entry["cannot"]) for entry in entries.values()] == [("0.1.0", ["RenewArgs"])] * 2
        fleet.post("/v1/pause", {"mode": "keep", "hold_id": "h", "ttl_s": 600}).ok()
        error = fleet.post("/v1/renew", {"hold_id": "h", "ttl_s": 900})
        assert error.status == 409 and error.json["error"]["code"] == "fleet_mixed"
        assert error.json["error"]["cannot"] == {"replica-0": ["RenewArgs"], "replica-1": ["RenewArgs"]}
        result = roll(fleet)
        assert result.returncode == 0, (result.stdout, result.stderr, fleet.log())
        entries = fleet.wait_members(2)
        assert [(entry["software"], entry["cannot"]) for entry in entries.values()] == [(VERSION, [])] * 2
        assert fleet.post("/v1/renew", {"hold_id": "h", "ttl_s": 900}).status == 200, "the hold stands"
