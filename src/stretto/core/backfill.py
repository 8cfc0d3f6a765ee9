"""Free GPUs over time, and reservations in it: what the backfill policies plan with.

Lengths are estimates. A job without one is taken never to end; but running jobs of unknown length are expected to end
after all that is known, one after the other, the longest-running first. So a waiting job has a place to wait for, and
no newcomer of unknown length takes that place.
"""

from __future__ import annotations

import math

import numpy as np

from stretto.core.decision import Decision
from stretto.core.handout import held
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

TIE_S = 1e-6
"""Times closer than this are equal: the same moment, computed twice, differs in its last digits."""


class Profile:
    """Free milli-GPU as steps over time. Lives within one decision."""

    def __init__(self, now_s: float, free: int, ends_s: FloatArray, gives: IntArray, reservations: int) -> None:
        """So much is free now, and the running jobs give more back when they end."""
        moments, index = np.unique(np.maximum(ends_s, now_s + TIE_S), return_inverse=True)
        self._steps = len(moments) + 1
        # A reservation adds at most one step: its end.
        self._at_s = np.empty(self._steps + reservations)
        self._free = np.empty(self._steps + reservations, np.int64)
        self._at_s[0], self._at_s[1 : self._steps] = now_s, moments
        back = np.bincount(index, gives, len(moments)).astype(np.int64)
        self._free[0], self._free[1 : self._steps] = free, free + np.cumsum(back)

    def earliest(self, need: int, length_s: float) -> float:
        """The first moment from which on so much is free for so long; inf if there is none."""
        at_s, free = self._at_s[: self._steps], self._free[: self._steps]
        short = np.flatnonzero(free < need)
        if not len(short):
            return float(at_s[0])
        begins = np.concatenate(([0], short + 1))
        until_s = np.append(at_s[short], math.inf)
        from_s = at_s[np.minimum(begins, self._steps - 1)]
        good = (until_s > from_s) & (until_s - from_s >= length_s - TIE_S) & (begins < self._steps)
        best = int(np.argmax(good))
        return float(from_s[best]) if good[best] else math.inf

    def free_at(self, at_s: float) -> int:
        """What is free from that moment on, until the next step."""
        return int(self._free[int(np.searchsorted(self._at_s[: self._steps], at_s, side="right")) - 1])

    def take(self, need: int, from_s: float, until_s: float) -> None:
        """Reserve so much from one step (as `earliest` gave it) to any moment."""
        first = int(np.searchsorted(self._at_s[: self._steps], from_s))
        last = self._steps if until_s == math.inf else self._step_at(until_s)
        self._free[first:last] -= need

    def _step_at(self, at_s: float) -> int:
        """The step that begins at this moment, made if there is none."""
        n = self._steps
        i = int(np.searchsorted(self._at_s[:n], at_s - TIE_S))
        if i < n and self._at_s[i] <= at_s + TIE_S:
            return i
        for column in (self._at_s, self._free):
            column[i + 1 : n + 1] = column[i:n].copy()
        self._at_s[i], self._free[i] = at_s, self._free[i - 1]
        self._steps += 1
        return i


class Walk:
    """The waiting jobs in order of submission, and what is decided on each. Lives within one decision.

    Jobs at the front of the queue that fit are started at once. `queue` holds the others; its first is the head.
    """

    def __init__(self, view: Snapshot) -> None:
        self.view = view
        self.workers, self.free = held(view)
        self.asked = view.asked
        size = np.where(self.workers > 0, self.workers, view.asked)
        self.need: list[int] = (size * view.width + view.fixed_milli).tolist()
        self.reason = np.full(len(view), np.int64(Reason.RUNS))
        self.first, self.second = np.array(self.need) / GPU, np.full(len(view), self.free / GPU)
        self.queue = self._waiting()
        while self.queue and self.need[self.queue[0]] <= self.free:
            j = self.queue.pop(0)
            self.start(j, Reason.RUNS, self.need[j] / GPU)

    def start(self, j: int, reason: Reason, first: float) -> None:
        """Run it from now on."""
        self.say(j, reason, first, self.free / GPU)
        self.workers[j] = self.asked[j]
        self.free -= self.need[j]

    def say(self, j: int, reason: Reason, first: float, second: float) -> None:
        """Note why, with the two numbers."""
        self.reason[j], self.first[j], self.second[j] = reason, first, second

    def decision(self) -> Decision:
        return Decision.of(self.view, self.workers, self.reason, self.first, self.second)

    def _waiting(self) -> list[int]:
        """Without those that are too wide for the cluster as it is: nobody waits behind them."""
        total, queue = self.view.total_milli, []
        for j in np.flatnonzero(self.workers == 0).tolist():
            if self.need[j] <= total:
                queue.append(j)
            else:
                self.say(j, Reason.TOO_LARGE, self.need[j] / GPU, total / GPU)
        return queue


class Outlook:
    """How long every job will run, and the free GPUs over time if nothing but the running jobs is counted."""

    def __init__(self, walk: Walk) -> None:
        view, runs = walk.view, walk.workers > 0
        self._now_s = view.now_s
        length_s = _lengths(view, runs)
        self.length_s: list[float] = length_s.tolist()
        known = np.isfinite(length_s)
        self.horizon_s = view.now_s + float(length_s[known].sum()) + 1.0
        ends_s = view.now_s + length_s
        unknown = np.flatnonzero(runs & ~known)
        oldest_first = unknown[np.lexsort((view.job[unknown], view.started_s[unknown]))]
        ends_s[oldest_first] = self.horizon_s + np.arange(len(unknown))
        need = np.array(walk.need, np.int64)
        self.profile = Profile(view.now_s, walk.free, ends_s[runs], need[runs], len(walk.queue))

    def shown(self, at_s: float) -> float:
        """Seconds to a planned moment as users see it: inf when it hangs on a job of unknown length."""
        return at_s - self._now_s if at_s < self.horizon_s else math.inf


def _lengths(view: Snapshot, runs: BoolArray) -> FloatArray:
    """Seconds from its start, or from now if it runs already, to its end; inf when unknown."""
    # A job that was started a moment ago makes no progress before its start is paid for.
    pause_s = np.maximum(0.0, view.changed_s + view.start_s - view.now_s)
    old = runs & (view.workers > 0)
    left_s = np.where(old, pause_s + view.remaining_s(view.workers), view.start_s + view.remaining_s(view.asked))
    return np.where(np.isnan(left_s), math.inf, left_s)
