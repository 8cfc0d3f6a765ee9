"""The simulator started from a live snapshot: when will each waiting job start, and each running one end?

Jobs keep what they have: workers, attained service, age. What is left of them is what the snapshot says, else what
finished jobs suggest; but of a length that the snapshot does not say the policy is told nothing here either, so that it
orders jobs as it will. From there on the same cycle decides. What would lose work by a stop now is taken not to save
any before it ends. Services keep the room they have now, and devices are only counted, not told apart by node.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from stretto.core import cycle, services
from stretto.core.agenda import Agenda
from stretto.core.cycle import CycleState
from stretto.core.decision import Decision, Memory
from stretto.core.estimate.remaining import expected_steps
from stretto.core.policy import Policy
from stretto.core.snapshot import FloatArray, Snapshot
from stretto.errors import PolicyError
from stretto.sim.general import Engine
from stretto.sim.trace import ELASTIC, RESTART, Trace
from stretto.sim.world import Settings

_LEAST_RATE = 1e-9
_NO_RESIZE_S = 1e6


class Forecast(msgspec.Struct, frozen=True):
    """Seconds from now, in the order of the snapshot's jobs; nan where nobody can say (services, rejected jobs)."""

    start_s: FloatArray
    """0 for those that run."""
    end_s: FloatArray


def forecast(
    view: Snapshot, policy: Policy, state: CycleState | None = None, rules: cycle.Settings | None = None
) -> Forecast:
    """What will happen if nothing else comes."""
    start_s, end_s = np.full(len(view), np.nan), np.full(len(view), np.nan)
    start_s[view.workers > 0] = 0.0
    training = ~view.is_service
    if not training.any():
        return Forecast(start_s, end_s)
    served = view.used_milli(np.where(view.is_service, view.workers, 0), np.maximum(view.pool, 0))
    rest = services.only(view, training, view.capacity - served)
    ours_start_s, ours_end_s = _run(rest, policy, state or CycleState(), rules or cycle.Settings())
    start_s[training] = np.where(rest.workers > 0, 0.0, ours_start_s)
    end_s[training] = ours_end_s
    return Forecast(start_s, end_s)


def _run(view: Snapshot, policy: Policy, state: CycleState, rules: cycle.Settings) -> tuple[FloatArray, FloatArray]:
    engine = Engine(_trace(view), view.pools, view.nodes, _as_uncertain(policy, view), Settings())
    engine.machines.capacity = view.capacity
    engine.state, engine.history = state, view.history
    # Devices are only counted here.
    engine.rules = msgspec.structs.replace(rules, placement="")
    jobs = engine.jobs
    jobs.admit(0.0)
    jobs.workers, jobs.pool = view.workers.copy(), view.pool.copy()
    jobs.gpu_s, jobs.ran_s, jobs.waited_s = view.gpu_s.copy(), view.ran_s.copy(), view.waited_s.copy()
    jobs.restarts, jobs.changed_s = view.restarts.copy(), np.zeros(len(view))
    # Of those that wait the next start is asked for, also if they ran before.
    jobs.started_s = np.where(view.workers > 0, view.started_s - view.now_s, np.nan)
    jobs.refresh()
    if view.lost_s is not None and jobs.stakes is not None:
        jobs.unsaved_s = np.where(view.workers > 0, view.lost_s, 0.0)
        jobs.unsaved = jobs.unsaved_s * jobs.rate
    engine.agenda = Agenda(wake_s=0.0)
    try:
        result = engine.run()
    except PolicyError:
        # Nothing more will happen as things are (a drained cluster, say): what did until then is known.
        result = engine.result()
    return result.start_s, result.finish_s


def _as_uncertain(policy: Policy, now: Snapshot) -> Policy:
    """The policy, told as much of the lengths as it is now."""
    unknown, sd = np.isnan(now.remaining), now.remaining_sd

    def decide(view: Snapshot, memory: Memory, options: Any) -> Decision:
        # Of the simulation a job's number is its row in the snapshot of now.
        left = np.where(unknown[view.job], np.nan, view.remaining)
        told = msgspec.structs.replace(view, remaining=left, remaining_sd=sd[view.job])
        return policy.function(told, memory, options)

    return msgspec.structs.replace(policy, function=decide, rule=None)


def _trace(view: Snapshot) -> Trace:
    n = len(view)
    left = np.maximum(expected_steps(view), _LEAST_RATE)
    return Trace(
        name="now",
        ids=tuple(str(number) for number in view.job.tolist()),
        submit_s=view.submit_s - view.now_s,
        requested=view.requested,
        min_workers=view.min_workers,
        max_workers=view.max_workers,
        work=left,
        curve=view.curve,
        rates=view.rates,
        pools=view.pools,
        duration_s=np.full(n, math.nan),
        deadline_s=view.deadline_s - view.now_s,
        priority=view.priority,
        klass=view.klass,
        classes=tuple(str(i) for i in range(int(view.klass.max(initial=0)) + 1)),
        width=view.width,
        demand=view.demand,
        step=view.step,
        start_s=view.start_s,
        # Where a resize is out of the question its cost is no number of seconds.
        resize_s=np.where(view.resize_s < _NO_RESIZE_S, view.resize_s, view.start_s),
        **_stops(view),
    )


def _stops(view: Snapshot) -> dict[str, Any]:
    """What a stop would cost each job."""
    found: dict[str, Any] = {}
    if view.lost_s is not None:
        loses = view.lost_s > 0 if view.fragile is None else view.fragile | (view.lost_s > 0)
        found["level"] = np.where(loses, RESTART, ELASTIC)
        found["checkpoint_s"] = np.where(loses, math.inf, 0.0)
    if view.preemptible is not None:
        found["preemptible"] = view.preemptible.astype(np.int64)
    return found
