"""Index of computed blocks: a trie whose edges are tuples of token ids.

A lookup compares the token ids themselves, below the root of one namespace (KV namespace of the weights, cache_salt).
So no hash collision can give a false hit, and no KV of other weights is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any


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
