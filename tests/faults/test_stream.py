"""At which token a process dies, and what of the request the client then has."""

from __future__ import annotations

import pytest

from fastdeploy.core.outputs import Span
from fastdeploy.faults.book import FaultBook
from fastdeploy.faults.injection import ConnectionBroken, Injection
from fastdeploy.faults.rules import read_headers
from fastdeploy.faults.stream import RequestFaults
from fastdeploy.faults.table import Place
from fastdeploy.inter_communicator.messages import Output

pytestmark = pytest.mark.anyio


class Request:
    """A request of one choice with a fault. acted: what was killed, each with the tokens that had arrived by then."""

    def __init__(self, folder, header: str, is_fleet: bool = False):
        self.book, self.asked, self.is_fleet = FaultBook(str(folder)), read_headers([header], is_fleet), is_fleet
        self.acted: list[tuple[object, int]] = []
        self.arrived = 0

    async def run(self, tokens: list[int], at_once: int = 1) -> list[int]:
        """Return the tokens that the reader gets. at_once: tokens in each output of the engine."""
        injection = Injection("/v1/completions", self.asked, "")
        chosen = await self.book.decide(Place.REQUEST, self.asked, injection.path)
        faults = RequestFaults(chosen, self.book, injection, self._act, self.is_fleet)
        stream = faults.stream("r", 1, lambda *_: None, lambda _: None)
        faults.submitted("r")
        got: list[int] = []
        for start in range(0, len(tokens), at_once):
            ids = tokens[start : start + at_once]
            self.arrived += len(ids)
            end = "length" if start + at_once >= len(tokens) else None
            span = Span("v", 0, start, start + len(ids))
            stream.put(Output("r", 0, ids, spans=[span], finish_reason=end))
            for _ in range(2):  # the reader is woken once more where a fault waits for what it has got before
                got += [token for output in stream.read() for token in output.token_ids]
        return got

    def _act(self, rule, request_id: str) -> None:
        assert request_id == "r"
        self.acted.append((rule.parameters["of"], self.arrived))


@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize(("when", "count", "arrived"), [("before", 0, 0), ("between", 3, 3), ("middle", 3, 4)])
async def test_an_engine_dies_with_so_many_tokens_at_the_client(tmp_path, when, count, arrived, at_once):
    request = Request(tmp_path, f"death; when={when}; tokens=3")
    assert await request.run([1, 2, 3, 4, 5], at_once) == [1, 2, 3, 4, 5][:count]
    assert request.acted == [("engine", arrived if at_once == 1 or not arrived else 5)]
    assert request.book.state.counts == {"death": 1}


async def test_a_fleet_loses_no_token_that_was_on_its_way(tmp_path):
    request = Request(tmp_path, "death; of=replica; tokens=2", is_fleet=True)
    assert await request.run([1, 2, 3, 4]) == [1, 2, 3, 4]
    assert request.acted == [("replica", 2)]


@pytest.mark.parametrize(("when", "count"), [("before", 0), ("between", 3)])
async def test_an_api_server_dies_when_the_reader_has_so_many_tokens(tmp_path, when, count):
    request = Request(tmp_path, f"death; of=api_server; when={when}; tokens=3")
    with pytest.raises(ConnectionBroken) as broken:
        await request.run([1, 2, 3, 4, 5])
    assert not request.acted
    broken.value.end()
    assert request.acted == [("api_server", count + 1)]
    assert request.book.state.counts == {"death": 1}


async def test_a_request_that_ends_before_its_fault_is_left_alone(tmp_path):
    for header in ("death; tokens=9", "death; tokens=4", "stream_cut; tokens=9"):
        request = Request(tmp_path, header)
        assert await request.run([1, 2, 3, 4]) == [1, 2, 3, 4]
        assert (request.acted, request.book.state.counts) == ([], {})
        assert not request.book.state.happened[-1].acted
