"""Checks of README.md and docs/: links lead somewhere, names exist, and lists are those of the code."""

from __future__ import annotations

import argparse
import re
import runpy

import pytest

from fastdeploy.core.config import AUTO, NO_PARSER, REASONING_PARSERS, TOOL_CALL_PARSERS, ServeConfig
from fastdeploy.core.errors import STATUS
from fastdeploy.core.process import VERSION
from fastdeploy.entrypoints.cli.main import make_parser
from fastdeploy.fleet.replica import TRANSITIONS, ReplicaState
from fastdeploy.fleet.transaction import Rule
from fastdeploy.http.app import create_app
from fastdeploy.model_executor.models import ARCHITECTURES
from support.http_calls import route_table
from support.markdown import EXAMPLES, PAGES, ROOT, anchors, blocks, code_spans, names, tables, text_without_blocks
from test_layers import LAYERS

OPERATIONS, ARCHITECTURE, FLEET_PAGE, AGENTS = (
    ROOT / "docs" / f"{name}.md" for name in ("operations", "architecture", "fleet", "agents")
)
OTHER_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "acceptance/README.md")
SETTINGS = [block for page in PAGES for block in blocks(page) if block.note.startswith("settings of ")]
COMMANDS = make_parser()._actions[-1].choices
ROUTES = route_table(create_app(None, None, ServeConfig(model="m")))
SERVE, FLEET = COMMANDS["serve"], COMMANDS["fleet"]
ALL_COMMANDS = [*COMMANDS.values(), *COMMANDS["bench"]._actions[-1].choices.values()]
# Flags of other programs, which the pages name in their text.
FOREIGN_FLAGS = re.compile(
    "--(shm-size|cpus|read-only|tmpfs|health-interval|no-compile|rollout|update-weight|offload|fp16|use-rollout)"
)


# ---------------------------------------------------------------------- links and names


def test_the_readme_is_short_and_every_page_is_linked_from_it():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert all(f"docs/{page.name})" in text for page in PAGES[1:])


def test_the_version_of_the_package_is_the_newest_one_of_the_changelog():
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == VERSION


