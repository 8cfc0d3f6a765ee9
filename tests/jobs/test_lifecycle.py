"""What events make of a job."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.jobs import events as e
from stretto.jobs import lifecycle
from stretto.jobs.model import Context, Job, Seat

SEAT = Seat("node-0", (0,))


def new(**changes: object) -> Job:
    job = Job(
        number=1, name="a", user="me", submitted_s=100.0, changed_s=100.0, spec={"run": "true"},
        context=Context(cwd="/"), level="elastic",
    )  # fmt: skip
    return msgspec.structs.replace(job, **changes)


def story(*steps: tuple[float, e.Event], job: Job | None = None) -> Job:
    job = job or new()
    for at_s, event in steps:
        job = lifecycle.apply(job, event, at_s)
    return job


def launched(name: str) -> e.Launched:
    return e.Launched(worker=name, launch=f"1.{name}", seat=SEAT)


def exited(name: str) -> e.Exited:
    return e.Exited(worker=name, launch=f"1.{name}", how="exited")


def test_a_job_begins_with_its_submission() -> None:
    job = new()
    assert lifecycle.fold([(100.0, e.Submitted(job=job))]) == job
    with pytest.raises(ValueError, match="first event"):
        lifecycle.fold([(1.0, e.Ended(phase="failed"))])


def test_members_that_have_ended_well_are_remembered_until_the_next_start() -> None:
    job = story((1.0, launched("w0")), (1.0, launched("w1")), (2.0, exited("w0")))
    assert job.finished == 1
    killed = e.Exited(worker="w1", launch="1.w1", how="signalled", status=9)
    assert story((3.0, killed), job=job).finished == 1
    assert story((3.0, killed), (4.0, launched("w2")), job=job).finished == 0
    leaving = story((2.0, e.Leaving(worker="w1", why="x")), (3.0, exited("w1")), job=job)
    assert leaving.finished == 1, "who was asked to leave has not finished"


def test_times_and_device_seconds_are_counted() -> None:
    job = story(
        (110.0, launched("w0")),
        (115.0, e.Resized(workers=2, before=1, reason="grown", text="")),
        (115.0, launched("w1")),
        (120.0, exited("w0")),
        (130.0, exited("w1")),
        (135.0, launched("w2")),
        (136.0, exited("w2")),
        (136.0, e.Ended(phase="succeeded", exit_code=0)),
        job=new(width_milli=500),
    )
    assert (job.waited_s, job.ran_s) == (15.0, 21.0)
    assert job.device_s == 0.5 * (5 + 10 + 10 + 1)
    assert (job.starts, job.resizes, job.launches) == (2, 1, 3)
    assert (job.started_s, job.ended_s, job.phase, job.workers) == (110.0, 136.0, "succeeded", ())


def test_lost_work_is_summed_up_and_told_by_what_happened() -> None:
    lost = [(float(i), e.Interrupted(cause="machine", lost_s=float(i), text=f"fault {i}")) for i in range(1, 13)]
    job = story(*lost, (20.0, e.Interrupted(cause="node", lost_s=5.0, text="fault 12")))
    assert job.lost_s == sum(job.lost.values()) == sum(range(1, 13)) + 5
    assert (len(job.lost), job.lost["fault 12"], job.lost["earlier"]) == (8, 17.0, 1 + 2 + 3 + 4 + 5)
    assert story((1.0, e.Interrupted(cause="preempted", lost_s=0.0, text="stopped for others"))).lost == {}


def test_what_was_seen_of_a_job_is_kept() -> None:
    job = story((1.0, e.Kept(how="its script has joined", start_s=2.5)))
    assert (job.keeps, job.start_s) == (True, 2.5)
    job = story((2.0, e.Kept(how="it was killed", keeps=False)), job=job)
    assert (job.keeps, job.start_s) == (False, 2.5)


def test_only_a_stop_that_was_asked_for_against_its_wish_is_a_preemption() -> None:
    leaving = e.Leaving(worker="w0", why="others are more urgent", preempted=True)
    failed = e.Leaving(worker="w0", why="the job has failed")
    assert story((1.0, launched("w0")), (2.0, failed), (3.0, exited("w0"))).preemptions == 0
    assert story((1.0, launched("w0")), (2.0, leaving), (3.0, exited("w0"))).preemptions == 1
    assert story((1.0, launched("w0")), (3.0, exited("w0"))).preemptions == 0
    suspended = story(
        (1.0, launched("w0")), (2.0, e.Wished(wish="suspend", by="me")), (2.0, leaving), (3.0, exited("w0"))
    )
    assert (suspended.preemptions, suspended.phase) == (0, "suspended")
    assert story((4.0, e.Wished(wish="run", by="me")), job=suspended).phase == "queued"


def test_a_queued_job_is_suspended_at_once_and_does_not_wait_meanwhile() -> None:
    job = story(
        (110.0, e.Wished(wish="suspend", by="me")), (200.0, e.Wished(wish="run", by="me")), (205.0, launched("w0"))
    )
    assert job.waited_s == 15.0


def test_progress_wipes_the_slate_clean() -> None:
    job = story((1.0, e.Retried(not_before_s=9.0, text="lost")), (2.0, e.Retried(not_before_s=9.0, text="lost")))
    assert job.failures == 2
    assert story((3.0, e.Progressed(steps=0)), job=job).failures == 2
    assert story((3.0, e.Progressed(steps=1)), job=job).failures == 0


def test_an_exit_of_another_launch_with_the_same_name_changes_nothing() -> None:
    job = story((1.0, launched("w0")))
    assert lifecycle.apply(job, e.Exited(worker="w0", launch="older", how="lost"), 2.0) == job


events = st.one_of(
    st.builds(launched, st.sampled_from(["w0", "w1", "w2"])),
    st.builds(exited, st.sampled_from(["w0", "w1", "w2"])),
    st.builds(e.Leaving, worker=st.sampled_from(["w0", "w1"]), why=st.just("x")),
    st.builds(e.Wished, wish=st.sampled_from(["run", "suspend", "cancel"]), by=st.just("me")),
    st.builds(e.Progressed, steps=st.integers(0, 9)),
    st.builds(e.Retried, not_before_s=st.floats(0, 9), text=st.just("x")),
    st.builds(e.Ended, phase=st.sampled_from(["succeeded", "failed", "cancelled"])),
)


@given(st.lists(st.tuples(st.floats(0, 5), events), max_size=20))
def test_any_history_gives_a_job_that_makes_sense(history: list[tuple[float, e.Event]]) -> None:
    now_s, job = 100.0, new()
    for span_s, event in history:
        now_s += span_s
        if job.ended:
            break
        job = lifecycle.apply(job, event, now_s)
        assert (job.phase == "running") == bool(job.workers)
        assert job.ran_s + job.waited_s <= now_s - 100.0 + 1e-9
        assert len({worker.name for worker in job.workers}) == len(job.workers)
        decoded = msgspec.json.decode(msgspec.json.encode(event), type=e.Event)
        assert decoded == event
        assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job
