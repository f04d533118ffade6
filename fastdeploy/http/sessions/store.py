"""The sessions of a server. All of its API servers, or all gateways of a fleet, use one SQLite file, so that none of
them has anything to lose when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from fastdeploy.core.errors import InvalidField, SessionStoreFailed, UnknownSession
from fastdeploy.http.sessions.turns_table import (
    SCHEMA,
    FoundTurn,
    StoredTurn,
    Turn,
    add_turn,
    evict,
    find_turn,
    read_turns,
)

logger = logging.getLogger(__name__)
FILE = "sessions.sqlite"
BUSY_S = 30.0  # for which one process waits for another one that writes
MAX_TURNS = 10_000
MAX_TOKENS = 8 << 20
MAX_LISTED = 1000
SHOWN_CHARS = 128  # of a name, at the beginning of the uid, for those who look at the engine
T = TypeVar("T")


class Session(NamedTuple):
    """A session that is there. uid: unlike the name, it belongs to this session alone, for all keys and all times."""

    uid: str
    name: str
    created: float
    used: float
    num_turns: int
    num_tokens: int


FIELDS = ", ".join(Session._fields)


def owner_of(key: bytes | None) -> bytes:
    """Return the owner of the sessions that requests with this key make. None = the server has no keys."""
    return b"" if key is None else hashlib.blake2b(key, digest_size=16).digest()


class SessionStore:
    """Sessions by owner and name. folder: of the file; "" = the sessions are in the memory of this process. max_bytes:
    of all sessions; those that were used least recently are forgotten first. ttl_s: seconds after its last turn for
    which a session is kept. The methods raise SessionStoreFailed if the file cannot be used."""

    def __init__(self, folder: str, max_bytes: int, ttl_s: float):
        self._path = os.path.join(folder, FILE) if folder else ":memory:"
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._db: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")

    async def close(self) -> None:
        """Close the file."""

        def close() -> None:
            if self._db is not None:
                self._db.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown(wait=False)

    # ------------------------------------------------------------------ calls

    async def begin(self, owner: bytes, name: str, chain: Sequence[bytes] = ()) -> tuple[Session, FoundTurn | None]:
        """Return the session of this name, made if it is new, and the turn that a request with this chain of digests
        continues. Raises InvalidField if the session may not have another turn."""
        return await self._run("IMMEDIATE", self._begin, owner, name, chain)

    async def add(self, uid: str, turn: Turn) -> bool:
        """Store a turn. False: the session has ended meanwhile."""
        return await self._run("IMMEDIATE", self._add, uid, turn)

    async def find(self, owner: bytes, name: str) -> Session:
        """Return the session of this name. Raises UnknownSession."""
        return await self._run("DEFERRED", self._find, owner, name)

    async def read(self, owner: bytes, name: str) -> tuple[Session, list[StoredTurn]]:
        """Return a session with its turns. Raises UnknownSession."""
        return await self._run("DEFERRED", self._read, owner, name)

    async def sessions(self, owner: bytes) -> tuple[list[Session], bool]:
        """Return the MAX_LISTED sessions that were used last, and whether there are more."""
        return await self._run("DEFERRED", self._sessions, owner)

    async def end(self, owner: bytes, name: str) -> Session:
        """Forget a session, and return what it was. Raises UnknownSession."""
        return await self._run("IMMEDIATE", self._end, owner, name)

    # ------------------------------------------------------------------ on the thread

    async def _run(self, lock: str, call: Callable[..., T], *args: Any) -> T:
        """Call ``call`` with the database and ``args``, in a transaction. lock: IMMEDIATE = it will write."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._checked, lock, call, args)

    def _checked(self, lock: str, call: Callable[..., T], args: Sequence[Any]) -> T:
        try:
            with self._transaction(lock) as db:
                return call(db, *args)
        except (sqlite3.Error, OSError) as error:
            logger.error("the sessions in %s cannot be used: %s", self._path, error)
            raise SessionStoreFailed(f"the sessions cannot be read or written: {error}") from error

    @contextlib.contextmanager
    def _transaction(self, lock: str) -> Iterator[sqlite3.Connection]:
        if self._db is None:
            self._db = _open(self._path)
        db = self._db
        db.execute(f"BEGIN {lock}")
        try:
            yield db
        except BaseException:
            db.rollback()
            raise
        db.commit()

    def _begin(
        self, db: sqlite3.Connection, owner: bytes, name: str, chain: Sequence[bytes]
    ) -> tuple[Session, FoundTurn | None]:
        now = time.time()
        db.execute("DELETE FROM session WHERE used < ?", (now - self._ttl_s,))
        row = db.execute(f"SELECT {FIELDS} FROM session WHERE owner = ? AND name = ?", (owner, name)).fetchone()
        session = Session(*row) if row else Session(f"{name[:SHOWN_CHARS]}#{uuid.uuid4().hex}", name, now, now, 0, 0)
        if session.num_turns >= MAX_TURNS or session.num_tokens >= MAX_TOKENS:
            limits = f"at most {MAX_TURNS} turns and {MAX_TOKENS} tokens in a session"
            raise InvalidField("session", f"expected {limits}; this one is full: begin another one")
        if row:
            db.execute("UPDATE session SET used = ? WHERE uid = ?", (now, session.uid))
            return session, find_turn(db, session.uid, chain)
        db.execute(
            "INSERT INTO session (uid, owner, name, created, used) VALUES (?, ?, ?, ?, ?)",
            (session.uid, owner, name, now, now),
        )
        evict(db, session.uid, now - self._ttl_s, self._max_bytes)
        return session, None

    def _add(self, db: sqlite3.Connection, uid: str, turn: Turn) -> bool:
        now = time.time()
        if not db.execute("UPDATE session SET used = ? WHERE uid = ?", (now, uid)).rowcount:
            return False
        add_turn(db, uid, turn)
        evict(db, uid, now - self._ttl_s, self._max_bytes)
        return True

    def _find(self, db: sqlite3.Connection, owner: bytes, name: str) -> Session:
        query = f"SELECT {FIELDS} FROM session WHERE owner = ? AND name = ? AND used >= ?"
        row = db.execute(query, (owner, name, time.time() - self._ttl_s)).fetchone()
        if row is None:
            raise UnknownSession(f"there is no session {name!r}: it has no request yet, or has ended", param="session")
        return Session(*row)

    def _read(self, db: sqlite3.Connection, owner: bytes, name: str) -> tuple[Session, list[StoredTurn]]:
        session = self._find(db, owner, name)
        return session, read_turns(db, session.uid)

    def _sessions(self, db: sqlite3.Connection, owner: bytes) -> tuple[list[Session], bool]:
        query = f"SELECT {FIELDS} FROM session WHERE owner = ? AND used >= ? ORDER BY used DESC LIMIT ?"
        values = (owner, time.time() - self._ttl_s, MAX_LISTED + 1)
        found = [Session(*row) for row in db.execute(query, values)]
        return found[:MAX_LISTED], len(found) > MAX_LISTED

    def _end(self, db: sqlite3.Connection, owner: bytes, name: str) -> Session:
        session = self._find(db, owner, name)
        db.execute("DELETE FROM session WHERE uid = ?", (session.uid,))
        return session


def _open(path: str) -> sqlite3.Connection:
    """Open the file, and make its tables. Used by one thread only."""
    if path != ":memory:":
        os.close(
            os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        )  # conversations are nobody else's business
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
    # WAL: readers and a writer do not wait for each other. NORMAL: what was written outlives each of our processes.
    _use_wal(db)
    db.execute("PRAGMA synchronous=NORMAL")
    db.executescript("BEGIN IMMEDIATE;" + SCHEMA + "COMMIT;")
    return db


def _use_wal(db: sqlite3.Connection) -> None:
    """Of processes that make the file at the same time, SQLite refuses some at once. So each of them tries again."""
    end = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() >= end:
                raise
        time.sleep(0.005)
