"""The runner returns the routing of tokens: that of a run alone, whatever the blocks held before and however it is cut
into steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy.core.errors import InvalidField
from fastdeploy.core.experts import ExpertsInfo
from fastdeploy.core.plan import BlockCopy
from fastdeploy.worker.model_runner import ModelRunner
from fastdeploy.worker.routing_store import RoutingStore
from support.specs import prompt
from support.step_driver import Driver, Sequence, fresh, sleep, wake

INFO = ExpertsInfo(layers=(0, 2), num_layers=3, num_experts=6, top_k=2)
IDS = prompt(37, 211)


@pytest.fixture
def runner(make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner("qwen3_moe", num_blocks=12, max_model_len=96, enable_return_routed_experts=True)


def asking(name: str = "s", start: int = 0) -> Sequence:
    return Sequence(name, list(IDS), rows_from=start)


def rows_alone(runner: ModelRunner, tokens: int) -> tuple[list[int], bytes]:
    """Return the tokens that a run of one step for the prompt and one for each token draws, and all rows."""
    [sequence] = Driver(runner).generate([asking()], tokens)
    assert len(sequence.rows) == (len(sequence.ids) - 1) * INFO.row_bytes
    return sequence.ids, bytes(sequence.rows)


def test_rows_name_experts_of_the_model_and_differ_between_tokens_and_layers(runner):
    assert (runner.info.experts, runner.info.routed_experts) == (INFO, True)
    _, rows = rows_alone(runner, 8)
    array = np.frombuffer(rows, INFO.dtype).reshape(-1, 2, 2)
    assert array.max() < 6 and (array[..., 0] != array[..., 1]).all()
    assert len(np.unique(array.reshape(len(array), -1), axis=0)) > 10 and (array[:, 0] != array[:, 1]).any()


def test_chunks_drafts_neighbours_and_used_blocks_change_no_row(runner):
    ids, rows = rows_alone(runner, 12)
    right = Driver(runner, seed=1, guess=lambda s: [*ids[len(s.ids) :][:2], 7] if s.name == "s" else [])
    other = Sequence("other", prompt(21, 211)[::-1])
    for chunk in (5, None):
        sequence = asking()
        for s in right.generate([sequence, fresh(other)], 12, chunk):
            assert s.name == "other" or s.ids[: len(ids)] == ids
        assert bytes(sequence.rows[: len(rows)]) == rows


def test_a_copied_block_has_the_rows_of_its_source_and_a_later_write_changes_the_copy_alone(runner):
    ids, rows = rows_alone(runner, 3)
    driver = Driver(runner, seed=2)
    first = asking("first")
    driver.step([first], 20)  # 16 tokens of a block, and 4 of the next
    second = asking("second")
    second.ids[18:] = prompt(9, 100)
    second.table = [first.table[0], driver.free.pop()]
    second.computed = 18
    driver.step([second], copies=[BlockCopy(first.table[1], second.table[1])])
    driver.generate([first], 3)
    assert first.ids == ids and bytes(first.rows) == rows
    assert bytes(second.rows)[: 18 * INFO.row_bytes] == rows[: 18 * INFO.row_bytes]
    assert bytes(second.rows)[18 * INFO.row_bytes :] != rows[18 * INFO.row_bytes :][: len(second.rows)]


def test_rows_begin_where_the_chunk_asks_and_are_right_after_a_sleep(runner):
    ids, rows = rows_alone(runner, 4)
    sleep(runner, "kv_cache")
    wake(runner, "kv_cache")
    for start in (0, 36, 37):
        [sequence] = Driver(runner).generate([asking(start=start)], 4)
        assert sequence.ids == ids and bytes(sequence.rows) == rows[start * INFO.row_bytes :]


def test_recording_changes_no_bit_of_tokens_and_logprobs_and_is_off_without_the_setting(runner, make_runner):
    plain = make_runner("qwen3_moe", num_blocks=12, max_model_len=96)
    assert not plain.info.routed_experts and plain.info.experts == INFO and plain._routing is None
    traces = [Driver(one).generate([Sequence("s", list(IDS))], 8)[0].trace for one in (runner, plain)]
    assert traces[0] == traces[1]


def test_a_dense_model_is_refused_by_the_name_of_the_setting(make_runner):
    with pytest.raises(InvalidField, match="enable_return_routed_experts: expected a Mixture of Experts"):
        make_runner("qwen3", enable_return_routed_experts=True)


def test_more_than_256_experts_take_two_bytes():
    info = ExpertsInfo((0,), 1, 300, 2)
    store = RoutingStore(info, num_blocks=2, block_size=16)
    assert store.routing(3).experts.dtype == np.uint16 and store._blocks.dtype == "<u2"


def test_the_target_of_one_copy_may_be_the_source_of_a_later_one():
    store = RoutingStore(ExpertsInfo((0,), 1, 300, 2), num_blocks=3, block_size=16)
    store._blocks[:] = np.array([5, 6, 7])[:, None, None]
    store.copy([BlockCopy(0, 1), BlockCopy(1, 2)])
    assert (store._blocks == 5).all()
