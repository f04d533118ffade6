"""Errors keep their content when they are sent between the processes of a trainer."""

from __future__ import annotations

import pickle

import pytest

from fastdeploy.core.errors import BY_CODE, InvalidField
from fastdeploy.rl.errors import HoldLost, RolloutFailed, TooStale, Unreachable, WrongWeights

MADE = [
    InvalidField("temperature", "expected a number"),
    Unreachable("gone", retry_after=2.0),
    HoldLost("hold a ended"),
    RolloutFailed("not in time", []),
    TooStale("2 behind", []),
]


@pytest.mark.parametrize("error", MADE, ids=lambda e: type(e).__name__)
def test_an_error_keeps_its_content_in_another_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and again.detail == error.detail
    assert vars(again).keys() == vars(error).keys() and again.status == error.status


def test_the_trainers_errors_do_not_take_a_code_of_the_servers():
    codes = {cls.code for cls in (HoldLost, RolloutFailed, TooStale, Unreachable, WrongWeights)}
    assert len(codes) == 5 and not codes & {
        c for c, cls in BY_CODE.items() if cls.__module__ == "fastdeploy.core.errors"
    }
