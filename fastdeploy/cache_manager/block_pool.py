"""Mechanism of paged KV: which blocks are free, and how many hold each of the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Reference-counted block ids 0 .. num_blocks-1.

    A free block may still hold content that ``PrefixIndex`` can find; it is forgotten only when the block is taken
    again, least recently released first. ``on_evict(block)`` is called at that moment.
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
        """Take ``count`` blocks, one reference each; None (and nothing taken) if there are not as many."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._on_evict(block)
            self.references[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more reference; a free block whose content is still there comes back to life."""
        if self.references[block] == 0:
            del self._free[block]
        self.references[block] += 1

    def release(self, blocks: Iterable[int], indexed: Callable[[int], bool]) -> None:
        """Give back one reference of each. A block nobody can find again is reused before any that is indexed."""
        for block in blocks:
            assert self.references[block] > 0, f"block {block} released twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None
                if not indexed(block):
                    self._free.move_to_end(block, last=False)
