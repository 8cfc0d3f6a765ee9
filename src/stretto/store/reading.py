"""Questions to the store, each one statement that an index answers."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Row, Select, and_, func, or_, select, union_all

from stretto.jobs.events import Recorded
from stretto.jobs.model import ENDED, Job, Phase
from stretto.store import damage
from stretto.store import schema as t
from stretto.store.model import Loaded, Page, Query, Token
from stretto.store.writing import last_number, last_seq

_log = logging.getLogger("stretto.store")

_LAST_CHARACTER = 0x10FFFF


def load(connection: Connection) -> Loaded:
    c = t.jobs.c
    jobs, damaged = [], []
    for number, text in connection.execute(select(c.number, c.job).where(_not_ended())).all():
        try:
            jobs.append(damage.sound(number, text))
        except ValueError as error:
            damaged.append(damage.found(connection, number, str(error)))
    settings = {key: damage.setting(key, value) for key, value in connection.execute(select(t.settings))}
    return Loaded(
        jobs=sorted((job for job in jobs if not job.ended), key=lambda job: job.number),
        damaged=sorted((one for one in damaged if not one.job.ended), key=lambda one: one.job.number),
        settings={key: value for key, value in settings.items() if value is not None},
        learned={key: bytes(value) for key, value in connection.execute(select(t.learned)) if _is_blob(key, value)},
        next_number=last_number(connection) + 1,
        last_seq=last_seq(connection),
    )


def _not_ended() -> ColumnElement[bool]:
    """Ranges of the index between the phases of jobs that have ended, of which there are many: so a phase that is none
    is found as well."""
    phase, ended = t.jobs.c.phase, sorted(ENDED)
    between = [and_(phase > low, phase < high) for low, high in itertools.pairwise(ended)]
    return or_(phase < ended[0], *between, phase > ended[-1])


def _is_blob(key: str, value: Any) -> bool:
    if not isinstance(value, bytes | memoryview):
        _log.error("what was learned of %r cannot be read", key)
        return False
    return True


def setting(connection: Connection, key: str) -> Any:
    c = t.settings.c
    row = connection.execute(select(c.value).where(c.key == key)).first()
    return None if row is None else damage.setting(key, row[0])


def job(connection: Connection, number: int) -> Job | None:
    return _one(connection, select(t.jobs.c.number, t.jobs.c.job).where(t.jobs.c.number == number))


def latest(connection: Connection, name: str) -> Job | None:
    c = t.jobs.c
    return _one(connection, select(c.number, c.job).where(c.name == name).order_by(c.number.desc()).limit(1))


def _one(connection: Connection, statement: Select[Any]) -> Job | None:
    row = connection.execute(statement).first()
    return None if row is None else damage.job(connection, *row)


def submitted_with(connection: Connection, user: str, key: str) -> tuple[Job, str] | None:
    s, j = t.submissions.c, t.jobs.c
    found = connection.execute(
        select(j.number, j.job, s.digest).join_from(t.submissions, t.jobs).where(s.user == user, s.key == key)
    ).first()
    return None if found is None else (damage.job(connection, found[0], found[1]), found[2])


def jobs(connection: Connection, query: Query) -> Page[Job]:
    limit = max(1, query.limit)
    rows = connection.execute(listing(query, limit + 1, connection.dialect.name)).all()
    found = [damage.job(connection, *row) for row in rows[:limit]]
    return Page(found, rows[limit - 1][0] if len(rows) > limit else None)


def listing(query: Query, limit: int, dialect: str) -> Select[Any]:
    """First the numbers, out of indices alone, then those jobs. Every phase is a list of its own, in the right order
    already, of which the first few are merged."""
    phases: Sequence[Phase | None] = sorted(set(query.phases)) or (None,)
    parts = [_numbers(query, phase, dialect).limit(limit).subquery() for phase in phases]
    merged = union_all(*(select(part.c.number) for part in parts)).subquery()
    first = select(merged.c.number).order_by(_ordered(merged.c.number, query)).limit(limit)
    c = t.jobs.c
    return select(c.number, c.job).where(c.number.in_(first)).order_by(_ordered(c.number, query))


def _numbers(query: Query, phase: Phase | None, dialect: str) -> Select[Any]:
    c = t.jobs.c
    number: ColumnElement[int] = c.number
    source: Any = t.jobs
    conditions = []
    for index, (key, value) in enumerate(query.labels.items()):
        label = t.labels.alias(f"label{index}")
        source = source.join(label, label.c.job == c.number)
        conditions += [label.c.key == key, label.c.value == value]
        # A label's jobs are in order already.
        number = label.c.job
    for column, wanted in ((c.phase, phase), (c.user, query.user), (c.queue, query.queue), (c.level, query.level)):
        if wanted is not None:
            conditions.append(column == wanted)
    if query.name is not None:
        conditions.extend(_named(query.name, dialect))
    if query.after is not None:
        conditions.append(number > query.after if query.oldest_first else number < query.after)
    return select(number.label("number")).select_from(source).where(*conditions).order_by(_ordered(number, query))


def _ordered(number: ColumnElement[int], query: Query) -> ColumnElement[int]:
    return number.asc() if query.oldest_first else number.desc()


def _named(pattern: str, dialect: str) -> Iterator[ColumnElement[bool]]:
    """What stands before the first wildcard is a range of the index."""
    name = t.jobs.c.name
    prefix = re.split(r"[*?]", pattern, maxsplit=1)[0]
    if prefix == pattern:
        yield name == pattern
        return
    if prefix:
        yield name >= prefix
        if (end := _behind(prefix)) is not None:
            yield name < end
    if dialect == "sqlite":
        yield name.op("GLOB")(pattern.replace("[", "[[]"))
    else:
        escaped = re.sub(r"([\\%_])", r"\\\1", pattern)
        yield name.like(escaped.replace("*", "%").replace("?", "_"), escape="\\")


def _behind(prefix: str) -> str | None:
    """The first text that sorts behind all that begin so; none for a prefix of the very last characters."""
    stem = prefix.rstrip(chr(_LAST_CHARACTER))
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    # Halves of surrogate pairs are no characters.
    return stem[:-1] + chr(0xE000 if 0xD800 <= following < 0xE000 else following)


def events(
    connection: Connection, *, job: int | None, after: int, before: int | None, limit: int, newest_first: bool
) -> list[Recorded]:
    c = t.events.c
    conditions = [c.seq > after]
    if job is not None:
        conditions.append(c.job == job)
    if before is not None:
        conditions.append(c.seq < before)
    order = c.seq.desc() if newest_first else c.seq.asc()
    found = select(c.seq, c.at_s, c.job, c.event).where(*conditions).order_by(order).limit(max(1, limit))
    return [
        Recorded(seq=seq, at_s=damage.seconds(at_s), job=number, event=damage.event(seq, text))
        for seq, at_s, number, text in connection.execute(found)
    ]


def tokens(connection: Connection) -> list[Token]:
    c = t.tokens.c
    rows = connection.execute(select(t.tokens).order_by(c.created_s, c.id))
    return [token for row in rows if (token := _token(row)) is not None]


def token_by_hash(connection: Connection, digest: str) -> Token | None:
    row = connection.execute(select(t.tokens).where(t.tokens.c.hash == digest)).first()
    return None if row is None else _token(row)


def _token(row: Row[Any]) -> Token | None:
    """None: a damaged one opens nothing."""
    try:
        return msgspec.convert({str(name): value for name, value in row._mapping.items()}, Token)
    except msgspec.ValidationError as error:
        _log.error("a token cannot be read, and is taken for none: %s", error)
        return None


def count(connection: Connection) -> dict[str, int]:
    """Jobs by phase."""
    c = t.jobs.c
    return {row[0]: row[1] for row in connection.execute(select(c.phase, func.count()).group_by(c.phase))}
