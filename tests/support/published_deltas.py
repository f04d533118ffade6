"""Writers of published checkpoints and deltas in the formats of slime and SkyRL, and hosts that pull them."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash
import zstandard
from safetensors.numpy import load_file, save_file

INDEX = "model.safetensors.index.json"
CHECKSUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
}
Tensors = dict[str, np.ndarray]


def make_model(folder: Path, sizes: dict[str, int] | None = None) -> Tensors:
    """Write a checkpoint of two files with an index, and return its tensors (uint16, the bits of bfloat16)."""
    rng = np.random.default_rng(0)
    sizes = sizes or {"a": 1 << 20, "b": 777, "c": 5, "frozen": 100}
    tensors = {name: rng.integers(0, 2**15, size, dtype=np.uint16) for name, size in sizes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(files.values())):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    (folder / "config.json").write_text("{}")
    return tensors


def next_step(tensors: Tensors, step: int) -> Tensors:
    """Return tensors of which some values of each but "frozen" differ."""
    rng = np.random.default_rng(step)
    changed = {}
    for name, old in tensors.items():
        new = changed[name] = old.copy()
        if name != "frozen":
            new[rng.integers(0, old.size, max(1, old.size // 50))] ^= np.uint16(rng.integers(1, 2**15))
    return changed


def payload(encoding: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the payload of a tensor as one zstd frame."""
    before, after = old.view(np.uint8), new.view(np.uint8)
    if encoding == "xor":
        change = (before ^ after).tobytes()
    else:
        where = np.flatnonzero(before != after).astype("<u4")
        change = np.array([where.size], "<u4").tobytes() + where.tobytes() + after[where].tobytes()
    return np.frombuffer(zstandard.compress(change), np.uint8)


def publish_slime(
    source: Path,
    version: int,
    old: Tensors,
    new: Tensors,
    encoding: str = "xor",
    checksum: str = "xxh3-128",
    /,
    **metadata,
) -> Path:
    """Write weight_vNNNNNN, as slime does, in two files. metadata: fields of the index to replace."""
    folder = source / f"weight_v{version:06d}"
    folder.mkdir(parents=True)
    changed = [name for name in new if (old[name] != new[name]).any()]
    files = {name: f"model-{i % 2:05d}-of-00002.safetensors" for i, name in enumerate(changed)}
    for file in sorted(set(files.values())):
        mine = [name for name in changed if files[name] == file]
        sums = {name: CHECKSUMS[checksum](new[name].tobytes()) for name in mine}
        save_file({name: payload(encoding, old[name], new[name]) for name in mine}, folder / file, metadata=sums)
    told = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding,
            "compression_format": "zstd", "checksum_format": checksum} | metadata  # fmt: skip
    (folder / INDEX).write_text(json.dumps({"metadata": told, "weight_map": files}))
    return folder


def publish_skyrl(sync_dir: Path, version: int, old: Tensors, new: Tensors, /, **fields: Any) -> Path:
    """Write delta-NNNNNNNN, as SkyRL does. fields: of the manifest, to replace."""
    folder = sync_dir / f"delta-{version:08d}"
    folder.mkdir(parents=True)
    changed = {name: payload("xor", old[name], new[name]) for name in new if (old[name] != new[name]).any()}
    file = "delta-rank00000-file000000.safetensors"
    records = [
        {"name": name, "dtype": "bfloat16", "shape": list(new[name].shape), "uncompressed_num_bytes": new[name].nbytes,
         "compressed_num_bytes": frame.nbytes, "payload_file": file, "payload_key": name,
         "checksum": CHECKSUMS["xxh3-128"](new[name].tobytes()), "checksum_algorithm": "xxh3-128"}
        for name, frame in changed.items()
    ]  # fmt: skip
    if changed:
        save_file(changed, folder / file)
    manifest = {"version": version, "base_version": version - 1, "tensors": records, "total_uncompressed_num_bytes": 0,
                "total_compressed_num_bytes": 0, "payload_files": [file] if changed else []}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest | fields))
    return folder


def load_folder(folder: Path) -> Tensors:
    """Return the tensors of all safetensors files of a folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def same(left: Tensors, right: Tensors) -> bool:
    """Return whether both have the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)
