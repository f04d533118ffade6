"""The commands of README.md work: they are taken from it and run, against two servers of the embedded model."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.server import Server, free_port, until
from fastdeploy.embedded import MODEL_DIR

ROOT = Path(__file__).resolve().parent.parent
# Commands that are not run here, and why. Each must still be in the README.
NOT_RUN = {
    "make demo": "sets an environment up and takes a minute",
    "make test": "this is it",
    "make serve": "sets an environment up, and serves as fastdeploy serve does",
}
# Names that the text around a Python block explains.
GIVEN = """
import safetensors.torch
prompt_ids = [49, 43, 49]
class model:
    state_dict = staticmethod(lambda: safetensors.torch.load_file("PATH/model.safetensors"))
"""


class Block(NamedTuple):
    language: str
    text: str


def blocks(text: str) -> list[Block]:
    """The code blocks of a Markdown text: fenced with a language, or indented by four spaces (language "")."""
    fenced = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^    .*\n)+", rest, re.MULTILINE)
    return [Block(*found) for found in fenced] + [Block("", re.sub("^    ", "", t, flags=re.M)) for t in indented]


BLOCKS = blocks((ROOT / "README.md").read_text())


def commands() -> list[str]:
    """Every line of a shell block, without its comment."""
    lines = [line for block in BLOCKS if block.language in ("", "bash") for line in block.text.splitlines()]
    return [command for line in lines if (command := re.sub(r"\s+# .*", "", line).strip())]


SERVE = [command for command in commands() if "fastdeploy serve " in command]
RUN = [command for command in commands() if command not in NOT_RUN and command not in SERVE]
PYTHON = [block.text for block in BLOCKS if block.language == "python"]


class Machine(NamedTuple):
    """Stand-ins for the addresses and folders that the README names."""

    servers: tuple[Server, Server]
    model: Path

    def local(self, text: str) -> str:
        a, b = self.servers
        names = {"http://a:8180": a.url, "http://b:8180": b.url, "localhost:8180": a.url.removeprefix("http://")}
        for key in ("api.txt", "control.txt"):
            file = self.model.with_name(key)
            file.write_text(f"key-of-{key}\n")
            file.chmod(0o600)
            names[key] = str(file)
        names["--control-port 8181"] = f"--control-port {free_port()}"
        for name, here in names.items():
            text = text.replace(name, here)
        return re.sub(r"/checkpoints/[\w-]+|\bPATH\b", str(self.model), text)


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    model = tmp_path_factory.mktemp("readme") / "model"
    shutil.copytree(MODEL_DIR, model)
    servers = (Server(), Server())
    try:
        yield Machine(tuple(server.wait_ready() for server in servers), model)
    finally:
        for server in servers:
            server.kill_everything()


def test_every_command_is_found_and_those_that_are_not_run_are_in_the_readme():
    assert NOT_RUN.keys() <= set(commands())
    assert len(RUN) >= 3 and len(PYTHON) >= 2 and len(SERVE) >= 1
    assert all(command.startswith("curl ") for command in RUN)


@pytest.mark.parametrize("command", RUN)
def test_a_shell_command_succeeds(machine, command):
    done = subprocess.run(
        ["bash", "-c", machine.local(command) + " -sS --fail-with-body"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"status":"success"' in done.stdout


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.splitlines()[0])
def test_a_python_block_runs_as_it_is(machine, block):
    given = GIVEN if "model.state_dict()" in block else ""
    # As in a notebook, a block may await.
    program = f"""
import ast, asyncio, inspect
code = compile({machine.local(given + block)!r}, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
result = eval(code, globals())
if inspect.iscoroutine(result):
    asyncio.run(result)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("command", SERVE)
def test_a_serve_command_starts_a_server(machine, command):
    flags = machine.local(command).partition("fastdeploy serve ")[2].split()
    server = Server(*flags)
    try:
        until(lambda: server.process.poll() is not None or "FastDeploy serves" in server.log(), 60, "it serves")
        assert server.process.poll() is None, server.log()
    finally:
        server.kill_everything()
