"""Checks that the commands and the Python code in README.md, docs/ and examples/ work.

A shell block with ``curl`` runs as it is, against a server of the embedded model, and so does every Python block. In
other shell blocks each command is checked by the program that it names: the program must take the arguments. A Python
block that cannot run has the note ``<!-- not run: WHY -->``. ``make test`` runs the Python blocks of the README,
``make test-slow`` the others.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.make_adapters import main as make_adapters
from e2e.fleet_server import FleetServer
from e2e.server import Server
from fastdeploy.embedded import MODEL_DIR
from fastdeploy.entrypoints.cli.flags import configs, put_fleet_key
from fastdeploy.entrypoints.cli.fleet import fleet_config, launcher_spec
from fastdeploy.entrypoints.cli.main import make_parser
from fastdeploy.faults.rules import read_file
from fastdeploy.http.guards.keys import read_keys
from fastdeploy.inter_communicator.fleet_key import read_fleet_key, require_fleet_key
from support import programs
from support.markdown import EXAMPLES, PAGES, README, ROOT, Block, blocks, names, tables

BLOCKS = [block for page in [*PAGES, *EXAMPLES] for block in blocks(page)]
IN_A_FLEET = "in a fleet"  # note of a script that runs against a fleet of two replicas
SCRIPTS = [b for b in BLOCKS if b.language == "bash" and "curl " in b.text and b.note != IN_A_FLEET]
FLEET_SCRIPTS = [b for b in BLOCKS if b.note == IN_A_FLEET]
COMMANDS = [b for b in BLOCKS if b.language == "bash" and "curl " not in b.text]
PYTHON = [
    pytest.param(b, marks=[] if b.page == README else pytest.mark.slow, id=str(b))
    for b in BLOCKS
    if b.language == "python" and not b.note.startswith("not run: ")
]
# Names that the text around a Python block explains.
GIVEN = """
import numpy
prompt_ids = [49, 43, 49]
class model:
    state_dict = staticmethod(lambda: dict(numpy.load("PATH/state.npz")))
"""


def test_every_block_has_a_test():
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text", "yaml"), (
            f"{block}: no test for a block of {block.language!r}"
        )
        assert block.language != "text" or "curl " not in block.text, f"{block}: shell commands"
    assert len(SCRIPTS) > 5 and FLEET_SCRIPTS and len(COMMANDS) > 2 and len(PYTHON) > 2


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_a_program_takes_the_arguments_that_a_page_gives_it(block, tmp_path):
    (tmp_path / "keys.txt").write_text("0123456789abcdef" * 4)
    text = re.sub(r"\b((api|control)\.txt|fleet\.key)\b", str(tmp_path / "keys.txt"), block.text.replace("\\\n", " "))
    text = text.replace("$Q05", str(MODEL_DIR)).replace("PATH", str(MODEL_DIR))
    commands = [shlex.split(line, comments=True) for line in text.splitlines()]
    for command in commands:
        while command and re.match(r"\w+=", command[0]):
            del command[0]
        if command:
            check_command(command, tmp_path / "errors")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "yaml"], ids=str)
def test_a_file_of_settings_or_of_faults_is_taken(block, tmp_path):
    (tmp_path / "settings.yaml").write_text(block.text)
    if "rules:" in block.text:
        assert read_file(str(tmp_path / "settings.yaml"), is_fleet=False).rules
        return
    args = make_parser().parse_args(["serve", "--config", str(tmp_path / "settings.yaml")])
    assert any(str(tmp_path) in source for source in args.sources.values())


def check_command(command: list[str], errors: Path) -> None:
    """Check that the program which ``command`` names takes the arguments. The program does nothing else. errors: a file
    for what it says."""
    match command:
        case ["make", *targets]:
            rules = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(targets) <= set(rules), command
        case ["fastdeploy", "check-sync" | "record" | "replay" | "roll", *_]:
            make_parser().parse_args(command[1:])
        case ["fastdeploy" | ".venv/bin/fastdeploy", *arguments]:
            args = make_parser().parse_args(arguments)
            read_keys(args.api_key, args.control_key, {})
            engine, _ = configs(args)
            put_fleet_key(args.fleet_key_file, environment := {})
            fleet_key = read_fleet_key(environment)
            require_fleet_key(engine.fleet_endpoint, fleet_key)
            if args.command == "fleet":
                fleet_config(args, engine.model_roots)
                launcher_spec(args, fleet_key)
                assert args.ray is None or fleet_key
        case ["pip", "install", "."]:
            assert (ROOT / "setup.py").exists()
        case ["docker" | "install" | "kubectl" | "mkdir" | "python3" | "sed" | "systemctl" | "{", *words]:
            # Programs that this machine may not have. make test-deploy checks the files that they are given.
            files = [word for word in words if word.startswith("deploy/")]
            assert all((ROOT / file.rstrip(";")).exists() for file in files), command
        case [".venv/bin/python", "-m", "pytest", "--oracles", "record", *paths]:
            assert '"--oracles"' in (ROOT / "tests" / "conftest.py").read_text(), command
            check_command([".venv/bin/python", "-m", "pytest", *paths], errors)
        case [".venv/bin/python", "-m", "pytest" | "mypy", *paths] | [".venv/bin/python", *paths]:
            # The files are run by the suite, by make lint and by make ops.
            assert paths and all((ROOT / path.partition("::")[0]).exists() for path in paths), command
        case ["python", *arguments]:
            refused = "--no-program-takes-this"  # a parser reports it only if all other arguments are right
            program = programs.FORKS.Process(target=programs.run, args=([*arguments, refused], errors), daemon=True)
            program.start()
            program.join(60)
            said = errors.read_text()
            assert program.exitcode == 2 and f"unrecognized arguments: {refused}\n" in said, said
        case [program, subcommand, *_] if program.endswith(".sh"):
            script = (ROOT / program).read_text()
            assert re.search(rf"^{subcommand}\)", script, re.MULTILINE), command
            subprocess.run(["bash", "-n", ROOT / program], check=True)
        case _:
            raise AssertionError(f"no test knows how to check {command}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Copy the embedded model to a folder that also has its tensors as a numpy file."""
    folder = tmp_path_factory.mktemp("docs") / "model"
    shutil.copytree(MODEL_DIR, folder)
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    state = {}
    for name, tensor in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            bfloat16 = np.frombuffer(raw[start + begin : start + end], np.uint16).reshape(tensor["shape"])
            state[name] = (bfloat16.astype(np.uint32) << 16).view(np.float32)
    np.savez(folder / "state.npz", **state)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """Make an adapter of the embedded model."""
    folder = tmp_path_factory.mktemp("adapters")
    make_adapters([str(MODEL_DIR), str(folder), "--count", "1"])
    return folder / "adapter-0"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--faults") as server:
        yield server


