"""Calls that end a request which waits in the gateway."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.fleet.waiting import why_ended
from fastdeploy.inter_communicator import messages as m


@pytest.mark.parametrize(
    ("args", "ends_base", "ends_adapter"),
    [
        (m.PauseArgs("abort"), True, True),
        (m.PauseArgs("ABORT", hold_id="h"), True, True),
        (m.PauseArgs("abort", scope="adapter:a"), False, True),
        (m.PauseArgs("abort", scope="adapter:b"), False, False),
        (m.PauseArgs("wait"), False, False),
        (m.PauseArgs("keep"), False, False),
        (m.SleepArgs(mode="abort"), True, True),
        (m.SleepArgs(), False, False),
        (m.ResetArgs(), True, True),
        (m.AbortArgs(request_ids=["x"]), True, True),
        (m.AbortArgs(request_ids=["y"]), False, False),
        (m.AbortArgs(lora_name="a"), False, True),
        (m.AbortArgs(abort_all=True), True, True),
        (m.ResumeArgs(), False, False),
    ],
)
def test_a_call_ends_the_requests_that_it_would_end_at_an_engine(args, ends_base, ends_adapter):
    for adapter, ends in (("", ends_base), ("a", ends_adapter)):
        request = AddRequest("x", [1], SamplingParams(), adapter=adapter)
        assert (why_ended(args, SimpleNamespace(client_id="x", request=request)) is not None) is ends
