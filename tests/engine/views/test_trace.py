"""The trace: a valid Chrome trace that tells the same as the outputs, and that never disturbs the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy.core.config import EngineConfig
from fastdeploy.core.errors import InvalidField
from fastdeploy.core.events import Event, EventKind, EventLog
from fastdeploy.engine.views import trace_file
from fastdeploy.engine.views.trace_file import TraceFile, tracing
from fastdeploy.inter_communicator import messages as m
from support import chrome_trace
from support.fake_runner import FakeRunner
from support.harness import PROMPT, Harness

ROOT = Path(__file__).resolve().parents[3]


def nothing() -> None: ...


def trace_of(path: Path, max_bytes: int = 1 << 30, on_drop: Callable[[], None] = nothing) -> TraceFile:
    return TraceFile(str(path), max_bytes, "boot", 64, on_drop)


class Traced(Harness):
    """A harness with a trace. ``events`` closes the trace, and returns its events after a check."""

    def __init__(self, path: Path, *args, **config):
        super().__init__(*args, **config)
        self._trace = trace_of(path)
        self.engine.events.attach(self._trace)
        self.runner.in_step = self.tick

    def tick(self) -> None:
        self.now += 0.01

    def run_rounds(self, times: int = 1) -> None:
        for _ in range(times):
            self.now += 0.001
            self.runner.in_step = self.tick
            super().run_rounds()

    def events(self) -> list[chrome_trace.TraceEvent]:
        self._trace.close()
        events = chrome_trace.read(self._trace.path)
        chrome_trace.check(events)
        return events


def seen(h: Harness, *names: str) -> dict[str, dict[str, int]]:
    """Return the tokens that the client has got, by weight version."""
    counts = {name: Counter(span.version for span in h.stream(name).spans) for name in names}
    return {f"{name}/0": dict(count) for name, count in counts.items()}


def test_the_trace_has_the_tokens_of_the_outputs_by_version(tmp_path):
    h = Traced(tmp_path / "t.json", max_num_batched_tokens=8)
    for name in "abc":
        h.add(name, [*PROMPT * 3, ord(name)], max_tokens=20)
    h.run_rounds(6)
    h.update("w1", version="one")
    h.pause(mode="keep", hold_id="trainer")
    h.update("w2", version="two", kv="recompute")
    h.resume("trainer")
    h.run_rounds(3)
    h.ask(m.SetVersionArgs("renamed"))
    h.run_out()
    events = h.events()
    assert chrome_trace.tokens_by_version(events) == seen(h, "a", "b", "c")
    assert set(seen(h, "a")["a/0"]) == {"0", "one", "two", "renamed"}
    assert sum(e["args"]["tokens"] for e in events if e["name"] == "step") == 60


def test_the_trace_shows_pauses_holds_sessions_and_commits_in_their_order(tmp_path):
    h = Traced(tmp_path / "t.json")
    h.add("r", PROMPT, max_tokens=30)
    h.run_rounds(3)
    h.pause(mode="wait", hold_id="trainer", placed_by="test", timeout_s=0.01)
    h.update("w1", version="one")
    h.resume("trainer")
    h.run_out()
    events = h.events()
    order = [(e["ph"], e["name"]) for e in events if e.get("cat") in ("pause", "hold", "session") or e["ph"] == "i"]
    assert order == [
        ("i", "trace begins"),
        ("b", "hold"),
        ("b", "engine draining"),
        ("e", "engine draining"),
        ("b", "engine draining"),  # the time-out closes the gate
        ("e", "engine draining"),
        ("b", "engine paused"),
        ("b", "weight session"),
        ("n", "commit"),
        ("n", "checked"),
        ("i", "commit of one"),
        ("e", "weight session"),
        ("e", "hold"),
        ("e", "engine paused"),
        ("i", "trace ends"),
    ]
    phases = [e for e in events if e.get("cat") == "pause"]
    gap = (phases[2]["ts"], phases[-1]["ts"])
    steps = [e for e in events if e["name"] == "step"]
    assert not [e for e in steps if gap[0] < e["ts"] < gap[1]] and steps[-1]["ts"] > gap[1] > gap[0] > steps[0]["ts"]


def test_the_trace_begins_with_its_first_event_however_long_the_clock_has_run(tmp_path):
    """A viewer shows all time between the first mark and the last."""
    h = Traced(tmp_path / "t.json")
    h.now += 1e6
    h.add("r", PROMPT, max_tokens=5)
    h.run_out()
    timed = [e["ts"] for e in h.events() if e["ph"] != "M"]
    assert min(timed) >= 1e12 and max(timed) - min(timed) < 1e6


def test_many_requests_and_pauses_make_few_tracks(tmp_path):
    """Perfetto makes a track for each thread, and for each name of an async event."""
    tracks = []
    for times in (1, 12):
        h = Traced(tmp_path / f"{times}.json", max_num_seqs=2)
        for i in range(times):
            for name in "abc":
                h.add(f"{name}{i}", PROMPT, max_tokens=4)
            h.run_rounds()
            h.pause(mode="keep", hold_id=f"hold-{i}")
            h.resume(f"hold-{i}")
            h.run_out()
        events = h.events()
        waits = [e["args"] for e in events if e["ph"] == "b" and e["cat"] == "waiting"]
        assert len({args["request"] for args in waits}) == 3 * times
        tracks.append({(e["cat"], e["name"]) if e["ph"] in "ben" else e["tid"] for e in events})
    assert tracks[0] == tracks[1]


def test_lanes_are_used_again_and_a_preempted_request_is_tied_to_its_next_lane(tmp_path):
    h = Traced(tmp_path / "t.json", FakeRunner(num_blocks=4, block_size=16, max_model_len=64), max_num_seqs=2)
    for i in range(12):
        h.add(f"r{i}", [*PROMPT, i], max_tokens=40)
    h.run_out()
    events = h.events()
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name" and "lane" in e["args"]["name"]]
    assert lanes == ["requests, lane 1", "requests, lane 2"]
    flows = [e["ph"] for e in events if e["ph"] in "sf"]
    assert flows and flows == ["s", "f"] * (len(flows) // 2)
    assert chrome_trace.tokens_by_version(events) == seen(h, *(f"r{i}" for i in range(12)))
    counted = [e["args"] for e in events if e["name"] == "requests"]
    assert counted[-1] == {"running": 0, "waiting": 0, "frozen": 0}
    assert max(c["waiting"] for c in counted) >= 10


def test_a_paused_adapter_shows_its_requests_as_frozen(tmp_path):
    h = Traced(tmp_path / "t.json")
    h.load_adapter("alice", 1)
    h.add("r", PROMPT, max_tokens=20, adapter="alice")
    h.add("gone", PROMPT, max_tokens=20, adapter="alice")
    h.run_rounds(4)
    h.pause(mode="keep", scope="adapter:alice")
    h.ask(m.AbortArgs(request_ids=["gone"]))  # ends while it is frozen
    h.ask(m.ResumeArgs(scope="adapter:alice"))
    h.run_out()
    events = h.events()
    assert [e["ph"] for e in events if e["name"] == "frozen"] == ["B", "B", "E", "E"]
    assert chrome_trace.tokens_by_version(events) == seen(h, "r", "gone")


def test_a_step_given_up_for_a_pause_is_in_the_trace(tmp_path):
    h = Traced(tmp_path / "t.json")
    h.add("r", PROMPT, max_tokens=20)
    h.run_rounds(2)
    h.engine.events.add(EventKind.STEP, "", seconds=0.0, **step_without_tokens(h))
    names = [e["name"] for e in h.events()]
    assert names.count("step, given up for a pause") == 1


def step_without_tokens(h: Harness) -> dict:
    return {"plan": h.runner.plans[-1], "requests": h.engine.scheduler.running, "sampled": None, "free_blocks": 1}


def test_no_file_is_overwritten(tmp_path):
    paths = [trace_of(tmp_path / "t.json") for _ in range(3)]
    for trace in paths:
        trace.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t.2.json", "t.3.json", "t.json"]
    assert {p.stat().st_mode & 0o777 for p in tmp_path.iterdir()} == {0o600}, "only this user may read them"
    for trace in paths:
        chrome_trace.check(chrome_trace.read(trace.path))


def queued(i: int) -> Event:
    return Event(float(i), EventKind.QUEUED, f"r{i}/0", {"scope": "engine", "prompt_tokens": 1, "max_tokens": 1})


def test_the_trace_ends_at_its_largest_size_as_a_valid_file_and_says_so_once(tmp_path, caplog):
    trace = trace_of(tmp_path / "t.json", max_bytes=20_000)
    for i in range(5000):
        trace.add(queued(i))
    trace.close()
    events = chrome_trace.read(trace.path)
    chrome_trace.check(events)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["trace begins", "trace ends"]
    assert len([r for r in caplog.records if "--trace-max-mb" in r.getMessage()]) == 1


def test_a_full_disk_ends_the_trace_with_one_warning(tmp_path, caplog, monkeypatch):
    full = Path("/dev/full").open("wb")  # noqa: SIM115 - the trace closes it
    monkeypatch.setattr(trace_file, "_create", lambda path: full)
    trace = trace_of(tmp_path / "t.json")
    for i in range(100):
        trace.add(queued(i))
    trace.close()
    trace.add(queued(100))
    assert len([r for r in caplog.records if "No space left" in r.getMessage()]) == 1
    assert trace._queue.qsize() <= 1, "events wait for a disk that is full"  # close() may leave its mark


KILLED = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, "tests")
from engine.views.test_trace import Traced
h = Traced(Path(sys.argv[1]))
for i in range(8):
    h.add(f"r{i}", [1, 2, 3, i], max_tokens=100)
h.run_rounds(60)
while Path(sys.argv[1]).read_bytes().count(b'"name":"step"') < 50:  # the thread of the trace writes on its own time
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_killed_engine_leaves_a_trace_that_can_be_read(tmp_path):
    path = tmp_path / "t.json"
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT).returncode == -signal.SIGKILL
    for cut in (0, 7):  # the last line may be cut anywhere
        data = path.read_bytes()
        path.write_bytes(data[: len(data) - cut])
        events = chrome_trace.read(path, killed=True)
        chrome_trace.check(events, killed=True)
        assert sum(e["name"] == "step" for e in events) >= 40
    with pytest.raises(json.JSONDecodeError):
        chrome_trace.read(path)


class SlowFile:
    """A file whose first write waits until ``free`` is set."""

    name = "slow"

    def __init__(self, file):
        self.free, self._file = threading.Event(), file
        self.flush, self.close = file.flush, file.close

    def write(self, data: bytes) -> None:
        assert self.free.wait(30)
        self._file.write(data)


def test_a_slow_disk_drops_events_counts_them_and_says_where(tmp_path, monkeypatch):
    slow = SlowFile((tmp_path / "slow.json").open("wb"))  # noqa: SIM115 - the trace closes it
    monkeypatch.setattr(trace_file, "_create", lambda path: slow)
    monkeypatch.setattr(trace_file, "MAX_BEHIND", 10)
    dropped = []
    trace = trace_of(tmp_path / "t.json", on_drop=lambda: dropped.append(1))
    for i in range(30):
        trace.add(queued(i))
    slow.free.set()
    trace.close()
    events = chrome_trace.read(tmp_path / "slow.json")
    chrome_trace.check(events)
    marks = {e["name"]: e["args"] for e in events if e["ph"] == "i"}
    assert len(dropped) >= 19 and marks["trace ends"] == {"dropped": len(dropped)}
    assert marks["events are missing here: the disk is slow"] == {"missing": len(dropped)}


def test_missing_events_leave_a_valid_trace(tmp_path):
    """Every event of a run may be missing: what is left is still well formed."""
    h = Traced(tmp_path / "t.json", FakeRunner(num_blocks=4, block_size=16, max_model_len=64))
    kept: list[Event] = []

    class Keep:
        wants_steps = True
        add = staticmethod(kept.append)

    h.engine.events.attach(Keep())
    for name in ("a", "b"):
        h.add(name, [*PROMPT, ord(name)], max_tokens=40)
    h.run_rounds(5)
    h.pause(mode="keep", hold_id="x")
    h.update("w1")
    h.resume("x")
    h.run_out()
    for k in range(2, 6):
        for offset in range(k):
            trace = trace_of(tmp_path / f"{k}-{offset}.json")
            for i, event in enumerate(kept):
                if i % k != offset:
                    trace.add(event)
            trace.close()
            chrome_trace.check(chrome_trace.read(trace.path))


@pytest.mark.parametrize("name", ["missing/t.json", "nul\0.json", 300 * "x"])
def test_a_file_that_cannot_be_made_leaves_the_engine_without_a_trace(tmp_path, caplog, name):
    log = EventLog()
    with tracing(f"{tmp_path}/{name}", 1, log, "boot", 64, nothing):
        assert not log.watched
    assert "there is no trace" in caplog.text


@pytest.mark.parametrize("path", ["", "nowhere/t.json", "fifo", "/dev/full"])
def test_a_path_that_cannot_be_written_is_refused_by_name(tmp_path, path):
    """Beside a device or a FIFO no file NAME.2 is made."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidField) as refused:
        EngineConfig(model="m", trace=str(tmp_path / path)).check()
    assert refused.value.field == "trace"


def test_the_checker_finds_faults():
    """The checker of these tests refuses what the format forbids."""
    base = {"name": "x", "ts": 1, "pid": 1, "tid": 1}
    faults: list[list[dict]] = [
        [{**base, "ph": "B"}],
        [{**base, "ph": "E"}],
        [{**base, "ph": "b", "cat": "c", "id": "1"}],
        [{**base, "ph": "e", "cat": "c", "id": "1"}],
        [{**base, "ph": "i", "s": "g", "ts": 5}, {**base, "ph": "i", "s": "g"}],
        [{**base, "ph": "X", "dur": 5}, {**base, "ph": "X", "ts": 3, "dur": 5}],
        [{**base, "ph": "?"}],
        [{"ph": "i", "s": "g", "ts": 1, "name": "x"}],
    ]
    for events in faults:
        with pytest.raises((AssertionError, KeyError)):
            chrome_trace.check(json.loads(json.dumps(events)))
