"""An engine as plain data: what it has, and how it answers the calls of a gateway."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy.core import errors
from fastdeploy.fleet.transaction import Step
from fastdeploy.inter_communicator import messages as m


class Sent(NamedTuple):
    """A message to a replica, or its answer. run, step, index: place of the message in its call."""

    run: int
    step: Step
    index: int
    args: m.Args
    result: Any = None


@dataclass
class ModelReplica:
    """An engine as plain data. refuses: types of the next calls that it refuses for reasons of its own."""

    name: str
    epoch: int = 0
    version: str = ""
    holds: set[str] = field(default_factory=set)
    adapters: dict[str, int] = field(default_factory=dict)
    asleep: set[str] = field(default_factory=set)
    session: m.BeginUpdateArgs | None = None
    session_id: str = ""
    prepared: bool = False
    loads: set[str] = field(default_factory=set)
    term: int = 0
    hangs: bool = False
    refuses: set[type] = field(default_factory=set)
    inbox: deque[tuple[int, Sent]] = field(default_factory=deque)  # with the term of the gateway that has sent it
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def state(self) -> tuple[Any, ...]:
        return self.epoch, self.version, sorted(self.holds), sorted(self.adapters.items()), sorted(self.asleep)

    def label(self) -> dict[str, Any]:
        return {"version": self.version, "weight_epoch": self.epoch, "boot_id": self.name}

    def do(self, args: m.Args) -> dict[str, Any]:
        """Do one call as an engine does. Raises the error of a refusal."""
        if type(args) in self.refuses:
            self.refuses.discard(type(args))
            raise errors.WrongOrder("not now")
        return getattr(self, f"_{type(args).__name__}")(args) | self.label()

    def _PauseArgs(self, args: m.PauseArgs) -> dict[str, Any]:
        self.holds.add(args.hold_id)
        return {"hold": {"id": args.hold_id, "scope": args.scope}}

    def _ResumeArgs(self, args: m.ResumeArgs) -> dict[str, Any]:
        gone = {h for h in self.holds if h == args.hold_id or (args.hold_id is None and h.startswith("anonymous"))}
        self.holds -= gone
        return {"status": "held" if self.holds else "running", "released": sorted(gone)}

    def _BeginUpdateArgs(self, args: m.BeginUpdateArgs) -> dict[str, Any]:
        if self.session is not None:
            raise errors.UpdateInProgress("a session is open")
        self.session, self.prepared = args, False
        self.session_id = f"{self.name}-{next(self.numbers)}"
        return {"session_id": self.session_id}

    def _meant(self, args: m.UpdateChunkArgs | m.CommitUpdateArgs) -> m.BeginUpdateArgs:
        by_name = args.session_id is None and self.session is not None and self.session.placed_by == args.placed_by
        if self.session is None or not (by_name or args.session_id == self.session_id):
            raise errors.SessionNotFound("no such session")
        return self.session

    def _UpdateChunkArgs(self, args: m.UpdateChunkArgs) -> dict[str, Any]:
        self._meant(args)
        return {"session_id": self.session_id}

    def _CommitUpdateArgs(self, args: m.CommitUpdateArgs) -> dict[str, Any]:
        session = self._meant(args)
        if args.prepare:
            self.prepared = True
            return {"session_id": self.session_id, "fingerprint": session.version}
        if args.weight_epoch is None or args.weight_epoch <= self.epoch:
            raise errors.VersionConflict("an old number")
        self.session, self.epoch, self.version = None, args.weight_epoch, session.version or ""
        return {"session_id": self.session_id, "fingerprint": session.version}

    def _AbortUpdateArgs(self, args: m.AbortUpdateArgs) -> dict[str, Any]:
        if self.session is None or args.session_id not in (None, self.session_id):
            return {"aborted": []}
        self.session = None
        return {"aborted": [self.session_id]}

    def _LoadAdapterArgs(self, args: m.LoadAdapterArgs) -> dict[str, Any]:
        if args.lora_name in self.loads:
            raise errors.UpdateInProgress("is being loaded")
        self.loads.add(args.lora_name)
        return {"lora_name": args.lora_name}

    def _EndLoadArgs(self, args: m.EndLoadArgs) -> dict[str, Any]:
        if args.lora_name not in self.loads:
            raise errors.WrongOrder("nothing is prepared")
        self.loads.discard(args.lora_name)
        if args.commit:
            assert args.adapter_epoch is not None
            self.adapters[args.lora_name] = args.adapter_epoch
        return {"lora_name": args.lora_name}

    def _UnloadAdapterArgs(self, args: m.UnloadAdapterArgs) -> dict[str, Any]:
        if args.lora_name not in self.adapters:
            raise errors.ModelNotFound("unknown")
        del self.adapters[args.lora_name]
        self.loads.discard(args.lora_name)
        return {"lora_name": args.lora_name}

    def _SleepArgs(self, args: m.SleepArgs) -> dict[str, Any]:
        if self.asleep:
            raise errors.WrongOrder("sleeps already")
        self.asleep = {"weight"}
        return {"asleep": ["weight"]}

    def _WakeArgs(self, args: m.WakeArgs) -> dict[str, Any]:
        if not self.asleep:
            raise errors.WrongOrder("nothing sleeps")
        self.asleep = set()
        return {"asleep": []}
