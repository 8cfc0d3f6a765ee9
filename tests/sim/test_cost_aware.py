"""`stretto` where starting and resizing are dear: near the best policy that knows as much, with few preemptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.lab.field import CLASSES
from stretto.sim import generate, runner
from stretto.sim.generate import Workload
from stretto.sim.readers import plain
from stretto.sim.runner import Outcome

SIXTY = Path(__file__).parent.parent / "data" / "tiresias" / "60_job.csv"
SLOW = {"pollux"}
"""Searches for seconds, and is never the best here."""


def sixty(policy: str, lengths: str, cost_s: float) -> Outcome:
    """Sixty rigid jobs of two minutes and more on eight GPUs, where most have to wait."""
    settings = {"start_s": str(cost_s), "resize_s": str(cost_s), "lengths": lengths}
    return runner.run(runner.prepare(SIXTY, "tiresias", "2x4", policy, settings))


@pytest.mark.parametrize("cost_s", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("lengths", list(CLASSES))
def test_mean_completion_is_near_the_best_of_its_class(lengths: str, cost_s: float) -> None:
    others = [name for name in CLASSES[lengths] if name != "stretto" and name not in SLOW]
    best_s = min(sixty(name, lengths, cost_s).metrics.avg_jct_s for name in others)
    ours = sixty("stretto", lengths, cost_s).metrics
    assert ours.avg_jct_s <= 1.15 * best_s
    assert ours.worst_ftf is not None
    assert ours.worst_ftf < 3


def test_who_restarts_for_half_a_minute_is_seldom_stopped() -> None:
    """Where a start takes 30 s of a job of 120 s. Without lengths nobody is stopped twice; where they are known, the
    longest jobs are, whenever that pays."""
    unknown, known = (sixty("stretto", lengths, 30.0).result.preemptions for lengths in ("unknown", "known"))
    assert unknown.max() <= 1
    assert unknown.sum() <= 6
    assert known.sum() <= 30


def test_resizes_become_fewer_as_they_cost_more(tmp_path: Path) -> None:
    """Elastic jobs of minutes: what does not pay is not done, and jobs end later by a few resizes at most."""
    trace = tmp_path / "elastic.csv"
    with trace.open("w") as file:
        plain.write(generate.rows(Workload(gpus=32, sizes="pareto", median_s=300, elastic=1, seed=5)), file)
    found = {}
    for cost_s in (0, 20):
        found[cost_s] = runner.run(runner.prepare(trace, "csv", "4x8", "stretto", {"resize_s": str(cost_s)}))
    free, dear = found[0].result.resizes.sum(), found[20].result.resizes.sum()
    assert free > 200
    assert dear < free / 2
    assert found[20].metrics.avg_jct_s < 1.5 * found[0].metrics.avg_jct_s
