"""The store in one file, the default. A commit is on the disk when it returns (WAL, synchronous=FULL).

Whoever writes holds a lock on `<file>.lock` as long as it lives, so that a second server is refused at once rather
than when two writes meet. Other programs may read; one that keeps a write transaction open holds us up for `busy_s`,
and then the writes that wait fail.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from functools import partial
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.exc import DBAPIError

from stretto.store.errors import Refused, StoreCorrupted, StoreError, StoreFull, StoreLocked, StoreUnreachable, Taken

_READERS = 4
_MAGIC = b"SQLite format 3\x00"
_CHECKED_AT_START = 64 * 2**20
"""Files up to this size are read through when they are opened, in well under a second."""


class Sqlite:
    def __init__(self, path: str, busy_s: float) -> None:
        self._path = Path(path).absolute()
        self._busy_s = busy_s
        self.name = str(self._path)
        self._lock = self._take_lock()
        try:
            _check_size(self._path)
            self.writer = self._engine("rw", "BEGIN IMMEDIATE", most=1)
            self.reader = self._engine("ro", "BEGIN", most=_READERS)
            self._check_contents()
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, StoreError) or not isinstance(error, (OSError, sqlite3.Error, DBAPIError)):
                raise
            raise self.explain(error) from error

    def claim(self, connection: Connection) -> None:
        """The lock was taken with the file."""

    def explain(self, error: BaseException) -> StoreError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        text = f"{self.name}: {cause}"
        if isinstance(cause, sqlite3.IntegrityError):
            unique = cause.sqlite_errorcode in (sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY)
            return Taken(f"it is there already ({cause})") if unique else Refused(f"it cannot be written ({cause})")
        if isinstance(cause, OSError):
            return StoreUnreachable(text, hint="check that the folder exists and belongs to you")
        if not isinstance(cause, sqlite3.Error):
            return Refused(f"it cannot be written ({type(cause).__name__}: {cause})")
        match getattr(cause, "sqlite_errorcode", 0) & 0xFF:
            case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
                return StoreLocked(
                    f"{text}: another program has been writing for more than {self._busy_s:g} s",
                    hint="end it; `fuser` on the file names it",
                )
            case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
                return StoreCorrupted(text, hint=_RESTORE)
            case sqlite3.SQLITE_FULL:
                return StoreFull(text, hint="make room on the disk; nothing was half written")
            case sqlite3.SQLITE_IOERR if self._no_room():
                return StoreFull(f"{text}: no room on the disk", hint="make room; nothing was half written")
            case sqlite3.SQLITE_IOERR:
                return StoreUnreachable(text, hint="check the disk, its quota and the limit on the size of files")
            case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
                return StoreUnreachable(text, hint="check that the file and its folder belong to you")
            case sqlite3.SQLITE_TOOBIG | sqlite3.SQLITE_MISMATCH | sqlite3.SQLITE_RANGE:
                return Refused(f"it cannot be written ({cause})")
        return StoreError(text)

    def lost(self, error: BaseException) -> bool:
        return False

    def check(self, connection: Connection) -> list[str]:
        damaged = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
        dangling = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        return [
            *(f"database: {text}" for text in damaged if text != "ok"),
            *(f"database: row {row[1]} of {row[0]} names a job that is not there" for row in dangling),
        ]

    def close(self) -> None:
        """The writer last: it takes the write-ahead log into the file."""
        self.reader.dispose()
        self.writer.dispose()
        os.close(self._lock)

    def _take_lock(self) -> int:
        path = f"{self._path}.lock"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Secrets are inside; SQLite gives its other files the same rights.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600))
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self.explain(error) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
            os.close(lock)
            raise StoreLocked(
                f"{self.name} is in use by another server" + (f" (process {owner})" if owner else ""),
                hint="stop that one first (stretto down), or choose another data directory",
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return lock

    def _engine(self, mode: str, begin: str, most: int) -> Engine:
        def connect() -> sqlite3.Connection:
            # Transactions begin where we say so: the module's own ways do not cover reading.
            connection = sqlite3.connect(
                f"file:{quote(self.name)}?mode={mode}",
                uri=True,
                timeout=self._busy_s,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                self._set_up(connection, mode)
            except BaseException:
                connection.close()
                raise
            return connection

        engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=most, max_overflow=0)
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
        return engine

    def _set_up(self, connection: sqlite3.Connection, mode: str) -> None:
        # What is no text must not keep all else from being read: whoever decodes it finds out.
        connection.text_factory = _lenient
        connection.execute("PRAGMA foreign_keys=ON")
        if mode == "ro":
            return
        if connection.execute("PRAGMA journal_mode=WAL").fetchone() != ("wal",):
            raise StoreUnreachable(
                f"{self.name}: this file system cannot share memory between programs, which SQLite needs",
                hint="put the data directory on a local disk, or use PostgreSQL",
            )
        connection.execute("PRAGMA synchronous=FULL")

    def _check_contents(self) -> None:
        with self.writer.connect() as connection:
            connection.exec_driver_sql("SELECT count(*) FROM sqlite_master")
            if self._path.stat().st_size > _CHECKED_AT_START:
                return
            found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if found != "ok":
                raise StoreCorrupted(f"{self.name} is damaged: {found}", hint=_RESTORE)

    def _no_room(self) -> bool:
        try:
            disk = os.statvfs(self._path.parent)
        except OSError:
            return False
        return disk.f_bavail * disk.f_frsize < 2**20


_lenient = partial(str, encoding="utf-8", errors="surrogateescape")

_RESTORE = "restore the file from a backup, or move it away to begin with an empty store"


def _check_size(path: Path) -> None:
    """A file that was cut off between two pages looks whole until the missing ones are asked for."""
    with path.open("rb") as file:
        head = file.read(100)
        size = os.fstat(file.fileno()).st_size
    log = Path(f"{path}-wal")
    if not head.startswith(_MAGIC) or len(head) < 100 or (log.exists() and log.stat().st_size):
        return
    page = int.from_bytes(head[16:18]) or 1
    page = 65536 if page == 1 else page
    pages = int.from_bytes(head[28:32]) if head[24:28] == head[92:96] else 0
    if size < pages * page:
        raise StoreCorrupted(f"{path} is cut off: {size} of {pages * page} bytes are there", hint=_RESTORE)
