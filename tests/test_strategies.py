"""The random worlds are valid, and as odd as they claim: otherwise every property test is worth less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings

from strategies import snapshots, traces
from stretto.core.snapshot import GPU, Snapshot
from stretto.sim.trace import Trace


def used(view: Snapshot) -> np.ndarray:
    need = np.where(view.workers > 0, view.workers * view.width + view.fixed_milli, 0)
    return np.bincount(np.maximum(view.pool, 0), weights=need, minlength=len(view.pools))


@given(snapshots(pools=3, services=True, overfull=False))
def test_a_snapshot_is_valid(view: Snapshot) -> None:
    n = len(view)
    assert all(len(getattr(view, c)) == n for c in ("job", "submit_s", "remaining", "width", "wanted", "changed_s"))
    assert (np.diff(view.job) > 0).all()
    assert (np.diff(view.submit_s) >= 0).all()
    assert (view.submit_s <= view.now_s).all()
    assert (view.changed_s <= view.now_s).all()
    assert (view.changed_s >= view.submit_s).all()
    assert (view.rates[:, :, 0] == 0).all()
    assert (np.diff(view.rates, axis=2) >= 0).all()
    assert (view.rate(view.min_workers) > 0).all()
    runs = view.workers > 0
    assert ((view.workers == 0) | ((view.workers >= view.min_workers) & (view.workers <= view.max_workers))).all()
    assert ((view.pool >= 0) == runs).all()
    assert (used(view) <= view.capacity).all()
    assert np.allclose(view.ran_s + view.waited_s, view.now_s - view.submit_s, atol=1e-3)
    assert not np.isnan(view.started_s[runs]).any()
    assert (view.capacity == np.bincount(view.nodes.pool, view.nodes.devices * GPU, len(view.pools))).all()


@given(snapshots(placed=True, pools=2))
def test_placed_workers_are_on_nodes_of_their_pool(view: Snapshot) -> None:
    assert (view.placed.sum(axis=1) == view.workers).all()
    assert (view.placed.T @ view.width <= view.nodes.devices * GPU).all()
    for j, node in np.argwhere(view.placed > 0):
        assert view.nodes.pool[node] == view.pool[j]


@given(snapshots(elastic=False, known=True))
def test_rigid_and_known(view: Snapshot) -> None:
    assert (view.min_workers == view.max_workers).all()
    assert (view.min_workers == view.requested).all()
    assert not np.isnan(view.remaining).any()


@given(traces(elastic=False))
def test_every_job_of_a_trace_can_run(trace: Trace) -> None:
    assert (trace.need_milli <= 8 * GPU).all()
    assert (trace.rigid().rates[0, trace.rigid().curve, trace.requested] > 0).all()


@pytest.mark.parametrize(
    "odd",
    [
        lambda v: len(v) == 0,
        lambda v: len(v) > 2 and v.total_milli == 0,
        lambda v: bool((used(v) > v.capacity).any()),
        lambda v: bool(((v.workers > 0) & (v.remaining == 0)).any()),
        lambda v: bool(np.isnan(v.remaining).any() and (v.remaining > 0).any()),
        lambda v: bool((v.width % GPU > 0).any() and (v.fixed_milli > 0).any()),
        lambda v: bool((v.requested > v.max_workers).any()),
        lambda v: bool((v.rate(v.max_workers) == v.rate(v.min_workers))[v.max_workers > v.min_workers].any()),
        lambda v: bool((v.workers > v.min_workers).sum() > 1),
    ],
)
def test_odd_worlds_are_drawn(odd: object) -> None:
    find(snapshots(), odd, settings=settings(max_examples=1000, phases=[Phase.generate]))  # raises when there is none
