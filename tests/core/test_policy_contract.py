"""The contract: what every built-in policy keeps, whatever it is shown.

Each test runs for every name in the table, many also for the policies' other options. What a policy declares
in its traits is checked here; a policy that declares `preempts: higher` also needs an entry in `ORDER`, written from
its definition, which says who stands ahead of whom.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_checks import check_work_conserving, need_of
from strategies import job, nodes_of, snapshots, view_of
from stretto.core import invariants, reasons
from stretto.core.decision import Decision, Memory
from stretto.core.policies import ALIASES, BUILTIN
from stretto.core.policy import Policy, load
from stretto.core.reasons import Reason
from stretto.core.services import only
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

CHEAP: dict[str, dict[str, Any]] = {"pollux": {"population": 8, "generations": 4}}
"""Settings without which a policy would take too long here."""

VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gang", {"skip": False}),
    ("round-robin", {"admission": "stop"}),
    ("srtf", {"original": True}),
    ("srsf", {"original": True}),
    ("edf", {"admission": True}),
    ("elasticflow", {"sign": "paper", "reject": False}),
    ("elasticflow", {"original": True}),
    ("tiresias", {"promote": 2}),
    ("tiresias", {"original": True}),
    ("tiresias", {"service": "time", "running_first": False}),
    ("tiresias-gittins", {"promote": 2}),
    ("tiresias-gittins", {"original": True}),
    ("elastic-tiresias", {"promote": 2, "pending": 0}),
    ("optimus", {"round_s": 60, "look_ahead": False}),
    ("fulfilment", {"max_load_desired": 0.5, "freeze_s": 30}),
    ("themis", {"fairness": 0, "lease_s": 10}),
    ("gavel", {"objective": "makespan"}),
    ("gavel", {"objective": "max-sum-throughput", "perf": False}),
    ("gavel", {"objective": "fifo", "original": True}),
    ("sia", {"explore": 2, "round_s": 0}),
    ("sia", {"exact_jobs": 8}),
    ("stretto", {"p": 0.8, "fairness": 1.0, "quantum_s": 1}),
)

every_policy = pytest.mark.parametrize("name", BUILTIN)
every_variant = pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(name, CHEAP.get(name, {}), id=name) for name in BUILTIN),
        *(pytest.param(name, options, id=f"{name}-{'-'.join(options)}") for name, options in VARIANTS),
    ],
)


def declares(**traits: object) -> Any:
    """The policies that declare these traits."""
    chosen = [name for name in BUILTIN if all(getattr(load(name).traits, t) == value for t, value in traits.items())]
    assert chosen, f"no policy declares {traits}"
    return pytest.mark.parametrize("name", chosen)


def ask(name: str, view: Snapshot, memory: Memory = None, options: Mapping[str, Any] | None = None) -> Decision:
    """A decision that keeps all that holds for each one alone, whoever made it.

    It may be carried out and every job has a reason that reads; neither snapshot nor memory was written to; asked
    again with equal values, not the same objects, the policy says the same.
    """
    policy = load(name, CHEAP.get(name, {}) if options is None else options)
    before = stored(memory)
    freeze(view)
    decision = policy.decide(view, memory)
    invariants.check(policy, view, decision)
    assert stored(memory) == before
    again = policy.decide(copy.deepcopy(view), copy.deepcopy(memory))
    assert stored(decision) == stored(again)
    check_reasons(view, decision)
    if not policy.traits.elastic:
        check_rigid(policy, view, decision)
    return decision


def freeze(value: Any) -> None:
    """Make all arrays of a snapshot read-only: a policy that writes to one fails."""
    for field in value.__struct_fields__:
        column = getattr(value, field)
        if isinstance(column, np.ndarray):
            column.setflags(write=False)
        elif isinstance(column, msgspec.Struct):
            freeze(column)


def stored(value: Any) -> bytes:
    """Plain values, structs and arrays as bytes: what a loop would store. Equal values give equal bytes."""
    return msgspec.msgpack.encode(_plain(value))


def _plain(value: Any) -> Any:
    match value:
        case np.ndarray():
            return value.dtype.str, value.shape, value.tobytes()
        case np.generic():
            return value.item()
        case msgspec.Struct():
            return [_plain(getattr(value, field)) for field in value.__struct_fields__]
        case dict():
            return sorted((key, _plain(each)) for key, each in value.items())
        case set() | frozenset():
            return sorted(_plain(each) for each in value)
        case list() | tuple():
            return [_plain(each) for each in value]
    return value


RUNS = {
    Reason.RUNS, Reason.GROWN, Reason.SHRUNK, Reason.AT_MAXIMUM, Reason.BACKFILLED, Reason.ADMITTED_SHARE,
    Reason.LITTLE_GAIN, Reason.NOT_WORTH_RESIZE, Reason.FAIR_SHARE, Reason.BEHIND_FAIR_SHARE, Reason.SERVICE_LOAD,
    Reason.NEARLY_DONE, Reason.CUT_TO_ROOM,
}  # fmt: skip
"""Reasons that only a job with workers can have."""
WAITS = {
    Reason.NO_ROOM, Reason.BEHIND_HEAD, Reason.PREEMPTED, Reason.LOWER_QUEUE, Reason.WAITS_FOR_TURN, Reason.RESERVED,
    Reason.WOULD_DELAY, Reason.REJECTED_DEADLINE, Reason.YIELDS_TO_SERVICE, Reason.TOO_LARGE, Reason.FRAGMENTED,
}  # fmt: skip
"""Reasons that only a job without workers can have."""


def check_reasons(view: Snapshot, decision: Decision) -> None:
    """Each reads as a sentence, is about what happened to the job, and is true where that can be told."""
    assert not np.isnan(decision.detail).any()
    for j, code in enumerate(decision.reason.tolist()):
        reason, (first, second) = Reason(code), decision.detail[j].tolist()
        assert "{" not in reasons.explain(code, first, second)
        assert reason not in (WAITS if decision.workers[j] else RUNS), f"job {j}: {reason.name}"
        if reason == Reason.PREEMPTED:
            assert view.workers[j] > 0, f"job {j} was not running"
        if reason == Reason.TOO_LARGE:
            assert first > second
        if reason == Reason.CUT_TO_ROOM:
            assert decision.workers[j] == first < second
        if decision.rejected is not None and decision.rejected[j]:
            assert reason == Reason.REJECTED_DEADLINE


def check_rigid(policy: Policy, view: Snapshot, decision: Decision) -> None:
    """Nothing, or the requested size; who never preempts also leaves a running job what it has."""
    training = ~view.is_service
    right = (decision.workers == 0) | (decision.workers == view.asked)
    if policy.traits.preempts == "never":
        right |= decision.workers == view.workers
    assert right[training].all()


# Any snapshot.


@every_variant
@settings(max_examples=25)
@given(view=snapshots())
def test_any_snapshot(name: str, options: dict[str, Any], view: Snapshot) -> None:
    ask(name, view, None, options)


@every_policy
@settings(max_examples=20)
@given(view=snapshots(pools=3, services=True))
def test_any_snapshot_with_device_types_and_services(name: str, view: Snapshot) -> None:
    decision = ask(name, view)
    assert not (decision.workers[view.is_service] > view.max_workers[view.is_service]).any()


@every_policy
@settings(max_examples=15)
@given(view=snapshots(pools=2, services=True, placed=True))
def test_any_snapshot_with_workers_on_nodes(name: str, view: Snapshot) -> None:
    decision = ask(name, view)
    if decision.nodes is not None:
        assert (decision.nodes.sum(axis=1) == decision.workers).all()
        assert (decision.nodes.T @ view.width <= view.nodes.devices * GPU).all()


@every_policy
@settings(max_examples=20)
@given(view=snapshots(), bare=st.lists(st.booleans(), min_size=12, max_size=12), origin_s=st.sampled_from([0, 1.7e9]))
def test_jobs_without_gpus_and_without_progress_long_after_the_epoch(
    name: str, view: Snapshot, bare: list[bool], origin_s: float
) -> None:
    """A job may take no GPU at all, its speed may be nothing at every size, and time may be a clock's."""
    mark = np.array(bare[: len(view)], np.bool_)
    rates = view.rates.copy()
    rates[:, 0] = 0.0
    moved = {c: getattr(view, c) + origin_s for c in ("now_s", "submit_s", "deadline_s", "started_s", "changed_s")}
    width = np.where(mark, 0, view.width)
    fixed = np.where(mark, 0, view.fixed_milli)
    ask(name, msgspec.structs.replace(view, width=width, fixed_milli=fixed, rates=rates, **moved))


