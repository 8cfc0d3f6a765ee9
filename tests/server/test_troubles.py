"""What one job does to its own files, and what befalls it alone: the others go on."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machine import DEADLINE_S, Machine, machine_of, play

from stretto.errors import Conflict
from stretto.jobs.model import Job
from stretto.store import Query

BESIDE = "while [ ! -e over ]; do sleep 0.02; done"


@contextlib.contextmanager
def unblocked(*paths: Path) -> Iterator[None]:
    """Whoever waits for the other end of a FIFO fails the test, and does not hold it up for ever."""
    waited: list[Path] = []

    def open_all() -> None:
        for path in paths:
            waited.append(path)
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    timer = threading.Timer(DEADLINE_S, open_all)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    assert not waited, "somebody waited for a FIFO"


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


async def beside(m: Machine, **fields: object) -> Job:
    """An innocent one, which runs until the test says so."""
    job = await m.submit(BESIDE, name="innocent", **fields)
    return await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")


async def goes_on(m: Machine, job: Job) -> None:
    """It runs as it did, and so does what comes after."""
    assert m.plane.ready == ""
    await m.ended(await m.submit("true"))
    (m.folder / "over").touch()
    assert (await m.ended(job)).starts == 1


@pytest.mark.parametrize(
    "put",
    ["os.mkfifo(log)", "os.symlink('/dev/zero', log)", "os.mkdir(log)",
     "os.rename(logs, logs + '.was'); os.symlink('/dev', logs)",
     "os.truncate(os.open(log, os.O_CREAT | os.O_WRONLY), 1 << 42)"],
)  # fmt: skip
def test_a_job_puts_something_else_in_the_place_of_its_log(tmp_path: Path, put: str) -> None:
    (tmp_path / "hostile.py").write_text(
        "import os, sys\nrecords = os.environ['STRETTO_JOB_FOLDER'].replace('/jobs/', '/records/')\n"
        "logs = f'{records}/logs'\nlog = f'{logs}/w0.log'\n"
        f"os.rename(log, log + '.was')\n{put}\nsys.exit(3)\n"
    )

    async def story() -> None:
        with unblocked(tmp_path / "data" / "records" / "2" / "logs" / "w0.log"):
            async with machine_of(tmp_path, "1x3") as m:
                innocent = await beside(m)
                job = await m.ended(await m.submit([sys.executable, "hostile.py"]), "failed")
                assert job.exit_code == 3
                assert job.message == "w0 ended with exit code 3"
                await goes_on(m, innocent)

    play(story())


def damaged(path: Path) -> None:
    path.write_bytes(b'{"kind": "want", "si\n' + path.read_bytes())


def out_of_order(path: Path) -> None:
    path.write_bytes(b'{"kind": "formed", "number": 7, "applied": 3, "by": "nobody"}\n' + path.read_bytes())


def deep(path: Path) -> None:
    path.write_bytes(b"[" * 100_000 + b"\n")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def endless(path: Path) -> None:
    os.truncate(path, 1 << 42)


DAMAGES: dict[Callable[[Path], None], str] = {
    damaged: "damaged journal line", out_of_order: "record 1 of the journal does not fit", deep: "damaged journal line",
    fifo: "in its place", link: "in its place", folder: "in its place", endless: "more than",
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_one_damaged_journal(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    journal = tmp_path / "data" / "records" / "1" / "journal"

    async def before() -> int:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.submit("sleep 600", elastic={"min": 1, "max": 1}, name="spoilt")
            job = await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            await beside(m, elastic={"min": 1, "max": 1})
            return job.workers[0].pid

    async def after(pid: int) -> None:
        with unblocked(journal):
            async with machine_of(tmp_path, "1x4") as m:
                job = await m.ended("spoilt", "failed")
                assert DAMAGES[damage] in job.message
                assert not alive(pid)
                await goes_on(m, await m.plane.job("innocent"))

    async def story() -> None:
        pid = await before()
        damage(journal)
        await after(pid)

    play(story())


LEVELS = {
    "elastic": {"elastic": {"min": 1, "max": 1}},
    "restart": {"elastic": {"min": 1, "max": 1}, "level": "restart"},
    "rigid": {},
}


@pytest.mark.parametrize("level", LEVELS)
def test_one_whose_folder_cannot_be_made(tmp_path: Path, level: str) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            innocent = await beside(m)
            (tmp_path / "data" / "jobs" / "2").write_text("in the way")
            job = await m.ended(await m.submit("true", **LEVELS[level]), "failed")
            assert "in its place" in job.message
            await goes_on(m, innocent)

    play(story())


@contextlib.contextmanager
def busy(path: Path) -> Iterator[None]:
    """A file that nobody may write to as long as it is being executed."""
    path.parent.mkdir(parents=True)
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, path)
    path.chmod(0o700)
    with subprocess.Popen([path, "600"], executable=path) as process:
        try:
            yield
        finally:
            process.kill()


def test_one_that_is_tried_again_until_it_can_run(tmp_path: Path) -> None:
    journal = tmp_path / "data" / "records" / "2" / "journal"

    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            innocent = await beside(m)
            with busy(journal):
                job = await m.submit("true", elastic={"min": 1, "max": 1}, retries=20)
                held = await m.until(job, lambda job: bool(job.message), "in trouble")
                assert held.phase == "queued"
                assert "Text file busy" in held.message
                assert list(m.plane.loop.troubles) == [job.number]
                while "retried" not in await m.kinds(job):
                    await asyncio.sleep(0.01)
                await m.reason(job, "back-off")
                assert m.plane.ready == ""
                await m.ended(await m.submit("true"))
            journal.unlink()
            assert (await m.ended(job)).starts == 1
            assert not m.plane.loop.troubles
            await goes_on(m, innocent)

    play(story())


def test_one_that_is_given_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            innocent = await beside(m)
            with busy(tmp_path / "data" / "records" / "2" / "journal"):
                job = await m.ended(await m.submit("true", elastic={"min": 1, "max": 1}, retries=0), "failed")
            assert "Text file busy" in job.message
            await goes_on(m, innocent)

    play(story())


def test_one_that_waits_can_be_cancelled(tmp_path: Path) -> None:
    """With and without workers."""
    journal = tmp_path / "data" / "records" / "1" / "journal"

    async def before() -> int:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.submit("sleep 600", elastic={"min": 1, "max": 1}, name="adopted")
            job = await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            return job.workers[0].pid

    async def after(pid: int) -> None:
        async with machine_of(tmp_path, "1x4") as m:
            await m.until("adopted", lambda job: "Text file busy" in job.message, "in trouble")
            assert alive(pid)
            with busy(tmp_path / "data" / "records" / "2" / "journal"):
                waits = await m.submit("true", elastic={"min": 1, "max": 1}, retries=20)
                await m.until(waits, lambda job: bool(job.message), "in trouble")
                for name in (waits.id, "adopted"):
                    await m.plane.wish(name, "cancel", "me")
                    await m.ended(name, "cancelled")
            assert not alive(pid)

    async def story() -> None:
        pid = await before()
        shutil.rmtree(journal.parent)
        with busy(journal):
            await after(pid)

    play(story())


def test_an_adopted_one_is_driven_as_soon_as_it_can_be(tmp_path: Path) -> None:
    """What its workers do meanwhile is not lost."""
    journal = tmp_path / "data" / "records" / "1" / "journal"

    async def before() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.submit(BESIDE, elastic={"min": 1, "max": 1}, name="adopted")
            await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")

    async def after() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            await m.until("adopted", lambda job: "Text file busy" in job.message, "in trouble")
            (tmp_path / "over").touch()
            while not m.plane.loop._untold:
                await asyncio.sleep(0.01)
            for _ in range(3):
                # Whose end is known is not missed.
                m.plane.loop._look_for_lost(math.inf)
            assert [exit.how for _, exit in m.plane.loop._untold[1]] == ["exited"]
            journal.rename(journal.with_name("was"))
            assert (await m.ended("adopted")).starts == 1

    async def story() -> None:
        await before()
        shutil.rmtree(journal.parent)
        with busy(journal):
            await after()

    play(story())


def test_one_whose_job_file_cannot_be_read_any_more(tmp_path: Path) -> None:
    async def before() -> int:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.submit("sleep 600", name="spoilt")
            job = await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            await beside(m)
            return job.workers[0].pid

    async def after(pid: int) -> None:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.ended("spoilt", "failed")
            assert "its job file cannot be read any more" in job.message
            while alive(pid):
                await asyncio.sleep(0.01)
            await goes_on(m, await m.plane.job("innocent"))

    async def story() -> None:
        pid = await before()
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "stretto.db")) as store, store:
            store.execute("UPDATE jobs SET job = json_set(job, '$.spec.workers', 'several') WHERE number = 1")
        await after(pid)

    play(story())


DAMAGES_OF_A_ROW = {
    "json": ("UPDATE jobs SET job = '{\"number\": 1,' WHERE number = 1", True),
    "no text": ("UPDATE jobs SET job = CAST(x'7b22ff00fe' AS TEXT) WHERE number = 1", True),
    "a blob": ("UPDATE jobs SET job = x'00ff' WHERE number = 1", True),
    "another's": ("UPDATE jobs SET job = (SELECT job FROM jobs WHERE number = 2) WHERE number = 1", True),
    "a type": ("UPDATE jobs SET job = json_set(job, '$.workers', 'many') WHERE number = 1", True),
    "phase": ("UPDATE jobs SET phase = 'dancing' WHERE number = 1", True),
    "sizes": ("UPDATE jobs SET job = json_set(job, '$.min_workers', -5) WHERE number = 1", False),
    "and its events": (
        "UPDATE jobs SET job = '{', name = x'ff', submitted_s = 'soon', level = 'odd' WHERE number = 1;"
        "UPDATE events SET event = '{', at_s = 'then' WHERE seq = (SELECT min(seq) FROM events WHERE job = 1)",
        False,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES_OF_A_ROW)
def test_one_whose_row_is_damaged(tmp_path: Path, damage: str) -> None:
    """Its events tell what it was: it goes on. Where they are damaged too it has failed, and its workers end."""
    statements, goes = DAMAGES_OF_A_ROW[damage]

    async def before() -> int:
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.submit(BESIDE, name="spoilt")
            job = await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            await beside(m)
            return job.workers[0].pid

    async def after(pid: int) -> None:
        async with machine_of(tmp_path, "1x4") as m:
            if goes:
                job = await m.until("1", lambda job: any(worker.pid == pid for worker in job.workers), "adopted")
                assert (job.phase, job.starts) == ("running", 1)
            else:
                job = await m.ended("1", "failed")
                assert "cannot be read" in job.message
                while alive(pid):
                    await asyncio.sleep(0.01)
            if damage != "phase":
                assert m.plane.loop.troubles[1].text
                await m.plane.book.settled()
                assert [kind for kind in await m.kinds(job) if kind == ("noted" if goes else "ended")]
            assert {job.number for job in (await m.plane.jobs(Query())).items} >= {1, 2}
            assert {recorded.job for recorded in await m.plane.events(None, 0, 1000)} >= {None, 1, 2}
            assert await m.plane.job("1")
            await goes_on(m, await m.plane.job("innocent"))
            if goes:
                await m.ended("spoilt")
        # Its row is whole again.
        async with machine_of(tmp_path, "1x4") as m:
            assert not m.plane.loop.troubles
            assert (await m.plane.job("1")).phase == ("succeeded" if goes else "failed")

    async def story() -> None:
        pid = await before()
        damaged_store(tmp_path, statements)
        await after(pid)

    play(story())


def damaged_store(folder: Path, statements: str) -> None:
    with contextlib.closing(sqlite3.connect(folder / "data" / "stretto.db")) as store, store:
        for statement in statements.split(";"):
            store.execute(statement)


def test_a_row_that_is_damaged_while_the_server_runs(tmp_path: Path) -> None:
    """What the server has in memory is written over it; nobody waits for that."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            innocent = await beside(m)
            job = await m.submit(BESIDE, name="spoilt")
            await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            await m.plane.book.settled()
            damaged_store(tmp_path, "UPDATE jobs SET job = '{' WHERE number = 2")
            assert {one.number for one in (await m.plane.jobs(Query())).items} == {1, 2}
            await goes_on(m, innocent)
            assert (await m.ended(job)).starts == 1
            await m.plane.book.settled()
            assert m.plane.store.verify() == []

    play(story())


