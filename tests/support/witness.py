"""Compares every message that the clients of a harness receive with an undisturbed run of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fastdeploy.core.errors import NonFiniteLogits
from fastdeploy.core.outputs import Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import WHOLE_ENGINE, adapter_scope
from fastdeploy.inter_communicator import messages as m
from support.adapter_book import AdapterBook
from support.fake_runner import EOS, next_token, row_of
from support.harness import Harness


@dataclass
class Expected:
    """One choice of an accepted request. began_with: (weight_epoch, adapter_epoch) when the request was sent. adapter:
    lora_int_id; 0 = the base model. closing: its client has cancelled it, so that at most an abort handled before the
    cancel is still answered. closed: its client expects no more outputs, or is dead."""

    add: AddRequest
    limit: int  # of output tokens
    adapter: int
    began_with: tuple[int, int]
    tokens: list[int] = field(default_factory=list)
    epochs: list[tuple[int, int]] = field(default_factory=list)  # (weight_epoch, adapter_epoch) of each token
    num_rows: int = 0  # that its client has, see core/experts.py
    reason: str | None = None
    closing: bool = False
    closed: bool = False

    @property
    def open(self) -> bool:
        return self.reason is None and not self.closed


class Witness:
    """Follows all clients of one harness from now on. weights, versions: by weight_epoch; a test that updates weights
    sets both. Every round is followed by one ``look``."""

    def __init__(self, harness: Harness):
        self.h = harness
        self.book = AdapterBook(harness.engine.adapters)
        self.weights = {0: 0}
        self.versions = {0: "0"}
        self.streams: dict[tuple[str, str, int], Expected] = {}
        self.undecided: list[tuple[str, AddRequest, int]] = []
        self.calls: dict[tuple[str, int], m.Args] = {}
        self.replies: list[tuple[m.Args, m.Reply]] = []
        self.dropped: set[str] = set()
        self.aborting: set[str] = set()  # scopes that a pause may have aborted, and names in abort calls
        self.num_tokens = Counter[str]()  # by adapter name; "" = the base model
        self._read = {client: len(sent) for client, sent in harness.transport.sent.items()}

    # ---------------------------------------------------------------- what the clients did

    def added(self, client: str, add: AddRequest) -> None:
        self.undecided.append((client, add, self.h.served.weight_epoch))

    def called(self, client: str, call_id: int, args: m.Args) -> None:
        self.calls[client, call_id] = args
        match args:
            case m.PauseArgs(scope=scope) if "abort" in (args.mode, args.on_timeout):
                self.aborting.add(scope)
            case m.SleepArgs(mode="abort"):
                self.aborting.add(WHOLE_ENGINE)
            case m.AbortArgs(lora_name=name):
                self.aborting.add(f"by request: {name}")

    def cancelled(self, client: str, request_id: str, choice: int | None) -> None:
        for (owner, rid, index), stream in self.streams.items():
            if (owner, rid) == (client, request_id) and choice in (None, index):
                stream.closing = True

    def lost(self, client: str) -> None:
        """Expect nothing more for a client that died or that the engine dropped."""
        self.dropped.add(client)
        self.undecided = [x for x in self.undecided if x[0] != client]
        self.calls = {key: args for key, args in self.calls.items() if key[0] != client}
        for (owner, _, _), stream in self.streams.items():
            stream.closed |= owner == client

    # ---------------------------------------------------------------- what they saw

    def look(self) -> int:
        """Check every new message, and return the number of new tokens."""
        known = self.book.known  # when the round began: its messages were handled before new adapters were taken
        self._accept(known)
        self.book.look()
        count = 0
        for client, sent in self.h.transport.sent.items():
            start, self._read[client] = self._read.get(client, 0), len(sent)
            for message in sent[start:]:
                if isinstance(message, m.Outputs):
                    count += sum(self._output(client, output) for output in message.outputs)
                elif isinstance(message, m.Rejected):
                    self._rejected(message)
                elif isinstance(message, m.Reply):
                    args = self.calls.pop((client, message.call_id))  # KeyError: answered twice, or never asked
                    self.replies.append((args, message))
                elif isinstance(message, m.Goodbye) and client not in self.dropped:
                    self.lost(client)
        for stream in self.streams.values():
            stream.closed |= stream.closing
        return count

    def _accept(self, known: dict[str, int]) -> None:
        """Expect streams for all requests that were sent and not rejected: the engine has handled them. known: the
        adapters, by name."""
        rejected = {
            (client, message.request_id)
            for client, sent in self.h.transport.sent.items()
            for message in sent[self._read.get(client, 0) :]
            if isinstance(message, m.Rejected)
        }
        for client, add, sent_epoch in self.undecided:
            if (client, add.request_id) in rejected:
                continue
            adapter = known[add.adapter] if add.adapter else 0  # KeyError: accepted, but unknown
            limit = min(add.sampling.max_tokens, self.h.runner.info.max_model_len - len(add.prompt_token_ids))
            for choice in range(add.n):
                key = client, add.request_id, choice
                assert key not in self.streams or not self.streams[key].open, f"{key} was accepted while alive"
                self.streams[key] = Expected(add, limit, adapter, (sent_epoch, self.book.epochs.get(adapter, 0)))
        self.undecided = []

    def _rejected(self, message: m.Rejected) -> None:
        codes = ("rejecting_new_requests", "duplicate_request_id", "queue_full", "model_not_found")
        assert message.failure.code in codes, message

    def _output(self, client: str, output: m.Output) -> int:
        stream = self.streams[client, output.request_id, output.choice]
        where = f"{client} {output.request_id}[{output.choice}] at {len(stream.tokens)}"
        assert stream.open, f"{where}: an output after its end"
        assert not stream.closing or output.finish_reason == "abort", f"{where}: an output after it was cancelled"
        sampling = stream.add.sampling
        spans = [span for span in output.spans for _ in range(span.start, span.end)]
        assert len(spans) == len(output.token_ids), where
        if sampling.logprobs is None:
            assert not output.logprobs, where
        else:
            assert [x.logprob for x in output.logprobs] == [-float(t) for t in output.token_ids], where
        for token, span in zip(output.token_ids, spans, strict=True):
            self._token(stream, token, span, where)
        self._rows(stream, output.routed, where)
        self._end(stream, output, where)
        return len(output.token_ids)

    def _token(self, stream: Expected, token: int, span: Span, where: str) -> None:
        sampling = stream.add.sampling
        at = len(stream.tokens)
        assert span.start <= at < span.end, f"{where}: {span}"
        epochs = self.h.served.weight_epoch, self.book.epochs.get(stream.adapter, 0)
        assert (span.weight_epoch, span.adapter_epoch) == epochs, f"{where}: {span}"
        version, content = self.versions[span.weight_epoch], 0
        if stream.adapter:
            content, version = self.book.loaded[span.adapter, span.adapter_epoch]
        assert (span.version, span.adapter) == (version, stream.add.adapter), f"{where}: {span}"
        if span.recomputed:
            # Perhaps only the KV of the prompt was of earlier weights, and was lost after the first token.
            assert stream.epochs and stream.began_with != epochs, f"{where}: no old KV was lost"
        banned = (EOS, *sampling.stop_token_ids) if at < sampling.min_tokens else ()
        so_far = stream.add.prompt_token_ids + stream.tokens
        weights, vocab = self.weights[span.weight_epoch], self.h.runner.info.vocab_size
        expected = next_token(so_far, weights, vocab, banned, content)
        assert token == expected, f"{where}: {token} where an undisturbed run has {expected}"
        assert not (stream.tokens and ends(sampling, stream.tokens[-1])), f"{where}: a token after the last one"
        assert at < stream.limit, f"{where}: more than max_tokens"
        stream.tokens.append(token)
        stream.epochs.append(epochs)
        self.num_tokens[stream.add.adapter] += 1

    def _rows(self, stream: Expected, routed: bytes, where: str) -> None:
        """Expect the rows of all tokens before the last one, once each, as the token behind them was sampled with."""
        add, info = stream.add, self.h.runner.info.experts
        if not add.sampling.routed_experts or not stream.tokens:
            assert not routed, f"{where}: rows that nobody has asked for"
            return
        known = add.prompt_token_ids + stream.tokens
        first = add.sampling.routed_experts_start + stream.num_rows
        assert len(routed) == (len(known) - 1 - first) * info.row_bytes, f"{where}: rows are missing, or come twice"
        for i, position in enumerate(range(first, len(known) - 1)):
            row = routed[i * info.row_bytes : (i + 1) * info.row_bytes]
            sampled = max(position + 1 - len(add.prompt_token_ids), 0)  # a token with the KV of this position
            # Only the KV of a prompt may be older: it was computed since the request came.
            since = stream.epochs[sampled] if position >= len(add.prompt_token_ids) else stream.began_with
            models = self._models(add.adapter, since, stream.epochs[sampled])
            possible = [row_of(known[: position + 1], info, *model) for model in models]
            assert row in possible, f"{where}: a wrong row at position {position}"
        stream.num_rows += len(known) - 1 - first

    def _models(self, adapter: str, since: tuple[int, int], until: tuple[int, int]) -> set[tuple[int, int]]:
        """Return the weights and the contents of the adapter that served between two pairs of epochs."""
        weights = {w for epoch, w in self.weights.items() if since[0] <= epoch <= until[0]}
        contents = {
            content for (name, epoch), (content, _) in self.book.loaded.items()
            if name == adapter and since[1] <= epoch <= until[1]
        }  # fmt: skip
        return {(w, content) for w in weights for content in (contents if adapter else {0})}

    def _end(self, stream: Expected, output: m.Output, where: str) -> None:
        last = stream.tokens[-1] if output.token_ids else None
        stop = last is not None and ends(stream.add.sampling, last)
        if stop:
            assert output.finish_reason == "stop", where
            assert output.stop_reason == (last if last in stream.add.sampling.stop_token_ids else None), where
        elif last is not None and len(stream.tokens) == stream.limit:
            assert output.finish_reason == "length", where
        else:
            assert output.finish_reason in (None, "abort", "error") and output.token_ids or output.finish_reason, where
            assert output.finish_reason not in ("stop", "length"), where
        if output.stop_reason == NonFiniteLogits.code:
            known = stream.add.prompt_token_ids + stream.tokens
            assert output.finish_reason == "error" and not self.h.runner.poison.isdisjoint(known), where
        name = stream.add.adapter
        if "paused by hold" in output.message or "drain timed out" in output.message:
            assert {WHOLE_ENGINE, adapter_scope(name or None)} & self.aborting, f"{where}: {output.message}"
        if "aborted by request" in output.message:
            assert {"by request: None", f"by request: {name}"} & self.aborting, f"{where}: {output.message}"
        if output.finish_reason == "abort" and not stream.tokens:
            assert output.message.startswith("Abort before prefill"), where
        stream.reason = output.finish_reason

    def assert_nothing_is_owed(self) -> None:
        """Assert that each open choice has had its final output, and each call its reply."""
        owed = [key for key, stream in self.streams.items() if stream.open]
        assert not owed, f"no final output for {owed}"
        assert not self.calls, f"no reply to {self.calls}"


def ends(sampling: SamplingParams, token: int) -> bool:
    return token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
