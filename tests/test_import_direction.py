"""entrypoints -> engine.client -> messages; engine -> scheduler -> cache_manager; worker -> model_executor -> ops."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastdeploy"

# The plain data and process settings that everybody may know.
SHARED = (
    "errors",
    "config",
    "envs",
    "logger",
    "collector",
    "safe_files",
    "engine.sampling_params",
    "inter_communicator",
)

# What a module of the left may import, besides itself and SHARED; the longest prefix that matches decides.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "safe_files": (),
    "engine.sampling_params": (),
    "inter_communicator": (),
    "engine.request": (),
    "engine.deadlines": ("engine.request",),
    "engine.retention": ("engine.request",),
    "engine.admission": (
        "engine.deadlines",
        "engine.holds",
        "engine.pause",
        "engine.request",
        "engine.retention",
        "scheduler.interface",
        "scheduler.queue",
    ),
    "engine.lifecycle": (
        "engine.deadlines",
        "engine.delivery",
        "engine.pause",
        "engine.request",
        "engine.retention",
        "metrics",
        "scheduler",
    ),
    "engine.gauges": (
        "cache_manager",
        "engine.pause",
        "engine.retention",
        "engine.sleep",
        "engine.weights",
        "metrics",
        "scheduler",
    ),
    "engine.client": ("engine.request_stream",),
    "engine.request_stream": (),
    "cache_manager": ("engine.request", "scheduler.interface"),
    "scheduler.interface": (),
    "scheduler": ("engine.request", "cache_manager"),
    "metrics": ("engine.request", "scheduler"),
    "engine.holds": ("scheduler",),
    "engine.pause": ("engine.holds", "scheduler"),
    "engine.processes": (),
    "engine.delivery": ("engine.request", "scheduler"),
    "engine.staging_thread": (),
    "engine.weight_session": ("scheduler.interface",),
    "engine.weight_sources": (),
    "engine.weights": (
        "engine.holds",
        "engine.pause",
        "engine.staging_thread",
        "engine.weight_session",
        "engine.weight_sources",
        "scheduler.interface",
    ),
    "engine.warm_up": ("scheduler",),
    "engine.sleep": ("engine.pause", "engine.weights", "scheduler.interface"),
    "engine.common_engine": ("engine", "scheduler", "cache_manager", "metrics"),
    "model_executor.ops": ("model_executor.rng",),
    "model_executor": (),
    "rl": (),
    "worker": ("model_executor", "scheduler.interface"),
}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Modules of ours that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fastdeploy"):
            assert node.level == 0
            base = node.module.removeprefix("fastdeploy").removeprefix(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                is_module = (PACKAGE / inner.replace(".", "/")).with_suffix(".py").exists()
                found.add(inner if is_module or (PACKAGE / inner.replace(".", "/")).is_dir() else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("fastdeploy.") for a in node.names if a.name.startswith("fastdeploy.")}
    return found - {""}  # the package itself: its version


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_a_layer_imports_only_what_lies_below_it(layer):
    checked = 0
    for path in PACKAGE.rglob("*.py"):
        name = module_name(path)
        if max((x for x in MAY_IMPORT if under(name, x)), key=len, default=None) != layer:
            continue
        checked += 1
        for target in imports_of(path):
            allowed = (layer, *MAY_IMPORT[layer], *SHARED)
            assert any(under(target, x) for x in allowed), f"{name} imports {target}"
    assert checked, f"{layer} names no module"


def test_messages_import_nothing_of_ours_but_sampling_params():
    assert imports_of(PACKAGE / "inter_communicator" / "messages.py") == {"engine.sampling_params"}
    assert imports_of(PACKAGE / "engine" / "sampling_params.py") == {"errors"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "entrypoints" / "openai").glob("*.py")), ids=lambda p: p.name)
def test_the_http_side_reaches_the_engine_only_through_its_client(path):
    for target in imports_of(path):
        assert (
            under(target, "entrypoints")
            or target in ("engine.client", "engine.request_stream")
            or any(under(target, x) for x in SHARED)
        ), f"{path.name} imports {target}"


@pytest.mark.parametrize(
    "module",
    ["scheduler.scheduler", "cache_manager.kv_cache_manager", "engine.common_engine", "engine.client",
     "inter_communicator.messages", "rl.client", "rl.sync_client"],
)  # fmt: skip
def test_it_can_be_imported_without_paddle(module):
    code = f"import sys, fastdeploy.{module}; sys.exit('paddle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"fastdeploy.{module} imports paddle"
