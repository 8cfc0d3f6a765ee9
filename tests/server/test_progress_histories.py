"""Random histories with the real loop: nobody loses more work to an equal than two starts are worth, and all come to
their end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from machine import play
from played_machine import Played, played

from stretto.jobs import events as e
from stretto.jobs.model import Job

KINDS: tuple[dict[str, Any], ...] = (
    {"workers": 1},
    {"workers": 2},
    {"workers": 1, "preemptible": True},
    {"elastic": {"min": 1, "max": 3}, "level": "restart"},
    {"elastic": {"min": 1, "max": 3}},
    {"elastic": {"min": 1, "max": 2}, "preemptible": False},
)
WORTH_S = {"rigid": 2.0, "restart": 10.0, "elastic": 10.0}
"""What two starts cost, as long as nobody has measured it."""
SLACK_S = 15.0
"""Between the decision and the end of the last worker, on a slow machine."""
WANTED = {"keeps-progress", "waits-for-pinned"}


class History:
    def __init__(self, m: Played, seed: int) -> None:
        self.m, self.random = m, random.Random(seed)
        self.jobs: list[Job] = []
        self.wanted = 0
        """How often a policy wanted what it must not do."""

    async def happen(self) -> None:
        living = [active.job for active in self.m.plane.book if active.job.workers]
        match self.random.choice(("submit", "submit", "wait", "wait", "finish", "join", "save", "policy")):
            case "submit" if len(self.m.plane.book.jobs) < 10:
                self.jobs.append(await self.m.submit(f"j{len(self.jobs)}", **self.random.choice(KINDS)))
            case "finish" if living:
                self.m.backend.finish(self.random.choice(living))
            case "join":
                for job in [job for job in living if job.level == "elastic" and not job.keeps][:1]:
                    self.m.joins(job)
            case "save":
                for job in [job for job in living if job.level == "restart"]:
                    for launch in self.m.backend.of(job)[:1]:
                        self.m.save(launch)
            case "policy":
                name = self.random.choice(("stretto", "round-robin", "round-robin", "round-robin", "afs-l"))
                options = {"quantum_s": 5.0} if name == "round-robin" else {}
                await self.m.plane.set_policy(name, options, None, "me")
        await self.m.after(self.random.choice((0.5, 3.0, 30.0, 90.0)))
        for job in list(self.m.plane.book.jobs.values()):
            self.wanted += job.ground.name in WANTED

    async def robbed(self) -> list[tuple[str, e.Interrupted]]:
        """Who has lost more to others than is weighed like a start."""
        found = []
        for job in self.jobs:
            assert not await self.m.events(job, e.Retried)
            for event in await self.m.interruptions(job):
                assert event.cause == "preempted"
                if event.lost_s > WORTH_S[job.level] + SLACK_S:
                    found.append((job.name, event))
        return found


def test_nobody_loses_its_work_to_an_equal(tmp_path: Path) -> None:
    """Over all histories policies want at least a hundred times what they must not do."""
    wanted = 0
    for seed in range(4):
        folder = tmp_path / str(seed)
        folder.mkdir()
        wanted += run_history(folder, seed)
    assert wanted >= 100, "the policies wanted too little to show anything"


def run_history(folder: Path, seed: int) -> int:
    """How often a policy wanted what it must not do."""
    found = 0

    async def story() -> None:
        nonlocal found
        async with played(folder, 2, 1) as m:
            history = History(m, seed)
            await m.plane.set_policy("round-robin", {"quantum_s": 5.0}, None, "me")
            for _ in range(120):
                await history.happen()
            assert not await history.robbed()
            for _ in range(10 * len(history.jobs)):
                living = [active.job for active in m.plane.book if active.job.workers]
                for job in living[:1]:
                    m.backend.finish(job)
                await m.after(30.0)
                if not m.plane.book.jobs:
                    break
            assert not await history.robbed()
            starves = {active.job.name: active.reason.text for active in m.plane.book}
            assert not starves
            found = history.wanted

    play(story())
    return found


def test_the_same_history_loses_work_where_that_is_allowed(tmp_path: Path) -> None:
    """So that the test above can fail."""

    async def story() -> None:
        async with played(tmp_path, 2, 1) as m:
            await m.plane.set_policy("stretto", {"stops_lose_work": True}, None, "me")
            history = History(m, 0)
            for _ in range(80):
                await history.happen()
            assert await history.robbed()

    play(story())
