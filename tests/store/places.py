"""Where a store can be, seen from outside of it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import psycopg

from stretto.store import Store

Opener: TypeAlias = Callable[..., Store]


class Place(Protocol):
    url: str

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        """As another program would, with foreign keys off."""

    def hold(self) -> contextlib.AbstractContextManager[None]:
        """Keep the store from committing."""


class File:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "stretto.db"
        self.url = str(self.path)

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            return connection.execute(statement).fetchall()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with contextlib.closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")


class Schema:
    """One schema of the server for every test."""

    def __init__(self, folder: str, name: str) -> None:
        self._info = f"host={folder} user=postgres dbname=postgres options='-c search_path={name}'"
        self.url = f"postgresql://postgres@/postgres?host={folder}&options=-csearch_path%3D{name}"
        self.socket = f"{folder}/.s.PGSQL.5432"
        self.execute(f"CREATE SCHEMA {name}")

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._info, autocommit=True) as connection:
            connection.execute("SET session_replication_role = replica")
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with psycopg.connect(self._info) as connection:
            connection.execute("LOCK TABLE events, settings IN SHARE MODE")
            yield
            connection.rollback()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s
