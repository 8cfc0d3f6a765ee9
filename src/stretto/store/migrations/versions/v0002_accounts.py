"""Tokens name the account that their jobs run as. Older ones name none."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Word = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("tokens", sa.Column("account", _Word))
    op.add_column("tokens", sa.Column("uid", _Number))
