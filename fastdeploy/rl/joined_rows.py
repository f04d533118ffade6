"""The routing of a choice, joined from the events of all its attempts."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from fastdeploy.core.experts import ExpertsInfo, RoutedExperts
from fastdeploy.rl.errors import MalformedReply


class JoinedRows:
    """The rows so far (core/experts.py), from position ``start`` on."""

    def __init__(self, start: int):
        self._start = start
        self._data = bytearray()
        self._info: ExpertsInfo | None = None

    @property
    def end(self) -> int:
        """Position of the first token whose row is not here."""
        return self._start + (0 if self._info is None else len(self._data) // self._info.row_bytes)

    def add(self, rows: Mapping[str, Any] | None, before: int) -> None:
        """Append the rows of an event, in our own form (docs/experts.md). before: position of the last token of the
        event; the rows of all tokens before it must be here. Raises MalformedReply."""
        if rows is not None:
            num_rows, num_layers, top_k = rows["shape"]
            info = ExpertsInfo(tuple(rows["layers"]), rows["num_layers"], rows["num_experts"], top_k)
            data = base64.b64decode(rows["data"])
            if self._info not in (None, info):
                raise MalformedReply(f"expected routed_experts of {self._info}, got those of {info}")
            if rows["start"] != self.end or num_layers != len(info.layers) or len(data) != num_rows * info.row_bytes:
                got = f"{len(data)} bytes of shape {rows['shape']} from {rows['start']}"
                raise MalformedReply(f"expected whole rows of routed_experts from position {self.end} on, got {got}")
            self._info = info
            self._data += data
        if self.end < before:
            raise MalformedReply(f"expected routed_experts up to position {before}, got those up to {self.end}")

    def whole(self) -> RoutedExperts | None:
        """Return all rows; None if there are none."""
        return None if self._info is None else RoutedExperts(self._info, bytes(self._data), self._start)
