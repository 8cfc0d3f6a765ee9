"""AFS-L: shortest first and most efficient first, weighed against each other pair by pair.

Hwang et al., NSDI 2021, for known lengths. Workers are handed out one at a time; each goes to the winner of a
tournament among the jobs that have room to grow:

- The jobs are scanned in order of submission. The first is the champion; each next one either beats it and takes
  its place, or does not. The relation is not transitive, so the order is part of the definition.
- Two jobs that have nothing yet: the challenger wins if it would have less time left on its minimum.
- Otherwise let a be the one with less time left on what it has (a job with nothing is the longest; between equals
  the champion is a), b the other, p the speed now and p' the speed after its next grant. The grant goes to b if
  (p'_b - p_b) / p'_b > (p'_a - p_a) / p_a, else to a. This minimises the sum of both finish times if nothing else
  ever changed and a left its workers to b at its end.
- A first grant is the whole minimum. A later one is one worker, of whatever width; where that alone would make
  the job no faster it is as many as it takes, and its gain is divided by their number.
- A job is out once nothing makes it faster or its next grant does not fit. It ends when all are out.

So while room lasts a job with nothing beats every job that would not double its speed.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from stretto.core import marginal
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import Snapshot

_OUT = -1.0
"""The gain of a job that takes no further part; less than any other, so it never wins."""


@policy(
    "afs-l",
    traits=Traits(work_conserving=True, preempts="any", elastic=True, uses=frozenset({"length", "curve"})),
)
def afs_l(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Each worker to the winner of a tournament that weighs a short remaining time against a good speed-up."""
    game = _Tournament(view)
    if len(view):
        game.play()
    workers = np.array(game.workers, np.int64)
    left, last, ahead = (np.array(column, np.float64) for column in (game.left, game.last, game.ahead))
    return marginal.decision(view, workers, left, last, ahead)


class _Tournament:
    """The state of the hand-out. All lists are in scan order.

    The champions of one scan are kept as a stack of positions. A grant changes the winner alone, and the winner is
    the top of the stack: what lies below it came about without it and stands. So only the positions from the
    winner on are scanned again. The same holds from the lowest champion that drops out for lack of room.
    """

    def __init__(self, view: Snapshot) -> None:
        n = len(view)
        self.steps = marginal.lengths(view).tolist()
        self.speeds = [row.tolist() for row in view.rates[0]]
        self.curve = view.curve.tolist()
        self.most = marginal.useful_maximum(view).tolist()
        self.width = view.width.tolist()
        self.free = view.total_milli
        self.workers = [0] * n
        self.next = view.min_workers.tolist()
        """Workers after the next grant."""
        self.price = marginal.smallest_need(view).tolist()
        """Milli-GPU of the next grant."""
        self.prices = [(-price, j) for j, price in enumerate(self.price)]
        heapq.heapify(self.prices)
        self.first_s = [self._left_s(j, self.next[j]) for j in range(n)]
        """Seconds left on the minimum while a job has nothing; below zero once it has something."""
        self.left_s = [math.inf] * n
        """Seconds left on what it has."""
        self.as_long = [1.0] * n
        """Gain of the next grant over the speed after it: what counts for the longer job of a pair."""
        self.as_short = [math.inf] * n
        """The same over the speed before it: what counts for the shorter job."""
        self.last, self.ahead, self.left = [0.0] * n, [0.0] * n, [0] * n
        self.champions = [0]

    def play(self) -> None:
        """Grant until all are out."""
        self._drop_too_dear()
        start = 1
        while True:
            winner = self._scan(start)
            if self.as_long[winner] == _OUT:
                return
            self._grant(winner)
            start = self._rewind({winner, *self._drop_too_dear()})

    def _scan(self, start: int) -> int:
        """Let the jobs from `start` on challenge the champion of those before; the last champion."""
        first_s, left_s, as_long, as_short = self.first_s, self.left_s, self.as_long, self.as_short
        c = self.champions[-1]
        c_first, c_left, c_long, c_short = first_s[c], left_s[c], as_long[c], as_short[c]
        for j in range(start, len(first_s)):
            if c_first >= 0 and first_s[j] >= 0:
                if first_s[j] >= c_first:
                    continue
            elif left_s[j] >= c_left:
                if as_long[j] <= c_short:
                    continue
            elif c_long > as_short[j]:
                continue
            self.champions.append(j)
            c_first, c_left, c_long, c_short = first_s[j], left_s[j], as_long[j], as_short[j]
        return self.champions[-1]

    def _grant(self, j: int) -> None:
        if self.workers[j]:
            self.last[j] = self.as_long[j]
        else:
            self.left[j] = self.free
            self.first_s[j] = _OUT
        self.free -= self.price[j]
        self.workers[j] = self.next[j]
        self._look_ahead(j)

    def _look_ahead(self, j: int) -> None:
        """What the next grant would be, and gain."""
        n = self.workers[j]
        now, size = self._speed(j, n), n + 1
        while size < self.most[j] and self._speed(j, size) <= now:
            size += 1
        then = self._speed(j, size) if size <= self.most[j] else now
        if then <= now:
            self.ahead[j] = 0.0
            self._drop(j)
            return
        more = size - n
        self.next[j], self.price[j] = size, more * self.width[j]
        heapq.heappush(self.prices, (-self.price[j], j))
        self.left_s[j] = self._left_s(j, n)
        self.as_long[j] = self.ahead[j] = (then - now) / then / more
        self.as_short[j] = (then - now) / now / more if now > 0 else math.inf

    def _rewind(self, changed: set[int]) -> int:
        """Forget the champions from the first changed one on; where to scan from. Position 0 always starts."""
        keep = next(i for i, c in enumerate(self.champions) if c in changed)
        start = max(self.champions[keep], 1)
        del self.champions[max(keep, 1) :]
        return start

    def _drop_too_dear(self) -> list[int]:
        """Take out the jobs whose next grant does not fit any more."""
        gone = []
        while self.prices and -self.prices[0][0] > self.free:
            price, j = heapq.heappop(self.prices)
            if self.price[j] == -price and self.as_long[j] != _OUT:
                gone.append(j)
                self._drop(j)
                if not self.workers[j]:
                    self.left[j] = self.free
        return gone

    def _drop(self, j: int) -> None:
        self.first_s[j] = self.as_long[j] = self.as_short[j] = _OUT
        self.left_s[j] = math.inf

    def _left_s(self, j: int, n: int) -> float:
        speed = self._speed(j, n)
        return float(self.steps[j] / speed) if speed > 0 else math.inf

    def _speed(self, j: int, n: int) -> float:
        row: list[float] = self.speeds[self.curve[j]]
        return row[n] if n < len(row) else row[-1]
