"""Called by Alembic. The connection, inside a transaction, comes from `stretto.store.migrating`."""

from __future__ import annotations

from alembic import context

from stretto.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite can do it, if nobody commits in between.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
