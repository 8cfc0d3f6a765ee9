"""Gavel (OSDI'20): time shares on every device type from a linear programme, realised in rounds.

X[j, t] is the fraction of time job j should spend on type t, with T[j, t] its steps/s there on the g[j] GPUs it
asked for, N[t] the GPUs of the type, and e[j] = sum over t of T X its effective throughput. Always X ≥ 0,
sum over t of X[j, t] ≤ 1 and sum over j of g[j] X[j, t] ≤ N[t]. The objectives:

max-min             max min over j of  g[j] e[j] / (weight[j] × mean of T[j, t] over all GPUs of the cluster);
makespan            max min over j of  e[j] / work left of j, so that all end together, as soon as they can;
max-sum-throughput  max sum over j of  e[j];
fifo                no programme: in order of arrival each job gets its fastest type that has room, for all of the
                    time; the first for which there is room nowhere ends the walk.

With `perf=false` types count alike: T is 1 in max-min, and the fastest type's elsewhere.

The first two have many optima. Gavel takes what its interior-point solver ends in, and that choice matters more than
the last percent of the optimum: on its own traces, corners of the optimal face cost up to 45 % of mean completion
time. So here too a central one is taken (`core.shares`): it spreads a job over the types that serve it alike and
leaves nobody at zero.

Rounds realise X. A round lasts `round_s`, or until all its jobs are done if that is sooner; GPUs of a job that
ends before stay idle. Type by type, the fastest first (in turn without perf), jobs are taken while they fit, by
X / (time received on the type since the last solution + half a round − what earlier solutions promised and rounds
did not give), and among those that are owed more than they received by how much they are owed. X is solved anew
when jobs or GPUs have come or gone, but only every `reset_s` (unless the last round left nobody); until then new
jobs use what is left.

Gavel's own simulator (`original=true`) lets new jobs wait for a solution even beside idle GPUs, and forgets at each
solution what is owed, except to break exact ties; so a stream of narrow jobs keeps a wide one waiting for ever.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from stretto.core import shares
from stretto.core.decision import Decision, Memory
from stretto.core.options import Period, Seconds
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

_SHORTEST_S = 1.0
"""No round is shorter, and no job is taken to have less work left."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    objective: Literal["max-min", "makespan", "max-sum-throughput", "fifo"] = "max-min"
    """What the linear programme makes best."""
    perf: bool = True
    """Whether throughputs per device type are used."""
    round_s: Period = 360.0
    """Who runs is decided at multiples of so many seconds."""
    reset_s: Seconds = 1920.0
    """The least time between two solutions."""
    original: bool = False
    """As in Gavel's simulator: new jobs wait for a solution, and what a job is owed is forgotten at the next one."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What each job was promised and got, per pool, and where the round stands."""

    job: IntArray
    covered: BoolArray
    """Whether the last solution knew the job."""
    share: FloatArray
    received_s: FloatArray
    """Since the last solution."""
    deficit_s: FloatArray
    """Promised but not received, up to the last solution."""
    capacity: IntArray
    """What the last solution shared out."""
    stale: bool
    """Jobs or GPUs have come or gone since the last solution."""
    solved_s: float
    due_s: float
    """When the next solution may be made."""
    start_s: float
    end_s: float
    rounds: int


