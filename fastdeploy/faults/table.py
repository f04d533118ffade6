"""The table of all faults: the reader of headers, bodies and files, ``GET /v1/faults`` and docs/faults.md follow it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fastdeploy.core.errors import InvalidField
from fastdeploy.inter_communicator import messages as m

Value = int | float | str
FOREVER = 86_400.0  # seconds; the longest time of a fault


class Parameter(NamedTuple):
    """A parameter of a fault or of a rule. Its type is that of the default. low, high: bounds of a number, inclusive.
    choices: the only values; none = any."""

    name: str
    default: Value
    about: str
    low: float = 0
    high: float = FOREVER
    choices: tuple[Value, ...] = ()

    @property
    def expected(self) -> str:
        """What a value must be, for messages and for the docs."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if isinstance(self.default, str):
            return "text"
        return f"{'an integer' if type(self.default) is int else 'a number'} from {self.low:g} to {self.high:g}"

    def read(self, given: Any) -> Value:
        """Return ``given``, a value of JSON or the text of a header. Raises InvalidField."""
        kind = type(self.default)
        value = given
        if isinstance(given, str) and kind is not str:
            try:
                value = kind(given)
            except ValueError:
                value = None
        elif kind is float and type(given) is int:
            value = float(given)
        fits = type(value) is kind
        if fits and self.choices:
            fits = value in self.choices
        elif fits and kind is not str:
            fits = self.low <= value <= self.high  # not for NaN
        if not fits:
            raise InvalidField(self.name, f"expected {self.expected}, got {given!r}")
        return value

    def describe(self) -> dict[str, Any]:
        """Return this parameter as JSON."""
        return {"name": self.name, "default": self.default, "expected": self.expected, "about": self.about}


class Place(enum.Enum):
    """Where a fault acts. HTTP: on the answer to a POST request, whatever its route. REQUEST: on a request for tokens,
    of any dialect. CALL: on a control call, of any dialect."""

    HTTP = "any POST request"
    REQUEST = "a request for tokens"
    CALL = "a control call"


# The control calls that faults act on, by the names that ``call`` of a rule has.
CALLS: Mapping[str, type[m.Args]] = {
    "pause": m.PauseArgs,
    "resume": m.ResumeArgs,
    "update": m.UpdateWeightsArgs,
    "begin": m.BeginUpdateArgs,
    "chunk": m.UpdatePartArgs,
    "commit": m.CommitUpdateArgs,
    "set_version": m.SetVersionArgs,
    "reset_cache": m.ResetCacheArgs,
    "abort_requests": m.AbortArgs,
    "sleep": m.SleepArgs,
    "wakeup": m.WakeArgs,
    "load_adapter": m.LoadAdapterArgs,
}
ALL_CALLS, TENSOR_CALLS, COMMITS = tuple(CALLS), ("update", "chunk"), ("update", "commit")


class Fault(NamedTuple):
    """A row of the table. about: what happens. seen: what the client sees. replays: a defect that happened elsewhere.
    calls: those that it acts on, for Place.CALL. fleet_only: values of ``of`` that only ``fastdeploy fleet`` has."""

    name: str
    place: Place
    about: str
    seen: str
    parameters: tuple[Parameter, ...] = ()
    calls: tuple[str, ...] = ()
    replays: str = ""

    @property
    def where(self) -> str:
        """Where it acts, in words."""
        return f"{self.place.value}: {', '.join(self.calls)}" if self.calls else self.place.value

    def describe(self) -> dict[str, Any]:
        """Return this row as JSON."""
        return {
            "fault": self.name,
            "acts_on": self.where,
            "about": self.about,
            "seen": self.seen,
            "parameters": [parameter.describe() for parameter in self.parameters],
            "replays": self.replays,
        }


WHEN = Parameter(
    "when",
    "between",
    "before the first token, between two tokens, or in the middle of one: the next token is made and does not arrive, "
    "or half of its event does",
    choices=("before", "between", "middle"),
)
TOKENS = Parameter("tokens", 1, "tokens, of all choices, that the client has then; not with when=before", 0, 1e6)
TENSORS = Parameter("tensors", "*", "names of tensors, as a pattern of shells")
DEATHS = ("engine", "api_server", "replica", "gateway")
OF = Parameter("of", "engine", "what dies; a fleet has replicas and a gateway, a server an API server", choices=DEATHS)