def odd_views() -> dict[str, Snapshot]:
    crowd = [job(max_workers=4, requested=2, workers=n, remaining=left) for n, left in ((2, 9.0), (1, 0.0), (0, 5.0))]
    unknown = [job(max_workers=4, requested=2, remaining=math.nan) for _ in range(3)]
    return {
        "nothing at all": view_of([], []),
        "no jobs": view_of(4, []),
        "no nodes": view_of([], crowd),
        "no GPUs": view_of([0, 0], crowd),
        "all lengths unknown": view_of(4, unknown),
        "nothing left to do": view_of(4, [job(max_workers=4, requested=2, remaining=0.0) for _ in range(3)]),
        "nothing fits": view_of(4, [job(size=5), job(size=9, remaining=math.nan)]),
        "one job too wide beside one that fits": view_of(4, [job(size=5), job(size=3)]),
        "fixed roles fill the cluster": view_of(
            4, [job(size=1, fixed_milli=4 * GPU), job(size=1, fixed_milli=3 * GPU)]
        ),
        "slivers": view_of(1, [job(min_workers=1, max_workers=5, requested=3, width=333) for _ in range(3)]),
        "wide workers": view_of([8, 8], [job(min_workers=1, max_workers=2, requested=1, width=8 * GPU)] * 3),
        "deadlines in the past": view_of(4, [job(size=2, deadline_s=3.0), job(size=4, deadline_s=5.0)], now_s=10.0),
        "everything runs, room was lost": view_of(2, [job(size=2, workers=2), job(size=2, workers=2)], now_s=9.0),
    }


