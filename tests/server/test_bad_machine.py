"""A machine that fails the server itself: no room, no descriptors, something in the way, a death in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from machine import DEADLINE_S, Machine, machine_of, play
from test_elastic import SCRIPT, train

from disks import filled, no_descriptors, small_disk
from stretto.backends.local.backend import LocalBackend
from stretto.backends.protocol import Launch
from stretto.jobs.model import Job

GO = "until [ -e go ]; do sleep 0.02; done"


def free(m: Machine) -> bool:
    """Nobody holds a seat."""
    return not any(active.job.workers for active in m.plane.book)


# Launches.


@pytest.mark.parametrize("level", ["rigid", "restart"])
def test_a_file_in_the_way_of_a_launch_is_its_end(tmp_path: Path, level: str) -> None:
    """It is said what is in the way, and the seat is the next one's."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            (tmp_path / "data" / "records" / "1").mkdir(parents=True)
            (tmp_path / "data" / "records" / "1" / "logs").touch()
            about = {"level": "restart", "elastic": {"min": 1, "max": 1}} if level == "restart" else {}
            job = await m.submit("true", name="blocked", retries=1, **about)
            after = await m.submit("true", name="after")
            failed = await m.ended(job, "failed")
            assert str(tmp_path / "data" / "records" / "1" / "logs") in failed.message
            # It would be the same the next time.
            assert failed.failures == 0
            await m.ended(after)

    play(story())


def test_a_launch_without_descriptors_is_tried_again(tmp_path: Path) -> None:
    """Why nothing starts is said meanwhile."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            await m.ended(await m.submit("true", name="before"))
            with no_descriptors():
                job = await m.submit("true", name="late")
                said = "Too many open files"
                await m.until(job, lambda job: said in job.message or said in m.plane.ready, "tried in vain")
            await m.ended(job)

    play(story())


def test_who_is_believed_to_run_and_is_not_there_is_given_up(tmp_path: Path) -> None:
    """Whatever a mistake of ours it was that lost sight of it: the job can be cancelled, and its seat is free."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.submit("exec sleep 1000", name="lost")
            job = await m.until(job, lambda job: bool(job.workers and job.workers[0].pid), "a process")
            _lose_sight(m, job)
            await m.plane.wish(job.id, "cancel", "me")
            after = await m.submit("true", name="after")
            await m.ended(job, "cancelled")
            assert "there is no process of it" in await m.story(job.id)
            await m.ended(after)
            again = await m.submit(GO, name="again")
            again = await m.until(again, lambda job: bool(job.workers and job.workers[0].pid), "a process")
            _lose_sight(m, again)
            # Nobody has asked for its end: it is started again.
            await m.until(again, lambda job: job.starts == 2, "started again")
            (tmp_path / "go").touch()
            await m.ended(again)

    play(story())


def _lose_sight(m: Machine, job: Job) -> None:
    """It ends, and its backend knows nothing of it."""
    backend, worker = m.plane.backend, job.workers[0]
    assert isinstance(backend, LocalBackend)
    run = backend._known.pop(worker.launch)
    backend._unwatch(run)
    os.kill(run.pid, signal.SIGKILL)


def test_whom_nobody_watches_any_more_is_looked_after_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.submit("exec sleep 1000", name="alone")
            job = await m.until(job, lambda job: bool(job.workers and job.workers[0].pid), "a process")
            backend = m.plane.backend
            assert isinstance(backend, LocalBackend)
            backend._unwatch(backend._known[job.workers[0].launch])
            await m.plane.wish(job.id, "cancel", "me")
            done = await m.ended(job, "cancelled")
            assert done.failures == 0

    play(story())


@pytest.mark.parametrize("begun", [0, 2, 3])
@pytest.mark.parametrize("level", ["rigid", "restart"])
def test_the_start_of_a_group_that_the_server_died_over_is_completed(tmp_path: Path, begun: int, level: str) -> None:
    """Those that run wait for the others, and go on when these have come; nobody is begun anew."""
    (tmp_path / "member.py").write_text(MEMBER)
    about = {"workers": 4} if level == "rigid" else {"level": "restart", "elastic": {"min": 4, "max": 4}}

    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            arrived = _die_before(m, begun)
            job = await m.submit(f"{sys.executable} member.py", name="group", **about)
            await m.running(job, 4)
            await arrived.wait()
            await m.until(job, lambda job: sum(bool(w.pid) for w in job.workers) == begun, f"{begun} members")
            await m.plane.book.settled()
        async with machine_of(tmp_path, "1x4") as m:
            job = await m.until(job, lambda job: all(w.pid for w in job.workers), "all members")
            (tmp_path / "go").touch()
            done = await m.ended(job)
            assert (done.starts, done.launches, done.failures) == (1, 4, 0), await m.story(job.id)
            said = [f"{rank} of 4 meets at" for rank in range(4)]
            logs = m.logs(done)
            assert all(logs.count(line) == 1 for line in said), logs
            assert len({line.split()[-1] for line in logs.splitlines() if "meets at" in line}) == 1, logs

    play(story())


