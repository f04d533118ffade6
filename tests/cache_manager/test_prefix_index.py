"""The index of prefixes."""

from __future__ import annotations

import pytest

from fastdeploy.cache_manager.prefix_index import PrefixIndex

SPACE = (0, "")


@pytest.fixture
def index():
    """Block size 2: [1 2 | 3 4 | 5], and [1 2 | 9]."""
    index = PrefixIndex(2)
    first = index.insert(index.root(SPACE), (1, 2), 10)
    second = index.insert(first, (3, 4), 11)
    index.insert(second, (5,), 12)
    index.insert(first, (9,), 13)
    index.check_integrity()
    return index


def blocks(index: PrefixIndex, token_ids: list[int], namespace=SPACE) -> list[int]:
    return [node.block for node in index.lookup(namespace, token_ids)]


@pytest.mark.parametrize(
    ("token_ids", "hit"),
    [([1, 2, 3, 4, 5], [10, 11, 12]), ([1, 2, 3, 4, 6], [10, 11]), ([1, 2, 9], [10, 13]), ([1, 2, 9, 1], [10, 13]),
     ([1, 2, 3], [10]), ([3, 4], []), ([2, 1, 3, 4], []), ([1], []), ([], [])],
)  # fmt: skip
def test_a_lookup_finds_the_longest_chain_and_a_partial_block_only_as_a_whole(index, token_ids, hit):
    assert blocks(index, token_ids) == hit


@pytest.mark.parametrize("namespace", [(1, ""), (0, "salt")])
def test_no_block_of_another_namespace_is_found(index, namespace):
    assert blocks(index, [1, 2, 3, 4], namespace) == []


def test_the_first_of_two_equal_blocks_stays_in_the_index(index):
    node = index.insert(index.root(SPACE), (1, 2), 20)
    assert node.block == 10 and 20 not in index


def test_an_eviction_removes_the_continuations_too(index):
    second = index.lookup(SPACE, [1, 2, 3, 4])[1]
    index.evict(11)
    index.check_integrity()
    assert blocks(index, [1, 2, 3, 4, 5]) == [10] and 12 not in index and not second.attached
    assert blocks(index, [1, 2, 9]) == [10, 13]


def test_an_eviction_removes_both_nodes_of_a_block(index):
    first = index.lookup(SPACE, [1, 2])[0]
    index.insert(first, (9, 9), 13)  # the partial block of (9,) has been filled
    index.evict(13)
    index.check_integrity()
    assert blocks(index, [1, 2, 9]) == blocks(index, [1, 2, 9, 9]) == [10]


def test_clearing_removes_everything(index):
    index.clear(lambda namespace: True)
    index.check_integrity()
    assert blocks(index, [1, 2, 3, 4]) == [] and 10 not in index


def test_the_root_of_a_namespace_is_removed_with_its_last_block():
    """Clients give each request its own cache_salt to switch sharing off."""
    index = PrefixIndex(2)
    for salt in range(100):
        index.insert(index.root((0, salt)), (1, 2), block=salt % 4)
        index.check_integrity()
        index.evict((salt + 1) % 4)
    for block in range(4):
        index.evict(block)
    assert not index._roots and not index._by_block


def test_a_lookup_prefers_the_longest_partial_block():
    index = PrefixIndex(4)
    for count in (1, 3, 2):
        index.insert(index.root(SPACE), tuple(range(count)), 10 + count)
    assert blocks(index, [0, 1, 2, 9]) == [13]
    assert blocks(index, [0, 1, 9, 9]) == blocks(index, [0, 1]) == [12]
    assert blocks(index, [0, 1, 2, 9, 1]) == [13], "nothing follows a partial block"
    index.evict(12)
    assert blocks(index, [0, 1, 9, 9]) == [11]
