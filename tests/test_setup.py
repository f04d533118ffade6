"""Checks of what the distribution requires, and of its contents."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("installed", [False, True])
def test_paddle_is_required_unless_its_cuda_build_is_installed(tmp_path, installed):
    """Both have the same files, so one must not be installed over the other."""
    if installed:
        (tmp_path / "paddlepaddle_gpu-3.3.1.dist-info").mkdir()
        (tmp_path / "paddlepaddle_gpu-3.3.1.dist-info" / "METADATA").write_text("Name: paddlepaddle-gpu\n")
    run = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    requires = (tmp_path / "fastdeploy_cpu.egg-info" / "requires.txt").read_text()
    assert ("paddlepaddle" in requires) is not installed


OPS = "fastdeploy/model_executor/ops/libfastdeploy_cpu_ops.so"
COMPILERS = ("g++", "clang++", "c++")
WHICH_OPS = """
import sys; from fastdeploy.model_executor.ops import get_ops
print(type(get_ops("float32")).__name__, sys.modules["fastdeploy"].__file__)
"""


@pytest.fixture
def source(tmp_path) -> Path:
    """Copy the source tree as it is checked out, with nothing built."""
    folders = ("fastdeploy", "custom_ops", "benchmarks", "acceptance", "examples")
    parts = (*folders, "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
    folder = tmp_path / "source"
    folder.mkdir()
    for part in parts:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / part, folder)
    return folder


def python(folder: Path, *args: str, **environment: str) -> str:
    """Run Python in ``folder`` with the installed packages, but without this checkout; return what it prints."""
    env = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run([sys.executable, *args], cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, **environment: str) -> Path:
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "-w", "wheels"]
    python(source, "-m", "pip", "wheel", "-q", ".", *flags, **environment)
    [wheel] = (source / "wheels").iterdir()
    return wheel


def ops_of_installed(wheel: Path, folder: Path) -> str:
    """Install ``wheel`` and return the class of ops that it uses."""
    python(folder, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", "site", str(wheel))
    name, file = python(folder, "-c", WHICH_OPS, PYTHONPATH=str(folder / "site")).split()
    assert Path(file).is_relative_to(folder / "site")
    return name


@pytest.mark.slow
def test_without_a_compiler_a_wheel_for_any_platform_is_built_and_runs_the_reference(source, tmp_path):
    wheel = build_wheel(source, PATH="/nonexistent", CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert OPS not in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"fastdeploy", "fastdeploy_cpu"}
    assert ops_of_installed(wheel, tmp_path) == "ReferenceOps"


@pytest.mark.slow
def test_with_a_compiler_a_wheel_for_this_platform_with_the_cpp_ops_is_built(source, tmp_path):
    wheel = build_wheel(source)
    tag, ops = ("linux_x86_64", "CpuOps") if any(map(shutil.which, COMPILERS)) else ("any", "ReferenceOps")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    assert ops_of_installed(wheel, tmp_path) == ops


def test_a_source_distribution_can_build_the_ops(source):
    python(source, "setup.py", "-q", "sdist")
    [archive] = (source / "dist").iterdir()
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "custom_ops" / "cpu_ops").rglob("*.*")}
    assert {"custom_ops/build.py", "fastdeploy/embedded/model/model.safetensors", *sources} <= names


def test_ci_runs_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert "make test " in (ROOT / "README.md").read_text()
