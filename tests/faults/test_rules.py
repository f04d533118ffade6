"""Rules are read from headers, bodies and files; a bad one is refused by its field, and a good one acts by its seed."""

from __future__ import annotations

import json

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.faults.rules import CONDITIONS, read_file, read_headers, read_rule, read_schedule
from fastdeploy.faults.table import FAULTS, Place

BAD = [
    ({"fault": "nonsense"}, "fault", "expected one of death, death_in_call, stream_cut"),
    ({}, "fault", "expected one of death"),
    ({"fault": "stream_cut", "token": 1}, "token", "after, times"),
    ({"fault": "stream_cut", "tokens": -1}, "tokens", "an integer from 0"),
    ({"fault": "stream_cut", "tokens": True}, "tokens", "an integer from 0"),
    ({"fault": "stream_cut", "tokens": 1.5}, "tokens", "an integer from 0"),
    ({"fault": "stream_cut", "when": "later"}, "when", "one of before, between, middle"),
    ({"fault": "slow_tokens", "seconds": float("nan")}, "seconds", "a number from 0"),
    ({"fault": "http_error", "status": "418"}, "status", "one of 429"),
    ({"fault": "stream_cut", "probability": 2}, "probability", "a number from 0 to 1"),
    ({"fault": "stream_cut", "seed": "x"}, "seed", "an integer"),
    ({"fault": "pause_hangs", "call": "commit"}, "call", "expected one of pause"),
    ({"fault": "stream_cut", "call": "pause"}, "call", "acts on a request for tokens"),
    ({"fault": "death", "of": "gateway"}, "of", "only a fleet has it"),
]


@pytest.mark.parametrize(("given", "field", "words"), BAD, ids=[f"{i}-{field}" for i, (_, field, _) in enumerate(BAD)])
def test_a_bad_rule_is_refused_by_its_field(given, field, words):
    with pytest.raises(InvalidField) as error:
        read_rule(given, is_fleet=False)
    assert error.value.field == field and words in error.value.message


def test_a_status_may_be_a_number():
    rule = read_rule({"fault": "http_error", "status": 500}, is_fleet=False)
    assert rule.parameters["status"] == 500


def test_every_fault_can_be_armed_with_its_defaults_by_a_body_and_by_a_header():
    for name, row in FAULTS.items():
        rule = read_rule({"fault": name}, is_fleet=False)
        assert rule.parameters == {parameter.name: parameter.default for parameter in row.parameters}
        [from_header] = read_headers([name], is_fleet=False)
        assert from_header.parameters == rule.parameters


def test_a_header_has_values_as_text_and_may_name_several_faults():
    cut, slow = read_headers(["stream_cut; when=middle; tokens=3 , slow_tokens;seconds=0.5"], is_fleet=False)
    assert cut.parameters == {"when": "middle", "tokens": 3}
    assert slow.parameters == {"seconds": 0.5}


@pytest.mark.parametrize(
    "header", ["", "nonsense", "stream_cut; tokens", "stream_cut; tokens=x", "stream_cut; after=2"]
)
def test_a_bad_header_is_refused_by_its_name(header):
    with pytest.raises(InvalidField) as error:
        read_headers([header], is_fleet=False)
    assert error.value.field == "X-Fault"


def test_no_parameter_of_a_fault_has_the_name_of_a_condition():
    names = {condition.name for condition in CONDITIONS} | {"name", "seed", "fault"}
    for row in FAULTS.values():
        assert not names & {parameter.name for parameter in row.parameters}, row.name
        assert (row.place is Place.CALL) == bool(row.calls), row.name


def test_a_schedule_file_is_yaml_or_json_and_its_seed_is_that_of_its_rules(tmp_path):
    rules = [{"fault": "stream_cut", "after": 2}, {"fault": "death", "from_s": 30, "seed": 1}]
    (tmp_path / "a.json").write_text(json.dumps({"seed": 7, "rules": rules}))
    (tmp_path / "a.yaml").write_text(
        "seed: 7\nrules:\n- {fault: stream_cut, after: 2}\n- {fault: death, from_s: 30, seed: 1}\n"
    )
    first, second = (read_file(str(tmp_path / name), is_fleet=False).rules for name in ("a.json", "a.yaml"))
    assert first == second
    assert [rule.seed for rule in first] == [7, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rules: [{fault: stream_cut}, {fault: nonsense}]", "rules[1].fault: expected one of"),
        ("rules: []", "rules: expected one rule, or a list"),
        ("rules: [{fault: stream_cut}]\nseeds: 3", "seeds: expected seed and rules"),
        ("]", "expected JSON or YAML"),
        ("3", "rules: expected one rule"),
    ],
)
def test_a_bad_schedule_file_is_refused_by_its_path_and_the_field_in_it(tmp_path, text, words):
    path = tmp_path / "scenario.yaml"
    path.write_text(text)
    with pytest.raises(InvalidField) as error:
        read_file(str(path), is_fleet=False)
    assert error.value.field == "faults"
    assert str(path) in error.value.message and words in error.value.message


def test_a_schedule_file_that_is_not_there_is_refused():
    with pytest.raises(InvalidField, match="faults: expected a schedule file, got '/nowhere': No such file"):
        read_file("/nowhere", is_fleet=False)


def test_which_requests_get_a_fault_depends_on_the_seed_the_rule_and_their_number_alone():
    def drawn(seed: int, name: str = "r") -> list[bool]:
        rule = read_rule({"fault": "stream_cut", "name": name, "probability": 0.5, "times": 0, "seed": seed}, False)
        return [rule.draw() for _ in range(64)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1) != drawn(1, "other")
    assert 16 < sum(drawn(1)) < 48


def test_after_and_times_choose_a_burst():
    rule = read_rule({"fault": "http_error", "after": 2, "times": 3}, is_fleet=False)
    assert [rule.draw() for _ in range(7)] == [False, False, True, True, True, False, False]
    assert (rule.matched, rule.fired) == (7, 3)


def test_one_object_a_list_and_a_schedule_are_the_same_rule():
    one = {"fault": "stream_cut"}
    assert read_schedule(one, False) == read_schedule([one], False) == read_schedule({"rules": [one]}, False)
