"""The incremental runner of list policies.

It runs what a policy declares (`core.listing.ListRule`), without snapshots, and leaves behind exactly what the general
engine would. `Run` is the part that all have in common: the clock, arrivals, progress and ends of jobs. How the
next decision is found is left to subclasses:

- `listheads`: the order of waiting jobs never changes, so only the first of each width is looked at;
- `listlevels`: the same for multi-level queues, whose jobs change places at known moments;
- `listwalk`: every running job is looked at in every decision, for orders that depend on the last one, or on an index.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from heapq import heappop, heappush

import msgspec
import numpy as np

from stretto.core.listing import ListRule
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, Nodes
from stretto.sim import cluster as clusters
from stretto.sim import levels
from stretto.sim.trace import Trace
from stretto.sim.turns import IDLE_TURNS, REPORT_EVERY, Progress, stuck
from stretto.sim.world import Change, Result, Settings


def applies(trace: Trace, pools: tuple[str, ...], policy: Policy, settings: Settings) -> bool:
    """Whether the policy is a list, and this world simple enough: counted GPUs of one type, nothing is lost."""
    rule = policy.rule
    if rule is None or (rule.preempts and rule.admission == "stop"):
        return False
    if rule.levels is not None and not rule.levels.running_first:
        return False
    told = settings.lengths == "known" and settings.curves == "true" and not settings.estimate_sd
    if rule.falls != "never" and not told:
        return False
    if settings.slot_s or settings.gap_s or settings.placement or settings.failures or settings.contention:
        return False
    if settings.join_s or settings.leave_s:
        return False
    if levels.stakes(trace, settings) is not None:
        return False
    return len(pools) == 1 and not trace.services and not trace.phases


def run(
    trace: Trace, pools: tuple[str, ...], nodes: Nodes, policy: Policy, settings: Settings, progress: Progress | None
) -> Result:
    """Run the trace to its end."""
    from stretto.sim.listheads import Heads, Partitioned
    from stretto.sim.listlevels import LevelHeads
    from stretto.sim.listwalk import LevelWalk, Walk

    rule = policy.rule
    assert rule is not None
    kind: type[Run] = Partitioned if rule.running_first else Heads
    if rule.levels:
        kind = LevelWalk if rule.levels.index else LevelHeads
    elif rule.keeps_order:
        kind = Walk
    return kind(World(trace, pools, nodes, policy, rule, settings, progress)).run()


class World(msgspec.Struct, frozen=True):
    """What is run."""

    trace: Trace
    pools: tuple[str, ...]
    nodes: Nodes
    policy: Policy
    rule: ListRule
    settings: Settings
    progress: Progress | None


class Run(ABC):
    """The state of one run; columns are lists with an entry per job of the trace."""

    def __init__(self, world: World) -> None:
        trace, rule = world.trace, world.rule
        n = len(trace)
        size = trace.min_workers
        if rule.size == "requested":
            size = np.clip(trace.requested, trace.min_workers, trace.max_workers)
        top = trace.rates.shape[2] - 1
        self.world, self.rule = world, rule
        self.room = int(clusters.capacity(world.pools, world.nodes).sum())
        """Milli-GPU of the cluster."""
        self.submit_s: list[float] = trace.submit_s.tolist()
        self.size: list[int] = size.tolist()
        self.width: list[int] = trace.width.tolist()
        self.need: list[int] = (size * trace.width).tolist()
        self.rate: list[float] = trace.rates[0, trace.curve, np.minimum(size, top)].tolist()
        self.left: list[float] = trace.work.tolist()
        """Work left at the last change."""
        self.pause_s: list[float] = levels.column_s(trace.start_s, world.settings.start_s, n).tolist()
        """What a start costs each job."""
        self.changed_s: list[float] = self.submit_s.copy()
        self.anchor_s = [0.0] * n
        """When progress began, after the pause of a start."""
        self.epoch = [0] * n
        """Counts starts and stops; what was queued for an earlier epoch is void."""
        self.held = [0.0] * n
        self.paused_s = [0.0] * n
        self.start_s = [math.nan] * n
        self.finish_s = [math.nan] * n
        self.preemptions = [0] * n
        self.running: set[int] = set()
        self.finishing: list[tuple[float, int, int]] = []
        self.changes: list[Change] = []
        self.news: list[Change] = []
        self.now_s, self.wake_s = 0.0, math.inf
        self.arrived = self.ended = self.events = self.decisions = self.idle = 0

    def run(self) -> Result:
        """All turns, to the end of the last job."""
        n = len(self.submit_s)
        while self.ended < n:
            self.now_s = now_s = self._next_moment()
            self.events += 1
            touched = False
            while self.finishing and self.finishing[0][0] <= now_s:
                _, j, epoch = heappop(self.finishing)
                if self.epoch[j] == epoch:
                    touched = True
                    self._finish(j)
            while self.arrived < n and self.submit_s[self.arrived] <= now_s:
                touched = True
                self.arrive(self.arrived)
                self.arrived += 1
            if touched or now_s >= self.wake_s:
                self._turn()
            if self.world.progress is not None and self.events % REPORT_EVERY == 0:
                self.world.progress(self.ended, n)
        return self._result()

    def _next_moment(self) -> float:
        finishing, epoch = self.finishing, self.epoch
        while finishing and epoch[finishing[0][1]] != finishing[0][2]:
            heappop(finishing)
        moment = self.wake_s
        if finishing and finishing[0][0] < moment:
            moment = finishing[0][0]
        if self.arrived < len(self.submit_s) and self.submit_s[self.arrived] < moment:
            moment = self.submit_s[self.arrived]
        self.idle = self.idle + 1 if moment == self.wake_s else 0
        if moment == math.inf or self.idle > IDLE_TURNS:
            first = next(j for j in range(self.arrived) if math.isnan(self.finish_s[j]))
            raise stuck(self.world.policy.name, self.world.trace.ids[first])
        return max(moment, self.now_s)

    def _turn(self) -> None:
        if self.arrived == self.ended:
            self.wake_s = math.inf
            return
        self.decisions += 1
        self.decide()
        if self.news:
            self.changes += sorted(self.news, key=lambda change: change.job)
            self.news = []

    # What subclasses add.

    @abstractmethod
    def arrive(self, j: int) -> None:
        """A job was submitted."""

    @abstractmethod
    def leave(self, j: int) -> None:
        """A running job has ended."""

    @abstractmethod
    def decide(self) -> None:
        """Start and stop what the rule says for this moment, and set `wake_s`."""

    # What happens to a job.

    def start(self, j: int, free_milli: int) -> None:
        """Give a waiting job its workers; `free_milli` was free at its turn."""
        pause_s = self.pause_s[j]
        self.epoch[j] += 1
        self.changed_s[j] = self.now_s
        self.anchor_s[j] = self.now_s + pause_s
        self.paused_s[j] += pause_s
        if self.start_s[j] != self.start_s[j]:
            self.start_s[j] = self.now_s
        rate = self.rate[j]
        if rate > 0:
            heappush(self.finishing, (self.anchor_s[j] + self.left[j] / rate, j, self.epoch[j]))
        self.running.add(j)
        if self.world.settings.record:
            self._note(j, self.size[j], Reason.RUNS, free_milli)

    def stop(self, j: int, free_milli: int) -> None:
        """Take the workers of a running job."""
        self.epoch[j] += 1
        self.left[j] = self.left_now(j)
        self.paused_s[j] -= max(0.0, self.anchor_s[j] - self.now_s)
        self._hold(j)
        self.changed_s[j] = self.now_s
        self.preemptions[j] += 1
        self.running.remove(j)
        if self.world.settings.record:
            self._note(j, 0, Reason.PREEMPTED, free_milli)

    def left_now(self, j: int) -> float:
        """Work that a running job still has to do."""
        return max(0.0, self.left[j] - self.rate[j] * max(0.0, self.now_s - self.anchor_s[j]))

    def _finish(self, j: int) -> None:
        self._hold(j)
        self.finish_s[j] = self.now_s
        self.running.remove(j)
        self.ended += 1
        self.leave(j)

    def _hold(self, j: int) -> None:
        self.held[j] += (self.now_s - self.changed_s[j]) * self.size[j] * self.width[j] / GPU

    def _note(self, j: int, workers: int, reason: Reason, free_milli: int) -> None:
        pool = 0 if workers else -1
        self.news.append(Change(self.now_s, j, workers, pool, int(reason), self.need[j] / GPU, free_milli / GPU))

    def _result(self) -> Result:
        n = len(self.submit_s)
        return Result(
            policy=self.world.policy.name,
            start_s=np.array(self.start_s),
            finish_s=np.array(self.finish_s),
            gpu_s=np.array(self.held),
            preemptions=np.array(self.preemptions, np.int64),
            resizes=np.zeros(n, np.int64),
            paused_s=np.array(self.paused_s),
            lost_s=np.zeros(n),
            lost_to_failures_s=np.zeros(n),
            rejected=np.zeros(n, np.bool_),
            is_service=np.zeros(n, np.bool_),
            events=self.events,
            decisions=self.decisions,
            changes=tuple(self.changes),
        )