R, C = Place.REQUEST, Place.CALL
FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "death",
            R,
            "a process is killed (SIGKILL) while the request runs",
            "engine: 503 engine_dead with the tokens so far, or an error event; of a fleet: nothing, the request goes "
            "on at another replica. API server, gateway: the connection breaks",
            (OF, WHEN, TOKENS),
            replays="a worker that runs out of memory in a rollout",
        ),
        Fault(
            "death_in_call",
            C,
            "a process is killed before the call reaches the engine, or after the engine has done it",
            "engine: 503 engine_dead. API server, gateway: the connection breaks without an answer",
            (OF, Parameter("when", "before", "before or after the call is done", choices=("before", "after"))),
            ALL_CALLS,
            "a server that dies in a weight sync",
        ),
        Fault(
            "stream_cut",
            R,
            "the connection is closed while the answer is sent; the engine is told that the client left",
            "a stream without its end; without stream: no answer, or with when=middle the first half of it",
            (WHEN, TOKENS),
            replays="a proxy with a time limit",
        ),
        Fault(
            "stream_stalled",
            R,
            "no byte is sent for some seconds, not even a comment; then the answer goes on",
            "silence, and then all tokens",
            (TOKENS, Parameter("seconds", 30.0, "of silence; 0 = until the client leaves or the rule is disarmed")),
            replays="a dead connection that nobody closes",
        ),
        Fault(
            "slow_tokens",
            R,
            "each token is held back",
            "one token at a time, late",
            (Parameter("seconds", 0.2, "between two tokens"),),
            replays="stragglers that hold up a batch",
        ),
        Fault(
            "frozen",
            R,
            "processes are stopped (SIGSTOP) and go on after some seconds, as on a virtual machine that was suspended",
            "silence; after --stall-s an engine is taken for stuck and killed: 504 engine_stalled",
            (
                Parameter("of", "engine", "the engine, or all processes of the server", choices=("engine", "server")),
                TOKENS,
                Parameter("seconds", 1.0, "until they go on", 0.01),
            ),
            replays="a suspended virtual machine",
        ),
        Fault(
            "version_wrong",
            R,
            "the tokens carry a wrong label of their weights",
            "weight_versions with another version or weight_epoch than the weights have",
            (
                Parameter("label", "wrong", "the version that is shown"),
                Parameter("epochs", 0, "added to weight_epoch", -1e6, 1e6),
            ),
            replays="a version that is read when the reply is made, not when the token was",
        ),
        Fault(
            "logprobs_wrong",
            R,
            "the log probabilities of the tokens are wrong, the tokens are not",
            "logprobs that no distribution of the model has",
            (Parameter("add", -0.5, "added to each, as a natural logarithm", -100, 100),),
            replays="log probabilities of another temperature",
        ),
        Fault(
            "http_error",
            Place.HTTP,
            "the request is refused; times makes a burst of it",
            "the status, as JSON, with Retry-After as the server has it: 1 with 429, 2 with 503",
            (
                Parameter("status", 503, "of the answer", choices=(429, 500, 502, 503, 504)),
                Parameter("retry_after", -1, "seconds in Retry-After; -1 = those of the status", -1, 3600),
            ),
            replays="an overloaded or restarting server",
        ),
        Fault(
            "reply_lost",
            Place.HTTP,
            "the request is done, and the connection is closed in place of its answer",
            "a broken connection; a request that is sent again is done twice",
        ),
        Fault(
            "replies_reordered",
            Place.HTTP,
            "the answer waits until later requests have been answered",
            "answers in another order than the requests",
            (
                Parameter("replies", 1, "to later requests that come first", 1, 10_000),
                Parameter("seconds", 5.0, "after which the answer waits no more"),
            ),
            replays="results that are matched by their order",
        ),
        Fault(
            "clock_jump",
            Place.HTTP,
            "the wall clock of a process jumps, until the faults are disarmed",
            "times (created, deadlines of running requests) of another hour",
            (
                Parameter("of", "engine", "whose clock", choices=("engine", "api_server")),
                Parameter("seconds", 3600.0, "of the jump, back if negative", -1e9, 1e9),
            ),
            replays="a clock that is set in a run",
        ),
        Fault(
            "pause_hangs",
            C,
            "the pause gets no answer for some seconds, and is not begun before",
            "no answer; a client that gives up does not know whether the engine is paused",
            (Parameter("seconds", 60.0, "until the pause goes on; 0 = until the rule is disarmed"),),
            ("pause",),
            "a pause whose reply slot was overwritten",
        ),
        Fault(
            "pause_times_out",
            C,
            "the pause fails, and nothing is paused",
            "504 pause_timeout",
            (Parameter("seconds", 0.0, "until it fails"),),
            ("pause",),
        ),
        Fault(
            "pause_acknowledged_early",
            C,
            "the pause is answered before the engine is quiet: while it drains, or though it is not paused at all",
            "200 and is_paused: true, while tokens go on; /v1/is_paused tells the truth",
            (
                Parameter(
                    "how", "draining", "the pause goes on unseen, or is never made", choices=("draining", "never")
                ),
            ),
            ("pause",),
            "a pause that says success and has drained nothing",
        ),
        Fault(
            "sync_fails_half_way",
            C,
            "half of the tensors of the update or chunk are committed under the old version, and the call fails. An "
            "open weight session ends",
            "500 engine_error; the weights are neither the old ones nor the new ones",
            calls=TENSOR_CALLS,
            replays="NeMo-RL#2444: a failed sync leaves weights partly advanced",
        ),
        Fault(
            "chunk_dropped",
            C,
            "the tensors of the call are replaced by those that serve, so none of them changes",
            "success, and stale tensors under the new version",
            calls=TENSOR_CALLS,
            replays="a bucket that is lost on its way",
        ),
        Fault(
            "chunk_doubled",
            C,
            "the call is made twice",
            "an update: weight_epoch rises by 2. A chunk: what the engine says to the second one",
            calls=TENSOR_CALLS,
            replays="a retry of a call that had succeeded",
        ),
        Fault(
            "bits_flipped",
            C,
            "bits of tensors are flipped, at places that the seed chooses",
            "success, and values that are wrong",
            (TENSORS, Parameter("bits", 1, "in each of these tensors", 1, 1_000_000)),
            TENSOR_CALLS,
            "a broken transfer",
        ),
        Fault(
            "tensors_stale",
            C,
            "some tensors keep the values that serve",
            "success, and stale tensors under the new version",
            (TENSORS,),
            TENSOR_CALLS,
            "SkyRL#1680: experts are stale after the first sync (tensors=*.experts.*)",
        ),
        Fault(
            "tensors_transposed",
            C,
            "some matrices are transposed, in the shape that they had",
            "success, and weights that are wrong",
            (TENSORS,),
            TENSOR_CALLS,
            "a loader that mistakes the orientation",
        ),
        Fault(
            "tensors_scaled",
            C,
            "some tensors are multiplied by a number",
            "success, and weights that are wrong",
            (TENSORS, Parameter("factor", 2.0, "of each value", -1e6, 1e6)),
            TENSOR_CALLS,
            "a wrong scale of quantized weights",
        ),
        Fault(
            "kv_kept",
            C,
            "the engine keeps KV of the old weights against the rules: new requests find cached prefixes of them, and "
            "kv=recompute recomputes nothing. A clear of the cache is answered, and not made",
            "success, cached_tokens above 0 after the update, and tokens that the new weights would not give",
            calls=(*COMMITS, "reset_cache"),
            replays="NeMo-RL#4018: prefix KV that is 17 steps old",
        ),
    )
}


def find(name: Any, field: str = "fault") -> Fault:
    """Return the row of a fault. Raises InvalidField, with the names of all faults."""
    if not isinstance(name, str) or name not in FAULTS:
        raise InvalidField(field, f"expected one of {', '.join(FAULTS)}, got {name!r}")
    return FAULTS[name]


def read_parameters(
    declared: Iterable[Parameter], given: Mapping[str, Any], known: Iterable[str] = ()
) -> dict[str, Value]:
    """Return the values of all ``declared`` parameters. known: further names that ``given`` may have. Raises
    InvalidField for a wrong value, and for a name that is not known."""
    parameters = {parameter.name: parameter for parameter in declared}
    names = [*parameters, *known]
    if unknown := [name for name in given if name not in names]:
        raise InvalidField(unknown[0], f"expected one of {', '.join(names) or 'no parameter'}")
    return {name: p.read(given[name]) if name in given else p.default for name, p in parameters.items()}
