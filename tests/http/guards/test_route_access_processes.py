"""Keys and the control port through the command line, the supervisor and real API server processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from e2e.server import until
from fastdeploy.entrypoints.cli import main
from fastdeploy.http.guards.keys import CONTROL_KEY
from fastdeploy.testing import ServerProcess

TESTS = Path(__file__).parents[2]
DATA, CONTROL = "data-key-of-this-test", "control-key-of-this-test"


class Served(ServerProcess):
    """``fastdeploy serve`` with a scripted engine. urls: the URLs that it printed, one for each port."""

    def __init__(self, root: Path, *flags: str, **environment: str):
        (root / "config.json").write_text("{}")
        program = [sys.executable, str(TESTS / "support" / "serve_main.py")]
        path = {"PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
        super().__init__([*program, "serve", "--model", str(root), *flags], path | environment)
        self.urls = until(self._printed, 60, "the server serves")

    def _printed(self) -> list[str]:
        self.require_running()
        line = re.search(r"^FastDeploy serves .*\n", self.log(), re.MULTILINE)
        return re.findall(r"http://[^\s,]+", line[0]) if line else []


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("guarded")
    (root / "api").write_text(f"rotated-out\n{DATA}\n")
    flags = ("--api-key", str(root / "api"), "--control-port", "0", "--metrics-port", "0")
    flags += ("--workers", "2")
    with Served(root, *flags, **{CONTROL_KEY: CONTROL}) as served:
        yield served
        assert served.stop() == 0


@pytest.mark.slow
def test_every_api_server_serves_both_ports_also_after_a_restart(guarded):
    data, control, _ = guarded.urls
    headers = {"authorization": f"Bearer {CONTROL}", "connection": "close"}
    update = {"model_path": "/x"}

    def statuses() -> set[tuple[int, int]]:
        return {
            tuple(httpx.post(url + "/v1/update_weights", json=update, headers=headers, timeout=30).status_code
                  for url in (data, control))
            for _ in range(8)
        }  # fmt: skip

    assert statuses() == {(403, 200)}
    killed = guarded.pids("api_server")
    assert len(killed) == 2
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while True:  # the listeners stay open: a request waits for the new process, or fails with the killed one
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(control + "/health", headers=headers, timeout=20).status_code == 200:
                break
        assert time.monotonic() < deadline
    while statuses() != {(403, 200)}:
        assert time.monotonic() < deadline
    assert not set(killed) & set(guarded.pids("api_server"))


def test_the_openai_package_uses_the_data_port_with_its_key(guarded):
    with openai.OpenAI(base_url=guarded.urls[0] + "/v1", api_key=DATA) as client:
        assert client.completions.create(model=client.models.list().data[0].id, prompt=[97]).usage.completion_tokens
    bad = openai.OpenAI(base_url=guarded.urls[0] + "/v1", api_key="rotated-out-and-gone", max_retries=0)
    with bad, pytest.raises(openai.AuthenticationError):
        bad.models.list()


def test_a_scrape_has_the_answers_of_all_api_servers_whichever_answers_it(guarded):
    data, _, metrics = guarded.urls
    headers = {"connection": "close"}  # so that both API servers get some
    for _ in range(20):
        httpx.get(data + "/docs", headers=headers, timeout=30)
    for _ in range(10):
        text = httpx.get(metrics + "/metrics", headers=headers, timeout=30).text
        assert 'http_requests_total{method="GET",path="/docs",status_code="200"} 20.0' in text


def test_no_command_line_no_log_and_not_the_engine_has_a_key(guarded):
    secrets = (DATA.encode(), CONTROL.encode())
    for pid in guarded.processes():
        assert not any(secret in Path(f"/proc/{pid}/cmdline").read_bytes() for secret in secrets)
    [engine] = guarded.pids("fake_engine_main")
    environment = Path(f"/proc/{engine}/environ").read_bytes()
    assert environment and not any(secret in environment for secret in secrets)
    httpx.post(guarded.urls[0] + "/v1/pause", headers={"authorization": f"Bearer {DATA}"}, timeout=30)
    assert not any(secret.decode() in guarded.log() for secret in secrets)


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--insecure-control"], "--insecure-control: anyone who reaches 0.0.0.0"), ([], "control routes are refused")],
)
def test_an_exposed_server_warns_once_at_start(tmp_path, flags, said):
    with Served(tmp_path, "--host", "0.0.0.0", *flags) as served:
        url = served.urls[0].replace("0.0.0.0", "127.0.0.1")
        status = httpx.post(url + "/v1/update_weights", json={"model_path": "/x"}, timeout=30).status_code
        assert status == (200 if flags else 403)
        assert served.stop() == 0
        assert served.log().count(said) == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--api-key", "/"], "--api-key"),
        (["--control-key", "/"], "--control-key"),
        (["--control-port", "8180"], "--control-port"),
        (["--allowed-origins", "localhost"], "--allowed-origins"),
    ],
)
def test_a_bad_flag_is_named_and_a_key_is_not_repeated(tmp_path, capsys, flags, named):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as info:
        main(["serve", "--model", str(tmp_path), *flags])
    error = capsys.readouterr().err.splitlines()[-1]
    assert info.value.code == 2 and named in error and "sk-secret" not in error
