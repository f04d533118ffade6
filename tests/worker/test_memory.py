"""Free memory, as the standby copy and the KV cache count it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastdeploy.worker import memory

MIB = 1 << 20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {40 * MIB}\nactive_file {10 * MIB}\ninactive_file {40 * MIB}\n")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(("limit", "free"), [(100, 50), (60, 10), (40, 0)])
def test_a_limited_cgroup_has_what_its_processes_do_not_use_and_files_give_way(limit, free, cgroup):
    (cgroup / "memory.max").write_text(f"{limit * MIB}\n")
    assert memory.free_memory() == free * MIB


def test_without_a_limit_the_memory_of_the_machine_counts(cgroup, tmp_path, monkeypatch):
    (cgroup / "memory.max").write_text("max\n")
    assert memory.free_memory() > 100 * MIB
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    assert memory.free_memory() > 100 * MIB
