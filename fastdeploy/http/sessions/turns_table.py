"""The tables of sessions and turns in SQLite. All functions run on the thread of the store.

A turn has the prompt and the answer of one choice. Its **ids** are those of its prompt and then those of its answer.
A turn stores only what follows ``shared``, the number of ids that it has in common with the beginning of its parent's
ids. So the turns of a session are trees, and a common beginning is stored once. Ids are stored as 32-bit integers.
"""

from __future__ import annotations

import hashlib
import sqlite3
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from fastdeploy.client.turns import common_beginning

TOKEN_BYTES = 4
SESSION_BYTES, TURN_BYTES = 1024, 512  # that one takes besides ids, log probabilities and details
DIGEST_BYTES = 16
MAX_VARIABLES = 500  # of one query
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS session (
    uid TEXT PRIMARY KEY, owner BLOB NOT NULL, name TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL,
    num_turns INTEGER NOT NULL DEFAULT 0, num_tokens INTEGER NOT NULL DEFAULT 0,
    nbytes INTEGER NOT NULL DEFAULT {SESSION_BYTES}, UNIQUE (owner, name));
CREATE INDEX IF NOT EXISTS session_used ON session (used);
CREATE TABLE IF NOT EXISTS turn (
    session TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER, shared INTEGER NOT NULL,
    prompt BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, prompt_length INTEGER NOT NULL,
    length INTEGER NOT NULL, prompt_digest BLOB NOT NULL, digest BLOB NOT NULL, messages BLOB, detail BLOB NOT NULL,
    PRIMARY KEY (session, number)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turn_messages ON turn (session, messages);
CREATE TABLE IF NOT EXISTS total (nbytes INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS session_begins AFTER INSERT ON session BEGIN
    UPDATE total SET nbytes = nbytes + new.nbytes; END;
CREATE TRIGGER IF NOT EXISTS session_grows AFTER UPDATE OF nbytes ON session BEGIN
    UPDATE total SET nbytes = nbytes + new.nbytes - old.nbytes; END;
CREATE TRIGGER IF NOT EXISTS session_ends AFTER DELETE ON session BEGIN
    UPDATE total SET nbytes = nbytes - old.nbytes; DELETE FROM turn WHERE session = old.uid; END;
"""


class Turn(msgspec.Struct, frozen=True):
    """A finished turn. messages: digest of its conversation with its answer (recognition.py); None = it was no chat.
    detail: what readers of the trajectory get to see of the turn besides its tokens, as JSON."""

    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    messages: bytes | None
    detail: bytes


class StoredTurn(NamedTuple):
    """A turn as it is stored. prompt: the ids of its prompt from ``shared`` on. prompt_length, length: numbers of ids
    of the whole prompt, and of prompt and answer."""

    number: int
    parent: int | None
    shared: int
    prompt: bytes
    sampled: bytes
    logprobs: bytes
    prompt_length: int
    length: int
    detail: bytes


class FoundTurn(NamedTuple):
    """The turn that a new request continues. num_messages: so many messages of the request are those of the turn, with
    its answer. ids: those of its prompt and of its answer."""

    number: int
    num_messages: int
    ids: list[int]


def find_turn(db: sqlite3.Connection, uid: str, chain: Sequence[bytes]) -> FoundTurn | None:
    """Return the longest turn whose conversation and answer begin a request. chain: the digest of the first message of
    the request, of its first two, and so on (recognition.py)."""
    for end in range(len(chain), 0, -MAX_VARIABLES):
        part = chain[max(end - MAX_VARIABLES, 0) : end]
        marks = ",".join("?" * len(part))
        found = dict(
            db.execute(
                f"SELECT messages, max(number) FROM turn WHERE session = ? AND messages IN ({marks}) GROUP BY messages",
                (uid, *part),
            ).fetchall()
        )
        for i in range(len(part) - 1, -1, -1):
            if part[i] in found:
                number = found[part[i]]
                return FoundTurn(number, end - len(part) + i + 1, from_bytes(ids_of(db, uid, number)))
    return None


def ids_of(db: sqlite3.Connection, uid: str, number: int) -> bytes:
    """Return the ids of a turn, as bytes."""
    parts: list[bytes] = []
    at: int | None = number
    end: int | None = None
    while at is not None:
        query = "SELECT parent, shared, prompt, sampled FROM turn WHERE session = ? AND number = ?"
        parent, shared, prompt, sampled = db.execute(query, (uid, at)).fetchone()
        own = prompt + sampled
        parts.append(own if end is None else own[: max(end - shared, 0) * TOKEN_BYTES])
        end = shared if end is None else min(end, shared)
        at = parent
    return b"".join(reversed(parts))


def add_turn(db: sqlite3.Connection, uid: str, turn: Turn) -> int:
    """Store a turn of a session, and return its number. The session must be there."""
    prompt, sampled = to_bytes(turn.prompt_ids), to_bytes(turn.sampled_ids)
    logprobs = array("d", turn.logprobs).tobytes()
    parent, shared = _parent(db, uid, prompt)
    (number,) = db.execute("SELECT num_turns FROM session WHERE uid = ?", (uid,)).fetchone()
    own = prompt[shared * TOKEN_BYTES :]
    lengths = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.sampled_ids)
    digests = _digest(prompt), _digest(prompt + sampled)
    row = (uid, number, parent, shared, own, sampled, logprobs, *lengths, *digests, turn.messages, turn.detail)
    db.execute(f"INSERT INTO turn VALUES ({','.join('?' * len(row))})", row)
    nbytes = TURN_BYTES + len(own) + len(sampled) + len(logprobs) + len(turn.detail)
    db.execute(
        "UPDATE session SET num_turns = num_turns + 1, num_tokens = num_tokens + ?, nbytes = nbytes + ? WHERE uid = ?",
        (lengths[1] - shared, nbytes, uid),
    )
    return number


def _parent(db: sqlite3.Connection, uid: str, prompt: bytes) -> tuple[int | None, int]:
    """Return the turn whose ids begin the prompt, or whose prompt does, and the number of these ids; the longest one
    of the turns. Without one, the last turn, and what its prompt has in common with this one."""
    query = "SELECT number, prompt_length, prompt_digest, length, digest FROM turn WHERE session = ? ORDER BY number"
    turns = db.execute(query, (uid,)).fetchall()
    ends: dict[int, dict[bytes, int]] = {}  # length -> digest of so many ids -> turn
    for number, prompt_length, prompt_digest, length, digest in turns:
        ends.setdefault(prompt_length, {}).setdefault(prompt_digest, number)
        ends.setdefault(length, {})[digest] = number
    best: tuple[int | None, int] = None, 0
    hasher, done = hashlib.blake2b(digest_size=DIGEST_BYTES), 0
    for length in sorted(ends):
        if length * TOKEN_BYTES > len(prompt):
            break
        hasher.update(prompt[done : length * TOKEN_BYTES])
        done = length * TOKEN_BYTES
        if (number := ends[length].get(hasher.copy().digest())) is not None:
            best = number, length
    if best[0] is None and turns:
        shared = common_prefix(ids_of(db, uid, turns[-1][0]), prompt)
        if shared:
            return turns[-1][0], shared
    return best


def common_prefix(a: bytes, b: bytes) -> int:
    """Return the number of ids that two lists of ids have in common at their beginning."""
    return len(common_beginning(a, b)) // TOKEN_BYTES


def read_turns(db: sqlite3.Connection, uid: str) -> list[StoredTurn]:
    """Return all turns of a session, in their order."""
    query = f"SELECT {', '.join(StoredTurn._fields)} FROM turn WHERE session = ? ORDER BY number"
    return [StoredTurn(*row) for row in db.execute(query, (uid,))]


def evict(db: sqlite3.Connection, keep: str, oldest: float, max_bytes: int) -> None:
    """Forget the sessions that were not used since ``oldest``, and those that were used least recently while all take
    more than ``max_bytes``. keep: this session stays."""
    db.execute("DELETE FROM session WHERE used < ? AND uid != ?", (oldest, keep))
    while db.execute("SELECT nbytes FROM total").fetchone()[0] > max_bytes:
        query = "DELETE FROM session WHERE uid = (SELECT uid FROM session WHERE uid != ? ORDER BY used LIMIT 1)"
        if not db.execute(query, (keep,)).rowcount:
            return


def to_bytes(ids: Iterable[int]) -> bytes:
    return array("i", ids).tobytes()


def from_bytes(data: bytes) -> list[int]:
    return array("i", data).tolist()


def from_doubles(data: bytes) -> list[float]:
    return array("d", data).tolist()


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def detail_of(turn: StoredTurn) -> dict[str, Any]:
    return msgspec.json.decode(turn.detail)
