"""The KV blocks of requests: match a prefix, take blocks, grow, publish computed blocks, release.

Computed blocks are found by an index: a trie whose edges are tuples of token ids. A lookup compares the token ids
themselves, below the root of one namespace (KV namespace of the weights, cache_salt). So no hash collision can give a
false hit, and no KV of other weights is found.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from fastdeploy.core.plan import BlockCopy
from fastdeploy.core.request import Request


class BlockPool:
    """The blocks of the KV cache, by their ids 0 .. num_blocks-1, with the number of references to each.

    A free block may still hold content that ``PrefixIndex`` can find. Blocks without such content are taken first,
    then the least recently released ones. ``on_evict(block)`` is called for each block taken.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]):
        self.num_blocks = num_blocks
        self.references = [0] * num_blocks
        self._on_evict = on_evict
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one reference each. None, with nothing taken, if there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._on_evict(block)
            self.references[block] = 1
        return taken

    def share(self, block: int) -> None:
        """Add a reference to a block, which may be free and still hold its content."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int], indexed: Callable[[int], bool]) -> None:
        """Give back one reference of each block. Blocks that are not in the prefix index are the next to be taken."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None
                if not indexed(block):
                    self._free.move_to_end(block, last=False)


class Node:
    """A block in the trie. tokens: those whose KV is in the first slots of ``block``. They are fewer than block_size
    only at the end of a prompt or of a request; such a node has no children. attached: False once no root leads to the
    node any more."""

    __slots__ = ("attached", "block", "children", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int):
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.attached = True
        self.children: dict[tuple[int, ...], Node] = {}


class Root(Node):
    """The root of one namespace. It has no block."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable):
        super().__init__(None, (), -1)
        self.namespace = namespace


class PrefixIndex:
    """A trie of computed blocks for each namespace."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._roots: dict[Hashable, Root] = {}
        self._by_block: dict[int, list[Node]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def blocks(self) -> Iterable[int]:
        """Return the blocks that a lookup can find."""
        return self._by_block

    def root(self, namespace: Hashable) -> Node:
        """Return the root of a namespace. An eviction that leaves the root without children removes it."""
        return self._roots.setdefault(namespace, Root(namespace))

    def lookup(self, namespace: Hashable, token_ids: Sequence[int]) -> list[Node]:
        """Return the longest chain of nodes whose tokens, joined, are a prefix of ``token_ids``: full blocks, then
        perhaps one partial block."""
        node: Node | None = self._roots.get(namespace)
        path: list[Node] = []
        size = self.block_size
        for at in range(0, len(token_ids), size):
            if node is None:
                break
            node = _longest_match(node, tuple(token_ids[at : at + size]))
            if node is not None:
                path.append(node)
        return path

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Insert ``block`` below ``parent``, and return its node. If another block already holds the same tokens, its
        node is returned and ``block`` is not inserted."""
        assert 0 < len(tokens) <= self.block_size
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, block)
            self._by_block.setdefault(block, []).append(node)
        return node

    def evict(self, block: int) -> None:
        """Remove the nodes of ``block``, and all nodes below them."""
        for node in self._by_block.get(block, [])[:]:
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            self._detach(node)
            if isinstance(parent, Root) and not parent.children:  # else the root of every cache_salt would stay
                parent.attached = False
                del self._roots[parent.namespace]

    def clear(self, chosen: Callable[[Any], bool]) -> None:
        """Remove the roots whose namespace is ``chosen``, and all nodes below them."""
        for namespace in [namespace for namespace in self._roots if chosen(namespace)]:
            self._detach(self._roots.pop(namespace))

    def _detach(self, top: Node) -> None:
        stack = [top]
        while stack:
            node = stack.pop()
            node.attached = False
            stack.extend(node.children.values())
            node.children.clear()
            if node.parent is not None:
                nodes = self._by_block[node.block]
                nodes.remove(node)
                if not nodes:
                    del self._by_block[node.block]

    def check_integrity(self) -> None:
        """Assert that ``_by_block`` has every reachable node, and no other."""
        seen: Counter[int] = Counter()
        stack = [n for root in self._roots.values() for n in root.children.values()]
        while stack:
            node = stack.pop()
            assert node.parent is not None and node.parent.children[node.tokens] is node
            assert node in self._by_block[node.block]
            seen[node.block] += 1
            stack.extend(node.children.values())
        assert seen == {block: len(nodes) for block, nodes in self._by_block.items()}


def _longest_match(node: Node, tokens: tuple[int, ...]) -> Node | None:
    """Return the child of ``node`` with the most tokens, of those whose tokens ``tokens`` begins with."""
    for count in range(len(tokens) if node.children else 0, 0, -1):
        child = node.children.get(tokens[:count])
        if child is not None:
            return child
    return None


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
        self._num_hits = self._num_admissions = 0

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_unused(self) -> int:
        """Free blocks without content that a request could find. Takes time in proportion to the cached blocks."""
        return self.pool.num_free - sum(map(self.pool.is_free, self.index.blocks()))

    @property
    def token_hits(self) -> tuple[int, int]:
        """Tokens that were found in the prefix index since the start, and tokens that were looked up."""
        return self.hit_tokens, self.queried_tokens

    @property
    def request_hits(self) -> tuple[int, int]:
        """Admissions since the start that found tokens in the prefix index, and all admissions."""
        return self._num_hits, self._num_admissions

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
        self._num_hits += usable > 0
        self._num_admissions += 1
        return KVGrant(usable, copy)

    def _match(self, request: Request) -> list[Node]:
        if not self.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        return self.index.lookup(_namespace(request), request.token_ids)

    def grow(self, request: Request, drafts: int = 0) -> bool:
        """Take blocks for every known token and for ``drafts`` more. False, with nothing taken, if there is no room."""
        missing = -(-(len(request.token_ids) + drafts) // self.block_size) - len(request.blocks)
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
