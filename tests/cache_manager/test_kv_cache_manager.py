"""KV blocks of requests: sharing, copying, publishing and releasing."""

from __future__ import annotations

import pytest

from fastdeploy.cache_manager.kv_cache_manager import BlockPool, KVCacheManager, PrefixIndex
from fastdeploy.core.plan import BlockCopy
from fastdeploy.core.request import Group, Request, Scope, ServedModel
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import WHOLE_ENGINE, ServedWeights


def make(token_ids: list[int], salt: str = "", model: ServedModel | None = None) -> Request:
    group = Group(
        "a", AddRequest("r", token_ids, SamplingParams(), cache_salt=salt), model or Scope(WHOLE_ENGINE).model
    )
    return Request(group, 0, (0, 1), 100)


def compute(kv: KVCacheManager, request: Request, upto: int | None = None) -> None:
    request.num_computed = request.num_tokens if upto is None else upto
    kv.publish(request)


def serve(kv: KVCacheManager, token_ids: list[int], salt: str = "") -> Request:
    """Admit a request and compute all of its tokens."""
    request = make(token_ids, salt)
    assert kv.admit(request) is not None
    kv.release_copied()
    compute(kv, request)
    return request


@pytest.mark.parametrize(
    ("first", "second", "hit_tokens", "copied"),
    [(10, 10, 9, 2), (8, 8, 7, 1), (10, 12, 10, 2), (8, 12, 8, None)],
    ids=["partial last block", "full last block", "longer than a partial block", "longer than a full block"],
)
def test_a_prompt_shares_full_blocks_and_copies_a_block_that_it_will_write_to(first, second, hit_tokens, copied):
    kv = KVCacheManager(16, 4)
    one, two = serve(kv, list(range(first))), make(list(range(second)))
    grant = kv.admit(two)
    assert grant.hit_tokens == two.num_computed == hit_tokens
    shared = hit_tokens // 4
    assert two.blocks[:shared] == one.blocks[:shared] and set(two.blocks[shared:]).isdisjoint(one.blocks)
    assert grant.copy == (None if copied is None else BlockCopy(one.blocks[copied], two.blocks[copied]))
    kv.check_integrity([one, two])


def generate(kv: KVCacheManager, prompt: list[int], output: list[int]) -> Request:
    """Serve a request up to its last output token, whose KV is never computed."""
    request = make(prompt)
    assert kv.admit(request) is not None
    kv.release_copied()
    compute(kv, request)
    for token in output:
        request.token_ids.append(token)
        assert kv.grow(request)
        compute(kv, request, upto=request.num_tokens - 1)
    return request


def hits(kv: KVCacheManager, token_ids: list[int]) -> int:
    """Return the hit of a request that computes nothing and is released at once."""
    request = make(token_ids)
    hit = kv.admit(request).hit_tokens
    kv.release_copied()
    kv.release(request)
    return hit


def test_output_tokens_of_a_running_request_are_found_in_full_blocks_only():
    kv = KVCacheManager(16, 4)
    generate(kv, list(range(6)), list(range(6, 12)))
    assert hits(kv, list(range(11))) == 8
    assert hits(kv, list(range(6))) == 5
    assert hits(kv, [*range(6), 99, 98]) == 6, "the prompt's partial block"


def test_the_next_turn_finds_every_computed_token_of_a_request_that_has_ended():
    kv = KVCacheManager(16, 4)
    request = generate(kv, list(range(6)), list(range(6, 12)))
    kv.publish(request, ended=True)
    assert hits(kv, [*range(12), 99]) == 11, "while its final output is on its way"
    kv.release(request)
    kv.check_integrity([])
    turn = make([*range(12), 99, 98, 97])
    assert kv.admit(turn).hit_tokens == 11
    kv.release_copied()
    compute(kv, turn)
    assert hits(kv, [*range(11), 50]) == 11, "the copy has left the first turn's block as it was"
    assert hits(kv, [*range(9), 50]) == 8, "a partial block must match to its end"
    kv.check_integrity([turn])


@pytest.mark.parametrize("computed", range(10))
def test_a_request_that_ends_within_its_prompt_publishes_what_is_computed(computed):
    kv = KVCacheManager(16, 4)
    request = make(list(range(10)))
    kv.admit(request)
    compute(kv, request, upto=computed)
    kv.publish(request, ended=True)
    kv.release(request)
    kv.index.check_integrity()
    assert hits(kv, list(range(10))) == computed
    assert computed or not kv.index._roots, "an empty root stays for ever"


