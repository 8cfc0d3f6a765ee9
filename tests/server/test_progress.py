"""Progress is kept: who would lose its work is stopped for nobody of the same priority, and every loss is said."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from machine import play
from played_machine import Clock, Played, played

from stretto.errors import Conflict, UsageError
from stretto.jobs import events as e
from stretto.jobs.model import Context, Job
from stretto.server import loss
from stretto.server.notifying import Notifier, about
from stretto.server.view import Quota

ELASTIC = {"elastic": {"min": 1, "max": 4, "explore": False}}
RESTART = {"elastic": {"min": 1, "max": 2}, "level": "restart"}


async def still_runs(m: Played, *jobs: Job) -> None:
    for before in jobs:
        job = await m.plane.job(before.id)
        assert [worker.launch for worker in job.workers] == [worker.launch for worker in before.workers], job
        assert not any(worker.leaving for worker in job.workers), job
        assert (job.starts, job.preemptions, job.lost_s) == (1, 0, 0.0)


@pytest.mark.parametrize("policy", ["stretto", "srtf", "tiresias", "round-robin"])
def test_plain_commands_are_not_stopped_for_equals(tmp_path: Path, policy: str) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy=policy) as m:
            running = [await m.begun("long-a"), await m.begun("long-b")]
            await m.after(8.0)
            newcomers = [await m.submit(f"short-{i}") for i in range(3)]
            await m.after()
            named = [text for _, text in [await m.reason(job) for job in newcomers]]
            assert all("would lose their work" in text and "(long-a, long-b)" in text for text in named), named
            for _ in range(10):
                await m.after(30.0)
                await still_runs(m, *running)
            assert len(m.backend.living) == 2
            m.backend.finish(running[0])
            await m.until(running[0], lambda job: job.ended)
            await m.after(30.0)
            await m.comes(lambda: len(m.backend.living) == 2)
            await still_runs(m, running[1])

    play(story())


def test_a_more_urgent_job_stops_one_that_is_preemptible_and_that_is_said(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1) as m:
            told: list[e.Interrupted] = []
            m.plane.book.listeners.append(
                lambda recorded, job: told.append(recorded.event)
                if isinstance(recorded.event, e.Interrupted) else None
            )  # fmt: skip
            slow = await m.begun("slow", preemptible=True)
            await m.after(40.0)
            urgent = await m.submit("urgent-job", priority=90)
            await m.until(urgent, lambda job: bool(job.workers))
            job = await m.until(slow, lambda job: bool(job.lost_s))
            (event,) = await m.interruptions(slow)
            assert (event.cause, event.by, event.text) == ("preempted", ("urgent-job",), "stopped for urgent-job")
            assert 40 <= event.lost_s < 60
            assert (job.lost_s, job.lost) == (event.lost_s, {"stopped for urgent-job": event.lost_s})
            assert (job.preemptions, told) == (1, [event])

    play(story())


def test_whoever_wants_to_know_is_told_of_an_interruption() -> None:
    job = Job(
        number=1, name="a", user="me", submitted_s=1.0, spec={"notify": ["http://x/"]}, context=Context(cwd="/"),
        level="rigid", lost_s=12.0,
    )  # fmt: skip
    sent: list[Coroutine[Any, Any, None]] = []
    event = e.Interrupted(cause="preempted", lost_s=12.0, text="stopped for b", by=("b",))

    async def story() -> None:
        notifier = Notifier(sent.append)
        notifier(e.Recorded(seq=1, at_s=1.0, job=1, event=event), job)
        notifier(e.Recorded(seq=2, at_s=1.0, job=1, event=e.Kept(how="x")), job)

    play(story())
    assert len(sent) == 1
    sent[0].close()
    assert about(job)["lost_s"] == 12.0


def test_a_job_that_is_not_preemptible_is_waited_for(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1) as m:
            slow = await m.begun("slow")
            await m.after(40.0)
            urgent = await m.submit("urgent", priority=90)
            await m.after(100.0)
            await still_runs(m, slow)
            reason, text = await m.reason(urgent)
            assert (reason, "(slow)" in text) == ("waits-for-pinned", True)

    play(story())


def test_jobs_that_keep_their_progress_shrink_and_give_way(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 4, policy="elastic-fifo") as m:
            wide = await m.begun("wide", **ELASTIC)
            m.joins(wide)
            await m.after(100.0)
            assert len((await m.plane.job(wide.id)).workers) == 4
            await m.begun("other", workers=2)
            job = await m.until(wide, lambda job: len(job.workers) == 2)
            assert (job.keeps, job.lost_s, job.preemptions) == (True, 0.0, 0)
            assert not await m.interruptions(wide)

    play(story())


def test_an_elastic_job_that_never_joined_is_a_plain_program(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 4, policy="elastic-fifo") as m:
            liar = await m.begun("liar", **ELASTIC)
            await m.after(60.0)
            waiting = await m.submit("other", workers=2)
            await m.after(60.0)
            await still_runs(m, liar)
            assert (await m.reason(waiting))[0] == "waits-for-pinned"
            m.joins(liar)
            await m.after()
            await m.until(waiting, lambda job: len(job.workers) == 2)

    play(story())


def test_a_plain_program_has_ended_though_one_of_its_workers_was_asked_to_leave(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy="elastic-fifo") as m:
            liar = await m.begun("liar", elastic={"min": 1, "max": 2, "explore": False})
            await m.until(liar, lambda job: len(job.workers) == 2)
            m.backend.deaf.add(liar.number)
            await m.plane.scale("liar", 1, 1, "me")
            await m.until(liar, lambda job: any(worker.leaving for worker in job.workers))
            m.backend.finish(liar)
            await m.until(liar, lambda job: job.phase == "succeeded")

    play(story())


def test_what_keeps_its_minimum_is_shrunk_to_it_and_not_stopped(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy="priority") as m:
            own = await m.begun("own", elastic={"min": 1, "max": 2, "explore": False}, preemptible=False)
            m.joins(own)
            urgent = await m.submit("urgent", priority=90, workers=2)
            await m.after(30.0)
            assert len((await m.plane.job(own.id)).workers) >= 1
            assert not (await m.plane.job(urgent.id)).workers

    play(story())


def test_a_restart_job_that_saves_when_asked_is_suspended_and_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy="priority") as m:

            def saves(launch: object) -> int:
                m.save(launch)  # type: ignore[arg-type]
                return 143

            job = await m.begun("tidy", **RESTART)
            m.backend.when_asked[job.number] = saves
            await m.after(300.0)
            assert not (await m.plane.job(job.id)).keeps
            with pytest.raises(Conflict, match=r"would lose 30\d s of its work"):
                await m.plane.wish("tidy", "suspend", "me")
            await m.plane.wish("tidy", "suspend", "me", force=True)
            await m.until(job, lambda job: job.phase == "suspended" and job.keeps)
            (kept,) = await m.events(job, e.Kept)
            assert (kept.keeps, await m.interruptions(job)) == (True, [])
            await m.plane.wish("tidy", "run", "me")
            again = await m.until(job, lambda job: bool(job.workers))
            await m.after(300.0)
            assert (again.starts, again.lost_s) == (2, 0.0)
            # From now on equals may have its place, and it loses nothing.
            await m.begun("urgent", priority=90, workers=2)
            (event,) = await m.interruptions(job)
            assert (event.cause, event.lost_s) == ("preempted", 0.0)
            assert (await m.plane.job(job.id)).lost_s == 0

    play(story())


def test_a_restart_job_that_is_killed_before_it_saved_does_not_keep_its_work_any_more(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, policy="priority") as m:
            job = await m.begun("untidy", **RESTART)
            m.plane.book.record(job.number, e.Kept(how="it saved its state when it was asked to end"))
            await m.after(100.0)
            await m.begun("urgent", priority=90, workers=2)
            found = await m.until(job, lambda job: not job.keeps)
            assert 100 <= found.lost_s < 130
            assert [event.keeps for event in await m.events(job, e.Kept)] == [True, False]

    play(story())


def test_a_restart_job_loses_what_it_did_since_its_checkpoint(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1) as m:
            job = await m.begun("saver", **RESTART)
            active = m.plane.book.jobs[job.number]
            await m.after(500.0)
            assert loss.lost_s(active, m.clock()) >= 500
            m.save(m.backend.of(job)[0])
            await m.until(job, lambda job: bool(active.saved_s))
            assert loss.lost_s(active, m.clock()) < 60
            assert loss.fragile(active.job)

    play(story())


def test_faults_are_counted_apart_and_survive_a_restart_of_the_server(tmp_path: Path) -> None:
    clock = Clock()

    async def story() -> None:
        async with played(tmp_path, 2, clock=clock) as m:
            job, other = await m.begun("a"), await m.begun("b")
            await m.after(30.0)
            m.backend.finish(job, "signalled", 9)
            found = await m.until(job, lambda job: bool(job.lost_s))
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text) == ("machine", "w0 was ended by signal 9")
            m.backend.finish(other, "lost")
            await m.until(other, lambda job: bool(job.lost_s))
            (event,) = await m.interruptions(other)
            assert (event.cause, event.text, found.preemptions) == ("node", "node-0 lost", 0)
        async with played(tmp_path, 2, clock=clock) as m:
            assert (await m.plane.job("a")).lost == found.lost

    play(story())


def test_who_has_done_nothing_yet_or_ended_by_itself_has_lost_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2) as m:
            well, badly, gone = await m.begun("well"), await m.begun("badly"), await m.submit("gone")
            await m.after(100.0)
            m.backend.finish(well)
            m.backend.finish(badly, status=3)
            await m.until(well, lambda job: job.phase == "succeeded")
            await m.until(badly, lambda job: job.phase == "failed")
            await m.until(gone, lambda job: bool(job.workers))
            await m.after(100.0)
            await m.plane.wish("gone", "cancel", "me")
            await m.until(gone, lambda job: job.phase == "cancelled")
            for job in (well, badly, gone):
                assert ((await m.plane.job(job.id)).lost_s, await m.interruptions(job)) == (0.0, [])

    play(story())


# What people do.


def test_a_lowered_quota_stops_nobody_and_starts_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 6, policy="elastic-fifo", quotas={"*": Quota(devices=6)}) as m:
            fixed = await m.begun("fixed", workers=2)
            wide = await m.begun("wide", elastic={"min": 1, "max": 4, "explore": False})
            m.joins(wide)
            await m.after(60.0)
            m.plane.loop.rules.quotas = {"*": Quota(devices=1)}
            new = await m.submit("new", user="me")
            await m.after(60.0)
            await still_runs(m, fixed)
            assert len((await m.plane.job(wide.id)).workers) == 1
            assert (await m.reason(new))[0] == "quota"

    play(story())


def test_a_drained_node_is_left_when_its_jobs_have_ended(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2, policy="fit-first") as m:
            stays, moves = await m.begun("stays", workers=2), await m.begun("moves", elastic={"min": 2, "max": 2})
            node = stays.workers[0].seat.node
            if moves.workers[0].seat.node == node:
                pytest.fail("both are on one node")
            m.joins(moves)
            await m.after(60.0)
            other = moves.workers[0].seat.node
            await m.plane.drain(node, True, "me")
            new = await m.submit("new", priority=90)
            await m.after(60.0)
            await still_runs(m, stays, moves)
            assert f"{node} is drained" in (await m.reason(stays))[1]
            await m.plane.drain(other, True, "me")
            m.backend.finish(stays)
            await m.plane.drain(node, False, "me")
            await m.until(moves, lambda job: {worker.seat.node for worker in job.workers} == {node})
            assert not (await m.plane.job(new.id)).workers

    play(story())


@pytest.mark.parametrize("within_s", [0.0, 600.0])
def test_a_drained_node_is_left_in_time(tmp_path: Path, within_s: float) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2) as m:
            job = await m.begun("a", workers=2)
            node = job.workers[0].seat.node
            await m.after(100.0)
            await m.plane.drain(node, True, "me", within_s=within_s)
            if within_s:
                await m.after(500.0)
                await still_runs(m, job)
                assert "within" in (await m.reason(job))[1]
                m.clock.ahead_s += 200.0
                m.plane.loop.wake(decide=False)
            found = await m.until(job, lambda job: job.starts == 2)
            assert {worker.seat.node for worker in found.workers}.isdisjoint({node})
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text) == ("node", f"{node} drained by me")
            assert event.lost_s >= 100 + within_s

    play(story())


def test_a_drain_is_remembered(tmp_path: Path) -> None:
    clock = Clock()

    async def story() -> None:
        async with played(tmp_path, 1, 1, 1, clock=clock) as m:
            await m.plane.drain("node-0", True, "me")
            await m.plane.drain("node-1", True, "me", within_s=60.0)
            drained = dict(m.plane.loop.rules.drained)
            assert drained["node-0"] == math.inf
        async with played(tmp_path, 1, 1, 1, clock=clock) as m:
            assert m.plane.loop.rules.drained == drained

    play(story())


def test_acts_that_would_lose_much_work_must_be_meant(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 2, 2) as m:
            job = await m.begun("a", **RESTART)
            size, node = len(job.workers), job.workers[0].seat.node
            other = "node-1" if node == "node-0" else "node-0"
            await m.after(50.0)
            await m.plane.scale("a", 1, 2, "me")  # It need not be stopped for that.
            await m.after(50.0)
            for act in (
                m.plane.wish("a", "suspend", "me"),
                m.plane.migrate("a", other, "me"),
                m.plane.scale("a", size + 1, size + 1, "me"),
            ):
                with pytest.raises(Conflict, match="s of its work") as refused:
                    await act
                assert "--force" in refused.value.hint
            await still_runs(m, job)
            await m.plane.migrate("a", other, "me", force=True)
            moved = await m.until(job, lambda job: {worker.seat.node for worker in job.workers} == {other})
            (event,) = await m.interruptions(job)
            assert (event.cause, event.text, moved.preemptions) == ("asked", "migrated by me", 0)
            assert 100 <= event.lost_s < 130
            await m.plane.wish("a", "cancel", "me")
            await m.until(job, lambda job: job.phase == "cancelled")

    play(story())


def test_who_is_there_already_is_not_moved(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1, 1) as m:
            job = await m.begun("a")
            await m.after(100.0)
            here = job.workers[0].seat.node
            with pytest.raises(Conflict, match=f"is on node {here} already"):
                await m.plane.migrate("a", here, "me")
            await m.begun("b")
            await m.submit("c")
            await still_runs(m, job)

    play(story())


def test_nobody_is_moved_to_where_others_stay(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1, 1) as m:
            jobs = [await m.begun("a"), await m.begun("b")]
            await m.after(100.0)
            there = jobs[1].workers[0].seat.node
            with pytest.raises(Conflict, match=rf"{there} has no room for job 1 .*: b"):
                await m.plane.migrate("a", there, "me", force=True)
            await still_runs(m, *jobs)

    play(story())


@pytest.mark.parametrize("policy", ["stretto", "srtf", "round-robin"])
def test_who_cannot_be_moved_keeps_its_place_and_its_protection(tmp_path: Path, policy: str) -> None:
    """The room has gone since it was asked to move."""

    async def story() -> None:
        async with played(tmp_path, 1, 1, policy=policy) as m:
            jobs = [await m.begun("a"), await m.begun("b")]
            await m.after(100.0)
            active = m.plane.book.jobs[jobs[0].number]
            m.plane.book.record(active.number, e.Moved(node=jobs[1].workers[0].seat.node, by="me"))
            for i in range(3):
                await m.submit(f"equal-{i}", expect="1s")
            for _ in range(5):
                await m.after(30.0)
                await still_runs(m, *jobs)
            (asked, dropped) = await m.events(jobs[0], e.Moved)
            assert (asked.by, dropped.node, dropped.by) == ("me", "", "stretto")
            assert "no room" in dropped.why
            assert active.job.act == ""

    play(story())


def test_a_job_that_moves_takes_nobodys_work(tmp_path: Path) -> None:
    """Though it would lose none itself."""

    async def story() -> None:
        async with played(tmp_path, 1, 1) as m:
            elastic = await m.begun("elastic", **ELASTIC)
            m.joins(elastic)
            here = elastic.workers[0].seat.node
            plain = await m.begun("plain")
            there = plain.workers[0].seat.node
            assert {here, there} == {"node-0", "node-1"}
            await m.after(100.0)
            m.plane.book.record(elastic.number, e.Moved(node=there, by="me"))
            await m.after(10.0)
            await still_runs(m, plain)
            assert (await m.plane.job(elastic.id)).node == ""

    play(story())


def test_administrators_may_let_policies_stop_what_they_like(tmp_path: Path) -> None:
    clock = Clock()

    async def story() -> None:
        async with played(tmp_path, 1, policy="round-robin", clock=clock) as m:
            first = await m.begun("first")
            await m.after(60.0)
            second = await m.submit("second")
            await m.after(60.0)
            await still_runs(m, first)
            told = await m.plane.set_policy("round-robin", {"stops_lose_work": "true"}, None, "me")
            assert (told.settings, told.options) == ({"stops_lose_work": True}, {})
            with pytest.raises(UsageError, match="reserve_after_s"):
                await m.plane.set_policy("round-robin", {"reserve_after_s": "soon"}, None, "me")
            for _ in range(20):
                await m.after(60.0)
                if (await m.plane.job(second.id)).starts:
                    break
            (event, *_) = await m.interruptions(first)
            assert (event.cause, event.by) == ("preempted", ())
            assert event.lost_s > 100
        async with played(tmp_path, 1, policy="round-robin", clock=clock) as m:
            assert m.plane.loop.rules.settings.stops_lose_work

    play(story())
