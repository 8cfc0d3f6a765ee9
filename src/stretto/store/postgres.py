"""The store on a PostgreSQL server, by URL (psycopg 3). The server's settings say how durable a commit is, but it is
never less than on the server's own disk.

The writing connection holds an advisory lock of its schema: a second server is refused, and one whose connection broke
must take the lock again before it writes on.
"""

from __future__ import annotations

from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from stretto.store.errors import Refused, StoreCorrupted, StoreError, StoreFull, StoreLocked, StoreUnreachable, Taken

_READERS = 4
_NAMESPACE = 0x57E7
"""Of our advisory locks; the other half is the schema."""
_CONNECT_S = 10


class Postgres:
    def __init__(self, url: URL, busy_s: float) -> None:
        url = url.set(drivername="postgresql+psycopg")
        if "password" in url.query:
            # Only there is it hidden in what people read.
            url = url.set(password=str(url.query["password"])).difference_update_query(["password"])
        self.name = url.render_as_string(hide_password=True).replace("+psycopg", "")
        self._busy_s = busy_s
        self.writer = self._engine(url, most=1)
        # At the server now, not with the first statement: a connection that broke is noticed before anything is to be
        # written with it, and those who were just answered have come back with their next write.
        event.listen(self.writer, "begin", lambda connection: connection.exec_driver_sql("SELECT 1"))
        self.reader: Engine = self._engine(url, most=_READERS).execution_options(
            isolation_level="REPEATABLE READ", postgresql_readonly=True
        )

    def claim(self, connection: Connection) -> None:
        connection.execute(text("SELECT set_config('lock_timeout', :wait, false)"), {"wait": f"{self._busy_s:g}s"})
        if connection.scalar(text("SHOW synchronous_commit")) == "off":
            connection.execute(text("SET synchronous_commit = local"))
        try:
            connection.execute(
                text("SELECT pg_advisory_lock(:space, hashtext(current_schema()))"), {"space": _NAMESPACE}
            )
        except DBAPIError as error:
            connection.rollback()
            if not isinstance(error.orig, psycopg.errors.LockNotAvailable):
                raise
            raise StoreLocked(
                f"{self.name} is in use by another server{self._owner(connection)}",
                hint="stop that one first (stretto down), or choose another database or schema",
            ) from None
        connection.commit()

    def explain(self, error: BaseException) -> StoreError:
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = f"{self.name}: {str(cause).strip()}"
        if isinstance(cause, psycopg.errors.UniqueViolation):
            return Taken(f"it is there already ({cause.diag.message_detail})")
        if isinstance(cause, (psycopg.IntegrityError, psycopg.DataError)):
            return Refused(f"it cannot be written ({cause})")
        if not isinstance(cause, psycopg.Error):
            return Refused(f"it cannot be written ({type(cause).__name__}: {cause})")
        match cause.sqlstate or "":
            case "53100":
                return StoreFull(said, hint="make room on the server's disk; nothing was half written")
            case "55P03" | "40P01":
                return StoreLocked(said, hint="another program holds our tables; end it")
            case "XX001" | "XX002":
                return StoreCorrupted(said, hint="restore the database from a backup")
        return StoreUnreachable(said, hint="check that the server runs, the URL, and the user's rights")

    def lost(self, error: BaseException) -> bool:
        if isinstance(error, DBAPIError):
            return error.connection_invalidated
        return isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))

    def check(self, connection: Connection) -> list[str]:
        return []

    def close(self) -> None:
        self.reader.dispose()
        self.writer.dispose()

    def _engine(self, url: URL, most: int) -> Engine:
        given: dict[str, Any] = {"application_name": "stretto", "connect_timeout": _CONNECT_S}
        return create_engine(
            url,
            connect_args={key: value for key, value in given.items() if key not in url.query},
            pool_size=most,
            max_overflow=0,
        )

    def _owner(self, connection: Connection) -> str:
        found = connection.execute(
            text(
                "SELECT a.application_name, a.client_addr, a.pid FROM pg_locks l JOIN pg_stat_activity a USING (pid) "
                "WHERE l.locktype = 'advisory' AND l.classid = :space AND l.granted LIMIT 1"
            ),
            {"space": _NAMESPACE},
        ).first()
        connection.rollback()
        return f" ({found[0]} at {found[1] or 'this host'}, backend {found[2]})" if found else ""
