"""An engine as plain data: what it has, and how it answers the calls of a gateway."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy.core import errors
from fastdeploy.core.served_weights import WHOLE_ENGINE, CommittedState
from fastdeploy.core.weight_source import FileSource, FolderSource, Source
from fastdeploy.fleet.transaction import Command
from fastdeploy.inter_communicator import messages as m


class Sent(NamedTuple):
    """A message to a replica, or its answer. run, command, index: place of the message in its call."""

    run: int
    command: Command
    index: int
    args: m.Args
    result: Any = None


class Content(NamedTuple):
    """The content of a source: tensors, shown as their fingerprint, and the EOS ids that it names (None = none)."""

    fingerprint: str
    eos_token_ids: tuple[int, ...] | None = None


class Sources:
    """The folders of a trainer, and the copies that engines have made of them, below "/copy"."""

    def __init__(self) -> None:
        self._writes = 0

    def write(self) -> None:
        """Overwrite all folders of the trainer with other tensors, and with other EOS ids or with none."""
        self._writes += 1

    def read(self, source: Source) -> Content:
        assert isinstance(source, FolderSource | FileSource)
        if source.path.startswith("/copy/"):
            return Content(source.path.removeprefix("/copy/"))
        return Content(f"{source.path} {self._writes}", (self._writes,) if self._writes % 2 else None)


START = CommittedState("", 0, "start", (0,))


@dataclass
class ModelReplica:
    """An engine as plain data. sources: that it reads. labels: the fingerprint that each (name, adapter_epoch) has
    meant on any engine of the fleet since its start. adapters: (epoch, fingerprint) by name. staged: the tensors of the
    open session. loads: fingerprints of the prepared loads. refuses: types of the next calls that it refuses for
    reasons of its own."""

    name: str
    sources: Sources
    labels: dict[tuple[str, int], str]
    committed: CommittedState = START
    holds: set[str] = field(default_factory=set)
    adapters: dict[str, tuple[int, str]] = field(default_factory=dict)
    past_adapter_epoch: int = 0
    asleep: set[str] = field(default_factory=set)
    session: m.BeginUpdateArgs | None = None
    session_id: str = ""
    staged: Content = Content("")
    loads: dict[str, str] = field(default_factory=dict)
    term: int = 0
    hangs: bool = False
    refuses: set[type] = field(default_factory=set)
    inbox: deque[tuple[int, Sent]] = field(default_factory=deque)  # with the term of the gateway that has sent it
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def state(self) -> tuple[Any, ...]:
        return self.committed, sorted(self.holds), sorted(self.adapters.items()), sorted(self.asleep)

    def label(self) -> dict[str, Any]:
        return {"version": self.committed.version, "weight_epoch": self.committed.weight_epoch, "boot_id": self.name}

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
        self.session, self.staged = args, Content("")
        self.session_id = f"{self.name}-{next(self.numbers)}"
        return {"session_id": self.session_id}

    def _meant(self, args: m.UpdatePartArgs | m.CommitUpdateArgs) -> m.BeginUpdateArgs:
        by_name = args.session_id is None and self.session is not None and self.session.placed_by == args.placed_by
        if self.session is None or not (by_name or args.session_id == self.session_id):
            raise errors.SessionNotFound("no such session")
        return self.session

    def _UpdatePartArgs(self, args: m.UpdatePartArgs) -> dict[str, Any]:
        self._meant(args)
        assert isinstance(args.source, Source)
        self.staged = self.sources.read(args.source)
        return {"session_id": self.session_id}

    def _CommitUpdateArgs(self, args: m.CommitUpdateArgs) -> dict[str, Any]:
        session, staged = self._meant(args), self.staged
        expected = args.fingerprint or session.fingerprint
        if not staged.fingerprint or expected not in (None, staged.fingerprint):
            self.session = None
            raise errors.WeightUpdateRefused("no tensors, or others than those that were named")
        if args.prepare:
            return {"session_id": self.session_id, **staged._asdict()}
        if args.weight_epoch is None or args.weight_epoch <= self.committed.weight_epoch:
            raise errors.VersionConflict("an old number")
        named = [args.eos_token_ids, staged.eos_token_ids, self.committed.eos_token_ids]
        eos_token_ids = next(ids for ids in named if ids is not None)
        self.session = None
        self.committed = CommittedState(session.version or "", args.weight_epoch, staged.fingerprint, eos_token_ids)
        return {"session_id": self.session_id, **self.committed._asdict()}

    def _SetVersionArgs(self, args: m.SetVersionArgs) -> dict[str, Any]:
        given = {"version": args.version, "weight_epoch": args.weight_epoch, "eos_token_ids": args.eos_token_ids}
        self.committed = self.committed._replace(**{name: v for name, v in given.items() if v is not None})
        return {}

    def _ExportWeightsArgs(self, args: m.ExportWeightsArgs) -> dict[str, Any]:
        if self.asleep:
            raise errors.WrongOrder("sleeps")
        return {"path": f"/copy/{self.committed.fingerprint}", **self.committed._asdict()}

    def _FleetStateArgs(self, args: m.FleetStateArgs) -> dict[str, Any]:
        holds = [{"scope": WHOLE_ENGINE, "id": hold, "mode": "keep", "placed_by": "native"} for hold in self.holds]
        adapters = [
            {"lora_name": name, "adapter_epoch": epoch, "fingerprint": fingerprint}
            for name, (epoch, fingerprint) in self.adapters.items()
        ]
        report = {"holds": holds, "adapters": adapters, "asleep": sorted(self.asleep), **self.committed._asdict()}
        report |= {"session": self.session, "prepared_loads": list(self.loads)}
        return report | {"past_adapter_epoch": self.past_adapter_epoch}

    def _AbortUpdateArgs(self, args: m.AbortUpdateArgs) -> dict[str, Any]:
        if self.session is None or args.session_id not in (None, self.session_id):
            return {"aborted": []}
        self.session = None
        return {"aborted": [self.session_id]}

    def _LoadAdapterArgs(self, args: m.LoadAdapterArgs) -> dict[str, Any]:
        if args.lora_name in self.loads:
            raise errors.UpdateInProgress("is being loaded")
        fingerprint = self.sources.read(args.source).fingerprint
        if args.fingerprint not in (None, fingerprint):
            raise errors.WeightUpdateRefused("another adapter than the one that was named")
        self.loads[args.lora_name] = fingerprint
        return {"fingerprint": fingerprint}

    def _EndLoadArgs(self, args: m.EndLoadArgs) -> dict[str, Any]:
        fingerprint = self.loads.get(args.lora_name)
        if fingerprint is None or args.fingerprint not in (None, fingerprint):
            if args.commit:
                raise errors.WrongOrder("no such load is prepared")
            return {"lora_name": args.lora_name}
        del self.loads[args.lora_name]
        if args.commit:
            assert args.adapter_epoch is not None
            label = args.lora_name, args.adapter_epoch
            assert self.labels.setdefault(label, fingerprint) == fingerprint, f"two adapters have the label {label}"
            self.adapters[args.lora_name] = (args.adapter_epoch, fingerprint)
        return {"lora_name": args.lora_name}

    def _UnloadAdapterArgs(self, args: m.UnloadAdapterArgs) -> dict[str, Any]:
        if args.lora_name not in self.adapters:
            raise errors.ModelNotFound("unknown")
        epoch, _ = self.adapters.pop(args.lora_name)
        self.past_adapter_epoch = max(self.past_adapter_epoch, epoch)
        self.loads.pop(args.lora_name, None)
        return {"lora_name": args.lora_name, "adapter_epoch": epoch}

    def _ExportAdapterArgs(self, args: m.ExportAdapterArgs) -> dict[str, Any]:
        if args.lora_name not in self.adapters:
            raise errors.ModelNotFound("unknown")
        _, fingerprint = self.adapters[args.lora_name]
        return {"path": f"/copy/{fingerprint}", "fingerprint": fingerprint}

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
