"""What is armed, the numbers of requests and what happened survive the process that keeps them."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.faults.book import FaultBook
from fastdeploy.faults.rules import read_headers, read_schedule
from fastdeploy.faults.table import FAULTS, Place

pytestmark = pytest.mark.anyio


def schedule(*rules, seed: int = 0):
    return read_schedule({"seed": seed, "rules": list(rules)}, is_fleet=False)


async def fired(book: FaultBook, count: int, place: Place = Place.REQUEST, **facts) -> list[str]:
    """Return the names of the faults that ``count`` requests get, "" without one."""
    found = []
    for _ in range(count):
        chosen = await book.decide(place, [], "/v1/completions", **facts)
        found.append(", ".join(rule.fault for rule, _ in chosen))
    return found


async def test_a_book_goes_on_where_the_one_before_it_ended(tmp_path):
    scenario = schedule({"fault": "stream_cut", "probability": 0.5, "times": 0}, seed=3)
    undisturbed = await fired(FaultBook(str(tmp_path / "."), scenario), 40)
    (tmp_path / "state.json").unlink()

    scenario = schedule({"fault": "stream_cut", "probability": 0.5, "times": 0}, seed=3)
    first = FaultBook(str(tmp_path), scenario)
    begun = await fired(first, 15)
    [(_, happening), *_] = await first.decide(Place.HTTP, read_headers(["http_error"], False), "/v1/completions")
    first.acted(happening)
    second = FaultBook(str(tmp_path), schedule({"fault": "death"}))  # the file is stronger
    assert begun + await fired(second, 25) == undisturbed
    assert second.state.counts == {"http_error": 1}
    assert [one.acted for one in second.state.happened if one.fault == "http_error"] == [True]


async def test_arming_is_all_or_nothing_and_names_are_unique(tmp_path):
    book = FaultBook(str(tmp_path))
    assert [rule.name for rule in book.arm(schedule({"fault": "death", "name": "d"}, {"fault": "frozen"}))] == [
        "d",
        "rule-2",
    ]
    with pytest.raises(InvalidField, match="'d' is armed already"):
        book.arm(schedule({"fault": "frozen"}, {"fault": "death", "name": "d"}))
    assert len(book.state.rules) == 2
    with pytest.raises(InvalidField, match="rule: expected one of d, rule-2, got 'x'"):
        book.disarm("x")
    assert book.disarm("d") == ["d"]
    assert book.disarm(None) == ["rule-2"]
    assert [rule.name for rule in book.arm(schedule({"fault": "frozen"}))] == ["rule-1"]


async def test_conditions_choose_the_requests_that_a_rule_counts(tmp_path):
    def book(**conditions) -> FaultBook:
        made = FaultBook(str(tmp_path))
        made.disarm(None)
        made.arm(schedule({"fault": "stream_cut", "times": 0, **conditions}))
        return made

    async def served() -> str:
        return "v2"

    assert await fired(book(path="/v1/*"), 1) == ["stream_cut"]
    assert await fired(book(path="/generate"), 1) == [""]
    assert await fired(book(request_id="a*"), 1, request_ids=["", "abc"]) == ["stream_cut"]
    assert await fired(book(request_id="a*"), 1, request_ids=["b"]) == [""]
    assert await fired(book(version="v2"), 1, version=served) == ["stream_cut"]
    assert await fired(book(version="v1"), 1, version=served) == [""]
    assert await fired(book(from_s=1000), 1) == [""]
    late = book(until_s=1000)
    assert await fired(late, 1) == ["stream_cut"]
    late.state.rules[0].armed_at -= 2000
    assert await fired(late, 1) == [""]
    assert late.state.rules[0].matched == 1


async def test_the_rule_of_a_header_acts_once_and_is_not_armed(tmp_path):
    book, asked = FaultBook(str(tmp_path)), read_headers(["stream_cut"], is_fleet=False)
    assert len(await book.decide(Place.REQUEST, asked, "/generate")) == 1
    assert await book.decide(Place.REQUEST, asked, "/generate") == []
    assert book.view()["armed"] == []


async def test_every_fault_has_a_value_in_the_metrics_from_the_start(tmp_path):
    [family] = FaultBook(str(tmp_path)).collect()
    assert {sample.labels["fault"]: sample.value for sample in family.samples} == dict.fromkeys(FAULTS, 0)
