"""The simulator: a trace under a policy, to its end.

`simulate` picks the incremental runner (`listrun`) where the policy is a declared list and the world is simple
enough, the general one (`general`) otherwise; the results are equal.
"""

from __future__ import annotations

import msgspec
import numpy as np

from stretto.core.policy import Policy
from stretto.core.snapshot import GPU, Nodes
from stretto.errors import TraceError
from stretto.sim import cluster as clusters
from stretto.sim import general, levels, listrun
from stretto.sim.trace import Trace
from stretto.sim.turns import Progress
from stretto.sim.world import Result, Settings

__all__ = ["Progress", "on_pools", "reject_oversized", "seen_by", "simulate"]


def simulate(
    trace: Trace,
    pools: tuple[str, ...],
    nodes: Nodes,
    policy: Policy,
    settings: Settings | None = None,
    progress: Progress | None = None,
) -> Result:
    """Run the trace to its end under the policy."""
    world = settings or Settings()
    jobs = seen_by(policy, levels.settled(trace, world), pools)
    reject_oversized(jobs, pools, nodes)
    if listrun.applies(jobs, pools, policy, world):
        return listrun.run(jobs, pools, nodes, policy, world, progress)
    return general.Engine(jobs, pools, nodes, policy, world, progress).run()


def seen_by(policy: Policy, trace: Trace, pools: tuple[str, ...]) -> Trace:
    """The jobs as the policy gets to see them: on the cluster's pools, and rigid unless it is elastic.

    Services follow their load under every policy.
    """
    if policy.traits.elastic:
        return on_pools(trace, pools)
    jobs = trace.rigid()
    if trace.services:
        serves = np.array([load is not None for load in trace.services])
        low = np.where(serves, trace.min_workers, jobs.min_workers)
        high = np.where(serves, trace.max_workers, jobs.max_workers)
        jobs = msgspec.structs.replace(jobs, min_workers=low, max_workers=high)
    return on_pools(jobs, pools)


def reject_oversized(trace: Trace, pools: tuple[str, ...], nodes: Nodes) -> None:
    """A job whose minimum is larger than every pool can never run: say so at once."""
    room = int(clusters.capacity(pools, nodes).max())
    need = trace.min_workers * trace.width
    if (need > room).any():
        j = int(np.argmax(need > room))
        where = "the cluster has" if len(pools) == 1 else "the largest device type of the cluster has"
        raise TraceError(
            f"trace {trace.name!r}: job {trace.ids[j]!r} needs {need[j] / GPU:g} GPUs, {where} {room / GPU:g}",
            hint="use a larger --cluster, or take the job out of the trace",
        )


def on_pools(trace: Trace, pools: tuple[str, ...]) -> Trace:
    """Order the trace's throughputs by the cluster's pools."""
    if trace.pools == pools:
        return trace
    if len(trace.pools) == 1 and len(pools) == 1:
        return msgspec.structs.replace(trace, pools=pools)
    if len(trace.pools) == 1:
        spread = None if trace.spread_rates is None else np.repeat(trace.spread_rates, len(pools), axis=0)
        rates = np.repeat(trace.rates, len(pools), axis=0)
        return msgspec.structs.replace(trace, pools=pools, rates=rates, spread_rates=spread)
    missing = [pool for pool in pools if pool not in trace.pools]
    if missing:
        raise TraceError(
            f"trace {trace.name!r} has no throughputs for device type {missing[0]!r}",
            hint=f"it knows {', '.join(trace.pools)}; use these as types in the cluster file",
        )
    rows = [trace.pools.index(pool) for pool in pools]
    return msgspec.structs.replace(trace, pools=pools, rates=trace.rates[rows])
