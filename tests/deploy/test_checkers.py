"""The files in deploy/ pass the programs that check such files. Run by `make test-deploy`, which installs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEPLOY, TOOLS = ROOT / "deploy", ROOT / ".venv-deploy" / "bin"

pytestmark = pytest.mark.slow


def passes(*command: str | Path) -> None:
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_hadolint_has_nothing_to_say_of_the_dockerfile():
    passes(TOOLS / "hadolint", DEPLOY / "Dockerfile")


@pytest.mark.parametrize("name", ["server.yaml", "fleet.yaml"])
def test_the_manifests_fit_the_schemas_of_kubernetes(name):
    passes(TOOLS / "kubernetes-validate", "--strict", DEPLOY / "kubernetes" / name)


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    """The command of the unit is not on this machine: another program stands in its place."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    text = (DEPLOY / "fastdeploy.service").read_text().replace("/opt/fastdeploy/bin/fastdeploy", "/bin/true")
    unit = tmp_path / "fastdeploy.service"
    unit.write_text(text)
    passes("systemd-analyze", "verify", unit)