@pytest.mark.parametrize(
    "statements",
    [
        "UPDATE settings SET value = '{'",
        "UPDATE settings SET value = '[1, \"x\"]'",
        'UPDATE settings SET value = \'{"name": 5, "boot": [], "a": {}}\'',
        "UPDATE settings SET value = x'ff00'",
        "UPDATE learned SET value = 'text'; UPDATE tokens SET role = 'king'",
    ],
)
def test_settings_that_are_damaged(tmp_path: Path, statements: str) -> None:
    async def before() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            for name, value in (("drained", {"nowhere": 5.0}), ("drained_by", {"nowhere": "me"}), ("clock", {})):
                await asyncio.wrap_future(m.plane.store.put_setting(name, value))
            await m.plane.set_policy("srtf", {}, None, "me")
            await beside(m)
            await m.ended(await m.submit("true", name="learned"))

    async def after() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            await goes_on(m, await m.plane.job("innocent"))

    async def story() -> None:
        await before()
        damaged_store(tmp_path, statements)
        await after()

    play(story())


def test_who_asks_about_a_job_whose_end_is_not_written_yet_is_told_that_it_has_ended(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.submit(BESIDE)
            await m.until(job, lambda job: any(worker.pid for worker in job.workers), "running")
            await m.plane.book.settled()
            with contextlib.closing(sqlite3.connect(tmp_path / "data" / "stretto.db", isolation_level=None)) as store:
                store.execute("BEGIN IMMEDIATE")
                (tmp_path / "over").touch()
                while job.number in m.plane.book.jobs:
                    await asyncio.sleep(0.01)
                with pytest.raises(Conflict, match="has ended"):
                    await m.plane.wish(job.id, "suspend", "me")
                assert (await m.plane.why(job.id)).text == "has ended"
                store.execute("ROLLBACK")
            await m.ended(job)

    play(story())
