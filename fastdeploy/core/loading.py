"""How far an engine is with its start: what it does now, and what share of it is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import StrEnum

import msgspec


class LoadingStage(StrEnum):
    """The stages of a start, in order."""

    MODULES = "importing Paddle"
    PLAN = "planning the memory"
    WEIGHTS = "reading and packing the weights"
    KV_CACHE = "making the KV cache"
    WARM_UP = "warming up"


class Loading(msgspec.Struct, frozen=True):
    """The state of a start. done, total: bytes of the weights; 0 of 0 in the other stages."""

    stage: LoadingStage
    done: int = 0
    total: int = 0

    @property
    def share(self) -> float | None:
        """The share of this stage that is done, from 0 to 1; None if it is not known."""
        return self.done / self.total if self.total else None

    def __str__(self) -> str:
        if not self.total:
            return str(self.stage)
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        sizes = f"{self.done / unit:.1f} of {self.total / unit:.1f} {name}"
        return f"{self.stage}: {self.done / self.total:.0%}, {sizes}"


ShowLoading = Callable[[Loading], None]


def write_loading(path: str, state: Loading) -> None:
    """Put ``state`` into the file ``path``, which readers see as a whole or not at all. No error if the folder is gone
    or full: this is for people who look only."""
    try:
        with open(path + ".new", "wb") as file:
            file.write(msgspec.json.encode(state))
        os.replace(path + ".new", path)
    except OSError:
        return


def read_loading(path: str) -> Loading | None:
    """Return the state in the file ``path``; None without one."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Loading)
    except (OSError, msgspec.MsgspecError):
        return None
