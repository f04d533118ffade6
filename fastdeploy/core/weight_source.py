"""Sources and labels of new weights."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_VERSION_CHARS = 256


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """A Hugging Face folder of safetensors. All of it is read before the reply; then the trainer may delete it."""

    path: str


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """One safetensors file that the API server has written (an upload). The API server deletes it after the reply."""

    path: str


class SharedMemorySource(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A POSIX shared memory segment (shm_open) in safetensors layout. It is copied before it is checked, so the trainer
    may overwrite it. nbytes 0 = the whole segment."""

    name: str
    nbytes: int = 0


Source = FolderSource | FileSource | SharedMemorySource


def version_label(value: Any) -> str:
    """Return ``value``, a string of 1 to MAX_VERSION_CHARS characters or an integer, as a label. Raises ValueError for
    anything else."""
    label = str(value) if type(value) is int else value
    if not isinstance(label, str) or not 1 <= len(label) <= MAX_VERSION_CHARS:
        raise ValueError(f"expected an integer, or a string of 1 to {MAX_VERSION_CHARS} characters")
    return label
