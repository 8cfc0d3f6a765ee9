"""Plans: never too much on a node on the way, exactly there at the end; and resizes that do not pay are not made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_cases import Case, cases, faults, make, with_placed
from strategies import job, snapshots, view_of
from stretto.core import placement, plan
from stretto.core.decision import Decision
from stretto.core.plan import Grow, Migrate, Plan, Shrink, Start, Stop, diff, gain_s, settle, worthwhile
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, IntArray, Snapshot

ORDER = [Stop, Shrink, Migrate, Start, Grow]


def decided(view: Snapshot, workers: IntArray, pool: IntArray | None = None) -> Decision:
    return Decision.of(view, workers, np.full(len(view), int(Reason.RUNS)), pool=pool)


def carried_out(view: Snapshot, now: IntArray, made: Plan) -> Iterator[IntArray]:
    """The placement after every step of the plan; a migration has two."""
    at, row = now.copy(), {int(number): j for j, number in enumerate(view.job)}
    for action in made.actions:
        j = row[action.job]
        if isinstance(action, Migrate):
            assert at[j, action.source] >= action.workers > 0
            at[j, action.target] += action.workers
            yield at.copy()
            at[j, action.source] -= action.workers
        else:
            sign = -1 if isinstance(action, Stop | Shrink) else 1
            for node, count in action.nodes:
                assert count > 0
                at[j, node] += sign * count
            if isinstance(action, Stop):
                assert not at[j].any(), "a stop leaves nothing"
            if isinstance(action, Start):
                assert at[j].sum() == sum(count for _, count in action.nodes), "only what has no workers is started"
        assert (at >= 0).all()
        yield at.copy()


def check(case: Case, wanted: IntArray) -> Plan:
    view, now = case.view, case.view.placed
    made = diff(view, decided(view, wanted.sum(axis=1), case.pool), now, wanted)
    assert not faults(view, now, case.pool)
    assert not faults(view, wanted, case.pool)
    at = now
    for at in carried_out(view, now, made):
        assert not faults(view, at, case.pool)
        running = at.sum(axis=1) > 0
        kept = (now.sum(axis=1) >= view.min_workers) & (wanted.sum(axis=1) >= view.min_workers)
        assert (at.sum(axis=1) >= view.min_workers)[running & kept].all(), "below its minimum on the way"
    assert np.array_equal(at, wanted)
    return made


@given(before=cases(pools=1), data=st.data())
def test_any_plan_stays_within_the_nodes_and_arrives(before: Case, data: st.DataObject) -> None:
    """From any placement to any other of the same jobs on the same nodes."""
    name = data.draw(st.sampled_from(sorted(placement.BUILTIN)))
    case = before._replace(pool=np.zeros(len(before.workers), np.int64))
    shuffled = data.draw(st.permutations(range(len(case.workers))))
    want = case.workers[shuffled] * 0 + np.clip(case.workers[shuffled], case.view.min_workers, case.view.max_workers)
    empty = msgspec.structs.replace(case.view, placed=np.zeros_like(case.view.placed))
    wanted = placement.load(name)(empty, want, case.pool)
    check(case, wanted)
    assert len(diff(case.view, decided(case.view, want), wanted, wanted)) == 0


@given(case=cases(pools=1, roles=False), name=st.sampled_from(sorted(placement.BUILTIN)))
def test_what_placements_ask_for_is_reached(case: Case, name: str) -> None:
    case = case._replace(pool=np.zeros(len(case.workers), np.int64))
    wanted = placement.load(name)(*case)
    made = check(case, wanted)
    kinds = [ORDER.index(type(action)) for action in made.actions]
    if Migrate not in {type(action) for action in made.actions}:
        assert kinds == sorted(kinds), "stop, shrink, start, grow"


def test_the_order_of_actions() -> None:
    jobs = [job(size=2), job(min_workers=1, max_workers=4), job(size=2), job(min_workers=1, max_workers=4)]
    case = make([4, 4], jobs, placed=[[2, 0], [2, 1], [0, 0], [0, 1]])
    wanted = np.array([[0, 0], [2, 0], [2, 0], [0, 3]])
    assert check(case, wanted).actions == (
        Stop(0, ((0, 2),)),
        Shrink(1, ((1, 1),)),
        Start(2, 0, ((0, 2),)),
        Grow(3, ((1, 2),)),
    )


def test_a_move_is_a_migration_and_waits_for_room() -> None:
    case = make([2, 2, 2], [job(size=2), job(size=2)], placed=[[2, 0, 0], [0, 2, 0]])
    made = check(case, np.array([[0, 2, 0], [0, 0, 2]]))
    assert made.actions == (Migrate(1, 1, 2, 2), Migrate(0, 0, 1, 2))


def test_two_that_change_places_are_split_without_stopping_anybody() -> None:
    jobs = [job(min_workers=1, max_workers=3), job(min_workers=1, max_workers=3)]
    case = make([2, 2, 1, 1], jobs, placed=[[2, 0, 1, 0], [0, 2, 0, 1]])
    made = check(case, np.array([[0, 2, 1, 0], [2, 0, 0, 1]]))
    assert {type(action) for action in made.actions} == {Shrink, Migrate, Grow}


def test_a_circle_of_rigid_jobs_costs_one_of_them_a_restart() -> None:
    case = make([1, 1], [job(size=1), job(size=1)], placed=[[1, 0], [0, 1]])
    made = check(case, np.array([[0, 1], [1, 0]]))
    assert made.actions == (Stop(0, ((0, 1),)), Migrate(1, 1, 0, 1), Start(0, 0, ((1, 1),)))


def test_workers_of_a_lost_node_leave_and_others_join() -> None:
    case = make([0, 4], [job(min_workers=1, max_workers=3), job(size=1)], placed=[[1, 2], [1, 0]])
    made = diff(case.view, decided(case.view, np.array([3, 1])), case.view.placed, np.array([[0, 3], [0, 1]]))
    assert made.actions == (Stop(1, ((0, 1),)), Shrink(0, ((0, 1),)), Start(1, 0, ((1, 1),)), Grow(0, ((1, 1),)))


def test_fixed_roles_move_by_a_restart_only() -> None:
    case = make([2, 2], [job(size=1, fixed_milli=GPU)], placed=[[0, 1]])
    made = check(case, np.array([[1, 0]]))
    assert [type(action) for action in made.actions] == [Stop, Start]


def test_a_job_may_change_its_pool() -> None:
    case = make([2, 2], [job(size=2)], placed=[[2, 0]], pool=[0, 1])
    made = diff(case.view, decided(case.view, np.array([2]), np.array([1])), case.view.placed, np.array([[0, 2]]))
    assert made.actions == (Migrate(0, 0, 1, 2),)


def test_placements_of_the_wrong_shape_are_refused() -> None:
    case = make([2], [job(size=1)])
    with pytest.raises(ValueError, match="shape"):
        diff(case.view, decided(case.view, np.array([1])), np.zeros((1, 0), np.int64), np.array([[1]]))


def test_actions_travel_as_json() -> None:
    made = Plan((Stop(1, ((0, 2),)), Migrate(2, 0, 1, 3), Start(3, 0, ((1, 1),))))
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made


# Hysteresis.


def running(**columns: Any) -> dict[str, Any]:
    return job(min_workers=1, max_workers=8, workers=2, **columns)


def test_growth_must_gain_more_than_it_costs() -> None:
    view = view_of(8, [running(remaining=100.0, resize_s=20.0), running(remaining=100.0, resize_s=30.0)])
    grown = np.array([4, 4])
    assert gain_s(view, grown, np.zeros(2, np.int64)).tolist() == [25.0, 25.0]
    assert worthwhile(view, grown).tolist() == [True, False]
    settled = settle(view, decided(view, grown))
    assert settled.workers.tolist() == [4, 2]
    assert settled.reason.tolist() == [Reason.RUNS, Reason.NOT_WORTH_RESIZE]
    assert settled.detail[1].tolist() == [25.0, 30.0]


def test_a_job_of_unknown_length_is_thought_of_again_when_it_has_run_twice_as_long() -> None:
    young = running(remaining=math.nan, resize_s=20.0, ran_s=4.0, done=1.0)
    view = view_of(8, [young, running(remaining=1000.0, resize_s=300.0, ran_s=2.0)])
    settled = settle(view, decided(view, np.array([4, 4])))
    assert settled.reason.tolist() == [Reason.NOT_WORTH_RESIZE] * 2
    assert settled.wake_s == view.now_s + 4.0


def test_starts_and_stops_are_never_held_back() -> None:
    view = view_of(4, [running(remaining=1e6, resize_s=10.0), job(size=4, remaining=1.0, resize_s=10.0)])
    decision = decided(view, np.array([0, 4]))
    assert settle(view, decision).workers.tolist() == [0, 4]
    assert worthwhile(view, decision.workers).all()


def test_a_job_shrinks_only_for_somebody() -> None:
    view = view_of(4, [running(remaining=1000.0, resize_s=1.0), job(size=3, remaining=10.0)])
    for_nobody = settle(view, decided(view, np.array([1, 0])))
    assert for_nobody.workers.tolist() == [2, 0]
    for_the_other = settle(view, decided(view, np.array([1, 3])))
    assert for_the_other.workers.tolist() == [1, 3]


def test_a_shrink_whose_beneficiary_was_held_back_is_not_made_either() -> None:
    jobs = [
        job(min_workers=1, max_workers=8, workers=4, remaining=1000.0, resize_s=1.0),
        running(remaining=4.0, resize_s=5.0),
    ]
    view = view_of(6, jobs)
    assert settle(view, decided(view, np.array([2, 4]))).workers.tolist() == [4, 2]


def test_a_nearly_finished_job_is_left_alone_where_there_is_room() -> None:
    view = view_of(4, [running(remaining=2.0, resize_s=5.0)])
    settled = settle(view, decided(view, np.array([0])))
    assert settled.workers.tolist() == [2]
    assert settled.reason.tolist() == [Reason.NEARLY_DONE]
    assert settled.detail[0, 0] == 1.0
    full = view_of(2, [running(remaining=2.0, resize_s=5.0), job(size=2)])
    assert settle(full, decided(full, np.array([0, 2]))).workers.tolist() == [0, 2]


@given(view=snapshots(pools=2, overfull=False), data=st.data())
def test_settling_never_takes_more_than_there_is(view: Snapshot, data: st.DataObject) -> None:
    free = view.capacity.copy()
    workers, pool = np.zeros(len(view), np.int64), np.zeros(len(view), np.int64)
    for j in range(len(view)):
        want = data.draw(st.sampled_from([0, *range(int(view.min_workers[j]), int(view.max_workers[j]) + 1)]))
        home = data.draw(st.integers(0, len(view.pools) - 1))
        need = int(want * view.width[j] + view.fixed_milli[j])
        if want and need <= free[home]:
            workers[j], pool[j] = want, home
            free[home] -= need
    settled = settle(view, decided(view, workers, pool))
    used = np.zeros(len(view.pools), np.int64)
    for j in range(len(view)):
        got = int(settled.workers[j])
        assert got in (int(workers[j]), int(view.workers[j]))
        if got:
            used[settled.pool[j]] += got * view.width[j] + view.fixed_milli[j]
        if not view.workers[j]:
            assert got == workers[j], "a start is never held back"
    assert (used <= view.capacity).all()
    assert not np.isnan(gain_s(view, workers, pool)).any()
    again = settle(view, settled)
    assert np.array_equal(again.workers, settled.workers)
    assert np.array_equal(with_pool(again), with_pool(settled))


def with_pool(decision: Decision) -> IntArray:
    return np.where(decision.workers > 0, decision.pool, -1)


def test_a_settled_world_needs_no_plan() -> None:
    case = make([4], [job(min_workers=1, max_workers=4)], placed=[[2]], want=[2])
    placed = placement.load("pack")(*case)
    assert plan.diff(case.view, decided(case.view, case.workers), case.view.placed, placed) == Plan()
    assert with_placed(case, placed).view.workers.tolist() == [2]
