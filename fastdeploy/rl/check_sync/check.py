"""The check: ask the engine what serves, compare it with the trainer's weights, and look at its answers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fastdeploy.core.errors import FastDeployError, InvalidField
from fastdeploy.core.fingerprint import over_all
from fastdeploy.core.weight_source import AUTO, LAYOUTS
from fastdeploy.model_executor.models import CONFIG
from fastdeploy.rl.check_sync.answers import Completions
from fastdeploy.rl.check_sync.behaviour import check_behaviour
from fastdeploy.rl.check_sync.case import Earlier, Sides
from fastdeploy.rl.check_sync.compare import differences
from fastdeploy.rl.check_sync.history import History, updates
from fastdeploy.rl.check_sync.other_engines import find_other
from fastdeploy.rl.check_sync.own_engine import find_own
from fastdeploy.rl.check_sync.report import BehaviourReport, Difference, ServingState, SyncReport, Verdict
from fastdeploy.rl.check_sync.serving import Calls, ChangedMeanwhile, Engine, ReplicasDiffer, typed
from fastdeploy.rl.check_sync.weights import TrainerWeights, checkpoint_dtype
from fastdeploy.rl.connection import Connection

ATTEMPTS = 3  # of a check during which other weights are committed
DTYPES = ("float32", "bfloat16")
ARGUMENTS = ("model", "history")  # whose content is looked at during the check
Weights = Mapping[str, Any] | str | os.PathLike[str]


def check_sync(
    url: str,
    weights: Weights,
    *,
    model: str | os.PathLike[str] | None = None,
    previous: Sequence[Weights] = (),
    base: str | os.PathLike[str] | None = None,
    history: str | os.PathLike[str] | None = None,
    layout: str = AUTO,
    answers: bool = True,
    api_key: str | None = None,
    control_key: str | None = None,
    control_url: str | None = None,
) -> SyncReport:
    """Check whether an engine serves the trainer's weights. Nothing changes in the engine, and its requests go on.

    url: of the engine, of any kind. weights: the trainer's, a folder or a state dict of Paddle, torch or numpy tensors.
    model: a folder with config.json; needed with a state dict. previous: earlier weights of the trainer, the latest
    first. base: the folder that the training began with; None = ``model``, if the weights are elsewhere. history: a
    file that keeps the fingerprints of the weights of earlier checks, so that stale weights are found without
    ``previous``. layout: as in /v1/update_weights. answers: also ask the engine some prompts. api_key, control_key,
    control_url: as for RolloutClient.

    An engine that cannot be asked, and a model or weights that no engine of ours would take, give a report with the
    verdict UNKNOWN.
    Raises InvalidField for a wrong argument."""
    if layout not in LAYOUTS:
        raise InvalidField("layout", f"expected one of {', '.join(LAYOUTS)}, got {layout!r}")
    for field, folder in (("base", base), *(("previous", one) for one in previous)):
        if isinstance(folder, str | os.PathLike) and not os.path.isdir(folder):
            raise InvalidField(field, f"there is no folder {os.fspath(folder)!r}")
    connection = Connection(
        url.rstrip("/").removesuffix("/v1"), api_key=api_key, control_key=control_key, control_url=control_url
    )
    kept = History(None if history is None else Path(history))
    asked = _Arguments(weights, model, tuple(previous), base, layout, answers, kept)
    calls = Calls(connection)
    try:
        return _check(calls, asked)
    except (FastDeployError, OSError) as error:
        if isinstance(error, InvalidField) and error.field in ARGUMENTS and not error.detail.get("status"):
            raise
        return _unknown(calls.shown_url, getattr(error, "message", str(error)))
    finally:
        calls.close()


class _Arguments(NamedTuple):
    """The arguments of ``check_sync``."""

    weights: Weights
    model: str | os.PathLike[str] | None
    previous: tuple[Weights, ...]
    base: str | os.PathLike[str] | None
    layout: str
    answers: bool
    history: History

    @property
    def folder(self) -> str | os.PathLike[str]:
        """The folder with config.json. Raises InvalidField."""
        if self.model is not None:
            return self.model
        if isinstance(self.weights, Mapping):
            raise InvalidField("model", f"expected a folder with {CONFIG}, as the weights are a state dict")
        return self.weights

    def open(self, weights: Weights, dtype: str, label: str) -> TrainerWeights:
        return TrainerWeights(weights, self.folder, dtype, self.layout, label)

    @property
    def base_folder(self) -> str | os.PathLike[str] | None:
        """The folder of the weights before the training, if there is one."""
        if self.base is not None:
            return self.base
        is_other = isinstance(self.weights, Mapping) or (
            self.model is not None and os.path.realpath(self.model) != os.path.realpath(self.weights)
        )
        has_weights = is_other and any(
            name.name.startswith("model") for name in Path(self.folder).glob("*.safetensors")
        )
        return self.folder if has_weights else None


def _check(calls: Calls, asked: _Arguments) -> SyncReport:
    folder = asked.folder
    for _ in range(ATTEMPTS):
        try:
            engine: Engine = find_own(calls) or find_other(calls)
            state = engine.state()
            dtype = state.dtype or checkpoint_dtype(folder)
            if dtype not in DTYPES:
                return _unknown(
                    calls.shown_url, f"the engine serves {dtype}; this check knows {' and '.join(DTYPES)}", state
                )
            with asked.open(asked.weights, dtype, "the trainer's weights") as trainer:
                return _Check(calls, asked, engine, state, trainer).report()
        except ChangedMeanwhile:
            continue
        except ReplicasDiffer as differ:
            return _replicas(calls.shown_url, asked, differ)
    how = f"other weights were committed during each of {ATTEMPTS} attempts: check when no update is on its way"
    return _unknown(calls.shown_url, how)


class _Check:
    """One attempt. Raises ChangedMeanwhile."""

    def __init__(self, calls: Calls, asked: _Arguments, engine: Engine, state: ServingState, trainer: TrainerWeights):
        self._calls, self._asked, self._engine = calls, asked, engine
        self._state, self._trainer = state, trainer
        self._notes = list(_notes(state))

    def report(self) -> SyncReport:
        """Compare the tensors, then the answers."""
        engine, trainer = self._engine, self._trainer
        fingerprint = over_all(trainer.fingerprints())
        digests = {name: one.hex for name, one in trainer.fingerprints().items()}
        missing = [name for name in trainer.shapes if name not in trainer.present]
        with ExitStack() as stack:
            previous = [
                stack.enter_context(self._asked.open(one, trainer.dtype, f"previous weights {k}"))
                for k, one in enumerate(self._asked.previous, start=1)
            ]
            compared, found = len(trainer.present), list[Difference]()
            if fingerprint != self._state.fingerprint:
                compared, found = self._compare(previous, digests, fingerprint)
            if not missing:
                self._asked.history.add(trainer.dtype, fingerprint, digests)
            behaviour = self._behaviour(previous) if self._asked.answers else None
            if not found and behaviour is not None and behaviour.statistic != 0.0:
                how = "the engine's memory has other values than those that it was sent"
                found = [Difference(name, "damaged", how, trainer.shapes[name]) for name in engine.damaged(trainer)]
        if (sentence := engine.changed()) is not None:
            if engine.has_fingerprints:
                raise ChangedMeanwhile
            self._notes.append(sentence)
        whole = compared - len(engine.rows)
        verdict, how = _verdict(compared, whole, len(trainer.shapes), found, missing, behaviour)
        method = engine.method if compared else "answers"
        return SyncReport(
            self._calls.shown_url, verdict, how, self._state, method, compared, fingerprint, tuple(found), behaviour,
            tuple(self._notes),
        )  # fmt: skip

    def _compare(
        self, previous: Sequence[TrainerWeights], digests: Mapping[str, str], fingerprint: str
    ) -> tuple[int, list[Difference]]:
        """Return the number of tensors that were compared, and those that differ."""
        engine, trainer = self._engine, self._trainer
        served = engine.digests(trainer)
        expected = engine.digests_of(trainer)
        shared = [name for name in trainer.present if name in served and name in expected]
        unexpected = [name for name in served if name not in trainer.shapes]
        found = [
            Difference(name, "unexpected", "the engine has this tensor, and the model does not") for name in unexpected
        ]
        unseen = [name for name in trainer.present if name not in served]
        if engine.has_fingerprints:
            how = "the trainer has this tensor, and the engine does not"
            found += [Difference(name, "missing", how, trainer.shapes[name]) for name in unseen]
        elif unseen:
            self._notes.append(f"{len(unseen)} tensors are not shown by the engine, the first is {unseen[0]}.")
        differing = [name for name in shared if served[name] != expected[name]]
        if differing:
            with ExitStack() as stack:
                sides = self._sides(served, expected, previous, fingerprint, stack)
                shapes = {name: self._shown(name, trainer.read(name)).shape for name in differing}
                found += differences(differing, sides, shapes, engine.values)
        return len(shared), found

    def _sides(
        self,
        served: Mapping[str, str],
        expected: Mapping[str, str],
        previous: Sequence[TrainerWeights],
        fingerprint: str,
        stack: ExitStack,
    ) -> Sides:
        engine, trainer = self._engine, self._trainer

        def earlier(weights: TrainerWeights, label: str) -> Earlier:
            return Earlier(label, engine.digests_of(weights), lambda name: self._shown(name, weights.read(name)))

        known = [earlier(one, f"{updates(k)} before") for k, one in enumerate(previous, start=1)]
        if engine.has_fingerprints:
            known += self._asked.history.earlier(trainer.dtype, fingerprint)
        base = None
        if (folder := self._asked.base_folder) is not None:
            opened = stack.enter_context(self._asked.open(folder, trainer.dtype, "the base model"))
            base = earlier(opened, f"the base model ({folder})")
        return Sides(
            expected,
            served,
            known,
            read=lambda name: self._shown(name, trainer.read(name)),
            read_wide=lambda name: self._shown(name, trainer.read_wide(name)),
            dtype=trainer.dtype,
            config=trainer.model.config,
            base=base,
            zero=engine.zero,
        )

    def _shown(self, name: str, values: np.ndarray) -> np.ndarray:
        """Return the part of a tensor that the engine shows."""
        return values[: self._engine.rows.get(name)]

    def _behaviour(self, previous: Sequence[TrainerWeights]) -> BehaviourReport:
        """Return what the answers of the engine tell. A paused engine is not asked: it holds requests."""
        try:
            if typed(self._calls.find("/is_paused") or {}, _Paused, "GET /is_paused").is_paused:
                return BehaviourReport(Verdict.UNKNOWN, "The engine is paused, so its answers were not checked.")
            models = typed(self._calls.find("/v1/models") or {}, _Models, "GET /v1/models").data
            name = models[0].id if models else ""
            return check_behaviour(Completions(self._calls, name), self._state, self._trainer, previous)
        except (FastDeployError, OSError) as error:
            return BehaviourReport(Verdict.UNKNOWN, f"The answers could not be checked: {error}")


class _Paused(msgspec.Struct):
    is_paused: bool = False


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _verdict(
    compared: int,
    whole: int,
    tensors: int,
    found: Sequence[Difference],
    missing: Sequence[str],
    behaviour: BehaviourReport | None,
) -> tuple[Verdict, str]:
    """Return the verdict on all that was found, and one sentence. compared: tensors that were compared, of ``tensors``
    of the model; whole: those of which all values were."""
    if found:
        kinds = ", ".join(f"{number} {kind}" for kind, number in Counter(one.kind for one in found).most_common())
        return (
            Verdict.DIFFERS,
            f"{len(found)} of {max(compared, len(found))} tensors differ ({kinds}). The first is {found[0].tensor}.",
        )
    if behaviour is not None and behaviour.verdict is Verdict.DIFFERS:
        equal = (
            f"All {compared} tensors that were compared are equal, but the answers are not those of the trainer's "
            f"weights with its {CONFIG}."
            if compared
            else "The answers are those of other weights."
        )
        return Verdict.DIFFERS, f"{equal} {behaviour.how}"
    if behaviour is not None and behaviour.kv is Verdict.DIFFERS:
        return Verdict.DIFFERS, f"The KV that is in use is older than the weights. {behaviour.kv_how}"
    if missing and compared:
        why = f"{len(missing)} of {tensors} tensors are not among the trainer's weights, the first is {missing[0]}"
        return Verdict.UNKNOWN, f"All {compared} tensors that were given are equal, but {why}."
    if whole == tensors:
        return Verdict.EQUAL, f"All {tensors} tensors are equal."
    if behaviour is not None and behaviour.verdict is Verdict.EQUAL:
        return Verdict.EQUAL, behaviour.how
    if behaviour is not None:
        return Verdict.UNKNOWN, behaviour.how
    in_part = f", {compared - whole} of them in part" if whole < compared else ""
    how = f"The engine shows {compared} of {tensors} tensors{in_part}, and its answers were not checked."
    return Verdict.UNKNOWN, how


def _notes(state: ServingState) -> list[str]:
    found = []
    if state.session is not None:
        found.append(f"A weight update is open: {state.session}. Its weights do not serve yet.")
    if state.asleep:
        found.append(f"The engine sleeps: {', '.join(state.asleep)}.")
    if state.adapters:
        found.append(f"Adapters are loaded: {', '.join(state.adapters)}. Only the base weights were compared.")
    return found


def _replicas(url: str, asked: _Arguments, differ: ReplicasDiffer) -> SyncReport:
    """Return the report on a fleet whose replicas do not serve the same weights."""
    fingerprints = []
    for dtype in DTYPES:
        with asked.open(asked.weights, dtype, "the trainer's weights") as trainer:
            fingerprints.append(over_all(trainer.fingerprints()))
    found = tuple(differ.differences(fingerprints))
    state = ServingState("fastdeploy", replicas=tuple(differ.served))
    if not found:
        return _unknown(url, f"all replicas have the trainer's values, but do not agree: {differ}", state)
    names = ", ".join(one.replica or "" for one in found)
    how = f"The replicas of the fleet serve different weights. {names} not those of the trainer."
    return SyncReport(url, Verdict.DIFFERS, how, state, "fingerprints over all tensors", differences=found)


def _unknown(url: str, how: str, state: ServingState | None = None) -> SyncReport:
    return SyncReport(url, Verdict.UNKNOWN, how, state or ServingState("unknown"), "none")
