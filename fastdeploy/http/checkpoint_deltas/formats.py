"""The two formats in which trainers publish versions: slime's and SkyRL's.

slime. Version 7 is the Hugging Face folder ``weight_v000007`` below ``source_dir``. Version 0 is the model that the
server started with. A version is a delta if the metadata of its index has ``delta_encoding``; otherwise it is a whole
checkpoint. The metadata of a delta, all strings:

    version, base_version   six digits; the base is the version before
    delta_encoding          "xor" or "overwrite"
    compression_format      "zstd"
    checksum_format         "xxh3-128", "blake3" or "adler32"

Each file of a delta holds one payload (U8) under the name of each tensor that changed, and the checksums of the new
tensors in its own metadata: {tensor: checksum}.

SkyRL. Version 7 is the folder ``delta-00000007`` below ``sync_dir``, or the folder ``uri``: a delta by xor, and never a
whole checkpoint. Its manifest.json is {version, base_version, tensors: [{name, payload_file, payload_key, checksum,
checksum_algorithm}]}, beside safetensors files of payloads (U8). The checksums are xxh3-128 or sha256.

Sources: slime/utils/disk_delta.py, slime/backends/megatron_utils/update_weight/update_weight_from_disk_delta.py;
skyrl/backends/skyrl_train/weight_sync/delta/{trainer,engine,checkpoint}.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from fastdeploy.core.errors import InvalidField, WeightUpdateRefused
from fastdeploy.core.files import ANYWHERE, Folder, path_problem
from fastdeploy.http.checkpoint_deltas.patch import ALGORITHMS, ENCODINGS
from fastdeploy.http.checkpoint_deltas.published import (
    INDEX,
    Delta,
    Header,
    Payload,
    Published,
    published_header,
    read_published_json,
    refused,
    whole_version,
)

CHECKSUM_FORMATS = ("xxh3-128", "blake3", "adler32")  # of slime
MANIFEST = "manifest.json"
CLOUD = ("gs://", "s3://")


class Metadata(msgspec.Struct):
    """The metadata of the index of slime's deltas."""

    version: str
    base_version: str
    delta_encoding: str
    compression_format: str
    checksum_format: str


class Index(msgspec.Struct):
    """The content of model.safetensors.index.json."""

    metadata: dict[str, Any] = {}
    weight_map: dict[str, str] = {}


class Record(msgspec.Struct):
    """A tensor of SkyRL's manifest."""

    name: str
    payload_file: str
    payload_key: str
    checksum: str
    checksum_algorithm: str = "xxh3-128"


class Manifest(msgspec.Struct):
    """The content of SkyRL's manifest.json."""

    version: int
    base_version: int
    tensors: list[Record]


class PublishedVersions(ABC):
    """The versions that one trainer publishes, in folders beneath one of ``roots`` with all of their files. model: the
    folder of version 0, beneath one of ``model_roots``. model_field: the field that names it in errors."""

    model_field: str

    def __init__(self, model: str, model_roots: Sequence[str], roots: Sequence[str]):
        self._model, self._model_roots, self._roots = model, model_roots, roots

    def open(self, version: int) -> Published:
        """Open a version and check its lists of files and tensors. Raises InvalidField or WeightUpdateRefused."""
        if version == 0:
            return whole_version(0, _open_folder(self.model_field, self._model, self._model_roots))
        path, roots = self._find(version)
        try:
            folder = Folder(path, roots)
        except OSError as error:
            raise WeightUpdateRefused(f"version {version} cannot be opened: {path!r}: {error.strerror}") from error
        try:
            return self._read(version, folder)
        except BaseException:
            folder.close()
            raise

    @abstractmethod
    def _find(self, version: int) -> tuple[str, Sequence[str]]:
        """Return the path of a version, and the folders beneath which its files lie. Raises InvalidField."""

    @abstractmethod
    def _read(self, version: int, folder: Folder) -> Published: ...


class SlimeVersions(PublishedVersions):
    """The versions below ``source_dir``. The links of the model may lead anywhere, as in a Hugging Face cache."""

    model_field = "source_dir"

    def __init__(self, model: str, source_dir: str, roots: Sequence[str]):
        super().__init__(model, ANYWHERE, roots)
        check_path("source_dir", source_dir)
        self._source_dir = source_dir

    def _find(self, version: int) -> tuple[str, Sequence[str]]:
        with _open_folder("source_dir", self._source_dir, self._roots) as base:
            return os.path.join(base.path, f"weight_v{version:06d}"), [base.path]

    def _read(self, version: int, folder: Folder) -> Published:
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
        _check_versions(version, INDEX, metadata.version, metadata.base_version)
        _check_format(version, INDEX, "compression_format", metadata.compression_format, ("zstd",))
        _check_format(version, INDEX, "checksum_format", metadata.checksum_format, CHECKSUM_FORMATS)
        _check_format(version, INDEX, "delta_encoding", metadata.delta_encoding, ENCODINGS)
        by_file: dict[str, set[str]] = {}
        for tensor, file in index.weight_map.items():
            by_file.setdefault(file, set()).add(tensor)
        headers = {file: published_header(version, folder, file) for file in sorted(by_file)}
        records = _slime_records(version, by_file, headers, metadata.checksum_format)
        return _delta(version, folder, INDEX, metadata.delta_encoding, headers, records)


