"""What can be written, as values that a transaction carries out.

A `Batch` gathers the rows of many appends, so that a table is written once per transaction. An `Append` is checked
before it adds any row: each of its jobs must be what its event makes of the job that is stored. So the projection is
the fold of the events, whatever the caller does, and an append that builds on one that failed is refused by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, insert, or_, select, update

from stretto.jobs.events import Event, Noted, Submitted
from stretto.jobs.lifecycle import apply
from stretto.jobs.model import Job
from stretto.store import schema as t
from stretto.store.errors import Refused, Stale, Taken
from stretto.store.model import Entry, Token

Result = TypeVar("Result", covariant=True)
Row = dict[str, Any]

encoder = msgspec.json.Encoder()
read_event = msgspec.json.Decoder(Event)
read_job = msgspec.json.Decoder(Job)

_CHUNK = 500
"""Values in one `IN (…)`: SQLite takes no more than 32,766."""

_INSERT_JOB = insert(t.jobs)
_UPDATE_JOB = (
    update(t.jobs)
    .where(t.jobs.c.number == bindparam("_number"))
    .values(phase=bindparam("_phase"), ended_s=bindparam("_ended_s"), job=bindparam("_job"))
)
_INSERT_EVENT = insert(t.events)
_INSERT_LABEL = insert(t.labels)
_INSERT_SUBMISSION = insert(t.submissions)


class Work(Protocol[Result]):
    """Something to write. It may be carried out twice, if the first transaction was rolled back."""

    numbers: frozenset[int]
    """Jobs whose stored state it must see."""

    def write(self, batch: Batch) -> Result: ...


class Batch:
    """One transaction, or one savepoint of it."""

    def __init__(
        self, connection: Connection, next_seq: int, numbers: Iterable[int], last_event: Row | None = None
    ) -> None:
        self.connection, self.next_seq = connection, next_seq
        self.jobs, self.damaged = _stored(connection, sorted(numbers))
        """As they are now, with what this batch has changed; and whose rows cannot be read: what is written next of
        those, by who has them in memory, is believed."""
        self._new: dict[int, Row] = {}
        self._changed: dict[int, Row] = {}
        self._events: list[Row] = []
        self._labels: list[Row] = []
        self._submissions: list[Row] = []
        self.last_event = last_event
        """Of those that were written, in this batch or before it."""

    def add(self, line: Line) -> int:
        """Take over a line that was checked; its sequence number."""
        seq = self.next_seq
        self.next_seq += 1
        job, number = line.job, None
        if job is not None:
            number = job.number
            self.jobs[number] = job
            if isinstance(line.event, Submitted):
                self._submit(line.event, job, line.job_text)
            elif number in self._new:
                self._new[number] |= {"phase": job.phase, "ended_s": job.ended_s, "job": line.job_text}
            else:
                self._changed[number] = {
                    "_number": number, "_phase": job.phase, "_ended_s": job.ended_s, "_job": line.job_text
                }  # fmt: skip
        self._events.append({"seq": seq, "at_s": line.at_s, "job": number, "event": line.event_text})
        return seq

    def flush(self) -> None:
        """Jobs first: all else refers to them."""
        for statement, rows in (
            (_INSERT_JOB, list(self._new.values())),
            (_UPDATE_JOB, list(self._changed.values())),
            (_INSERT_EVENT, self._events),
            (_INSERT_LABEL, self._labels),
            (_INSERT_SUBMISSION, self._submissions),
        ):
            if rows:
                self.connection.execute(statement, rows)
        if self._events:
            self.last_event = self._events[-1]
        self._new, self._changed = {}, {}
        self._events, self._labels, self._submissions = [], [], []

    def _submit(self, event: Submitted, job: Job, text: str) -> None:
        self._new[job.number] = {**columns(job), "job": text}
        self._labels.extend({"job": job.number, "key": key, "value": value} for key, value in labels(job).items())
        if event.key:
            self._submissions.append(
                {"user": job.user, "key": event.key, "digest": event.digest, "job": job.number}
            )  # fmt: skip


def columns(job: Job) -> Row:
    """What lists are filtered by."""
    return {
        "number": job.number,
        "name": job.name,
        "user": job.user,
        "phase": job.phase,
        "level": job.level,
        "queue": str(job.spec.get("queue") or "default"),
        "submitted_s": job.submitted_s,
        "ended_s": job.ended_s,
    }


def labels(job: Job) -> dict[str, str]:
    found = job.spec.get("labels") or {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


class Line(msgspec.Struct, frozen=True):
    """An entry as it will be read back: through JSON and out of it again."""

    at_s: float
    event: Event
    event_text: str
    job: Job | None
    job_text: str

    @classmethod
    def of(cls, entry: Entry) -> Line:
        """Whatever could not be read again (a loss that is not a number, say) is refused before it is written."""
        if not math.isfinite(entry.at_s):
            raise Refused(f"an event at {entry.at_s} s is at no time")
        try:
            event_text = encoder.encode(entry.event).decode()
            event = read_event.decode(event_text)
            job_text = "" if entry.job is None else encoder.encode(entry.job).decode()
            job = None if entry.job is None else read_job.decode(job_text)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Refused(f"{_title(entry)} cannot be stored: {error}") from None
        if job is not None and "\x00" in "".join(_words(job, event)):
            raise Refused(f"{_title(entry)} has a zero character in a name, a label or its key")
        return cls(float(entry.at_s), event, event_text, job, job_text)


def _words(job: Job, event: Event) -> Iterable[str]:
    """All that goes into columns of its own: PostgreSQL knows no zero characters there."""
    if not isinstance(event, Submitted):
        return ()
    found = labels(job)
    return (job.name, job.user, str(job.spec.get("queue") or ""), event.key, event.digest, *found, *found.values())


def _title(entry: Entry) -> str:
    event = type(entry.event).__name__.lower()
    return f"the event {event!r}" + (f" of job {entry.job.number}" if entry.job else "")


class Append:
    """Events with their jobs, all or none."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._lines = [Line.of(entry) for entry in entries]
        made = {line.job.number for line in self._lines if line.job and isinstance(line.event, Submitted)}
        self.numbers = frozenset(line.job.number for line in self._lines if line.job) - made

    def write(self, batch: Batch) -> list[int]:
        now: dict[int, Job] = {}
        for line in self._lines:
            if line.job is None:
                _is_about_nothing(line)
                continue
            number = line.job.number
            before = now.get(number) or batch.jobs.get(number)
            is_believed = before is None and number in batch.damaged and not isinstance(line.event, Submitted)
            now[number] = line.job if is_believed else _follow(before, line, number)
        return [batch.add(line) for line in self._lines]


