"""Progress is kept on a cluster, too, and what is lost is told in objects and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_api import NAMESPACE, Stage, play, until

from stretto.backends.protocol import Exit
from stretto.jobs import events as e
from stretto.jobs.model import Context, Job
from stretto.kubernetes import status
from stretto.kubernetes.controller import Controller
from stretto.kubernetes.drivers import ClusterGroupDriver
from stretto.kubernetes.kinds import PODS
from stretto.kubernetes.metrics import exposition
from stretto.runtime import messages as m
from stretto.runtime.handshake import Secret
from stretto.runtime.introduction import introduced
from stretto.server.drivers.elastic import ElasticDriver
from stretto.spec.model import JobFile
from stretto.tasks import stop


def told(stage: Stage, reason: str) -> list[dict[str, Any]]:
    return [item for (plural, *_), item in stage.api.objects.items() if plural == "events" and item["reason"] == reason]


async def decided(stage: Stage, controller: Controller, ahead_s: float = 0.0) -> None:
    """Put the clock forward, and wait until that was looked at."""
    stage.ahead_s += ahead_s
    for _ in range(2):
        before = controller.loop.decisions
        controller.loop.wake(decide=True, urgent=True)
        await until(lambda before=before: controller.loop.decisions > before)  # type: ignore[misc]


def test_an_urgent_job_waits_for_one_that_would_lose_its_work() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="1")
        async with stage.controller(settings={}) as controller:
            stage.job("slow")
            (pod,) = await stage.has("slow", 1)
            await until(lambda: all(worker.pid for active in controller.book for worker in active.job.workers))
            await decided(stage, controller, 100.0)
            stage.job("urgent", priority=90)
            await until(lambda: len(controller.book.jobs) == 2)
            await decided(stage, controller, 100.0)
            assert stage.api.names(PODS, "slow-") == [pod]
            assert stage.api.names(PODS, "urgent-") == []
            await stage.reaches("urgent", waitingFor="has-reservation")
            # It has run for 200 s, and nobody knows how long it is: as long again.
            assert f"in about 3 min, when {NAMESPACE}/slow ends" in stage.api.status("urgent")["message"]

    play(story)


def test_what_an_urgent_job_costs_another_is_told() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="1")
        async with stage.controller(settings={}) as controller:
            stage.job("slow", preemptible=True)
            (pod,) = await stage.has("slow", 1)
            await until(lambda: all(worker.pid for active in controller.book for worker in active.job.workers))
            await decided(stage, controller, 100.0)
            stage.job("urgent", priority=90)
            await until(lambda: stage.api.names(PODS, "slow-") == [] or stage.api.objects["pods", NAMESPACE, pod][
                "metadata"].get("deletionTimestamp"))  # fmt: skip
            if stage.api.names(PODS, "slow-"):
                stage.api.ended(pod)
            await until(lambda: (stage.api.status("slow").get("lostSeconds") or 0) >= 100)
            await until(lambda: told(stage, "Interrupted"))
            (event,) = told(stage, "Interrupted")
            assert (event["type"], f"stopped for {NAMESPACE}/urgent" in event["message"]) == ("Warning", True)
            assert b'stretto_work_lost_seconds_total{cause="preempted"} 1' in exposition(controller, True)[0]

    play(story)


class Spoken:
    """What a worker says, as the coordinator's socket."""

    def __init__(self, secret: str, *then: m.Message) -> None:
        """What it says first."""
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self._secret, self._then = Secret(secret), then

    def say(self, *messages: m.Message) -> None:
        for message in messages:
            self.said.put_nowait(m.encode(message))

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        return await self.said.get()

    async def send(self, message: str) -> None:
        heard = m.decode(message)
        if isinstance(heard, m.Challenge):
            hello = m.Hello(worker="w0", incarnation="i", address="h:1")
            self.say(introduced(hello, heard, self._secret), *self._then)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        pass


