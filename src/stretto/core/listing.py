"""List policies: an order, walked once, each job admitted if it fits.

A list policy declares itself with a `ListRule`. `decide` derives the decision from the declaration for
any snapshot; the simulator runs the same declaration incrementally (`stretto.sim.listrun`), looking at
one waiting job per width only. Property tests hold the two equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from stretto.core import levels as queues
from stretto.core.decision import Decision, Memory
from stretto.core.levels import Levels
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot


def by_submission(view: Snapshot) -> FloatArray:
    """Earlier first."""
    return view.submit_s


class ListRule(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration. Ties are broken by job number, unless `keeps_order` or `levels` say otherwise."""

    key: Callable[[Snapshot], FloatArray] = by_submission
    """Smaller goes first. Must stay the same while the job is active."""
    falls: Literal["never", "time", "service"] = "never"
    """Instead of `key`, a key that falls while the job runs: the time it still needs, in whole microseconds, by 1
    per microsecond; or that times its GPUs. A job of unknown length goes last."""
    admission: Literal["stop", "skip"] = "skip"
    """At a job that does not fit: stop the walk, or skip the job."""
    preempts: bool = False
    """Running jobs are walked with the others, and stopped when they do not fit any more. Otherwise they stand
    before all others and keep their workers."""
    size: Literal["requested", "min"] = "requested"
    running_first: bool = False
    """Among equal keys the running ones go first: only a strictly smaller key displaces them."""
    keeps_order: bool = False
    """Among equal keys the order of the last decision stands; newcomers go last."""
    levels: Levels | None = None
    """The order comes from multi-level queues; `key` is not used."""


class ListOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every list policy that Tiresias' own simulator has, too, can be told."""

    original: bool = False
    """Do exactly as Tiresias' simulator does, so that its results can be reproduced to the digit."""


def decide(rule: ListRule, view: Snapshot, memory: Memory = None) -> Decision:
    """Walk the jobs in the declared order."""
    running = view.workers > 0
    size = sizes(rule, view)
    if not rule.preempts:
        size = np.where(running, view.workers, size)
    need = size * view.width + view.fixed_milli
    arranged = queues.arrange(rule.levels, view, memory, size) if rule.levels else None
    order = arranged.order if arranged else _order(rule, view, running, memory)
    strict_from = len(order)
    if rule.admission == "stop":
        strict_from = 0 if rule.preempts else int(running.sum())
    fits, free = walk(need[order].tolist(), view.total_milli, strict_from)
    runs = np.empty(len(order), np.bool_)
    left = np.empty(len(order))
    runs[order], left[order] = fits, free
    reason, first, second = _reasons(rule, view, order, runs, need, left, arranged.level if arranged else None)
    wake_s = math.inf
    if rule.levels and arranged:
        memory, wake_s = arranged.kept, queues.next_change_s(rule.levels, view, arranged, runs)
    elif rule.keeps_order:
        memory = view.job[order]
    return Decision.of(view, np.where(runs, size, 0), reason, first, second, memory=memory, wake_s=wake_s)


def walk(needs: list[int], free: int, strict_from: int) -> tuple[list[bool], list[int]]:
    """Which of the jobs fit, one after the other, and what was free at the turn of each.

    From position `strict_from` on, the first job that does not fit ends the walk.
    """
    fits, frees = [], []
    for position, need in enumerate(needs):
        frees.append(free)
        fit = need <= free
        fits.append(fit)
        if fit:
            free -= need
        elif position >= strict_from:
            rest = len(needs) - len(fits)
            return fits + [False] * rest, frees + [free] * rest
    return fits, frees


def remaining(view: Snapshot, size: IntArray, service: bool = False) -> FloatArray:
    """The falling keys: whole microseconds that each job still needs at that size, or these times its GPUs."""
    left = np.rint(view.remaining_s(size) * 1e6)
    if service:
        with np.errstate(invalid="ignore"):
            left = left * (size * view.width + view.fixed_milli) / GPU
    left[np.isnan(left)] = math.inf
    return left


def sizes(rule: ListRule, view: Snapshot) -> IntArray:
    """Workers that each job gets if it runs."""
    if rule.size == "min":
        return view.min_workers
    return view.asked


def _order(rule: ListRule, view: Snapshot, running: BoolArray, memory: Memory) -> IntArray:
    key = rule.key(view)
    if rule.falls != "never":
        key = remaining(view, sizes(rule, view), rule.falls == "service")
    tie = view.job
    if rule.keeps_order and memory is not None and len(memory):
        by_number = np.argsort(memory)
        found = by_number[np.minimum(np.searchsorted(memory, view.job, sorter=by_number), len(memory) - 1)]
        tie = np.where(memory[found] == view.job, found, len(memory) + np.arange(len(view)))
    waits = ~running
    if not rule.preempts:
        return np.lexsort((tie, key, waits))
    return np.lexsort((tie, waits, key)) if rule.running_first else np.lexsort((tie, key))


def _reasons(
    rule: ListRule,
    view: Snapshot,
    order: IntArray,
    runs: BoolArray,
    need: IntArray,
    left: FloatArray,
    level: IntArray | None,
) -> tuple[IntArray, FloatArray, FloatArray]:
    """A reason for each job, with what it needs and what was left at its turn."""
    first, second = need / GPU, left / GPU
    waits = Reason.NO_ROOM if rule.admission == "skip" else Reason.BEHIND_HEAD
    reason = np.where(runs, np.int64(Reason.RUNS), np.int64(waits))
    stuck = ~runs & (view.workers == 0)
    if rule.admission == "stop" and stuck.any():
        head = order[np.argmax(stuck[order])]
        reason[head] = Reason.NO_ROOM
        first = np.where(reason == Reason.BEHIND_HEAD, first[head], first)
    if level is not None:
        lower = ~runs & (level > 0)
        reason[lower], first = Reason.LOWER_QUEUE, np.where(lower, level, first)
    stopped = ~runs & (view.workers > 0)
    reason[stopped], first = Reason.PREEMPTED, np.where(stopped, need / GPU, first)
    never = need > view.total_milli
    reason[never], first = Reason.TOO_LARGE, np.where(never, need / GPU, first)
    return reason, first, np.where(never, view.total_milli / GPU, second)
