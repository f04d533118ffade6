"""An engine on a fake runner, with lists in place of sockets and a clock that only tests move."""

from __future__ import annotations

import functools
import shutil
import tempfile
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.outputs import Logprob, Span
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.core.served_weights import ServedWeights
from fastdeploy.core.weight_source import FolderSource
from fastdeploy.engine.common_engine import CommonEngine
from fastdeploy.engine.requests.retention import RetainedLog
from fastdeploy.inter_communicator import messages as m
from fastdeploy.scheduler.drafts import Drafter, NoDrafts
from support.fake_runner import FakeRunner, write_adapter

PROMPT = [1, 2, 3]


class ListTransport:
    """inbox: what the engine will receive. sent: by client, what the engine sent. gone: clients that have died. mute:
    clients that receive, but acknowledge no fence. acked: by client, how many messages of ``sent`` it acknowledged."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[str, m.ToEngine]] = deque()
        self.sent: defaultdict[str, list[m.ToClient]] = defaultdict(list)
        self.gone: set[str] = set()
        self.mute: set[str] = set()
        self.acked: dict[str, int] = {}

    def recv(self, timeout_s: float | None) -> list[tuple[str, m.ToEngine]]:
        batch = list(self.inbox)
        self.inbox.clear()
        return batch

    def send(self, client: str, message: m.ToClient) -> bool:
        if client in self.gone:
            return False
        self.sent[client].append(message)
        if isinstance(message, m.Fence) and client not in self.mute:
            self.inbox.append((client, m.FenceAck(message.fence_id)))
            self.acked[client] = len(self.sent[client])
        return True

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Stream:
    """The outputs of one choice that a client has received."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprob] = []
        self.spans: list[Span] = []
        self.routed = b""
        self.finals: list[m.Output] = []

    @property
    def reason(self) -> str | None:
        return self.finals[0].finish_reason if self.finals else None


