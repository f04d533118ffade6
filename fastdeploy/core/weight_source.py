"""Sources and labels of new weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAX_VERSION_CHARS = 256
MAX_TENSORS = 32_768  # of one update
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # the files of a PEFT folder


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


class StreamSource(msgspec.Struct, frozen=True, tag="stream"):
    """The next piece of one safetensors file, which is added in pieces while its upload is received. The bytes [offset,
    offset + nbytes) of the file ``path``, which the API server may overwrite after the reply.

    stream: names the upload. start: bytes of the upload before this piece. state: "open" = the upload goes on,
    "complete" = it ends with this piece, "broken" = it broke off, and there is no piece. The tensors of an upload count
    as arrived once it is complete."""

    stream: str
    path: str
    offset: int
    nbytes: int
    start: int
    state: Literal["open", "complete", "broken"]


WholeSource = FolderSource | FileSource | SharedMemorySource
Source = WholeSource | StreamSource


def may_hang(source: object) -> bool:
    """Return whether a read of ``source`` may never end. A folder may lie on another host, which may be gone. All else
    is in memory, or in a file that the API server of this host has written."""
    return isinstance(source, FolderSource)


class PartFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The way in which the tensors of a part are written. The default is plain safetensors.

    encoding: "dense" (the values) or "overwrite" (the indices and values that changed). compression: "none" or "zstd".
    With any other than dense and none, each tensor of the source is its payload, of dtype U8 (core/delta_format.py).
    fingerprints: {tensor: the fingerprint, in hex, that the tensor must have once this part is applied}, for any of the
    tensors."""

    encoding: str = "dense"
    compression: str = "none"
    fingerprints: dict[str, str] = {}

    @property
    def is_plain(self) -> bool:
        """Return whether the tensors are plain safetensors."""
        return self.encoding == "dense" and self.compression == "none"


PLAIN = PartFormat()


class DeltaBase(msgspec.Struct, frozen=True, omit_defaults=True):
    """The weights that a delta was made against. fingerprint: over all tensors (core/fingerprint.py). weight_epoch,
    version: None = any. The delta is refused unless all that are given describe the weights that serve."""

    fingerprint: str
    weight_epoch: int | None = None
    version: str | None = None


def version_label(value: Any) -> str:
    """Return ``value``, a string of 1 to MAX_VERSION_CHARS characters or an integer, as a label. Raises ValueError for
    anything else."""
    label = str(value) if type(value) is int else value
    if not isinstance(label, str) or not 1 <= len(label) <= MAX_VERSION_CHARS:
        raise ValueError(f"expected an integer, or a string of 1 to {MAX_VERSION_CHARS} characters")
    return label
