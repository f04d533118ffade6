"""Loads of adapters: sources, refusals, time-outs, and calls that come while a load is in progress."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from engine.test_staging_thread import HangingHarness, HangingRunner
from fastdeploy.core.config import UPLOAD_PREFIX
from fastdeploy.core.errors import WeightUpdateRefused
from fastdeploy.core.weight_source import FileSource, FolderSource, SharedMemorySource
from fastdeploy.engine.adapters.registry import COPIES_AT_ONCE
from fastdeploy.engine.staging_thread import MAX_LEFT_BEHIND
from fastdeploy.inter_communicator import messages as m
from support.fake_runner import expected_tokens
from support.harness import PROMPT, Harness

FOLDER = FolderSource("/nowhere")


def assert_serves(h: Harness, name: str, content: int) -> None:
    h.add(f"check-{content}", PROMPT, adapter=name)
    h.run_out()
    assert h.stream(f"check-{content}").tokens == expected_tokens(PROMPT, 8, adapter=content)


def copies(h: Harness) -> list[str]:
    """Return the names of the folders in the store."""
    h.run_rounds(2)
    return sorted(os.listdir(Path(h.engine.adapters.store.path(1)).parent))


# ---------------------------------------------------------------------- sources


def test_an_upload_is_loaded_with_the_config_of_the_call(tmp_path):
    h = Harness(model_roots=(), upload_dir=str(tmp_path))
    upload = tmp_path / f"{UPLOAD_PREFIX}1"
    upload.write_text("a3")
    reply = h.ask(m.LoadAdapterArgs("a", FileSource(str(upload)), config={"r": 8}, path="upload"), rounds=4)
    assert reply.failure is None and h.ask(m.AdaptersArgs()).result["adapters"][0]["path"] == "upload"
    upload.unlink()
    assert (Path(h.engine.adapters.store.path(1)) / "adapter_config.json").read_text() == '{"r":8}'
    assert_serves(h, "a", 3)


def test_shared_memory_is_copied_up_to_the_given_length():
    h = Harness()
    segment = Path(f"/dev/shm/fastdeploy-test-{os.getpid()}")
    try:
        segment.write_text("a4 and an old tail")
        source = SharedMemorySource(segment.name, 2)
        assert h.ask(m.LoadAdapterArgs("a", source, config={}), rounds=4).failure is None
        segment.write_text("overwritten")
        cut = SharedMemorySource(segment.name, 100)
        assert "cut short" in h.ask(m.LoadAdapterArgs("b", cut, config={}), rounds=4).failure.message
    finally:
        segment.unlink()
    assert_serves(h, "a", 4)


@pytest.mark.parametrize(
    ("args", "param"),
    [
        (m.LoadAdapterArgs("", FOLDER), "lora_name"),
        (m.LoadAdapterArgs("x" * 257, FOLDER), "lora_name"),
        (m.LoadAdapterArgs("\ud800", FOLDER), "lora_name"),
        (m.LoadAdapterArgs("default", FOLDER), "lora_name"),
        (m.LoadAdapterArgs("fake", FOLDER), "lora_name"),
        (m.LoadAdapterArgs("a", FolderSource("")), "lora_path"),
        (m.LoadAdapterArgs("a", FOLDER, config={}), "config"),
        (m.LoadAdapterArgs("a", SharedMemorySource("x")), "config"),
        (m.LoadAdapterArgs("a", SharedMemorySource("../x"), config={}), "shared_memory"),
        (m.LoadAdapterArgs("a", FileSource("/etc/passwd"), config={}), "body"),
        (m.LoadAdapterArgs("a", FOLDER, version=""), "version"),
        (m.LoadAdapterArgs("a", FOLDER, kv="drop"), "kv"),
        (m.LoadAdapterArgs("a", FOLDER, timeout_s=0.0), "timeout_s"),
    ],
)
def test_a_load_with_a_bad_field_is_refused_and_the_field_is_named(args, param):
    h = Harness()
    h.assert_refused(args, param)
    assert not h.engine.scopes.adapters and not h.engine.adapters.busy


def test_a_folder_must_lie_under_a_root_and_hold_an_adapter(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "empty", root / "half", root / "pickled", root / "a pipe", other):
        folder.mkdir(parents=True)
    for folder in (root / "half", root / "pickled", root / "a pipe", other):
        (folder / "adapter_config.json").write_text("{}")
    (root / "pickled" / "adapter_model.bin").write_text("a1")
    (other / "adapter_model.safetensors").write_text("a1")
    os.mkfifo(root / "a pipe" / "adapter_model.safetensors")
    (root / "link").symlink_to(other)
    h = Harness(model_roots=(str(root),))
    for path, code, text in (
        (root / "missing", "adapter_folder_not_found", "there is no folder"),
        (root / "empty", "adapter_folder_not_found", "has no adapter_config.json"),
        (root / "half", "adapter_folder_not_found", "has no adapter_model.safetensors"),
        (root / "pickled", "weight_update_refused", "pickled tensors are never read"),
        (root / "a pipe", "weight_update_refused", "not a regular file"),
        (root / "link", "weight_update_refused", "leads out of the folders that are allowed"),
        (other, "weight_update_refused", "leads out of the folders that are allowed"),
    ):
        failure = h.ask(m.LoadAdapterArgs("a", FolderSource(str(path))), rounds=4).failure
        assert failure.code == code and text in failure.message, failure
    assert copies(h) == [] and not h.runner.adapter_reads
    h = Harness(model_roots=())
    h.assert_refused(m.LoadAdapterArgs("a", FolderSource(str(other))), "lora_path")


def test_a_full_disk_refuses_a_load_and_nothing_changes(monkeypatch):
    h = Harness()
    h.load_adapter("a", 1)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "sendfile", full)
    failure = h.load_adapter("a", 2).failure
    assert failure.code == "out_of_space" and "--adapter-store" in failure.message
    assert copies(h) == ["1"]
    assert_serves(h, "a", 1)


# ---------------------------------------------------------------------- while a load is in progress


class HangingSources(HangingHarness):
    """The copy of a folder that is named "dead..." hangs until the runner is mended."""

    def __init__(self, **config):
        super().__init__(HangingRunner(), stage_timeout_s=60.0, **config)

    def _copy_adapter(self, copy, number, source, *args) -> None:
        if isinstance(source, FolderSource) and os.path.basename(source.path).startswith("dead"):
            self.runner.hang()
            source = self.adapter_folder("a9")
        super()._copy_adapter(copy, number, source, *args)

    def hang(self, name: str, **args) -> int:
        call = self.call(m.LoadAdapterArgs(name, FolderSource(f"/dead-{name}"), **args))
        self.run_rounds()
        return call


@pytest.fixture
def h():
    h = HangingSources(adapter_memory_mb=1)
    yield h
    h.mend()


def test_a_source_that_hangs_delays_no_other_load_no_read_and_no_base_update(h):
    h.load_adapter("a", 1)
    call = h.hang("x")
    for k in (2, 3):
        assert h.load_adapter(f"b{k}", k).failure is None
    assert_serves(h, "a", 1)
    assert h.engine.scheduler.adapters.num_reads == 1, "read again"
    assert h.update("/w1").failure is None
    h.now += 61
    h.run_rounds()
    failure = h.reply(call).failure
    assert failure.code == "staging_timeout" and "60 s" in failure.message
    h.mend()
    assert copies(h) == ["1", "3", "4"], "a copy that comes too late is removed"
    h.add("r", PROMPT, adapter="x")
    h.run_rounds()
    assert h.rejected("r").code == "model_not_found"


def test_a_copy_that_is_complete_just_after_its_time_out_is_removed(h):
    h.load_adapter("a", 1)
    registry = h.engine.adapters
    copy = registry._copy

    def copy_and_hang(load):
        copy(load)
        h.runner.hang()

    registry._copy = copy_and_hang
    call = h.call(m.LoadAdapterArgs("b", h.adapter_folder("a2")))
    h.run_rounds()
    h.now += 61
    h.run_rounds()
    assert h.reply(call).failure.code == "staging_timeout"
    assert copies(h) == ["1"]


def test_one_load_of_a_name_at_a_time(h):
    h.load_adapter("a", 1)
    call = h.hang("a")
    assert h.load_adapter("a", 2).failure.code == "update_in_progress"
    h.mend()
    h.run_rounds(3)
    assert h.reply(call).result["adapter_epoch"] == 2
    assert_serves(h, "a", 9)


def test_a_load_whose_time_ends_while_its_copy_waits_is_refused_then(h):
    h.load_adapter("a", 1)
    hanging = [h.hang(f"x{i}") for i in range(COPIES_AT_ONCE)]
    waiting = h.call(m.LoadAdapterArgs("b", h.adapter_folder("a2"), timeout_s=3.0))
    h.run_rounds(2)
    assert h.reply(waiting) is None
    h.now += 3.0
    h.run_rounds()
    assert h.reply(waiting).failure.code == "staging_timeout" and not any(map(h.reply, hanging))
    h.mend()
    h.run_rounds(3)
    assert "b" not in {adapter["lora_name"] for adapter in h.ask(m.AdaptersArgs()).result["adapters"]}


def test_an_unload_ends_the_load_of_its_name(h):
    h.load_adapter("a", 1)
    call = h.hang("a")
    h.unload_adapter("a")
    h.run_rounds()
    failure = h.reply(call).failure
    assert failure.code == "wrong_order" and "unloaded meanwhile" in failure.message
    h.load_adapter("a", 3)
    h.mend()
    h.run_rounds(3)
    assert_serves(h, "a", 3)
    assert copies(h) == ["3"]


def test_an_unload_does_not_know_a_name_whose_first_load_is_in_progress(h):
    call = h.hang("a")
    assert h.unload_adapter("a").failure.code == "model_not_found"
    h.mend()
    h.run_rounds(3)
    assert h.reply(call).result["status"] == "loaded"


def test_the_number_of_sources_that_hang_is_limited(h):
    h.load_adapter("a", 1)
    for i in range(MAX_LEFT_BEHIND):
        call = h.hang(f"x{i}", timeout_s=1.0)
        h.now += 2.0
        h.run_rounds(2)
        assert h.reply(call).failure.code == "staging_timeout"
    assert h.load_adapter("b", 2).failure.code == "update_in_progress"
    assert h.update("/w1").failure is None, "reads of weights are counted apart"
    upload = Path(tempfile.gettempdir()) / f"{UPLOAD_PREFIX}{os.getpid()}"
    upload.write_text("a3")
    reply = h.ask(m.LoadAdapterArgs("c", FileSource(str(upload)), config={}), rounds=4)
    upload.unlink()
    assert reply.failure is None, "an upload cannot hang"
    h.mend()
    h.run_rounds()
    assert h.load_adapter("b", 2).failure is None


def test_the_end_of_the_engine_answers_loads_and_removes_the_store(h):
    h.load_adapter("a", 1)
    store = Path(h.engine.adapters.store.path(1)).parent
    calls = [h.hang("a"), h.hang("b")]
    h.engine.stop()
    h.engine.run()
    assert [h.reply(call).failure.code for call in calls] == ["engine_dead"] * 2
    assert not store.exists()
    h.mend()
    assert not store.exists(), "a copy that comes too late makes no store"


# ---------------------------------------------------------------------- loads of a hostile tenant


class SlowRunner(HangingRunner):
    """The check of a config with the word "hostile" hangs, and so does the read of the tensors "a66"."""

    def check_adapter(self, config):
        if b"hostile" in config:
            self.hang()
            raise WeightUpdateRefused("target_modules: takes too long")

    def begin_adapter(self):
        staging = super().begin_adapter()
        read = staging.read

        def slow_read(path):
            if (Path(path) / "adapter_model.safetensors").read_text() == "a66":
                self.hang()
            return read(path)

        staging.read = slow_read
        return staging


@pytest.fixture
def slow():
    h = HangingHarness(SlowRunner(), stage_timeout_s=60.0)
    yield h
    h.mend()


def test_a_config_whose_expressions_take_long_holds_no_other_load(slow):
    h = slow
    folder = h.adapter_folder("a9")
    Path(folder.path, "adapter_config.json").write_text('{"target_modules": "hostile"}')
    calls = [h.call(m.LoadAdapterArgs(f"x{i}", folder)) for i in range(COPIES_AT_ONCE - 1)]
    h.run_rounds(3)
    assert h.load_adapter("a", 1).failure is None
    assert_serves(h, "a", 1)
    h.mend()
    h.run_rounds(3)
    assert [h.reply(call).failure.code for call in calls] == ["weight_update_refused"] * len(calls)


def test_a_load_whose_time_ends_while_it_waits_for_another_one_is_refused_then(slow):
    h = slow
    first = h.call(m.LoadAdapterArgs("slow", h.adapter_folder("a66")))
    h.run_rounds(2)
    second = h.call(m.LoadAdapterArgs("a", h.adapter_folder("a1"), timeout_s=3.0))
    h.run_rounds(3)
    assert h.engine.adapters.next_deadline() == h.now + 3.0, "an idle loop wakes up at that time"
    h.now += 3.0
    h.run_rounds()
    failure = h.reply(second).failure
    assert failure.code == "staging_timeout" and "waited" in failure.message and "3 s" in failure.message
    h.mend()
    h.run_rounds(3)
    assert h.reply(first).failure is None
    h.add("r", PROMPT, adapter="a")
    h.run_rounds()
    assert h.rejected("r").code == "model_not_found", "it is not committed late"
    assert copies(h) == ["1"]


def test_the_time_of_a_load_covers_its_copy_and_its_read(slow):
    h = slow
    copied = h.engine.adapters._copied

    def copied_late(load, *result):
        h.now += 2.0
        copied(load, *result)

    h.engine.adapters._copied = copied_late
    call = h.call(m.LoadAdapterArgs("slow", h.adapter_folder("a66"), timeout_s=3.0))
    h.run_rounds(3)
    assert h.engine.adapters.next_deadline() == h.now + 1.0
    h.now += 1.0
    h.run_rounds()
    assert h.reply(call).failure.code == "staging_timeout"
