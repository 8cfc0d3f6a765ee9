"""Finished runs of one class, and what they say about the next.

A run is remembered with what its user wrote down and what was known when it was submitted: resources, workers,
hyper-parameters (epochs, batch size, model …), how many jobs ran beside it. `length` predicts the size of a new run
from these in three ways: a robust regression of log(size), the nearest neighbours, and the median. Each way first
predicts every remembered run from the others; the one that was off the least answers, and how far it was off is the
uncertainty. So one run gives a guess, a few give an order, and many give a good estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np

from stretto.core.estimate.curve import Curve
from stretto.core.snapshot import FloatArray, IntArray

Features: TypeAlias = Mapping[str, float | str]
"""What is known of a run beforehand: numbers and names."""

_Answers: TypeAlias = Callable[[FloatArray], FloatArray]
_Way: TypeAlias = Callable[[FloatArray, FloatArray], tuple[FloatArray, _Answers]]
"""From runs and their sizes: how far off it would have been for each run, and what answers questions."""

_MOST_RUNS = 200
_UNKNOWN_SD = 1.5
_SINGLE_SD = 0.7
_LEAST_SD = 0.05
_RIDGE = 0.1
_HUBER = 1.5
_NEIGHBOURS = 3
_MOST_NAMES = 8
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
    return lengths(history, [features], default)[0]


def lengths(history: ClassHistory, asked: Sequence[Features], default: float = 3600.0) -> list[Length]:
    """The same for several runs at once: what the history teaches is worked out only once."""
    sizes = np.log([run.size for run in history.runs])
    if len(sizes) < 2:
        known = Length(float(sizes[0]), _SINGLE_SD, "one run") if len(sizes) else None
        return [known or Length(math.log(default), _UNKNOWN_SD, "nothing")] * len(asked)
    table, rows = _table([run.features for run in history.runs], asked)
    ways: list[tuple[str, _Way]] = [("median", _median), ("neighbours", _nearest), ("regression", _regression)]
    tried = [(name, *way(table, sizes)) for name, way in (ways if table.shape[1] else ways[:1])]
    basis, errors, answers = min(tried, key=lambda one: _off(one[1]))
    inside = np.clip(answers(rows), sizes.min() - _BEYOND, sizes.max() + _BEYOND)
    sd = max(_off(errors), _LEAST_SD)
    return [Length(mean, sd, basis) for mean in inside.tolist()]


def _off(errors: FloatArray) -> float:
    """How far off a way is. Of few runs the spread of the errors is itself uncertain."""
    return math.sqrt(float(np.mean(np.minimum(errors**2, 9.0))) * (1 + 2 / len(errors)))


def _merge(known: Curve, new: Curve) -> Curve:
    """Two curves pooled, each size weighted by how often it was seen."""
    rows: dict[int, tuple[float, float, float]] = {}
    slow: dict[int, tuple[float, float]] = {}
    for curve in (known, new):
        for w, *some in zip(curve.workers, curve.slow, curve.slow_s, strict=False):
            had_slow = slow.get(w, (0.0, 0.0))
            slow[w] = had_slow[0] + some[0], had_slow[1] + some[1]
        for w, count, mean, squares in zip(curve.workers, curve.count, curve.mean, curve.squares, strict=True):
            had = rows.get(w, (0.0, 0.0, 0.0))
            total = had[0] + count
            apart = (mean - had[1]) ** 2 * had[0] * count / total
            rows[w] = (total, (had[0] * had[1] + count * mean) / total, had[2] + squares + apart)
    sizes = tuple(sorted(rows))
    counts, means, spreads = ([rows[w][i] for w in sizes] for i in range(3))
    slow_rows = [slow.get(w, (0.0, 0.0)) for w in sizes] if slow else []
    return Curve(
        sizes, tuple(counts), tuple(means), tuple(spreads),
        slow=tuple(steps for steps, _ in slow_rows), slow_s=tuple(seconds for _, seconds in slow_rows),
    )  # fmt: skip


def _table(runs: Sequence[Features], asked: Sequence[Features]) -> tuple[FloatArray, FloatArray]:
    """Runs and questions as rows of numbers: logs of positive numbers, names as 0 or 1, all on one scale.

    Features that never vary, or that are not given everywhere, say nothing.
    """
    columns: list[FloatArray] = []
    for name in sorted(frozenset.intersection(*{frozenset(one) for one in (*runs, *asked)})):
        columns += _columns([one[name] for one in (*runs, *asked)], len(runs))
    rows = np.column_stack(columns) if columns else np.empty((len(runs) + len(asked), 0))
    known = rows[: len(runs)]
    spread = known.std(axis=0)
    varies = spread > 1e-9
    rows = (rows[:, varies] - known[:, varies].mean(axis=0)) / spread[varies]
    return rows[: len(runs)], rows[len(runs) :]


def _columns(values: list[float | str], runs: int) -> list[FloatArray]:
    if all(issubclass(kind, int | float) for kind in {type(value) for value in values}):
        column = np.array(values, np.float64)
        if np.isfinite(column).all():
            return [np.log(column) if (column > 0).all() else column]
    return _names([str(value) for value in values], runs)


def _names(texts: list[str], runs: int) -> list[FloatArray]:
    """A column for each of the names that occur most among the runs; the others are all alike."""
    ranked = sorted(Counter(texts[:runs]).items(), key=lambda item: (-item[1], item[0]))
    codes = {name: code for code, (name, _) in enumerate(ranked[: min(_MOST_NAMES, len(ranked) - 1)])}
    coded = np.array([codes.get(text, -1) for text in texts], np.int64)
    return [(coded == code).astype(np.float64) for code in range(len(codes))]


def _median(table: FloatArray, sizes: FloatArray) -> tuple[FloatArray, _Answers]:
    n = len(sizes)
    others = np.broadcast_to(sizes, (n, n))[~np.eye(n, dtype=np.bool_)].reshape(n, n - 1)
    return sizes - np.median(others, axis=1), lambda asked: np.full(len(asked), np.median(sizes))


def _nearest(table: FloatArray, sizes: FloatArray) -> tuple[FloatArray, _Answers]:
    def guess(apart: FloatArray, near: IntArray) -> FloatArray:
        weight = 1 / (np.take_along_axis(apart, near, 1) + 0.1)
        mean: FloatArray = (sizes[near] * weight).sum(axis=1) / weight.sum(axis=1)
        return mean

    def answers(asked: FloatArray) -> FloatArray:
        apart = _apart(asked, table)
        return guess(apart, _smallest(apart, _NEIGHBOURS))

    among = _apart(table, table)
    np.fill_diagonal(among, np.inf)
    return sizes - guess(among, np.argsort(among, axis=1, kind="stable")[:, :_NEIGHBOURS]), answers


def _smallest(rows: FloatArray, count: int) -> IntArray:
    """Where the smallest of each row are, the first of equal ones first: much quicker than to sort them all."""
    left = rows.copy()
    found: list[IntArray] = []
    for _ in range(min(count, rows.shape[1])):
        found.append(left.argmin(axis=1))
        left[np.arange(len(left)), found[-1]] = np.inf
    return np.stack(found, axis=1)


def _apart(some: FloatArray, others: FloatArray) -> FloatArray:
    apart: FloatArray = np.sqrt(((some[:, None, :] - others[None, :, :]) ** 2).sum(axis=2))
    return apart


def _regression(table: FloatArray, sizes: FloatArray) -> tuple[FloatArray, _Answers]:
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
    return left_out, lambda asked: slope[0] + asked @ slope[1:]
