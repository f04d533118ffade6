"""Fields of a request. HTTP bodies, the offline LLM and the message to the engine take fields and limits from here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from fastdeploy.core.errors import ContextLengthExceeded, InvalidField
from fastdeploy.core.sampling_params import MAX_INT32, SamplingParams, check_limits, check_vocabulary

MAX_N = 1024
DAY_S = 86400.0


class RequestFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Settings of a request, beside its prompt and the parameters of sampling.

    n: choices. They share the prompt, and are paused and aborted together.
    priority: smaller goes first.
    cache_salt: KV is shared only between requests with the same salt.
    first_choice: number of the first choice. Random numbers depend on it. Choices are numbered over all prompts of an
        HTTP request, so that equal prompts get different tokens. A choice that is resubmitted alone keeps its number.
    resumed_tokens: this many tokens at the end of the prompt are output of an earlier attempt. Penalties and stop
        strings count them as output, and the text of the answer begins with theirs. max_tokens and min_tokens do not
        count them.
    deadline_s: seconds after its arrival at which the request ends with the tokens that it has: reason "abort",
        stop_reason "deadline".
    max_queue_s: seconds that it may wait for its first step: reason "abort", stop_reason "queue_timeout".
    session: requests of one session go to one replica of a fleet, which has their common beginning cached. "" = none.
        An engine uses it only to abort all requests of a session.
    stale_ok: the answer may come from older weights than an earlier answer of its session. An engine ignores it.
    retain_s: the request runs on when its client disconnects, and its result is kept for so many seconds after its end.
        A request with the same id and body attaches to it, and gets every output from the first. Needs a request_id.
    """

    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    priority: Annotated[int, Meta(ge=-MAX_INT32 - 1, le=MAX_INT32)] = 0
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    first_choice: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    resumed_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    deadline_s: Annotated[float, Meta(gt=0, le=31 * DAY_S)] | None = None
    max_queue_s: Annotated[float, Meta(gt=0, le=31 * DAY_S)] | None = None
    session: Annotated[str, Meta(max_length=256)] = ""
    stale_ok: bool = False
    retain_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0

    def check_fields(self) -> None:
        """Raise InvalidField naming the first field that is out of its limits."""
        check_limits(self, RequestFields)


MAX_REQUEST_ID_CHARS = 512
PART = "\u241f"  # "␟", the symbol for a unit separator: in ids that are made of a client's id, and in no id of a client
REQUEST_ID = f"^[^{PART}]*$"  # a regular expression for ids of clients


def part_id(request_id: str, part: int | str) -> str:
    """Return the id of a part of a client's request for the engine. No client can have a request of this name."""
    return f"{request_id}{PART}{part}"


# Fields that change no token of the answer, only when the answer comes or ends.
TIMING = frozenset({"priority", "deadline_s", "max_queue_s", "retain_s", "session", "stale_ok"})


class AddRequest(RequestFields, frozen=True, tag=True, omit_defaults=True):
    """Message to the engine: one prompt with its n choices.

    The answer is one Output with ``finish_reason`` per choice, or one Rejected for all.

    request_id: the id in all messages, which the engine never changes. The client knows it if ``group`` is empty.
        Otherwise it is that of a part, see part_id.
    arrival: time.time() at the API server; 0 = the engine's own time.
    group: the id that the client knows, if one HTTP request became several AddRequest: one for each prompt, or one for
        each choice that goes on at another replica. Aborting a group aborts all of its members. "" = the request_id.
    fingerprint: of the HTTP body, if retain_s is set. The rest of such a request, which goes on at another engine, has
        it without retain_s.
    recomputes_lost: a result that was lost with an earlier engine is computed again, and not refused. A gateway says
        so, since its requests have seeds: under the same weights the tokens are the same.
    session_began: time.time() at which the first request of its session came to the gateway of a fleet. The request
        takes its place in the queue by this time. 0 = by its own arrival at the engine.
    expected_cached: tokens of the prompt that the gateway of a fleet expects to be cached at this engine, which counts
        the others when it tells its load. Nothing else depends on it.
    adapter: name of the adapter that computes the request; "" = the base model.
    output_interval_s: seconds between the outputs of a choice behind its first one: for a client that shows no token
        before the end. 0 = each step sends its tokens. Nothing is held back from a fence or from a final output.
    survives_aborts: the request ends only if it is named: by its id or by its session. To it, a pause of mode abort is
        one of mode keep, it may arrive during a pause that rejects requests, and an abort of all requests or a reset
        lets it go on.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    group: str = ""
    fingerprint: str = ""
    recomputes_lost: bool = False
    session_began: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    expected_cached: Annotated[int, Meta(ge=0, le=MAX_INT32)] = 0
    adapter: str = ""
    output_interval_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0
    survives_aborts: bool = False


def check_prompt(ids: Sequence[int], max_model_len: int, vocab_size: int, field: str = "prompt") -> None:
    """Raise InvalidField for ``field`` unless ``ids`` is a prompt of this model, and ContextLengthExceeded unless it
    leaves room for one token of output."""
    if not ids:
        raise InvalidField(field, "expected at least one token")
    check_room(len(ids), 1, max_model_len, field)
    check_vocabulary(ids, vocab_size, field)


def check_room(prompt_tokens: int, output_tokens: int, max_model_len: int, field: str) -> None:
    """Raise ContextLengthExceeded, for ``field``, unless the prompt leaves room for so many tokens of output."""
    if prompt_tokens + output_tokens > max_model_len:
        asked = f"a prompt of {prompt_tokens} tokens, and room for at least {output_tokens} of output"
        raise ContextLengthExceeded(field, max_model_len, asked)
