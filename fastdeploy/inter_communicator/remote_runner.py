"""The engine's end of a runner in another process."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec
import zmq

from fastdeploy.core.errors import EngineError
from fastdeploy.core.plan import StepPlan, StepResult
from fastdeploy.core.runner import AdapterInfo, ChunkReceipt, ModelInfo, Staged, nothing
from fastdeploy.core.weight_source import PLAIN, PartFormat, Source
from fastdeploy.inter_communicator import runner_messages as m
from fastdeploy.inter_communicator.zmq_transport import new_socket

Result = TypeVar("Result")


class Connection:
    """Calls over one socket. died_fd: readable once the runner's process has ended; every wait ends then."""

    def __init__(self, endpoint: str, died_fd: int):
        self._socket = new_socket(zmq.Context.instance(), zmq.DEALER, linger_ms=0)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(died_fd, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._replies: msgspec.msgpack.Decoder[m.StepReply] = msgspec.msgpack.Decoder(m.StepReply)

    def ask(
        self,
        call: m.StepCall | m.BesideCall,
        result: msgspec.msgpack.Decoder[Result],
        on_tick: Callable[[], bool] | None = None,
    ) -> Result:
        """Send ``call`` and return its result. Raises the runner's error, and EngineError if its process ends. on_tick:
        called while the call runs; True gives up a step. An error of ``on_tick`` also gives up the step, and is raised
        once the call has ended, so that the next call gets its own answer."""
        self._socket.send(self._encoder.encode(call))
        failure: Exception | None = None
        while isinstance(reply := self._replies.decode(self._receive()), m.Tick):
            give_up = failure is not None
            try:
                give_up = give_up or (on_tick is not None and on_tick())
            except Exception as error:
                failure, give_up = error, True
            self._socket.send(self._encoder.encode(m.Answer(give_up)))
        if failure is not None:
            raise failure
        if isinstance(reply, m.Failed):
            raise reply.error()
        return result.decode(reply.result)

    def _receive(self) -> bytes:
        ready = [source for source, _ in self._poller.poll()]
        if self._socket not in ready:
            raise EngineError("the runner's process has ended")
        return self._socket.recv()

    def close(self) -> None:
        self._socket.close()


class RemoteStaging:
    """A ``Staging`` of a runner in another process. The weights of ``finish`` are the number of the staging."""

    def __init__(self, runner: RemoteRunner, number: int):
        self._runner, self._number = runner, number

    def add(
        self,
        source: Source,
        checksums: Mapping[str, str],
        verify_checksum: bool = False,
        form: PartFormat = PLAIN,
    ) -> ChunkReceipt:
        call = m.AddSource(self._number, source, dict(checksums), verify_checksum, form)
        return self._runner.ask_beside(call, _decoder(ChunkReceipt))

    def finish(self) -> Staged:
        done = self._runner.ask_beside(m.Finish(self._number), _decoder(m.StagedWeights))
        return Staged(self._number, done.fingerprint, done.eos_token_ids)

    def abandon(self) -> None:
        self._runner.ask_beside(m.Abandon(self._number), _decoder(type(None)))


class RemoteAdapterStaging:
    """An ``AdapterStaging`` of a runner in another process. ``finish`` returns the number of the staging."""

    def __init__(self, runner: RemoteRunner):
        self._runner = runner
        self._number: int | None = None

    def read(self, path: str) -> AdapterInfo:
        staged = self._runner.ask_beside(m.ReadAdapter(path), _decoder(m.StagedAdapter))
        self._number = staged.staging
        return staged.info

    def finish(self) -> int:
        assert self._number is not None, "nothing was read"
        return self._number


class RemoteMove:
    """A ``WeightMove`` of a runner in another process."""

    def __init__(self, runner: RemoteRunner, number: int):
        self._runner, self.number = runner, number

    def run(self) -> None:
        self._runner.ask_beside(m.RunMove(self.number), _decoder(type(None)))

    def abandon(self) -> None:
        self._runner.abandon_move(self.number)


class RemoteRunner:
    """A ``Runner`` that a RunnerServer serves from ``folder``. Every method raises EngineError once the runner's
    process has ended.

    died_fd: readable once the process has ended. on_close: called at the end of ``close``.
    """

    def __init__(self, folder: str, died_fd: int, on_close: Callable[[], None] = nothing):
        steps, self._beside = m.endpoints(folder)
        self._died_fd, self._on_close = died_fd, on_close
        self._steps = Connection(steps, died_fd)
        self._result: msgspec.msgpack.Decoder[StepResult | None] = msgspec.msgpack.Decoder(StepResult | None)
        self.info: ModelInfo = self._steps.ask(m.Info(), _decoder(ModelInfo))
        self.asleep: frozenset[str] = frozenset()

    @property
    def has_weights(self) -> bool:
        return self._steps.ask(m.HasWeights(), _decoder(bool))

    @property
    def fingerprint(self) -> str | None:
        return self._weight_facts()[0]

    @property
    def standby_nbytes(self) -> int:
        return self._weight_facts()[1]

    def _weight_facts(self) -> tuple[str | None, int]:
        return self._steps.ask(m.WeightFacts(), msgspec.msgpack.Decoder(tuple[str | None, int]))

    def execute(self, plan: StepPlan, between_layers: Callable[[], bool] | None = None) -> StepResult | None:
        return self._steps.ask(m.Execute(plan), self._result, between_layers)

    def begin_update(self, partial: bool, in_place: bool, delta: bool = False) -> RemoteStaging:
        return RemoteStaging(self, self._steps.ask(m.BeginUpdate(partial, in_place, delta), _decoder(int)))

    def commit(self, weights: Any) -> None:
        self._steps.ask(m.Commit(weights), _decoder(type(None)))

    def refresh_standby(self) -> None:
        self.ask_beside(m.RefreshStandby(), _decoder(type(None)))

    def check_adapter(self, config: bytes) -> None:
        self.ask_beside(m.CheckAdapter(config), _decoder(type(None)))

    def begin_adapter(self) -> RemoteAdapterStaging:
        return RemoteAdapterStaging(self)

    def commit_adapter(self, adapter: int, staged: Any) -> None:
        self._steps.ask(m.CommitAdapter(adapter, staged), _decoder(type(None)))

    def discard_adapter(self, staged: Any) -> None:
        self._steps.ask(m.DiscardAdapter(staged), _decoder(type(None)))

    def drop_adapters(self, adapters: Collection[int]) -> None:
        self._steps.ask(m.DropAdapters(tuple(adapters)), _decoder(type(None)))

    def checksums(self) -> dict[str, str]:
        return self.ask_beside(m.Checksums(), _decoder(dict[str, str]))

    def export(self, path: str) -> int:
        return self.ask_beside(m.Export(path), _decoder(int))

    def begin_sleep(self, tags: Collection[str], discard: bool) -> RemoteMove | None:
        return self._move(m.BeginSleep(tuple(tags), discard))

    def sleep(self, tags: Collection[str], written: RemoteMove | None) -> int:
        freed = self._steps.ask(m.Sleep(tuple(tags), _number(written)), _decoder(int))
        self.asleep |= frozenset(tags)
        return freed

    def begin_wake(self, tags: Collection[str]) -> RemoteMove | None:
        return self._move(m.BeginWake(tuple(tags)))

    def wake(self, tags: Collection[str], read: RemoteMove | None) -> None:
        self._steps.ask(m.Wake(tuple(tags), _number(read)), _decoder(type(None)))
        self.asleep -= frozenset(tags)

    def _move(self, call: m.BeginSleep | m.BeginWake) -> RemoteMove | None:
        number = self._steps.ask(call, msgspec.msgpack.Decoder(int | None))
        return None if number is None else RemoteMove(self, number)

    def abandon_move(self, number: int) -> None:
        """Free a copy of the weights that is not wanted. Does nothing once the runner's process has ended."""
        with contextlib.suppress(EngineError):
            self._steps.ask(m.AbandonMove(number), _decoder(type(None)))

    def check_alive(self) -> None:
        if select.select([self._died_fd], [], [], 0)[0]:
            raise EngineError("the runner's process has ended")

    def close(self) -> None:
        """Close the runner and end its process."""
        with contextlib.suppress(EngineError):  # its process may have ended already
            self._steps.ask(m.Close(), _decoder(type(None)))
        self._steps.close()
        self._on_close()

    def ask_beside(self, call: m.BesideCall, result: msgspec.msgpack.Decoder[Result]) -> Result:
        """Run ``call`` beside steps, on a connection of its own, from any thread."""
        connection = Connection(self._beside, self._died_fd)
        try:
            return connection.ask(call, result)
        finally:
            connection.close()


def _number(move: RemoteMove | None) -> int | None:
    return None if move is None else move.number


def _decoder(result: type[Result]) -> msgspec.msgpack.Decoder[Result]:
    return msgspec.msgpack.Decoder(result)
