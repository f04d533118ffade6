"""What a client asks of the engine for one prompt."""

from __future__ import annotations

import msgspec

from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.scope import WHOLE_ENGINE


class AddRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All n choices of one request: they share the prompt and are admitted, paused and aborted together.

    request_id: the id that the client knows; the engine never renames it. arrival: time.time() at the HTTP door.
    seed_base: position of the first output token is len(prompt_token_ids), absolute in the sequence.
    group: the id that the client knows, where one HTTP request with several prompts became several of these ("" = the
    request_id itself); aborting a group aborts all of its members.
    first_choice: number of the first choice, for the random numbers. Choices are numbered over all prompts of an HTTP
    request, so that equal prompts draw apart; a choice that is resubmitted alone keeps its number.
    resumed_tokens: so many tokens at the end of the prompt are output of an earlier attempt: penalties count them so.
    deadline: time.time() at which it ends with what it has; max_queue_s: longest wait for its first step. Either ends
    it with reason "abort" and the stop_reason "deadline" or "queue_timeout".
    retain_s: if its client goes it runs on, and is kept for so long after its end; a request with the same id and
    ``fingerprint`` (of the body) attaches to it and gets every output from the first.
    scope: id of the scope that the request belongs to: it is paused with that scope, and computed by its weights.
    Answered by one Output per choice that has ``finish_reason``, or by one Rejected for all.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    group: str = ""
    first_choice: int = 0
    resumed_tokens: int = 0
    deadline: float | None = None
    max_queue_s: float | None = None
    retain_s: float = 0.0
    fingerprint: str = ""
    scope: str = WHOLE_ENGINE
