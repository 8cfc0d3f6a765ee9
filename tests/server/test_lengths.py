"""How long jobs are taken to be, and that everybody is told the same."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from machine import Machine, machine_of, play
from test_deciding import NOW_S, active, cluster, decide, elastic, sizes

from stretto.core.estimate.curve import Window
from stretto.core.snapshot import Snapshot
from stretto.jobs.model import Job, Seat
from stretto.server import lengths, view
from stretto.server.book import Active
from stretto.server.estimates import Estimates
from stretto.server.expected import expected, span
from stretto.sim.forecast import forecast


def taught(*runs: tuple[float, dict[str, Any]], estimates: Estimates | None = None) -> Estimates:
    """Classes whose jobs ran so many seconds on one device."""
    estimates = estimates or Estimates()
    for number, (seconds, fields) in enumerate(runs):
        one = active(1000 + number, **fields)
        estimates.ended(msgspec.structs.replace(one.job, device_s=seconds, ran_s=seconds), one.request)
    return estimates


def seen(jobs: list[Active], estimates: Estimates, where: Any = None) -> Snapshot:
    return view.snapshot(jobs, where or cluster(4), estimates, NOW_S, {})


def left_s(jobs: list[Active], estimates: Estimates) -> list[float]:
    shown = seen(jobs, estimates)
    return shown.remaining_s(shown.min_workers).tolist()


def ran(job: Active, seconds: float, steps: int = 0) -> Active:
    """The job, after so much time on its target."""
    held_s = seconds * len(job.target) * job.job.width_milli / 1000
    job.job = msgspec.structs.replace(job.job, ran_s=seconds, device_s=held_s, changed_s=NOW_S, starts=1)
    job.progress.steps = steps
    return job


SEAT = (Seat("node-0", (0,)),)


def timed(workers: int, step_s: float) -> Window:
    return Window(workers=workers, count=8, median_s=step_s, spread_s=0.0, began_s=NOW_S, ended_s=NOW_S + 8 * step_s)


def test_from_the_best_source_that_there_is() -> None:
    estimates = taught((6.0, {"name": "known"}), (6.0, {"name": "known"}), (6.1, {"name": "known"}))
    told = active(1, SEAT, name="known", expect="1h")
    told.progress.total, told.progress.steps = 50, 20
    jobs = [
        told, active(2, name="known", expect="1h"), active(3, name="new", expect="1h"),
        active(4, name="steps", expect="5000 steps"), active(5, name="nobody"),
    ]  # fmt: skip
    shown = seen(jobs, estimates)
    assert shown.remaining[0] == 30.0
    assert shown.remaining_s(shown.min_workers)[1:3].tolist() == pytest.approx([6.03, 3600.0], rel=0.02)
    assert np.isnan(shown.remaining[3:]).all(), "nobody knows how long a step takes, either"
    estimates.observe(4, "cpu", timed(1, 0.1))
    shown = seen(jobs, estimates)
    assert shown.remaining[3] == pytest.approx(5000.0)
    exact, klass, hint = shown.remaining_sd[:3].tolist()
    assert exact == 0
    assert 0 < klass < 0.2 < hint


def test_a_class_that_says_nothing_gives_way_to_its_user() -> None:
    estimates = taught(*((seconds, {"name": "wild"}) for seconds in (1.0, 1000.0, 5.0, 40_000.0, 2.0)))
    assert left_s([active(1, name="wild", expect="2h")], estimates) == pytest.approx([7200.0])


def test_an_expected_time_is_one_at_the_size_asked_for() -> None:
    jobs = [active(1, workers=4, expect="10m", **elastic(2, 8)), active(2, workers=4, expect="10m")]
    assert left_s(jobs, Estimates()) == pytest.approx([600.0 * 2**0.7, 600.0]), "gains are not promised in full"


def test_the_same_work_on_other_minimums() -> None:
    """Of jobs that tell no steps: twice the workers are twice as fast."""
    estimates = taught(*((120.0, {"name": "a", **elastic(1, 4)}),) * 3)
    assert left_s([active(1, name="a", **elastic(4, 4))], estimates) == pytest.approx([30.0], rel=0.02)


@pytest.mark.parametrize(("came_s", "least_s", "most_s"), [(0.0, 99, 101), (50.0, 49, 51), (1000.0, 900, 1100)])
def test_what_was_outlived_corrects_what_is_left(came_s: float, least_s: float, most_s: float) -> None:
    estimates = taught(*((100.0, {"name": "a"}),) * 5)
    job = ran(active(1, SEAT, name="a"), came_s)
    assert least_s < left_s([job], estimates)[0] < most_s


@pytest.mark.parametrize("times", [1.0, 1.5, 10.0])
def test_who_outlives_a_hint_lasts_as_long_again(times: float) -> None:
    job = ran(active(1, SEAT, expect="100s"), 100.0 * times)
    shown = seen([job], Estimates())
    assert shown.remaining_s(shown.min_workers)[0] == pytest.approx(100.0 * times)
    assert shown.remaining_sd[0] >= 1.0


def test_steps_whose_speed_nobody_measured_do_not_age_a_job() -> None:
    """A job of a class of 10 s jobs has told 300 steps in its first second."""
    estimates = taught(*((10.0, {"name": "quick"}),) * 3)
    job = ran(active(1, SEAT, name="quick"), 1.0, steps=300)
    assert left_s([job], estimates) == pytest.approx([9.0], rel=0.05)
    estimates.observe(1, "cpu", timed(1, 1 / 60))
    assert left_s([job], estimates) == pytest.approx([5.0], rel=0.05)


def test_a_class_that_tells_its_steps_is_counted_in_steps() -> None:
    """On faster devices the same steps take less time."""
    estimates = Estimates()
    for number in range(3):
        one = active(1000 + number, name="net")
        for _ in range(5):
            estimates.observe(one.number, "cpu", timed(1, 0.1))
        estimates.ended(msgspec.structs.replace(one.job, steps=200, device_s=25.0), one.request)
    job = active(1, name="net")
    shown = seen([job], estimates)
    assert shown.remaining[0] == pytest.approx(200.0, rel=0.01)
    assert shown.remaining_s(shown.min_workers)[0] == pytest.approx(20.0, rel=0.05)


def test_jobs_without_devices_have_lengths_too() -> None:
    none = {"resources": {"gpu": 0, "cpu": 1}, "name": "cpu"}
    estimates = Estimates()
    for number in range(3):
        one = active(1000 + number, **none)
        estimates.ended(msgspec.structs.replace(one.job, ran_s=60.0), one.request)
    fresh, running = active(1, **none), ran(active(2, SEAT, **none), 20.0)
    assert left_s([fresh, running], estimates) == pytest.approx([60.0, 40.0], rel=0.05)


# Hyper-parameters.


def test_a_new_number_of_epochs_is_foreseen() -> None:
    runs = [(30.0 * epochs, {"name": "net", "hyperparameters": {"epochs": epochs}}) for epochs in (1, 2, 4, 8, 16)]
    estimates = taught(*runs)
    jobs = [active(n, name="net", hyperparameters={"epochs": epochs}) for n, epochs in ((1, 3), (2, 12), (3, 32))]
    assert left_s(jobs, estimates) == pytest.approx([90.0, 360.0, 960.0], rel=0.1)
    assert (seen(jobs, estimates).remaining_sd < 0.2).all()


def test_hyperparameters_that_came_later_count_though_earlier_runs_had_none() -> None:
    old = [(500.0, {"name": "net"})] * 20
    new = [(30.0 * epochs, {"name": "net", "hyperparameters": {"epochs": epochs}}) for epochs in (1, 2, 4, 8)]
    estimates = taught(*old, *new)
    jobs = [active(1, name="net", hyperparameters={"epochs": 3}), active(2, name="net")]
    asked, without = left_s(jobs, estimates)
    assert asked == pytest.approx(90.0, rel=0.15)
    assert without > 300


# What is kept, and forgotten.


def test_what_an_older_version_wrote_is_read() -> None:
    blob = b'{"curves":{},"ended":[[1,10.0,100.0],[2,20.0,110.0],[3,30.0,105.0]]}'
    estimates = Estimates({"old": blob})
    assert left_s([active(9, name="old", **elastic(2, 4))], estimates) == pytest.approx([105.0], rel=0.02)
    assert len(seen([], estimates).history) == 3
    one = active(10, name="old", hyperparameters={"epochs": 3, "model": "a"}, **elastic(2, 4))
    again = Estimates({"old": estimates.ended(msgspec.structs.replace(one.job, device_s=200.0), one.request)})
    known = again.known("old")
    assert known is not None
    assert [run.least for run in known.ended] == [0, 0, 0, 2]
    assert known.ended[-1].hyperparameters == {"epochs": 3.0, "model": "a"}
    assert known.ended[-1].size_s == 100.0


def test_what_is_stored_of_a_class_is_bounded() -> None:
    estimates, large = Estimates(), {f"p{i}": "x" * 60 for i in range(30)}
    for number in range(100):
        one = active(number, name="a", hyperparameters={**large, "epochs": number})
        blob = estimates.ended(msgspec.structs.replace(one.job, device_s=5.0), one.request)
        assert len(blob) <= 2**16
    known = estimates.known("a")
    assert known is not None
    assert known.ended[-1].hyperparameters["epochs"] == 99
    assert len(known.ended) > 10


def test_a_class_that_learns_or_is_forgotten_changes_jobs_that_wait() -> None:
    estimates = taught(*((10.0, {"name": "a"}),) * 4)
    job, other = active(1, name="a"), active(2, name="a", expect="1h")
    assert left_s([job, other], estimates) == pytest.approx([10.0, 10.0], rel=0.01)
    taught(*((20.0, {"name": "a"}),) * 40, estimates=estimates)
    assert left_s([job, other], estimates) == pytest.approx([20.0, 20.0], rel=0.3)
    estimates.forget_class("a")
    unknown, hint = left_s([job, other], estimates)
    assert math.isnan(unknown)
    assert hint == pytest.approx(3600.0)
    assert len(seen([job], estimates).history) == 0


def test_a_long_queue_of_one_class_is_renewed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody is left out, or has no estimate meanwhile."""
    monkeypatch.setattr(lengths, "_AT_ONCE", 10)
    estimates = taught(*((10.0, {"name": "a", "hyperparameters": {"i": i}}) for i in range(3)))
    jobs = [active(n, name="a", hyperparameters={"i": n}) for n in range(1, 31)]
    assert not np.isnan(left_s(jobs, estimates)).any()
    taught(*((30.0, {"name": "a", "hyperparameters": {"i": i}}) for i in range(60)), estimates=estimates)
    for renewed in (10, 20, 30):
        assert sum(np.array(left_s(jobs, estimates)) > 15) == renewed


