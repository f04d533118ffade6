"""The gateway's calls to API servers of replicas on other hosts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy.core.errors import EngineDead
from fastdeploy.fleet.remote import _first_path

REPLICA = SimpleNamespace(name="r0", placement=SimpleNamespace(url="http://r0"))


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_the_path_of_a_file_may_have_every_character_but_a_newline(step):
    path = "/tmp/\r \v \f \x85 \u2028/weights"
    answer = msgspec.json.encode({"path": path}) + b"\n\n"
    assert await _first_path(REPLICA, each([answer[i : i + step] for i in range(0, len(answer), step)])) == path


@pytest.mark.parametrize("pieces", [[], [b"\n"], [b"{}\n"], [b'{"path": 1']])
async def test_an_answer_without_a_path_names_the_replica(pieces):
    with pytest.raises(EngineDead, match="r0"):
        await _first_path(REPLICA, each(pieces))
