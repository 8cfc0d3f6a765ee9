"""Two places for a store: a file, and a PostgreSQL server of our own (unix socket only, an unprivileged user)."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from places import Clock, File, Opener, Place, Schema

from stretto.store import Store

_READY_S = 60.0


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The folder of a running server's socket."""
    binaries = _binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    who = _unprivileged()
    if who:
        os.chown(folder, who["user"], who["group"])
    subprocess.run(
        [binaries / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "--no-sync", "--locale=C.UTF-8"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=folder,
        **who,
    )
    # Only clients are killed here, so the server need not wait for the disk.
    command = [binaries / "postgres", "-D", folder / "data", "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, preexec_fn=_die_with_parent, **who
        )  # fmt: skip
    try:
        _wait_until_ready(process, folder)
        yield str(folder)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_READY_S)
        shutil.rmtree(folder)


def _binaries() -> Path | None:
    found = [*Path("/usr/lib/postgresql").glob("*/bin/postgres"), *filter(None, [_which("postgres")])]
    return found[-1].resolve().parent if found else None


def _which(name: str) -> Path | None:
    path = shutil.which(name)
    return Path(path) if path else None


def _unprivileged() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            user = pwd.getpwnam(name)
            return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    pytest.skip("PostgreSQL does not run as root, and there is no other user here")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGINT)


def _wait_until_ready(process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while True:
        try:
            psycopg.connect(f"host={folder} user=postgres dbname=postgres").close()
            return
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"PostgreSQL did not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)


_names = itertools.count()


@pytest.fixture
def schema(server: str) -> Schema:
    return Schema(server, f"test_{next(_names)}")


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest) -> Place:
    found: Place = request.getfixturevalue("file" if request.param == "sqlite" else "schema")
    return found


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(clock: Clock) -> Iterator[Opener]:
    """Opens stores that are closed when the test ends; no thread of theirs is left."""
    stores: list[Store] = []

    def open_store(place: Place, busy_s: float = 5.0) -> Store:
        stores.append(Store.open(place.url, clock=clock, busy_s=busy_s))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "store-writer"]


@pytest.fixture
def store(place: Place, opened: Opener) -> Store:
    return opened(place)
