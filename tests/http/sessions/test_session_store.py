"""The store of sessions: one file for many processes, trees of turns, and its bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy.core.errors import InvalidField, SessionStoreFailed, UnknownSession
from fastdeploy.http.sessions import store as store_module
from fastdeploy.http.sessions.store import FILE, SessionStore
from fastdeploy.http.sessions.trajectory import rows
from fastdeploy.http.sessions.turns_table import (
    SCHEMA,
    Turn,
    add_turn,
    common_prefix,
    from_bytes,
    ids_of,
    read_turns,
    to_bytes,
)

DETAIL = b'{"weight_versions": []}'


def turn(prompt: list[int], sampled: list[int], messages: bytes | None = None) -> Turn:
    return Turn(prompt, sampled, [-float(token) for token in sampled], messages, DETAIL)


class Stores:
    """Stores that a test opens on one folder, as several API servers do."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.opened: list[SessionStore] = []
        self.loop = asyncio.new_event_loop()

    def open(self, max_bytes: int = 1 << 30, ttl_s: float = 100.0) -> SessionStore:
        self.opened.append(SessionStore(str(self.folder), max_bytes, ttl_s))
        return self.opened[-1]

    def run(self, call):
        return self.loop.run_until_complete(call)

    def add(self, store: SessionStore, name: str, *turns: Turn) -> str:
        session, _ = self.run(store.begin(b"", name))
        for one in turns:
            assert self.run(store.add(session.uid, one))
        return session.uid

    def rows(self, store: SessionStore, name: str) -> list[dict]:
        return list(rows(self.run(store.read(b"", name))[1]))


@pytest.fixture
def stores(tmp_path) -> Iterator[Stores]:
    made = Stores(tmp_path)
    yield made
    for store in made.opened:
        made.run(store.close())
    made.loop.close()


def test_a_later_turn_is_one_row_with_the_earlier_one(stores):
    store = stores.open()
    stores.add(store, "s", turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]))
    (row,) = stores.rows(store, "s")
    assert row["token_ids"] == [1, 2, 3, 4, 5, 6] and row["loss_mask"] == [0, 0, 1, 1, 0, 1]
    assert row["logprobs"] == [0.0, 0.0, -3.0, -4.0, 0.0, -6.0] and row["shared_prefix"] is None
    assert [(t["turn"], t["start"], t["end"]) for t in row["turns"]] == [(0, 2, 4), (1, 5, 6)]


def test_branches_are_rows_that_name_what_they_share(stores):
    store = stores.open()
    first, again = turn([1, 2], [3, 4]), turn([1, 2], [7])  # the same prompt, sampled twice
    later, other = turn([1, 2, 3, 4, 5], [6]), turn([1, 2, 3, 4, 8, 8], [9])  # two turns after the first one
    stores.add(store, "s", first, again, later, other)
    shown = [(row["leaf"], row["token_ids"], row["shared_prefix"]) for row in stores.rows(store, "s")]
    assert shown == [
        (1, [1, 2, 7], None),
        (2, [1, 2, 3, 4, 5, 6], {"leaf": 1, "length": 2}),
        (3, [1, 2, 3, 4, 8, 8, 9], {"leaf": 2, "length": 4}),
    ]


def test_a_prompt_that_no_turn_begins_shares_its_beginning_with_the_last_turn(stores):
    store = stores.open()
    stores.add(store, "s", turn([1, 2, 3], [4]), turn([1, 2, 9], [5]))
    assert [row["shared_prefix"] for row in stores.rows(store, "s")] == [None, {"leaf": 0, "length": 2}]
    assert stores.rows(store, "s")[1]["token_ids"] == [1, 2, 9, 5]


def test_a_shared_beginning_is_stored_once(stores):
    store = stores.open()
    long = list(range(100_000))
    stores.add(store, "s", *(turn(long, [7, i]) for i in range(20)))
    session, _ = stores.run(store.begin(b"", "s"))
    assert session.num_tokens == len(long) + 2 + 19 * 2
    assert (stores.folder / FILE).stat().st_size < 2 * 4 * len(long)