@every_variant
@pytest.mark.parametrize("case", odd_views())
def test_odd_snapshots(name: str, options: dict[str, Any], case: str) -> None:
    view = odd_views()[case]
    decision = ask(name, view, None, options)
    if not view.total_milli:
        assert not decision.workers.any()


@every_policy
@settings(max_examples=10)
@given(view=snapshots())
def test_job_numbers_only_break_ties(name: str, view: Snapshot) -> None:
    renumbered = msgspec.structs.replace(view, job=3 * view.job + 5)
    ours, theirs = ask(name, view), ask(name, renumbered)
    assert ours.workers.tolist() == theirs.workers.tolist()
    assert ours.reason.tolist() == theirs.reason.tolist()


# Chains of decisions.


class Step(msgspec.Struct, frozen=True):
    """What happens before the next question."""

    after_s: float
    arrive: int
    leave: tuple[bool, ...]
    """Who ends, or is taken back by its user, whether it is done or not."""
    up: int
    """Nodes that are up, out of three."""
    fresh_table: bool
    """Whether the throughputs come in a new table, with only the curves that somebody uses."""


steps = st.builds(
    Step,
    after_s=st.sampled_from([0.001, 1.0, 60.0, 4000.0]),
    arrive=st.integers(0, 4),
    leave=st.lists(st.sampled_from([False, False, False, True]), min_size=12, max_size=12).map(tuple),
    up=st.sampled_from([3, 3, 2, 1, 0]),
    fresh_table=st.booleans(),
)


