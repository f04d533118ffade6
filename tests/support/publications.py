"""The weight sessions and uploads of a state machine, as the machine expects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.files import SHARED_MEMORY


@dataclass
class Publication:
    """The calls of one weight session. names: the folders of the parts before its commit."""

    version: str | None
    partial: bool
    delta: bool = False
    names: list[str] = field(default_factory=list)
    committing: bool = False

    def weights(self, serving: int) -> int:
        numbers = [number_of(name) for name in self.names]
        if self.delta:
            return serving + sum(numbers)
        return (numbers or [0])[-1] + (serving if self.partial else 0)


@dataclass
class Upload:
    """An upload to a session, by way of one API server. part: the part that it is once it is complete, as a folder is
    named. received: bytes of it that the engine has taken."""

    name: str
    session_id: str
    client: str
    part: str
    received: int = 0


def number_of(folder: str) -> int:
    """Return the k of "/w<k>", "/d<k>" and their like."""
    return int(folder[2:].partition("-")[0])


def upload_path(part: str) -> str:
    """Return a path in the folder of uploads."""
    return f"{SHARED_MEMORY}/{UPLOAD_PREFIX}{part[1:]}"