def test_a_sampled_token_of_two_branches_is_counted_once_with_the_shared_prefixes(stores):
    """What a trainer does with shared_prefix: it uses each token of the tree once."""
    store = stores.open()
    tree = [
        turn([1], [2]),
        turn([1, 2, 3], [4]),
        turn([1, 2, 5], [6]),
        turn([1, 2, 5, 6, 7], [8]),
        turn([1, 2, 5], [9]),
    ]
    stores.add(store, "s", *tree)
    used = [
        token
        for row in stores.rows(store, "s")
        for token, mask in list(zip(row["token_ids"], row["loss_mask"], strict=True))[
            (row["shared_prefix"] or {"length": 0})["length"] :
        ]
        if mask
    ]
    assert sorted(used) == [2, 4, 6, 8, 9]


@st.composite
def trees(draw) -> list[tuple[list[int], list[int]]]:
    """Return prompts and answers of turns. Each prompt begins like some earlier turn: with all of its ids, with its
    prompt, or with any part of it."""
    ids = st.lists(st.integers(1, 3), min_size=1, max_size=4)
    made: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        before: list[int] = []
        if made and draw(st.booleans()):
            prompt, sampled = draw(st.sampled_from(made))
            before = draw(st.sampled_from([prompt, prompt + sampled, (prompt + sampled)[: len(prompt) // 2]]))
        made.append((before + draw(st.lists(st.integers(1, 3), min_size=not before, max_size=3)), draw(ids)))
    return made


@given(trees())
def test_rows_of_any_tree_have_all_turns_and_each_sampled_token_once(tree):
    db = sqlite3.connect(":memory:")
    db.executescript(SCHEMA)
    db.execute("INSERT INTO session (uid, owner, name, created, used) VALUES ('u', '', 's', 0, 0)")
    for number, (prompt, sampled) in enumerate(tree):
        assert add_turn(db, "u", turn(prompt, sampled)) == number
        assert from_bytes(ids_of(db, "u", number)) == prompt + sampled
    made = list(rows(read_turns(db, "u")))
    by_leaf, used = {row["leaf"]: row["token_ids"] for row in made}, 0
    for row in made:
        prompt, sampled = tree[row["leaf"]]
        assert row["token_ids"] == prompt + sampled
        assert len(row["loss_mask"]) == len(row["logprobs"]) == len(row["token_ids"])
        for token, mask, logprob in zip(row["token_ids"], row["loss_mask"], row["logprobs"], strict=True):
            assert logprob == (-float(token) if mask else 0.0)
        shared = row["shared_prefix"] or {"leaf": row["leaf"], "length": 0}
        assert by_leaf[shared["leaf"]][: shared["length"]] == row["token_ids"][: shared["length"]]
        used += sum(row["loss_mask"][shared["length"] :])
    assert used == sum(len(sampled) for _, sampled in tree)
    for prompt, sampled in tree:
        assert any(ids[: len(prompt + sampled)] == prompt + sampled for ids in by_leaf.values())


def test_all_stores_of_a_folder_show_the_same_sessions(stores):
    a, b = stores.open(), stores.open()
    uid = stores.add(a, "s", turn([1], [2], b"m1"))
    assert stores.rows(b, "s")[0]["token_ids"] == [1, 2]
    stores.add(b, "s", turn([1, 2, 3], [4]))
    session, known = stores.run(a.begin(b"", "s", [b"m0", b"m1", b"m2"]))
    assert session.uid == uid and session.num_turns == 2
    assert known is not None and (known.number, known.num_messages, known.ids) == (0, 2, [1, 2])


def test_the_longest_known_conversation_is_found_among_very_many_messages(stores):
    store = stores.open()
    chain = [b"%d" % i for i in range(3000)]
    stores.add(store, "s", turn([1], [2], chain[3]), turn([1, 2, 3], [4], chain[1700]))
    _, known = stores.run(store.begin(b"", "s", chain))
    assert known is not None and (known.number, known.num_messages) == (1, 1701)


def test_a_session_belongs_to_its_owner(stores):
    store = stores.open()
    stores.run(store.begin(b"a", "s"))
    with pytest.raises(UnknownSession):
        stores.run(store.find(b"b", "s"))
    assert stores.run(store.sessions(b"b")) == ([], False)
    assert [session.name for session in stores.run(store.sessions(b"a"))[0]] == ["s"]


def test_a_turn_of_a_session_that_has_ended_is_dropped(stores):
    store = stores.open()
    uid = stores.add(store, "s", turn([1], [2]))
    stores.run(store.end(b"", "s"))
    assert not stores.run(store.add(uid, turn([1], [3])))
    stores.run(store.begin(b"", "s"))
    assert stores.rows(store, "s") == [], "a new session of the same name is empty"


def test_the_sessions_used_least_recently_leave_when_all_are_too_large(stores):
    store = stores.open(max_bytes=100_000)
    big = list(range(10_000))  # 40 KB
    for name in ("a", "b"):
        stores.add(store, name, turn([1], big))
    stores.run(store.begin(b"", "a"))
    stores.add(store, "c", turn([2], big[:1000]))
    names = {session.name for session in stores.run(store.sessions(b""))[0]}
    assert "c" in names and "b" not in names
    stores.add(store, "d", turn([3], list(range(50_000))))
    assert [session.name for session in stores.run(store.sessions(b""))[0]] == ["d"], "a session in use stays"


def test_a_session_is_forgotten_after_its_ttl(stores, monkeypatch):
    store = stores.open(ttl_s=50.0)
    stores.add(store, "s", turn([1], [2]))
    now = time.time()
    monkeypatch.setattr(store_module.time, "time", lambda: now + 60.0)
    with pytest.raises(UnknownSession):
        stores.run(store.read(b"", "s"))
    assert stores.run(store.begin(b"", "s"))[0].num_turns == 0


def test_a_session_has_a_limit_of_turns_which_the_error_names(stores, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_TURNS", 1)
    store = stores.open()
    stores.add(store, "s", turn([1], [2]))
    with pytest.raises(InvalidField, match="session: expected at most 1 turns"):
        stores.run(store.begin(b"", "s"))


def test_a_file_that_cannot_be_used_is_an_error_of_the_request(stores):
    (stores.folder / FILE).mkdir()
    with pytest.raises(SessionStoreFailed):
        stores.run(stores.open().begin(b"", "s"))


@pytest.mark.parametrize(("a", "b", "length"), [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 9, 3], 1)])
def test_common_prefix(a, b, length):
    assert common_prefix(to_bytes(a), to_bytes(b)) == length


def test_servers_that_start_together_can_all_use_the_file_that_they_make(tmp_path):
    """Without waiting, it fails in one of some 30 folders."""

    async def begin_together(folder: Path) -> None:
        stores = [SessionStore(str(folder), 1 << 30, 100.0) for _ in range(4)]
        await asyncio.gather(*(store.begin(b"", "s") for store in stores))
        for store in stores:
            await store.close()

    for number in range(200):
        folder = tmp_path / str(number)
        folder.mkdir()
        asyncio.run(begin_together(folder))


WRITER = """
import asyncio, sys
import test_session_store as t
async def main():
    store = t.SessionStore(sys.argv[1], 1 << 30, 100.0)
    session, _ = await store.begin(b"", "s")
    for i in range(100000):
        await store.add(session.uid, t.turn([int(sys.argv[2]), i], [i]))
        print(i, flush=True)
asyncio.run(main())
"""


@pytest.mark.processes
def test_writers_that_are_killed_lose_no_turn_that_they_have_stored(stores):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(stores.folder), str(n)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        for n in (1, 2)
    ]
    stored = []
    for n, writer in enumerate(writers, 1):
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 30:
                break
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        stored.append((n, int(rest[-1]) if rest else int(line)))
    store = stores.open()
    ids = {tuple(row["token_ids"]) for row in stores.rows(store, "s")}
    for n, last in stored:
        assert {(n, i, i) for i in range(last + 1)} <= ids
    stores.add(store, "s", turn([5], [6]))
