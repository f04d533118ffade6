"""Reference counts, and the order in which blocks are taken again."""

from __future__ import annotations

import pytest

from fastdeploy.cache_manager.block_pool import BlockPool


@pytest.fixture
def evicted():
    return []


def test_an_allocation_takes_all_blocks_or_none(evicted):
    pool = BlockPool(4, evicted.append)
    assert pool.allocate(5) is None and pool.num_free == 4 and evicted == []
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3] and pool.num_free == 0
    assert pool.allocate(1) is None and pool.allocate(0) == []


def test_a_shared_block_is_free_when_the_last_reference_is_gone(evicted):
    pool = BlockPool(2, evicted.append)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release([block], indexed=lambda b: True)
    assert not pool.is_free(block)
    pool.release([block], indexed=lambda b: True)
    assert pool.is_free(block)


def test_a_free_block_can_be_shared_again_without_an_eviction(evicted):
    pool = BlockPool(2, evicted.append)
    (block,) = pool.allocate(1)
    pool.release([block], indexed=lambda b: True)
    evicted.clear()
    pool.share(block)
    assert pool.references[block] == 1 and not pool.is_free(block) and evicted == []


def test_blocks_outside_of_the_index_are_taken_first_and_then_the_least_recently_released(evicted):
    pool = BlockPool(3, evicted.append)
    a, b, c = pool.allocate(3)
    pool.release([b], indexed=lambda _: True)
    pool.release([a], indexed=lambda _: True)
    pool.release([c], indexed=lambda _: False)
    assert [pool.allocate(1)[0] for _ in range(3)] == [c, b, a]


def test_releasing_twice_raises(evicted):
    pool = BlockPool(1, evicted.append)
    (block,) = pool.allocate(1)
    pool.release([block], indexed=lambda _: False)
    with pytest.raises(AssertionError, match="twice"):
        pool.release([block], indexed=lambda _: False)
