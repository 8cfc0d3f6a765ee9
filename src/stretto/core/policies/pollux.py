"""Pollux (Qiao et al., OSDI'21): place all jobs anew every round so that goodput against a fair share is best.

The value of a placement is the harmonic mean over jobs of `goodput / goodput on a fair share`, where a fair share
is `ceil(GPUs / jobs)` workers and a job whose placement changes counts only `max(age - restarts * d, 0) / (age + d)`
of its speed, `d` being the cost of a resize: young jobs and jobs that were moved often stay where they are. Goodput
is the snapshot's throughput (per number of nodes where `spread_rates` tells), so the trace or the estimator
decides whether batch sizes adapt. A job may have at most twice the workers that it ever had: its speed beyond is
not known yet. At most one job that spans nodes may use a node, for their traffic would collide.

The search is genetic: a population of placements, the best of which survive; children take the first jobs of one
parent and the others of a second, some jobs go back to where they are now, some workers are dropped and added,
and what breaks a limit is repaired. The authors search for a second objective besides and then ignore it; we do not.
It is as random as `seed` says: the same snapshot and memory give the same answer.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from stretto.core import rounds
from stretto.core.decision import Decision, Memory
from stretto.core.options import Period, Seed
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

_STARVED = 4e-3
"""Speed-up that a job without workers counts as: the harmonic mean needs more than zero."""
_PER_EXTRA_NODE = 1e-3
"""Where the speed of a spread job is not known, each node beyond the first is taken to cost this share."""
_RESET, _THIN, _DROP = 0.1, 0.1, 0.1
"""Chance that a child's job goes back to its present place; that it is thinned; of each worker then."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    round_s: Period = 60.0
    """Placements are searched at multiples of so many seconds."""
    population: Annotated[int, msgspec.Meta(ge=1, le=10**4)] = 100
    """Placements that survive a generation of the search."""
    generations: Annotated[int, msgspec.Meta(ge=1, le=10**4)] = 100
    """How long a round's search is."""
    seed: Seed = 0
    """Of the search's random numbers."""


class Searched(msgspec.Struct, frozen=True):
    """What one round leaves for the next."""

    next_s: float
    rounds: int
    job: IntArray
    most: IntArray
    """Workers that each job had at most so far."""
    states: IntArray
    """[state, job, node] the population, best first."""


@policy(
    "pollux",
    traits=Traits(elastic=True, rounds=True, preempts="any", adapts_batch=True, uses=frozenset({"curve"})),
    options=Options,
)
def pollux(view: Snapshot, memory: Memory, options: Options) -> Decision:
    """Every round, the placement with the best harmonic mean of goodput over fair-share goodput, by genetic search."""
    last: Searched | None = memory
    if last is not None and rounds.too_early(view, last.next_s):
        return _wait(view, last)
    most = np.maximum(_carried(view, last), view.workers)
    next_s = rounds.next_start(view.now_s, options.round_s)
    assert next_s is not None
    found = Searched(next_s, 0 if last is None else last.rounds + 1, view.job, most, _no_states(view))
    if not len(view):
        return _wait(view, found)
    problem = Problem(view, most)
    random = np.random.default_rng([options.seed, found.rounds])
    states = _search(problem, _seeds(view, last, problem), options, random)
    return _decision(view, problem, found, states)


def _carried(view: Snapshot, last: Searched | None) -> IntArray:
    """Workers each job had at most, as remembered."""
    most = np.zeros(len(view), np.int64)
    if last is not None:
        _, now, then = np.intersect1d(view.job, last.job, assume_unique=True, return_indices=True)
        most[now] = last.most[then]
    return most


def _no_states(view: Snapshot) -> IntArray:
    return np.zeros((0, len(view), max(view.placed.shape[1], 1)), np.int64)


def _wait(view: Snapshot, memory: Searched) -> Decision:
    kept = rounds.keep(view, memory.next_s)
    return msgspec.structs.replace(kept, memory=memory, nodes=view.placed if view.placed.shape[1] else None)


