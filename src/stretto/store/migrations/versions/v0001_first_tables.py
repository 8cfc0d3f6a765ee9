"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Word = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
_Real = sa.Float(53)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("number", _Number, primary_key=True, autoincrement=False),
        sa.Column("name", _Word, nullable=False),
        sa.Column("user", _Word, nullable=False),
        sa.Column("phase", _Word, nullable=False),
        sa.Column("level", _Word, nullable=False),
        sa.Column("queue", _Word, nullable=False),
        sa.Column("submitted_s", _Real, nullable=False),
        sa.Column("ended_s", _Real),
        sa.Column("job", sa.Text, nullable=False),
    )
    for name in ("name", "user", "phase", "level", "queue"):
        op.create_index(f"jobs_by_{name}", "jobs", [name, "number"])
    op.create_index("jobs_by_end", "jobs", ["ended_s", "number"])
    op.create_table(
        "events",
        sa.Column("seq", _Number, primary_key=True, autoincrement=False),
        sa.Column("at_s", _Real, nullable=False),
        sa.Column("job", _Number, sa.ForeignKey("jobs.number", ondelete="CASCADE")),
        sa.Column("event", sa.Text, nullable=False),
    )
    op.create_index("events_by_job", "events", ["job", "seq"])
    op.create_table(
        "labels",
        sa.Column("key", _Word, primary_key=True),
        sa.Column("value", _Word, primary_key=True),
        sa.Column(
            "job", _Number, sa.ForeignKey("jobs.number", ondelete="CASCADE"), primary_key=True, autoincrement=False
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("labels_by_job", "labels", ["job"])
    op.create_table(
        "submissions",
        sa.Column("user", _Word, primary_key=True),
        sa.Column("key", _Word, primary_key=True),
        sa.Column("digest", _Word, nullable=False),
        sa.Column("job", _Number, sa.ForeignKey("jobs.number", ondelete="CASCADE"), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("submissions_by_job", "submissions", ["job"])
    op.create_table(
        "counters",
        sa.Column("name", _Word, primary_key=True),
        sa.Column("value", _Number, nullable=False),
    )
    op.create_table(
        "settings",
        sa.Column("key", _Word, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
    op.create_table(
        "learned",
        sa.Column("key", _Word, primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", _Word, primary_key=True),
        sa.Column("user", _Word, nullable=False),
        sa.Column("role", _Word, nullable=False),
        sa.Column("hash", _Word, nullable=False),
        sa.Column("created_s", _Real, nullable=False),
        sa.Column("expires_s", _Real),
        sa.Column("last_used_s", _Real),
        sa.UniqueConstraint("hash", name="tokens_by_hash"),
    )