def _is_about_nothing(line: Line) -> None:
    if not isinstance(line.event, Noted):
        raise Refused(f"the event {type(line.event).__name__.lower()!r} needs the job that it is about")


def _follow(before: Job | None, line: Line, number: int) -> Job:
    kind = type(line.event).__name__.lower()
    if isinstance(line.event, Submitted):
        if before is not None:
            raise Taken(f"job {number} is there already")
    elif before is None:
        raise Stale(f"the event {kind!r} is about job {number}, which is not stored", hint=_AGAIN)
    after = apply(before, line.event, line.at_s)
    if after != line.job:
        raise Stale(
            f"job {number} is stored in another state than the one that the event {kind!r} was written for", hint=_AGAIN
        )
    return after


_AGAIN = "an earlier write about it failed, or somebody else changed it: read the job again"


class Put:
    """A setting, or something learned: replaces what is there under the key."""

    numbers: frozenset[int] = frozenset()

    def __init__(self, table: Any, key: str, value: str | bytes) -> None:
        self._table, self._key, self._value = table, key, value

    def write(self, batch: Batch) -> None:
        batch.connection.execute(delete(self._table).where(self._table.c.key == self._key))
        batch.connection.execute(insert(self._table), {"key": self._key, "value": self._value})


class Drop:
    """Removes what is there under the key, if anything is."""

    numbers: frozenset[int] = frozenset()

    def __init__(self, table: Any, key: str) -> None:
        self._table, self._key = table, key

    def write(self, batch: Batch) -> None:
        batch.connection.execute(delete(self._table).where(self._table.c.key == self._key))


