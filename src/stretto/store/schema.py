"""The tables, the same on SQLite and PostgreSQL. `migrations/` makes them; a test compares the two.

`events` is the truth and only grows (until retention removes a whole job). `jobs` holds what `lifecycle.fold` makes of
a job's events, with the columns that lists are filtered by; it is written in the same transaction.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)

HEAD = "0002"
"""The newest revision in `migrations/`: the one this code knows."""

# SQLite's own row number is an INTEGER; its integers have 64 bits anyway.
Number = BigInteger().with_variant(Integer(), "sqlite")
# Compared by code point everywhere, so that a prefix is a range of the index.
Word = Text().with_variant(Text(collation="C"), "postgresql")
Real = Float(53)

metadata = MetaData()

jobs = Table(
    "jobs",
    metadata,
    Column("number", Number, primary_key=True, autoincrement=False),
    Column("name", Word, nullable=False),
    Column("user", Word, nullable=False),
    Column("phase", Word, nullable=False),
    Column("level", Word, nullable=False),
    Column("queue", Word, nullable=False),
    Column("submitted_s", Real, nullable=False),
    Column("ended_s", Real),
    Column("job", Text, nullable=False),
    Index("jobs_by_name", "name", "number"),
    Index("jobs_by_user", "user", "number"),
    Index("jobs_by_phase", "phase", "number"),
    Index("jobs_by_level", "level", "number"),
    Index("jobs_by_queue", "queue", "number"),
    Index("jobs_by_end", "ended_s", "number"),
)


def _of_job(**options: Any) -> Column[int]:
    """A column that names a job, and goes with it."""
    return Column("job", Number, ForeignKey("jobs.number", ondelete="CASCADE"), **options)


events = Table(
    "events",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("at_s", Real, nullable=False),
    _of_job(),
    Column("event", Text, nullable=False),
    Index("events_by_job", "job", "seq"),
)

labels = Table(
    "labels",
    metadata,
    Column("key", Word, primary_key=True),
    Column("value", Word, primary_key=True),
    _of_job(primary_key=True, autoincrement=False),
    Index("labels_by_job", "job"),
    sqlite_with_rowid=False,
)

submissions = Table(
    "submissions",
    metadata,
    Column("user", Word, primary_key=True),
    Column("key", Word, primary_key=True),
    Column("digest", Word, nullable=False),
    _of_job(nullable=False),
    Index("submissions_by_job", "job"),
    sqlite_with_rowid=False,
)
"""Idempotency keys."""

counters = Table(
    "counters",
    metadata,
    Column("name", Word, primary_key=True),
    Column("value", Number, nullable=False),
)
"""The largest `seq` and `number` that retention has removed: neither is given out twice."""

settings = Table(
    "settings",
    metadata,
    Column("key", Word, primary_key=True),
    Column("value", Text, nullable=False),
)

learned = Table(
    "learned",
    metadata,
    Column("key", Word, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Word, primary_key=True),
    Column("user", Word, nullable=False),
    Column("role", Word, nullable=False),
    Column("hash", Word, nullable=False),
    Column("created_s", Real, nullable=False),
    Column("expires_s", Real),
    Column("last_used_s", Real),
    Column("account", Word),
    Column("uid", Number),
    UniqueConstraint("hash", name="tokens_by_hash"),
)