MEMBER = """
import os, time
print(os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "meets at", os.environ["MASTER_PORT"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"""


def test_a_job_is_no_younger_for_a_restart_of_its_server(tmp_path: Path) -> None:
    """What it would lose is what protects it from those who have waited meanwhile."""

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.submit(GO, name="old")
            before = await m.until(job, lambda job: bool(job.workers and job.workers[0].pid), "a process")
        async with machine_of(tmp_path, "1x1") as m:
            found = await m.plane.job(job.id)
            await m.plane.book.settled()
            assert (await m.kinds(job)).count("running") == 2
            assert found.workers[0].began_s == before.workers[0].began_s
            (tmp_path / "go").touch()
            await m.ended(job)

    play(story())


def _die_before(m: Machine, begun: int) -> asyncio.Event:
    """The server comes no further than to so many launches. Set when it stands there."""
    launch_it, asked, arrived = m.plane.backend.launch, [], asyncio.Event()

    async def launch(launch: Launch) -> None:
        asked.append(launch.id)
        if len(asked) == 4:
            arrived.set()
        if asked.index(launch.id) >= begun:
            await asyncio.Event().wait()
        await launch_it(launch)

    m.plane.backend.launch = launch  # type: ignore[method-assign]
    return arrived


# A full disk.


def test_an_elastic_job_trains_on_through_a_full_disk(tmp_path: Path) -> None:
    """A worker is killed while nothing can be written: the others go on, and are told of it when it can."""
    (tmp_path / "train.py").write_text(SCRIPT)

    async def story() -> None:
        with small_disk(tmp_path / "data", "16m") as disk:
            async with machine_of(tmp_path, "1x3") as m:
                job = await train(m, 10**6, low=3, high=3, env={"PAUSE_S": "0.01"})
                progress = m.plane.book.jobs[job.number].progress
                await _comes(lambda: progress.steps > 20)
                with filled(disk):
                    before = progress.steps
                    await _comes(lambda: progress.steps > before + 50)
                    victim = (await m.plane.job(job.id)).workers[-1]
                    others = {w.name for w in (await m.plane.job(job.id)).workers} - {victim.name}
                    os.kill(victim.pid, signal.SIGKILL)
                    await _comes(lambda: bool(m.plane.book.trouble) or victim.name not in _names(m, job))
                    # Longer than a generation may take to form, and than workers wait for each other.
                    at_s = time.monotonic() + 12.0
                    await _comes(lambda: time.monotonic() > at_s)
                before = progress.steps
                await _comes(lambda: progress.steps > before + 20)
                # Another in the place of the one that was killed: so all is written down again.
                await m.until(job, lambda job: {w.name for w in job.workers if w.pid} == others | {"w3"}, "another")
                found = await m.plane.job(job.id)
                assert (found.phase, found.starts) == ("running", 1)
                await m.plane.wish(job.id, "cancel", "me")
                await m.ended(job, "cancelled")

    play(story())


def test_who_ends_while_the_disk_is_full_has_ended_when_it_is_not(tmp_path: Path) -> None:
    async def story() -> None:
        with small_disk(tmp_path / "data") as disk:
            async with machine_of(tmp_path, "1x2") as m:
                ending = await m.submit(f"{GO}; exit 3", name="ending")
                killed = await m.submit("exec sleep 1000", name="killed", retries=0)
                workers = []
                for job in (ending, killed):
                    found = await m.until(job, lambda job: bool(job.workers and job.workers[0].pid), "a process")
                    workers += found.workers
                backend = m.plane.backend
                assert isinstance(backend, LocalBackend)
                with filled(disk):
                    (tmp_path / "go").touch()
                    # One has a supervisor that cannot write its exit, of the other the supervisor is killed.
                    os.kill(backend._known[workers[1].launch].pid, signal.SIGKILL)
                    await _comes(lambda: not any(os.path.exists(f"/proc/{worker.pid}") for worker in workers))
                    assert (await m.plane.job(ending.id)).phase == "running"
                done = await m.ended(ending, "failed")
                assert done.exit_code == 3
                assert "its supervisor" in (await m.ended(killed, "failed")).message

    play(story())


def _names(m: Machine, job: Job) -> set[str]:
    return {worker.name for worker in m.plane.book.jobs[job.number].job.workers}


async def _comes(look: object) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not look():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, "it did not come about in time"
        await asyncio.sleep(0.02)
