"""Whether the projection is what the events make of every job: the slow and obviously right way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import Connection, Row, select

from stretto.jobs.lifecycle import fold
from stretto.jobs.model import Job
from stretto.store import schema as t
from stretto.store import writing

_CHUNK = 200
"""Jobs at a time, so that memory does not grow with the history."""


def differences(connection: Connection) -> Iterator[str]:
    last = 0
    c = t.jobs.c
    while rows := connection.execute(select(t.jobs).where(c.number > last).order_by(c.number).limit(_CHUNK)).all():
        first, last = rows[0].number, rows[-1].number
        histories = _histories(connection, first, last)
        labels = _labels(connection, first, last)
        keys = _keys(connection, first, last)
        for row in rows:
            text = _difference(row, histories[row.number], labels[row.number], keys[row.number])
            if text:
                yield f"job {row.number}: {text}"


def _difference(row: Row[Any], history: list[Any], labels: dict[str, str], keys: set[tuple[str, str, str]]) -> str:
    try:
        told = [(at_s, writing.read_event.decode(text)) for at_s, text in history]
        wanted = fold(told)
        stored = writing.read_job.decode(row.job)
    except (msgspec.MsgspecError, ValueError) as error:
        return f"cannot be read: {error}"
    if wanted is None:
        return "has no events"
    if differing := _fields(wanted, stored):
        return f"its events say {differing}"
    columns = {name: value for name, value in row._mapping.items() if name != "job"}
    if wrong := sorted(name for name, value in writing.columns(wanted).items() if columns[name] != value):
        return f"is listed under a wrong {', '.join(wrong)}"
    if labels != writing.labels(wanted):
        return "is listed under wrong labels"
    submitted = told[0][1]
    key, digest = getattr(submitted, "key", ""), getattr(submitted, "digest", "")
    return "" if keys == ({(wanted.user, key, digest)} if key else set()) else "has a wrong idempotency key"


def _fields(wanted: Job, stored: Job) -> str:
    pairs = ((name, getattr(wanted, name), getattr(stored, name)) for name in Job.__struct_fields__)
    return "; ".join(f"{name} is {want!r}, not {have!r}" for name, want, have in pairs if want != have)


def _histories(connection: Connection, first: int, last: int) -> dict[int, list[tuple[float, str]]]:
    c = t.events.c
    found: dict[int, list[tuple[float, str]]] = defaultdict(list)
    of_these = select(c.job, c.at_s, c.event).where(c.job.between(first, last)).order_by(c.job, c.seq)
    for number, at_s, text in connection.execute(of_these):
        found[number].append((at_s, text))
    return found


def _labels(connection: Connection, first: int, last: int) -> dict[int, dict[str, str]]:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for key, value, number in connection.execute(select(t.labels).where(t.labels.c.job.between(first, last))):
        found[number][key] = value
    return found


def _keys(connection: Connection, first: int, last: int) -> dict[int, set[tuple[str, str, str]]]:
    found: dict[int, set[tuple[str, str, str]]] = defaultdict(set)
    of_these = select(t.submissions).where(t.submissions.c.job.between(first, last))
    for user, key, digest, number in connection.execute(of_these):
        found[number].add((user, key, digest))
    return found
