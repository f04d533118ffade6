"""Building, loading and choosing the C++ ops, and calling them from several threads."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import paddle
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.model_executor.ops import cpu_library, get_ops
from fastdeploy.model_executor.ops.cpu import CpuLinear, CpuOps
from fastdeploy.model_executor.ops.reference import ReferenceOps

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "custom_ops" / "build.py"


@pytest.fixture
def builder():
    """Import custom_ops/build.py."""
    spec = importlib.util.spec_from_file_location("cpu_ops_build", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_python(code: str, **environment: str) -> str:
    """Run code in a new interpreter, check that it exits with 0, and return its output."""
    env = {**os.environ, **environment}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_built_library_is_chosen_for_the_cpu(caplog):
    with caplog.at_level(logging.WARNING):
        ops = get_ops("bfloat16")
    assert isinstance(ops, CpuOps) and ops.dtype == "bfloat16" and not caplog.records


def test_without_a_library_the_reference_runs_after_one_warning(caplog, monkeypatch, tmp_path):
    load = cpu_library.load_library
    monkeypatch.setattr(cpu_library, "load_library", lambda: load(tmp_path / "missing.so"))
    with caplog.at_level(logging.WARNING):
        ops = get_ops("float32")
    assert isinstance(ops, ReferenceOps)
    assert len(caplog.records) == 1 and "custom_ops/build.py" in caplog.text


def test_a_file_that_is_no_library_counts_as_missing(tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not an object file")
    with pytest.raises(OSError):
        cpu_library.load_library(broken)


def test_a_library_built_from_other_sources_counts_as_missing_and_the_error_names_the_reason(caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(cpu_library.SIGNATURES, "fd_of_tomorrow", (None, []))
        with pytest.raises(OSError, match="fd_of_tomorrow"):
            cpu_library.load_library()
        with caplog.at_level(logging.WARNING):
            assert isinstance(get_ops("float32"), ReferenceOps)
        assert "fd_of_tomorrow" in caplog.text
    for name, struct in cpu_library.STRUCTS.items():

        class Grown(struct):
            _fields_ = [("new", ctypes.c_void_p)]

        with monkeypatch.context() as patch:
            patch.setitem(cpu_library.STRUCTS, name, Grown)
            with pytest.raises(OSError, match=f"Grown has {ctypes.sizeof(struct)} bytes there"):
                cpu_library.load_library()


def test_a_build_is_skipped_while_nothing_changed(builder, tmp_path, monkeypatch, capsys):
    compiled = []

    def compile_library(compiler: str, target: Path, stamp: str) -> None:
        compiled.append(stamp)
        target.write_bytes(b"code " + stamp.encode() + b" more code")

    monkeypatch.setattr(builder, "find_compiler", lambda: "g++")
    monkeypatch.setattr(builder, "compile_library", compile_library)
    target = tmp_path / "library.so"
    assert builder.build(target) and builder.build(target)
    assert len(compiled) == 1 and "up to date" in capsys.readouterr().out
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "api.cc").write_text("changed")
    monkeypatch.setattr(builder, "SOURCES", sources)
    assert builder.build(target) and len(compiled) == 2


def test_the_library_carries_the_stamp_that_the_build_looks_for(builder):
    assert builder.build_stamp().encode() in cpu_library.LIBRARY.read_bytes()


def test_without_a_compiler_the_build_prints_one_line_and_removes_a_stale_library(tmp_path):
    stale = tmp_path / "library.so"
    stale.write_bytes(b"made of other sources")
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import build, pathlib; "
    code += f"build.build(pathlib.Path({str(stale)!r}))"
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and not stale.exists()
    assert len(run.stdout.splitlines()) == 1 and "no C++ compiler" in run.stdout and run.stderr == ""


def test_a_compiler_that_fails_leaves_no_library(builder, tmp_path, monkeypatch, capsys):
    def compile_library(compiler: str, target: Path, stamp: str) -> None:
        raise subprocess.CalledProcessError(1, compiler, stderr="api.cc:1: error")

    monkeypatch.setattr(builder, "find_compiler", lambda: "g++")
    monkeypatch.setattr(builder, "compile_library", compile_library)
    assert not builder.build(tmp_path / "library.so")
    assert "api.cc:1: error" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_environment_caps_instruction_set_and_threads():
    code = (
        "from fastdeploy.model_executor.ops.cpu import CpuOps\n"
        "ops = CpuOps('bfloat16'); print('ops', ops.isa, ops.num_threads)"
    )
    out = run_python(code, FASTDEPLOY_CPU_ISA="avx2", FASTDEPLOY_CPU_THREADS="3")
    assert "ops avx2 3" in out


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("FASTDEPLOY_CPU_ISA", "sse9")
    with pytest.raises(InvalidField, match="FASTDEPLOY_CPU_ISA.*sse9"):
        cpu_library.load_library()


def test_packing_beside_a_running_op_disturbs_neither(rng):
    """A weight update packs on its own thread while the engine's thread computes."""
    ops = CpuOps("bfloat16")
    source = rng.standard_normal((512, 640)).astype(np.float32)
    x, weight = paddle.to_tensor(rng.standard_normal((40, 640)).astype(np.float32)), ops.pack_linear([source])
    expected = ops.linear(x, weight).numpy()
    packed: list[CpuLinear] = []
    stager = threading.Thread(target=lambda: packed.extend(ops.pack_linear([source]) for _ in range(100)))
    stager.start()
    rounds = 0
    while stager.is_alive() or rounds < 100:
        np.testing.assert_array_equal(ops.linear(x, weight).numpy(), expected)
        rounds += 1
    stager.join()
    for other in packed[::10]:
        np.testing.assert_array_equal(ops.linear(x, other).numpy(), expected)


