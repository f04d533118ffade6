"""The gateway's calls to API servers of replicas on other hosts. test_chain.py has the calls that pass weights on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace

import msgspec
import pytest

from fastdeploy.core.errors import EngineDead, FastDeployError
from fastdeploy.core.weight_source import FileSource
from fastdeploy.fleet.chain import Reserved, first_line
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.remote import RemoteHosts
from fastdeploy.http.guards.keys import Keys


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_the_path_of_a_file_may_have_every_character_but_a_newline(step):
    path = "/tmp/\r \v \f \x85 \u2028/weights"
    answer = b"\n\n" + msgspec.json.encode({"path": path}) + b"\n\n"
    pieces = each([answer[i : i + step] for i in range(0, len(answer), step)])
    assert await first_line("r0", pieces, Reserved) == Reserved(path)


@pytest.mark.parametrize("pieces", [[], [b"\n"], [b"{}\n"], [b'{"path": 1']])
async def test_an_answer_without_a_path_names_the_replica(pieces):
    with pytest.raises(EngineDead, match="r0"):
        await first_line("r0", each(pieces), Reserved)


async def test_a_replica_that_refuses_weights_before_all_were_sent_answers_and_is_not_dead(make_stack, tmp_path):
    keys = Keys(control=(b"secret",))
    server = make_stack(keys=keys, max_upload_mb=60, upload_dir=str(tmp_path / "uploads")).server
    replica = SimpleNamespace(name="r0", placement=SimpleNamespace(url=server.url, host="elsewhere"))
    weights = tmp_path / "weights"

    async def refusal(key: str, megabytes: int) -> FastDeployError:
        with open(weights, "wb") as file:
            file.truncate(megabytes << 20)
        hosts = RemoteHosts(FleetConfig(fleet_id="fleet", replica_key=key))
        try:
            async with hosts.staged([replica], FileSource(str(weights))) as outcomes:
                refused = outcomes["r0"]
        finally:
            await hosts.close()
        assert isinstance(refused, FastDeployError) and "replica r0" in refused.message
        return refused

    for _ in range(3):
        assert (await refusal("wrong", 60)).code == "invalid_api_key"
        too_large = await refusal("secret", 64)
        assert too_large.code == "request_too_large" and "more than 62914560 bytes" in too_large.message
