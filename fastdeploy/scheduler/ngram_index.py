"""An index of recent text: after some tokens, which token came last time?"""

from __future__ import annotations

from array import array

LENGTHS = (16, 8, 4, 2)  # tokens of a context, the longest first
STREAKS = 4  # 0 to 3: how often in a row the same token came again
FIRST_GUESS = 0.5  # the share of right predictions, before any was compared
WEIGHT = 1 / 32  # of the newest comparison in that share
SLOTS = 1 << 20  # 8 MiB, the contexts of some 250,000 tokens
# A slot has, from the lowest bit on: the streak (2 bits), the token (32), and the tag, a part of the hash (28).
CONTENT = 1 << 34
TAG = (1 << 62) - CONTENT


class Text:
    """The tokens of one request, as the index knows them. root: a number of those who share texts. indexed: tokens that
    are in the index. trust: how much more often predictions are right here than elsewhere."""

    __slots__ = ("indexed", "root", "trust")

    TRUST_WEIGHT = 0.1  # of the newest comparison
    LEAST_TRUST, MOST_TRUST = 0.1, 1.5

    def __init__(self, root: int):
        self.root = root
        self.indexed = 0
        self.trust = 1.0


class NgramIndex:
    """The last token that came after each context of 2, 4, 8 or 16 tokens. The longest known context predicts.

    The memory is fixed: a context has one slot, found by its hash, which a newer context may take. A slot has a tag of
    the hash, the token and its streak. A false hit costs a wrong prediction, nothing else.

    Each output token is compared with what the index would have predicted. ``chance`` is the share of right
    predictions, by the length of the context and by the streak.
    """

    def __init__(self) -> None:
        self._slots = array("q", bytes(8 * SLOTS))
        self.chance = [FIRST_GUESS] * (len(LENGTHS) * STREAKS)

    def extend(self, text: Text, tokens: list[int], end: int, compare_from: int) -> None:
        """Add the tokens of ``text`` up to ``end``. Those from ``compare_from`` on, its output, are compared."""
        slots, root = self._slots, text.root
        for at in range(text.indexed, end):
            token, compared = tokens[at], at < compare_from
            for i, length in enumerate(LENGTHS):
                if at < length:
                    continue
                key = hash((root, *tokens[at - length : at]))
                tag = key << 14 & TAG
                content = slots[key % SLOTS] ^ tag
                if content >= CONTENT:  # another context, or none
                    slots[key % SLOTS] = tag | token << 2
                    continue
                right = content >> 2 == token
                if not compared:
                    compared = True
                    self._compare(text, i * STREAKS + content % STREAKS, right)
                if not right:
                    slots[key % SLOTS] = tag | token << 2
                elif content % STREAKS < STREAKS - 1:
                    slots[key % SLOTS] = tag | content + 1
        text.indexed = end

    def predict(self, text: Text, known: list[int], most: int, least_chance: float) -> tuple[list[int], list[float]]:
        """Return at most ``most`` tokens that may follow ``known``, each with the chance that it and all before it are
        right, which is at least ``least_chance``. known: the last tokens of ``text``."""
        slots, root, chance, trust = self._slots, text.root, self.chance, text.trust
        known = known[-LENGTHS[0] :]
        tokens: list[int] = []
        chances: list[float] = []
        together = 1.0
        while len(tokens) < most:
            for i, length in enumerate(LENGTHS):
                if len(known) < length:
                    continue
                key = hash((root, *known[-length:]))
                content = slots[key % SLOTS] ^ key << 14 & TAG
                if content < CONTENT:
                    together *= min(trust * chance[i * STREAKS + content % STREAKS], 1.0)
                    break
            else:
                break
            if together < least_chance:
                break
            tokens.append(content >> 2)
            chances.append(together)
            known.append(content >> 2)
        return tokens, chances

    def _compare(self, text: Text, kind: int, right: bool) -> None:
        """Learn whether a prediction of this kind (length of the context, streak) was right."""
        chance = self.chance[kind]
        self.chance[kind] += WEIGHT * (right - chance)
        trust = text.trust + Text.TRUST_WEIGHT * (right - min(text.trust * chance, 1.0))
        text.trust = min(max(trust, Text.LEAST_TRUST), Text.MOST_TRUST)