class Story:
    """A world that is played by hand: it carries decisions out, lets time pass, jobs come and go, nodes fail."""

    def __init__(self, jobs: Snapshot, origin_s: float) -> None:
        n = len(jobs)
        zeros, zero = np.zeros(n), np.zeros(n, np.int64)
        self.world = msgspec.structs.replace(
            jobs, now_s=origin_s, nodes=nodes_of([4, 4, 8]), capacity=np.array([16 * GPU]),
            workers=zero, pool=zero - 1, done=zeros, ran_s=zeros, gpu_s=zeros, waited_s=zeros, restarts=zero,
            submit_s=np.full(n, math.inf), started_s=np.full(n, math.nan), changed_s=zeros,
        )  # fmt: skip
        self.here = np.zeros(n, np.bool_)
        self.came = 0

    def play(self, step: Step) -> Snapshot:
        """The snapshot after this step."""
        world, here = self.world, self.here
        now_s = world.now_s + step.after_s
        runs = here & (world.workers > 0)
        worked = np.where(runs, world.rate(world.workers) * step.after_s, 0.0)
        self.world = msgspec.structs.replace(
            world,
            now_s=now_s,
            done=world.done + worked,
            remaining=np.maximum(world.remaining - worked, 0.0),
            ran_s=world.ran_s + np.where(runs, step.after_s, 0.0),
            gpu_s=world.gpu_s + np.where(runs, step.after_s * world.workers * world.width / GPU, 0.0),
            waited_s=world.waited_s + np.where(here & ~runs, step.after_s, 0.0),
        )
        self._leave(here & np.array(step.leave[: len(here)], np.bool_))
        self._arrive(step.arrive)
        self._nodes(step.up)
        return self._seen(step.fresh_table)

    def _leave(self, gone: BoolArray) -> None:
        history = self.world.history
        for j in np.flatnonzero(gone).tolist():
            history = history.adding(int(self.world.klass[j]), int(self.world.job[j]), 0.0, float(self.world.ran_s[j]))
        self.world = msgspec.structs.replace(self.world, history=history)
        self.here = self.here & ~gone

    def _arrive(self, count: int) -> None:
        new = slice(self.came, self.came + count)
        here, submit, changed = self.here.copy(), self.world.submit_s.copy(), self.world.changed_s.copy()
        here[new], submit[new], changed[new] = True, self.world.now_s, self.world.now_s
        due = self.world.deadline_s.copy()
        due[new] += self.world.now_s
        self.here, self.came = here, self.came + count
        self.world = msgspec.structs.replace(self.world, submit_s=submit, changed_s=changed, deadline_s=due)

    def _nodes(self, up: int) -> None:
        nodes = nodes_of([4, 4, 8][:up])
        self.world = msgspec.structs.replace(
            self.world, nodes=nodes, capacity=np.array([int(nodes.devices.sum()) * GPU])
        )

    def _seen(self, fresh_table: bool) -> Snapshot:
        view = only(self.world, self.here)
        if not fresh_table:
            return view
        used, curve = np.unique(view.curve, return_inverse=True)
        rates = view.rates[:, used] if len(used) else np.zeros((1, 1, 2))
        return msgspec.structs.replace(view, rates=rates, curve=curve.astype(np.int64))

    def carry_out(self, decision: Decision) -> None:
        """Give everybody what was decided; who was rejected is gone."""
        world, spots = self.world, np.flatnonzero(self.here)
        workers, pool = np.zeros(len(world), np.int64), np.full(len(world), -1)
        workers[spots] = decision.workers
        pool[spots] = np.where(decision.workers > 0, decision.pool, -1)
        changed = self.here & (workers != world.workers)
        starts = changed & (world.workers == 0)
        self.world = msgspec.structs.replace(
            world,
            workers=workers,
            pool=pool,
            changed_s=np.where(changed, world.now_s, world.changed_s),
            started_s=np.where(starts & np.isnan(world.started_s), world.now_s, world.started_s),
            restarts=world.restarts + (changed & (workers > 0)),
        )
        if decision.rejected is not None:
            gone = np.zeros(len(world), np.bool_)
            gone[spots] = decision.rejected
            self.here = self.here & ~gone


