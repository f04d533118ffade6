"""Messages between an engine and a runner in another process, and the names of their sockets.

    steps    DEALER <-> DEALER. The calls of the engine's loop, one after the other: steps, commits, sleep.
    beside   DEALER <-> ROUTER. Calls that run beside steps, each on a connection of its own: staging, checksums, the
             file of sleeping weights.

The answer to a call is one Failed, or one Done with None or the result that the call's docstring names. On ``steps``,
Tick messages may come before the answer, while the call runs.
"""

from __future__ import annotations

import os

import msgspec

from fastdeploy.core.errors import FastDeployError, OutOfSpace, from_wire
from fastdeploy.core.plan import StepPlan
from fastdeploy.core.runner import AdapterInfo
from fastdeploy.core.weight_source import PartFormat, Source
from fastdeploy.inter_communicator.messages import Failure


def endpoints(folder: str) -> tuple[str, str]:
    """Return the ZMQ addresses of ``steps`` and ``beside`` in ``folder``."""
    return f"ipc://{os.path.join(folder, 'steps.sock')}", f"ipc://{os.path.join(folder, 'beside.sock')}"


class Execute(msgspec.Struct, frozen=True, tag=True):
    """``Runner.execute``. Answered by a StepResult, or by None for a step that was given up."""

    plan: StepPlan


class Info(msgspec.Struct, frozen=True, tag=True):
    """The first call. Answered by a ModelInfo once the model is loaded."""


class HasWeights(msgspec.Struct, frozen=True, tag=True):
    """``Runner.has_weights``. Answered by a bool."""


class WeightFacts(msgspec.Struct, frozen=True, tag=True):
    """``Runner.fingerprint`` and ``Runner.standby_nbytes``. Answered by a tuple of both."""


class RefreshStandby(msgspec.Struct, frozen=True, tag=True):
    """``Runner.refresh_standby``."""


class BeginUpdate(msgspec.Struct, frozen=True, tag=True):
    """``Runner.begin_update``. Answered by the number of the new staging."""

    partial: bool
    in_place: bool
    delta: bool


class Commit(msgspec.Struct, frozen=True, tag=True):
    """Commit the finished staging of this number."""

    staging: int


class CommitAdapter(msgspec.Struct, frozen=True, tag=True):
    """``Runner.commit_adapter`` with the adapter that ReadAdapter has staged under the number ``staging``."""

    adapter: int
    staging: int


class DiscardAdapter(msgspec.Struct, frozen=True, tag=True):
    """``Runner.discard_adapter``. staging: see CommitAdapter."""

    staging: int


class DropAdapters(msgspec.Struct, frozen=True, tag=True):
    """``Runner.drop_adapters``."""

    adapters: tuple[int, ...]


class BeginSleep(msgspec.Struct, frozen=True, tag=True):
    """``Runner.begin_sleep``. Answered by the number of the new WeightMove, or by None."""

    tags: tuple[str, ...]
    discard: bool


class Sleep(msgspec.Struct, frozen=True, tag=True):
    """``Runner.sleep``. move: number of the WeightMove. Answered by the number of bytes that were given back."""

    tags: tuple[str, ...]
    move: int | None


class BeginWake(msgspec.Struct, frozen=True, tag=True):
    """``Runner.begin_wake``. Answered by the number of the new WeightMove, or by None."""

    tags: tuple[str, ...]


class Wake(msgspec.Struct, frozen=True, tag=True):
    """``Runner.wake``. move: see Sleep."""

    tags: tuple[str, ...]
    move: int | None


class AbandonMove(msgspec.Struct, frozen=True, tag=True):
    """``WeightMove.abandon``. move: see Sleep."""

    move: int


class RunMove(msgspec.Struct, frozen=True, tag=True):
    """``WeightMove.run``. move: see Sleep."""

    move: int


class Close(msgspec.Struct, frozen=True, tag=True):
    """The last call. The runner's process ends."""


class AddSource(msgspec.Struct, frozen=True, tag=True):
    """``Staging.add``. Answered by a ChunkReceipt."""

    staging: int
    source: Source
    checksums: dict[str, str]
    verify_checksum: bool
    form: PartFormat


class Finish(msgspec.Struct, frozen=True, tag=True):
    """``Staging.finish``. Its weights stay with the runner until Commit or Abandon. Answered by StagedWeights."""

    staging: int


class StagedWeights(msgspec.Struct, frozen=True):
    """``Staged`` without the weights."""

    fingerprint: str
    eos_token_ids: tuple[int, ...] | None


class Abandon(msgspec.Struct, frozen=True, tag=True):
    staging: int


class CheckAdapter(msgspec.Struct, frozen=True, tag=True):
    """``Runner.check_adapter``."""

    config: bytes


class ReadAdapter(msgspec.Struct, frozen=True, tag=True):
    """``Runner.begin_adapter``, ``AdapterStaging.read`` and ``finish``. Answered by a StagedAdapter. The adapter stays
    with the runner until CommitAdapter or DiscardAdapter."""

    path: str


class StagedAdapter(msgspec.Struct, frozen=True):
    """The answer to ReadAdapter. staging: its number."""

    staging: int
    info: AdapterInfo


class Checksums(msgspec.Struct, frozen=True, tag=True):
    """``Runner.checksums``. Answered by a dict of tensor name to sha256."""


class Export(msgspec.Struct, frozen=True, tag=True):
    """``Runner.export``. Answered by the number of bytes."""

    path: str


class Tick(msgspec.Struct, frozen=True, tag=True):
    """The call still runs. The runner waits for an Answer before it goes on."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The call has succeeded. result: encoded, of the type that the call's docstring names."""

    result: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The call has raised an error. kind: its class, or "" for a FastDeployError."""

    failure: Failure
    kind: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failed:
        """Return ``error`` as a message."""
        if isinstance(error, FastDeployError):
            return cls(Failure(error.code, error.message, error.detail))
        if isinstance(error, MemoryError):
            return cls.of(OutOfSpace(f"no memory: {error}"))
        text = str(error).encode("utf-8", "replace").decode()
        return cls(Failure(FastDeployError.code, text), type(error).__name__)

    def error(self) -> Exception:
        """Return the error to raise at the caller: a FastDeployError, or a RuntimeError that names the class."""
        if self.kind:
            return RuntimeError(f"{self.kind}: {self.failure.message}")
        return from_wire(self.failure.code, self.failure.message, self.failure.detail)


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Tick. give_up: give up the step in flight."""

    give_up: bool


StepReply = Tick | Done | Failed
AdapterCall = CommitAdapter | DiscardAdapter | DropAdapters
SleepCall = BeginSleep | Sleep | BeginWake | Wake | AbandonMove
StepCall = Execute | Info | HasWeights | WeightFacts | BeginUpdate | Commit | AdapterCall | SleepCall | Close
BesideCall = AddSource | Finish | Abandon | RefreshStandby | CheckAdapter | ReadAdapter | Checksums | Export | RunMove
