"""Calls to a runner behind sockets that fail in the middle, or overlap."""

from __future__ import annotations

import os
import tempfile
import threading
from unittest.mock import Mock

import pytest

from fastdeploy import LLM, SamplingParams
from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.runner import AdapterInfo, Staged
from fastdeploy.core.weight_source import PLAIN, FolderSource
from fastdeploy.inter_communicator import runner_messages as m
from fastdeploy.inter_communicator.runner_server import RunnerServer
from support.fake_runner import FakeRunner, FakeStaging
from support.runner_thread import serve_in_thread


def test_a_step_that_the_engine_fails_in_leaves_no_answer_for_the_next_call():
    def failing() -> bool:
        raise ValueError("a bug in the engine")

    remote, close = serve_in_thread(FakeRunner())
    with pytest.raises(ValueError, match="a bug in the engine"):
        remote.execute(StepPlan(1, [], []), failing)
    result = remote.execute(StepPlan(2, [], []))
    assert result is not None and result.step_id == 2
    close()


def test_an_error_that_no_message_can_hold_is_an_answer_too():
    class Refusing(FakeRunner):
        def checksums(self) -> dict[str, str]:
            raise WeightUpdateRefused("no checksums", tensors=[object()])

    remote, close = serve_in_thread(Refusing())
    with pytest.raises(RuntimeError, match="no checksums"):
        remote.checksums()
    close()


def test_a_label_that_no_message_can_hold_is_refused_and_the_engine_goes_on():
    remote, _ = serve_in_thread(FakeRunner())
    with LLM(runner=remote) as llm:
        with pytest.raises(InvalidField, match="version: expected text that UTF-8 can encode"):
            llm.update_weights(version="v\ud800")
        [output] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        assert output.choices[0].finish_reason == "length"


def test_weights_that_are_ready_after_their_session_was_given_up_are_freed():
    began, may_end = threading.Event(), threading.Event()

    class SlowStaging(FakeStaging):
        def finish(self) -> Staged:
            began.set()
            assert may_end.wait(30)
            return Staged((1, True), "of 1")

    runner = FakeRunner()
    with tempfile.TemporaryDirectory() as folder:
        server = RunnerServer(folder)
        server._stagings[1] = SlowStaging(runner, False, False)
        server._beside_call(runner, m.AddSource(1, FolderSource("w1"), {}, False, PLAIN))
        finishing = threading.Thread(target=server._beside_call, args=(runner, m.Finish(1)))
        finishing.start()
        assert began.wait(30)
        server._beside_call(runner, m.Abandon(1))
        may_end.set()
        finishing.join(30)
        assert server._staged == {} and server._stagings == {}
        server._context.destroy(linger=0)
        os.close(server._results_fd)


def test_an_adapter_that_was_read_stays_until_it_is_committed_or_discarded():
    runner = Mock()
    runner.begin_adapter().read.return_value = AdapterInfo(8, 1000, "f")
    with tempfile.TemporaryDirectory() as folder:
        server = RunnerServer(folder)
        first, second = (server._beside_call(runner, m.ReadAdapter("folder")) for _ in range(2))
        assert first.info == AdapterInfo(8, 1000, "f") and set(server._adapters) == {first.staging, second.staging}
        server._step_call(runner, m.CommitAdapter(5, first.staging))
        server._step_call(runner, m.DiscardAdapter(second.staging))
        assert server._adapters == {}
        runner.commit_adapter.assert_called_once_with(5, runner.begin_adapter().finish())
        server._context.destroy(linger=0)
        os.close(server._results_fd)
