"""What is done about the difference between targets and what lives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.jobs.model import Level, Seat, Worker
from stretto.server import reconcile
from stretto.server.reconcile import Action, Devices, Grow, Shrink, Situation, Start, Stop

A, B, C, D = (Seat("node-0", (i,)) for i in range(4))


def actions(situations: Sequence[Situation]) -> tuple[Action, ...]:
    return reconcile.actions(situations, Devices)


def worker(name: str, seat: Seat, leaving: str = "", at_s: float = 0.0) -> Worker:
    return Worker(name=name, launch=f"1.{name}", seat=seat, launched_s=at_s, leaving=leaving)


def job(number: int, level: Level, target: tuple[Seat, ...], *workers: Worker, **more: object) -> Situation:
    joined = frozenset(w.name for w in workers if not w.leaving)
    situation = Situation(job=number, level=level, target=target, workers=workers, joined=joined)
    return msgspec.structs.replace(situation, **more)


def test_nothing_is_done_when_everything_is_as_it_should_be() -> None:
    assert actions([job(1, "elastic", (A, B), worker("w0", A), worker("w1", B))]) == ()
    assert actions([job(2, "rigid", (A,), worker("w0", A))]) == ()


def test_the_order_is_stop_shrink_start_grow() -> None:
    told = actions(
        [
            job(1, "elastic", (A, B), worker("w0", A)),
            job(2, "elastic", (Seat("node-1", (0,)),)),
            job(3, "elastic", (C,), worker("w0", C), worker("w1", D)),
            job(4, "rigid", (), worker("w0", Seat("node-1", (1,)))),
        ]
    )
    assert [type(action) for action in told] == [Stop, Shrink, Start, Grow]
    assert told[1] == Shrink(3, ("w1",), 1)


def test_a_seat_is_given_only_when_nobody_lives_on_it() -> None:
    waits = [job(1, "elastic", (), worker("w0", A, leaving="x")), job(2, "elastic", (A,))]
    assert actions(waits) == ()
    assert actions([job(1, "elastic", ()), job(2, "elastic", (A,))]) == (Start(2, (A,)),)


def test_two_share_a_device_only_if_it_has_room() -> None:
    half = job(1, "elastic", (A,), worker("w0", A), width_milli=500)
    assert actions([half, job(2, "elastic", (A,), width_milli=500)]) == (Start(2, (A,)),)
    assert actions([half, job(2, "elastic", (A,), width_milli=600)]) == ()


def test_a_group_starts_only_if_there_is_room_for_all_of_it_at_once() -> None:
    twice = job(1, "rigid", (A, A), width_milli=600)
    assert actions([twice, job(2, "elastic", (A,))]) == (Start(2, (A,)),), "and what it took meanwhile is free again"
    assert actions([msgspec.structs.replace(twice, width_milli=500)]) == (Start(1, (A, A)),)


def test_an_elastic_job_moves_without_a_stop() -> None:
    before = job(1, "elastic", (B,), worker("w0", A))
    assert actions([before]) == (Grow(1, (B,)),)
    starting = job(1, "elastic", (B,), worker("w0", A), worker("w1", B), joined=frozenset({"w0"}))
    assert actions([starting]) == ()
    there = msgspec.structs.replace(starting, joined=frozenset({"w0", "w1"}))
    assert actions([there]) == (Shrink(1, ("w0",), 1),)


def test_two_that_exchange_seats_do_not_wait_for_each_other_for_ever() -> None:
    one = job(1, "elastic", (A, C), worker("w0", A), worker("w1", B))
    two = job(2, "elastic", (B, D), worker("w0", D), worker("w1", C))
    assert {type(action) for action in actions([one, two])} == {Shrink}


def test_two_that_exchange_their_only_seats_are_untied_by_stopping_one() -> None:
    one, two = job(1, "elastic", (B,), worker("w0", A)), job(2, "elastic", (A,), worker("w0", B))
    assert actions([one, two]) == (Stop(2, ("w0",)),)


def test_a_group_changes_as_a_whole() -> None:
    assert actions([job(1, "restart", (A, B), worker("w0", A))]) == (Stop(1, ("w0",)),)
    assert actions([job(1, "restart", (A, B), worker("w0", A, leaving="x"))]) == ()
    assert actions([job(1, "restart", (A, B))]) == (Start(1, (A, B)),)
    held = job(2, "elastic", (B,), worker("w0", B))
    assert actions([job(1, "restart", (A, B)), held]) == ()


def test_a_group_that_ends_by_itself_is_left_alone() -> None:
    assert actions([job(1, "rigid", (A, B), worker("w0", A), ending=True)]) == ()
    assert actions([job(1, "rigid", (), worker("w0", A), ending=True)]) == (Stop(1, ("w0",)),)


def test_nothing_is_launched_while_a_job_is_paused() -> None:
    assert actions([job(1, "elastic", (A,), paused=True)]) == ()


class World:
    """Processes that do what they are told, some time or other."""

    def __init__(self, seed: int, levels: list[Level]) -> None:
        self.random = random.Random(seed)
        self.jobs = [job(n, level, ()) for n, level in enumerate(levels)]
        self.names = Counter[int]()

    def retarget(self) -> None:
        """Any targets that fit: four devices, jobs of whole devices."""
        seats = [A, B, C, D]
        self.random.shuffle(seats)
        for n, s in enumerate(self.jobs):
            count = self.random.randint(0, min(2, len(seats)))
            self.jobs[n] = msgspec.structs.replace(s, target=tuple(sorted(seats.pop() for _ in range(count))))

    def turn(self) -> bool:
        """One round of actions, and something that happens; whether everything is as it should be."""
        told = actions(self.jobs)
        for action in told:
            self.carry_out(action)
        self.check()
        underway = any(w.leaving or w.name not in s.joined for s in self.jobs for w in s.workers)
        self.happen()
        return not told and not underway

    def carry_out(self, action: Action) -> None:
        s = self.jobs[action.job]
        if isinstance(action, (Stop, Shrink)):
            workers = tuple(
                msgspec.structs.replace(w, leaving="x") if w.name in action.workers else w for w in s.workers
            )
            self.jobs[action.job] = msgspec.structs.replace(s, workers=workers)
            return
        for seat in action.seats:
            self.names[action.job] += 1
            new = worker(f"w{self.names[action.job]}", seat, at_s=self.names[action.job])
            s = msgspec.structs.replace(s, workers=(*s.workers, new))
        self.jobs[action.job] = s

    def happen(self) -> None:
        """Somebody who was asked to leave ends, and somebody who was started joins."""
        leavers = [(n, w) for n, s in enumerate(self.jobs) for w in s.workers if w.leaving]
        if leavers:
            n, gone = self.random.choice(leavers)
            s = self.jobs[n]
            self.jobs[n] = msgspec.structs.replace(s, workers=tuple(w for w in s.workers if w is not gone))
        joining = [(n, w) for n, s in enumerate(self.jobs) for w in s.workers if w.name not in s.joined]
        if joining:
            n, new = self.random.choice(joining)
            self.jobs[n] = msgspec.structs.replace(self.jobs[n], joined=self.jobs[n].joined | {new.name})

    def check(self) -> None:
        used = Counter((w.seat.node, device) for s in self.jobs for w in s.workers for device in w.seat.devices)
        assert max(used.values(), default=0) <= 1, self.jobs


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10**6), st.lists(st.sampled_from(["elastic", "elastic", "restart", "rigid"]), min_size=1, max_size=3)
)
def test_it_gets_everywhere_and_never_seats_two_on_one_device(seed: int, levels: list[Level]) -> None:
    world = World(seed, levels)
    for _ in range(4):
        world.retarget()
        for _ in range(world.random.randint(0, 5)):
            world.turn()
    for _ in range(200):
        if world.turn():
            break
    else:
        pytest.fail(f"never settled: {world.jobs}")
    for s in world.jobs:
        assert Counter(w.seat for w in s.workers) == Counter(s.target)
