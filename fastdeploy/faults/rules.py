"""Rules: which fault happens to which requests. They come from ``X-Fault`` headers, from bodies of ``POST /v1/faults``
and from schedule files, which have the same fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from fastdeploy.core.errors import InvalidField
from fastdeploy.faults.table import ALL_CALLS, Fault, Parameter, Place, Value, find, read_parameters

HEADER = "X-Fault"
MAX_RULES = 1000
# The conditions of a rule: the requests that match all of the last seven are counted, and the first three choose among
# them by their number.
CONDITIONS = (
    Parameter("after", 0, "so many matching requests pass before the first fault", 0, 1e9),
    Parameter("times", 1, "faults in all; 0 = no limit", 0, 1e9),
    Parameter("probability", 1.0, "that a matching request gets the fault", 0, 1),
    Parameter("path", "", "path of the request, as a pattern of shells; empty = any"),
    Parameter("request_id", "", "request_id of the body, or X-Request-Id, as a pattern; empty = any"),
    Parameter("call", "", "the control call; empty = any that the fault acts on", choices=("", *ALL_CALLS)),
    Parameter("version", "", "of an update, chunk or commit: the version that it brings; else the one that serves"),
    Parameter("from_s", 0.0, "seconds after the rule was armed"),
    Parameter("until_s", 0.0, "the same; 0 = no end"),
)
FLEET_ONLY, SERVER_ONLY = ("replica", "gateway"), ("api_server",)


class Rule(msgspec.Struct, kw_only=True):
    """A fault that is armed. parameters: of the fault. conditions: values of CONDITIONS. armed_at: time.time().
    matched: requests that met the conditions so far, and so the number of the next one. fired: how many of them got
    the fault."""

    name: str
    fault: str
    parameters: dict[str, Value]
    conditions: dict[str, Value]
    seed: int = 0
    armed_at: float = 0.0
    matched: int = 0
    fired: int = 0

    def value(self, name: str) -> Any:
        """Return the value of a condition or of a parameter."""
        return self.conditions[name] if name in self.conditions else self.parameters[name]

    @property
    def row(self) -> Fault:
        return find(self.fault)

    def fits(self, path: str, request_ids: Iterable[str], call: str, now: float) -> bool:
        """Return whether a request meets the conditions that need no question to the engine."""
        c = self.conditions
        age, until_s = now - self.armed_at, float(c["until_s"])
        return (
            age >= float(c["from_s"])
            and (not until_s or age < until_s)
            and (not c["path"] or fnmatchcase(path, str(c["path"])))
            and (not c["request_id"] or any(fnmatchcase(name, str(c["request_id"])) for name in request_ids))
            and (not c["call"] or c["call"] == call)
        )

    def draw(self) -> bool:
        """Count one matching request, and return whether it gets the fault. That depends on the seed, the name of the
        rule and the number of the request alone."""
        number, self.matched = self.matched, self.matched + 1
        after, times = int(self.conditions["after"]), int(self.conditions["times"])
        chosen = number >= after and uniform(self.seed, self.name, number) < float(self.conditions["probability"])
        if chosen and (not times or self.fired < times):
            self.fired += 1
            return True
        return False

    def describe(self) -> dict[str, Any]:
        """Return the rule as a body has it, with its counts. Conditions that are not used are left out."""
        used = {c.name: self.conditions[c.name] for c in CONDITIONS if self.conditions[c.name] != c.default}
        counts = {"matched": self.matched, "fired": self.fired}
        return {"name": self.name, "fault": self.fault, **self.parameters, **used, "seed": self.seed, **counts}


class Schedule(msgspec.Struct):
    """The rules of a scenario. They have no names yet if their author gave none."""

    rules: list[Rule]


def uniform(seed: int, name: str, number: int) -> float:
    """Return a number from 0 to below 1, always the same for the same arguments."""
    digest = hashlib.blake2b(f"{seed}:{name}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def read_rule(given: Any, is_fleet: bool, seed: int = 0) -> Rule:
    """Return the rule that one JSON object describes. is_fleet: whether the server is a fleet. Raises InvalidField."""
    if not isinstance(given, Mapping):
        raise InvalidField("rules", f"expected objects with a field fault, got {given!r}")
    fields = dict(given)
    fault = find(fields.pop("fault", None))
    name = fields.pop("name", "")
    if not isinstance(name, str) or len(name) > 100:
        raise InvalidField("name", f"expected a text of at most 100 characters, got {name!r}")
    own_seed = _seed(fields.pop("seed", seed))
    names = [parameter.name for parameter in fault.parameters]
    conditions = read_parameters(CONDITIONS, {k: v for k, v in fields.items() if k not in names}, names)
    parameters = read_parameters(fault.parameters, {k: v for k, v in fields.items() if k in names})
    _check(fault, parameters, conditions, is_fleet)
    return Rule(name=name, fault=fault.name, parameters=parameters, conditions=conditions, seed=own_seed)


def _seed(given: Any) -> int:
    if type(given) is not int or not 0 <= given < 2**63:
        raise InvalidField("seed", f"expected an integer from 0 to 2**63 - 1, got {given!r}")
    return given


def _check(fault: Fault, parameters: Mapping[str, Value], conditions: Mapping[str, Value], is_fleet: bool) -> None:
    """Raise InvalidField for a rule that could never act."""
    of = parameters.get("of")
    if of in (SERVER_ONLY if is_fleet else FLEET_ONLY):
        have = "a fleet has a gateway and replicas" if is_fleet else "only a fleet has it (fastdeploy fleet)"
        raise InvalidField("of", f"{of} is not here: {have}")
    call = conditions["call"]
    if call and call not in fault.calls:
        acts = f"one of {', '.join(fault.calls)}" if fault.calls else f"none: {fault.name} acts on {fault.place.value}"
        raise InvalidField("call", f"expected {acts}, got {call!r}")


def read_schedule(given: Any, is_fleet: bool) -> Schedule:
    """Return what a body or a file describes: one rule, a list of rules, or {"seed", "rules"}. Raises InvalidField."""
    seed = 0
    if isinstance(given, Mapping) and "rules" in given:
        if unknown := [name for name in given if name not in ("seed", "rules")]:
            raise InvalidField(str(unknown[0]), "expected seed and rules")
        seed, given = _seed(given.get("seed", 0)), given["rules"]
    elif isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_RULES:
        raise InvalidField("rules", f"expected one rule, or a list of 1 to {MAX_RULES} rules")
    rules = []
    for i, one in enumerate(given):
        try:
            rules.append(read_rule(one, is_fleet, seed))
        except InvalidField as error:
            if len(given) == 1:
                raise
            field = "" if error.field == "rules" else f".{error.field}"
            raise InvalidField(f"rules[{i}]{field}", error.message.removeprefix(f"{error.field}: ")) from None
    return Schedule(rules)


def read_file(path: str, is_fleet: bool) -> Schedule:
    """Return the scenario in a file, which is JSON or YAML. Raises InvalidField for the flag ``faults``."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8"
        raise InvalidField("faults", f"expected a schedule file, got {path!r}: {why}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise InvalidField("faults", f"{path}: expected JSON or YAML: {' '.join(str(error).split())}") from None
    try:
        return read_schedule(content, is_fleet)
    except InvalidField as error:
        raise InvalidField("faults", f"{path}: {error.message}") from None


def read_headers(values: Iterable[str], is_fleet: bool) -> list[Rule]:
    """Return the rules of the values of X-Fault headers: ``NAME; parameter=value; ...``, several with commas between
    them. They hold for one request. Raises InvalidField for X-Fault."""
    rules = []
    for text in [one.strip() for value in values for one in value.split(",")]:
        name, *pairs = (part.strip() for part in text.split(";"))
        given: dict[str, Any] = {"fault": name}
        try:
            find(name)
            for pair in filter(None, pairs):
                key, equals, value = (part.strip() for part in pair.partition("="))
                if not equals or key in given:
                    raise InvalidField(key, "expected NAME; parameter=value; ..., each parameter once")
                if key in ("name", "seed") or key in [c.name for c in CONDITIONS]:
                    raise InvalidField(key, "is for POST /v1/faults; a header holds for its own request")
                given[key] = value
            rules.append(read_rule(given, is_fleet))
        except InvalidField as error:
            raise InvalidField(HEADER, error.message) from None
        rules[-1].name = HEADER
    return rules


def acts_on(rule: Rule, place: Place, call: str) -> bool:
    """Return whether the fault of ``rule`` acts at this place, on this call."""
    row = rule.row
    return row.place is place and (place is not Place.CALL or call in row.calls)
