"""Errors keep their content when they are sent between the processes of a trainer."""

from __future__ import annotations

import pickle

import pytest

from fastdeploy.core.errors import BY_CODE, InvalidField
from fastdeploy.rl.errors import FleetError, Report, RolloutFailed, TooStale, Unreachable

MADE = [
    InvalidField("temperature", "expected a number"),
    Unreachable("gone", retry_after=2.0),
    FleetError("no replica has committed", [Report("a", {"weight_epoch": 1}), Report("b", error=Unreachable("gone"))]),
    RolloutFailed("not in time", []),
    TooStale("2 behind", []),
]


@pytest.mark.parametrize("error", MADE, ids=lambda e: type(e).__name__)
def test_an_error_keeps_its_content_in_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.detail == error.detail
    assert vars(again).keys() == vars(error).keys() and again.status == error.status


def test_a_report_says_which_replica_failed_and_why():
    assert "b: gone" in str(MADE[2]) and "a:" not in str(MADE[2])
    assert [r.ok for r in MADE[2].reports] == [True, False]


def test_the_trainers_errors_do_not_take_a_code_of_the_servers():
    codes = {cls.code for cls in (FleetError, RolloutFailed, TooStale, Unreachable)}
    assert len(codes) == 4 and not codes & {
        c for c, cls in BY_CODE.items() if cls.__module__ == "fastdeploy.core.errors"
    }
