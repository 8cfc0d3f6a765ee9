"""The one thread that writes. Everything that waits when a transaction begins goes into it: group commit.

What it promises:
- Works are carried out in the order of `submit`, and a future is done when its work is durable.
- A work that does not fit (`Refused`) fails alone; the others of its transaction are written.
- When the database fails (no room, locked, unreachable) all works of the transaction fail and none is written. Those
  that came later are tried in the next one; what builds on a failed work is refused there, see `writing`.
- A future cannot be cancelled: what was submitted is written, whether or not somebody still waits for it.
- Where the connection breaks during a commit, the writer looks whether it took place; if it cannot, the error says so.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import Connection, select

from stretto.store import schema as t
from stretto.store.database import Database
from stretto.store.errors import Refused, StoreClosed, StoreError, StoreUnreachable
from stretto.store.migrating import migrate
from stretto.store.writing import Batch, Row, Work, last_seq

Result = TypeVar("Result")
Pending: TypeAlias = tuple[Work[Any], "Future[Any]"]
Outcome: TypeAlias = Any
"""A work's result, or the `Refused` that it met."""

_MOST = 1000
"""Works in one transaction."""


class Writer:
    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[Pending] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._connection: Connection | None = None
        self._next_seq = 1
        self.transactions = 0
        """Committed so far."""
        self._connect()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, work: Work[Result]) -> Future[Result]:
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            if self._closing:
                future.set_exception(StoreClosed("the store is closed"))
                return future
            self._waiting.append((work, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        if self._connection is not None:
            self._connection.close()

    def _run(self) -> None:
        while self._wait():
            group: list[Pending] = []
            try:
                # The group is taken when the transaction has begun: whoever came while it waited for that is in.
                connection = self._begin()
                group = self._take()
                outcomes = self._write(connection, group)
            except Exception as error:
                self._fail(group or self._take(), error)
                continue
            _resolve(group, outcomes)

    def _wait(self) -> bool:
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            return bool(self._waiting)

    def _take(self) -> list[Pending]:
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(_MOST, len(self._waiting)))]

    def _write(self, connection: Connection, group: list[Pending]) -> list[Outcome]:
        batch, outcomes = self._execute(connection, [work for work, _ in group])
        self._commit(connection, batch)
        return outcomes

    def _execute(self, connection: Connection, works: list[Work[Any]]) -> tuple[Batch, list[Outcome]]:
        try:
            return self._together(connection, works)
        except Exception as error:
            if self._database.lost(error) or not isinstance(self._explain(error), Refused):
                raise
            connection.rollback()
            connection.begin()
            return self._one_by_one(connection, works)

    def _together(self, connection: Connection, works: list[Work[Any]]) -> tuple[Batch, list[Outcome]]:
        batch = Batch(connection, self._next_seq, frozenset().union(*(work.numbers for work in works)))
        outcomes: list[Outcome] = []
        for work in works:
            try:
                outcomes.append(work.write(batch))
            except Refused as refused:
                outcomes.append(refused)
        batch.flush()
        return batch, outcomes

    def _one_by_one(self, connection: Connection, works: list[Work[Any]]) -> tuple[Batch, list[Outcome]]:
        """After the database has refused one of them, and would not say which."""
        batch = Batch(connection, self._next_seq, ())
        outcomes: list[Outcome] = []
        for work in works:
            batch, outcome = self._apart(connection, work, batch)
            outcomes.append(outcome)
        return batch, outcomes

    def _apart(self, connection: Connection, work: Work[Any], before: Batch) -> tuple[Batch, Outcome]:
        """Within a savepoint. Gives the batch that goes on from here: the one before, if this work is refused."""
        savepoint = connection.begin_nested()
        try:
            batch = Batch(connection, before.next_seq, work.numbers, before.last_event)
            outcome = work.write(batch)
            batch.flush()
            savepoint.commit()
        except Exception as error:
            refused = self._explain(error)
            if not isinstance(refused, Refused):
                raise
            savepoint.rollback()
            return before, refused
        return batch, outcome

    def _commit(self, connection: Connection, batch: Batch) -> None:
        try:
            connection.commit()
        except Exception as error:
            if not self._database.lost(error) or not self._took_place(batch.last_event, error):
                raise
        else:
            self._next_seq = batch.next_seq
        self.transactions += 1

    def _took_place(self, last: Row | None, error: Exception) -> bool:
        """Nobody else writes while we hold the lock, so the last event is there if and only if all of them are."""
        self._disconnect()
        try:
            connection = self._connect()
            row = connection.execute(select(t.events).where(t.events.c.seq == last["seq"])).first() if last else None
            connection.rollback()
        except Exception:
            raise StoreUnreachable(
                f"{self._database.name}: the connection broke during a commit; whether it took place is not known",
                hint="read the job again before you repeat it",
            ) from error
        return row is not None and dict(row._mapping) == last

    def _begin(self) -> Connection:
        """With a new connection, if the one we have broke while nothing was to be written."""
        connection = self._connection or self._connect()
        try:
            connection.begin()
        except Exception as error:
            if not self._database.lost(error):
                raise
            self._disconnect()
            connection = self._connect()
            connection.begin()
        return connection

    def _connect(self) -> Connection:
        """The only one who writes, tables of our form, and where the sequence of events goes on."""
        connection = self._database.writer.connect()
        try:
            self._database.claim(connection)
            migrate(connection, self._database.name)
            self._next_seq = last_seq(connection) + 1
            connection.rollback()
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            # Not back into the pool: the lock, and the trouble, belong to this very connection.
            if not connection.invalidated:
                connection.detach()
            connection.close()

    def _fail(self, group: list[Pending], error: Exception) -> None:
        reason = self._explain(error)
        self._recover(error)
        for _, future in group:
            future.set_exception(reason)

    def _recover(self, error: Exception) -> None:
        """Back to where the transaction began; by a new connection where this one is of no use."""
        try:
            if self._database.lost(error):
                raise error
            if self._connection is not None:
                self._connection.rollback()
        except Exception:
            self._disconnect()

    def _explain(self, error: Exception) -> StoreError:
        return error if isinstance(error, StoreError) else self._database.explain(error)


def _resolve(group: list[Pending], outcomes: list[Outcome]) -> None:
    for (_, future), outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, Refused):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
