"""The repository in examples/ci: its tests pass, here and with a wheel in a clean environment; its service starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastdeploy.testing import Server
from fastdeploy.testing.server import FASTDEPLOY

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "ci"
WORKFLOW = yaml.safe_load((EXAMPLE / ".github" / "workflows" / "test.yml").read_text())
NUM_TESTS = 4
pytestmark = pytest.mark.processes


def run(*command: str | Path, cwd: Path = ROOT, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the example, outside of this repository."""
    return shutil.copytree(EXAMPLE, tmp_path / "repository")


@pytest.mark.slow
def test_its_tests_pass_here(repository, tmp_path):
    """With its own pytest.ini. The plugin is named, since the installed package may be older than the plugin."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    out = run(sys.executable, "-m", "pytest", "-q", "-p", "fastdeploy.testing.plugin", cwd=repository, env=env)
    assert f"{NUM_TESTS} passed" in out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_its_tests_pass_with_a_wheel_in_a_clean_environment(repository, tmp_path):
    """As in its workflow: pip installs requirements.txt, and pytest runs. Nothing else is on the path: no compiler."""
    source = tmp_path / "source"
    for part in ("fastdeploy", "custom_ops"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for part in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source)
    wheels, python = tmp_path / "wheels", tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels]
    run(*pip, ".", cwd=source)
    [wheel] = wheels.iterdir()
    assert wheel.stat().st_size < 10e6, "see docs/testing.md"
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    run(python, "-m", "pip", "install", "-q", "--find-links", wheels, "-r", repository / "requirements.txt")
    env = {"PATH": str(python.parent), "HOME": str(tmp_path)}
    [command] = [step["run"] for step in WORKFLOW["jobs"]["plugin"]["steps"] if step.get("run") == "pytest"]
    assert f"{NUM_TESTS} passed" in run(*shlex.split(f"{python.parent}/{command} -q"), cwd=repository, env=env)
    modules = "fastdeploy.model_executor.ops.cpu_library as ops, importlib.util as u"
    check = f"import {modules}; ops.load_library(); print(u.find_spec('torch'), ops.__file__)"
    torch, file = run(python, "-c", check, cwd=repository, env=env).split()
    assert torch == "None" and Path(file).is_relative_to(tmp_path / "venv")


def image_environment() -> dict[str, str]:
    """Return the settings of the server in the image."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    return dict(re.findall(r"\b(FASTDEPLOY_\w+)=(\S+)", text))


def test_its_service_has_a_name_of_a_model_opens_control_routes_and_takes_faults():
    """The image runs ``fastdeploy serve`` with nothing but variables. Here the same command gets the same variables,
    with another port."""
    service: dict[str, Any] = WORKFLOW["jobs"]["service"]["services"]["fastdeploy"]
    environment = image_environment() | service["env"]
    assert environment["FASTDEPLOY_HOST"] == "0.0.0.0"
    assert service["ports"] == ["{0}:{0}".format(environment.pop("FASTDEPLOY_PORT"))]
    assert all(isinstance(value, str) for value in environment.values()), "YAML makes true of on"
    with Server([*FASTDEPLOY, "serve"], environment=environment) as server:
        [step] = WORKFLOW["jobs"]["service"]["steps"]
        reply = json.loads(run("bash", "-c", step["run"].replace("http://localhost:8180", server.url)))
        assert reply["model"] == "llama" and reply["choices"]
        assert server.call("POST", "/v1/faults", {"fault": "http_error", "status": "429"})[0] == 200
        chat = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 8}
        answers = [server.call("POST", "/v1/chat/completions", chat)[0] for _ in range(2)]
        assert answers == [429, 200]
        assert server.call("POST", "/v1/pause", {})[0] == 200
