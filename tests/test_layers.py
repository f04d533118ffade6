"""Checks of imports: a module imports from its own layer or from one below, and no files import in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each layer, and the layers below it that it may import. ``core`` is the ground floor: it imports nothing of ours.
# The inside of a process (engine, worker, http) is imported by that process's main alone, in ``entrypoints``.
LAYERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "embedded": (),
    "inter_communicator": ("core",),
    "cache_manager": ("core",),
    "scheduler": ("core", "cache_manager"),
    "metrics": ("core",),
    "model_executor": ("core",),
    "worker": ("core", "model_executor"),
    "engine": ("core", "inter_communicator", "scheduler", "cache_manager", "metrics"),
    "client": ("core", "inter_communicator"),
    "fleet": ("core", "inter_communicator", "client"),
    "http": ("core", "inter_communicator", "client", "fleet"),
    "faults": ("core", "inter_communicator", "client", "fleet", "http", "scheduler"),
    "bench": (),
    "testing": ("core", "embedded", "rl", "bench"),
    "traffic": ("core",),
    "rl": ("core",),
    "rl.rollout_model": ("core", "model_executor", "rl"),
    "rl.scoring": ("core", "model_executor", "worker"),
    "rl.check_sync": ("core", "model_executor", "rl", "rl.scoring"),
    "entrypoints": (
        "core",
        "bench",
        "embedded",
        "testing",
        "inter_communicator",
        "model_executor",
        "worker",
        "engine",
        "client",
        "fleet",
        "http",
        "faults",
        "traffic",
        "rl.check_sync",
    ),
}
MAINS = ("__init__", "__main__")  # of the package: the offline LLM, and the command line
# All that users import. The programs in examples/ import nothing else of ours, so that users can write the same. Only
# what they have in common is named: the task, and the trainer.
PUBLIC = (
    "fastdeploy",
    "fastdeploy.rl",
    "fastdeploy.bench",
    "fastdeploy.embedded",
    "fastdeploy.testing",
    "fastdeploy.core.errors",
)
SHARED_EXAMPLES = ("examples.embedded_model.", "examples.async_grpo.")
PROGRAMS = ("benchmarks", "acceptance", "examples")  # beside the package; nothing in it imports them
# Of the programs that measure and check, the files that look inside the product. All others use what users import.
INSIDE = (
    "benchmarks.check_sync",  # the statistics, with another engine
    "benchmarks.connections",  # sockets of a port
    "benchmarks.fleet",  # policies of routing
    "benchmarks.fleet_pauses",
    "benchmarks.fleet_scale",
    "benchmarks.host_time",
    "benchmarks.lib.checkpoint",  # deltas, as bytes
    "benchmarks.lib.fleet",  # a fleet of engines without a model
    "benchmarks.lib.gateways",
    "benchmarks.lib.sync_faults",  # rounding, as a server rounds
    "benchmarks.lib.torch_engine",
    "benchmarks.lib.ways.engine_main",  # the engine with a fault
    "benchmarks.layouts",
    "benchmarks.lib.roofline",  # the formula that the server uses, too
    "benchmarks.ops",
    "benchmarks.quantization",
    "benchmarks.relay",  # the sender of a gateway, without one
    "benchmarks.recorder",  # writes the recording of an engine that answers at once
    "benchmarks.speculation",  # the index of drafts, without a server
    "benchmarks.step",
    "benchmarks.turns",  # the tokenizer, without a server
    "acceptance.fleet_chaos",
    "acceptance.lib.chaos",
)
WITH_PADDLE = ("model_executor", "worker", "rl.rollout_model", "rl.scoring", "rl.check_sync")
WITHOUT_PADDLE = [layer for layer in LAYERS if layer not in WITH_PADDLE]


def module_name(path: Path) -> str:
    """Return the dotted name of a file; that of a package without ``.__init__``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package and of the programs, by its dotted name."""
    files = [path for folder in ("fastdeploy", *PROGRAMS) for path in (ROOT / folder).rglob("*.py")]
    return {module_name(path): path for path in files}


@cache
def imports_of(name: str) -> set[str]:
    """Return the modules of ours that a module imports, anywhere in its file except under TYPE_CHECKING."""
    found = set()
    tree = ast.parse(modules()[name].read_text())
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    found &= modules().keys()
    # ``from package import module`` means the module: the package's own file is imported with it, but not meant.
    return {target for target in found if not any(x.startswith(target + ".") for x in found)}


def layer_of(name: str) -> str:
    """Return the layer of a module; for a module of the programs, the folder of the programs."""
    package, _, rest = name.partition(".")
    if package in PROGRAMS:
        return package
    first_two = ".".join(rest.split(".")[:2])
    return first_two if first_two in LAYERS else rest.partition(".")[0] or "__init__"


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_itself_and_what_lies_below_it(layer):
    names = [name for name in modules() if layer_of(name) == layer]
    assert names, f"the layer {layer} has no module"
    for name in names:
        for target in imports_of(name):
            if target == "fastdeploy":  # the package itself: its version
                continue
            assert layer_of(target) in (layer, *LAYERS[layer]), f"{name} imports {target}"


def test_every_module_belongs_to_a_layer_and_the_package_imports_no_program():
    for name in modules():
        assert layer_of(name) in (*LAYERS, *MAINS, *PROGRAMS), f"{name} belongs to no layer"
        if layer_of(name) not in PROGRAMS:
            assert not any(layer_of(target) in PROGRAMS for target in imports_of(name)), name


def test_an_example_imports_only_itself_the_common_task_and_what_users_import():
    examples = [name for name in modules() if layer_of(name) == "examples"]
    assert examples
    for name in examples:
        own = ".".join(name.split(".")[:2])  # examples.NAME
        for target in imports_of(name):
            ours = f"{target}.".startswith((f"{own}.", *SHARED_EXAMPLES))
            assert ours or is_public(target), f"{name} imports {target}"


def test_only_the_listed_benchmarks_and_checks_look_inside_and_benchmarks_need_no_acceptance():
    needed = set()
    for name in modules():
        if layer_of(name) in ("benchmarks", "acceptance"):
            ours = {target for target in imports_of(name) if target.partition(".")[0] == "fastdeploy"}
            assert name.startswith(INSIDE) or all(map(is_public, ours)), f"{name} imports {ours}"
            needed |= {prefix for prefix in INSIDE if name.startswith(prefix) and not all(map(is_public, ours))}
            if layer_of(name) == "benchmarks":
                assert not any(layer_of(target) == "acceptance" for target in imports_of(name)), name
    assert needed == set(INSIDE), "the list names a file that looks no longer inside"


def is_public(name: str) -> bool:
    """Whether users may import a module: it is in PUBLIC, or in a package of PUBLIC other than the whole."""
    return name in PUBLIC or any(name.startswith(f"{package}.") for package in PUBLIC[1:])


def assert_no_circle(imports: dict[str, set[str]]) -> None:
    """imports: what each name imports, by name."""
    visited: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in visited:
            for target in sorted(imports[name]):
                visit(target, (*path, name))
            visited.add(name)

    for name in imports:
        visit(name, ())


def test_no_files_import_in_a_circle():
    assert_no_circle({name: imports_of(name) - {"fastdeploy"} for name in modules()})


def test_no_rooms_of_the_engine_import_in_a_circle():
    rooms: dict[str, set[str]] = {}
    for name in modules():
        if layer_of(name) == "engine":
            room = ".".join(name.split(".")[:3])
            targets = {".".join(target.split(".")[:3]) for target in imports_of(name) if layer_of(target) == "engine"}
            rooms.setdefault(room, set()).update(targets - {room})
    assert len(rooms) > 5
    assert_no_circle(rooms)


@pytest.mark.parametrize("layer", WITHOUT_PADDLE)
def test_a_layer_can_be_imported_without_paddle(layer):
    # The integrations in rl.frameworks import packages of the frameworks.
    names = [n for n in modules() if layer_of(n) == layer and ".frameworks." not in n]
    code = f"import sys, {', '.join(names)}; sys.exit('paddle' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"{layer} imports paddle"