# The same for everybody.


@pytest.mark.parametrize("policy", ["srtf", "srjf", "srsf", "elastic-srtf"])
def test_the_shorter_class_goes_first_and_the_forecast_says_so(policy: str) -> None:
    from stretto import plugins

    estimates = taught(*((1.0, {"name": "short"}),) * 3, *((6.0, {"name": "long"}),) * 3)
    jobs = [active(1, name="long", workers=4), active(2, name="short", workers=4)]
    verdicts, _ = decide(jobs, cluster(4), policy, estimates=estimates)
    assert sizes(verdicts) == {1: 0, 2: 4}
    told = forecast(seen(jobs, estimates), plugins.find(policy, {}))
    assert told.start_s[1] == 0 < told.start_s[0]


def test_backfill_knows_who_ends_in_time() -> None:
    """One slot is free until the running job ends and the first of the queue gets both."""
    estimates = taught(*((5.0, {"name": "short"}), (900.0, {"name": "long"})) * 3)
    running = ran(active(1, SEAT, expect="10m"), 60.0)
    jobs = [running, active(2, workers=2, expect="1h"), active(3, name="long"), active(4, name="short")]
    verdicts, _ = decide(jobs, cluster(2), "backfill-easy", estimates=estimates)
    assert sizes(verdicts) == {1: 1, 2: 0, 3: 0, 4: 1}