@pytest.mark.parametrize("change", ["salt", "weight_epoch", "adapter", "forgotten", "off"])
def test_blocks_that_must_not_be_shared_are_not_found(change):
    kv = KVCacheManager(16, 4, enable_prefix_caching=change != "off")
    serve(kv, list(range(10)))
    model = Scope(WHOLE_ENGINE).model
    if change in ("weight_epoch", "adapter"):
        model.served = ServedWeights(**{change: 1})
    if change == "forgotten":
        kv.forget_prefixes()
    assert kv.admit(make(list(range(10)), "salt" if change == "salt" else "", model)).hit_tokens == 0


def test_blocks_of_several_weight_epochs_are_never_published():
    kv = KVCacheManager(16, 4)
    request = make(list(range(10)))
    kv.admit(request)
    request.kv_mixed = True
    compute(kv, request)
    kv.publish(request, ended=True)
    assert kv.admit(make(list(range(10)))).hit_tokens == 0
    kv.release(request)
    assert not request.kv_mixed, "later blocks are of one weight_epoch"


def test_an_admission_without_room_takes_nothing_and_the_source_of_a_copy_stays_until_the_step_is_done():
    kv = KVCacheManager(4, 4)
    first = serve(kv, list(range(10)))
    kv.release(first)
    assert kv.num_free == 4
    second = make(list(range(10)))
    assert kv.admit(second).copy is not None
    assert kv.num_free == 0, "two shared, one fresh, and the source is held until the copy has run"
    assert kv.admit(make([7])) is None
    kv.check_integrity([second])
    kv.release_copied()
    assert kv.num_free == 1
    kv.release(second)
    assert kv.num_free == 4
    kv.check_integrity([])


def test_if_the_source_of_a_copy_is_the_last_free_block_its_tokens_are_computed_again():
    kv = KVCacheManager(3, 4)
    kv.release(serve(kv, list(range(10))))
    request = make(list(range(10)))
    grant = kv.admit(request)
    assert grant.hit_tokens == 8 and grant.copy is None and len(request.blocks) == 3
    kv.check_integrity([request])


def test_growing_takes_all_missing_blocks_or_none():
    kv = KVCacheManager(3, 4)
    request = serve(kv, list(range(8)))
    request.token_ids += [1, 2, 3, 4, 5]
    assert not kv.grow(request) and len(request.blocks) == 2
    del request.token_ids[-1]
    assert kv.grow(request) and len(request.blocks) == 3


def test_the_last_block_of_a_prompt_is_evicted_first():
    kv = KVCacheManager(4, 4)
    kv.release(serve(kv, list(range(16))))
    kv.release(serve(kv, [99] * 4))  # evicts one block
    assert kv.admit(make(list(range(16)))).hit_tokens == 12


def test_a_request_publishes_its_own_blocks_after_an_equal_published_block_was_evicted():
    kv = KVCacheManager(5, 4)
    first = serve(kv, list(range(4)))
    second = make(list(range(8)))
    kv.index.evict(first.blocks[0])
    kv.admit(second)
    compute(kv, second, upto=4)  # the index now has the request's own first block
    kv.index.evict(second.blocks[0])
    compute(kv, second)
    kv.index.check_integrity()
    assert kv.admit(make(list(range(8)))).hit_tokens == 7


def test_check_integrity_finds_a_leaked_reference():
    kv = KVCacheManager(8, 4)
    request = serve(kv, list(range(8)))
    kv.check_integrity([request])
    kv.pool.share(request.blocks[0])
    with pytest.raises(AssertionError):
        kv.check_integrity([request])


def test_a_request_is_marked_as_recomputed_only_if_it_has_tokens_of_another_weight_epoch():
    kv = KVCacheManager(8, 4)
    fresh, old = make([1, 2]), make([3, 4])
    old.append([5], (), ServedWeights(), (), now=0.0)
    for request in (fresh, old):
        request.model.served = ServedWeights(weight_epoch=1)
    kv.admit(fresh)
    kv.admit(old)
    assert (fresh.kv_recomputed, old.kv_recomputed) == (False, True)


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
