"""Jobs keep coming that may not be stopped once they run, and not all of them say the truth: nobody starves."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trickle import POLL_S, Program, Trickle

from strategies import fragile, view_of
from stretto.core import cycle
from stretto.core.cycle import CycleState, Settings
from stretto.core.policy import load
from stretto.core.reasons import Reason
from stretto.core.reservations import Wait
from stretto.core.snapshot import Snapshot

HAIR_S = 1e-6
POLICIES = {
    "srtf": {},
    "stretto": {},
    "afs-l": {},
    "elastic-srtf": {},
    "edf": {},
    "round-robin": {"quantum_s": 5.0},
    "gavel": {"round_s": 30.0, "reset_s": 60.0},
    "tiresias": {"running_first": False},
}


def wide_among_narrow(policy: str, narrow: Program, **options: object) -> Program:
    """What becomes of a job that needs both slots while others of one slot come every 50 s, and last for 100 s."""
    wide = Program(2, 60.0, 2, 10.0, hint_s=0.5)
    others = [Program(i + (i > 1), 50.0 * i, 1, 100.0, narrow.hint_s, narrow.kind) for i in range(40)]
    world = Trickle(2, [wide, *others], policy, **options)
    world.run(2000.0)
    assert not any(one.lost_s for one in others)
    return wide


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "narrow",
    [
        Program(0, 0.0, 1, 100.0, hint_s=1.0),
        Program(0, 0.0, 1, 100.0, kind="never-joins"),
        Program(0, 0.0, 1, 100.0, hint_s=1.0, kind="stays"),
    ],
    ids=["says that it is short", "says that it is elastic", "keeps its progress"],
)
def test_a_wide_job_starts_though_others_keep_coming(policy: str, narrow: Program) -> None:
    wide = wide_among_narrow(policy, narrow, **POLICIES[policy])
    assert wide.began_s <= 500.0


LYING = (*POLICIES, "fifo", "fit-first", "priority", "elastic-tiresias", "sjf")


@pytest.mark.parametrize("policy", LYING)
@pytest.mark.parametrize("hint_s", [1.0, 100.0, math.nan], ids=["short", "long", "unknown"])
def test_a_job_of_full_width_starts_though_small_ones_lie(policy: str, hint_s: float) -> None:
    """After a minute it has a reservation; its promised start, by what those that run say, is 20 s later at most, and
    then they end that really last for 20 s. Also where the policy would rather have others."""
    wide = Program(10, 50.0, 4, 10.0, hint_s)
    others = [Program(i + (i > 9), 5.0 * i, 1, 20.0, hint_s=5.0) for i in range(80)]
    options = {"running_first": True} if policy == "tiresias" else POLICIES.get(policy, {})
    world = Trickle(4, [wide, *others], policy, **options)
    world.run(400.0)
    late_s = 2 * options.get("round_s", 0.0) + POLL_S
    assert wide.began_s - wide.arrives_s <= 60.0 + 20.0 + 20.0 + late_s
    assert not any(one.lost_s for one in others)


def test_a_policy_that_passes_jobs_over_by_itself_may() -> None:
    """Also where it may stop whom it likes: the running jobs of a queue are served before those of it that wait."""
    wide = Program(2, 60.0, 2, 10.0)
    others = [Program(i + (i > 1), 50.0 * i, 1, 100.0) for i in range(40)]
    world = Trickle(2, [wide, *others], "tiresias")
    world.settings = Settings(stops_lose_work=True)
    world.run(2000.0)
    assert math.isnan(wide.began_s)


class Judged(Trickle):
    """Nobody who may be pinned passes a job after its promised start, but for those whose turn is before; and when
    those have ended that ran then the job starts."""

    reserved = 0

    def decide(self) -> None:
        before, waited = self.state.blocked, {n for n, one in self.there.items() if not one.workers}
        super().decide()
        came = [one for n, one in self.there.items() if n in waited and one.workers]
        self.reserved += sum(before[one.number].is_promised for one in came if one.number in before)
        for number in waited & self.state.blocked.keys():
            if not (one := self.there[number]).workers and self.state.blocked[number].is_promised:
                self._judge(one, came, {**before, **self.state.blocked})

    def _judge(self, waits: Program, came: list[Program], blocked: dict[int, Wait]) -> None:
        promised_s = blocked[waits.number].promised_s
        is_over = self.now_s > promised_s + HAIR_S
        some = came if is_over else self.there.values()
        fragile = [one for one in some if one.workers and one.kind != "joins"]
        if is_over:
            passed = [one.number for one in fragile if not self._is_before(one, waits, blocked)]
            assert not passed, f"{passed} pass {waits.number} at {self.now_s} s"
        ends_s = max((one.ends_s(self.now_s) for one in fragile), default=0.0)
        waits.until_s = max(waits.until_s, promised_s, ends_s)
        first = [one for one in self.there.values() if self._is_before(one, waits, blocked)]
        if not any(one.workers or one.number in self.state.blocked for one in first):
            assert self.now_s <= waits.until_s + HAIR_S, f"{waits.number} still waits at {self.now_s} s"

    def _is_before(self, one: Program, waits: Program, blocked: dict[int, Wait]) -> bool:
        if one.priority != waits.priority or one.number not in blocked:
            return one.priority > waits.priority
        rank = blocked[waits.number].since_s, waits.number
        return (blocked[one.number].since_s, one.number) < rank


def programs(seed: int, priorities: int) -> list[Program]:
    """More than six slots can do, until the end; half of them say something wrong of their length, or of what a stop
    would cost them."""
    draw = random.Random(seed)
    found, at_s = [], 0.0
    for number in range(60):
        at_s += draw.expovariate(1 / 18)
        lasts_s = draw.choice((5.0, 40.0, 120.0))
        hint_s = draw.choice((lasts_s, lasts_s, 1.0, 10 * lasts_s, math.nan))
        found.append(
            Program(
                number, round(at_s, 1), draw.choice((1, 1, 1, 2, 4, 6)), lasts_s, hint_s,
                draw.choice(("plain", "plain", "never-joins", "joins", "stays")), draw.randrange(priorities),
                preemptible=draw.random() < 0.3,
            )
        )  # fmt: skip
    return found


@settings(max_examples=30)
@given(policy=st.sampled_from(list(POLICIES)), seed=st.integers(0, 10**6), priorities=st.sampled_from([1, 3]))
def test_promises_are_kept_while_others_keep_coming(policy: str, seed: int, priorities: int) -> None:
    some = programs(seed, priorities)
    world = Judged(6, some, policy, **POLICIES[policy])
    world.run(some[-1].arrives_s)


def test_reservations_are_used() -> None:
    """So that the test above says something."""
    used = 0
    for policy, options in POLICIES.items():
        some = programs(7, 1)
        world = Judged(6, some, policy, **options)
        world.run(some[-1].arrives_s)
        used += world.reserved
    assert used >= 20


def test_a_long_queue_behind_a_reservation_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of all jobs are not computed for each of those that it holds back."""
    computed: list[int] = []
    need = Snapshot.need.fget
    assert need is not None
    monkeypatch.setattr(Snapshot, "need", property(lambda view: computed.append(len(view)) or need(view)))

    def looks(queued: int) -> int:
        computed.clear()
        running = [fragile(size=1, workers=1, remaining=1e4, ran_s=50.0) for _ in range(4)]
        jobs = [fragile(size=4, remaining=1e5), *running, *(fragile(size=1, remaining=1e5) for _ in range(queued))]
        outcome = cycle.decide(
            view_of(4, jobs, now_s=100.0), load("fifo", {}), CycleState(blocked={0: Wait(10.0)}), Settings()
        )
        assert (outcome.reason == Reason.RESERVED_FOR).sum() == queued
        return len(computed)

    assert looks(80) == looks(8)


def test_a_wide_job_is_watched_however_many_its_policy_prefers() -> None:
    running = [fragile(size=1, workers=1, remaining=1e4, ran_s=50.0) for _ in range(150)]
    wide, short = fragile(size=150, remaining=1e6), [fragile(size=1, remaining=1.0) for _ in range(150)]
    view = view_of(150, [*running, wide, *short], now_s=100.0)
    blocked = cycle.decide(view, load("srtf", {}), CycleState(), Settings()).state.blocked
    assert len(blocked) == 151
    assert blocked[150] == Wait(100.0, wished=False)
