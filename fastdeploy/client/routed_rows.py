"""The rows of a choice as they arrive: which experts computed its tokens, see core/experts.py."""

from __future__ import annotations

from fastdeploy.core.experts import ExpertsInfo, RoutedExperts


class RoutedRows:
    """The rows of one choice, from position ``start`` on. prompt_tokens: of the choice, with those of an earlier
    attempt."""

    def __init__(self, info: ExpertsInfo, prompt_tokens: int, start: int):
        self._info = info
        self._prompt_tokens = prompt_tokens
        self._start = start
        self._data = bytearray()
        self._shown = 0  # bytes that ``new`` has returned

    def add(self, data: bytes) -> None:
        """Add the rows of an output. It may have rows of tokens that the choice does not have yet, or drops."""
        self._data += data

    def new(self, num_tokens: int) -> RoutedExperts | None:
        """Return the rows of all tokens but the last one of prompt and ``num_tokens`` output tokens that were not
        returned before; None if there are none."""
        begin, self._shown = self._shown, max(self._shown, min(self._end(num_tokens), len(self._data)))
        return self._part(begin, self._shown) if begin < self._shown else None

    def whole(self, num_tokens: int) -> RoutedExperts | None:
        """Return the rows of all tokens but the last one of a choice of ``num_tokens`` output tokens. None unless all
        are there: a choice that was aborted within its prompt has none."""
        end = self._end(num_tokens)
        return self._part(0, end) if end <= len(self._data) else None

    def _end(self, num_tokens: int) -> int:
        return max(self._prompt_tokens + num_tokens - 1 - self._start, 0) * self._info.row_bytes

    def _part(self, begin: int, end: int) -> RoutedExperts:
        data = bytes(memoryview(self._data)[begin:end])
        return RoutedExperts(self._info, data, self._start + begin // self._info.row_bytes)