def test_a_worker_that_hangs_is_told_of_and_fails_its_job() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="1")
        async with stage.controller(settings={}) as controller:
            stage.job("train", level="elastic")
            await stage.has("train", 1)
            await until(lambda: all(worker.pid for active in controller.book for worker in active.job.workers))
            (active,) = controller.book
            driver = controller.loop.drivers[active.number]
            assert isinstance(driver, ElasticDriver)
            stuck = m.Stuck(seconds=75.0, line="train.py:41 read")
            beat = m.Heartbeat(generation=1, loop=0, step=3, applied=3, stuck=(stuck,))
            worker = Spoken(active.job.secret, m.Ready(), m.Formed(generation=1, applied=0), beat)
            task = asyncio.create_task(driver.coordination.serve(worker))
            said = "w0 has made no step for 75 s, in the loop's body at train.py:41 read"
            await until(lambda: told(stage, "WorkerStuck"))
            (event,) = told(stage, "WorkerStuck")
            assert (event["type"], event["message"]) == ("Warning", said)
            controller.store.refresh(active.job)
            await until(lambda: stage.api.status("train").get("reason") == "Stuck")
            assert said in stage.api.status("train")["message"]
            worker.say(replace(beat, stuck=(replace(stuck, seconds=901.0, overdue=True),)))
            await until(lambda: stage.api.status("train").get("phase") == "Failed")
            assert "w0 has made no step for 901 s" in stage.api.status("train")["message"]
            await stop(task)

    play(story)


def test_the_settings_of_the_cycle_are_options_of_the_controller() -> None:
    async def story(stage: Stage) -> None:
        async with stage.controller(settings={"stops_lose_work": "true", "reserve_after_s": "5"}) as controller:
            found = controller.loop.rules.settings
            assert (found.stops_lose_work, found.reserve_after_s, found.placement) == (True, 5.0, "fewest-moves")

    play(story)


def test_what_a_policy_remembers_outlives_the_controller() -> None:
    turns = {"policy": "round-robin", "policy_options": {"quantum_s": 1000}}

    async def story(stage: Stage) -> None:
        stage.node(cpu="1")
        async with stage.controller(**turns) as controller:
            stage.job("a")
            stage.job("b")
            await until(lambda: len(controller.book.jobs) == 2)
            await until(lambda: controller.loop.state.cores is not None)
            until_s = controller.loop.state.cores.until_s
        stage.ahead_s = 500.0
        async with stage.controller(**turns) as controller:
            await until(lambda: controller.loop.decisions)
            assert controller.loop.state.cores.until_s == until_s
        async with stage.controller(policy="fifo") as controller:
            assert controller.loop.state.cores is None

    play(story)


def test_what_was_seen_and_lost_is_known_again_from_the_status() -> None:
    job = Job(
        number=1, name="x/a", user="me", submitted_s=1.0, spec={"run": "x"}, context=Context(cwd="/"), level="restart",
        keeps=True, start_s=2.5, lost_s=12.5, lost={"n1 lost": 12.5},
    )  # fmt: skip
    again = status.known(status.accounts(job), job.spec, job.level, "", [])
    assert (again.keeps, again.start_s, again.lost_s, again.lost) == (True, 2.5, 12.5, {"n1 lost": 12.5})


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> ClusterGroupDriver:
    file = JobFile.model_validate({"run": "x", "level": "restart", "checkpoint": request.param})
    job = SimpleNamespace(level="restart", id="1", workers=(), finished=0, keeps=False, start_s=0.0)
    around: Any = SimpleNamespace(folder=Path("/nonexistent"), records=Path("/nonexistent"), clock=lambda: 100.0)
    active: Any = SimpleNamespace(job=job, file=file, number=1)
    entry: Any = None
    return ClusterGroupDriver(active, around, entry)


@pytest.mark.parametrize(
    ("driver", "code", "kept"),
    [({"dir": "/shared"}, 0, True), ({"dir": "/shared"}, 143, False), ({}, 0, False)],
    indirect=["driver"],
)
def test_a_restart_job_keeps_its_work_if_it_ends_well_when_asked(
    driver: ClusterGroupDriver, code: int, kept: bool
) -> None:
    worker: Any = SimpleNamespace(name="w0", leaving="x", seat=SimpleNamespace(node="n1"))
    driver.stop(["w0"])
    driver.exited(worker, Exit(launch="1.w0", how="exited", status=code, asked=True), 0)
    assert (driver.seen is not None and driver.seen.keeps) == kept
    assert driver.seen is None or isinstance(driver.seen, e.Kept)