def test_two_threads_may_call_ops_at_the_same_time(rng):
    """The thread pool serves one of them; the other computes alone, with the same bits."""
    ops = CpuOps("bfloat16")
    inputs = [paddle.to_tensor(rng.standard_normal((m, 640)).astype(np.float32)) for m in (1, 33)]
    weight = ops.pack_linear([rng.standard_normal((8192, 640)).astype(np.float32)])  # long calls, which overlap
    expected = [ops.linear(x, weight).numpy() for x in inputs]
    wrong: list[int] = []

    def call(which: int) -> None:
        for _ in range(100):
            if (ops.linear(inputs[which], weight).numpy() != expected[which]).any():
                wrong.append(which)

    threads = [threading.Thread(target=call, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_weights_and_caches_give_their_memory_back():
    code = (
        "import numpy as np, resource\n"
        "from fastdeploy.model_executor.ops.cpu import CpuOps\n"
        "ops = CpuOps('float32'); w = np.ones((4096, 4096), np.float32)\n"  # 64 MiB
        "for _ in range(4): ops.pack_linear([w])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for _ in range(10): ops.pack_linear([w])\n"
        "print('grew', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grew_kib = int(run_python(code).split("grew ")[1])
    assert grew_kib < 100_000


def test_freed_scratch_goes_back_to_the_system_and_the_next_op_takes_new():
    code = (
        "import numpy as np, paddle\n"
        "from fastdeploy.model_executor.ops.cpu import CpuOps\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
        "ops = CpuOps('bfloat16'); head = ops.pack_linear([np.ones((40_000, 64), np.float32)])\n"
        "wide = ops.pack_linear([np.ones((16, 20_000), np.float32)]); x = paddle.ones([1000, 20_000])\n"
        "run = lambda: (ops.linear(x, wide), ops.logits(x[:500, :64].contiguous(), paddle.ones([64]), 1e-6, head))\n"
        "before = resident(); first = [t.numpy() for t in run()]; held = resident() - before\n"
        "ops.free_scratch(); kept = resident() - before\n"
        "same = all((a.numpy() == b).all() for a, b in zip(run(), first))\n"
        "print('found', held, kept, same)"
    )
    held, kept, same = run_python(code, FASTDEPLOY_CPU_THREADS="2").split("found ")[1].split()
    assert int(held) - int(kept) > 90 and same == "True"  # logits of 77 MiB, a left operand of 38 MiB
