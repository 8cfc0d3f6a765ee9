"""Random histories with the real loop, in which jobs keep coming: nobody loses its work to an equal, nobody waits
longer than was promised, and what is lost to more urgent jobs is what `show` says.

`Judge` looks at every decision; the events are the loop's own account of what was really lost.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from judged_decisions import Judge
from machine import play
from played_machine import Played, played

from stretto.backends.protocol import Launch
from stretto.jobs import events as e
from stretto.jobs.model import Job

KINDS: tuple[dict[str, Any], ...] = (
    {"workers": 1},
    {"workers": 2},
    {"workers": 4},
    {"workers": 5},
    {"workers": 1, "preemptible": True},
    {"workers": 2, "preemptible": True},
    {"elastic": {"min": 1, "max": 3}, "level": "restart"},
    {"elastic": {"min": 2, "max": 3}, "level": "restart", "preemptible": False},
    {"elastic": {"min": 1, "max": 3}},
    {"elastic": {"min": 1, "max": 2}, "preemptible": False},
)
POLICIES: dict[str, dict[str, Any]] = {
    "srtf": {},
    "tiresias": {"queues": [60.0, 300.0]},
    "afs-l": {},
    "round-robin": {"quantum_s": 5.0},
    "stretto": {},
    "gavel": {"round_s": 30.0, "reset_s": 60.0},
}
STEPS_S = 0.5, 2.0, 8.0, 20.0
LATE_S = 2 * max(STEPS_S) + 10.0
WORTH_S = {"rigid": 2.0, "restart": 10.0, "elastic": 10.0}
"""What two starts cost, as long as nobody has measured it."""
SLACK_S = 3.0
"""Between the decision and the end of the last worker, on a slow machine."""


class Seen(NamedTuple):
    """How often what is tested came about."""

    wanted: int
    urgent: int
    reserved: int


class History:
    def __init__(self, m: Played, seed: int) -> None:
        self.m, self.random = m, random.Random(seed)
        self.judge = Judge(LATE_S)
        m.plane.loop._decider = self.judge.decide
        self._turn, m.plane.loop._turn = m.plane.loop._turn, self._watched_turn  # type: ignore[method-assign]
        self._turns = False
        self.jobs: list[Job] = []
        self.joins: set[int] = set()
        """Elastic jobs whose scripts take part."""

    async def _watched_turn(self) -> None:
        self._turns = True
        await self._turn()
        self._turns = False

    async def happen(self) -> None:
        """Something, and then some time goes by."""
        match self.random.choice(("submit", "submit", "submit", "submit", "save", "policy")):
            case "submit" if len(self.m.plane.book.jobs) < 14:
                await self.submit()
            case "save":
                for job in [job for job in self.living() if job.level == "restart"]:
                    for launch in self.m.backend.of(job)[:1]:
                        self.m.save(launch)
            case "policy" if self.random.random() < 0.1:
                await self.choose(self.random.choice(list(POLICIES)))
        await self.go_on(self.random.choice(STEPS_S))

    async def choose(self, policy: str) -> None:
        await self.m.plane.set_policy(policy, {**POLICIES[policy], "reserve_after_s": 30.0}, None, "me")

    async def submit(self) -> None:
        """Of three jobs one says nothing of its length, one the truth, and one something else."""
        draw, number = self.random, len(self.jobs)
        lasts_s, fields = draw.choice((5.0, 30.0, 60.0, 150.0)), dict(draw.choice(KINDS))
        said_s = draw.choice((0.0, 0.0, lasts_s, lasts_s, 1.0, 10 * lasts_s))
        fields |= {"expect": said_s} if said_s else {}
        job = await self.m.submit(f"j{number}", priority=draw.choice((50, 50, 50, 70, 90)), **fields)
        self.jobs.append(job)
        self.judge.lasts_s[job.number] = lasts_s
        saves, joins = job.level == "restart" and draw.random() < 0.3, job.level == "elastic" and draw.random() < 0.5
        if saves:
            self.m.backend.when_asked[job.number] = self.save_and_end
        if joins:
            self.joins.add(job.number)
        if fields.get("preemptible") is False or not (joins or saves):
            self.judge.stays.add(job.number)

    def save_and_end(self, launch: Launch) -> int:
        self.m.save(launch)
        return 143

    async def go_on(self, seconds: float) -> None:
        """Who has lasted long enough ends; scripts that take part join."""
        await self.m.after()
        await self.all_is_done()
        await self.m.after(seconds)
        for job in self.living():
            if job.number in self.joins and not job.keeps:
                self.m.joins(job)
            if self.has_done_s(job) >= self.judge.lasts_s[job.number]:
                self.m.backend.finish(job)

    async def all_is_done(self) -> None:
        """What was decided, and nothing is to be decided: otherwise it would be done after the clock was put forward,
        as if that had taken so long."""
        quiet = 0
        while quiet < 3:
            busy = self._turns or self.m.plane.loop._ask_s() <= self.m.clock()
            quiet = 0 if busy else quiet + 1
            await asyncio.sleep(0.001)

    def has_done_s(self, job: Job) -> float:
        """Of all it has to do; without what a stop has lost."""
        began_s = min(worker.launched_s for worker in job.workers)
        return self.m.clock() - began_s if not job.keeps else job.ran_s + self.m.clock() - job.changed_s

    def living(self) -> list[Job]:
        return [active.job for active in self.m.plane.book if active.job.workers]

    async def robbed(self) -> list[tuple[str, e.Interrupted]]:
        """Who has lost more than is weighed like a start, and not to a more urgent job."""
        priority = {job.name: job.spec["priority"] for job in self.jobs}
        found = []
        for job in self.jobs:
            assert not await self.m.events(job, e.Retried)
            for event in await self.m.interruptions(job):
                assert event.cause == "preempted"
                rightly = event.by and all(priority[name] > priority[job.name] for name in event.by)
                if event.lost_s > WORTH_S[job.level] + SLACK_S and not rightly:
                    found.append((job.name, event))
        return found

    async def accounts_differ(self) -> list[str]:
        """Whose losses `show` does not tell as its events do."""
        found = []
        for job in [await self.m.plane.job(one.id) for one in self.jobs]:
            lost_s = sum(event.lost_s for event in await self.m.interruptions(job))
            if job.lost_s != pytest.approx(lost_s) or sum(job.lost.values()) != pytest.approx(lost_s):
                found.append(f"{job.name}: {job.lost_s} s, {job.lost}, not {lost_s} s")
        return found

    async def all_end(self) -> None:
        for _ in range(200):
            if not self.m.plane.book.jobs:
                return
            await self.go_on(20.0)
        raise AssertionError({active.job.name: active.reason.text for active in self.m.plane.book})


def lived(folder: Path, policy: str, seed: int) -> Seen:
    seen = []

    async def story() -> None:
        async with played(folder, 3, 2) as m:
            history = History(m, seed)
            await history.choose(policy)
            for _ in range(90):
                await history.happen()
            assert not history.judge.wrong, "while jobs come"
            await history.all_end()
            assert not history.judge.wrong
            assert not await history.robbed()
            assert not await history.accounts_differ()
            seen.append(Seen(history.judge.wanted, history.judge.urgent, history.judge.reserved))

    play(story())
    return seen[0]


def test_nobody_loses_its_work_to_an_equal_and_nobody_starves(tmp_path: Path) -> None:
    """Over all histories policies want at least a hundred times what they must not do."""
    found = []
    for seed, policy in enumerate(POLICIES):
        (tmp_path / policy).mkdir()
        found.append(lived(tmp_path / policy, policy, seed))
    wanted, urgent, reserved = (sum(column) for column in zip(*found, strict=True))
    assert wanted >= 100, "the policies wanted too little to show anything"
    assert urgent >= 3
    assert reserved >= 10


def test_the_same_history_loses_work_where_that_is_allowed(tmp_path: Path) -> None:
    """So that the test above can fail."""

    async def story() -> None:
        async with played(tmp_path, 3, 2) as m:
            history = History(m, 0)
            await m.plane.set_policy("round-robin", {"quantum_s": 5.0, "stops_lose_work": True}, None, "me")
            for _ in range(40):
                await history.happen()
            assert history.judge.wrong
            assert await history.robbed()

    play(story())
