from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.lib import engines
from benchmarks.lib.engines import ENGINES, PEERS, Limits

PEER_NAMES = ["vllm", "openvino", "llamacpp"]


def install(peers: Path, name: str, version: str) -> None:
    (peers / name).mkdir()
    (peers / name / ".complete").write_text(f"{version}\n")


@pytest.fixture
def peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", PEER_NAMES)
def test_a_peer_that_is_not_installed_says_how_to_install_it(peers: Path, name: str):
    engine = ENGINES[name](Path("model"), "q05")
    assert engine.missing == f"not installed: benchmarks/peers/{name}.sh install"
    assert (PEERS / f"{name}.sh").exists()


def test_a_peer_whose_install_was_cut_off_is_missing(peers: Path):
    (peers / "vllm" / "bin").mkdir(parents=True)
    assert ENGINES["vllm"](Path("model"), "q05").missing


@pytest.mark.parametrize("name", PEER_NAMES)
def test_the_version_of_a_peer_is_the_one_that_its_script_installed(peers: Path, name: str):
    assert 'echo "$VERSION" > "$VENV/.complete"' in (PEERS / f"{name}.sh").read_text()
    install(peers, name, "1.2.3")
    engine = ENGINES[name](Path("model"), "q05")
    assert engine.missing is None and engine.version.startswith("1.2.3")


def test_every_engine_gets_the_same_limits():
    limits = Limits(sequences=7, context=8192, kv_gb=3)
    found = {name: " ".join(make(Path("model"), "q05", limits).command) for name, make in ENGINES.items()}
    assert "--max-num-seqs 7 --max-model-len 8192 --kv-cache-gb 3" in found["ours"]
    assert "KV_GB=3" in found["vllm"] and "--max-num-seqs 7 --max-model-len 8192" in found["vllm"]
    assert "--max-num-seqs 7" in found["openvino"] and "--kv-gb" in found["openvino"]
    assert "SEQUENCES=7 CONTEXT=8192" in found["llamacpp"]


@pytest.mark.parametrize(
    ("flags", "precision", "kv_gb"), [({"avx2", "avx512_bf16"}, "bf16", "2"), ({"amx_bf16"}, "bf16", "2"),
                                      ({"avx2", "avx512f"}, "f32", "4"), (set(), "f32", "4")],
)  # fmt: skip
def test_openvino_is_given_the_precision_that_the_cpu_has(peers: Path, monkeypatch, flags, precision, kv_gb):
    install(peers, "openvino", "2026.4.1.0")
    monkeypatch.setattr(engines, "cpu_flags", lambda: flags)
    engine = ENGINES["openvino"](Path("model"), "q05")
    command = engine.command
    assert command[command.index("--precision") + 1] == precision
    assert command[command.index("--kv-gb") + 1] == kv_gb
    assert ("float32" in engine.version) == (precision == "f32")


def test_a_run_limited_to_avx512_is_one_without_bfloat16(tmp_path: Path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("model name: a CPU\nflags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_int8\n")
    monkeypatch.delenv("FASTDEPLOY_CPU_ISA", raising=False)
    assert {"avx512f", "avx512_bf16", "amx_bf16"} <= engines.cpu_flags(tmp_path / "cpuinfo")
    monkeypatch.setenv("FASTDEPLOY_CPU_ISA", "avx512")
    assert engines.cpu_flags(tmp_path / "cpuinfo") == {"avx2", "avx512f", "amx_int8"}


@pytest.mark.parametrize("name", PEER_NAMES)
def test_a_peer_uses_the_cores_that_it_may_use(name: str):
    script = (PEERS / f"{name}.sh").read_text()
    function = script[script.index("cores()") : script.index("\n}\n", script.index("cores()")) + 3]
    core = min(os.sched_getaffinity(0))
    done = subprocess.run(
        ["taskset", "-c", str(core), "bash", "-c", function + "cores"], capture_output=True, text=True
    )
    assert done.stdout.strip() == str(core)
    assert "${CORES:-$(cores)}" in script
