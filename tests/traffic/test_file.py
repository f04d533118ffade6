"""The file of a recording: what is written is read again, also from a part of the file."""

from __future__ import annotations

import tempfile
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import InvalidField
from fastdeploy.traffic.file import (
    FORMAT,
    MAGIC,
    MAX_PIECE_BYTES,
    MAX_RECORD_BYTES,
    Begin,
    Body,
    Closing,
    End,
    Head,
    Opening,
    Outcome,
    Piece,
    RecordWriter,
    Side,
    read_recording,
    read_records,
)
from support.search import examples

OPENING = Opening(version="1.2", upstream="http://a:1", began=1e9)
TIMES = st.floats(0, 1e6)
IDS = st.integers(1, 2**40)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
HEADERS = st.lists(st.tuples(TEXTS, TEXTS), max_size=3)
SIDES = st.sampled_from(Side)
RECORDS = st.one_of(
    st.builds(Begin, IDS, TIMES, TEXTS, TEXTS, HEADERS),
    st.builds(Head, IDS, TIMES, st.integers(100, 599), HEADERS),
    st.builds(Piece, IDS, TIMES, SIDES, st.binary(max_size=3000)),
    st.builds(Body, IDS, TIMES, SIDES, st.integers(0, 2**50), TEXTS, st.booleans()),
    st.builds(End, IDS, TIMES, st.sampled_from(Outcome), TEXTS),
    st.builds(Closing, TIMES),
)


@examples(30)
@given(st.lists(st.lists(RECORDS, max_size=5), max_size=5), st.data())
def test_what_is_written_is_read_and_of_a_part_of_the_file_the_first_records(batches, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a")
        writer, sizes = RecordWriter(str(path), OPENING), []
        for batch in batches:
            writer.write(batch)
            sizes.append(path.stat().st_size)
        written = [OPENING, *(record for batch in batches for record in batch)]
        assert list(read_records(str(path))) == written, "before it is closed"
        writer.close()
        assert list(read_records(str(path))) == written
        whole = path.read_bytes()
        first = sizes[0] if sizes else len(whole)
        cut = data.draw(st.integers(min(first, len(whole)), len(whole)))
        path.write_bytes(whole[:cut])
        part = list(read_records(str(path)))
        complete = sum(len(batch) for batch, size in zip(batches, sizes, strict=True) if size <= cut)
        assert part == written[: len(part)] and len(part) >= 1 + complete


def exchange_records(number: int) -> list[msgspec.Struct]:
    return [
        Begin(number, 1.0, "POST", "/a?b=1", [("x", "y")]),
        Piece(number, 1.5, Side.REQUEST, b"{}"),
        Body(number, 1.5, Side.REQUEST, 2, "00", True),
        Head(number, 2.0, 200, []),
        Piece(number, 2.5, Side.REPLY, b"ab"),
        Piece(number, 3.0, Side.REPLY, b"c"),
        Body(number, 3.0, Side.REPLY, 3, "00", True),
        End(number, 3.5, Outcome.COMPLETE),
    ]


def test_a_recording_without_its_end_has_the_exchanges_as_far_as_they_came(tmp_path):
    path = str(tmp_path / "a")
    writer = RecordWriter(path, OPENING)
    writer.write(exchange_records(1) + exchange_records(2)[:5])
    recording = read_recording(path)
    whole, part = recording.exchanges
    assert whole.request == b"{}" and whole.pieces == [(2.5, b"ab"), (3.0, b"c")] and whole.path == "/a"
    assert part.outcome is None and part.pieces == [(2.5, b"ab")] and part.reply_size is None
    assert not recording.closed and recording.seconds == 3.5


def test_a_file_is_never_overwritten(tmp_path):
    (tmp_path / "a").write_text("precious")
    with pytest.raises(FileExistsError):
        RecordWriter(str(tmp_path / "a"), OPENING)
    assert (tmp_path / "a").read_text() == "precious"


def test_records_of_no_recorder_are_refused_and_take_little_memory(tmp_path):
    opening = framed(OPENING)
    for content, why in (
        (opening + framed(Head(7, 1.0, 200, [])), "request 7 goes on, but did not begin"),
        (opening + b"\x04\0\0\0\xa3\xff\xff\xff", "can be read"),
        (opening + framed({"type": "other"}), "'other'"),
        (opening + b"\xff\xff\xff\xff" + bytes(MAX_RECORD_BYTES // 8), "a record of 4294967295 bytes"),
    ):
        (tmp_path / "a").write_bytes(MAGIC + zstandard.compress(content))
        tracemalloc.start()
        with pytest.raises(InvalidField, match=why):
            read_recording(str(tmp_path / "a"))
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_PIECE_BYTES
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"{}", MAGIC, MAGIC + b"no zstandard at all"])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidField, match="expected a recording"):
        list(read_records(str(tmp_path / "a")))


def framed(*records: object) -> bytes:
    encoded = [msgspec.msgpack.encode(record) for record in records]
    return b"".join(len(one).to_bytes(4, "little") + one for one in encoded)


@pytest.mark.parametrize("fields", [{"new": 1}, {"version": "9", "upstream": "http://a", "began": 0.0}])
def test_a_newer_format_is_refused_by_its_number(tmp_path, fields):
    newer = framed({"type": "opening", "format": FORMAT + 1} | fields)
    (tmp_path / "a").write_bytes(MAGIC + zstandard.compress(newer))
    with pytest.raises(InvalidField, match=f"it has format {FORMAT + 1}, and this version reads {FORMAT}"):
        list(read_records(str(tmp_path / "a")))