def test_in_a_forecast_too_lengths_that_nobody_knows_are_unknown() -> None:
    """Under srtf such a job goes last, however short it is supposed to be then."""
    from stretto import plugins

    estimates = taught(*((500.0, {"name": "long"}),) * 3)
    jobs = [active(1, name="who-knows", workers=4), active(2, name="long", workers=4)]
    policy = plugins.find("srtf", {})
    verdicts, _ = decide(jobs, cluster(4), "srtf", estimates=estimates)
    told = forecast(seen(jobs, estimates), policy)
    assert sizes(verdicts) == {1: 0, 2: 4}
    assert told.start_s[1] == 0 < told.start_s[0]


def test_what_people_are_told() -> None:
    estimates = taught(*((6.0, {"name": "known"}),) * 5)
    jobs = [
        active(1, name="known", workers=1),
        active(2, expect="2h", **elastic(1, 4)),
        active(3),
        active(4, expect="9 steps"),
    ]
    shown = seen(jobs, estimates)
    told = expected(shown, [job.row.prospect.total for job in jobs], [False] * 4)
    assert told[0].text == "expected to run 6 s (5 earlier runs of its class)"
    assert (told[0].source, told[0].runs) == ("class", 5)
    assert told[0].seconds == told[0].left_s == pytest.approx(6.0, rel=0.01)
    assert told[1].text == "expected to run 120 min (as its job file says)"
    assert told[1].seconds == pytest.approx(7200.0)
    assert (told[2].source, told[2].seconds, told[2].sd) == ("unknown", None, None)
    assert (told[3].source, told[3].seconds) == ("hint", None)


