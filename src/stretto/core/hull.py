"""Concave hulls of throughput curves: the useful sizes of a job and what each further worker brings.

Between two neighbouring vertices a job gains the same from every worker; the gain falls from vertex to vertex.
So handing out workers by falling gain is one sort, and optimal where curves are concave.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray, IntArray


class Hulls(msgspec.Struct, frozen=True):
    """One row per curve; short rows repeat their last vertex."""

    workers: IntArray
    rate: FloatArray

    @property
    def slope(self) -> FloatArray:
        """Steps/s gained per worker on each stretch between two vertices; 0 on stretches of no length."""
        run = np.diff(self.workers, axis=1)
        return np.diff(self.rate, axis=1) / np.maximum(run, 1)


def hulls(rates: FloatArray) -> Hulls:
    """The hulls of the curves `rates[curve, workers]`, all rows at once, vertex by vertex."""
    rows, size = rates.shape
    at = np.zeros(rows, np.int64)
    row = np.arange(rows)
    workers, rate = [at], [rates[row, at]]
    count = np.arange(size)
    while True:
        run = count[None, :] - at[:, None]
        gain = np.where(run > 0, (rates - rates[row, at][:, None]) / np.maximum(run, 1), -np.inf)
        best = gain.max(axis=1)
        # The farthest point on the steepest line, so that level stretches count as one.
        far = size - 1 - np.argmax((gain >= best[:, None] - 1e-12 * np.abs(best[:, None]))[:, ::-1], axis=1)
        step = np.where(best > 0, far, at)
        if (step == at).all():
            break
        at = step
        workers.append(at)
        rate.append(rates[row, at])
    if len(workers) == 1:
        workers, rate = workers * 2, rate * 2
    return Hulls(np.stack(workers, axis=1), np.stack(rate, axis=1))
