"""Where new weights are read from."""

from __future__ import annotations

import msgspec


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """A Hugging Face folder of safetensors. Read fully before the reply: the trainer may delete it at once."""

    path: str


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """One safetensors file that the API server has written (an upload). The API server deletes it after the reply."""

    path: str


class SharedMemorySource(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A POSIX shared memory segment (shm_open) in safetensors layout. Copied, then checked: the trainer may overwrite
    it. nbytes 0 = the whole segment."""

    name: str
    nbytes: int = 0


Source = FolderSource | FileSource | SharedMemorySource