def test_times_as_people_say_them() -> None:
    said = [span(seconds) for seconds in (0.42, 6.0, 61.0, 600.0, 7300.0, 90_000.0, 1e6)]
    assert said == ["0.42 s", "6 s", "61 s", "10 min", "2 h", "25 h", "12 d"]


async def teach(m: Machine) -> None:
    """Two classes, by three real jobs each."""
    for _ in range(3):
        both = await m.submit("sleep 0.05", name="short"), await m.submit("sleep 1", name="long")
        for job in both:
            await m.ended(job)


async def both_queued(m: Machine, order: Path) -> tuple[Job, Job]:
    """One of each, the long one first, which write down when they run."""
    late = await m.submit(f"echo long >> {order}", name="long")
    early = await m.submit(f"echo short >> {order}", name="short")
    for job in (late, early):
        told = await m.plane.why(job.id)
        assert re.search(r"; expected to run [\d.]+ (s|min) \(3 earlier runs of its class\)", told.text), told
        assert told.facts["expected_from"] == "class"
    return early, late


def test_srtf_runs_the_short_class_first(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1", policy="srtf") as m:
            await teach(m)
            await m.plane.drain("local", True, "me")
            early, late = await both_queued(m, tmp_path / "order")
            await m.plane.drain("local", False, "me")
            await m.ended(early)
            await m.ended(late)
            assert (tmp_path / "order").read_text().split() == ["short", "long"]

    play(story())


def test_on_a_busy_server_the_loop_does_what_the_forecast_says(tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    async def story() -> None:
        async with machine_of(tmp_path, "1x1", policy="srtf") as m:
            taught(*((1000.0, {"name": "short"}), (6000.0, {"name": "long"})) * 3, estimates=m.plane.loop.estimates)
            busy = await m.submit(f"until [ -e {gate} ]; do sleep 0.02; done", name="busy", expect="1s")
            await m.running(busy, 1)
            early, late = await both_queued(m, tmp_path / "order")
            told = {one.job: one.start_s for one in await m.plane.forecast()}
            gate.touch()
            await m.ended(early)
            await m.ended(late)
            assert (tmp_path / "order").read_text().split() == ["short", "long"]
            first_s, second_s = told[early.number], told[late.number]
            assert first_s is not None
            assert second_s is not None
            assert 0 < first_s < second_s

    play(story())


def test_what_is_forgotten_stays_forgotten(tmp_path: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path) as m:
            await m.ended(await m.submit("true", name="a"))
            await m.ended(await m.submit("echo 1 / 2"))
            assert m.plane.classes() == ["a", "echo 1 / 2"]
            await m.plane.forget_class("a", "me")
            assert m.plane.classes() == ["echo 1 / 2"]
        async with machine_of(tmp_path) as m:
            assert m.plane.classes() == ["echo 1 / 2"]

    play(story())
