"""Drafts without a model: what came after the same tokens before, in the request itself, in its siblings, or in other
recent requests of the same model. As many as pay, by what a wider step costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain

from fastdeploy.core.request import Request
from fastdeploy.scheduler.ngram_index import NgramIndex, Text

MOST = 8  # drafts of one request in one step
MARGIN = 1.03  # drafts must make a step so many times faster, by tokens per second, as the cost is an estimate
INDEXED_PER_STEP = 512  # tokens of new prompts, which take about a millisecond
KEPT_PROMPTS = 4096  # whose tokens are not indexed again
# Numbers of drafts that are compared, as the cost of a step is known at such numbers of rows.
POINTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)

Cost = Callable[[int, int, float], float]


class NgramDrafter:
    """Implements ``Drafter``. cost(rows, sampled, keys): seconds of a step of ``rows`` tokens. ``sampled`` of them have
    logits. keys: the tokens that each row attends to, summed over the rows.

    Requests share their texts if they have the same model and the same cache_salt. New weights of a model inherit its
    texts: they write nearly the same, and requests that go on have their own text there.
    """

    def __init__(self, cost: Cost):
        self._cost = cost
        self._index = NgramIndex()
        self._texts: dict[Request, Text] = {}
        self._prompts: dict[tuple[int, int], None] = {}  # indexed ones, the oldest first

    def draft(self, requests: Sequence[Request], other_rows: int, most: int) -> Mapping[Request, list[int]]:
        """See ``Drafter.draft``."""
        self._follow(requests)
        if not requests or most <= 0:
            return {}
        seconds = self._seconds_by_drafts(requests, other_rows, most)
        alone = seconds[0]
        least = min((wider - alone) / k for k, wider in seconds.items() if k) * len(requests)
        if alone <= 0.0 or least >= alone:
            return {}
        found: dict[Request, list[int]] = {}
        of_all: list[list[float]] = []
        for request in requests:
            room = min(MOST, request.num_prompt_tokens + request.max_output_tokens - request.num_tokens - 1)
            tokens, chances = self._index.predict(self._texts[request], request.token_ids, room, least / alone)
            if tokens:
                found[request] = tokens
                of_all.append(chances)
        least_chance = _least_chance_that_pays(len(requests), of_all, seconds)
        for (request, tokens), chances in zip(found.items(), of_all, strict=True):
            found[request] = tokens[: sum(chance >= least_chance for chance in chances)]
        return _within(found, most)

    def ended(self, request: Request) -> None:
        """See ``Drafter.ended``."""
        text = self._texts.pop(request, None)
        if text is not None and request.num_tokens - text.indexed <= INDEXED_PER_STEP:
            self._index.extend(text, request.token_ids, request.num_tokens, request.num_prompt_tokens)

    def _follow(self, requests: Sequence[Request]) -> None:
        """Index the tokens that are new, of long prompts a part in each step."""
        left = INDEXED_PER_STEP
        for request in requests:
            text = self._texts.get(request)
            if text is None:
                text = self._texts[request] = self._new_text(request)
            end = min(request.num_tokens, text.indexed + max(left, 0))
            left -= end - text.indexed
            self._index.extend(text, request.token_ids, end, request.num_prompt_tokens)

    def _new_text(self, request: Request) -> Text:
        root = hash((request.model, request.group.add.cache_salt))
        prompt = (root, request.prompt_key)
        if prompt in self._prompts:
            return Text(root, request.num_prompt_tokens)
        self._prompts[prompt] = None
        if len(self._prompts) > KEPT_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return Text(root, 0)

    def _seconds_by_drafts(self, requests: Sequence[Request], other_rows: int, most: int) -> dict[int, float]:
        """Return the seconds that the tokens of ``requests`` take in this step, with so many drafts. What the step
        computes for other requests takes its time in any case."""
        n = len(requests)
        keys = sum([request.num_tokens for request in requests]) / n
        step_s, alone_s = self._cost(n + other_rows, n, n * keys), self._cost(n, n, n * keys)
        wider = {k: self._cost(n + other_rows + k, n + k, (n + k) * keys) for k in POINTS if k <= min(most, n * MOST)}
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
