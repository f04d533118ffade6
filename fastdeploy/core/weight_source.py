"""Sources of new weights, which of them are allowed, and the form and the label of what they bring.

A new kind of source is a class here, a member of ``Source``, a field of the body that names it
(http/control/protocol.py), and a way to open it (model_executor/safetensors_source.py).
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import msgspec

from fastdeploy.core.config import UPLOAD_PREFIX, upload_folders
from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import SHARED_MEMORY, path_problem

MAX_VERSION_CHARS = 256
MAX_TENSORS = 32_768  # of one update
MAX_NBYTES = 2**63 - 1
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"  # the files of a PEFT folder


class SourcePolicy:
    """The sources that one engine allows. roots: folders that weights may be read from; none = no folder and no shared
    memory. upload_dir: the setting --upload-dir. Uploads are always allowed, since the HTTP route has checked them.

    The loop's thread checks a source, so the check opens no file: a dead mount would block the thread. The staging
    thread checks, when it opens a folder, that the folder lies beneath a root after all links are followed."""

    def __init__(self, roots: tuple[str, ...], upload_dir: str):
        reals = [os.path.realpath(root) for root in roots]
        self.folders_allowed = bool(roots)
        self.segments_allowed = any(os.path.commonpath([SHARED_MEMORY, root]) == root for root in reals)
        self.upload_folders = tuple(os.path.normpath(folder) for folder in upload_folders(upload_dir))

    def check(self, source: Source, folder_field: str = "model_path") -> None:
        """Raise InvalidField, naming the field of the route, if the source is not allowed. folder_field: the field that
        names a folder."""
        source.check(self, folder_field)


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """A checkpoint folder of Hugging Face or Paddle. All of it is read before the reply; then it may be deleted.

    Each kind of source says these things of itself. may_hang: a read may never end, because the bytes may lie on
    another host, which may be gone. on_every_host: a replica on another host reads it by the same name."""

    may_hang: ClassVar[bool] = True
    on_every_host: ClassVar[bool] = True
    path: str

    def check(self, policy: SourcePolicy, folder_field: str) -> None:
        """See ``SourcePolicy.check``."""
        if (problem := path_problem(self.path)) is not None:
            raise InvalidField(folder_field, problem)
        if not policy.folders_allowed:
            why = f"{self.path!r} is refused: no folder is allowed without --model-root"
            raise InvalidField(folder_field, why)


class FileSource(msgspec.Struct, frozen=True, tag="file"):
    """One safetensors file that the API server has written (an upload). The API server deletes it after the reply."""

    may_hang: ClassVar[bool] = False
    on_every_host: ClassVar[bool] = False
    nbytes: ClassVar[int] = 0
    path: str

    @property
    def file(self) -> str:
        """The path of the file. Every source of one file has one, and ``nbytes`` of it; 0 = all."""
        return self.path

    def check(self, policy: SourcePolicy, folder_field: str) -> None:
        """See ``SourcePolicy.check``."""
        folder, name = os.path.split(self.path)
        is_upload = folder in policy.upload_folders and name.startswith(UPLOAD_PREFIX)
        if path_problem(self.path) is not None or not is_upload:
            raise InvalidField("body", "expected the path of an upload to an API server of this engine")


class SharedMemorySource(msgspec.Struct, frozen=True, tag="shared_memory"):
    """A POSIX shared memory segment (shm_open) in safetensors layout. It is copied before it is checked, so the trainer
    may overwrite it. The trainer stays its owner: nothing here unlinks it. nbytes 0 = the whole segment."""

    may_hang: ClassVar[bool] = False
    on_every_host: ClassVar[bool] = False
    name: str
    nbytes: int = 0

    @property
    def file(self) -> str:
        """See ``FileSource.file``. Raises WeightUpdateRefused for a name with slashes."""
        plain = self.name.removeprefix("/")
        if plain in ("", ".", "..") or "/" in plain:
            raise WeightUpdateRefused(f"{self.name}: is not the name of a shared memory segment", file=self.name)
        return f"{SHARED_MEMORY}/{plain}"

    def check(self, policy: SourcePolicy, folder_field: str) -> None:
        """See ``SourcePolicy.check``."""
        plain, name = self.name.removeprefix("/"), self.name
        if "/" in plain or plain in (".", "..") or path_problem(plain) is not None:
            raise InvalidField("shared_memory", f"expected the name of a POSIX segment, without slashes, got {name!r}")
        if not 0 <= self.nbytes <= MAX_NBYTES:
            raise InvalidField("nbytes", f"expected an integer from 0 to 2**63 - 1, got {self.nbytes}")
        if not policy.segments_allowed:
            raise InvalidField("shared_memory", f"{SHARED_MEMORY} is not under an allowed root (--model-root)")


Source = FolderSource | FileSource | SharedMemorySource


# Names and orientation of tensors. AUTO: what config.json of a folder tells; without a folder, that of Hugging Face.
# The two of Paddle differ in fused projections only: q, k, v; or for each key-value head its q, its k, its v.
LAYOUTS = AUTO, HUGGINGFACE, PADDLE, PADDLEFORMERS = "auto", "huggingface", "paddle", "paddleformers"


class PartFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """The way in which the tensors of a part are written. The default is plain safetensors.

    encoding: "dense" (the values) or "overwrite" (the indices and values that changed). compression: "none" or "zstd".
    With any other than dense and none, each tensor of the source is its payload, of dtype U8 (core/delta_format.py).
    fingerprints: {tensor: the fingerprint, in hex, that the tensor must have once this part is applied}, for any of the
    tensors. layout: one of LAYOUTS (model_executor/checkpoint_layout.py), of a dense part without compression."""

    encoding: str = "dense"
    compression: str = "none"
    fingerprints: dict[str, str] = {}
    layout: str = AUTO

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
