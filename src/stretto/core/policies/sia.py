"""Sia: one configuration per job, chosen for all jobs and device types at once.

Jayaram Subramanya et al., SOSP 2023. Every round (60 s) an integer programme is solved:

- A configuration is a device type with a number of workers: 1, 2, 4 … up to a full node, then whole nodes, within
  the job's limits; its minimum, its maximum and its present size always belong to them. A job that does not scale
  just chooses its type.
- Its goodput G (here: throughput) is divided by the job's smallest over all its configurations and multiplied by
  its minimum, so a job is compared with itself. A running job's other configurations are multiplied by
  r = (age - restarts x cost) / (age + cost), at least 0: what a further restart would leave of its goodput. Until
  it has attained as many GPU-seconds as a restart costs seconds, r is 1.
- Minimise the sum of G^p over the chosen configurations plus lambda for every job left without one, with at most
  one configuration per job and no device type overcommitted. p = -0.5, lambda = 1.1. A term G^p of more than 1,
  which only r can cause, is pressed between 1 and lambda: stopping a job must never look better than moving it.

With these constants a first worker is worth 0.1 and a doubling 0.29: under load Sia widens the jobs it runs and
lets others wait, whoever they are.

With one device type the programme is a multiple-choice knapsack and is solved exactly without a solver. With
several, up to `exact_jobs` jobs go to HiGHS as they are. Beyond that the linear relaxation is solved first; it
leaves at most one fractional job per device type, and its prices tell how close each job's decision was. The
`exact_jobs` closest ones, the fractional ones among them, are decided again by the integer programme, the others
stay as they are.

`explore` = 2 limits a job that has not been seen larger to twice its largest size so far (its smallest
configuration at first), as Sia does while it learns a job's scaling; 0 trusts the curves.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np

from stretto.core import knapsack, marginal, rounds
from stretto.core.decision import Decision, Memory
from stretto.core.options import PeriodOrZero
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot
from stretto.errors import MissingExtra

_GAP = 1e-4
_NODES = 1000
"""Where a search for the optimum ends: by its size, not by a clock, so that answers repeat."""
_TINY = 1e-6


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    round_s: PeriodOrZero = 60.0
    """0: decide whenever something happens; otherwise only at multiples of so many seconds."""
    power: Annotated[float, msgspec.Meta(ge=-100, lt=0)] = -0.5
    """p: goodput counts to this power."""
    penalty: Annotated[float, msgspec.Meta(gt=1, le=1e6)] = 1.1
    """Lambda: what it costs to leave a job out. More than 1, or jobs would be left out on purpose."""
    explore: Annotated[int, msgspec.Meta(ge=0, le=10**6)] = 0
    """How many times its largest size so far a job may get; 0: any size."""
    exact_jobs: Annotated[int, msgspec.Meta(ge=8, le=10**4)] = 64
    """With several device types: so many jobs are decided by the integer programme, the others by its relaxation."""


class Seen(msgspec.Struct, frozen=True):
    """The memory: when the next round starts, and the largest size of each job so far."""

    due_s: float | None
    job: IntArray
    largest: IntArray


class Choices(msgspec.Struct, frozen=True):
    """The configurations of all jobs, one entry each, in order of job, device type and size."""

    row: IntArray
    """Which job."""
    pool: IntArray
    workers: IntArray
    milli: IntArray
    worth: FloatArray
    """What choosing it is worth against leaving the job out."""


@policy(
    "sia",
    traits=Traits(
        preempts="any",
        elastic=True,
        rounds=True,
        uses=frozenset({"curve"}),
        pools=True,
    ),
    options=Options,
)
def sia(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Device type and workers of every job by an integer programme over normalised goodput, in rounds."""
    if memory is not None and rounds.too_early(view, memory.due_s):
        return msgspec.structs.replace(rounds.keep(view, memory.due_s), memory=memory)
    largest = _largest(view, memory)
    choices = configurations(view, largest, options)
    chosen = solve(choices, len(view), view.capacity, options.exact_jobs)
    workers, pool = np.zeros(len(view), np.int64), np.maximum(view.pool, 0)
    workers[choices.row[chosen]] = choices.workers[chosen]
    pool[choices.row[chosen]] = choices.pool[chosen]
    due_s = rounds.next_start(view.now_s, options.round_s)
    seen = Seen(due_s, view.job, np.maximum(largest, workers))
    return _explained(view, workers, pool, choices, chosen, seen)