@pytest.fixture
def untouched(server) -> Iterator[None]:
    """Fail if the test leaves the server paused, asleep, or with an open weight session."""
    yield
    holds, weights = server.get("/v1/is_paused").result["holds"], server.get("/v1/weights").result
    for hold in holds:  # else the next test would wait for them
        server.post("/v1/resume", {"hold_id": hold["id"]})
    assert not holds and weights["session"] is None and not weights["asleep"]


def local(text: str, server: Server, model: Path, adapter: Path | str = "") -> str:
    """Put the address of ``server`` and the folders ``model`` and ``adapter`` into ``text``."""
    text = re.sub(r"/adapters/alice[\w-]*", str(adapter), text)
    return re.sub(r"/checkpoints/[\w-]+|\bPATH\b", str(model), text.replace("localhost:8180", server.url[7:]))


@pytest.mark.parametrize("block", SCRIPTS, ids=str)
def test_a_script_runs(block, server, model, adapter, untouched):
    run_script(block, server, model, adapter)


@pytest.mark.slow
@pytest.mark.parametrize("block", FLEET_SCRIPTS, ids=str)
def test_a_script_runs_in_a_fleet(block, model):
    with FleetServer(2) as server:
        run_script(block, server, model)


def run_script(block: Block, server: Server, model: Path, adapter: Path | str = "") -> None:
    """Run the commands of ``block``. Each must succeed."""
    script = 'set -eo pipefail; curl() { command curl -sS --fail-with-body "$@"; echo; }\n'
    done = run(["bash", "-c", script + local(block.text, server, model, adapter)])
    for line in done.stdout.splitlines():
        assert not line.startswith("{") or json.loads(line).get("status", "success") in ("success", "ok", "ready"), line


@pytest.mark.parametrize("block", PYTHON)
def test_a_python_block_runs(block, server, model, untouched):
    given = GIVEN if "model.state_dict()" in block.text else ""
    # As in a notebook, a block may await.
    program = f"""
import ast, asyncio, inspect
code = compile({local(given + block.text, server, model)!r}, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
result = eval(code, globals())
if inspect.iscoroutine(result):
    asyncio.run(result)
"""
    assert "Warning" not in run([sys.executable, "-c", program]).stderr


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["PYTHONWARNINGS"] = "ignore:No ccache found"  # Paddle's, on a machine with a compiler
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


KEYS = [(page, note) for page in PAGES for note in tables(page) if note.startswith("keys: ")]


@pytest.mark.parametrize(("page", "note"), KEYS, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_the_fields_of_a_reply_are_those_that_its_table_names(page, note, server, model, untouched):
    method, path, *body = note.removeprefix("keys: ").split(" ", 2)
    reply = server.request(method, path, json.loads(local(body[0], server, model)) if body else None)
    if path == "/v1/pause":
        server.post("/v1/resume")
    assert reply.result.keys() == {name for row in tables(page)[note] for name in names(row[0])}


def test_the_fields_of_an_update_are_those_that_its_table_names(server):
    document = server.get("/openapi.json").json
    schema = document["paths"]["/v1/update_weights"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    rows = tables(ROOT / "docs" / "pause-and-weights.md")["body: /v1/update_weights"]
    assert {name for row in rows for name in names(row[0])} == schema["properties"].keys()


def test_the_fields_of_a_replica_are_those_that_its_table_names(server):
    rows = tables(ROOT / "docs" / "run-a-fleet.md")["keys of replicas"]
    [replica] = server.get("/v1/replicas").json["replicas"]
    assert {name for row in rows for name in names(row[0])} == replica.keys()
