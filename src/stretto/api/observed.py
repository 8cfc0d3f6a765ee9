"""Numbers about the control plane, kept up by its events, so that nobody has to count jobs to know them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import get_args

import msgspec

from stretto.api.answers import Point
from stretto.jobs import events as e
from stretto.jobs.model import ENDED, Cause, Job, Phase
from stretto.server.plane import Plane

_MOST_POINTS = 7200
_SPACING_S = 0.2
_ACTIVE: tuple[Phase, ...] = ("queued", "running", "suspended")


class Observed:
    def __init__(self, plane: Plane, clock: Callable[[], float]) -> None:
        self._plane, self._clock = plane, clock
        self.events: Counter[str] = Counter()
        """By kind, since the server started."""
        self.lost_s: dict[str, float] = dict.fromkeys(get_args(Cause), 0.0)
        """Seconds of work that jobs lost, by cause, since the server started."""
        self._phases: dict[int, Phase] = {}
        self._held_milli: dict[int, int] = {}
        self._jobs: Counter[Phase] = Counter()
        self._used_milli = 0
        self._series: deque[Point] = deque(maxlen=_MOST_POINTS)
        self.recount(plane.store.count())
        for active in plane.book:
            self._note(active.job)
        self._add_point()
        plane.book.listeners.append(self._hear)

    @property
    def devices(self) -> int:
        """Those of nodes that are in use."""
        drained = self._plane.loop.rules.drained
        return sum(node.devices for node in self._plane.backend.nodes() if node.name not in drained)

    @property
    def used(self) -> float:
        return self._used_milli / 1000

    @property
    def jobs(self) -> dict[Phase, int]:
        return {phase: self._jobs[phase] for phase in (*_ACTIVE, "succeeded", "failed", "cancelled")}

    def series(self) -> list[Point]:
        """Oldest first, as people's clocks have it; the last point is now."""
        told = self._plane.told
        return [msgspec.structs.replace(point, at_s=told(point.at_s)) for point in (*self._series, self._now())]

    def recount(self, stored: dict[str, int]) -> None:
        """Ended jobs as the store has them: retention removes some."""
        for phase in ENDED:
            self._jobs[phase] = stored.get(phase, 0)

    def _hear(self, recorded: e.Recorded, job: Job | None) -> None:
        self.events[type(recorded.event).__name__.lower()] += 1
        if isinstance(recorded.event, e.Interrupted):
            self.lost_s[recorded.event.cause] += recorded.event.lost_s
        if job is not None and self._note(job):
            self._add_point()

    def _note(self, job: Job) -> bool:
        """Whether that changes anything."""
        before, held_before = self._phases.get(job.number), self._held_milli.get(job.number, 0)
        held = len(job.workers) * job.width_milli
        if before == job.phase and held == held_before:
            return False
        if before is not None:
            self._jobs[before] -= 1
        self._jobs[job.phase] += 1
        self._used_milli += held - held_before
        self._phases[job.number], self._held_milli[job.number] = job.phase, held
        if job.ended:
            del self._phases[job.number], self._held_milli[job.number]
        return True

    def _add_point(self) -> None:
        """What follows so closely changes the last point."""
        point = self._now()
        if self._series and 0 <= point.at_s - self._series[-1].at_s < _SPACING_S:
            last = self._series.pop()
            point = Point(
                at_s=last.at_s, used=point.used, devices=point.devices, running=point.running, queued=point.queued
            )
        self._series.append(point)

    def _now(self) -> Point:
        return Point(
            at_s=self._clock(),
            used=self.used,
            devices=self.devices,
            running=self._jobs["running"],
            queued=self._jobs["queued"],
        )
