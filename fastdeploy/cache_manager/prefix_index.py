"""Index of computed blocks by the prefix that they continue: a trie whose edges are the token ids themselves.

A hit is verified by construction: an edge is found by the equality of its token tuple, below a parent that was found
the same way, below a root that belongs to one namespace (KV namespace of the weights, cache_salt). No hash can collide,
and nothing that other weights computed is reachable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any


class Node:
    """``tokens`` are held in the first slots of ``block``; fewer than a block's worth only at the end of a prompt.
    ``attached`` is False once the node cannot be reached from a root any more."""

    __slots__ = ("attached", "block", "children", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: int):
        self.parent = parent
        self.tokens = tokens
        self.block = block
        self.attached = True
        self.children: dict[tuple[int, ...], Node] = {}


class Root(Node):
    __slots__ = ("namespace",)

    def __init__(self, namespace: Hashable):
        super().__init__(None, (), -1)
        self.namespace = namespace


class PrefixIndex:
    def __init__(self, block_size: int):
        self.block_size = block_size
        self._roots: dict[Hashable, Root] = {}
        self._by_block: dict[int, list[Node]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def root(self, namespace: Hashable) -> Node:
        """The top of a namespace. It lasts as long as something hangs below it, or until the next eviction under it."""
        return self._roots.setdefault(namespace, Root(namespace))

    def lookup(self, namespace: Hashable, token_ids: Sequence[int]) -> list[Node]:
        """The longest chain of nodes whose tokens, joined, are a prefix of ``token_ids``: full blocks, then perhaps
        one partial block that ends exactly where ``token_ids`` end."""
        node: Node | None = self._roots.get(namespace)
        path: list[Node] = []
        at, size = 0, self.block_size
        while node is not None and at < len(token_ids):
            node = node.children.get(tuple(token_ids[at : at + size]))
            if node is not None:
                path.append(node)
                at += len(node.tokens)
        return path

    def insert(self, parent: Node, tokens: tuple[int, ...], block: int) -> Node:
        """Name ``block`` as the continuation of ``parent``. If another block holds the same content already, that one
        stays and is returned: the newer copy simply goes unnamed."""
        assert 0 < len(tokens) <= self.block_size
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, block)
            self._by_block.setdefault(block, []).append(node)
        return node

    def evict(self, block: int) -> None:
        """Forget what ``block`` holds, and everything that can only be reached through it."""
        for node in self._by_block.get(block, [])[:]:
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            self._detach(node)
            if isinstance(parent, Root) and not parent.children:  # else every cache_salt ever seen would stay
                parent.attached = False
                del self._roots[parent.namespace]

    def clear(self, chosen: Callable[[Any], bool]) -> None:
        """Forget everything below the roots whose namespace is ``chosen``."""
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
                names = self._by_block[node.block]
                names.remove(node)
                if not names:
                    del self._by_block[node.block]

    def check_integrity(self) -> None:
        """Every reachable node is registered under its block, and nothing else is."""
        seen: dict[int, int] = {}
        stack = [n for root in self._roots.values() for n in root.children.values()]
        while stack:
            node = stack.pop()
            assert node.parent is not None and node.parent.children[node.tokens] is node
            assert node in self._by_block[node.block]
            seen[node.block] = seen.get(node.block, 0) + 1
            stack.extend(node.children.values())
        assert seen == {b: len(names) for b, names in self._by_block.items()}