class Harness:
    """Runs the loop of an engine round by round, and keeps every message.

    now: the engine's clock, in seconds. running_pids: processes of clients that the engine takes for running.
    """

    def __init__(
        self,
        runner: FakeRunner | None = None,
        retained_log: RetainedLog | None = None,
        drafter: Drafter | None = None,
        **config,
    ):
        self.runner = runner or FakeRunner()
        self.transport = ListTransport()
        config = {"model": "fake", "max_num_seqs": 4, "max_num_batched_tokens": 32, "model_roots": ("/",), **config}
        self.now = 1000.0
        self.running_pids: set[int] = set()
        self.engine = CommonEngine(
            EngineConfig(**config),
            self.runner,
            self.transport,
            boot_id="boot",
            clock=lambda: self.now,
            runs=lambda pid: pid in self.running_pids,
            retained_log=retained_log,
            drafter=drafter or NoDrafts(),
        )
        self._calls = count(1)
        self._folder: Path | None = None
        store = self.engine.adapters.store
        store.copy = functools.partial(self._copy_adapter, store.copy)
        store.look, store.remove = self._held_up(store.look), self._held_up(store.remove)
        self.connect("a")

    # ---------------------------------------------------------------- a client's side

    def connect(self, client: str, pid: int = 1) -> None:
        self.send(m.Hello(pid), client)
        self.run_rounds()

    def send(self, message: m.ToEngine, client: str = "a") -> None:
        self.transport.inbox.append((client, message))

    def add(self, request_id: str, prompt: list[int], client: str = "a", **fields) -> None:
        """Send a request. ``fields`` are of AddRequest or of SamplingParams."""
        of_request = {k: fields.pop(k) for k in fields.keys() & set(AddRequest.__struct_fields__)}
        params = SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **fields})
        self.send(AddRequest(request_id, prompt, params, **of_request), client)

    def call(self, args: m.Args, client: str = "a") -> int:
        call_id = next(self._calls)
        self.send(m.Call(call_id, args), client)
        return call_id

    def ask(self, args: m.Args, client: str = "a", rounds: int = 1) -> m.Reply:
        """Call, and run the loop until the reply is there: at most ``rounds`` rounds."""
        call_id = self.call(args, client)
        for _ in range(rounds):
            self.run_rounds()
            if (reply := self.reply(call_id, client)) is not None:
                return reply
        raise AssertionError(f"no reply to {args} within {rounds} rounds")

    def update(self, folder: str, rounds: int = 3, **args) -> m.Reply:
        return self.ask(m.UpdateWeightsArgs(FolderSource(str(folder)), **args), rounds=rounds)

    def adapter_folder(self, content: str) -> FolderSource:
        """Return a PEFT folder with these tensors, see FakeAdapterStaging."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, self._folder)
        return FolderSource(write_adapter(self._folder / content, content))

    def load_adapter(self, name: str, content: int | str, rounds: int = 4, **args) -> m.Reply:
        """Load the adapter "a<content>", or other tensors, under a name."""
        source = self.adapter_folder(f"a{content}" if isinstance(content, int) else content)
        return self.ask(m.LoadAdapterArgs(name, source, **args), rounds=rounds)

    def _copy_adapter(self, copy, *args) -> None:
        assert self.runner.may_stage.wait(30)
        copy(*args)

    def _held_up(self, work: Callable[..., object]) -> Callable[..., object]:
        def after_the_round(*args):
            assert self.runner.may_stage.wait(30)
            return work(*args)

        return after_the_round

    def unload_adapter(self, name: str) -> m.Reply:
        return self.ask(m.UnloadAdapterArgs(name))

    def failure(self, args: m.Args, rounds: int = 2) -> m.Failure:
        """Call, and return why the engine refused."""
        reply = self.ask(args, rounds=rounds)
        assert reply.failure is not None, reply
        return reply.failure

    def assert_refused(self, args: m.Args, param: str) -> None:
        """Assert that the engine refuses the call as invalid, and names the field ``param``."""
        failure = self.failure(args)
        assert (failure.code, failure.detail["param"]) == ("invalid_field", param)

    def acknowledge(self, client: str = "a") -> None:
        """Acknowledge the last fence, as a client that is mute does late, and run one round."""
        self.send(m.FenceAck(self.sent(m.Fence, client)[-1].fence_id), client)
        self.run_rounds()

    def pause(self, rounds: int = 50, **args) -> m.Reply:
        return self.ask(m.PauseArgs(**args), rounds=rounds)

    def resume(self, hold_id: str | None = None) -> m.Reply:
        return self.ask(m.ResumeArgs(hold_id=hold_id))

    def status(self) -> dict:
        return self.engine.pause.status()

    @property
    def served(self) -> ServedWeights:
        """The weights that serve the whole engine."""
        return self.engine.scopes.whole.model.served

    # ---------------------------------------------------------------- the loop

    def run_rounds(self, times: int = 1) -> None:
        for _ in range(times):
            self.join_staging()
            with self._staging_held_up():
                self.engine.run_once(block=False)
            self.join_staging()
            self.engine.lifecycle.check_integrity()
            self.engine.adapters.check_integrity()
            if isinstance(self.runner, FakeRunner):
                assert set(self.runner.adapters) == self.engine.scheduler.adapters.numbers()
                assert not self.runner.faults

    @contextmanager
    def _staging_held_up(self) -> Iterator[None]:
        """Keep the staging thread from ending within a round, so that every run of a test is the same."""
        free = self.runner.may_stage.is_set()
        self.runner.may_stage.clear()
        yield
        if free:
            self.runner.may_stage.set()

    def join_staging(self) -> None:
        """Wait for the staging thread, unless a test holds it up."""
        if self.runner.may_stage.is_set():
            for thread in threading.enumerate():
                if thread.name == "stage-weights":
                    thread.join()

    def run_out(self, limit: int = 2000) -> None:
        """Run the loop until nothing is left in the engine."""
        for _ in range(limit):
            self.run_rounds()
            if not len(self.engine.lifecycle.requests):
                return
        raise AssertionError(f"requests are left after {limit} rounds")

    # ---------------------------------------------------------------- what was seen

    def sent(self, kind: type, client: str = "a") -> list[Any]:
        """Return the messages of ``kind`` that the engine sent to ``client``, in order."""
        return [message for message in self.transport.sent[client] if isinstance(message, kind)]

    def metric(self, name: str) -> float:
        """Return the value of ``fastdeploy:<name>``."""
        lines = self.ask(m.MetricsArgs()).result["text"].split("\n")
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"fastdeploy:{name} "))

    def reply(self, call_id: int, client: str = "a") -> m.Reply | None:
        found = [reply for reply in self.sent(m.Reply, client) if reply.call_id == call_id]
        assert len(found) <= 1, "a call was answered twice"
        return found[0] if found else None

    def rejected(self, request_id: str, client: str = "a") -> m.Failure | None:
        return next((x.failure for x in self.sent(m.Rejected, client) if x.request_id == request_id), None)

    def stream(self, request_id: str, choice: int = 0, client: str = "a") -> Stream:
        stream = Stream()
        for message in self.sent(m.Outputs, client):
            for output in message.outputs:
                if (output.request_id, output.choice) != (request_id, choice):
                    continue
                assert not stream.finals, f"{request_id}: an output after the final one"
                stream.tokens += output.token_ids
                stream.logprobs += output.logprobs
                stream.spans += output.spans
                stream.routed += output.routed
                if output.finish_reason is not None:
                    stream.finals.append(output)
        return stream


def one_running(max_tokens: int = 20, prompt: list[int] = PROMPT, rounds: int = 3, **config) -> Harness:
    """Return a harness whose request "r" has run for ``rounds`` rounds."""
    h = Harness(**config)
    h.add("r", prompt, max_tokens=max_tokens)
    h.run_rounds(rounds)
    return h