@policy(
    "gavel",
    traits=Traits(preempts="any", rounds=True, pools=True, uses=frozenset({"curve", "length", "priority"})),
    options=Options,
)
def gavel(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Time shares on every device type by linear programme (max-min, makespan, …), realised in rounds."""
    account = memory if _continues(view, memory) else None
    if account is not None and view.now_s < account.end_s and _goes_on(view):
        return _wait(view, account)
    speed = _speeds(view)
    account = _carry_over(view, account)
    if account.stale and (view.now_s >= account.due_s or not view.workers.any()):
        account = _solve_again(view, account, options, speed)
    workers, pool, left = _pick(view, account, options, speed)
    end_s = view.now_s + _length_s(view, options, speed, workers, pool)
    account = msgspec.structs.replace(account, start_s=view.now_s, end_s=end_s, rounds=account.rounds + 1)
    reason, first, second = _explain(view, account, options, workers, pool, left)
    return Decision.of(view, workers, reason, first, second, pool=pool, memory=account, wake_s=end_s)


def _size(view: Snapshot) -> IntArray:
    """Workers of each job whenever it runs: jobs are rigid here."""
    size: IntArray = np.clip(view.requested, view.min_workers, view.max_workers)
    return size


def _need(view: Snapshot) -> IntArray:
    need: IntArray = _size(view) * view.width + view.fixed_milli
    return need


# Between rounds.


def _continues(view: Snapshot, memory: Memory) -> bool:
    return isinstance(memory, Account) and len(memory.capacity) == len(view.pools)


def _goes_on(view: Snapshot) -> bool:
    """Whether the round does: somebody runs, every running job is whole, and there is still room for all."""
    runs = view.workers > 0
    used = np.bincount(view.pool[runs], weights=_need(view)[runs], minlength=len(view.pools))
    return bool(runs.any() and (view.workers == _size(view))[runs].all() and (used <= view.capacity).all())


def _wait(view: Snapshot, account: Account) -> Decision:
    n, runs, pool = len(view), view.workers > 0, np.maximum(view.pool, 0)
    old, at = _find(account.job, view.job)
    share = np.zeros(n)
    share[old] = account.share[at[old], pool[old]]
    return Decision.of(
        view,
        view.workers,
        np.where(runs, Reason.CHOSEN_BY_SOLVER, Reason.WAITS_FOR_ROUND).astype(np.int64),
        np.where(runs, view.workers, account.end_s - view.now_s),
        share,
        pool=pool,
        memory=account,
        wake_s=account.end_s,
    )


def _carry_over(view: Snapshot, before: Account | None) -> Account:
    """The account for the jobs of now, with the round that just ended written into it."""
    n, k = len(view), len(view.pools)
    after = Account(
        job=view.job,
        covered=np.zeros(n, np.bool_),
        share=np.zeros((n, k)),
        received_s=np.zeros((n, k)),
        deficit_s=np.zeros((n, k)),
        capacity=view.capacity,
        stale=True,
        solved_s=view.now_s,
        due_s=view.now_s,
        start_s=view.now_s,
        end_s=view.now_s,
        rounds=0,
    )
    if before is None:
        return after
    old, at = _find(before.job, view.job)
    for column in ("covered", "share", "received_s", "deficit_s"):
        getattr(after, column)[old] = getattr(before, column)[at[old]]
    ran = np.flatnonzero(view.workers)
    after.received_s[ran, view.pool[ran]] += view.now_s - before.start_s
    changed = not np.array_equal(before.job, view.job) or not np.array_equal(before.capacity, view.capacity)
    return msgspec.structs.replace(
        after,
        capacity=before.capacity,
        stale=before.stale or changed,
        solved_s=before.solved_s,
        due_s=before.due_s,
        rounds=before.rounds,
    )


def _find(known: IntArray, wanted: IntArray) -> tuple[BoolArray, IntArray]:
    """Which of the wanted jobs are known, and where; both ascending."""
    at = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    old = known[at] == wanted if len(known) else np.zeros(len(wanted), np.bool_)
    return old, at


# The solution.


def _speeds(view: Snapshot) -> FloatArray:
    """[job, pool] steps/s, 0 where the job cannot run; unknown everywhere counts as 1."""
    speed = np.stack([view.rate(_size(view), pool) for pool in range(len(view.pools))], axis=1)
    speed = np.where(speed.any(axis=1, keepdims=True), speed, 1.0)
    return np.where(_need(view)[:, None] <= view.capacity, speed, 0.0)


def _solve_again(view: Snapshot, account: Account, options: Options, speed: FloatArray) -> Account:
    promised = account.share * (view.now_s - account.solved_s)
    return msgspec.structs.replace(
        account,
        covered=np.ones(len(view), np.bool_),
        share=_shares(view, options, speed),
        received_s=np.zeros(speed.shape),
        deficit_s=account.deficit_s + promised - account.received_s,
        capacity=view.capacity,
        stale=False,
        solved_s=view.now_s,
        # The very first solution, for whoever happened to come first, does not keep the next ones waiting.
        due_s=view.now_s + (options.reset_s if account.rounds else 0.0),
    )


def _shares(view: Snapshot, options: Options, speed: FloatArray) -> FloatArray:
    """X of the chosen objective; jobs that can run nowhere get none, and there is no time of types without GPUs."""
    speed = np.where(view.capacity > 0, speed, 0.0)
    able = np.flatnonzero(speed.any(axis=1))
    share = np.zeros(speed.shape)
    if not len(able):
        return share
    speed = speed[able]
    gpus, capacity = np.maximum(_need(view)[able], 1) / GPU, view.capacity / GPU
    counted = speed if options.perf else np.where(speed > 0, speed.max(axis=1, keepdims=True), 0.0)
    if options.objective == "fifo":
        share[able] = shares.in_order(counted, gpus, capacity)
    elif options.objective == "max-sum-throughput":
        share[able] = shares.most(counted, gpus, capacity)
    elif options.objective == "makespan":
        share[able] = shares.fairest(counted / _work(view, options, speed, able)[:, None], gpus, capacity)
    else:
        weight = np.maximum(view.priority[able], 1)
        fair = counted @ (capacity / capacity.sum())
        share[able] = shares.fairest(counted * (gpus / weight / fair)[:, None], gpus, capacity)
    return share


def _work(view: Snapshot, options: Options, speed: FloatArray, able: IntArray) -> FloatArray:
    """Steps left; a job of unknown length is taken to be half done, but good for another round."""
    best = speed.max(axis=1)
    guess = np.maximum(view.done[able], best * options.round_s)
    left = np.where(np.isnan(view.remaining[able]), guess, view.remaining[able])
    work: FloatArray = np.maximum(left, best * _SHORTEST_S)
    return work


# The round.


def _pick(view: Snapshot, account: Account, options: Options, speed: FloatArray) -> tuple[IntArray, IntArray, IntArray]:
    """Workers and pool of every job in this round, and for those that wait the most room there was at their turn."""
    n = len(view)
    received = account.received_s + options.round_s / 2
    if not options.original:
        received = np.maximum(received - np.maximum(account.deficit_s, 0.0), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        priority = np.where(account.share > 0, account.share / received, 0.0)
    workers, pool, left = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    allowed = speed > 0
    if options.original:
        allowed &= account.covered[:, None]
    if options.objective == "fifo":
        allowed &= account.share > 0
    size, need = _size(view), _need(view).tolist()
    for p in _pool_order(options, speed, account.rounds):
        free = int(view.capacity[p])
        order = np.lexsort((view.job, -account.share[:, p], -account.deficit_s[:, p], -priority[:, p]))
        for j in order[allowed[order, p] & (workers[order] == 0)].tolist():
            left[j] = max(left[j], free)
            if need[j] <= free:
                free -= need[j]
                workers[j], pool[j] = size[j], p
    return workers, pool, left


def _pool_order(options: Options, speed: FloatArray, rounds: int) -> list[int]:
    """The fastest type first; without perf each goes first in turn."""
    k = speed.shape[1]
    if not options.perf:
        return [(p + rounds) % k for p in range(k)]
    relative = speed / np.maximum(speed.max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    order: list[int] = np.argsort(-relative.sum(axis=0), kind="stable").tolist()
    return order


def _length_s(view: Snapshot, options: Options, speed: FloatArray, workers: IntArray, pool: IntArray) -> float:
    runs = np.flatnonzero(workers)
    if not len(runs):
        return options.round_s
    # A job that starts, or started a moment ago, makes no progress before its start is paid for.
    since_s = np.where(view.workers > 0, view.now_s - view.changed_s, 0.0)
    pause_s = np.maximum(view.start_s - since_s, 0.0)
    longest = float((pause_s[runs] + view.remaining[runs] / speed[runs, pool[runs]]).max())
    return min(options.round_s, max(longest, _SHORTEST_S)) if longest < options.round_s else options.round_s


def _explain(
    view: Snapshot, account: Account, options: Options, workers: IntArray, pool: IntArray, left: IntArray
) -> tuple[IntArray, FloatArray, FloatArray]:
    n, runs, need, largest = len(view), workers > 0, _need(view) / GPU, view.capacity.max() / GPU
    behind = (account.share <= 0).all(axis=1) & ~runs & (options.objective == "fifo")
    unsolved = ~account.covered & ~runs & options.original
    reason = np.where(view.workers > 0, Reason.PREEMPTED, Reason.NO_ROOM).astype(np.int64)
    first, second = need, left / GPU
    for which, code, one, two in (
        (runs, Reason.CHOSEN_BY_SOLVER, workers, account.share[np.arange(n), pool]),
        (behind, Reason.WAITS_FOR_TURN, np.cumsum(behind) - 1, 0.0),
        (unsolved, Reason.WAITS_FOR_ROUND, max(account.due_s, account.end_s) - view.now_s, 0.0),
        (need > largest, Reason.TOO_LARGE, need, largest),
    ):
        reason = np.where(which, np.int64(code), reason)
        first, second = np.where(which, one, first), np.where(which, two, second)
    return reason, first, second
