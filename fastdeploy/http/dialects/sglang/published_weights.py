"""slime's published weights, the source of SGLang's /pull_weights.

Version 7 is the Hugging Face folder ``weight_v000007`` below ``source_dir``. Version 0 is the model that the server
started with. A version is a delta if the metadata of its index has ``delta_encoding``; otherwise it is a whole
checkpoint. The metadata of a delta, all strings:

    version, base_version   six digits; the base is the version before
    delta_encoding          "xor" or "overwrite"
    compression_format      "zstd"
    checksum_format         "xxh3-128", "blake3" or "adler32"

Each file of a delta holds one payload (U8) under the name of each tensor that changed, and the checksums of the new
tensors in its own metadata: {tensor: checksum}.

Sources: slime/utils/disk_delta.py and slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import ANYWHERE, Folder
from fastdeploy.http.checkpoint_deltas.published import (
    INDEX,
    Delta,
    Payload,
    Published,
    check_delta,
    check_format,
    place_payload,
    published_header,
    read_published_json,
    refused,
    whole_version,
)
from fastdeploy.http.checkpoint_deltas.pulls import check_path

CHECKSUM_FORMATS = ("xxh3-128", "blake3", "adler32")


class Metadata(msgspec.Struct):
    """The metadata of the index of a delta."""

    version: str
    base_version: str
    delta_encoding: str
    compression_format: str
    checksum_format: str


class Index(msgspec.Struct):
    """model.safetensors.index.json."""

    metadata: dict[str, Any] = {}
    weight_map: dict[str, str] = {}


class SlimeStream:
    """The versions below ``source_dir``, which must lie beneath one of ``roots`` with all of its files. model: the
    folder of version 0, whose links may lead anywhere, as in a Hugging Face cache."""

    def __init__(self, model: str, source_dir: str, roots: Sequence[str]):
        check_path("source_dir", source_dir)
        self._model, self._source_dir, self._roots = model, source_dir, roots

    def open(self, version: int) -> Published:
        """See checkpoint_deltas.published.Stream."""
        try:
            if version == 0:
                return whole_version(0, Folder(self._model, ANYWHERE))
            with Folder(self._source_dir, self._roots) as base:
                root = base.path
        except OSError as error:
            why = f"{self._source_dir!r} cannot be opened as a folder: {error.strerror}"
            raise InvalidField("source_dir", why) from error
        try:
            folder = Folder(os.path.join(root, f"weight_v{version:06d}"), [root])
        except OSError as error:
            raise WeightUpdateRefused(f"source_dir: version {version} cannot be opened: {error.strerror}") from error
        try:
            return _opened(version, folder)
        except BaseException:
            folder.close()
            raise


def _opened(version: int, folder: Folder) -> Published:
    names = folder.names()
    if INDEX not in names:
        shards = [name for name in names if name.endswith(".safetensors")]
        if shards and shards != ["model.safetensors"]:
            # A network file system may show the files of a delta before its index.
            raise refused(version, INDEX, "is missing, and only a single model.safetensors needs none")
        return whole_version(version, folder)
    index = read_published_json(version, folder, INDEX, Index)
    if "delta_encoding" not in index.metadata:
        return whole_version(version, folder)
    try:
        metadata = msgspec.convert(index.metadata, Metadata)
    except msgspec.ValidationError as error:
        raise refused(version, INDEX, f"metadata: {error}") from error
    for field, value, expected in (
        ("version", metadata.version, version),
        ("base_version", metadata.base_version, version - 1),
    ):
        if not value.isascii() or not value.isdecimal() or int(value) != expected:
            raise refused(version, INDEX, f"{field}: expected {expected:06d}, got {value!r}")
    check_format(version, INDEX, "compression_format", metadata.compression_format, ("zstd",))
    check_format(version, INDEX, "checksum_format", metadata.checksum_format, CHECKSUM_FORMATS)
    check_format(version, INDEX, "delta_encoding", metadata.delta_encoding, ("xor", "overwrite"))
    by_file: dict[str, set[str]] = {}
    for tensor, file in index.weight_map.items():
        by_file.setdefault(file, set()).add(tensor)
    payloads = [
        payload
        for file, tensors in sorted(by_file.items())
        for payload in _payloads(version, folder, file, tensors, metadata.checksum_format)
    ]
    delta = check_delta(version, INDEX, Delta(metadata.delta_encoding, payloads))
    return Published(version, folder, [INDEX, *sorted(by_file)], delta)


def _payloads(version: int, folder: Folder, file: str, tensors: set[str], algorithm: str) -> Iterable[Payload]:
    """Return the payloads of one file. Raises WeightUpdateRefused if the file has other tensors than the index says."""
    header = published_header(version, folder, file)
    if odd := sorted(header.tensors.keys() ^ tensors):
        where = "the index alone" if odd[0] in tensors else "the file alone"
        raise refused(version, file, f"tensor {odd[0]} is in {where}")
    for tensor in sorted(tensors):
        if tensor not in header.metadata:
            raise refused(version, file, f"tensor {tensor} has no checksum in the metadata of the file")
        yield place_payload(version, file, header, tensor, tensor, algorithm, header.metadata[tensor])
