"""The coordinator's answers, message by message."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from stretto.control import events as e
from stretto.control import stuck
from stretto.control.coordinator import begin, handle, wake_s
from stretto.control.journal import replay
from stretto.control.roster import Settings
from stretto.runtime import messages as m


class Desk:
    """A coordinator, and workers that say what they are told to say."""

    def __init__(self, workers: int = 0, want: int | None = None, min_workers: int | None = None) -> None:
        settings = Settings(token="secret", min_workers=min_workers or workers or 1, want=want or workers or 1)
        self.state = begin(settings)
        self.now_s = 0.0
        self.records: list[object] = []
        self.lines: dict[str, int] = {}
        self.numbers = itertools.count(1)
        for i in range(workers):
            self.join(f"w{i + 1}")
        for i in range(workers):
            self.say(f"w{i + 1}", m.Formed(generation=1, applied=0))

    def tell(self, event: e.Event) -> list[e.Effect]:
        self.state, effects = handle(self.state, event, self.now_s)
        self.records += [x.record for x in effects if isinstance(x, e.Journal)]
        return list(effects)

    def hello(self, name: str, **changes: object) -> list[e.Effect]:
        self.lines[name] = next(self.numbers)
        given: dict[str, object] = {"worker": name, "incarnation": f"i-{name}", "address": "h:1"}
        return self.tell(e.Received(self.lines[name], m.Hello(**(given | changes))))  # type: ignore[arg-type]

    def say(self, name: str, message: m.Message) -> list[e.Effect]:
        return self.tell(e.Received(self.lines[name], message))

    def join(self, name: str, **fingerprint: str) -> list[e.Effect]:
        return self.hello(name) + self.say(name, m.Ready(fingerprint=fingerprint))

    def close(self, name: str) -> list[e.Effect]:
        return self.tell(e.Closed(self.lines[name]))

    def wait(self, seconds: float) -> list[e.Effect]:
        self.now_s += seconds
        return self.tell(e.Tick())


def sent(effects: list[e.Effect], kind: type[m.Message]) -> list[str]:
    return [x.worker for x in effects if isinstance(x, e.Send) and isinstance(x.message, kind)]


def refusals(effects: list[e.Effect]) -> list[str]:
    return [x.text for x in effects if isinstance(x, e.Refuse)]


def failures(effects: list[e.Effect]) -> list[str]:
    return [x.reason for x in effects if isinstance(x, e.Failed)]


def beat(step: int, generation: int = 1, **more: Any) -> m.Heartbeat:
    return m.Heartbeat(generation=generation, loop=0, step=step, applied=step, **more)


# Who is who.


def test_another_protocol_is_refused() -> None:
    assert "protocol 9" in refusals(Desk().hello("w1", protocol=9))[0]


def test_a_message_before_the_hello_is_refused() -> None:
    desk = Desk()
    assert refusals(desk.tell(e.Received(5, m.Ready()))) == ["a worker says hello first"]


def test_a_second_process_with_the_same_name_is_refused_until_the_first_is_gone() -> None:
    desk = Desk(2)
    assert "exists already" in refusals(desk.hello("w1", incarnation="other"))[0]
    desk.tell(e.Exited("w1"))
    assert not refusals(desk.hello("w1", incarnation="other"))


def test_the_same_process_on_a_new_connection_replaces_the_old_one() -> None:
    desk = Desk(2)
    old = desk.lines["w1"]
    effects = desk.hello("w1", generation=1, holds_state=True)
    assert e.Drop(old) in effects
    assert not [x for x in desk.tell(e.Closed(old)) if isinstance(x, e.Announced)]
    assert desk.state.number == 1


def test_an_evicted_worker_that_comes_back_is_told_so_also_after_a_restart() -> None:
    desk = Desk(2)
    desk.close("w2")
    assert sent(desk.hello("w2", generation=1), m.Evict) == ["w2"]
    desk.state = replay(desk.records, desk.state.settings)  # type: ignore[arg-type]
    effects = desk.hello("w2", generation=1)
    assert sent(effects, m.Evict) == ["w2"]
    assert not sent(effects, m.Welcome)


def test_a_worker_of_a_generation_that_is_not_ours_is_refused() -> None:
    assert "knows nothing" in refusals(Desk().hello("w1", generation=7))[0]


def test_a_process_that_has_ended_is_on_no_list_though_its_last_words_are_awaited() -> None:
    desk = Desk(3)
    assert not desk.tell(e.Exited("w3"))
    announced = [x for x in desk.close("w2") if isinstance(x, e.Announced)]
    assert [x.members for x in announced] == [("w1",)]


def test_the_end_of_a_process_is_believed_at_once_after_a_restart() -> None:
    desk = Desk(2)
    desk.state = replay(desk.records, desk.state.settings)  # type: ignore[arg-type]
    desk.hello("w1", generation=1)
    announced = [x for x in desk.tell(e.Exited("w2")) if isinstance(x, e.Announced)]
    assert [x.members for x in announced] == [("w1",)]


def test_numbers_are_never_used_twice_across_restarts() -> None:
    desk = Desk(3)
    desk.close("w3")
    before = desk.state.number
    desk.state = replay(desk.records, desk.state.settings)  # type: ignore[arg-type]
    desk.hello("w1", generation=2), desk.hello("w2", generation=2)
    desk.close("w2")
    assert desk.state.number == before + 1


# What workers must have in common.


def test_a_newcomer_that_differs_is_evicted_and_the_job_goes_on() -> None:
    desk = Desk(1, want=2)
    desk.state = begin(Settings(token="secret", want=2))
    desk.join("w1", dataset="100", model="a")
    desk.say("w1", m.Formed(generation=1, applied=0))
    effects = desk.join("w2", dataset="120", model="a")
    reasons = [x.reason for x in effects if isinstance(x, e.Evicted)]
    assert "dataset is 120 on w2 and 100 on w1" in reasons[0]
    assert "model" not in reasons[0].split(";")[0]
    assert sent(effects, m.Evict) == ["w2"]
    assert not failures(effects)
    assert desk.state.number == 1


def test_workers_that_differ_before_anybody_trains_fail_the_job() -> None:
    desk = Desk(min_workers=2, want=2)
    desk.join("w1", parameters="abc")
    effects = desk.join("w2", parameters="abd")
    assert "parameters is abd on w2 and abc on w1" in failures(effects)[0]
    assert sent(effects, m.Fail) == ["w1", "w2"]


def test_the_reference_survives_a_restart() -> None:
    desk = Desk(want=2)
    desk.join("w1", dataset="100")
    desk.say("w1", m.Formed(generation=1, applied=0))
    desk.state = replay(desk.records, desk.state.settings)  # type: ignore[arg-type]
    assert sent(desk.join("w2", dataset="120"), m.Evict) == ["w2"]


# Loops.


def loop_end(applied: int, how: str = "end", generation: int = 1, step: int = -1) -> m.LoopEnd:
    return m.LoopEnd(generation=generation, loop=0, applied=applied, how=how, step=step)


def test_a_loop_ends_for_all_when_the_last_one_arrives() -> None:
    desk = Desk(2)
    assert not sent(desk.say("w1", loop_end(9)), m.End)
    assert sent(desk.say("w2", loop_end(9)), m.End) == ["w1", "w2"]
    assert desk.state.loops_done == 1
    assert {"kind": "loops", "done": 1, "applied": 9} in desk.records


def test_a_repeated_end_of_a_finished_loop_is_answered_again() -> None:
    desk = Desk(1)
    desk.say("w1", loop_end(9))
    assert sent(desk.say("w1", loop_end(9)), m.End) == ["w1"]
    assert desk.state.loops_done == 1


def test_the_end_of_a_loop_in_an_older_generation_does_not_count() -> None:
    desk = Desk(3)
    desk.say("w1", loop_end(9))
    desk.close("w3")
    desk.say("w1", m.Formed(generation=2, applied=9)), desk.say("w2", m.Formed(generation=2, applied=9))
    assert not sent(desk.say("w2", loop_end(9, generation=2)), m.End)
    assert sent(desk.say("w1", loop_end(9, generation=2)), m.End) == ["w1", "w2"]


def test_all_may_break_at_the_same_step() -> None:
    desk = Desk(2)
    desk.say("w1", loop_end(4, "break"))
    assert sent(desk.say("w2", loop_end(4, "break")), m.End) == ["w1", "w2"]


def _wait_for_it(desk: Desk, *, seconds: int = 12, waits: bool = True) -> list[e.Effect]:
    said: list[e.Effect] = []
    for _ in range(seconds):
        said += desk.wait(1.0) + desk.say("w1", beat(4)) + desk.say("w2", beat(4, waits=waits))
    return said


@pytest.mark.parametrize(
    "after",
    [lambda desk: desk.say("w2", beat(5)), lambda desk: desk.say("w2", loop_end(9)), _wait_for_it],
    ids=["others are beyond", "others reach the end", "others wait for it"],
)
def test_a_break_that_not_all_take_fails_the_job(after: Callable[[Desk], list[e.Effect]]) -> None:
    desk = Desk(2)
    desk.say("w1", beat(4)), desk.say("w2", beat(4))
    desk.say("w1", loop_end(4, "break", step=4))
    effects = after(desk)
    assert "w1 left it (break) after step 4" in failures(effects)[0]
    assert "job.stop()" in failures(effects)[0]
    assert sent(effects, m.Fail) == ["w1", "w2"]


def test_who_is_still_in_its_body_may_break_out_of_the_loop_later_than_others() -> None:
    desk = Desk(2)
    desk.say("w1", beat(4)), desk.say("w2", beat(4))
    desk.say("w1", loop_end(4, "break", step=4))
    assert not failures(_wait_for_it(desk, seconds=500, waits=False))
    assert not failures(_wait_for_it(desk, seconds=8))
    assert not failures(_wait_for_it(desk, seconds=1, waits=False))
    assert not failures(_wait_for_it(desk, seconds=8)), "it counts from when it began to wait"
    assert sent(desk.say("w2", loop_end(4, "break")), m.End) == ["w1", "w2"]


# Ends.


def test_an_error_fails_the_job_once() -> None:
    desk = Desk(2)
    first = desk.say("w1", m.Bye(reason="error", text="Traceback: boom"))
    second = desk.say("w2", m.Bye(reason="error", text="Traceback: bang"))
    assert failures(first) == ["worker w1 failed: Traceback: boom"]
    assert failures(second) == []
    assert sent(first, m.Fail) == ["w2"]
    assert sent(desk.hello("w3"), m.Fail) == ["w3"]


def test_an_error_of_a_newcomer_is_reported_and_the_job_goes_on() -> None:
    desk = Desk(1, want=2)
    desk.hello("w2")
    effects = desk.say("w2", m.Bye(reason="error", text="no such device"))
    assert [x for x in effects if isinstance(x, e.Evicted)] == [e.Evicted("w2", "no such device")]
    assert not failures(effects)


def test_the_job_is_done_when_all_members_have_finished() -> None:
    desk = Desk(2)
    desk.hello("w3")
    first = desk.say("w1", m.Bye(reason="finished")) + desk.close("w1")
    assert not [x for x in first if isinstance(x, (e.Done, e.Announced))]
    last = desk.say("w2", m.Bye(reason="finished"))
    assert e.Done() in last
    assert sent(last, m.Release) == ["w3"]
    assert wake_s(desk.state, desk.now_s) == float("inf")


def test_a_member_that_dies_after_another_has_finished_does_not_keep_the_job_alive() -> None:
    desk = Desk(2)
    desk.say("w1", m.Bye(reason="finished"))
    desk.close("w2")
    assert not desk.state.done
    assert e.Done() in desk.tell(e.Exited("w2"))


# Leaving.


def test_a_worker_told_to_leave_before_it_came_is_released_when_it_comes() -> None:
    desk = Desk(1)
    desk.tell(e.Want(None, ("w9",)))
    assert sent(desk.hello("w9"), m.Release) == ["w9"]


def test_a_smaller_want_releases_newcomers_first() -> None:
    desk = Desk(2, want=3)
    desk.hello("w3")
    assert sent(desk.tell(e.Want(2)), m.Release) == ["w3"]
    assert desk.state.number == 1


def test_the_same_want_again_leaves_a_replacement_alone() -> None:
    """A newcomer above the wanted size is there to replace somebody: it waits until that one is told to leave."""
    desk = Desk(2)
    desk.join("w3")
    assert not desk.tell(e.Want(2))
    announced = [x for x in desk.tell(e.Want(2, ("w1",))) if isinstance(x, e.Announced)]
    assert announced[0].members == ("w2", "w3")
    assert announced[0].leavers == ("w1",)


@pytest.mark.parametrize("proof", ["committed", "one two steps on", "all one step on", "end of loop"])
def test_a_leaver_is_released_when_the_others_have_committed(proof: str) -> None:
    desk = Desk(3)
    desk.tell(e.Want(2))
    desk.say("w1", m.Formed(generation=2, applied=5))
    assert not sent(desk.say("w2", m.Formed(generation=2, applied=5)), m.Release)
    if proof == "committed":
        effects = desk.say("w2", m.Committed(generation=2, applied=6))
    elif proof == "one two steps on":
        assert not sent(desk.say("w1", beat(6, 2)), m.Release)
        effects = desk.say("w1", beat(7, 2))
    elif proof == "all one step on":
        effects = desk.say("w1", beat(6, 2)) + desk.say("w2", beat(6, 2))
    else:
        effects = desk.say("w1", loop_end(5, generation=2)) + desk.say("w2", loop_end(5, generation=2))
    assert sent(effects, m.Release) == ["w3"]


# Order of effects.


def test_every_list_is_journalled_before_it_is_sent() -> None:
    desk = Desk(3)
    effects = desk.close("w2")
    kinds = [
        type(x).__name__
        for x in effects
        if isinstance(x, e.Journal) or (isinstance(x, e.Send) and isinstance(x.message, m.Switch))
    ]
    assert kinds == ["Journal", "Journal", "Send", "Send"]


def test_it_asks_to_be_woken_only_in_the_future() -> None:
    desk = Desk(2)
    assert wake_s(desk.state, 0.0) == 5.0
    desk.close("w1"), desk.close("w2")
    assert wake_s(desk.state, 30.0) == 65.0


def test_a_coordinator_that_slept_blames_nobody() -> None:
    desk = Desk(2)
    desk.now_s = 30.0
    desk.tell(e.Slept(28.0))
    assert desk.say("w1", beat(3))
    assert desk.state.number == 1
    desk.wait(4.0)
    assert desk.state.active is not None
    assert desk.state.names(desk.state.active.members) == ("w1",)


def test_no_leaver_stands_in_while_another_may_hold_a_later_state() -> None:
    desk = Desk(2)
    desk.join("w3")
    desk.tell(e.Want(2, ("w2",)))
    desk.say("w1", m.Formed(generation=2, applied=5)), desk.say("w3", m.Formed(generation=2, applied=5))
    desk.tell(e.Want(None, ("w3",)))
    desk.say("w1", m.Formed(generation=3, applied=9))
    desk.close("w1"), desk.close("w3")
    assert not [x for x in desk.tell(e.Exited("w1")) if isinstance(x, e.Announced)]
    announced = [x for x in desk.tell(e.Exited("w3")) if isinstance(x, e.Announced)]
    assert [x.members for x in announced] == [("w2",)]


# Who hangs.


def still(seconds: float, place: str = "loop", generation: int = 1, **more: Any) -> m.Heartbeat:
    stuck = m.Stuck(seconds=seconds, place=place, line="train.py:41 train_step", **more)
    return beat(3, generation, stuck=(stuck,))


def to_name(desk: Desk) -> list[str]:
    return [worker.name for worker in stuck.to_name(desk.state)]


def test_who_hangs_is_named_and_who_waits_for_it_is_not() -> None:
    desk = Desk(workers=3)
    desk.say("w1", still(70, waits=True))
    assert to_name(desk) == []
    assert not failures(desk.say("w2", still(65)))
    desk.say("w3", still(70, waits=True))
    assert to_name(desk) == ["w2"]
    assert stuck.describe(stuck.to_name(desk.state)[0]) == (
        "w2 has made no step for 65 s, in the loop's body at train.py:41 train_step"
    )
    desk.say("w2", beat(4))
    assert to_name(desk) == []


def test_who_hangs_in_its_loop_for_too_long_fails_the_job() -> None:
    desk = Desk(workers=2)
    desk.say("w1", still(900, waits=True, overdue=True))
    [reason] = failures(desk.say("w2", still(901, overdue=True, stack=("train.py:41 train_step", "ssl.py:7 read"))))
    assert reason.startswith("worker w2 has made no step for 901 s, in the loop's body at train.py:41 train_step")
    assert "ssl.py:7 read" in reason
    assert "STRETTO_STUCK_ENDED_S" in reason
    assert desk.state.failed == reason


@pytest.mark.parametrize("gave_up", [False, True])
def test_who_hangs_while_the_others_wait_for_it_in_a_new_generation_fails_the_job(gave_up: bool) -> None:
    desk = Desk(workers=3)
    desk.close("w3")
    desk.say("w1", beat(3, generation=2))
    if gave_up:
        desk.say("w1", m.Broken(generation=2, cause="no word from rank 1", suspects=("w2",)))
    assert not failures(desk.say("w1", still(900, waits=True, overdue=True, generation=2)))
    [reason] = failures(desk.say("w2", still(900, overdue=True)))
    assert reason.startswith("worker w2 has made no step for 900 s")


def test_who_hangs_outside_of_its_loops_is_only_named() -> None:
    desk = Desk(workers=2)
    for name, place in (("w1", "after"), ("w2", "first")):
        assert not failures(desk.say(name, still(10_000, place)))
    assert to_name(desk) == ["w1", "w2"]


def test_members_that_wait_for_each_other_all_hang() -> None:
    desk = Desk(workers=2)
    desk.say("w1", still(70, waits=True))
    desk.say("w2", still(80, waits=True))
    assert to_name(desk) == ["w2", "w1"]
    [reason] = failures(desk.say("w1", still(900, waits=True, overdue=True)))
    assert "waiting for the others" in reason
    assert "as all 2 workers do" in reason


def test_a_worker_that_went_is_not_named() -> None:
    desk = Desk(workers=2)
    desk.say("w2", still(70))
    desk.tell(e.Exited("w2"))
    assert to_name(desk) == []
