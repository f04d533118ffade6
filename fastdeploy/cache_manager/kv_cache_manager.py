"""The KV blocks of requests: match a prefix, take blocks, grow, publish computed blocks, release."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from typing import NamedTuple

from fastdeploy.cache_manager.block_pool import BlockPool
from fastdeploy.cache_manager.prefix_index import Node, PrefixIndex
from fastdeploy.core.plan import BlockCopy
from fastdeploy.core.request import Request


class KVGrant(NamedTuple):
    """The blocks that a request has got to enter the batch. hit_tokens: tokens whose KV is there already. copy: a copy
    of one block that runs before the next step computes; None = no copy."""

    hit_tokens: int
    copy: BlockCopy | None


class KVCacheManager:
    """The owner of the block pool and of the prefix index.

    Blocks are matched and published per cache_salt, in the KV namespace of the weights that serve the request's
    model. Blocks of a request with ``kv_mixed`` are not published.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex(block_size)
        self.pool = BlockPool(num_blocks, self.index.evict)
        self._pinned: list[int] = []  # sources of copies that have not run yet
        self.hit_tokens = 0
        self.queried_tokens = 0

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def admit(self, request: Request) -> KVGrant | None:
        """Take blocks for every known token of ``request``, and reuse computed ones. None if there is no room.

        The last token is always computed, since its logits are needed:

            tokens      |----full----|----full----|--part--|.|
            hit         [            [            [         )          usable = min(matched, num_tokens - 1)
            blocks         shared       shared       copy    fresh     a block that will be written to is copied
        """
        assert not request.blocks
        path = self._match(request)
        usable = min(sum(len(node.tokens) for node in path), request.num_tokens - 1)
        num_shared = usable // self.block_size
        shared = [node.block for node in path[:num_shared]]
        source = path[num_shared].block if usable % self.block_size else None
        for block in shared if source is None else [*shared, source]:
            self.pool.share(block)
        missing = self.blocks_for(request.num_tokens) - num_shared
        fresh = self.pool.allocate(missing)
        if fresh is None and source is not None:
            # The source itself may be the block that is missing: release it, and compute its tokens again.
            self._give_back([source])
            source, usable = None, num_shared * self.block_size
            fresh = self.pool.allocate(missing)
        if fresh is None:
            self._give_back(shared)
            return None
        copy = None
        if source is not None:
            self._pinned.append(source)  # a later admission of the same plan must not take the block before the copy
            copy = BlockCopy(source, fresh[0])
        request.blocks = array("i", shared + fresh)
        request.num_computed = usable
        request.published_node = path[num_shared - 1] if num_shared else None
        request.num_published = num_shared
        request.tail_published = num_shared > request.num_prompt_tokens // self.block_size
        request.kv_recomputed |= request.first_kv_namespace not in (None, request.model.served.kv_namespace)
        self.hit_tokens += usable
        self.queried_tokens += request.num_tokens
        return KVGrant(usable, copy)

    def _match(self, request: Request) -> list[Node]:
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        return self.index.lookup(_namespace(request), request.token_ids)

    def grow(self, request: Request) -> bool:
        """Take blocks for every known token. False, with nothing taken, if there is no room."""
        missing = -(-len(request.token_ids) // self.block_size) - len(request.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return False
        request.blocks.extend(fresh)
        return True

    def publish(self, request: Request, ended: bool = False) -> None:
        """Add the computed blocks to the prefix index: full blocks, and the prompt's last, partial block. ended: the
        request computes nothing more, so its last, partial block is added too. The next turn of a conversation, or the
        continuation of an aborted request, then finds every computed token."""
        size = self.block_size
        full = request.num_computed // size
        if full == request.num_published and request.tail_published and not ended:
            return  # as after most steps
        if not self.enable_prefix_caching or request.kv_mixed:
            return
        tail_due = not request.tail_published and request.num_computed >= request.num_prompt_tokens
        rest = request.num_computed % size if ended else 0
        if full == request.num_published and not tail_due and not rest:
            return
        if request.published_node is None or not request.published_node.attached:
            # The first time, or an equal block of another request was evicted: insert the own blocks from the root on.
            request.published_node = self.index.root(_namespace(request))
            request.num_published = 0
        for i in range(request.num_published, full):
            if tail_due and i == request.num_prompt_tokens // size:
                self._publish_tail(request)
            tokens = tuple(request.token_ids[i * size : (i + 1) * size])
            request.published_node = self.index.insert(request.published_node, tokens, request.blocks[i])
        request.num_published = full
        if tail_due and not request.tail_published:
            self._publish_tail(request)
        if rest:
            tokens = tuple(request.token_ids[full * size : full * size + rest])
            self.index.insert(request.published_node, tokens, request.blocks[full])

    def _publish_tail(self, request: Request) -> None:
        """Publish the prompt's partial last block below ``published_node``, the prompt's last full block."""
        request.tail_published = True
        at = request.num_prompt_tokens // self.block_size
        tail = tuple(request.token_ids[at * self.block_size : request.num_prompt_tokens])
        if tail:
            self.index.insert(request.published_node, tail, request.blocks[at])

    def release(self, request: Request) -> None:
        """Release all blocks, the last one first, so that a prefix stays longer than its continuation."""
        if not request.blocks:
            return
        self._give_back(reversed(request.blocks))
        request.blocks = array("i")
        request.num_computed = 0
        request.published_node = None
        request.num_published = 0
        request.tail_published = False
        if request.kv_mixed and request.first_kv_namespace is not None:
            request.kv_recomputed = True  # the KV was of several weights, and will be rebuilt under one
        request.kv_mixed = False

    def _give_back(self, blocks: Iterable[int]) -> None:
        self.pool.release(blocks, self.index.__contains__)

    def release_copied(self) -> None:
        """Release the sources of copies. Call when the planned step, or at least its copies, has run."""
        if self._pinned:
            self._give_back(self._pinned)
            self._pinned.clear()

    def forget_prefixes(self, kv_namespaces: Collection[tuple[int, int]] | None = None) -> None:
        """Clear the prefix index, of these namespaces or (None) of all. Requests keep their blocks."""
        self.index.clear(lambda root: kv_namespaces is None or root[0] in kv_namespaces)

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Assert that each reference belongs to a request or a pinned block, and that free blocks have none."""
        references = [0] * self.pool.num_blocks
        for request in requests:
            assert len(request.blocks) >= self.blocks_for(request.num_computed), request
            assert len(set(request.blocks)) == len(request.blocks), request
            for block in request.blocks:
                references[block] += 1
        for block in self._pinned:
            references[block] += 1
        assert references == self.pool.references
        for block, count in enumerate(references):
            assert (count == 0) == self.pool.is_free(block), block
        self.index.check_integrity()


def _namespace(request: Request) -> tuple[tuple[int, int], str]:
    """Return the namespace in which the request's blocks are matched and published."""
    return request.model.served.kv_namespace, request.group.add.cache_salt
