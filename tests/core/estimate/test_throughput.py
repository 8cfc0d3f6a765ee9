"""Whatever the steps of a job are like, what was counted says how long the rest takes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from stretto.core.estimate.throughput import Throughput

Steps = Callable[[int, random.Random], float]
"""Seconds of a step, by its number."""

KINDS: dict[str, Steps] = {
    "steady": lambda i, rng: 0.04 * rng.uniform(0.97, 1.03),
    "bimodal": lambda i, rng: 0.5 if rng.random() < 0.1 else 0.005,
    "every tenth": lambda i, rng: 0.5 if i % 10 == 9 else 0.005,
    "lognormal": lambda i, rng: 0.03 * rng.lognormvariate(0, 1),
    "evaluates": lambda i, rng: 2.01 if i % 50 == 49 else 0.01,
    "evaluates seldom": lambda i, rng: 8.02 if i % 200 == 199 else 0.02,
    "slow": lambda i, rng: 4.0,
}
CHANCE = {"bimodal", "lognormal"}
"""Here the rest is not the same as what was seen."""


def told(kind: Steps, seed: int, seen_s: float) -> tuple[float, float]:
    """Steps per second after so long, and as the next hours have them. Heartbeats come once a second."""
    rng, now_s, throughput = random.Random(seed), 0.0, Throughput()
    steps, beat_s = 0, rng.random()
    while now_s < seen_s:
        step_s = kind(steps, rng)
        while beat_s < min(now_s + step_s, seen_s):
            throughput.seen(beat_s, steps)
            beat_s += 1.0
        now_s, steps = now_s + step_s, steps + 1
    rest_s = [kind(i, rng) for i in range(steps, steps + 20_000)]
    return throughput.rate, len(rest_s) / sum(rest_s)


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("seed", range(5))
def test_the_rest_takes_as_long_as_it_says(name: str, seed: int) -> None:
    seen_s = 120.0 if name in CHANCE else 60.0 if name in ("evaluates seldom", "slow") else 18.0
    rate, truth = told(KINDS[name], seed, seen_s)
    assert rate == pytest.approx(truth, rel=0.15)


def test_at_first_nobody_knows() -> None:
    throughput = Throughput()
    for second in range(9):
        throughput.seen(float(second), 10 * second)
    assert throughput.rate == 0.0
    throughput.seen(10.0, 100)
    assert throughput.rate == pytest.approx(10.0)


def test_what_is_cut_out_counts_nowhere() -> None:
    throughput = Throughput()
    for second in range(10):
        throughput.seen(float(second), 10 * second)
    throughput.cut()
    for second in range(10):
        throughput.seen(500.0 + second, 90 + 10 * second)
    assert throughput.rate == pytest.approx(10.0)


def test_what_is_long_past_fades() -> None:
    throughput, steps = Throughput(), 0
    for second in range(4000):
        steps += 10 if second < 1000 else 20
        throughput.seen(float(second), steps)
    assert throughput.rate == pytest.approx(20.0, rel=0.01)


def test_a_clock_that_is_set_back_begins_anew() -> None:
    throughput = Throughput()
    for second in range(20):
        throughput.seen(1e6 + second, 10 * second)
    for second in range(20):
        throughput.seen(float(second), 200 + 10 * second)
    assert throughput.rate == pytest.approx(10.0)
