"""Sample snapshots are valid, repeatable and of the size that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.core.snapshot import GPU, Snapshot
from stretto.sim import sample


def in_use(view: Snapshot) -> np.ndarray:
    runs = view.workers > 0
    return np.bincount(view.pool[runs], weights=(view.workers * view.width)[runs], minlength=len(view.pools))


@pytest.mark.parametrize(("jobs", "gpus"), [(0, 0), (3, 0), (0, 8), (5, 3), (200, 100)])
@pytest.mark.parametrize("types", [("gpu",), ("a", "b", "c")])
def test_valid_at_any_size(jobs: int, gpus: int, types: tuple[str, ...]) -> None:
    view = sample.snapshot(jobs, gpus, types=types)
    assert (len(view), view.total_milli) == (jobs, gpus * GPU)
    assert view.nodes.devices.sum() == gpus
    assert (view.min_workers >= 1).all()
    assert (view.min_workers <= view.requested).all()
    assert (view.requested <= view.max_workers).all()
    assert (np.diff(view.submit_s) >= 0).all()
    assert ((view.workers > 0) == (view.pool >= 0)).all()
    assert (in_use(view) <= view.capacity).all()


def test_curves_are_concave_and_rising() -> None:
    gains = np.diff(sample.snapshot(1, 1, types=("a", "b")).rates, axis=2)
    assert (gains > 0).all()
    assert (np.diff(gains, axis=2) < 1e-12).all()


def test_the_running_share_is_met() -> None:
    for share in (0.0, 0.5, 1.0):
        used = in_use(sample.snapshot(2000, 1000, running_share=share)).sum()
        assert used == pytest.approx(share * 1000 * GPU, abs=GPU)


def test_the_seed_decides() -> None:
    one, same, other = (sample.snapshot(50, 50, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.remaining, same.remaining)
    assert not np.array_equal(one.remaining, other.remaining)
