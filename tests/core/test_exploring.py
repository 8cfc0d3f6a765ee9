"""Exploring sizes: the fastest one is found, for little, and nobody else pays for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import job, view_of
from stretto.core import cycle, exploring
from stretto.core.cycle import CycleState, Outcome, Settings
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.core.policy import load
from stretto.core.reasons import Reason, explain
from stretto.core.snapshot import Snapshot


def seen(*sizes: tuple[int, float], steps: float = 20.0, spread: float = 0.0) -> Curve:
    """Sizes and the rates that were measured there."""
    curve = Curve()
    for workers, rate in sizes:
        curve = curves.observe(curve, workers, 1 / rate, steps, spread / rate)
    return curve


def after(curve: Curve, low: int = 1, high: int = 16) -> int:
    return exploring.next_size(curve, low, high, lambda n: n)


def test_sizes_double_while_the_gain_is_clear() -> None:
    assert after(Curve()) == 0
    assert after(seen((1, 10))) == 2
    assert after(seen((1, 10), (2, 18))) == 4
    assert after(seen((1, 10), (2, 18)), high=3) == 3
    assert after(seen((1, 10), (2, 18), (4, 30), (8, 50), (16, 80))) == 0


def test_one_clear_fall_ends_the_way_up() -> None:
    assert after(seen((1, 10), (2, 6))) == 0
    assert after(seen((1, 10), (2, 18), (4, 12))) in (0, 3)


def test_what_is_unclear_is_measured_longer_and_then_equal() -> None:
    noisy = seen((1, 10), (2, 10.5), steps=8, spread=2.0)
    assert after(noisy) == 2
    assert after(seen((1, 10), (2, 10.1))) == 4, "no gain, but no fall either: one more"
    assert after(seen((1, 10), (2, 10.1), (4, 10.2))) == 0
    assert exploring.best(curves.measured(seen((1, 10), (2, 10.2)))).workers == 1


def test_a_size_between_is_tried_where_the_curve_promises_something() -> None:
    around = (1, 10), (2, 18.8), (4, 29.1), (8, 29.1), (16, 18.8)
    assert after(seen(*around)) == 6
    assert after(seen(*around, (6, 31.0))) == 0
    assert after(seen((1, 10), (2, 3))) == 0


def test_who_began_in_the_middle_looks_once_at_half_of_it() -> None:
    assert after(seen((8, 50), (16, 20))) == 4
    assert after(seen((4, 40), (8, 50), (16, 20))) in (0, 11)


# In the cycle.


def measuring(curve: Curve | None, workers: int, **columns: Any) -> dict[str, Any]:
    columns.setdefault("remaining", 1e5)
    return job(min_workers=1, max_workers=8, workers=workers, **columns) | {"curve": curve}


def shown(gpus: int, jobs: Sequence[dict[str, Any]]) -> Snapshot:
    view = view_of(gpus, [{k: v for k, v in one.items() if k != "curve"} for one in jobs])
    found = {j: one["curve"] for j, one in enumerate(jobs) if one.get("curve") is not None}
    explores = np.array(["curve" in one for one in jobs], np.bool_)
    return msgspec.structs.replace(view, measured=found, explores=explores)


def decide(view: Snapshot, policy: str = "stretto") -> Outcome:
    return cycle.decide(view, load(policy), CycleState(), Settings())


def test_a_job_starts_at_its_minimum_or_where_its_class_was_fastest() -> None:
    view = shown(8, [measuring(None, 0)])
    assert decide(view).workers.tolist() == [1]
    known = msgspec.structs.replace(view, guess=np.array([4], np.int64))
    assert decide(known).workers.tolist() == [4]


def test_it_stays_where_it_is_until_that_was_measured() -> None:
    assert decide(shown(8, [measuring(seen((1, 10)), 2)])).workers.tolist() == [2]
    assert decide(shown(8, [measuring(seen((1, 10)), 1)])).workers.tolist() == [2]


@pytest.mark.parametrize("policy", ["stretto", "elastic-fifo", "afs-l", "elastic-srtf"])
def test_it_never_stays_beyond_the_size_where_it_is_fastest(policy: str) -> None:
    curve = seen((1, 10), (2, 18), (4, 12), (3, 17))
    assert decide(shown(8, [measuring(curve, 4)]), policy).workers.tolist() == [2]


def test_who_began_in_the_middle_is_tried_at_half_of_it() -> None:
    curve = seen((4, 30), (8, 20))
    outcome = decide(shown(8, [measuring(curve, 4)]))
    assert (outcome.workers.tolist(), outcome.reason.tolist()) == ([2], [Reason.EXPLORES])


def test_a_policy_that_resizes_nobody_gives_what_was_asked_for() -> None:
    asked = measuring(seen((1, 10)), 0, requested=4)
    assert decide(shown(8, [asked]), "fifo").workers.tolist() == [4]
    assert decide(shown(8, [measuring(seen((1, 10), (4, 9)), 4, requested=4)]), "gang").workers.tolist() == [4]


def test_nobody_waits_or_shrinks_for_an_exploration() -> None:
    known = measuring(seen((1, 10), (2, 18)), 4)
    assert decide(shown(4, [known])).workers.tolist() == [4]
    newcomer = job(size=2, remaining=10.0)
    outcome = decide(shown(4, [known, newcomer]))
    assert outcome.workers.tolist() == [2, 2]


def test_exploring_costs_no_more_than_a_part_of_what_is_left() -> None:
    """Two sizes without gain: a third may cost 2 resizes of 1 s and 0.25 s, after 2 s for the second. 5 % are 85 s."""
    equal = {"curve": seen((1, 10), (2, 10.1)), "workers": 1, "rate": [0.0, *[10.0] * 8], "resize_s": 1.0}
    assert decide(shown(8, [measuring(**equal, remaining=900.0)])).workers.tolist() == [4]
    assert decide(shown(8, [measuring(**equal, remaining=800.0)])).workers.tolist() == [1]
    young = decide(shown(8, [measuring(**equal, remaining=math.nan, ran_s=10.0)]))
    assert young.workers.tolist() == [1]
    assert young.wake_s == pytest.approx(85.0 - 10.0, abs=0.3)
    old = decide(shown(8, [measuring(**equal, remaining=math.nan, ran_s=86.0)]))
    assert old.workers.tolist() == [4]
    assert old.reason.tolist() == [Reason.EXPLORES]


def test_what_promises_to_pay_is_tried_at_once() -> None:
    """The next size is believed to save 3/8 of what is left: one and a half times 2.25 s, of 9 s or more."""
    promising = {"curve": seen((1, 10)), "workers": 1, "rate": [0.0, 10.0, *[16.0] * 7], "resize_s": 1.0}
    assert decide(shown(8, [measuring(**promising, remaining=95.0)])).workers.tolist() == [2]
    assert decide(shown(8, [measuring(**promising, remaining=85.0)])).workers.tolist() == [1]
    assert decide(shown(8, [measuring(**promising, remaining=math.nan, ran_s=9.5)])).workers.tolist() == [2]
    young = decide(shown(8, [measuring(**promising, remaining=math.nan, ran_s=5.0)]))
    assert young.workers.tolist() == [1]
    assert young.wake_s == pytest.approx(9.0 - 5.0, abs=0.01)


def test_policies_may_give_a_job_the_next_size_on_its_way_up() -> None:
    """A job that is known to use everything does not keep another, of which little is known yet, at its minimum."""
    rates = [0.0, *(10.0 * n**0.9 for n in range(1, 9))]
    wide = measuring(seen(*((n, rates[n]) for n in (1, 2, 4, 8))), 7, rate=rates)
    new = measuring(seen((1, 10)), 1, rate=[0.0, 10.0, *[16.0] * 7])
    for policy in ("stretto", "afs-l"):
        assert decide(shown(8, [wide, new]), policy).workers.tolist() == [6, 2]
    waiting = [job(size=1, remaining=1e5) for _ in range(7)]
    crowded = decide(shown(8, [wide, new, *waiting]))
    assert crowded.workers.tolist()[1] <= 1, "while somebody waits nothing is tried"
    fell = measuring(seen((1, 10), (2, 6)), 1, rate=[0.0, 10.0, *[6.0] * 7])
    assert decide(shown(8, [wide, fell])).workers.tolist() == [7, 1]


@pytest.mark.parametrize("policy", ["stretto", "elastic-fifo", "afs-l"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_job_that_tells_of_no_steps_stays_as_it_is(policy: str, workers: int) -> None:
    for ran_s in (29.0, 31.0, 1e5):
        silent = measuring(None, workers, ran_s=ran_s, changed_s=-ran_s, requested=8)
        assert decide(shown(8, [silent]), policy).workers.tolist() == [workers]


@pytest.mark.parametrize(("low", "step"), [(1, 2), (1, 3), (2, 4), (4, 8), (2, 2), (3, 0)])
def test_sizes_that_go_up_by_more_than_the_minimum_are_tried(low: int, step: int) -> None:
    sizes = [low + step * i for i in range(9)] if step else [low, 4, 8, 16]
    possible = lambda n: max((size for size in sizes if size <= n), default=0)  # noqa: E731
    first = exploring.next_size(seen((low, 10)), low, 16, possible)
    assert first == possible(max(2 * low, sizes[1]))
    assert exploring.next_size(seen((low, 10), (16, 90)), low, 16, possible) == 0


def test_who_tells_of_no_step_at_its_size_keeps_nobody_from_exploring() -> None:
    def sizes(waited_s: float) -> list[int]:
        stuck = measuring(seen((1, 10)), 2, width=250, changed_s=-waited_s)
        other = measuring(seen((1, 10)), 1, width=250)
        view = shown(4, [stuck, other])
        view = msgspec.structs.replace(view, placed=np.array([[2], [1]], np.int64))
        return cycle.decide(view, load("stretto"), CycleState(), Settings(placement="pack")).workers.tolist()

    assert sizes(5.0) == [2, 1]
    assert sizes(60.0) == [2, 2]


def test_a_smaller_size_is_kept_until_it_was_measured() -> None:
    """Coming from its class at 4 workers it is tried at 2, and does not flap in between."""
    rates = [0.0, *(10.0 * n**0.9 for n in range(1, 9))]
    at_four = seen((4, rates[4]), (8, rates[4]))
    before = decide(shown(8, [measuring(at_four, 4, rate=rates, remaining=1e5)]))
    assert before.workers.tolist() == [2]
    trying = measuring(at_four, 2, rate=rates, remaining=1e5, changed_s=-1.0)
    assert decide(shown(8, [trying])).workers.tolist() == [2]
    stuck = measuring(at_four, 2, rate=rates, remaining=1e5, changed_s=-60.0)
    assert decide(shown(8, [stuck])).workers.tolist() == [4]
    measured = measuring(seen((2, rates[2]), (4, rates[4]), (8, rates[4])), 2, rate=rates, remaining=1e5)
    assert decide(shown(8, [measured])).workers.tolist() == [4]


def test_time_at_a_small_size_that_was_no_trial_costs_nothing() -> None:
    """A job that had to wait at its minimum for an hour may still look between two sizes."""
    around = seen((2, 18.8), (4, 29.1), (8, 29.1), (16, 18.8))
    for steps in (20.0, 1e4):
        curve = curves.observe(around, 1, 1 / 10, steps)
        rates = [0.0, *(exploring_rate(n) for n in range(1, 17))]
        view = shown(16, [measuring(curve, 8, rate=rates, remaining=1e4, most=16)])
        assert decide(view).workers.tolist() == [6]


def exploring_rate(workers: int) -> float:
    return float(np.interp(workers, [1, 2, 4, 8, 16], [10, 18.8, 29.1, 29.1, 18.8]))


def test_where_devices_are_shared_one_explores_at_a_time() -> None:
    curve = seen((1, 10))
    view = shown(4, [measuring(curve, 1, width=250), measuring(curve, 1, width=250)])
    placed = np.array([[1], [1]], np.int64)
    view = msgspec.structs.replace(view, placed=placed, nodes=msgspec.structs.replace(view.nodes))
    outcome = cycle.decide(view, load("stretto"), CycleState(), Settings(placement="pack"))
    assert outcome.workers.tolist() == [2, 1]


SHAPES: dict[str, Callable[[int], float]] = {
    "scales": lambda n: 10.0 * n,
    "saturates": lambda n: 10.0 / (0.2 + 0.8 / n),
    "falls": lambda n: 10.0 / (1 + 0.5 * (n - 1)),
    "peak": lambda n: 10.0 / (1 / n + 0.06 * (n - 1)),
}


@given(shape=st.sampled_from(list(SHAPES)), seed=st.integers(0, 10_000), noise=st.sampled_from([0.0, 0.03, 0.1]))
def test_the_fastest_size_is_found_for_little(shape: str, seed: int, noise: float) -> None:
    """Windows of eight steps, one decision after each, until nothing changes for three of them."""
    random, rate = np.random.default_rng(seed), SHAPES[shape]
    curve, workers, spent_s, steps = Curve(), 1, 0.0, 0
    same = 0
    for _ in range(60):
        measured = float(np.median(np.exp(noise * random.standard_normal(8)))) / rate(workers)
        curve = curves.observe(curve, workers, measured, 8, noise * measured)
        steps += 10
        spent_s += 10 / rate(workers)
        before = workers
        workers = int(decide(shown(8, [measuring(curve, workers, remaining=1e5 - steps)])).workers[0])
        same = same + 1 if workers == before else 0
        if same >= 6:
            break
    fastest = max(rate(n) for n in range(1, 9))
    assert rate(workers) >= (0.93 if noise < 0.05 else 0.85) * fastest, (curve, workers)
    assert steps <= 300


# Quick ways and slow ones.

sizes = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.floats(5.0, 60.0)), max_size=4, unique_by=lambda t: t[0]
)


@given(sizes, st.integers(1, 3), st.integers(3, 8))
def test_what_is_remembered_is_what_would_be_thought_of_again(
    told: list[tuple[int, float]], low: int, high: int
) -> None:
    curve = seen(*told)
    between = [one for one in curves.measured(curve) if low <= one.workers <= high]
    for _ in range(2):
        assert exploring._next_size(curve, low, high) == after(curve, low, high)
        assert exploring._best_size(curve, low, high) == (exploring.best(between).workers if between else 0)


def tried(view: Snapshot, most: Any, decision: Any) -> tuple[list[int], float]:
    """Workers, and when to think of it again: every size is judged before anybody looks whether there is room."""
    workers, wake_s, busy = decision.workers.copy(), decision.wake_s, exploring._Busy(view)
    free = view.capacity - view.used_milli(workers, np.maximum(decision.pool, 0))
    enough = np.minimum(exploring.known(view), most)
    for j in exploring._candidates(view, enough, decision.workers):
        trial = exploring._trial(view, j)
        wake_s = min(wake_s, trial.wake_s)
        more = (trial.size - int(workers[j])) * int(view.width[j])
        fits = trial.size and more <= free[decision.pool[j]]
        if not fits or not (exploring._is_silent(view, j) or busy.take(j)):
            continue
        below = trial.size < enough[j] and bool(exploring._seen(view, j)) and not exploring._is_silent(view, j)
        if more > 0 or trial.size != view.workers[j] or below:
            free[decision.pool[j]] -= more
            workers[j] = trial.size
    return workers.tolist(), wake_s


@given(st.lists(st.tuples(sizes, st.integers(1, 4), st.floats(0.1, 500.0)), min_size=1, max_size=5), st.integers(0, 6))
def test_who_has_no_room_need_not_be_judged(jobs: list[tuple[Any, int, float]], free: int) -> None:
    rows = [measuring(seen(*told), now, remaining=math.nan, ran_s=ran_s) for told, now, ran_s in jobs]
    view = shown(sum(now for _, now, _ in jobs) + free, rows)
    decision = load("elastic-fifo").decide(msgspec.structs.replace(view, max_workers=view.workers), None)
    found = exploring.explored(view, view.max_workers, decision)
    workers, wake_s = tried(view, view.max_workers, decision)
    assert found.workers.tolist() == workers
    assert found.wake_s >= wake_s
    if (found.workers == decision.workers).all() and free >= view.max_workers.max():
        assert found.wake_s == wake_s, "with room for everything that may be tried"


# What is said of sizes.


def said(view: Snapshot, policy: str = "afs-l") -> list[str]:
    outcome = decide(view, policy)
    return [explain(code, *detail) for code, detail in zip(outcome.reason.tolist(), outcome.detail, strict=True)]


def test_nobody_is_told_of_a_useful_size_that_was_never_looked_for() -> None:
    """A job that has run for a second may not try other sizes yet: that costs too much of what it ran."""
    costly = {"resize_s": 60.0, "remaining": 100.0}
    assert said(shown(8, [measuring(seen((1, 10)), 1, **costly)])) == [
        "runs on 1 worker: larger sizes of it were not tried"
    ]
    known = seen((1, 10), (2, 10), (4, 9))
    assert said(shown(8, [measuring(known, 1, **costly)])) == [
        "runs on 1 worker: more are not expected to make it faster"
    ]
    assert said(view_of(8, [job(size=1, workers=1)])) == ["runs on 1 worker, the most that it may have"]


def test_what_is_measured_and_what_is_tried_are_told_apart() -> None:
    assert said(shown(8, [measuring(None, 1)])) == ["runs on 1 worker while its speed there is measured"]
    assert said(shown(8, [measuring(seen((4, 30), (8, 20)), 4)])) == [
        "tries 2 workers: of the sizes measured so far 4 is the best"
    ]