class Problem:
    """One round's question, jobs with less attained service first: what a placement may be and is worth."""

    def __init__(self, view: Snapshot, most: IntArray) -> None:
        self.order = np.lexsort((view.job, view.submit_s, view.gpu_s))
        self.width = np.maximum(view.width[self.order], 1)
        self.fixed = view.fixed_milli[self.order]
        self.least = view.min_workers[self.order]
        self.most = np.minimum(view.max_workers, np.maximum(2 * most, view.min_workers))[self.order]
        self.capacity = view.total_milli
        self.now = self._now(view)
        self._resources(view)
        self.speedup = self._speedups(view)
        self.factor = self._restart_factor(view)
        self.jobs = np.arange(len(view))

    def _now(self, view: Snapshot) -> IntArray:
        """[job, node]; where GPUs are only counted the cluster is one large node."""
        placed = view.placed if view.placed.shape[1] else view.workers[:, None]
        return placed[self.order]

    def _resources(self, view: Snapshot) -> None:
        """Per resource that anybody asks for: what a worker takes [job, 1] and what a node has [node]."""
        nodes, demand = view.nodes, view.demand[self.order]
        self.takes: list[tuple[IntArray, IntArray]] = []
        # One large node is to be filled as fast as the nodes it stands for.
        self.grown = 1 if view.placed.shape[1] else max(len(nodes.name), 1)
        if not view.placed.shape[1]:
            self.takes.append((self.width[:, None], np.array([view.total_milli], np.int64)))
        else:
            self.takes.append((self.width[:, None], nodes.devices * GPU))
            for column, room in ((0, nodes.cpu_milli), (1, nodes.memory_mib)):
                if demand[:, column].any():
                    self.takes.append((demand[:, column, None], room))
        rooms = [np.where(take > 0, room // np.maximum(take, 1), self.most[:, None]) for take, room in self.takes]
        self.per_node = np.minimum(np.minimum.reduce(rooms), self.most[:, None])
        if view.placed.shape[1]:
            self.per_node[demand[:, 2, None] > nodes.gpu_memory_mib] = 0

    def _speedups(self, view: Snapshot) -> FloatArray:
        """[job, workers, nodes] goodput over that of a fair share."""
        curve = view.curve[self.order]
        top = view.rates.shape[2] - 1
        sizes = np.minimum(np.arange(int(self.most.max()) + 1), top)
        spans = np.arange(self.now.shape[1] + 1)
        if view.spread_rates is not None and view.placed.shape[1]:
            by_nodes = view.spread_rates[0][curve]
            goodput = by_nodes[:, sizes][:, :, np.minimum(spans, by_nodes.shape[2] - 1)]
        else:
            extra = 1.0 - _PER_EXTRA_NODE * np.clip(spans - 1, 0, 500)
            goodput = view.rates[0][curve][:, sizes][:, :, None] * extra
        fair = np.clip(-(-self.capacity // (self.width * len(view))), 1, top)
        base = view.rates[0, curve, fair]
        base = np.where(base > 0, base, view.rates[0, curve].max(axis=1))
        speedup: FloatArray = goodput / np.where(base > 0, base, 1.0)[:, None, None]
        speedup[:, 0] = 0.0
        return speedup

    def _restart_factor(self, view: Snapshot) -> FloatArray:
        """[job] what a job's speed counts when its placement changes."""
        age = view.now_s - view.submit_s
        cost_s = np.where(view.workers > 0, view.resize_s, view.start_s)
        moves = np.maximum(view.restarts - 1, 0)
        with np.errstate(invalid="ignore"):
            factor = np.maximum(age - moves * cost_s, 0.0) / (age + cost_s)
        return np.where(age + cost_s > 0, factor, 1.0)[self.order]

    def value(self, states: IntArray) -> FloatArray:
        """[state] the harmonic mean to be made large."""
        speed = self.speedup[self.jobs, states.sum(axis=2), np.count_nonzero(states, axis=2)]
        moved = (states != self.now).any(axis=2)
        counted = np.where(moved, speed * self.factor, speed)
        mean: FloatArray = len(self.jobs) / (1.0 / (counted + _STARVED)).sum(axis=1)
        return mean

    def repair(self, states: IntArray, nodes: IntArray) -> IntArray:
        """Cut what breaks a limit, from the later jobs first, and in the given order of nodes."""
        spread = (np.count_nonzero(states, axis=2) > 1)[:, :, None] & (states > 0)
        states = np.where(spread & (spread.cumsum(axis=1) > 1), 0, states)
        allowed = np.minimum(states[:, :, nodes].cumsum(axis=2), self.most[:, None])
        states = np.empty_like(states)
        states[:, :, nodes] = np.diff(allowed, axis=2, prepend=0)
        for take, room in self.takes:
            given = np.diff(np.minimum((states * take).cumsum(axis=1), room), axis=1, prepend=0)
            states = np.where(take > 0, given // np.maximum(take, 1), states)
        workers = states.sum(axis=2)
        held = np.where(workers > 0, workers * self.width + self.fixed, 0)
        stopped = (workers < self.least) | (held.cumsum(axis=1) > self.capacity)
        return np.where(stopped[:, :, None], 0, states)


def _seeds(view: Snapshot, last: Searched | None, problem: Problem) -> IntArray:
    """Where the search starts: things as they are, and what the last round found."""
    now = problem.now[None]
    if (problem.least > 1).any():
        # Chance rarely finds room for many workers at once: with what is free, and with everything.
        now = np.stack((problem.now, _minimums(problem, problem.now), _minimums(problem, np.zeros_like(problem.now))))
    if last is None or last.states.shape[2] != now.shape[2]:
        return now
    states = np.zeros((len(last.states), *now.shape[1:]), np.int64)
    _, here, there = np.intersect1d(view.job[problem.order], last.job, assume_unique=True, return_indices=True)
    states[:, here] = last.states[:, there]
    return np.concatenate((now, states))


def _minimums(problem: Problem, state: IntArray) -> IntArray:
    """Give jobs without workers their minimum, in order, on the roomiest nodes."""
    state = state.copy()
    for j in np.flatnonzero(state.sum(axis=1) == 0).tolist():
        room = problem.per_node[j]
        for take, has in problem.takes:
            free = has - (state * take).sum(axis=0)
            room = np.minimum(room, free // take[j]) if take[j] > 0 else room
        room = np.maximum(room, 0)
        if room.sum() >= problem.least[j]:
            nodes = np.argsort(-room, kind="stable")
            state[j, nodes] = np.diff(np.minimum(room[nodes].cumsum(), problem.least[j]), prepend=0)
    return state


def _search(problem: Problem, states: IntArray, options: Options, random: np.random.Generator) -> IntArray:
    """The last population, best first."""
    nodes = states.shape[2]
    states = problem.repair(states, np.arange(nodes))
    values = problem.value(states)
    for _ in range(options.generations):
        children = _mutate(problem, _cross(states, options.population, random), random)
        children = problem.repair(children, random.permutation(nodes))
        states = np.concatenate((states, children))
        values = np.concatenate((values, problem.value(children)))
        states, values = _survivors(states, values, options.population, random)
    return states


def _cross(states: IntArray, count: int, random: np.random.Generator) -> IntArray:
    """Each child takes the first jobs of one parent and the rest of another; the better of two is a parent."""
    parents = random.integers(len(states), size=(2, 2, count)).min(axis=0)
    point = random.integers(states.shape[1], size=(count, 1, 1))
    first = np.arange(states.shape[1])[:, None] < point
    children: IntArray = np.where(first, states[parents[0]], states[parents[1]])
    return children


def _mutate(problem: Problem, states: IntArray, random: np.random.Generator) -> IntArray:
    """Put some jobs back to their present place, drop some workers, then add some where there is room."""
    rows = states.shape[:2]
    states = np.where((random.random(rows) < _RESET)[:, :, None], problem.now, states)
    thin = np.where(random.random(rows) < _THIN, _DROP, 0.0)[:, :, None]
    states = np.where(random.random(states.shape) < thin, 0, states)
    room = np.ones(states.shape, np.bool_)
    for take, has in problem.takes:
        room &= take <= (has - (states * take).sum(axis=1))[:, None, :]
    anyone, present = _some_in(room, problem.grown), _some_in(room & (states > 0), problem.grown)
    grows = random.random(states.shape) < anyone + present - anyone * present
    more = states + np.floor(random.random(states.shape) * (np.maximum(problem.per_node - states, 0) + 1)).astype(int)
    return np.where(grows, more, states)


def _some_in(room: BoolArray, count: int) -> FloatArray:
    """Chances such that so many jobs per node are picked on average from those that have room there."""
    chance: FloatArray = room * np.minimum(count / np.maximum(room.sum(axis=1, keepdims=True), 1), 1.0)
    return chance


def _survivors(
    states: IntArray, values: FloatArray, count: int, random: np.random.Generator
) -> tuple[IntArray, FloatArray]:
    """The best placements, each once (told apart by a hash); of equals the older stays."""
    marks = states.reshape(len(states), -1) @ random.integers(1 << 62, size=states[0].size)
    _, first = np.unique(marks, return_index=True)
    best = first[np.lexsort((first, -values[first]))][:count]
    return states[best], values[best]


def _decision(view: Snapshot, problem: Problem, found: Searched, states: IntArray) -> Decision:
    """The best of the population, back in the order of the snapshot, with reasons."""
    back = np.argsort(problem.order)
    best, nodes = states[0], states[0][back]
    workers = nodes.sum(axis=1)
    speed = problem.speedup[problem.jobs, best.sum(axis=1), np.count_nonzero(best, axis=1)][back]
    held = np.where(workers > 0, workers * view.width + view.fixed_milli, 0).sum()
    left = (view.total_milli - held) / GPU
    need = (view.min_workers * view.width + view.fixed_milli) / GPU
    waits = (workers == 0) & (need > left)
    reason = np.full(len(view), int(Reason.CHOSEN_BY_SOLVER))
    reason[waits] = int(Reason.NO_ROOM)
    reason[waits & (view.workers > 0)] = int(Reason.PREEMPTED)
    return Decision.of(
        view,
        workers,
        reason,
        np.where(waits, need, workers),
        np.where(waits, left, speed),
        memory=msgspec.structs.replace(found, states=states[:, back]),
        wake_s=found.next_s,
        nodes=nodes if view.placed.shape[1] else None,
    )