@every_variant
@settings(max_examples=12)
@given(
    jobs=snapshots(overfull=False),
    plot=st.lists(steps, min_size=6, max_size=10),
    origin_s=st.sampled_from([0.0, 1.7e9]),
)
def test_a_chain_of_decisions(
    name: str, options: dict[str, Any], jobs: Snapshot, plot: list[Step], origin_s: float
) -> None:
    """Memory goes from decision to decision while jobs come and go, and the cluster with them."""
    story, memory = Story(jobs, origin_s), None
    for step in plot:
        view = story.play(step)
        decision = ask(name, view, memory, options)
        story.carry_out(decision)
        memory = decision.memory


# Traits.


@declares(work_conserving=True)
@settings(max_examples=30)
@given(data=st.data())
def test_work_conserving(name: str, data: st.DataObject) -> None:
    """Nobody waits whose minimum fits, and nobody runs slower than the free room would let it."""
    view = data.draw(snapshots(elastic=load(name).traits.elastic))
    check_work_conserving(name, view, weighs_cost=name == "stretto")


@declares(work_conserving=True, elastic=True)
@settings(max_examples=15)
@given(jobs=snapshots(overfull=False), plot=st.lists(steps, min_size=4, max_size=8))
def test_work_conserving_all_along(name: str, jobs: Snapshot, plot: list[Step]) -> None:
    """With a memory, too."""
    story, memory = Story(jobs, 0.0), None
    for step in plot:
        view = story.play(step)
        decision = load(name).decide(view, memory)
        free = view.total_milli - int(need_of(view, decision.workers).sum())
        assert (need_of(view, view.min_workers)[decision.workers == 0] > free).all()
        story.carry_out(decision)
        memory = decision.memory


@declares(preempts="never")
@settings(max_examples=30)
@given(view=snapshots(pools=2, overfull=False))
def test_never_preempts(name: str, view: Snapshot) -> None:
    """Who runs goes on; where sizes are fixed, with what it has."""
    runs = view.workers > 0
    workers = ask(name, view).workers
    assert (workers[runs] > 0).all()
    if not load(name).traits.elastic:
        assert (workers[runs] == view.workers[runs]).all()


def _left_s(view: Snapshot, size: IntArray) -> FloatArray:
    """Seconds left, to the microsecond; for ever where nobody knows."""
    left = np.rint(view.remaining_s(size) * 1e6)
    return np.where(np.isnan(left), np.inf, left)


def _by(*keys: Any) -> IntArray:
    """Smallest first, by the first key, then the second …"""
    order: IntArray = np.lexsort(keys[::-1])
    return order


def _remembered(view: Snapshot, decision: Decision) -> IntArray:
    """The order of these depends on the past; they remember it, the head of the first queue first."""
    order: IntArray = np.searchsorted(view.job, decision.memory.job)
    return order


def _by_age(view: Snapshot, _: Decision) -> IntArray:
    return np.arange(len(view))


