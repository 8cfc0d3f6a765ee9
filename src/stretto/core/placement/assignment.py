"""Match rows to columns one to one so that the sum of the matched values is the largest (Hungarian method)."""

from __future__ import annotations

import numpy as np

from stretto.core.snapshot import FloatArray, IntArray


def largest(values: FloatArray) -> IntArray:
    """The column of every row, for a square matrix. scipy does it when it is installed, `match` otherwise."""
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        return match(values)
    columns: IntArray = linear_sum_assignment(values, maximize=True)[1].astype(np.int64)
    return columns


def match(values: FloatArray) -> IntArray:
    """Row by row along the cheapest augmenting path, with potentials that keep reduced costs non-negative."""
    cost = -values
    n = len(cost)
    of_row, of_column = np.zeros(n), np.zeros(n + 1)
    row_at = np.full(n + 1, -1, np.int64)
    for row in range(n):
        _augment(cost, row, of_row, of_column, row_at)
    columns = np.empty(n, np.int64)
    columns[row_at[:n]] = np.arange(n)
    return columns


def _augment(cost: FloatArray, row: int, of_row: FloatArray, of_column: FloatArray, row_at: IntArray) -> None:
    """Match one more row. Column n stands for the row that is looking for a place."""
    n = len(cost)
    slack, came_from = np.full(n, np.inf), np.full(n, n, np.int64)
    reached = np.zeros(n + 1, np.bool_)
    column = n
    row_at[n] = row
    while row_at[column] >= 0:
        reached[column] = True
        here = int(row_at[column])
        step = cost[here] - of_row[here] - of_column[:n]
        closer = ~reached[:n] & (step < slack)
        slack[closer], came_from[closer] = step[closer], column
        column = int(np.argmin(np.where(reached[:n], np.inf, slack)))
        by = float(slack[column])
        of_row[row_at[reached]] += by
        of_column[reached] -= by
        slack[~reached[:n]] -= by
    while column != n:
        row_at[column] = row_at[came_from[column]]
        column = int(came_from[column])
    row_at[n] = -1