class SkyRLVersions(PublishedVersions):
    """The versions below ``sync_dir``. uri: the folder of version ``target``, if it is not there."""

    model_field = "base_model_path"

    def __init__(
        self,
        model: str,
        model_roots: Sequence[str],
        target: int,
        sync_dir: str | None,
        uri: str | None,
        roots: Sequence[str],
    ):
        super().__init__(model, model_roots, roots)
        for field, path in (("sync_dir", sync_dir), ("uri", uri)):
            if path is not None and path.startswith(CLOUD):
                raise InvalidField(field, f"expected a folder of this host, got {path!r}: cloud storage is not read")
            if path is not None:
                check_path(field, path)
        self._target, self._sync_dir, self._uri = target, sync_dir, uri

    def _find(self, version: int) -> tuple[str, Sequence[str]]:
        if version == self._target and self._uri is not None:
            return self._uri, self._roots
        if self._sync_dir is None:
            raise InvalidField("sync_dir", f"expected the folder that version {version} is published in")
        return os.path.join(self._sync_dir, f"delta-{version:08d}"), self._roots

    def _read(self, version: int, folder: Folder) -> Published:
        manifest = read_published_json(version, folder, MANIFEST, Manifest)
        _check_versions(version, MANIFEST, manifest.version, manifest.base_version)
        files = sorted({record.payload_file for record in manifest.tensors})
        headers = {file: published_header(version, folder, file) for file in files}
        return _delta(version, folder, MANIFEST, "xor", headers, manifest.tensors)


def check_path(field: str, path: str) -> None:
    """Raise InvalidField unless ``path`` is an absolute path that Linux can have."""
    problem = path_problem(path) or (None if os.path.isabs(path) else f"expected an absolute path, got {path!r}")
    if problem is not None:
        raise InvalidField(field, problem)


def _open_folder(field: str, path: str, roots: Sequence[str]) -> Folder:
    try:
        return Folder(path, roots)
    except OSError as error:
        raise InvalidField(field, f"{path!r} cannot be opened as a folder: {error.strerror}") from error


def _check_versions(version: int, file: str, given: str | int, base: str | int) -> None:
    """Raise WeightUpdateRefused unless a delta is of this version, against the version before."""
    for field, value, expected in (("version", given, version), ("base_version", base, version - 1)):
        is_number = isinstance(value, int) or (value.isascii() and value.isdecimal())
        if not is_number or int(value) != expected:
            shown = expected if isinstance(value, int) else f"{expected:06d}"
            raise refused(version, file, f"{field}: expected {shown}, got {value!r}")


def _check_format(version: int, file: str, field: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise refused(version, file, f"{field}: expected {' or '.join(known)}, got {value!r}")


def _slime_records(
    version: int, by_file: Mapping[str, set[str]], headers: Mapping[str, Header], algorithm: str
) -> Iterator[Record]:
    """Return the tensors of a delta. Raises WeightUpdateRefused if a file has other tensors than the index says."""
    for file, header in headers.items():
        tensors = by_file[file]
        if odd := sorted(header.tensors.keys() ^ tensors):
            where = "the index alone" if odd[0] in tensors else "the file alone"
            raise refused(version, file, f"tensor {odd[0]} is in {where}")
        for tensor in sorted(tensors):
            if tensor not in header.metadata:
                raise refused(version, file, f"tensor {tensor} has no checksum in the metadata of the file")
            yield Record(tensor, file, tensor, header.metadata[tensor], algorithm)


def _delta(
    version: int, folder: Folder, manifest: str, encoding: str, headers: Mapping[str, Header], records: Iterable[Record]
) -> Published:
    """Return the delta of these tensors. Raises WeightUpdateRefused for a tensor that comes twice or has no payload,
    and for an unknown checksum."""
    payloads: dict[str, Payload] = {}
    for record in records:
        name, file = record.name, record.payload_file
        if name in payloads:
            raise refused(version, manifest, f"tensor {name} comes twice")
        _check_format(version, manifest, f"checksum of {name}", record.checksum_algorithm, ALGORITHMS)
        info = headers[file].tensors.get(record.payload_key)
        if info is None or info.dtype != "U8":
            got = "nothing" if info is None else f"one of dtype {info.dtype}"
            why = f"expected a payload of dtype U8 under {record.payload_key!r}, got {got}"
            raise refused(version, file, f"tensor {name}: {why}")
        offset = headers[file].start + info.data_offsets[0]
        payloads[name] = Payload(name, file, offset, info.nbytes, record.checksum_algorithm, record.checksum)
    return Published(version, folder, [manifest, *headers], Delta(encoding, list(payloads.values())))