class Prune:
    """Retention: ended jobs with all that belongs to them, then events of no job; the oldest first."""

    numbers: frozenset[int] = frozenset()

    def __init__(self, ended_before_s: float, most: int) -> None:
        self._before_s, self._most = ended_before_s, most

    def write(self, batch: Batch) -> int:
        batch.flush()
        jobs = self._old_jobs(batch.connection)
        notes = self._old_notes(batch.connection, self._most - len(jobs))
        if not jobs and not notes:
            return 0
        _remember(batch.connection, "seq", batch.next_seq - 1)
        if jobs:
            _remember(batch.connection, "number", max(jobs))
        for part in _chunks(jobs):
            batch.connection.execute(delete(t.jobs).where(t.jobs.c.number.in_(part)))
        for part in _chunks(notes):
            batch.connection.execute(delete(t.events).where(t.events.c.seq.in_(part)))
        for number in jobs:
            batch.jobs.pop(number, None)
        return len(jobs) + len(notes)

    def _old_jobs(self, connection: Connection) -> list[int]:
        c = t.jobs.c
        old = select(c.number).where(c.ended_s < self._before_s).order_by(c.ended_s, c.number).limit(self._most)
        return list(connection.scalars(old))

    def _old_notes(self, connection: Connection, most: int) -> list[int]:
        c = t.events.c
        old = select(c.seq).where(c.job.is_(None), c.at_s < self._before_s).order_by(c.seq).limit(most)
        return list(connection.scalars(old))


class AddToken:
    numbers: frozenset[int] = frozenset()

    def __init__(self, token: Token) -> None:
        self._token = token

    def write(self, batch: Batch) -> None:
        batch.connection.execute(insert(t.tokens), msgspec.structs.asdict(self._token))


class RevokeToken:
    numbers: frozenset[int] = frozenset()

    def __init__(self, token_id: str) -> None:
        self._id = token_id

    def write(self, batch: Batch) -> bool:
        return bool(batch.connection.execute(delete(t.tokens).where(t.tokens.c.id == self._id)).rowcount)


class GiveAccount:
    numbers: frozenset[int] = frozenset()

    def __init__(self, token_id: str, account: str, uid: int) -> None:
        self._id, self._account, self._uid = token_id, account, uid

    def write(self, batch: Batch) -> None:
        change = update(t.tokens).where(t.tokens.c.id == self._id)
        batch.connection.execute(change.values(account=self._account, uid=self._uid))


class TouchToken:
    """Note that it was used, unless that was noted less than `every_s` ago."""

    numbers: frozenset[int] = frozenset()

    def __init__(self, token_id: str, at_s: float, every_s: float) -> None:
        self._id, self._at_s, self._every_s = token_id, at_s, every_s

    def write(self, batch: Batch) -> None:
        c = t.tokens.c
        long_ago = or_(c.last_used_s.is_(None), c.last_used_s <= self._at_s - self._every_s)
        batch.connection.execute(update(t.tokens).where(c.id == self._id, long_ago).values(last_used_s=self._at_s))


def last_seq(connection: Connection) -> int:
    """The largest that was ever given out."""
    return _largest(connection, t.events.c.seq, "seq")


def last_number(connection: Connection) -> int:
    return _largest(connection, t.jobs.c.number, "number")


def _largest(connection: Connection, column: Any, counter: str) -> int:
    there = connection.scalar(select(func.max(column))) or 0
    removed = connection.scalar(select(t.counters.c.value).where(t.counters.c.name == counter)) or 0
    return max(there, removed)


def _remember(connection: Connection, counter: str, value: int) -> None:
    known = connection.scalar(select(t.counters.c.value).where(t.counters.c.name == counter)) or 0
    connection.execute(delete(t.counters).where(t.counters.c.name == counter))
    connection.execute(insert(t.counters), {"name": counter, "value": max(known, value)})


def _stored(connection: Connection, numbers: Sequence[int]) -> tuple[dict[int, Job], set[int]]:
    c = t.jobs.c
    found: dict[int, Job] = {}
    damaged: set[int] = set()
    for part in _chunks(numbers):
        for number, text in connection.execute(select(c.number, c.job).where(c.number.in_(part))):
            try:
                job = read_job.decode(text)
            except ValueError:
                job = None
            if job is not None and job.number == number:
                found[number] = job
            else:
                damaged.add(number)
    return found, damaged


def _chunks(numbers: Sequence[int]) -> Iterable[Sequence[int]]:
    return (numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK))
