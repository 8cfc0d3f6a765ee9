"""What people do themselves to a job that loses work: refused unless they mean it, then told with who has done it."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from machine import play
from played_machine import Clock, Played, played

from stretto.errors import Conflict
from stretto.jobs import events as e
from stretto.jobs.model import Job
from stretto.server import loss

KINDS: dict[str, dict[str, Any]] = {
    "rigid": {"workers": 2},
    "restart": {"elastic": {"min": 1, "max": 2}, "level": "restart"},
    "never joined": {"elastic": {"min": 2, "max": 2, "explore": False}},
}
ACTS = {"suspend": "suspended by ana", "migrate": "migrated by ana", "scale": "scaled by ana"}
CASES = [(kind, act) for kind in KINDS for act in ACTS if (kind, act) != ("rigid", "scale")]


def asked(m: Played, job: Job, act: str, *, force: bool) -> Coroutine[Any, Any, Job]:
    """A person's act that takes all workers of a job with two."""
    if act == "suspend":
        return m.plane.wish(job.id, "suspend", "ana", force=force)
    if act == "scale":
        return m.plane.scale(job.id, 1, 1, "ana", force=force)
    there = {"node-0", "node-1"} - {worker.seat.node for worker in job.workers}
    return m.plane.migrate(job.id, there.pop(), "ana", force=force)


async def begun(m: Played, kind: str) -> Job:
    job = await m.begun("a", **KINDS[kind])
    return await m.until(job, lambda job: len([w for w in job.workers if w.pid]) == 2)


@pytest.mark.parametrize(("kind", "act"), CASES)
def test_what_it_costs_is_told_with_who_has_done_it(tmp_path: Path, kind: str, act: str) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2, policy="elastic-fifo") as m:
            job = await begun(m, kind)
            await m.after(34.0)
            await asked(m, job, act, force=False)
            found = await m.until(job, lambda job: bool(job.lost_s))
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text, event.by) == ("asked", ACTS[act], ())
            assert 34 <= event.lost_s < 60
            assert (found.lost, found.preemptions) == ({ACTS[act]: event.lost_s}, 0)
            assert {gone.why for gone in await m.events(job, e.Leaving)} == {ACTS[act]}

    play(story())


@pytest.mark.parametrize(("kind", "act"), CASES)
def test_what_costs_more_than_a_minute_must_be_meant(tmp_path: Path, kind: str, act: str) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2, policy="elastic-fifo") as m:
            job = await begun(m, kind)
            await m.after(100.0)
            with pytest.raises(Conflict, match=r"would lose 1\d\d s of its work") as refused:
                await asked(m, job, act, force=False)
            assert "--force" in refused.value.hint
            await m.after()
            now = await m.plane.job(job.id)
            assert ([w.launch for w in now.workers], now.act) == ([w.launch for w in job.workers], "")
            await asked(m, job, act, force=True)
            assert 100 <= (await m.until(job, lambda job: bool(job.lost_s))).lost_s < 160

    play(story())


@pytest.mark.parametrize("act", ACTS)
def test_who_has_joined_loses_nothing(tmp_path: Path, act: str) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2, policy="elastic-fifo") as m:
            job = await begun(m, "never joined")
            m.joins(job)
            await m.after(100.0)
            await asked(m, job, act, force=False)
            before = [worker.launch for worker in job.workers]
            await m.until(job, lambda job: [worker.launch for worker in job.workers] != before)
            await m.after()
            left = await m.plane.job(job.id)
            assert (left.lost_s, left.preemptions, await m.interruptions(job)) == (0.0, 0, [])

    play(story())


def test_a_stop_for_others_is_not_laid_to_somebody_who_scaled_it_before(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2) as m:
            job = await m.begun("a", **KINDS["restart"])
            await m.plane.scale(job.id, 1, 4, "ana")
            await m.after(40.0)
            await m.begun("urgent", priority=90, workers=2)
            found = await m.until(job, lambda job: bool(job.lost_s))
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text, found.preemptions) == ("preempted", "stopped for urgent", 1)

    play(story())


def test_who_has_done_it_is_known_to_the_next_server(tmp_path: Path) -> None:
    clock = Clock()

    async def story() -> None:
        async with played(tmp_path, 2, 2, clock=clock) as m:
            job = await begun(m, "rigid")
            await m.after(34.0)
            m.backend.deaf.add(job.number)
            await m.plane.drain("node-0", True, "ben")
            await m.plane.wish(job.id, "suspend", "ana")
            await m.until(job, lambda job: all(worker.leaving for worker in job.workers))
            living = dict(m.backend.living)
        async with played(tmp_path, 2, 2, clock=clock) as m:
            assert m.plane.loop.rules.drained_by == {"node-0": "ben"}
            m.backend.living.update(living)
            m.backend.finish(job, "signalled", 9)
            await m.until(job, lambda job: job.phase == "suspended" and bool(job.lost_s))
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text) == ("asked", "suspended by ana")

    play(story())


# What was hardly started.


def test_who_was_stopped_before_it_could_listen_is_not_said_to_save_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy="priority") as m:
            job = await m.begun("tidy", **KINDS["restart"])
            m.plane.book.record(job.number, e.Kept(how="it saved its state when it was asked to end"))
            await m.after(1.0)
            urgent = await m.begun("urgent", priority=90, workers=2)
            await m.until(job, lambda job: not job.workers)
            m.backend.finish(urgent)
            again = await m.until(job, lambda job: job.starts == 2 and all(w.pid for w in job.workers))
            assert (again.keeps, again.lost_s) == (True, 0.0)
            # Later it could have.
            await m.after(30.0)
            await m.begun("urgent-too", priority=90, workers=2)
            await m.until(job, lambda job: not job.keeps)
            assert [event.keeps for event in await m.events(job, e.Kept)] == [True, False]

    play(story())


def test_who_has_no_process_yet_has_nothing_to_lose(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1) as m:
            job = await m.begun("a")
            await m.after(100.0)
            active = m.plane.book.jobs[job.number]
            assert loss.lost_s(active, m.clock()) >= 100
            unborn = [msgspec.structs.replace(worker, pid=0) for worker in job.workers]
            assert loss.lost_s(active, m.clock(), msgspec.structs.replace(active.job, workers=tuple(unborn))) == 0

    play(story())


def test_who_is_still_being_launched_is_not_stopped_for_an_equal(tmp_path: Path) -> None:
    """However long that takes: it would have been started for nothing."""

    async def story() -> None:
        async with played(tmp_path, 1, policy="srtf") as m:
            m.backend.slow = True
            long = await m.submit("long", expect="1h")
            await m.comes(lambda: bool(m.backend.of(long)))
            short = await m.submit("short", expect="1s")
            for _ in range(5):
                await m.after(2.0)
            assert (await m.reason(long))[0] == "just-started"
            assert not (await m.plane.job(short.id)).workers
            m.backend.slow = False
            m.backend.arrive()
            await m.after(1.5)
            found = await m.until(long, lambda job: job.preemptions == 1)
            (event,) = await m.interruptions(long)
            assert (event.cause, found.starts) == ("preempted", 1)
            assert event.lost_s < 10, "its launch was no work"

    play(story())
