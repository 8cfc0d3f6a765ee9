"""The file: who may read it, what happens when it is damaged, and when there is no room."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from histories import follow, job, submission
from places import File, Opener
from sqlalchemy.exc import DBAPIError

from stretto.errors import UsageError
from stretto.jobs import events as e
from stretto.store import Query, Store, StoreCorrupted, StoreFull, StoreLocked, StoreUnreachable

HERE = Path(__file__).parent


def filled(file: File, opened: Opener, count: int = 300) -> None:
    store = opened(file)
    for future in [store.append([submission(job(number))]) for number in range(1, count + 1)]:
        future.result(60)
    store.close()


def test_a_commit_is_on_disk_and_nobody_else_can_read_the_secrets(file: File, opened: Opener) -> None:
    store = opened(file)
    store.append([submission(job(1))]).result(60)
    with store._database.reader.connect() as connection, pytest.raises(DBAPIError, match="readonly"):
        connection.exec_driver_sql("DELETE FROM jobs")
    assert file.execute("PRAGMA journal_mode") == [("wal",)]
    writing = store._writer._connection
    assert writing is not None
    assert writing.exec_driver_sql("PRAGMA synchronous").scalar() == 2, "FULL"
    writing.rollback()
    for path in file.path.parent.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    store.close()
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["stretto.db", "stretto.db.lock"]


@pytest.mark.parametrize("damage", ["garbage", "garbage inside", "cut at a page", "cut inside a page", "header only"])
def test_a_damaged_file_is_named_and_left_alone(file: File, opened: Opener, damage: str) -> None:
    filled(file, opened)
    good = file.path.read_bytes()
    half = len(good) // 2 // 4096 * 4096
    bad = {
        "garbage": os.urandom(len(good)),
        "garbage inside": good[:4096] + os.urandom(half) + good[4096 + half :],
        "cut at a page": good[:half],
        "cut inside a page": good[: half + 1000],
        "header only": good[:100],
    }[damage]
    file.path.write_bytes(bad)
    with pytest.raises(StoreCorrupted) as caught:
        opened(file)
    assert str(file.path) in caught.value.message
    assert "backup" in caught.value.hint
    assert file.path.read_bytes() == bad
    # The refused attempt holds nothing.
    file.path.write_bytes(good)
    assert len(opened(file).load().jobs) == 300


def test_damage_that_comes_later_is_an_error_of_ours(file: File, opened: Opener) -> None:
    filled(file, opened)
    store = opened(file)
    size = file.path.stat().st_size
    with file.path.open("r+b") as raw:
        raw.seek(4096)
        raw.write(os.urandom(size - 4096))
    with pytest.raises(StoreCorrupted):
        store.load()
    with pytest.raises(StoreCorrupted):
        store.jobs(Query(user="ada"))


def test_a_locked_file_says_who_holds_it(file: File, opened: Opener) -> None:
    opened(file)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}"):
        opened(file)


@pytest.mark.parametrize("where", ["missing/parent/is/made.db", "file.txt/x.db", "."])
def test_a_place_that_cannot_be(tmp_path: Path, where: str) -> None:
    (tmp_path / "file.txt").write_text("not a folder")
    if where.startswith("missing"):
        Store.open(str(tmp_path / where), clock=lambda: 0.0).close()
        return
    with pytest.raises(StoreUnreachable):
        Store.open(str(tmp_path / where), clock=lambda: 0.0)


@pytest.mark.parametrize("url", ["sqlite://", "mysql://u@h/d", "sqlite:///:memory:", "nonsense://"])
def test_a_url_that_is_none_of_ours(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Store.open(url, clock=lambda: 0.0)
    assert "postgresql://" in caught.value.hint


def test_a_url_of_a_file(file: File) -> None:
    store = Store.open(f"sqlite:///{file.path}", clock=lambda: 0.0)
    store.append([submission(job(1))]).result(60)
    store.close()
    assert file.execute("SELECT number FROM jobs") == [(1,)]


WRITES = """
import json, resource, sys
sys.path.insert(0, sys.argv[2])
from histories import job, submission
from stretto.store import Store, StoreError

store = Store.open(sys.argv[1], clock=lambda: 0.0)
limit = 400_000
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
written, failed, number = [], [], 0
while len(failed) < 5:
    number += 1
    try:
        store.append([submission(job(number, message="x" * 5000))]).result(60)
        written.append(number)
    except StoreError as error:
        failed.append((number, error.code))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store.append([submission(job(number + 1))]).result(60)
written.append(number + 1)
store.close()
print(json.dumps([written, failed]))
"""


def test_a_limit_on_the_size_of_files(file: File, opened: Opener) -> None:
    """The system refuses to write; nothing is half there, and it goes on as soon as it may."""
    done = subprocess.run(
        [sys.executable, "-c", WRITES, file.url, str(HERE)], capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written, failed = json.loads(done.stdout)
    assert len(written) > 2
    assert {code for _, code in failed} == {"store-unreachable"}
    store = opened(file)
    assert [each.number for each in store.load().jobs] == written
    assert [each.seq for each in store.events(limit=10_000)] == list(range(1, len(written) + 1))
    assert store.verify() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True, text=True
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"no small disk can be made without root: {made.stderr.strip()}")
    return folder


def test_a_full_disk(small_disk: Path, opened: Opener) -> None:
    file = File(small_disk)
    try:
        store = opened(file)
        written = _until_full(store)
        first = job(1, message="x" * 5000)
        assert store.job(1) == first
        with pytest.raises(StoreFull, match="full") as caught:
            store.append(follow(first, e.Wished(wish="suspend", by="ada", why="y" * 500_000))).result(60)
        assert "room" in caught.value.hint
        subprocess.run(["mount", "-o", "remount,size=32m", small_disk], check=True)
        store.append([submission(job(10_000))]).result(60)
        assert [each.number for each in store.load().jobs] == [*written, 10_000]
        assert store.verify() == []
        store.close()
    finally:
        subprocess.run(["umount", small_disk], check=True)
    assert shutil.disk_usage(small_disk).total > 2**25


def _until_full(store: Store) -> list[int]:
    written: list[int] = []
    for number in range(1, 2000):
        try:
            store.append([submission(job(number, message="x" * 5000))]).result(60)
        except StoreFull:
            assert store.job(number) is None
            return written
        written.append(number)
    raise AssertionError("the disk never filled up")


def test_who_needs_only_values_does_not_load_a_database_library() -> None:
    script = """
        import sys
        import stretto.cli
        from stretto.store import Entry, Query, StoreError
        assert not {"sqlalchemy", "alembic", "psycopg"} & set(sys.modules), sorted(sys.modules)
        from stretto.store import Store
        assert "sqlalchemy" in sys.modules
        assert not {"alembic", "psycopg"} & set(sys.modules), sorted(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
