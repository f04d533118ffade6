"""Published versions of a checkpoint, and the headers of their safetensors files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.files import Folder

MAX_HEADER_BYTES = MAX_JSON_BYTES = 16 << 20
INDEX = "model.safetensors.index.json"
# Copied besides *.safetensors. No other file of a published folder is copied.
CHECKPOINT_FILES = frozenset({
    INDEX, "added_tokens.json", "chat_template.jinja", "chat_template.json", "checksums.json", "config.json",
    "generation_config.json", "merges.txt", "special_tokens_map.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json",
})  # fmt: skip

Parsed = TypeVar("Parsed")


class Payload(NamedTuple):
    """The change of one tensor: ``nbytes`` bytes from ``offset`` of the published file ``file``. checksum: of the new
    bytes of the tensor, in hexadecimal digits, by ``algorithm``."""

    tensor: str
    file: str
    offset: int
    nbytes: int
    algorithm: str
    checksum: str


class Delta(NamedTuple):
    """The change of a version against the version before. Tensors without a payload stay as they are."""

    encoding: str
    payloads: Sequence[Payload]


class Published:
    """One published version: an open folder, which is closed when the block ends. delta: None = a whole checkpoint.
    files: the files of the folder that make the version."""

    def __init__(self, version: int, folder: Folder, files: Sequence[str], delta: Delta | None):
        self.version, self.folder, self.files, self.delta = version, folder, files, delta

    def __enter__(self) -> Published:
        return self

    def __exit__(self, *exc: object) -> None:
        self.folder.close()

    def identity(self) -> str:
        """Return a value that changes when any of the files is replaced or written to. Raises OSError."""
        lines = [self.folder.path]
        for file in self.files:
            fd = self.folder.open(file)
            try:
                found = os.fstat(fd)
            finally:
                os.close(fd)
            lines.append(f"{file}:{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class TensorInfo(msgspec.Struct):
    """The entry of a tensor in the header of a safetensors file. data_offsets: in bytes from the end of the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


class Header(NamedTuple):
    """The header of a safetensors file. start: bytes of the file before the data."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    start: int


def refused(version: int, file: str, why: str) -> WeightUpdateRefused:
    """Return the error for a published file that is not as it must be."""
    return WeightUpdateRefused(f"version {version}: {file}: {why}", file=file)


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file belongs to a checkpoint, by its name."""
    return name in CHECKPOINT_FILES or (name.endswith(".safetensors") and not name.startswith("."))


def whole_version(version: int, folder: Folder) -> Published:
    """Return the checkpoint in ``folder``. Raises WeightUpdateRefused if the folder has none of its files."""
    files = [name for name in folder.names() if is_checkpoint_file(name)]
    if not files:
        folder.close()
        raise WeightUpdateRefused(f"version {version} has no checkpoint files (*.safetensors, config.json, ...)")
    return Published(version, folder, files, None)


def read_header(fd: int) -> Header:
    """Read the header of an open safetensors file. Raises ValueError for a file that is none, or that is cut short."""
    size = os.fstat(fd).st_size
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not length <= min(size - 8, MAX_HEADER_BYTES):
        raise ValueError(f"{size} bytes cannot hold the header, which has at most {MAX_HEADER_BYTES}")
    try:
        parts = msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(parts.pop("__metadata__", b"{}"), type=dict[str, str])
        tensors = {name: msgspec.json.decode(part, type=TensorInfo) for name, part in parts.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it has a broken header: {error}") from error
    before = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = info.data_offsets
        if not 0 <= begin <= end <= size - 8 - length:
            raise ValueError(f"tensor {name} does not lie in its {size} bytes: it was cut short")
        if begin < min(before, end):
            raise ValueError(f"tensor {name} shares bytes with the tensor before it")
        before = max(before, end)
    return Header(tensors, metadata, 8 + length)


def published_header(version: int, folder: Folder, file: str) -> Header:
    """Read the header of a published file. Raises WeightUpdateRefused."""
    try:
        fd = folder.open(file)
    except OSError as error:
        raise refused(version, file, f"cannot be opened: {error.strerror}") from error
    try:
        return read_header(fd)
    except ValueError as error:
        raise refused(version, file, str(error)) from error
    finally:
        os.close(fd)


def read_published_json(version: int, folder: Folder, file: str, kind: type[Parsed]) -> Parsed:
    """Parse a published JSON file as ``kind``. Raises WeightUpdateRefused."""
    try:
        return msgspec.json.decode(folder.read(file, MAX_JSON_BYTES), type=kind)
    except OSError as error:
        raise refused(version, file, f"cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(version, file, f"cannot be read: {error}") from error


def read_payload(folder: Folder, payload: Payload) -> np.ndarray:
    """Return the bytes of a payload. Raises OSError, or ValueError for a file that was cut short."""
    fd = folder.open(payload.file)
    try:
        frame = np.empty(payload.nbytes, np.uint8)
        done = 0
        while done < frame.size:
            count = os.preadv(fd, [frame.data[done : done + (1 << 30)]], payload.offset + done)
            if count == 0:
                raise ValueError("its published file was cut short")
            done += count
        return frame
    finally:
        os.close(fd)
