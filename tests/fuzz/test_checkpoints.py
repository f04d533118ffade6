"""Damaged checkpoints from every source are refused, and the old weights stay bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.embedded import MODEL_DIR
from fuzz.fuzzed_server import FuzzedServer
from support.http_calls import OCTETS
from support.search import examples

WHOLE = (Path(MODEL_DIR) / "model.safetensors").read_bytes()
HEADER_BYTES = int.from_bytes(WHOLE[:8], "little")
HEADER: dict[str, Any] = json.loads(WHOLE[8 : 8 + HEADER_BYTES])
DATA = WHOLE[8 + HEADER_BYTES :]
NAMES = sorted(name for name in HEADER if name != "__metadata__")
SHAPES = st.lists(st.sampled_from([0, 1, 2, -1, 2**31, 2**63 - 1, 2**70, 0.5, "1", None, True]), max_size=12)
ODD = st.sampled_from([None, "", "\ud800", "x" * 300, 2**70, -1, [], {}, [1], [2**63] * 3000, 1.5])
NEW_NAMES = st.sampled_from(["", "\ud800", "\0", "../x", "__metadata__", "x" * 5000]) | st.text(max_size=10)
CONTENTS = [b"{}", b"[]", b"null", b"[" * 100_000, b'{"weight_map": {"a": "/etc/passwd"}}']


def header_of(edit: Callable[[dict[str, Any]], None]) -> bytes:
    header = json.loads(json.dumps(HEADER))
    edit(header)
    return json.dumps(header).encode()


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw the file of the embedded model with damage that makes it unloadable."""
    name = draw(st.sampled_from(NAMES))
    match draw(st.integers(0, 6)):
        case 0:
            return WHOLE[: draw(st.integers(0, len(WHOLE) - 1))]
        case 1:
            head = draw(st.integers(0, 2**64 - 1).filter(lambda n: n != HEADER_BYTES)).to_bytes(8, "little")
            return head + WHOLE[8:]
        case 2:
            header = header_of(lambda h: h.update({name: draw(ODD)}))
        case 3:
            field, value = draw(st.sampled_from(["dtype", "data_offsets"])), draw(ODD)
            header = header_of(lambda h: h[name].update({field: value}))
        case 4:
            shape = draw(SHAPES.filter(lambda s: s != HEADER[name]["shape"]))
            header = header_of(lambda h: h[name].update(shape=shape))
        case 5:
            new = draw(NEW_NAMES.filter(lambda n: n not in HEADER))
            header = header_of(lambda h: h.update({new: h.pop(name)}))
        case _:
            header = draw(st.binary(min_size=1, max_size=200))
    return len(header).to_bytes(8, "little") + header + DATA


def by_upload(server: FuzzedServer, content: bytes) -> Any:
    return server.send("POST", "/v1/update_weights", content=content, headers=OCTETS)


def by_folder(server: FuzzedServer, content: bytes) -> Any:
    folder = server.folder / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shutil.copyfile(Path(MODEL_DIR) / "config.json", folder / "config.json")
    (folder / "model.safetensors").write_bytes(content)
    return server.send("POST", "/v1/update_weights", json={"model_path": str(folder)})


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", [by_upload, by_folder], ids=["upload", "folder"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    server: FuzzedServer, way: Callable[[FuzzedServer, bytes], Any]
):
    @examples(25)
    @given(damaged())
    def update(content: bytes) -> None:
        reply = way(server, content)
        assert reply is None or 400 <= reply.status_code < 500, reply.text

    update()
    server.check_weights_unchanged()


@pytest.mark.timeout(600)
@examples(20)
@given(
    name=st.sampled_from(["config.json", "model.safetensors.index.json", "generation_config.json", "checksums.json"]),
    content=st.binary(max_size=100) | st.sampled_from(CONTENTS),
    kind=st.sampled_from(["file", "fifo", "folder", "link"]),
)  # fmt: skip
def test_odd_files_in_a_folder_cause_no_internal_error(server: FuzzedServer, name: str, content: bytes, kind: str):
    folder = server.folder / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(MODEL_DIR, folder)
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "file":
            path.write_bytes(content)
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to("/proc/self/mem")
    body = {"model_path": str(folder), "verify_checksum": name == "checksums.json"}
    server.send("POST", "/v1/update_weights", json=body)


@pytest.mark.timeout(600)
@examples(12)
@given(damaged())
def test_damaged_shared_memory_is_refused(server: FuzzedServer, content: bytes):
    segment = Path("/dev/shm") / f"fastdeploy-fuzz-{uuid.uuid4().hex}"
    segment.write_bytes(content)
    try:
        body = {"shared_memory": segment.name, "nbytes": len(content)}
        reply = server.send("POST", "/v1/update_weights", json=body)
        assert reply is None or 400 <= reply.status_code < 500, reply.text
    finally:
        segment.unlink()
