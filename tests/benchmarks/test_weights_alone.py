"""The benchmarks of staging and of deltas run on a tiny model, without a server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import delta, stage
from fastdeploy.model_executor.ops import get_ops
from fastdeploy.worker.standby import StandbyCopy
from support.checkpoints import BFLOAT16, Spec, write_checkpoint

SPEC = Spec("tiny", "Qwen2ForCausalLM", dtype=BFLOAT16)
needs_cpu_ops = pytest.mark.skipif(get_ops("bfloat16").name != "cpu", reason="there is no compiler here")


@needs_cpu_ops
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_stage_benchmark_times_every_kind_of_work(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_checkpoint(tmp_path, SPEC)
    stage.main([str(tmp_path / "model.safetensors"), "--dtype", dtype, "--repeats", "1", "--changed", "0.1"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert dtype in head and "10.0% changed" in head
    assert [line.split()[0] for line in lines] == ["memcpy", "read", "check", "stage", "copy", "overwrite"]


def test_the_delta_benchmark_has_a_current_standby_copy_from_the_first_delta_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_checkpoint(tmp_path, SPEC)
    lend, stale = StandbyCopy.lend, list[int]()

    def watched(copy: StandbyCopy, for_delta: bool = False):
        loan = lend(copy, for_delta)
        if sessions:
            stale.append(sum(spare.missed is None for spare in loan.spares.values()) if loan.spares else -1)
        return loan

    sessions, measure = list[bool](), delta.measure

    def measured(*args) -> str:
        sessions.append(True)
        return measure(*args)

    monkeypatch.setattr(StandbyCopy, "lend", watched)
    monkeypatch.setattr(delta, "measure", measured)
    delta.main([str(tmp_path), "--repeats", "1", "--changed", "0.05"])
    assert stale[0] == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r"\s+", line)[:3] for line in lines] == [["5%", *form] for form in delta.FORMS]
