"""Which tokens are reasoning: those between the token that opens it and the one that closes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Reasoning(NamedTuple):
    """Where a sequence is. opens, closes: the two token ids. is_open: the next token is reasoning. used: tokens of
    reasoning so far, without the two."""

    opens: int
    closes: int
    is_open: bool = False
    used: int = 0

    def after(self, tokens: Iterable[int]) -> Reasoning:
        """Return where the sequence is behind ``tokens``."""
        is_open, used = self.is_open, self.used
        for token in tokens:
            if not is_open:
                is_open = token == self.opens
            elif token == self.closes:
                is_open = False
            else:
                used += 1
        return self._replace(is_open=is_open, used=used)

    def after_prompt(self, tokens: Iterable[int]) -> Reasoning:
        """Return where the sequence is behind its prompt, whose tokens do not count."""
        return self.after(tokens)._replace(used=0)
