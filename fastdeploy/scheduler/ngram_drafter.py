"""Drafts without a model: what came after the same tokens before, in the request itself, in its siblings, or in other
recent requests of the same model. As many as pay, by what a wider step costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

from fastdeploy.core.request import Request
from fastdeploy.scheduler.ngram_index import LENGTHS, SLOTS, NgramIndex, Text
from fastdeploy.scheduler.step_cost import chunk_keys

MOST = 8  # drafts of one request in one step
MARGIN = 1.03  # drafts must make a step so many times faster, by tokens per second, as the cost is an estimate
# Host time of a step, and more for each request, where nothing is drafted: one core of an AMD EPYC of 2024, with
# ``benchmarks.host_time``. Steps that take less than 1 / HOST_SHARE times as long are left alone.
HOST_S, HOST_S_PER_REQUEST = 50e-6, 6e-6
HOST_SHARE = 0.02
PIECE = 128  # tokens of a prompt that are indexed together
INDEXED_PER_STEP = 512  # tokens of new prompts, which take one to two milliseconds
KEPT_PIECES = SLOTS // (len(LENGTHS) * PIECE)  # which are not indexed again. About as many fit into the index.
# The cost of a step with drafts is learned from such steps alone. So after many steps without, one has some.
PROBE_STEPS = 128
PROBED_CHANCE = 0.5  # of these drafts to be right, at least
# Numbers of drafts that are compared, as the cost of a step is known at such numbers of rows.
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Cost = Callable[[int, int, float], float]


class NgramDrafter:
    """Implements ``Drafter``. cost(rows, sampled, keys): seconds of a step of ``rows`` tokens. ``sampled`` of them have
    logits. keys: see ``chunk_keys``.

    Requests share their texts if they have the same model and the same cache_salt. New weights of a model inherit its
    texts: they write nearly the same, and requests that go on have their own text there.
    """

    def __init__(self, cost: Cost):
        self._cost = cost
        self._index = NgramIndex()
        self._texts: dict[Request, Text] = {}
        self._pieces: dict[int, None] = {}  # hashes of indexed pieces of prompts, the oldest first
        self._steps_without = 0  # since the last step with drafts

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        """See ``Drafter.draft``."""
        n = len(requests)
        if not n:
            return {}
        known = sum([request.num_tokens for request in requests])
        alone_s = self._cost(n, n, chunk_keys(known, 1))
        if alone_s * HOST_SHARE < HOST_S + HOST_S_PER_REQUEST * n:
            return {}
        self._follow(requests)
        self._steps_without += 1
        if most <= 0:
            return {}
        if self._steps_without > PROBE_STEPS:
            chosen = _within(self._predicted(requests, 1, PROBED_CHANCE)[0], most)
        else:
            chosen = self._that_pay(requests, self._seconds_by_drafts(alone_s, n, known, other_rows, most), most)
        if chosen:
            self._steps_without = 0
        return chosen

    def ended(self, request: Request) -> None:
        """See ``Drafter.ended``. All requests may end at once, so only what the last step has made is indexed."""
        text = self._texts.pop(request, None)
        if text is not None and request.num_tokens - text.indexed <= MOST + 1:
            self._index.extend(text, request.token_ids, request.num_tokens, request.num_prompt_tokens)

    def _follow(self, requests: Sequence[Request]) -> None:
        """Index the tokens that are new: output at once, of long prompts a part in each step."""
        left = INDEXED_PER_STEP
        for request in requests:
            text = self._texts.get(request)
            if text is None:
                root = hash((request.model, request.group.add.cache_salt))
                text = self._texts[request] = Text(root)
            prompt = request.num_prompt_tokens
            if text.indexed < prompt:
                left -= self._index_prompt(text, request.token_ids, prompt, left)
            if text.indexed >= prompt:
                end = min(request.num_tokens, text.indexed + max(left, MOST + 1))
                self._index.extend(text, request.token_ids, end, prompt)

    def _index_prompt(self, text: Text, tokens: list[int], prompt: int, most: int) -> int:
        """Index pieces of a prompt of ``prompt`` tokens, but those that a recent prompt had, too: samples of a group,
        turns of a conversation. Return how many tokens were indexed, at most ``most`` and the rest of a piece."""
        indexed = 0
        while text.indexed < prompt and indexed < most:
            end = min(text.indexed + PIECE, prompt)
            piece = hash((text.root, *tokens[text.indexed : end]))
            if piece in self._pieces:
                text.indexed = end
                continue
            self._pieces[piece] = None
            if len(self._pieces) > KEPT_PIECES:
                del self._pieces[next(iter(self._pieces))]
            indexed += end - text.indexed
            self._index.extend(text, tokens, end, prompt)
        return indexed

    def _predicted(
        self, requests: Sequence[Request], most: int, least_chance: float
    ) -> tuple[dict[Request, list[int]], list[list[float]]]:
        """Return what the index predicts for those of ``requests`` for which it predicts anything: at most ``most``
        tokens each, and their chances. See ``NgramIndex.predict``."""
        found: dict[Request, list[int]] = {}
        of_all: list[list[float]] = []
        for request in requests:
            room = min(most, request.num_prompt_tokens + request.max_output_tokens - request.num_tokens - 1)
            tokens, chances = self._index.predict(self._texts[request], request.token_ids, room, least_chance)
            if tokens:
                found[request] = tokens
                of_all.append(chances)
        return found, of_all

    def _that_pay(
        self, requests: Sequence[Request], seconds: Mapping[int, float], most: int
    ) -> Mapping[Request, list[int]]:
        """Return the drafts that give the most tokens per second. seconds: see ``_seconds_by_drafts``."""
        n, alone_s = len(requests), seconds[0]
        least = min((wider_s - alone_s) / k for k, wider_s in seconds.items() if k) * n / alone_s
        if least >= 1.0:
            return {}
        found, of_all = self._predicted(requests, MOST, least)
        least = _least_chance_that_pays(n, of_all, seconds)
        for (request, tokens), chances in zip(found.items(), of_all, strict=True):
            found[request] = tokens[: sum(chance >= least for chance in chances)]
        return _within(found, most)

    def _seconds_by_drafts(self, alone_s: float, n: int, known: int, other_rows: int, most: int) -> Mapping[int, float]:
        """Return the seconds that the tokens of ``n`` requests take in this step, with so many drafts. What the step
        computes for other requests takes its time in any case. alone_s: of a step of these requests alone. known:
        their tokens. A draft attends to as many as a request has, and reads none of them again."""
        rows, keys, each = n + other_rows, chunk_keys(known, 1), known / n
        step_s = self._cost(rows, n, keys)
        wider = {k: self._cost(rows + k, n + k, keys + k * each) for k in POINTS if k <= min(most, n * MOST)}
        return {0: alone_s} | {k: alone_s + s - step_s for k, s in wider.items()}


def _least_chance_that_pays(num_requests: int, of_all: list[list[float]], seconds: Mapping[int, float]) -> float:
    """Return the least chance of a draft that makes the step faster, by the expected tokens per second; above 1 if no
    draft does. of_all: chances of the drafts of each request. seconds: of a step with so many drafts."""
    ordered = sorted(chain.from_iterable(of_all), reverse=True)
    best, least = MARGIN * num_requests / seconds[0], 2.0
    expected = list(accumulate(ordered, initial=float(num_requests)))
    for k, wider in seconds.items():
        if 0 < k <= len(ordered) and expected[k] > best * wider:
            best, least = expected[k] / wider, ordered[k - 1]
    return least


def _within(drafts: Mapping[Request, list[int]], most: int) -> Mapping[Request, list[int]]:
    """Return the first ``most`` of the drafts, without requests that have none."""
    kept = {}
    for request, tokens in drafts.items():
        if tokens and most > 0:
            kept[request] = tokens[:most]
            most -= len(kept[request])
    return kept
