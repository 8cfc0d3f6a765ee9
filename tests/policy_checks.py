"""What the tests of several policies do alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from strategies import nodes_of
from stretto.core import invariants, reasons
from stretto.core.decision import Decision, Memory
from stretto.core.handout import useful
from stretto.core.policy import Policy, load
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, FloatArray, IntArray, Snapshot
from stretto.sim import cluster
from stretto.sim.engine import simulate
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings

_COLUMNS = ("workers", "pool", "reason", "detail")


def answer(name: str, view: Snapshot, memory: Memory = None, **settings: Any) -> Decision:
    """The policy's decision, checked: invariants, sentences for all reasons, and the same answer when asked twice.

    Arrays are made read-only first: a policy that writes to what it was given fails here.
    """
    policy = load(name, settings)
    decision = policy.decide(frozen(view), memory)
    invariants.check(policy, view, decision)
    for code, (first, second) in zip(decision.reason.tolist(), decision.detail.tolist(), strict=True):
        assert reasons.explain(code, first, second)
    again = policy.decide(view, memory)
    for column in _COLUMNS:
        assert np.array_equal(getattr(decision, column), getattr(again, column), equal_nan=True)
    assert decision.wake_s == again.wake_s
    return decision


def frozen(view: Snapshot) -> Snapshot:
    """The same snapshot with arrays that nobody can write to."""
    arrays = {}
    for field in view.__struct_fields__:
        value = getattr(view, field)
        if isinstance(value, np.ndarray):
            arrays[field] = value.copy()
            arrays[field].setflags(write=False)
    return msgspec.structs.replace(view, **arrays)


def workers_of(name: str, view: Snapshot, memory: Memory = None, **settings: Any) -> list[int]:
    """Just the workers of the checked decision."""
    found: list[int] = answer(name, view, memory, **settings).workers.tolist()
    return found


def why(decision: Decision, j: int) -> Reason:
    """The reason of one job."""
    return Reason(int(decision.reason[j]))


def need_of(view: Snapshot, workers: IntArray) -> IntArray:
    """Milli-GPU held on so many workers."""
    need: IntArray = np.where(workers > 0, workers * view.width + view.fixed_milli, 0)
    return need


def roomy(view: Snapshot) -> Snapshot:
    """The same jobs on a cluster where all have room for their maximum at once."""
    gpus = int(-(-(view.max_workers * view.width + view.fixed_milli).sum() // GPU))
    return msgspec.structs.replace(
        view,
        pools=("gpu",),
        nodes=nodes_of([gpus]),
        capacity=np.array([gpus * GPU]),
        rates=view.rates[:1],
        pool=np.minimum(view.pool, 0),
    )


def check_uncontended(name: str, view: Snapshot) -> None:
    """Where there is room for all, all run at their useful maximum."""
    view = roomy(view)
    assert workers_of(name, view) == useful(view).tolist()


def check_work_conserving(name: str, view: Snapshot, *, weighs_cost: bool = False) -> None:
    """No minimum of a waiting job fits, and no running job would get faster by what is free.

    Where the policy weighs what a resize costs: nobody who would win that back before its end, or in ten minutes, which
    is how long a size is expected to hold while nothing was seen.
    """
    decision = answer(name, view)
    free = view.total_milli - int(need_of(view, decision.workers).sum())
    waits = decision.workers == 0
    assert (need_of(view, view.min_workers)[waits] > free).all()
    most = np.minimum(view.max_workers, decision.workers + free // view.width)
    faster = view.rate(most) > view.rate(decision.workers)
    if weighs_cost:
        stays = (decision.workers == view.workers) & (view.resize_s > 0)
        faster &= ~stays | (_won_s(view, most) > view.resize_s)
    assert not (faster & ~waits).any()


def _won_s(view: Snapshot, workers: IntArray) -> FloatArray:
    """Seconds that each running job would end sooner within ten minutes; nothing where the length is unknown."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = view.rate(workers) / view.rate(view.workers)
        won: FloatArray = np.minimum(np.nan_to_num(view.remaining) / view.rate(workers), 600.0) * (ratio - 1)
    return np.nan_to_num(won)


def check_order(name: str, view: Snapshot, order: IntArray) -> None:
    """`preempts: higher`: a job is left out only if the minimums of the jobs ahead that run leave it no room."""
    workers = answer(name, view).workers
    free = view.total_milli
    for j in order.tolist():
        need = int(need_of(view, view.min_workers)[j])
        assert (workers[j] > 0) == (need <= free)
        free -= need if workers[j] else 0


def run(
    name: str,
    trace: Trace,
    nodes: str = "1x8",
    settings: Mapping[str, Any] | None = None,
    world: Settings | None = None,
) -> Result:
    """Simulate."""
    pools, machines = cluster.parse(nodes)
    return simulate(trace, pools, machines, load(name, settings), world)


def watched(name: str, log: list[tuple[Snapshot, Decision]], **settings: Any) -> Policy:
    """The policy, noting down everything it was asked and answered."""
    policy = load(name, settings)

    def function(view: Snapshot, memory: Memory, options: Any) -> Decision:
        decision = policy.function(view, memory, options)
        log.append((view, decision))
        return decision

    # Without its rule, so that the simulator asks for every decision.
    return msgspec.structs.replace(policy, function=function, rule=None)


def check_ends(name: str, trace: Trace, **settings: Any) -> Result:
    """On 8 GPUs every job ends, none faster than its best speed allows, with no more GPU time than there is."""
    result = run(name, trace, "1x8", settings)
    best = trace.rates[0, trace.curve, np.minimum(trace.max_workers, trace.rates.shape[2] - 1)]
    assert (result.finish_s - trace.submit_s >= trace.work / best - 1e-6).all()
    assert result.gpu_s.sum() <= 8 * result.finish_s.max() + 1e-6
    return result
