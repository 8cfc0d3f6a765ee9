"""The multiple-choice knapsack, solved exactly: one choice per job, so that the sum of values is the largest.

FfDL's dynamic programme, and Sia's integer programme on a cluster with one device type, are this problem.
`table[j, k]` is the best sum of the first j jobs in at most k cells of room. A job's turn is one max-plus
convolution of the table's last row with the job's choices, vectorised over k; the choices themselves are read
back from the table, which costs one look at each job.
"""

from __future__ import annotations

import numpy as np

from stretto.core.snapshot import FloatArray, IntArray

MOST_CELLS = 4096
"""Room is counted in cells; a finer common measure than this is rounded (costs up, capacity down)."""


def choose(value: FloatArray, cost: IntArray, capacity: int) -> IntArray:
    """The choice of every job.

    `value` and `cost` are `[job, choice]`; -inf is a choice that may not be made. Choice 0 must be free of cost
    and allowed, so that there always is an answer. Between equal sums the smaller choice wins, for the last jobs
    first.
    """
    if not len(value):
        return np.zeros(0, np.int64)
    cost, cells = _in_cells(cost, capacity)
    return _read_back(_fill(value, cost, cells), value, cost)


def _in_cells(cost: IntArray, capacity: int) -> tuple[IntArray, int]:
    measure = max(int(np.gcd.reduce(cost, axis=None)), 1)
    cell = max(measure, -(-max(capacity, 0) // MOST_CELLS))
    return -(-cost // cell), max(capacity, 0) // cell


def _fill(value: FloatArray, cost: IntArray, cells: int) -> FloatArray:
    """table[j + 1, k] = max over choices c of value[j, c] + table[j, k - cost[j, c]]."""
    table = np.empty((len(value) + 1, cells + 1))
    table[0] = 0.0
    # shifted[s] is the last row of the table moved up by s cells, with -inf below: a view of one padded copy.
    padded = np.full(2 * cells + 2, -np.inf)
    shifted = np.lib.stride_tricks.sliding_window_view(padded, cells + 1)[::-1]
    row = padded[cells + 1 :]
    for j, shift in enumerate(np.minimum(cost, cells + 1)):
        row[:] = table[j]
        sums = shifted[shift]
        sums += value[j, :, None]
        sums.max(axis=0, out=table[j + 1])
    return table


def _read_back(table: FloatArray, value: FloatArray, cost: IntArray) -> IntArray:
    choice = np.zeros(len(value), np.int64)
    k = table.shape[1] - 1
    for j in range(len(value) - 1, -1, -1):
        sums = value[j] + table[j].take(k - cost[j], mode="clip")
        sums[cost[j] > k] = -np.inf
        best = sums.argmax()
        choice[j] = best
        k -= int(cost[j, best])
    return choice
