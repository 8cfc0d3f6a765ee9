"""What must hold for every decision, of every policy, on every input.

The live loop and the simulator check each decision; the property tests use the same code.
"""

from __future__ import annotations

import numpy as np

from stretto.core import steps
from stretto.core.decision import Decision
from stretto.core.policy import Policy, fail
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Snapshot

_LAST = max(Reason)


def check(policy: Policy, view: Snapshot, decision: Decision) -> None:
    """Raise `PolicyError`, naming the job and the rule, if the decision may not be carried out."""
    n = len(view)
    _shapes(policy, n, decision)
    workers = decision.workers
    if workers.min(initial=0) < 0:
        raise _job(policy, view, int(np.argmax(workers < 0)), "has a negative number of workers")
    running = workers > 0
    low, high = view.min_workers, view.max_workers
    wrong = running & ((workers < low) | (workers > high))
    if wrong.any():
        j = int(np.argmax(wrong))
        raise _job(policy, view, j, f"got {workers[j]} workers, allowed are 0 or {low[j]}..{high[j]}")
    if view.step is not None and (steps.possible(view, workers) != workers).any():
        j = int(np.argmax(steps.possible(view, workers) != workers))
        raise _job(policy, view, j, f"got {workers[j]} workers, which is not one of its sizes")
    if decision.pool.min(initial=0) < 0 or decision.pool.max(initial=0) >= len(view.pools):
        wrong = running & ((decision.pool < 0) | (decision.pool >= len(view.pools)))
        if wrong.any():
            raise _job(policy, view, int(np.argmax(wrong)), "runs on a pool that does not exist")
    if decision.rejected is not None and (decision.rejected & running).any():
        raise _job(policy, view, int(np.argmax(decision.rejected & running)), "is rejected and runs")
    _capacity(policy, view, decision)
    if not decision.wake_s > view.now_s:
        raise fail(policy.name, f"wants to be woken at {decision.wake_s}, which is not after {view.now_s}")
    if n and decision.reason.min() <= 0:
        raise _job(policy, view, int(np.argmax(decision.reason <= 0)), "has no reason")
    if n and int(decision.reason.max()) > _LAST:
        raise _job(policy, view, int(np.argmax(decision.reason)), f"has the unknown reason {decision.reason.max()}")


def _shapes(policy: Policy, n: int, decision: Decision) -> None:
    if not isinstance(decision, Decision):
        raise fail(policy.name, f"returned {type(decision).__name__}, not a Decision")
    for field, shape in (("workers", (n,)), ("pool", (n,)), ("reason", (n,)), ("detail", (n, 2))):
        array = getattr(decision, field)
        if not isinstance(array, np.ndarray) or array.shape != shape:
            got = getattr(array, "shape", type(array).__name__)
            raise fail(policy.name, f"{field} must be an array of shape {shape}, got {got}")
    for field in ("workers", "pool", "reason"):
        kind = getattr(decision, field).dtype
        if kind.kind not in "iu":
            raise fail(policy.name, f"{field} must be whole numbers, got {kind}")
    gone = decision.rejected
    if gone is not None and (not isinstance(gone, np.ndarray) or gone.shape != (n,) or gone.dtype != np.bool_):
        raise fail(policy.name, f"rejected must be None or an array of {n} truth values")


def _capacity(policy: Policy, view: Snapshot, decision: Decision) -> None:
    used = view.used_milli(decision.workers, decision.pool)
    if (used > view.capacity).any():
        p = int(np.argmax(used > view.capacity))
        raise fail(
            policy.name,
            f"gives out {used[p] / GPU:g} GPUs of pool {view.pools[p]!r}, which has {view.capacity[p] / GPU:g}",
        )


def _job(policy: Policy, view: Snapshot, j: int, what: str) -> Exception:
    return fail(policy.name, f"job number {view.job[j]} {what}")
