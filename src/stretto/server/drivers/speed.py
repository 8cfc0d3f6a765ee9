"""How fast one elastic job is: which of the steps that its workers timed count, and what to expect before any do.

Only windows of the generation that the coordinator knows are taken in, from its leader, each once. What was timed
while newcomers were starting is dropped: they take time from those who train. So is what was timed while neighbours
came or went. A job that has another size than before has the speed that is to be expected of it until its first window
there is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.control.roster import State
from stretto.core.estimate.curve import Window
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

    def formed(self) -> None:
        """The membership may be another one."""
        gen = self._state().active
        size = len(gen.members) if gen is not None else 0
        if size != self._size:
            self._size = size
            active, progress = self._active, self._active.progress
            progress.window = None
            progress.rate = self._around.estimates.rate(active.number, active.request.klass, self._pool(), size)

    def heard(self, worker: str, windows: Sequence[m.Window]) -> None:
        """A heartbeat of this worker."""
        self.formed()
        self._look_at_newcomers(self._active.job.workers)
        gen = self._state().active
        if gen is None or self._state().names(gen.members[:1]) != (worker,):
            return
        for told in windows:
            if told.generation == gen.number and told.members == len(gen.members):
                self._take_in(told)

    def launching(self) -> None:
        """Newcomers are about to start."""
        gen, now_s = self._state().active, self._around.clock()
        if gen is not None:
            number, since_s, _ = self._disturbed
            self._disturbed = gen.number, since_s if number == gen.number else now_s, now_s

    def exited(self, worker: Worker) -> None:
        """It may have been a newcomer until now."""
        self._look_at_newcomers([worker])

    def _look_at_newcomers(self, workers: Sequence[Worker]) -> None:
        gen = self._state().active
        members = self._state().names(gen.members) if gen is not None else ()
        if any(not worker.leaving and worker.name not in members for worker in workers):
            self.launching()

    def _take_in(self, told: m.Window) -> None:
        window = _window(told, self._around.clock())
        if window is None or (told.generation, told.number) <= self._counted:
            return
        self._counted = told.generation, told.number
        if self._beside_newcomers(told.generation, window):
            return
        if self._around.disturbed(self._active.number, window.began_s, window.ended_s):
            return
        self._active.progress.window, self._active.progress.rate = window, window.rate
        pool = self._pool()
        if pool and self._around.estimates.observe(self._active.number, pool, window):
            self._around.changed(self._active.number)

    def _beside_newcomers(self, generation: int, window: Window) -> bool:
        disturbed, since_s, until_s = self._disturbed
        return disturbed == generation and window.began_s < until_s and window.ended_s > since_s

    def _pool(self) -> str:
        """Empty as long as nothing was decided for it."""
        pools, at = self._around.pools(), self._active.pool
        return pools[at] if 0 <= at < len(pools) else ""


def _window(told: m.Window, now_s: float) -> Window | None:
    """As the server's clock has it; None if it cannot be."""
    times_s = (told.median_s, told.spread_s, told.lasted_s, told.age_s)
    if not all(0 <= time_s < _LONGEST_S for time_s in times_s) or not told.median_s or not 0 < told.count < _MOST_STEPS:
        return None
    ended_s = now_s - told.age_s
    return Window(told.members, told.count, told.median_s, told.spread_s, ended_s - told.lasted_s, ended_s)