ORDER: dict[str, Callable[[Snapshot, Decision], IntArray]] = {
    "elastic-fifo": _by_age,
    "optimus": _by_age,
    "sjf": lambda view, _: _by(view.need, view.job),
    "srjf": lambda view, _: _by(_left_s(view, view.min_workers), view.job),
    "srtf": lambda view, _: _by(_left_s(view, view.asked), view.job),
    "srsf": lambda view, _: _by(_left_s(view, view.asked) * view.need / GPU, view.job),
    "elastic-srjf": lambda view, _: _by(_left_s(view, view.min_workers), view.job),
    "elastic-srtf": lambda view, _: _by(_left_s(view, view.min_workers), view.job),
    "elastic-srsf": lambda view, _: _by(
        _left_s(view, view.min_workers) * need_of(view, view.min_workers) / GPU, view.job
    ),
    "edf": lambda view, _: _by(view.deadline_s, view.job),
    "elastic-edf": lambda view, _: _by(view.deadline_s, view.job),
    "priority": lambda view, _: _by(-view.priority, view.workers == 0, view.job),
    "tiresias": _remembered,
    "tiresias-gittins": _remembered,
}
"""Who stands ahead of whom, head first."""

WIDE_AHEAD = {"elastic-edf"}
"""Elastic policies under which jobs ahead take more than their minimum before anybody behind gets one."""


@declares(preempts="higher")
@settings(max_examples=30)
@given(view=snapshots())
def test_stops_only_for_jobs_ahead(name: str, view: Snapshot) -> None:
    """A job has no workers only if those ahead of it that run leave no room for its smallest size.

    And if those ahead were not there, it would run.
    """
    decision = ask(name, view)
    least = need_of(view, view.min_workers if load(name).traits.elastic else view.asked)
    taken = need_of(view, decision.workers) if name in WIDE_AHEAD else least
    free, ahead = view.total_milli, np.zeros(len(view), np.bool_)
    for j in ORDER[name](view, decision).tolist():
        if decision.workers[j]:
            free -= int(taken[j])
        else:
            assert least[j] > free
            rest = only(view, ~ahead)
            spot = int(np.searchsorted(rest.job, view.job[j]))
            assert ask(name, rest).workers[spot] or least[j] > view.total_milli
        ahead[j] = True


@declares(rounds=True)
@settings(max_examples=25)
@given(
    jobs=snapshots(overfull=False), first=steps, later_s=st.sampled_from([0.001, 0.2, 0.7]), newcomers=st.integers(0, 3)
)
def test_rounds(name: str, jobs: Snapshot, first: Step, later_s: float, newcomers: int) -> None:
    """Between its own times such a policy leaves all as it is, whoever comes; then it has to be asked again."""
    story = Story(jobs, 0.0)
    view = story.play(msgspec.structs.replace(first, arrive=6))
    decision = ask(name, view)
    story.carry_out(decision)
    assert decision.wake_s < math.inf
    between_s = later_s * min(decision.wake_s - view.now_s, 1.0)
    stays = (False,) * 12
    view = story.play(msgspec.structs.replace(first, after_s=between_s, arrive=newcomers, leave=stays))
    later = ask(name, view, decision.memory)
    if view.workers.any():
        assert later.workers.tolist() == view.workers.tolist()
        assert later.wake_s == decision.wake_s


LEARNS = {"length": {"remaining": np.nan}, "deadline": {"deadline_s": np.inf}, "priority": {"priority": 0}}


@every_policy
@settings(max_examples=12)
@given(view=snapshots())
def test_looks_only_at_what_it_declares(name: str, view: Snapshot) -> None:
    """Without `length`, `deadline` or `priority` in `uses`, these columns change nothing.

    A policy that learns lengths from history takes a known one instead where there is one.
    """
    uses = load(name).traits.uses
    for fact, columns in LEARNS.items():
        if fact in uses or (fact == "length" and "history" in uses):
            continue
        blank = {column: np.full_like(getattr(view, column), value) for column, value in columns.items()}
        assert ask(name, view).workers.tolist() == ask(name, msgspec.structs.replace(view, **blank)).workers.tolist()


def test_the_table_is_whole() -> None:
    """Aliases lead to policies, names are their own, every policy says in a sentence what it does."""
    assert set(ALIASES.values()) <= set(BUILTIN)
    assert not set(ALIASES) & set(BUILTIN)
    for name in BUILTIN:
        policy = load(name)
        assert policy.name == name
        assert policy.summary.endswith(".")
