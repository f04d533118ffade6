"""The parent's part of a rolling change: which settings each process of a fleet was started with, and gets next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from fastdeploy.core.config import EngineConfig, ServeConfig
from fastdeploy.core.errors import ControlError
from fastdeploy.fleet.config import FleetConfig
from fastdeploy.fleet.launcher import Roll, RollPhase


class Settings(NamedTuple):
    """The settings of the processes of a fleet."""

    engine: EngineConfig
    serve: ServeConfig
    fleet: FleetConfig

    def running_as(self, running: Settings) -> Settings:
        """Return these settings for processes that take the place of others: with the sockets that are open, and the
        share of this host that ``running`` has."""
        engine = msgspec.structs.replace(self.engine, engines_on_host=running.engine.engines_on_host)
        kept = {name: getattr(running.serve, name) for name in ("port", "control_port", "metrics_port", "shutdown_s")}
        return Settings(engine, msgspec.structs.replace(self.serve, **kept), self.fleet)


# Reads the settings again, with these flags in place of those of the command line. Raises InvalidField.
Reread = Callable[[Mapping[str, str]], Settings]


class SettingsBook:
    """The settings of each process, by their numbers. first: number 0. reread: None = they cannot be changed. roll: the
    last rolling change. trials: replicas that were started with new settings, and have not served yet."""

    def __init__(self, first: Settings, reread: Reread | None):
        self._settings = {0: first}
        self._reread = reread
        self._numbers: dict[str, int] = {}
        self._before = 0  # number of the settings from before the rolling change
        self._given: dict[str, str] = {}  # of all changes that are done
        self.roll: Roll | None = None
        self.trials: set[str] = set()

    @property
    def present(self) -> int:
        """Number of the settings that a new process gets."""
        return self._before if self.roll is None else self.roll.settings

    def number(self, name: str) -> int:
        """Return the number of the settings of a process, which are those of its first start until :meth:`renew`."""
        return self._numbers.setdefault(name, self.present)

    def of(self, name: str) -> Settings:
        """Return the settings of a process."""
        return self._settings[self.number(name)]

    def renew(self, name: str) -> None:
        """Let the process have the present settings from its next start on."""
        self._numbers[name] = self.present

    def forget(self, name: str) -> None:
        """Forget a process that is not started again."""
        self._numbers.pop(name, None)
        self.trials.discard(name)

    def begin(self, given: Mapping[str, str], drain_s: float) -> Roll:
        """Begin a rolling change. Raises ControlError if one runs, or InvalidField for settings that are refused."""
        if self.roll is not None and self.roll.runs:
            raise ControlError(f"a rolling change to settings {self.roll.settings} runs already")
        if self._reread is None:
            raise ControlError("the settings of this fleet cannot be read again")
        self._before = self.present
        given = self._given | dict(given)
        number = max(self._settings) + 1
        self._settings[number] = self._reread(given).running_as(self._settings[0])
        self.roll = Roll(number, RollPhase.REPLICAS, given, drain_s)
        return self.roll

    def go_back(self, why: str) -> None:
        """Let all processes have the settings from before. If they do not work either, the change ends."""
        assert self.roll is not None
        if self.roll.settings == self._before:
            self.roll = msgspec.structs.replace(self.roll, phase=RollPhase.FAILED, why=f"{self.roll.why}; then {why}")
        else:
            self.roll = msgspec.structs.replace(
                self.roll, settings=self._before, phase=RollPhase.REPLICAS, given=self._given, why=why
            )

    def enter(self, phase: RollPhase) -> None:
        """Go on with the next phase. A change that went back has failed, once it is done."""
        assert self.roll is not None
        if phase is RollPhase.DONE and self.roll.why:
            phase = RollPhase.FAILED
        if phase is RollPhase.DONE:
            self._given = self.roll.given
        self.roll = msgspec.structs.replace(self.roll, phase=phase)
