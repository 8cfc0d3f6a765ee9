"""FfDL's elastic optimiser: the largest sum of speed-ups.

Saxena et al., MASCOTS 2020. Maximise the sum of S_j(n_j) with S_j(n) = T_j(n) / T_j(1), where every job has
between its minimum and its maximum of workers, by a dynamic programme over jobs and GPUs. Curves need not be
concave.

- Guaranteed: jobs in order of submission, up to the first whose minimum does not fit beside the minimums before
  it, get at least their minimum. So the oldest job always runs, and nobody starves.
- The jobs behind them get their minimum or more where that makes the sum larger, else nothing.
- Where T(1) is not known to be positive (a job that needs several workers), its speed-up counts as linear up to
  its minimum: T(1) is taken as T(min) / min.

What the programme leaves (only where GPUs are divided so finely that its cells are rounded) is handed out
greedily. Batch sizes are not changed, lengths are not looked at: short jobs that scale badly stay narrow.
"""

from __future__ import annotations

import numpy as np

from stretto.core import handout, knapsack, marginal
from stretto.core.decision import Decision, Memory
from stretto.core.policy import NoOptions, Traits, policy
from stretto.core.snapshot import BoolArray, FloatArray, IntArray, Snapshot


@policy(
    "ffdl",
    traits=Traits(work_conserving=True, preempts="any", starvation_free=True, elastic=True, uses=frozenset({"curve"})),
)
def ffdl(view: Snapshot, memory: Memory, options: NoOptions) -> Decision:
    """Workers by a dynamic programme for the largest sum of speed-ups; the oldest jobs surely get their minimum."""
    value = handout.speedups(view)
    sure = guaranteed(view)
    need = np.where(sure, marginal.smallest_need(view), 0)
    left = (view.total_milli - np.cumsum(need) + need).astype(np.float64)
    workers = optimum(view, value, sure, view.total_milli - int(need.sum()))
    held = workers * view.width + np.where(workers > 0, view.fixed_milli, 0)
    free = view.total_milli - int(held.sum())
    free = handout.give_minimums(view, np.arange(len(view)), workers, left, free)
    marginal.grow(view, value, workers, free)
    last = np.where(workers > view.min_workers, marginal.next_gain(view, value, workers - 1), 0.0)
    return marginal.decision(view, workers, left, last, marginal.next_gain(view, value, workers))


def guaranteed(view: Snapshot) -> BoolArray:
    """The oldest jobs, as many as fit with their minimums; jobs that could never run do not count."""
    need = marginal.smallest_need(view)
    possible = need <= view.total_milli
    sure: BoolArray = possible & (np.cumsum(np.where(possible, need, 0)) <= view.total_milli)
    return sure


def optimum(view: Snapshot, value: FloatArray, sure: BoolArray, free: int) -> IntArray:
    """Workers with the largest sum of values; `free` is the room beside the guaranteed minimums."""
    need = marginal.smallest_need(view)
    base = np.where(sure, need, 0)
    workers = np.where(sure, view.min_workers, 0)
    grows = np.where(sure, (marginal.useful_maximum(view) > view.min_workers) & (view.width <= free), need <= free)
    j = np.flatnonzero(grows)
    if not len(j):
        return workers
    size = _sizes(view, sure, free)[j]
    allowed = size <= marginal.useful_maximum(view)[j, None]
    size = np.where(allowed, size, 0)
    cost = np.where(size > 0, size * view.width[j, None] + (view.fixed_milli - base)[j, None], 0)
    worth = np.where(allowed, value[j[:, None], size], -np.inf)
    workers[j] = size[np.arange(len(j)), knapsack.choose(worth, cost, free)]
    return workers


def _sizes(view: Snapshot, sure: BoolArray, free: int) -> IntArray:
    """The sizes each job may choose from: from its minimum up, preceded by none where nothing is guaranteed."""
    most = np.minimum(marginal.useful_maximum(view) - view.min_workers, free // np.maximum(view.width, 1))
    more = np.arange(int(most.max(initial=0)) + 2) - ~sure[:, None]
    return np.where(more >= 0, view.min_workers[:, None] + more, 0)
