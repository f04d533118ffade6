"""The rows of a choice as they arrive: which experts computed its tokens, see core/experts.py."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy.core.experts import ExpertsInfo, RoutedExperts


class RoutedRows:
    """The rows of one choice, from position ``start`` on. prompt_tokens: of the choice, with those of an earlier
    attempt. read_info: returns the experts layers of the model; called when the first output is there."""

    def __init__(self, prompt_tokens: int, start: int, read_info: Callable[[], ExpertsInfo]):
        self._prompt_tokens = prompt_tokens
        self._start = start
        self._read_info = read_info
        self._info: ExpertsInfo | None = None
        self._data = bytearray()
        self._shown = 0  # bytes that ``grow`` has returned

    def grow(self, data: bytes, num_tokens: int) -> bytes:
        """Add the rows of an output, and return those that are new to a choice of ``num_tokens`` output tokens. Rows of
        tokens that the choice does not have yet, or drops, are held back."""
        self._info = self._info or self._read_info()
        self._data += data
        before, self._shown = self._shown, max(self._shown, self._end(num_tokens))
        return bytes(self._data[before : self._shown])

    def whole(self, num_tokens: int) -> RoutedExperts | None:
        """Return the rows of all tokens but the last one of a choice of ``num_tokens`` output tokens. None unless all
        are there: a choice that was aborted within its prompt has none."""
        if self._info is None or len(self._data) < (end := self._end(num_tokens)):
            return None
        return RoutedExperts(self._info, bytes(self._data[:end]), self._start)

    def _end(self, num_tokens: int) -> int:
        assert self._info is not None
        return max(self._prompt_tokens + num_tokens - 1 - self._start, 0) * self._info.row_bytes
