"""After the death of an engine, the next one says which retained results are lost."""

from __future__ import annotations

import pytest

from fastdeploy.core.errors import ResultLost
from fastdeploy.core.request_fields import AddRequest
from fastdeploy.core.sampling_params import SamplingParams
from fastdeploy.engine.requests import retention
from fastdeploy.engine.requests.retention import RECORD, RetainedLog
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness


class Life:
    """Engines of one server, one after the other. now: time.time()."""

    def __init__(self, path, **config):
        self.path, self.now, self.config = str(path / "retained.log"), 1e9, config
        self.restart()

    def restart(self) -> None:
        self.h = Harness(retained_log=self.log(), **self.config)

    def log(self) -> RetainedLog:
        return RetainedLog(self.path, lambda: self.now)

    def ask(self, name: str = "r", body: str = "body", rounds: int = 40, **fields) -> m.Failure | None:
        """Send a request, run the engine, and return why the request was rejected."""
        sent = {"retain_s": 10.0, "fingerprint": body, "max_tokens": 5, **fields}
        self.h.add(name, PROMPT, **sent)
        self.h.run_rounds(rounds)
        return self.h.rejected(name)


@pytest.fixture
def life(tmp_path) -> Life:
    return Life(tmp_path)


@pytest.mark.parametrize("rounds", [1, 3, 40], ids=["queued", "running", "ended"])
def test_a_request_of_a_dead_engine_is_lost_for_as_long_as_it_would_have_been_kept(life, rounds):
    assert life.ask(rounds=rounds) is None
    for _ in range(2):  # the engine may die again
        life.restart()
        lost = life.ask()
        assert lost.code == "result_lost" and "'r'" in lost.message and lost.detail["param"] == "request_id"
        assert not life.h.stream("r").tokens and not life.h.runner.computed_tokens
    life.now += 10.5
    life.restart()
    assert life.ask() is None
    assert life.h.stream("r").tokens == expected_tokens(PROMPT, 5)


def test_the_time_of_a_result_counts_from_its_end_and_that_of_a_live_request_from_the_restart(life):
    life.ask("ended")
    life.ask("lives", rounds=2)
    life.now += 9.0
    life.restart()
    assert life.ask("ended").code == life.ask("lives").code == "result_lost"
    life.now += 2.0
    life.h.transport.sent["a"].clear()
    assert life.ask("ended") is None and life.ask("lives").code == "result_lost"


def test_lost_is_only_what_the_same_request_asks_for(life):
    life.ask("kept")
    life.ask("not kept", retain_s=0.0)
    life.restart()
    assert life.ask("not kept") is None and life.ask("new") is None
    assert life.ask("kept", body="another") is None
    life.restart()
    assert life.ask("kept", retain_s=0.0, body="") is None, "a request that does not ask for a kept result"


def test_a_request_of_a_gateway_is_computed_again_if_its_result_is_lost(life):
    assert life.ask() is None
    life.restart()
    assert life.ask(recomputes_lost=True) is None
    assert life.h.stream("r").tokens == expected_tokens(PROMPT, 5)


def test_a_lost_result_is_told_before_a_pause_or_an_unknown_adapter_is(life):
    """An adapter is unknown after a restart: without the log, the reply would be a 404."""
    life.h.load_adapter("a", 1)
    life.ask(adapter="a")
    life.restart()
    life.h.pause(mode="abort", admission="reject")
    assert life.ask(adapter="a").code == "result_lost"
    assert life.ask("other", adapter="a").code != "result_lost"


def test_results_that_were_dropped_or_are_over_before_the_death_are_not_lost(tmp_path):
    life = Life(tmp_path, max_retained=1)
    life.ask("dropped")
    life.ask("over", retain_s=2.0)
    life.h.now, life.now = life.h.now + 3.0, life.now + 3.0
    life.h.run_rounds()
    life.restart()
    assert life.ask("dropped") is None and life.ask("over") is None


def test_a_reset_forgets_lost_results(life):
    life.ask()
    life.restart()
    life.h.ask(m.ResetArgs())
    life.restart()
    assert life.ask() is None


def test_a_group_is_lost_under_the_id_that_its_client_knows(life):
    life.ask("g-0", group="g")
    life.restart()
    assert "'g'" in life.ask("g-0", group="g").message


# ---------------------------------------------------------------------- the file


def request(name: str, retain_s: float = 10.0) -> AddRequest:
    return AddRequest(name, [1], SamplingParams(), retain_s=retain_s, fingerprint="f")


def is_lost(log: RetainedLog, name: str) -> bool:
    try:
        log.check(request(name))
    except ResultLost:
        return True
    return False


def test_a_record_that_was_cut_off_is_ignored(tmp_path):
    life = Life(tmp_path)
    log = life.log()
    for name in ("a", "b"):
        log.began(request(name))
    with open(life.path, "r+b") as file:
        file.truncate(2 * RECORD.size - 1)
    log = life.log()
    log.began(request("c"))
    log = life.log()
    assert [is_lost(log, name) for name in "abc"] == [True, False, True]


def test_the_file_stays_small_and_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "MIN_RECORDS", 16)
    life = Life(tmp_path)
    log = life.log()
    log.began(request("old"))
    log = life.log()
    log.began(request("kept"))
    for i in range(500):
        log.began(request(f"r{i}"))
        log.ended(request(f"r{i}"))
        log.dropped(request(f"r{i}"))
        assert (tmp_path / "retained.log").stat().st_size <= (4 * 16 + 2) * RECORD.size
    log = life.log()
    assert is_lost(log, "kept") and is_lost(log, "old") and not any(is_lost(log, f"r{i}") for i in range(500))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["retained.log"]


def test_an_engine_goes_on_if_the_file_cannot_be_written(tmp_path):
    life = Life(tmp_path)
    life.h.engine.retention._log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    assert life.ask() is None and life.h.stream("r").reason == "length"
    assert life.ask("again") is None
    (tmp_path / "folder").mkdir()
    life.path = str(tmp_path / "no" / "folder")
    life.restart()
    assert life.ask() is None