@pytest.mark.parametrize(
    "page",
    [*PAGES, *EXAMPLES, *(ROOT / name for name in OTHER_PAGES)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_link_leads_to_a_file_and_to_a_heading_of_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text_without_blocks(page)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(file), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_file_a_module_a_route_or_a_flag_that_is_named_exists(page):
    for span in code_spans(page):
        if re.fullmatch(r"(fastdeploy|tests|benchmarks|acceptance|examples|custom_ops|deploy|docs)/[\w/.-]+", span):
            assert (ROOT / span).exists(), f"{page.name}: {span}"
        if re.fullmatch(r"(?!tests/)\w+/test_\w+\.py", span):  # the tests that show a promise
            assert (ROOT / "tests" / span).exists(), f"{page.name}: {span}"
        if re.fullmatch(r"/[a-z0-9_]+(/[a-z0-9_]+)*", span) and span != "/workers":  # the router's own
            assert span in ROUTES.classes, f"{page.name}: {span}"
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", span):
            known = any(flag in command._option_string_actions for command in ALL_COMMANDS)
            assert known or FOREIGN_FLAGS.match(flag), f"{page.name}: {flag}"
        if span.startswith("make "):
            assert f"\n{span.split()[1]}:" in (ROOT / "Makefile").read_text(), f"{page.name}: {span}"
    for name in re.findall(r"(?<![\w./-])(?:fastdeploy|benchmarks|acceptance|examples)(?:\.\w+)+", page.read_text()):
        assert name.endswith(".md") or is_a_name_of_ours(name), f"{page.name}: {name}"


def is_a_name_of_ours(dotted: str) -> bool:
    """Return whether ``dotted`` is a module of ours, a class or function at the top of one, or what a package offers in
    ``__all__``. Imports nothing."""
    parts, path = dotted.split("."), ROOT
    while parts and ((path / parts[0]).is_dir() or (path / f"{parts[0]}.py").exists()):
        folder = path / parts.pop(0)
        path = folder if folder.is_dir() else folder.with_suffix(".py")
    if not parts:
        return True
    if path.is_dir():
        offered = re.search(r"^__all__ = \[(.*?)\]", (path / "__init__.py").read_text(), re.MULTILINE | re.DOTALL)
        return offered is not None and f'"{parts[0]}"' in offered[1]
    return path.is_file() and re.search(rf"^(class|def) {parts[0]}\b", path.read_text(), re.MULTILINE) is not None


# ---------------------------------------------------------------------- lists


def test_the_flags_and_their_defaults_are_those_of_serve():
    assert told_defaults("flags") == defaults_of(SERVE)


def test_the_further_flags_of_a_fleet_and_their_defaults_are_those_of_the_command():
    of_both = defaults_of(SERVE).keys()
    assert told_defaults("flags of fleet") == {
        flag: text for flag, text in defaults_of(FLEET).items() if flag not in of_both
    }


def told_defaults(note: str) -> dict[str, str]:
    """Return the defaults in a table of flags of the page."""
    return {names(row[0])[0]: row[1] for row in tables(OPERATIONS)[note]}


def defaults_of(command: argparse.ArgumentParser) -> dict[str, str]:
    """Return the defaults of the flags of ``command`` as the page shows them, without those of FastDeploy alone."""
    flags = [action for action in command._actions if action.option_strings and action.dest != "help"]
    flags = [action for action in flags if action.help != argparse.SUPPRESS]
    return {action.option_strings[0]: as_told(action.default) for action in flags}


def as_told(default: object) -> str:
    """Return a default as the table of flags shows it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default or "")


def test_the_errors_and_their_status_are_those_of_the_tree():
    told = {code: int(row[0]) for row in tables(OPERATIONS)["errors"] for code in names(row[1])}
    assert told == STATUS


def test_the_architectures_are_those_of_the_models():
    told = {name for row in tables(OPERATIONS)["architectures"] for name in names(row[0])}
    assert told == ARCHITECTURES.keys()


def test_the_formats_of_tool_calls_and_reasoning_are_those_of_the_flags():
    rows = tables(AGENTS)["formats"]
    for column, given in ((0, TOOL_CALL_PARSERS), (2, REASONING_PARSERS)):
        assert {name for row in rows for name in names(row[column])} == {*given} - {AUTO, NO_PARSER}


def test_the_environment_variables_are_those_that_the_code_reads():
    told = {name for row in tables(OPERATIONS)["environment"] for name in names(row[0])}
    text = "".join(path.read_text() for path in (ROOT / "fastdeploy").rglob("*.py"))
    assert told == set(re.findall(r"FASTDEPLOY_[A-Z_]+", text))


def test_the_states_of_a_replica_are_those_of_the_code():
    rows = tables(FLEET_PAGE)["replica states"]
    assert {names(row[0])[0]: set(names(row[2])) for row in rows} == {
        state.value: {to.value for (at, _), to in TRANSITIONS.items() if at is state is not to}
        for state in ReplicaState
    }


def test_the_rules_of_transactions_are_those_of_the_code():
    assert [names(row[0])[0] for row in tables(FLEET_PAGE)["rules"]] == [rule.value for rule in Rule]


def test_the_layers_are_those_of_the_test_of_imports():
    rows = tables(ARCHITECTURE)["layers"]
    assert {names(row[0])[0]: tuple(names(row[1])) for row in rows} == LAYERS


def test_every_dependency_is_explained(monkeypatch):
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    lists = (setup[name] for name in ("RUNTIME", "TEST", "TRL", "RAY", "LINT"))
    wanted = {re.split(r"[\[><=]", package)[0] for packages in lists for package in packages} | {"paddlepaddle"}
    told = (ROOT / "CONTRIBUTING.md").read_text().partition("## Dependencies")[2]
    assert wanted <= set(re.findall(r"[\w-]+", told))


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_a_setting_of_a_framework_is_one_that_our_module_for_it_names(block):
    module = (ROOT / block.note.removeprefix("settings of ")).read_text()
    for line in block.text.splitlines():
        assert re.split("[:=]", line)[0] in module, line
