"""Finished runs of one class, and what they say about the next.

A run is remembered with what its user wrote down and what was known when it was submitted: resources, workers,
hyper-parameters (epochs, batch size, model …), how many jobs ran beside it. `length` predicts the size of a new run
from these in three ways: a robust regression of log(size), the nearest neighbours, and the median. Each way first
predicts every remembered run from the others; the one that was off the least answers, and how far it was off is the
uncertainty. So one run gives a guess, a few give an order, and many give a good estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from stretto.core.estimate.curve import Curve
from stretto.core.snapshot import FloatArray

Features: TypeAlias = Mapping[str, float | str]
"""What is known of a run beforehand: numbers and names."""

_MOST_RUNS = 200
_UNKNOWN_SD = 1.5
_SINGLE_SD = 0.7
_LEAST_SD = 0.05
_RIDGE = 0.1
_HUBER = 1.5
_NEIGHBOURS = 3
_BEYOND = 3.0
"""A prediction may leave the range of the sizes seen by so much of log(size) at most."""


class Run(msgspec.Struct, frozen=True):
    """A run that has finished: what was known before it, and its size (steps, or seconds at a given size)."""

    features: dict[str, float | str]
    size: float


class ClassHistory(msgspec.Struct, frozen=True):
    """The latest runs of a class, oldest first, and the curve of them all."""

    runs: tuple[Run, ...] = ()
    curve: Curve = Curve()


class Length(msgspec.Struct, frozen=True):
    """An estimate: log(size) has this mean and standard deviation."""

    mean_log: float
    sd_log: float
    basis: str
    """How it was made: regression, neighbours, median, one run, or nothing."""

    @property
    def size(self) -> float:
        """The middle of it."""
        return math.exp(self.mean_log)


def learn(history: ClassHistory, features: Features, size: float, curve: Curve | None = None) -> ClassHistory:
    """The history after one more run. A size that cannot be (nan, zero, infinite) teaches nothing."""
    runs, known = history.runs, history.curve
    if 0 < size < math.inf:
        runs = (*runs, Run(dict(features), float(size)))[-_MOST_RUNS:]
    return ClassHistory(runs, _merge(known, curve) if curve else known)


def length(history: ClassHistory, features: Features, default: float = 3600.0) -> Length:
    """How large a run with these features will be."""
    sizes = np.log([run.size for run in history.runs])
    if len(sizes) < 2:
        guess = float(sizes[0]) if len(sizes) else math.log(default)
        return Length(guess, _SINGLE_SD if len(sizes) else _UNKNOWN_SD, "one run" if len(sizes) else "nothing")
    table, asked = _table([run.features for run in history.runs], features)
    ways: list[tuple[str, Callable[[], tuple[FloatArray, float]]]] = [
        ("median", lambda: _median(sizes)),
        ("neighbours", lambda: _nearest(table, sizes, asked)),
        ("regression", lambda: _regression(table, sizes, asked)),
    ]
    best = Length(float(np.median(sizes)), _UNKNOWN_SD, "median")
    least = math.inf
    for basis, way in ways if table.shape[1] else ways[:1]:
        errors, answer = way()
        # Of few runs the spread of the errors is itself uncertain.
        off = math.sqrt(float(np.mean(np.minimum(errors**2, 9.0))) * (1 + 2 / len(sizes)))
        if off < least:
            least = off
            inside = min(max(answer, float(sizes.min()) - _BEYOND), float(sizes.max()) + _BEYOND)
            best = Length(inside, max(off, _LEAST_SD), basis)
    return best


def _merge(known: Curve, new: Curve) -> Curve:
    """Two curves pooled, each size weighted by how often it was seen."""
    rows: dict[int, tuple[float, float, float]] = {}
    for curve in (known, new):
        for w, count, mean, squares in zip(curve.workers, curve.count, curve.mean, curve.squares, strict=True):
            had = rows.get(w, (0.0, 0.0, 0.0))
            total = had[0] + count
            apart = (mean - had[1]) ** 2 * had[0] * count / total
            rows[w] = (total, (had[0] * had[1] + count * mean) / total, had[2] + squares + apart)
    sizes = tuple(sorted(rows))
    counts, means, spreads = ([rows[w][i] for w in sizes] for i in range(3))
    return Curve(sizes, tuple(counts), tuple(means), tuple(spreads))


def _table(runs: list[dict[str, float | str]], asked: Features) -> tuple[FloatArray, FloatArray]:
    """Runs and the question as rows of numbers: logs of positive numbers, names as 0 or 1, all on one scale.

    Features that never vary, or that are not given everywhere, say nothing.
    """
    columns: list[FloatArray] = []
    for name in sorted(set(asked).intersection(*runs)):
        values = [run[name] for run in (*runs, asked)]
        if all(_is_number(value) for value in values):
            columns.append(_numbers([float(value) for value in values]))
        else:
            texts = [str(value) for value in values]
            columns += [np.array([float(text == one) for text in texts]) for one in sorted(set(texts[:-1]))[1:]]
    rows = np.column_stack(columns) if columns else np.empty((len(runs) + 1, 0))
    spread = rows[:-1].std(axis=0)
    varies = spread > 1e-9
    rows = (rows[:, varies] - rows[:-1, varies].mean(axis=0)) / spread[varies]
    return rows[:-1], rows[-1]


def _is_number(value: float | str) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _numbers(values: list[float]) -> FloatArray:
    column = np.array(values)
    return np.log(column) if (column > 0).all() else column


def _median(sizes: FloatArray) -> tuple[FloatArray, float]:
    others = np.array([np.median(np.delete(sizes, i)) for i in range(len(sizes))])
    return sizes - others, float(np.median(sizes))


def _nearest(table: FloatArray, sizes: FloatArray, asked: FloatArray) -> tuple[FloatArray, float]:
    def guess(rows: FloatArray, known: FloatArray, at: FloatArray) -> float:
        apart = np.sqrt(((rows - at) ** 2).sum(axis=1))
        near = np.argsort(apart, kind="stable")[:_NEIGHBOURS]
        return float(np.average(known[near], weights=1 / (apart[near] + 0.1)))

    every = range(len(sizes))
    others = [guess(np.delete(table, i, 0), np.delete(sizes, i), table[i]) for i in every]
    return sizes - np.array(others), guess(table, sizes, asked)


def _regression(table: FloatArray, sizes: FloatArray, asked: FloatArray) -> tuple[FloatArray, float]:
    """Ridge regression that gives outliers less weight; errors are those of each run left out."""
    rows = np.column_stack((np.ones(len(sizes)), table))
    penalty = _RIDGE * np.diag([1e-6, *np.ones(table.shape[1])])
    weight = np.ones(len(sizes))
    for _ in range(8):
        inverse = np.linalg.inv((rows * weight[:, None]).T @ rows + penalty)
        slope = inverse @ (rows * weight[:, None]).T @ sizes
        errors = sizes - rows @ slope
        scale = max(1.4826 * float(np.median(np.abs(errors))), 1e-3)
        weight = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(errors), 1e-12))
    leverage = weight * np.einsum("ij,jk,ik->i", rows, inverse, rows)
    left_out = errors / np.maximum(1 - leverage, 0.05)
    return left_out, float(np.concatenate(([1.0], asked)) @ slope)
