"""Free blocks of the KV cache, and the number of references to the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


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
