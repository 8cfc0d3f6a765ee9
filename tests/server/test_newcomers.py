"""Newcomers that fail one after the other are tried ever more seldom, while the others train on."""

from __future__ import annotations

from pathlib import Path

import played_machine
from machine import play
from played_worker import Line

from stretto.backends.protocol import Exit
from stretto.jobs import events as e
from stretto.jobs.model import Job, Worker
from stretto.runtime import messages as m
from stretto.server.drivers.elastic import ElasticDriver
from stretto.tasks import stop


def test_newcomers_that_fail_are_tried_ever_more_seldom_while_the_others_train(tmp_path: Path) -> None:
    async def story() -> None:
        async with played_machine.played(tmp_path, 2) as machine:
            job = await machine.begun("one", elastic={"min": 1, "max": 2, "explore": False})
            job = await machine.until(job, lambda job: len(job.workers) == 2)
            driver = machine.plane.loop.drivers[job.number]
            assert isinstance(driver, ElasticDriver)
            first = Line(driver, "w0")
            first.say(m.Ready())
            generation = await first.form()
            await machine.comes(lambda: driver.joined == {"w0"})

            waits = []
            for round_ in range(5):
                # The survivor gets on with it, which says nothing of the next newcomer.
                await first.beat(generation, step=100 * (round_ + 1), applied=100 * (round_ + 1))
                newcomer = (await machine.until(job, has_newcomer)).workers[-1]
                fail(machine, newcomer)
                job = await machine.until(job, lambda job: len(job.workers) == 1)
                told = (await machine.events(job, e.Retried))[-1]
                recorded = await machine.plane.events(job.id, 0, 1000)
                at_s = next(one.at_s for one in recorded if one.event == told)
                waits.append(round(told.not_before_s - at_s))
                assert f"{newcomer.name} ended with exit code 75" in told.text
                assert len(await machine.events(job, e.Retried)) == round_ + 1
                if waits[-1] >= 16:
                    _, why = await machine.reason(job)
                    assert "the next worker is tried in" in why
                    assert f"{newcomer.name} ended with exit code 75" in why
                    await machine.after()
                    assert not has_newcomer(await machine.plane.job(job.id)), "nobody is started before"
                await machine.after(waits[-1] + 1.0)
            assert waits == [1, 2, 4, 8, 16]
            assert "5 newcomers in a row have failed, the next is tried after 16 s" in told.text
            assert not (await machine.plane.job(job.id)).ended

            newcomer = (await machine.until(job, has_newcomer)).workers[-1]
            second = Line(driver, newcomer.name)
            second.say(m.Ready())
            for line in (first, second):
                await line.form()
            await machine.comes(lambda: newcomer.name in driver.joined)
            assert driver.newcomers_failed == 0, "who succeeds makes a new beginning"
            for line in (first, second):
                await stop(line.task)

    play(story())


def has_newcomer(job: Job) -> bool:
    return len(job.workers) == 2 and bool(job.workers[-1].pid)


def fail(machine: played_machine.Played, worker: Worker) -> None:
    machine.backend._end(Exit(launch=worker.launch, how="exited", status=75))
