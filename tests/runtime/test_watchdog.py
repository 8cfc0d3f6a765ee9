"""When a script that stands still is named, and what is said of it; time is virtual, stacks are real."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from stretto.runtime import messages as m
from stretto.runtime.member import Member
from stretto.runtime.watchdog import ENDED, NAMED, Limits, Watchdog, limits


class Worker:
    """A watchdog that is looked at once a second."""

    def __init__(self, **given: float) -> None:
        self.now_s = 0.0
        self.dog = Watchdog(lambda: self.now_s, Limits(**given))

    def steps(self, count: int, length_s: float = 1.0) -> None:
        self.dog.enter()
        for _ in range(count):
            assert self.look_for(length_s) is None
            self.dog.step()

    def look_for(self, seconds: float) -> m.Stuck | None:
        found = self.dog.look()
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 1.0)
            found = self.dog.look()
        return found


def test_it_is_named_after_a_minute_and_ended_after_fifteen() -> None:
    worker = Worker()
    worker.steps(3)
    assert worker.look_for(59) is None
    named = worker.look_for(2)
    assert named is not None
    assert (named.place, named.overdue) == ("loop", False)
    assert 59 <= named.seconds <= 61
    assert worker.look_for(838) is not None
    assert worker.look_for(2).overdue  # type: ignore[union-attr]


def test_slow_steps_have_more_time() -> None:
    worker = Worker()
    worker.steps(5, length_s=50)
    assert worker.look_for(499) is None
    assert not worker.look_for(990).overdue  # type: ignore[union-attr]
    assert worker.look_for(20).overdue  # type: ignore[union-attr]


def test_every_pass_through_the_body_is_a_move() -> None:
    worker = Worker()
    worker.steps(2)
    for _ in range(100):
        assert worker.look_for(50) is None
        worker.dog.moves()


def test_the_first_pass_is_named_late_and_never_ended() -> None:
    worker = Worker()
    worker.dog.enter()
    assert worker.look_for(899) is None
    named = worker.look_for(100_000)
    assert named is not None
    assert (named.place, named.overdue) == ("first", False)


def test_outside_of_loops_it_is_named_and_never_ended() -> None:
    worker = Worker()
    worker.steps(2)
    worker.dog.leave()
    assert worker.look_for(59) is None
    named = worker.look_for(100_000)
    assert named is not None
    assert (named.place, named.overdue) == ("after", False)
    worker.dog.enter()
    assert worker.look_for(1) is None


def test_nothing_is_said_before_the_first_loop() -> None:
    assert Worker().look_for(100_000) is None


def test_what_a_frozen_process_slept_through_does_not_count() -> None:
    worker = Worker()
    worker.steps(2)
    worker.now_s += 100_000
    assert worker.dog.look() is None
    assert worker.look_for(50) is None


@pytest.mark.parametrize(
    ("given", "named", "ended"),
    [
        ({"named_s": 0}, False, True),
        ({"ended_s": 0}, True, False),
        ({"named_s": 0, "ended_s": 0}, False, False),
        ({"named_s": 2000, "ended_s": 5000}, False, False),
    ],
)
def test_limits_can_be_set_and_taken_away(given: dict[str, float], named: bool, ended: bool) -> None:
    worker = Worker(**given)
    worker.steps(2)
    assert (worker.look_for(800) is not None) is named
    found = worker.look_for(200)
    assert (found is not None and found.overdue) is ended


def test_an_end_before_the_name_names_it_too() -> None:
    worker = Worker(ended_s=5)
    worker.steps(2, length_s=0.1)
    assert worker.look_for(7).overdue  # type: ignore[union-attr]


def test_limits_come_from_the_environment() -> None:
    assert limits({}) == Limits(60.0, 900.0)
    assert limits({NAMED: "1.5", ENDED: "0"}) == Limits(1.5, 0.0)


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "5 min"])
def test_wrong_limits_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=ENDED):
        limits({ENDED: text})


@contextmanager
def standing(
    dog: Watchdog, wait: Callable[[threading.Event], object], released: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """A training thread that has made its steps and stands in `wait`."""
    there, go = threading.Event(), threading.Event()

    def train() -> None:
        dog.enter()
        dog.step()
        there.set()
        wait(go)

    thread = threading.Thread(target=train)
    thread.start()
    there.wait()
    try:
        yield
    finally:
        go.set()
        released()
        thread.join()


def hangs_deep_inside(go: threading.Event, depth: int = 30) -> None:
    if depth:
        hangs_deep_inside(go, depth - 1)
    else:
        go.wait()


def test_it_says_where_the_training_thread_stands() -> None:
    worker = Worker()
    with standing(worker.dog, hangs_deep_inside):
        found = worker.look_for(70)
    assert found is not None
    assert not found.waits
    assert "test_watchdog.py" in found.line
    assert found.line.endswith(" hangs_deep_inside"), "libraries are no place of the user's"
    assert "threading.py" in found.stack[-1]
    assert len(found.stack) <= 8
    assert sum(map(len, found.stack)) <= 2048


def test_who_waits_in_a_wait_of_ours_waits_for_others() -> None:
    worker = Worker()
    member = Member("w0", "i0", "secret", "here:1")

    def wait(go: threading.Event) -> None:
        member.wait(go.is_set)

    def wake() -> None:
        with member.changed:
            member.changed.notify_all()

    with standing(worker.dog, wait, wake):
        found = worker.look_for(70)
    assert found is not None
    assert found.waits
    assert found.line.endswith(" wait")


def test_it_may_wait_elsewhere() -> None:
    worker = Worker()
    worker.dog.waits = lambda: True
    worker.steps(2)
    assert worker.look_for(70).waits  # type: ignore[union-attr]


def test_heartbeats_tell_and_older_peers_read_them() -> None:
    member = Member("w0", "i0", "secret", "here:1")
    assert member.heartbeat().stuck == ()
    now_s = [0.0]
    member.watchdog = Watchdog(lambda: now_s[0])
    member.watchdog.enter()
    member.watchdog.step()
    for _ in range(70):
        now_s[0] += 1
        beat = member.heartbeat()
    assert m.decode(m.encode(beat)) == beat
    assert beat.stuck[0].seconds > 60
