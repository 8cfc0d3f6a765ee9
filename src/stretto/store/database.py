"""What SQLite and PostgreSQL have in common for us: engines to write and to read with, a lock, words for errors."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from stretto.errors import UsageError
from stretto.store.errors import StoreError


class Database(Protocol):
    name: str
    """What people call it: a path, or a URL without the password."""
    writer: Engine
    """One connection; its transactions take the right to write when they begin."""
    reader: Engine
    """Several connections that cannot write; a transaction sees one state of the database."""

    def claim(self, connection: Connection) -> None:
        """Called with every new connection of the writer: be the only one, or raise `StoreLocked`."""

    def explain(self, error: BaseException) -> StoreError:
        """In our words. `Refused`: the fault is in what was written, not in the database."""

    def lost(self, error: BaseException) -> bool:
        """The connection is gone; whether a commit that was under way took place is not known."""

    def check(self, connection: Connection) -> list[str]:
        """What is damaged below our tables."""

    def close(self) -> None: ...


def find(url_or_path: str, busy_s: float) -> Database:
    """A path or `sqlite:///path` is a file; `postgresql://…` a server."""
    if "://" not in url_or_path:
        from stretto.store.sqlite import Sqlite

        return Sqlite(url_or_path, busy_s)
    try:
        url = make_url(url_or_path)
    except ArgumentError:
        raise UsageError("the database URL cannot be read", hint=_FORMS) from None
    kind = url.get_backend_name()
    if kind == "sqlite":
        from stretto.store.sqlite import Sqlite

        if not url.database or url.database == ":memory:":
            raise UsageError("a store in memory would forget everything", hint=_FORMS)
        return Sqlite(url.database, busy_s)
    if kind in ("postgresql", "postgres"):
        from stretto.store.postgres import Postgres

        return Postgres(url, busy_s)
    raise UsageError(f"no store on {kind!r}", hint=_FORMS)


_FORMS = "give a path, sqlite:////absolute/path, or postgresql://user@host/database"
