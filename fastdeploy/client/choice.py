"""A choice while it is generated. The choice's ids, logprobs, spans and text always end at the same token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from fastdeploy.client.detokenizer import IncrementalDecoder, StopHit, StopSearch
from fastdeploy.client.routed_rows import RoutedRows
from fastdeploy.client.tokenizer import Tokenizer
from fastdeploy.core.experts import RoutedExperts
from fastdeploy.core.outputs import Logprob, Span, clip_spans, merge_spans
from fastdeploy.inter_communicator.messages import Output


class TextOptions(NamedTuple):
    """Options of a choice. stops: stop strings. min_tokens: a stop string ends no shorter choice. prompt_only: the
    client asked for no token. The engine samples at least one, which the choice drops. detokenize: without it there is
    no text, and no stop string may be asked for. kept: special tokens whose text is not skipped."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    prompt_only: bool = False
    detokenize: bool = True
    kept: frozenset[int] = frozenset()


class ChoiceDelta(NamedTuple):
    """The part of a choice that one engine output adds. first: index of its first token in the choice."""

    first: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob]
    spans: list[Span]
    finish_reason: str | None


class Choice:
    """A choice that grows by :meth:`feed` until ``finish_reason`` is set. Without a tokenizer, or without
    ``TextOptions.detokenize``, the text stays empty.

    resumed: this many tokens at the end of ``prompt`` are output of an earlier attempt. The text includes their text,
    since a stop string or a character may begin there; ids, logprobs and spans leave them out.
    spans: a choice without output (``TextOptions.prompt_only``) has an empty span of the weights that computed its
    prompt.
    rows: collects which experts computed the tokens; None = not asked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        options: TextOptions,
        resumed: int = 0,
        rows: RoutedRows | None = None,
    ):
        self.token_ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.spans: list[Span] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.message = ""
        self.num_preempted = 0
        self._prompt_logprobs: list[Logprob] = []
        self._rows = rows
        self._num_prompt_tokens = len(prompt)
        self._options = options
        self._search = StopSearch(options.stops)
        self._longest_stop = max(map(len, options.stops), default=0)
        self._num_shown = 0  # characters that ``feed`` has returned
        self._decoder = None
        if tokenizer is not None and options.detokenize:
            fresh = len(prompt) - resumed
            self._decoder = IncrementalDecoder(tokenizer, prompt, options.skip_special_tokens, fresh, options.kept)
            self.text = self._decoder.extend(prompt[fresh:])
            self._search.push(self.text)

    @property
    def prompt_logprobs(self) -> list[Logprob] | None:
        """Logprobs of the prompt, from its second token on. None unless all are there: an abort within the prompt
        leaves a part of them, which a caller could take for the logprobs of the whole prompt."""
        complete = len(self._prompt_logprobs) == self._num_prompt_tokens - 1
        return self._prompt_logprobs if complete else None

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """Which experts computed the tokens of prompt and choice, but for the last token. None unless asked for, and if
        the choice was aborted within the prompt."""
        return None if self._rows is None else self._rows.whole(len(self.token_ids))

    def new_routed_experts(self, num_tokens: int) -> RoutedExperts | None:
        """Return what ``routed_experts`` has for the first ``num_tokens`` tokens of the choice and no call before has
        returned. None if there is nothing."""
        return None if self._rows is None else self._rows.new(num_tokens)

    def feed(self, output: Output) -> ChoiceDelta:
        """Add an output of the engine. A stop string in it ends the choice, even if the engine ended the choice for
        another reason."""
        if self._rows is not None:
            self._rows.add(output.routed)
        first = len(self.token_ids)
        self._prompt_logprobs += output.prompt_logprobs
        self.num_preempted += output.num_preempted
        if self._options.prompt_only:
            return self._feed_prompt_only(output)
        taken, hit = self._decode(output)
        if hit is None and output.finish_reason is not None:
            hit = self._finish_text(first + taken)
        if hit is not None:
            self.finish_reason, self.stop_reason = "stop", hit.stop
            self.text = self.text[: hit.cut + (len(hit.stop) if self._options.include_stop else 0)]
        elif output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.message = output.message
        ids, logprobs, spans = output.token_ids, output.logprobs, output.spans
        if taken < len(ids):
            ids, logprobs, spans = ids[:taken], logprobs[:taken], clip_spans(spans, first, first + taken)
        delta = ChoiceDelta(first, self._certain_text(), ids, logprobs, spans, self.finish_reason)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        merge_spans(self.spans, delta.spans)
        return delta

    def _feed_prompt_only(self, output: Output) -> ChoiceDelta:
        """Drop the tokens of ``output``, and note the weights that sampled the last one."""
        if output.spans:
            self.spans = [replace(output.spans[-1], start=0, end=0)]
        self.finish_reason = "length" if output.finish_reason == "stop" else output.finish_reason
        self.message = output.message
        if self.finish_reason == "error":
            self.stop_reason = output.stop_reason
        return ChoiceDelta(0, "", [], [], list(self.spans), self.finish_reason)

    def _decode(self, output: Output) -> tuple[int, StopHit | None]:
        """Decode until a stop string is complete. Return the number of tokens taken, and the stop string found."""
        if self._decoder is None:
            return len(output.token_ids), None
        # A stop or EOS id that ended the choice is one of its tokens, and adds no text.
        hidden = output.finish_reason == "stop" and not self._options.include_stop
        shown = len(output.token_ids) - (1 if hidden else 0)
        if not self._options.stops:
            ids = output.token_ids
            self.text += self._decoder.push(ids[0]) if shown == 1 else self._decoder.extend(ids[:shown])
            return len(output.token_ids), None
        for i, token_id in enumerate(output.token_ids[:shown]):
            enough = len(self.token_ids) + i + 1 >= self._options.min_tokens
            new = self._decoder.push(token_id) or (self._held_stop() if enough else "")
            self.text += new
            if (hit := self._search.push(new)) and enough:
                return i + 1, hit
        return len(output.token_ids), None

    def _finish_text(self, num_tokens: int) -> StopHit | None:
        """Add the text that the decoder holds back, since no token follows. Return the stop string in it."""
        if self._decoder is None:
            return None
        self.text += (rest := self._decoder.rest())
        hit = self._search.push(rest)
        return hit if num_tokens >= self._options.min_tokens else None

    def _held_stop(self) -> str:
        """Return the text that the decoder holds back if it completes a stop string, else "". The text of byte tokens
        is certain only behind them, but a stop string ends the choice at the token that completes it."""
        stops, decoder = self._options.stops, self._decoder
        if decoder is None or not stops or not (run := decoder.run_end(self._longest_stop)):
            return ""
        before = self.text[-self._longest_stop :]
        # The second test decodes. It is made only if the first one holds.
        return rest if (before + run).endswith(stops) and (before + (rest := decoder.rest())).endswith(stops) else ""

    def _certain_text(self) -> str:
        """Return the new text, without an end that may become a stop string."""
        end = len(self.text)
        if self.finish_reason is None:
            end -= self._search.held_back
        start, self._num_shown = self._num_shown, max(end, self._num_shown)
        return self.text[start : self._num_shown]


def pieces(output: Output, size: int) -> Sequence[Output]:
    """Split ``output`` into outputs of at most ``size`` tokens each."""
    total = len(output.token_ids)
    if total <= size:
        return (output,)
    parts = []
    base = output.spans[0].start if output.spans else 0
    for start in range(0, total, size):
        end = min(start + size, total)
        ids, logprobs = output.token_ids[start:end], output.logprobs[start:end]
        spans = clip_spans(output.spans, base + start, base + end)
        piece = replace(output, token_ids=ids, logprobs=logprobs, spans=spans)
        if start > 0:
            piece = replace(piece, prompt_logprobs=[], cached_tokens=0, num_preempted=0, routed=b"")
        if end < total:
            piece = replace(piece, finish_reason=None, stop_reason=None, message="")
        parts.append(piece)
    return parts


def joined(deltas: list[ChoiceDelta]) -> ChoiceDelta | None:
    """Join consecutive deltas of one choice. None for no deltas."""
    if len(deltas) < 2:
        return deltas[0] if deltas else None
    spans: list[Span] = []
    for delta in deltas:
        merge_spans(spans, delta.spans)
    return ChoiceDelta(
        deltas[0].first,
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        [entry for delta in deltas for entry in delta.logprobs],
        spans,
        deltas[-1].finish_reason,
    )
