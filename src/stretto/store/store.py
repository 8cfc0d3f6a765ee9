"""The store: what the control plane must not forget.

    store = Store.open("data/stretto.db", clock=clock)        # or postgresql://…
    known = store.load()
    seqs = store.append([Entry(at_s, event, job)]).result()   # durable now

Writes return futures and share transactions, see `writer`; an append is refused (`Stale`, `Taken`, `Refused`) unless
each of its jobs is what its event makes of the job that is stored. Reads see what was durable when they began, may be
called from a few threads at a time, and keep nothing in memory. One process writes; a second one gets `StoreLocked`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
from sqlalchemy.exc import DBAPIError

from stretto.jobs.events import Recorded
from stretto.jobs.model import Job
from stretto.store import checking, database, reading, writing
from stretto.store import schema as tables
from stretto.store.errors import Refused, StoreClosed, StoreError
from stretto.store.model import Entry, Loaded, Page, Query, Token
from stretto.store.writer import Writer

Answer = TypeVar("Answer")

_USE_NOTED_EVERY_S = 60.0


class Store:
    def __init__(self, place: database.Database, clock: Callable[[], float]) -> None:
        self._database, self._clock = place, clock
        self._writer = Writer(place)
        self._closed = False

    @staticmethod
    def open(url_or_path: str, *, clock: Callable[[], float], busy_s: float = 5.0) -> Store:
        """Make it, or bring it to the present form. `busy_s`: how long to wait for others that write."""
        place = database.find(url_or_path, busy_s)
        try:
            return Store(place, clock)
        except (StoreError, DBAPIError) as error:
            place.close()
            raise _explained(place, error) from error

    def load(self) -> Loaded:
        return self._read(reading.load)

    def append(self, entries: Sequence[Entry]) -> Future[list[int]]:
        """All or none; the sequence numbers, once they are durable."""
        try:
            work = writing.Append(entries)
        except Refused as refused:
            return _failed(refused)
        return self._writer.submit(work)

    def setting(self, key: str) -> Any:
        """None: it was never put."""
        return self._read(reading.setting, key)

    def put_setting(self, key: str, value: Any) -> Future[None]:
        try:
            text = writing.encoder.encode(value).decode()
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            return _failed(Refused(f"the setting {key!r} cannot be stored: {error}"))
        return self._writer.submit(writing.Put(tables.settings, key, text))

    def put_learned(self, key: str, blob: bytes) -> Future[None]:
        return self._writer.submit(writing.Put(tables.learned, key, blob))

    def forget_learned(self, key: str) -> Future[None]:
        return self._writer.submit(writing.Drop(tables.learned, key))

    def job(self, number: int) -> Job | None:
        return self._read(reading.job, number)

    def latest(self, name: str) -> Job | None:
        """The one that was submitted last under this name."""
        return self._read(reading.latest, name)

    def submitted_with(self, user: str, key: str) -> tuple[Job, str] | None:
        """The job that came with this idempotency key, and the digest of what came."""
        return self._read(reading.submitted_with, user, key)

    def jobs(self, query: Query) -> Page[Job]:
        return self._read(reading.jobs, query)

    def count(self) -> dict[str, int]:
        """Jobs by phase."""
        return self._read(reading.count)

    def events(
        self,
        *,
        job: int | None = None,
        after: int = 0,
        before: int | None = None,
        limit: int = 100,
        newest_first: bool = False,
    ) -> list[Recorded]:
        """`after` and `before` are sequence numbers, not included."""
        return self._read(
            lambda connection: reading.events(
                connection, job=job, after=after, before=before, limit=limit, newest_first=newest_first
            )
        )

    def prune(self, ended_before_s: float, most: int) -> Future[int]:
        """Forget jobs that ended before then, with their events and idempotency keys, and events of no job. At most so
        many of both together, the oldest first; how many they were. Call it again while it is `most`."""
        return self._writer.submit(writing.Prune(ended_before_s, most))

    def add_token(self, token: Token) -> Future[None]:
        return self._writer.submit(writing.AddToken(token))

    def tokens(self) -> list[Token]:
        """All, also those that have expired; the oldest first."""
        return self._read(reading.tokens)

    def give_account(self, token_id: str, account: str, uid: int) -> Future[None]:
        """From now on its jobs run as this account."""
        return self._writer.submit(writing.GiveAccount(token_id, account, uid))

    def revoke_token(self, token_id: str) -> Future[bool]:
        """False: there was none."""
        return self._writer.submit(writing.RevokeToken(token_id))

    def token_by_hash(self, digest: str) -> Token | None:
        """The token with this SHA-256, if it is valid now. That it was used is noted, once a minute."""
        token, now_s = self._read(reading.token_by_hash, digest), self._clock()
        if token is None or token.expired(now_s):
            return None
        if token.last_used_s is None or now_s - token.last_used_s >= _USE_NOTED_EVERY_S:
            self._writer.submit(writing.TouchToken(token.id, now_s, _USE_NOTED_EVERY_S))
        return token

    def verify(self) -> list[str]:
        """What is wrong: damage, and every job that is not what its events make of it. Reads everything."""
        return self._read(lambda connection: [*self._database.check(connection), *checking.differences(connection)])

    @property
    def transactions(self) -> int:
        """Committed since it was opened; fewer than the writes that they carried."""
        return self._writer.transactions

    def close(self) -> None:
        """After all writes that were asked for."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        self._database.close()

    def _read(self, question: Callable[..., Answer], *arguments: Any) -> Answer:
        """A connection that broke while nobody used it is replaced once."""
        if self._closed:
            raise StoreClosed("the store is closed")
        try:
            try:
                return self._ask(question, *arguments)
            except DBAPIError as error:
                if not error.connection_invalidated:
                    raise
                return self._ask(question, *arguments)
        except DBAPIError as error:
            raise _explained(self._database, error) from error

    def _ask(self, question: Callable[..., Answer], *arguments: Any) -> Answer:
        with self._database.reader.connect() as connection:
            return question(connection, *arguments)


def _explained(place: database.Database, error: StoreError | DBAPIError) -> StoreError:
    return error if isinstance(error, StoreError) else place.explain(error)


def _failed(reason: StoreError) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(reason)
    return future
