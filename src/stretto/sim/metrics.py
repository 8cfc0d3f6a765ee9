"""What a run was worth: completion times, waiting, utilisation, fairness, and how far from the lower bounds.

Definitions (docs/sim.md explains them at length):

completion time (JCT)   finish − submit of every training job that finished, start and resize costs included
wait                    first start − submit of every training job that started
makespan                last finish − first submit of the training jobs
utilisation             GPU-seconds held / GPU-seconds there were, from the first submission to the last end
useful utilisation      the fewest GPU-seconds the finished work can be done with / the same; what is missing
                        against `utilisation` went into poor scaling, pauses and lost progress
finish-time fairness    completion time / completion time in the fair world (`sim.fair`); worst is the largest
bounds                  over the jobs that finished, as the policy saw them (rigid policies: rigid jobs)

Percentiles are numpy's linear ones. A figure that does not exist (no job finished, no deadlines) is None.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, BoolArray, FloatArray, Nodes
from stretto.sim import bounds, fair
from stretto.sim.trace import Trace
from stretto.sim.world import Failure, Result

_ON_DEMAND = ("dual_bound_avg_jct_s", "lp_bound_makespan_s")


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of one run, in the order in which they are printed."""

    jobs: int
    """Training jobs in the trace."""
    avg_jct_s: float
    p50_jct_s: float
    p99_jct_s: float
    avg_wait_s: float
    makespan_s: float
    utilisation: float
    useful_utilisation: float
    preemptions: int
    resizes: int
    worst_ftf: float
    deadlines_met: int | None
    """Jobs that finished by their deadline; None when no job of the trace has one."""
    lower_bound_avg_jct_s: float
    lower_bound_makespan_s: float
    cpu_s: float = math.nan
    peak_rss_mib: float = math.nan
    p90_jct_s: float
    max_jct_s: float
    p99_wait_s: float
    p95_ftf: float
    unfair_share: float
    """Share of jobs with a finish-time fairness above 1.05."""
    finished: int
    rejected: int
    services: int
    paused_s: float
    """Job-seconds with workers but without progress."""
    lost_s: float
    """Job-seconds of progress that stops and resizes have undone."""
    lost_to_failures_s: float
    events: int
    decisions: int
    gpus: float
    policy: str
    trace: str
    dual_bound_avg_jct_s: float | None = None
    """The time-priced bound for elastic jobs; like the next one only when it was asked for, because it takes long."""
    lp_bound_makespan_s: float | None = None
    """The linear programme's bound for several device types."""

    def plain(self) -> dict[str, Any]:
        """The figures for JSON and CSV: what is not a number becomes None."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        asked = {name: value for name, value in values.items() if value is not None or name not in _ON_DEMAND}
        return {name: _plain(value) for name, value in asked.items()}


def measure(trace: Trace, seen: Trace, nodes: Nodes, result: Result, failures: tuple[Failure, ...] = ()) -> Metrics:
    """Figures of a run of `trace` (on the cluster's pools), whose jobs the policy saw as `seen` (perhaps rigid)."""
    training = ~result.is_service
    done = training & ~np.isnan(result.finish_s)
    jct = (result.finish_s - trace.submit_s)[done]
    wait = (result.start_s - trace.submit_s)[training & ~np.isnan(result.start_s)]
    ftf = fairness(trace, nodes, result)[done]
    gpus = float(nodes.devices.sum())
    had = _gpu_s(float(trace.submit_s.min()), _end(result), nodes, failures)
    sizes = bounds.sizes(seen, done)
    return Metrics(
        policy=result.policy,
        trace=trace.name,
        gpus=gpus,
        jobs=int(training.sum()),
        finished=int(done.sum()),
        rejected=int(result.rejected.sum()),
        services=int(result.is_service.sum()),
        avg_jct_s=_mean(jct),
        p50_jct_s=_percentile(jct, 50),
        p90_jct_s=_percentile(jct, 90),
        p99_jct_s=_percentile(jct, 99),
        max_jct_s=_percentile(jct, 100),
        avg_wait_s=_mean(wait),
        p99_wait_s=_percentile(wait, 99),
        makespan_s=float(result.finish_s[done].max() - trace.submit_s[training].min()) if done.any() else math.nan,
        utilisation=float(result.gpu_s.sum()) / had if had else math.nan,
        useful_utilisation=_useful_gpu_s(trace, result, done) / had if had else math.nan,
        preemptions=int(result.preemptions.sum()),
        resizes=int(result.resizes.sum()),
        paused_s=float(result.paused_s.sum()),
        lost_s=float(result.lost_s.sum()),
        lost_to_failures_s=float(result.lost_to_failures_s.sum()),
        worst_ftf=_percentile(ftf[~np.isnan(ftf)], 100),
        p95_ftf=_percentile(ftf[~np.isnan(ftf)], 95),
        unfair_share=_mean((ftf[~np.isnan(ftf)] > 1.05).astype(np.float64)),
        deadlines_met=_deadlines_met(trace, result, training),
        lower_bound_avg_jct_s=bounds.average_jct(sizes, gpus),
        lower_bound_makespan_s=bounds.makespan(sizes, gpus),
        events=result.events,
        decisions=result.decisions,
    )


def fairness(trace: Trace, nodes: Nodes, result: Result) -> FloatArray:
    """Finish-time fairness of every job; nan where there is none (services, rejected and empty jobs)."""
    due = fair.fair_finish(trace, int(nodes.devices.sum()) * GPU) - trace.submit_s
    with np.errstate(divide="ignore", invalid="ignore"):
        rho: FloatArray = np.where(due > 0, (result.finish_s - trace.submit_s) / due, np.nan)
    rho[result.is_service] = np.nan
    return rho


def _useful_gpu_s(trace: Trace, result: Result, done: BoolArray) -> float:
    """Services count with what they hold: serving is what it is for."""
    return float(bounds.sizes(trace, done).area_gpu_s.sum() + result.gpu_s[result.is_service].sum())


def _end(result: Result) -> float:
    return -math.inf if np.isnan(result.finish_s).all() else float(np.nanmax(result.finish_s))


def _gpu_s(start_s: float, end_s: float, nodes: Nodes, failures: tuple[Failure, ...]) -> float:
    """GPU-seconds that were up from the first submission to the last end."""
    if end_s <= start_s:
        return 0.0
    total = float(nodes.devices.sum()) * (end_s - start_s)
    down: dict[int, float] = {}
    for failure in sorted(failures, key=lambda f: (f.at_s, f.node)):
        at_s = min(max(failure.at_s, start_s), end_s)
        if failure.up and failure.node in down:
            total -= (at_s - down.pop(failure.node)) * float(nodes.devices[failure.node])
        elif not failure.up:
            down.setdefault(failure.node, at_s)
    return total - sum((end_s - at_s) * float(nodes.devices[node]) for node, at_s in down.items())


def _deadlines_met(trace: Trace, result: Result, training: BoolArray) -> int | None:
    due = training & np.isfinite(trace.deadline_s)
    if not due.any():
        return None
    return int((result.finish_s[due] <= trace.deadline_s[due]).sum())


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _percentile(values: FloatArray, share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else math.nan


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
