"""How a name of PaddlePaddle/FastDeploy, a flag or a variable of the environment, is taken here. The tables are in
fastdeploy_flags.py and fastdeploy_variables.py; the parser, the log and docs/fastdeploy.md follow from them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# From the text of a value, and the settings that are known so far, to settings of ours. Raises ValueError.
Conversion = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


class Verdict(enum.StrEnum):
    """What becomes of a name. SAME: our setting of this name. DIFFERS: a setting of ours, with another meaning or under
    another name. NO_EFFECT: taken, and changes nothing. REFUSED: the command ends, except for a harmless value."""

    SAME = "same"
    DIFFERS = "differs"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


class Form(enum.Enum):
    """What stands behind a flag: OURS = the flag is ours, and read as ours; one text; nothing (SWITCH); nothing, and
    there is a ``--no-`` form too (TOGGLE); several texts (MANY)."""

    OURS = enum.auto()
    TEXT = enum.auto()
    SWITCH = enum.auto()
    TOGGLE = enum.auto()
    MANY = enum.auto()


class Foreign(NamedTuple):
    """One name. text: why, and what to use. harmless: values that are taken though the verdict is REFUSED; for a
    switch, "false". to: the settings that the value means."""

    name: str
    verdict: Verdict
    text: str
    form: Form = Form.TEXT
    harmless: tuple[str, ...] = ()
    to: Conversion | None = None
    short: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag of this name: ``kv_cache_ratio`` is ``--kv-cache-ratio``."""
        return "--" + self.name.replace("_", "-")

    @property
    def dest(self) -> str:
        """Where the parser keeps the text of the flag. A setting of ours may have the same name."""
        return self.name if self.form is Form.OURS else f"fastdeploy:{self.name}"

    def is_harmless(self, value: str) -> bool:
        """Return whether a refused name may have this value."""
        return value.strip().lower() in self.harmless

    def meaning(self, text: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return our settings for a value; {} for one that changes nothing. text: of MANY, one value on each line.
        settings: those that are known so far. Raises ValueError, which says why, for a value that is refused."""
        values = text.split("\n") if self.form is Form.MANY else [text]
        if self.verdict is Verdict.REFUSED and not all(map(self.is_harmless, values)):
            short = text if len(text) < 60 else text[:57] + "..."
            shown = "this flag" if self.form is Form.SWITCH else repr(short)
            raise ValueError(f"{shown} is refused here: {self.text.replace('`', '')}")
        return {} if self.to is None else self.to(text, settings)

    def told(self) -> str:
        """Return the text of the docs, with the harmless values."""
        taken = ", ".join(f"`{value}`" for value in self.harmless if value)
        is_told = self.verdict is Verdict.REFUSED and self.form is Form.TEXT and taken
        return f"{self.text}. Taken: {taken}" if is_told else self.text


def same(name: str, text: str = "") -> Foreign:
    """A flag of ours with the same meaning."""
    return Foreign(name, Verdict.SAME, text, Form.OURS)


def differs(name: str, text: str, to: Conversion | None = None, form: Form = Form.TEXT) -> Foreign:
    """A flag with another meaning (no ``to``), or for other settings."""
    return Foreign(name, Verdict.DIFFERS, text, Form.OURS if to is None else form, to=to)


def no_effect(name: str, text: str, form: Form = Form.TEXT) -> Foreign:
    """A name that cannot matter here."""
    return Foreign(name, Verdict.NO_EFFECT, text, form)


def refused(name: str, text: str, *harmless: str, form: Form = Form.TEXT, short: tuple[str, ...] = ()) -> Foreign:
    """A name whose meaning cannot be given here, unless its value is one of ``harmless``."""
    return Foreign(name, Verdict.REFUSED, text, form, harmless, short=short)


def whole_number(text: str) -> int:
    """Return the number. Raises ValueError, which tells what was expected."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None
