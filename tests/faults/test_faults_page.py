"""docs/faults.md has every fault and every condition as the table of the code has them."""

from __future__ import annotations

from fastdeploy.faults.rules import CONDITIONS
from fastdeploy.faults.table import FAULTS, Parameter
from support.markdown import ROOT, names, tables

PAGE = tables(ROOT / "docs" / "faults.md")


def told(parameter: Parameter) -> str:
    """Return a parameter as the page has it."""
    return f"`{parameter.name}` ({parameter.default}): {parameter.about}; {parameter.expected}"


def test_the_faults_are_those_of_the_code():
    assert [tuple(row) for row in PAGE["faults"]] == [
        (f"`{f.name}`", f.where, f.about, f.seen, "<br>".join(map(told, f.parameters))) for f in FAULTS.values()
    ]


def test_the_conditions_are_those_of_the_code():
    assert [tuple(row) for row in PAGE["conditions"]] == [
        (f"`{c.name}`", str(c.default), c.expected, c.about) for c in CONDITIONS
    ]


def test_the_defects_that_are_replayed_are_those_of_the_code():
    assert {names(row[0])[0]: row[1] for row in PAGE["replays"]} == {
        fault.name: fault.replays for fault in FAULTS.values() if fault.replays
    }
