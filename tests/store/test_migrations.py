"""The migrations make the tables that the code expects, on both databases."""

from __future__ import annotations

from pathlib import Path

from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from places import Opener, Place

import stretto.store
from stretto.store import schema


def test_the_migrated_tables_are_those_of_the_schema(place: Place, opened: Opener) -> None:
    store = opened(place)
    with store._database.reader.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []


def test_the_code_knows_the_newest_revision() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(stretto.store.__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    assert ScriptDirectory.from_config(config).get_heads() == [schema.HEAD]


def test_opening_again_changes_nothing(place: Place, opened: Opener) -> None:
    opened(place).close()
    before = place.execute("SELECT version_num FROM alembic_version")
    opened(place).close()
    assert place.execute("SELECT version_num FROM alembic_version") == before == [(schema.HEAD,)]
