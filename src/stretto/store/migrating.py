"""Brings the tables to the form that this code knows, in one transaction: a crash leaves the old form or the new."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from stretto.store.errors import StoreCorrupted, StoreTooNew
from stretto.store.schema import HEAD, metadata

VERSIONS = "alembic_version"


def migrate(connection: Connection, name: str) -> None:
    """`connection` belongs to the only writer; `name` is what people call the database."""
    with connection.begin():
        found = _revision(connection, name)
        if found != HEAD:
            _upgrade(connection, name, found)


def _revision(connection: Connection, name: str) -> str | None:
    """None: there is nothing yet."""
    tables = set(inspect(connection).get_table_names())
    if VERSIONS in tables:
        revision: str | None = connection.scalar(text(f"SELECT version_num FROM {VERSIONS}"))
        return revision
    if tables & set(metadata.tables):
        raise StoreCorrupted(
            f"{name} has tables of other programs: {', '.join(sorted(tables & set(metadata.tables)))}",
            hint="give Stretto a database of its own",
        )
    return None


def _upgrade(connection: Connection, name: str, found: str | None) -> None:
    # Imported when there is something to do, which is seldom: it takes longer than opening the store.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreTooNew(
            f"{name} was written by a newer Stretto (schema {found}; this one knows {HEAD})",
            hint="start the newer version again, or restore a copy from before the upgrade",
        )
    command.upgrade(config, "head")
