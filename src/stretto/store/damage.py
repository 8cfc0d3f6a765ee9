"""Rows that cannot be read: a disk has lied, somebody has edited the database, or a newer Stretto wrote them.

Such a row is the trouble of its job alone. What a job was is told by its events as well, so it is made again from those
(`whole`); where they are damaged too there is a stand-in, which has the columns that can still be read, and says why.
The next event about the job puts its row right.
"""

from __future__ import annotations

import logging
import math
from typing import Any, cast, get_args

import msgspec
from sqlalchemy import Connection, select

from stretto.jobs.events import Event, Noted
from stretto.jobs.lifecycle import fold
from stretto.jobs.model import ENDED, Context, Job, Level
from stretto.store import schema as t
from stretto.store.model import Damaged
from stretto.store.writing import read_event, read_job

_log = logging.getLogger("stretto.store")

_LONGEST_WHY = 300
_LONGEST_WORD = 200


def job(connection: Connection, number: int, text: Any) -> Job:
    """What its row says, or else its events, or else the stand-in."""
    try:
        return sound(number, text)
    except ValueError as error:
        return found(connection, number, str(error)).job


def sound(number: int, text: Any) -> Job:
    """Raises `ValueError` with what is wrong."""
    job = read_job.decode(text)
    if job.number != number:
        raise ValueError(f"it is the row of job {job.number}")
    return job


def found(connection: Connection, number: int, why: str) -> Damaged:
    """What can still be said of a job whose row cannot be read."""
    why = why[:_LONGEST_WHY].encode(errors="replace").decode()
    try:
        job = _folded(connection, number)
    except ValueError as error:
        why = f"{why}; its events: {error}"[: 2 * _LONGEST_WHY].encode(errors="replace").decode()
        return Damaged(job=_stand_in(connection, number, why), why=why, whole=False)
    return Damaged(job=job, why=why, whole=True)


def event(seq: int, text: Any) -> Event:
    """What happened, as far as that can be read."""
    try:
        known: Event = read_event.decode(text)
    except ValueError as error:
        why = str(error)[:_LONGEST_WHY].encode(errors="replace").decode()
        return Noted(what="unreadable", data={"why": f"event {seq} cannot be read: {why}"})
    return known


def seconds(value: Any) -> float:
    """A column with a time; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def setting(key: str, text: Any) -> Any:
    """None, as if it had never been put, for what cannot be read."""
    try:
        return msgspec.json.decode(text)
    except ValueError as error:
        _log.error("the setting %r cannot be read, and is as it was at first: %s", key, error)
        return None


def _folded(connection: Connection, number: int) -> Job:
    c = t.events.c
    rows = connection.execute(select(c.at_s, c.event).where(c.job == number).order_by(c.seq)).all()
    job = fold((float(at_s), read_event.decode(text)) for at_s, text in rows)
    if job is None:
        raise ValueError("there are none")
    if job.number != number:
        raise ValueError(f"they are those of job {job.number}")
    return job


def _stand_in(connection: Connection, number: int, why: str) -> Job:
    row = connection.execute(select(t.jobs).where(t.jobs.c.number == number)).first()
    columns: dict[str, Any] = {} if row is None else dict(row._mapping)
    level, phase = columns.get("level"), columns.get("phase")
    ended_s = columns.get("ended_s")
    return Job(
        number=number,
        name=_word(columns.get("name")) or f"job-{number}",
        user=_word(columns.get("user")),
        submitted_s=seconds(columns.get("submitted_s")),
        changed_s=seconds(columns.get("submitted_s")),
        spec={},
        context=Context(cwd="/"),
        level=cast("Level", level) if level in get_args(Level) else "rigid",
        phase=phase if phase in ENDED else "queued",
        ended_s=seconds(ended_s) if phase in ENDED else None,
        message=f"what the store has of it cannot be read: {why}",
    )


def _word(value: Any) -> str:
    return value[:_LONGEST_WORD].encode(errors="replace").decode() if isinstance(value, str) else ""