def _largest(view: Snapshot, memory: Seen | None) -> IntArray:
    largest = view.workers.copy()
    if memory is not None and len(memory.job):
        at = np.minimum(np.searchsorted(memory.job, view.job), len(memory.job) - 1)
        known = memory.job[at] == view.job
        largest = np.maximum(largest, np.where(known, memory.largest[at], 0))
    return largest


def configurations(view: Snapshot, largest: IntArray, options: Options) -> Choices:
    """Every job's configurations with what they are worth."""
    top = view.rates.shape[2] - 1
    count = int(np.maximum(marginal.useful_maximum(view), view.workers).max(initial=0))
    size = np.arange(count + 1)
    allowed = np.stack([_on_pool(view, size, largest, p, options.explore) for p in range(len(view.pools))], axis=1)
    row, pool, workers = np.nonzero(allowed)
    rate = view.rates[pool, view.curve[row], np.minimum(workers, top)]
    useful = rate > 0
    row, pool, workers, rate = row[useful], pool[useful], workers[useful], rate[useful]
    milli = workers * view.width[row] + view.fixed_milli[row]
    cost = _goodput(view, row, pool, workers, rate) ** options.power
    worth = np.where(cost <= 1, options.penalty - cost, (options.penalty - 1) / cost)
    return Choices(row, pool, workers, milli, worth)


