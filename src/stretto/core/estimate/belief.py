"""What is believed of a job's speed at every size, from what was measured of it and of its class.

The simulator and the live system ask the same function. It is honest about sizes that nobody has tried:

- Up to the widest size that was tried, of the job or of its class, the curve is what was measured, with the formula of
  `estimate.curve` in between. It may fall: more workers may be slower, and then this says so.
- One doubling further the job gains what the last doubling that was measured gained, or loses what it lost; before any
  was measured, n workers are n ** 0.7 times as fast as one.
- Beyond that no gain is promised. So whoever looks for gain tries 1, 2, 4, 8 … workers, until one of them brings none.

A job of which nothing is known is expected to be n ** 0.7 times as fast on n workers, as far as the caller says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.core.snapshot import FloatArray

_UNTRIED = 0.7
"""Exponent of the speed-up of a job that was measured at one size at most."""
_MOST_GAIN, _LEAST_GAIN = 2.0, 0.25
"""Of a doubling: not more than linear, and not less than a measurement error may suggest."""
_CLEAR_GAIN = 1.03
"""A smaller gain is none."""


def believed(
    own: Sequence[Curve],
    prior: Sequence[Curve],
    low: int,
    high: int,
    *,
    first: int,
    strangers: Sequence[Curve] = (),
    useless: Collection[int] = (),
) -> FloatArray:
    """Steps/s [pool, workers] of a job of `low` to `high` workers.

    `own`, `prior`: what was measured of the job and of its class, by pool. `first`: how far a job that nobody has tried
    is expected to gain. `strangers`: other jobs, by pool, which tell the speed of a job of which nothing else does.
    `useless`: pools on which it makes no progress.
    """
    tried = sorted({size for curve in (*own, *prior) for size in curve.workers})
    rows = np.zeros((len(own), high + 1))
    for pool in range(len(own)):
        if pool not in useless:
            known = _known(pool, own, prior, strangers)
            rows[pool] = _row(*known, tried, low, high) if tried else _untried(known[1], low, high, first)
    return rows


def _known(pool: int, own: Sequence[Curve], prior: Sequence[Curve], strangers: Sequence[Curve]) -> tuple[Curve, Curve]:
    """What speaks for a job on one pool: itself and its class; where neither was there, what was seen elsewhere."""
    if own[pool].workers or prior[pool].workers:
        return own[pool], prior[pool]
    elsewhere = (*own, *prior, *strangers[pool : pool + 1])
    return Curve(), next((curve for curve in elsewhere if curve.workers), Curve())


def _row(own: Curve, prior: Curve, tried: list[int], low: int, high: int) -> FloatArray:
    """One pool's rates on 0, 1, … high workers."""
    widest, top = min(tried[-1], high), curves.cap(min(tried[-1], high), high, low)
    rates = np.zeros(high + 1)
    rates[1 : widest + 1] = 1 / curves.step_s(own, np.arange(1.0, widest + 1), prior)
    beyond = np.arange(widest + 1, high + 1)
    rates[beyond] = rates[widest] * _gain(own, prior, rates, tried) ** np.log2(np.minimum(beyond, top) / widest)
    return rates


def _gain(own: Curve, prior: Curve, rates: FloatArray, tried: list[int]) -> float:
    """By what the last doubling that was measured made it faster."""
    within = [size for size in tried if size < len(rates)]
    if len(within) < 2:
        return math.pow(2.0, _UNTRIED)
    widest = within[-1]
    halves = [size for size in within if 2 * size <= widest]
    before = halves[-1] if halves else within[0]
    gain = math.pow(_faster(own, prior, rates, before, widest), 1 / math.log2(widest / before))
    return min(max(gain if gain > _CLEAR_GAIN else min(gain, 1.0), _LEAST_GAIN), _MOST_GAIN)


def _faster(own: Curve, prior: Curve, rates: FloatArray, before: int, after: int) -> float:
    """How much faster it is at one size than at another: as the same job or its class was measured at both."""
    for curve in (own, prior):
        step_s = curves.measured_s(curve)
        if before in step_s and after in step_s:
            return step_s[before] / step_s[after]
    return float(rates[after] / rates[before])


def _untried(stranger: Curve, low: int, high: int, first: int) -> FloatArray:
    """Of its shape nothing is known; its speed on the minimum is that of others, if there are any."""
    at_low = 1 / float(curves.step_s(stranger, np.array([float(low)]))[0]) if stranger.workers else float(low**_UNTRIED)
    sizes = np.minimum(np.arange(high + 1), max(first, low))
    rates: FloatArray = at_low * (sizes / low) ** _UNTRIED
    return rates
