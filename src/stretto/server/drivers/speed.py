"""How fast one elastic job is: which of the steps that its workers timed count, and what to expect before any do.

Only windows of the generation that the coordinator knows are taken in, from its leader, each once. What was timed
while newcomers were starting is dropped: they take time from those who train. So is what was timed while neighbours
came or went. A job that has another size than before has the speed that is to be expected of it until its first window
there is complete.

Windows compare sizes. How long the rest takes is said by the steps that were counted by the clock since the last
resize, as soon as there are enough: with evaluations, checkpoints and whatever else the script does beside its steps.
What neighbours took as they came or went is left out there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.control.roster import State
from stretto.core.estimate.curve import Window
from stretto.core.estimate.throughput import Throughput
from stretto.jobs.model import Worker
from stretto.runtime import messages as m
from stretto.server.book import Active
from stretto.server.drivers.base import Surroundings

_LONGEST_S, _MOST_STEPS = 1e9, 10**9
"""Of a window; what says more is a mistake."""


class Speed:
    def __init__(self, active: Active, surroundings: Surroundings, state: Callable[[], State]) -> None:
        self._active, self._around, self._state = active, surroundings, state
        self._size = 0
        """Members that the speed is known, or expected, for."""
        self._counted = (0, 0)
        """Generation and number of the last window."""
        self._disturbed = (0, 0.0, 0.0)
        """The generation that newcomers were last seen beside, from when until when."""
        self._throughput, self._counting = Throughput(), 0
        """At this size; in which generation."""

    def formed(self) -> None:
        """The membership may be another one."""
        gen = self._state().active
        size = len(gen.members) if gen is not None else 0
        if size != self._size:
            self._size = size
            self._throughput = Throughput()
            self._active.progress.window, self._active.progress.rate = None, self._expected()

    def heard(self, worker: str, windows: Sequence[m.Window], committed: int) -> None:
        """A heartbeat of this worker; so many steps of the job are done."""
        self.formed()
        newcomers = self._look_at_newcomers(self._active.job.workers)
        gen = self._state().active
        if gen is None:
            return
        if newcomers or gen.number != self._counting:
            self._throughput.cut()
            self._counting = gen.number
        if not newcomers:
            self._count_steps(committed)
        if self._state().names(gen.members[:1]) == (worker,):
            for told in windows:
                if told.generation == gen.number and told.members == len(gen.members):
                    self._take_in(told)
        self._count()

    def launching(self) -> None:
        """Newcomers are about to start."""
        gen, now_s = self._state().active, self._around.clock()
        if gen is not None:
            number, since_s, _ = self._disturbed
            self._disturbed = gen.number, since_s if number == gen.number else now_s, now_s

    def exited(self, worker: Worker) -> None:
        """It may have been a newcomer until now."""
        self._look_at_newcomers([worker])

    def _look_at_newcomers(self, workers: Sequence[Worker]) -> bool:
        gen = self._state().active
        members = self._state().names(gen.members) if gen is not None else ()
        found = any(not worker.leaving and worker.name not in members for worker in workers)
        if found:
            self.launching()
        return found

    def _count_steps(self, committed: int) -> None:
        """By the clock, but for the time in which neighbours came or went: what they take is nothing that the script
        does beside its steps."""
        now_s, since_s = self._around.clock(), self._throughput.since_s(committed)
        if since_s is not None and self._around.disturbed(self._active.number, since_s, now_s):
            self._throughput.cut()
        self._throughput.seen(now_s, committed)

    def _count(self) -> None:
        """What was counted by the clock says more of the rest than a window does."""
        if not (rate := self._throughput.rate):
            return
        active, pool = self._active, self._pool()
        active.progress.rate = rate
        if pool:
            self._around.estimates.passes(active.number, active.request.klass, pool, self._size, rate)

    def _expected(self) -> float:
        active = self._active
        return self._around.estimates.rate(active.number, active.request.klass, self._pool(), self._size)

    def _take_in(self, told: m.Window) -> None:
        window = _window(told, self._around.clock())
        if window is None or (told.generation, told.number) <= self._counted:
            return
        self._counted = told.generation, told.number
        if self._beside_newcomers(told.generation, window):
            return
        if self._around.disturbed(self._active.number, window.began_s, window.ended_s):
            return
        pool, number, estimates = self._pool(), self._active.number, self._around.estimates
        news = bool(pool) and estimates.observe(number, pool, window)
        self._active.progress.window = window
        self._active.progress.rate = self._expected() if estimates.varies(number, pool) else window.rate
        curve = estimates.measured(number).get(pool)
        if curve is not None and curve.unlike(window):
            self._throughput = Throughput()
        if news:
            self._around.changed(number)

    def _beside_newcomers(self, generation: int, window: Window) -> bool:
        disturbed, since_s, until_s = self._disturbed
        return disturbed == generation and window.began_s < until_s and window.ended_s > since_s

    def _pool(self) -> str:
        """Empty as long as nothing was decided for it."""
        pools, at = self._around.pools(), self._active.pool
        return pools[at] if 0 <= at < len(pools) else ""


def _window(told: m.Window, now_s: float) -> Window | None:
    """As the server's clock has it; None if it cannot be."""
    times_s = (told.median_s, told.spread_s, told.lasted_s, told.age_s, told.mean_s, told.slow_s)
    if not all(0 <= time_s < _LONGEST_S for time_s in times_s) or not told.median_s or not 0 < told.count < _MOST_STEPS:
        return None
    if not 0 <= told.slow < _MOST_STEPS:
        return None
    ended_s = now_s - told.age_s
    return Window(
        told.members, told.count, told.median_s, told.spread_s, ended_s - told.lasted_s, ended_s,
        told.mean_s, told.slow, told.slow_s,
    )  # fmt: skip