def _on_pool(view: Snapshot, size: IntArray, largest: IntArray, p: int, explore: int) -> BoolArray:
    """[job, size]: the sizes that are configurations on one device type."""
    low, high, width = view.min_workers[:, None], marginal.useful_maximum(view)[:, None], view.width[:, None]
    devices = int(view.nodes.devices[view.nodes.pool == p].max(initial=1))
    per_node = np.maximum(devices * GPU // np.maximum(width, 1), 1)
    power_of_two = size & (size - 1) == 0
    ladder = np.where(size < per_node, power_of_two, size % per_node == 0) & (size >= low) & (size <= high)
    ladder |= size == high
    if explore:
        ladder &= size <= explore * largest[:, None]
    present = (size == view.workers[:, None]) & (view.pool == p)[:, None]
    fits = size * width + view.fixed_milli[:, None] <= view.capacity[p]
    allowed: BoolArray = (ladder | (size == low) | present) & fits & (size > 0)
    return allowed


def _goodput(view: Snapshot, row: IntArray, pool: IntArray, workers: IntArray, rate: FloatArray) -> FloatArray:
    """Of each configuration: against the job's own smallest, and after what a restart costs it."""
    slowest = np.full(len(view), np.inf)
    np.minimum.at(slowest, row, rate)
    age_s, cost_s = view.now_s - view.submit_s, view.resize_s
    kept_s = np.maximum(age_s - view.restarts * cost_s, 0.0)
    after = np.divide(kept_s, age_s + cost_s, out=np.ones(len(view)), where=view.gpu_s >= np.maximum(cost_s, _TINY))
    moves = (view.workers[row] > 0) & ((workers != view.workers[row]) | (pool != view.pool[row]))
    factor = np.where(moves, np.maximum(after[row], _TINY), 1.0)
    goodput: FloatArray = rate / slowest[row] * view.min_workers[row] * factor
    return goodput


def solve(choices: Choices, jobs: int, capacity: IntArray, exact_jobs: int) -> IntArray:
    """Which entries of `choices` are chosen."""
    if not len(choices.row):
        return np.zeros(0, np.int64)
    if choices.pool.min() == choices.pool.max():
        return _by_knapsack(choices, int(capacity[choices.pool[0]]))
    if len(np.unique(choices.row)) <= exact_jobs:
        return _by_integer_programme(choices, np.arange(len(choices.row)), jobs, capacity)
    return _by_relaxation(choices, jobs, capacity, exact_jobs)


def _by_knapsack(choices: Choices, capacity: int) -> IntArray:
    """Exact, for one device type."""
    _, start, index, count = np.unique(choices.row, return_index=True, return_inverse=True, return_counts=True)
    rank = np.arange(len(choices.row)) - start[index] + 1
    worth = np.full((len(start), int(count.max()) + 1), -np.inf)
    milli = np.zeros(worth.shape, np.int64)
    worth[:, 0] = 0.0
    worth[index, rank], milli[index, rank] = choices.worth, choices.milli
    choice = knapsack.choose(worth, milli, capacity)
    chosen: IntArray = (start + choice - 1)[choice > 0]
    return chosen


def _by_integer_programme(choices: Choices, among: IntArray, jobs: int, capacity: IntArray) -> IntArray:
    """The best of the entries in `among`, to within a gap of 0.01 %."""
    optimize, sparse = _scipy()
    answer = optimize.milp(
        -choices.worth[among],
        constraints=optimize.LinearConstraint(*_constraints(sparse, choices, among, jobs, capacity)),
        integrality=np.ones(len(among)),
        bounds=optimize.Bounds(0, 1),
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    chosen = among[answer.x > 0.5] if answer.x is not None else among[:0]
    return _trimmed(choices, chosen, capacity)


def _by_relaxation(choices: Choices, jobs: int, capacity: IntArray, exact_jobs: int) -> IntArray:
    """The linear relaxation, and the integer programme for the jobs whose decision is close."""
    optimize, sparse = _scipy()
    everything = np.arange(len(choices.row))
    matrix, _, limit = _constraints(sparse, choices, everything, jobs, capacity)
    answer = optimize.linprog(-choices.worth, A_ub=matrix, b_ub=limit, bounds=(0, None), method="highs-ipm")
    if answer.x is None:
        return _by_integer_programme(choices, everything, jobs, capacity)
    share, price = answer.x, -answer.ineqlin.marginals[jobs:]
    closest = np.argsort(_margins(choices, jobs, price), kind="stable")[:exact_jobs]
    again = np.zeros(jobs, np.bool_)
    again[closest] = True
    again[choices.row[(share > _TINY) & (share < 1 - _TINY)]] = True
    fixed = np.flatnonzero((share > 0.5) & ~again[choices.row])
    used = np.bincount(choices.pool[fixed], weights=choices.milli[fixed], minlength=len(capacity)).astype(np.int64)
    among = np.flatnonzero(again[choices.row])
    return np.concatenate((fixed, _by_integer_programme(choices, among, jobs, capacity - used)))


def _margins(choices: Choices, jobs: int, price: FloatArray) -> FloatArray:
    """By how much, at these prices per GPU, each job's best configuration beats its second best (or none)."""
    reduced = choices.worth - price[choices.pool] * choices.milli / GPU
    best, second = np.zeros(jobs), np.full(jobs, -np.inf)
    np.maximum.at(best, choices.row, reduced)
    behind = reduced < best[choices.row]
    np.maximum.at(second, choices.row[behind], reduced[behind])
    return best - np.where(best > 0, np.maximum(second, 0.0), second)


def _constraints(sparse: Any, choices: Choices, among: IntArray, jobs: int, capacity: IntArray) -> tuple[Any, Any, Any]:
    """At most one configuration per job; no device type overcommitted: matrix, lower and upper limits."""
    column = np.arange(len(among))
    shape = (jobs + len(capacity), len(among))
    row = np.concatenate((choices.row[among], jobs + choices.pool[among]))
    entries = np.concatenate((np.ones(len(among)), choices.milli[among] / GPU))
    matrix = sparse.csr_array((entries, (row, np.concatenate((column, column)))), shape=shape)
    return matrix, -np.inf, np.concatenate((np.ones(jobs), capacity / GPU))


def _trimmed(choices: Choices, chosen: IntArray, capacity: IntArray) -> IntArray:
    """Solvers work to a tolerance: leave out the least worth while a device type is overcommitted by a hair."""
    for p in range(len(capacity)):
        while choices.milli[chosen][choices.pool[chosen] == p].sum() > capacity[p]:
            here = np.flatnonzero(choices.pool[chosen] == p)
            chosen = np.delete(chosen, here[np.argmin(choices.worth[chosen[here]])])
    return chosen


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise MissingExtra(
            "policy sia needs scipy to choose between several device types",
            hint="install it with: pip install 'stretto[solver]'",
        ) from None
    return optimize, sparse


def _explained(
    view: Snapshot, workers: IntArray, pool: IntArray, choices: Choices, chosen: IntArray, seen: Seen
) -> Decision:
    worth = np.zeros(len(view))
    worth[choices.row[chosen]] = choices.worth[chosen]
    used = np.bincount(choices.pool[chosen], weights=choices.milli[chosen], minlength=len(view.pools))
    room = float((view.capacity - used).max(initial=0)) / GPU
    need = marginal.smallest_need(view) / GPU
    most = float(view.capacity.max(initial=0)) / GPU
    waits = workers == 0
    told = marginal.Told(len(view), Reason.CHOSEN_BY_SOLVER, workers, worth)
    told.because(Reason.NO_ROOM, waits & (need > room), need, room)
    told.because(Reason.PREEMPTED, waits & (view.workers > 0), need, room)
    told.because(Reason.TOO_LARGE, waits & (need > most), need, most)
    wake_s = math.inf if seen.due_s is None else seen.due_s
    return Decision.of(view, workers, told.reason, told.first, told.second, pool=pool, memory=seen, wake_s=wake_s)
