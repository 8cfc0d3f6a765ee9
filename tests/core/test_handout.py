from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, snapshots, view_of
from stretto.core import handout
from stretto.core.snapshot import GPU, IntArray, Snapshot


def started(view: Snapshot, order: IntArray) -> tuple[IntArray, int]:
    workers, left = np.zeros(len(view), np.int64), np.zeros(len(view))
    free = handout.give_minimums(view, order, workers, left, view.total_milli)
    return workers, free


def slow_useful(view: Snapshot, j: int) -> int:
    top = view.rates.shape[2] - 1
    speed = [view.rates[0, view.curve[j], min(n, top)] for n in range(int(view.max_workers[j]) + 1)]
    size = int(view.max_workers[j])
    while size > view.min_workers[j] and speed[size - 1] == speed[-1]:
        size -= 1
    return size


@given(snapshots())
def test_useful_is_the_last_size_that_adds_speed(view: Snapshot) -> None:
    assert handout.useful(view).tolist() == [slow_useful(view, j) for j in range(len(view))]


def test_useful_looks_beyond_a_plateau_and_not_beyond_the_table() -> None:
    view = view_of(8, [job(max_workers=6, rate=[0, 1, 1, 1, 2, 2, 2]), job(max_workers=9, rate=[0, 1, 2])])
    assert handout.useful(view).tolist() == [4, 2]


@given(snapshots(), st.randoms(use_true_random=False))
def test_minimums_are_first_fit_in_the_given_order(view: Snapshot, random: Random) -> None:
    order = list(range(len(view)))
    random.shuffle(order)
    workers, free = started(view, np.array(order, np.int64))
    room = view.total_milli
    for j in order:
        need = int(view.min_workers[j] * view.width[j] + view.fixed_milli[j])
        assert workers[j] == (view.min_workers[j] if need <= room else 0)
        room -= need if need <= room else 0
    assert free == room


@given(snapshots())
def test_turns_equal_one_worker_at_a_time(view: Snapshot) -> None:
    order, top = np.argsort(-view.job), handout.useful(view)
    workers, free = started(view, order)
    expected, room, given_one = workers.copy(), free, True
    while given_one:
        given_one = False
        for j in order.tolist():
            if 0 < expected[j] < top[j] and view.width[j] <= room:
                expected[j] += 1
                room -= int(view.width[j])
                given_one = True
    assert handout.round_robin(view, order, workers, top, free) == room
    assert workers.tolist() == expected.tolist()


@given(snapshots())
def test_filling_in_order_leaves_later_jobs_what_earlier_ones_cannot_use(view: Snapshot) -> None:
    order, top = np.arange(len(view)), handout.useful(view)
    workers, free = started(view, order)
    low = workers.copy()
    room = free
    left = handout.fill_in_order(view, order, workers, top, free)
    for j in order.tolist():
        more = min(int(top[j] - low[j]), room // int(view.width[j])) if low[j] else 0
        assert workers[j] == low[j] + more
        room -= more * int(view.width[j])
    assert left == room


@given(snapshots(), st.booleans())
def test_spending_by_gain_equals_a_search_for_the_best_step(view: Snapshot, some_wait: bool) -> None:
    """The slow version looks at every job and every step length each time."""
    order = np.argsort(-view.job)
    value = handout.speedups(view)
    workers, free = started(view, order)
    if some_wait:
        free += int(((workers * view.width + view.fixed_milli) * (workers > 0))[::2].sum())
        workers[::2] = 0
    expected, room = slow_spend(view, value, order, workers.copy(), free)
    last, left = handout.spend_by_gain(view, value, order, workers, handout.useful(view), free)
    assert workers.tolist() == expected.tolist()
    assert left == room
    assert ((last > 0) <= (workers > 0)).all()


def slow_spend(
    view: Snapshot, value: np.ndarray, order: IntArray, workers: IntArray, free: int
) -> tuple[IntArray, int]:
    most = np.maximum(view.min_workers, np.minimum(view.max_workers, view.rates.shape[2] - 1))
    while True:
        best = (0.0, -1, 0, 0)
        for j in order.tolist():
            n, width = int(workers[j]), int(view.width[j])
            if n == 0:
                cost = int(view.min_workers[j]) * width + int(view.fixed_milli[j])
                steps = [(int(view.min_workers[j]), cost, float(value[j, view.min_workers[j]]) * GPU / cost)]
            else:
                steps = [
                    (k, k * width, float(value[j, n + k] - value[j, n]) / k * GPU / width)
                    for k in range(1, int(most[j]) - n + 1)
                ]
            for step, cost, gain in steps:
                if cost <= free and gain > best[0]:
                    best = (gain, j, step, cost)
        if best[1] < 0:
            return workers, free
        workers[best[1]] += best[2]
        free -= best[3]


def test_a_waiting_job_competes_with_its_whole_minimum() -> None:
    """S(2)/2 = 0.9 beats the running job's next 0.8, which beats S(4)/4 = 0.75."""
    view = view_of(
        5,
        [
            job(min_workers=1, max_workers=4, rate=[0, 1, 1.8, 2, 2]),
            job(min_workers=2, max_workers=2, rate=[0, 1, 1.8]),
            job(min_workers=4, max_workers=4, rate=[0, 1, 2, 2.5, 3]),
        ],
    )
    workers = np.array([1, 0, 0])
    last, free = handout.spend_by_gain(view, handout.speedups(view), np.arange(3), workers, view.max_workers, 4 * GPU)
    assert workers.tolist() == [3, 2, 0]
    assert free == 0
    assert last.tolist() == [0.19999999999999996, 0.9, 0]


def test_running_jobs_keep_what_they_have_and_the_latest_gives_way_when_room_was_lost() -> None:
    view = view_of(4, [job(size=2, workers=2), job(size=3, workers=3), job(size=1, workers=1), job(size=1)])
    workers, free = handout.held(view)
    assert workers.tolist() == [2, 0, 1, 0]
    assert free == GPU
    assert view.workers.tolist() == [2, 3, 1, 0]
