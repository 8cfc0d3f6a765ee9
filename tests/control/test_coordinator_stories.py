"""The main stories, each with its transcript: what was announced and formed, when, and why."""

from __future__ import annotations

import textwrap

from simulated_job import Job
from simulated_worker import Process

from stretto.control.events import Want
from stretto.control.roster import Settings


def start(workers: int, **settings: float) -> tuple[Job, list[Process]]:
    job = Job(Settings(token="secret", min_workers=workers, want=workers, **settings))  # type: ignore[arg-type]
    processes = [job.spawn() for _ in range(workers)]
    job.run(lambda: job.training(workers))
    job.log.clear()
    while job.now_s < 9.9:
        job.round(0.5)
    job.advance(10.0 - job.now_s)
    for process in processes:
        job.drain(process)
    return job, processes


def settle(job: Job) -> None:
    """Let everything that can happen at this instant happen."""
    for _ in range(6):
        job.round(0.0)


def transcript(job: Job) -> str:
    return "\n".join(line.strip() for line in job.log)


def expect(job: Job, text: str) -> None:
    assert transcript(job) == textwrap.dedent(text).strip()


def test_growing_waits_for_nobody_and_shrinking_names_the_latest() -> None:
    job, _ = start(2)
    job.tell(Want(4))
    job.spawn(), job.spawn()
    settle(job)
    job.advance(1.0)
    settle(job)
    job.tell(Want(3))
    settle(job)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 4))
        10.0  2 formed
        10.0  3: w1 w2 w3 w4  (planned: +w4 (want 4))
        11.0  3 formed
        11.0  4: w1 w2 w3 -w4  (planned: -w4 (want 3))
        11.0  4 formed
        """,
    )
    assert job.processes["w4"].out == "released"


def test_a_killed_member_is_dropped_at_once() -> None:
    job, (_, second, _) = start(3)
    job.kill(second)
    settle(job)
    expect(
        job,
        """
        10.0  w2 evicted: generation 2 goes on without it: lost w2
        10.0  2: w1 w3  (at once: lost w2)
        10.0  2 formed
        """,
    )


def test_nobody_hears_of_a_newcomer_that_dies_while_warming_up() -> None:
    job, _ = start(2)
    job.tell(Want(3))
    newcomer = job.spawn()
    job.drain(newcomer)
    job.kill(newcomer)
    settle(job)
    job.advance(10.0)
    expect(job, "")


def test_a_proposed_newcomer_that_dies_is_left_out_by_plan() -> None:
    job, _ = start(2)
    job.tell(Want(3))
    newcomer = job.spawn()
    job.get_ready(newcomer)
    job.drain(newcomer)
    job.kill(newcomer)
    job.notice_closed()
    settle(job)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        10.0  3: w1 w2  (planned: -w3 (want 3))
        10.0  3 formed
        """,
    )


def test_a_frozen_member_is_out_and_learns_it_when_it_wakes() -> None:
    job, (_, second) = start(2)
    second.frozen = True
    while job.now_s < 16:
        job.round(0.5)
    second.frozen = False
    settle(job)
    expect(
        job,
        """
        15.0  w2 evicted: generation 2 goes on without it: lost w2
        15.0  2: w1  (at once: lost w2)
        15.5  2 formed
        """,
    )
    assert second.out.startswith("evicted")


def test_all_leave_but_one_stays_until_the_newcomer_has_its_state() -> None:
    job, _ = start(2)
    job.tell(Want(1, ("w1", "w2")))
    settle(job)
    job.spawn()
    settle(job)
    settle(job)
    expect(
        job,
        """
        10.0  2: w1 -w2  (planned: -w2 (want 1))
        10.0  2 formed
        10.0  3: w1 w3  (planned: +w3 (want 1))
        10.0  3 formed
        10.0  4: w3 -w1  (planned: -w1 (want 1))
        10.0  4 formed
        """,
    )
    assert [job.processes[name].out for name in ("w1", "w2")] == ["released"] * 2


def test_a_member_that_cannot_be_reached_may_come_back_unchanged() -> None:
    job, (only,) = start(1)
    job.spawn()
    job.cut(only)
    only.cut_off = True
    for _ in range(40):
        job.round(1.0)
    only.cut_off = False
    settle(job)
    expect(job, "")
    assert job.state.number == 1


def test_newcomers_take_over_only_when_the_last_is_confirmed_gone() -> None:
    job, (only,) = start(1)
    job.spawn()
    job.kill(only)
    for _ in range(30):
        job.round(1.0)
    expect(job, "")
    job.reap(only)
    settle(job)
    expect(
        job,
        """
        40.0  2: w2  (at once: lost w1; nobody who held state is left)
        40.0  2 formed
        """,
    )


def test_a_lease_that_runs_out_is_as_good_as_a_confirmation() -> None:
    job, (only,) = start(1)
    job.spawn()
    job.kill(only)
    while job.now_s < 80:
        job.round(0.5)
    expect(
        job,
        """
        75.0  2: w2  (at once: lost w1; nobody who held state is left)
        75.5  2 formed
        """,
    )


def test_a_leaver_does_not_stand_in_for_stayers_that_may_go_on_without_it() -> None:
    """The list without it may have been taken by those that cannot be reached; once they are gone its state is used."""
    job, (first, second) = start(2)
    job.tell(Want(1))
    job.cut(first)
    first.cut_off = True
    job.notice_closed()
    for _ in range(20):
        job.drain(second)
        job.advance(1.0)
    assert transcript(job) == "10.0  2: w1 -w2  (planned: -w2 (want 1))"
    job.kill(first)
    job.reap(first)
    assert transcript(job).splitlines()[-1] == "30.0  3: w2  (at once: lost w1)"


def test_a_leaver_keeps_its_state_until_the_others_have_committed() -> None:
    job, (first, second) = start(2)
    job.tell(Want(1))
    job.drain(first), job.drain(second)
    for process in (first, second):
        job.apply(process)
    job.reduce(first), job.apply(first), job.apply(second), job.exchange(first), job.take_in(first)
    job.drain(first), job.drain(second)
    assert transcript(job).splitlines()[-1] == "10.0  2 formed"
    assert second.waiting
    assert not second.out
    job.kill(first)
    job.notice_closed()
    job.reap(first)
    settle(job)
    steps = len(first.lineage)
    assert second.lineage[:steps] == first.lineage == (1,) * steps
    assert set(second.lineage[steps:]) == {3}


def test_of_two_workers_with_a_broken_link_exactly_one_goes() -> None:
    job, _ = start(3)
    job.broken_links.add(frozenset(("w2", "w3")))
    for _ in range(30):
        job.round(0.1)
    expect(
        job,
        """
        10.3  2: w1 w2 w3  (at once: broken)
        10.8  w3 evicted: generation 2 could not be formed with it
        10.8  3: w1 w2  (at once: broken)
        11.0  3 formed
        """,
    )


def test_a_newcomer_with_a_broken_link_goes_and_the_members_train_on() -> None:
    job, (first, _) = start(2)
    job.broken_links.add(frozenset(("w1", "w3")))
    job.tell(Want(3))
    job.spawn()
    before = len(first.lineage)
    for _ in range(30):
        job.round(0.1)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        10.4  3: w1 w2 w3  (planned: again (want 3))
        10.9  w3 evicted: generation 3 could not be formed with it
        10.9  4: w1 w2  (planned: -w3 (want 3))
        11.3  4 formed
        """,
    )
    assert len(first.lineage) > before + 20


def test_a_member_that_comes_and_never_forms_is_evicted_in_time() -> None:
    job, (_, second, third) = start(3)
    job.kill(second)
    job.notice_closed()
    job.drain(third)
    assert third.generation == 2
    third.stuck = True
    while job.now_s < 22:
        job.round(0.5)
    expect(
        job,
        """
        10.0  w2 evicted: generation 2 goes on without it: lost w2
        10.0  2: w1 w3  (at once: lost w2)
        20.5  w3 evicted: generation 2 could not be formed with it
        20.5  3: w1  (at once: not formed in time)
        21.0  3 formed
        """,
    )


def busy_after_a_loss() -> tuple[Job, Process, Process]:
    """Of three, one dies and another is in the middle of a long step: who waits for it, and who is busy."""
    job, (first, second, third) = start(3)
    third.stuck = True
    job.kill(second)
    job.notice_closed()
    return job, first, third


def test_a_survivor_that_is_busy_is_waited_for_however_long_it_takes() -> None:
    job, _, busy = busy_after_a_loss()
    while job.now_s < 600:
        job.round(0.5)
    busy.stuck = False
    settle(job)
    expect(
        job,
        """
        10.0  w2 evicted: generation 2 goes on without it: lost w2
        10.0  2: w1 w3  (at once: lost w2)
        600.0  2 formed
        """,
    )
    assert job.training(2)


def test_the_time_to_form_counts_from_when_the_last_has_come() -> None:
    job, waits, busy = busy_after_a_loss()
    while job.now_s < 100:
        job.round(0.5)
    busy.stuck = False
    job.consider(busy)
    waits.stuck = True
    while job.now_s < 112:
        job.round(0.5)
    assert transcript(job).splitlines()[2:4] == [
        "110.0  w3 evicted: generation 2 could not be formed with it",
        "110.0  3: w1  (at once: not formed in time)",
    ]


def test_a_survivor_that_freezes_while_it_is_busy_is_not_waited_for() -> None:
    job, _, busy = busy_after_a_loss()
    while job.now_s < 30:
        job.round(0.5)
    busy.frozen = True
    while job.now_s < 37:
        job.round(0.5)
    assert transcript(job).splitlines()[2:] == [
        "35.0  w3 evicted: generation 3 goes on without it: lost w3",
        "35.0  3: w1  (at once: lost w3)",
        "35.5  3 formed",
    ]


def test_who_gave_up_waiting_for_one_that_is_busy_puts_nobody_out() -> None:
    """A worker connects for half a minute only; then it says whom it missed, and waits for the next list."""
    job, first, busy = busy_after_a_loss()
    for _ in range(3):
        job.drain(first)
        job.report_broken(first, (busy.name,))
        while job.now_s < 100 * (1 + len(job.log)):
            job.round(0.5)
        busy.stuck = False
        job.consider(busy)
        busy.stuck = True
        settle(job)
    busy.stuck = False
    settle(job)
    expect(
        job,
        """
        10.0  w2 evicted: generation 2 goes on without it: lost w2
        10.0  2: w1 w3  (at once: lost w2)
        300.0  3: w1 w3  (at once: broken)
        400.0  4: w1 w3  (at once: broken)
        500.0  5: w1 w3  (at once: broken)
        500.0  5 formed
        """,
    )


def test_of_two_with_a_broken_link_one_goes_though_it_came_late() -> None:
    job, _, busy = busy_after_a_loss()
    job.broken_links.add(frozenset(("w1", "w3")))
    while job.now_s < 60:
        job.round(0.1)
    busy.stuck = False
    for _ in range(30):
        job.round(0.1)
    assert [line.partition("  ")[2] for line in transcript(job).splitlines()[2:]] == [
        "3: w1 w3  (at once: broken)",
        "w3 evicted: generation 3 could not be formed with it",
        "4: w1  (at once: broken)",
        "4 formed",
    ]


def test_a_newcomer_that_does_not_come_is_not_busy() -> None:
    """It holds nothing, and has nothing else to do."""
    job, (_, second) = start(2)
    newcomer = take_proposal(job)
    newcomer.stuck = True
    job.kill(second)
    job.notice_closed()
    while job.now_s < 22:
        job.round(0.5)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        10.0  w2 evicted: generation 3 goes on without it: lost w2
        10.0  3: w1 w3  (at once: lost w2)
        20.5  w3 evicted: generation 3 could not be formed with it
        20.5  4: w1  (at once: not formed in time)
        21.0  4 formed
        """,
    )


def test_a_member_that_is_busy_between_a_step_and_the_next_generation_is_waited_for() -> None:
    """The other one has gone into the proposal, and waits there."""
    job, (first, second) = start(2)
    job.tell(Want(3))
    newcomer = job.spawn()
    job.drain(newcomer), job.get_ready(newcomer), job.drain(newcomer)
    for process in (first, second):
        job.drain(process), job.apply(process)
    job.reduce(first), job.apply(first)
    second.stuck = True
    assert (first.generation, second.generation) == (2, 1)
    while job.now_s < 100:
        job.round(0.5)
    second.stuck = False
    settle(job)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        21.0  3: w1 w2 w3  (at once: not formed in time)
        100.0  3 formed
        """,
    )


def test_a_newcomer_that_waits_for_those_who_have_done_all_steps_is_let_go() -> None:
    """They evaluate, and end; nothing is begun again for its sake."""
    job = Job(Settings(token="secret", min_workers=2, want=2), loops=1, loop_steps=5)
    first, second = job.spawn(), job.spawn()
    job.run(lambda: len(first.lineage) == 2)
    job.save(first)
    job.run(lambda: job.at_end(first) and job.at_end(second))
    for process in (first, second):
        job.wait_at_end(process), job.drain(process)
    assert job.state.loops_done == 1
    first.stuck = second.stuck = True
    job.tell(Want(3))
    newcomer = job.spawn()
    job.run(lambda: newcomer.generation == 2)
    job.kill(second), job.round(0.5), job.reap(second)
    for _ in range(60):
        job.round(0.5)
    assert newcomer.generation == job.state.number == 3
    job.report_broken(newcomer, (first.name,))
    first.stuck = False
    job.run(lambda: job.state.done)
    job.round(0.5)
    assert (first.out, newcomer.out) == ("finished", "released")
    assert not newcomer.lineage


def test_a_restarted_coordinator_adopts_the_job_without_touching_it() -> None:
    job, (first, _) = start(2)
    job.restart_coordinator()
    before = len(first.lineage)
    while job.now_s < 30:
        job.round(0.5)
    expect(job, "10.0  coordinator restarted\n10.0  1 formed")
    assert len(first.lineage) > before + 20


def test_a_member_that_died_while_the_coordinator_was_away_is_missed_after_the_grace() -> None:
    job, (_, second) = start(2)
    job.kill(second)
    job.restart_coordinator()
    while job.now_s < 17:
        job.round(0.5)
    expect(
        job,
        """
        10.0  coordinator restarted
        15.0  w2 evicted: generation 2 goes on without it: lost w2
        15.0  2: w1  (at once: lost w2)
        15.5  2 formed
        """,
    )


def test_a_generation_journalled_but_not_announced_is_announced_after_the_restart() -> None:
    job, _ = start(2)
    job.tell(Want(3))
    newcomer = job.spawn()
    job.drain(newcomer)
    job.get_ready(newcomer)
    job.crash_after = 1
    job.drain(newcomer)
    for _ in range(3):
        settle(job)
    expect(
        job,
        """
        10.0  coordinator restarted
        10.0  1 formed
        10.0  2 formed
        """,
    )


# A proposal that members have gone into, and that is never formed.


def take_proposal(job: Job) -> Process:
    """A newcomer is proposed, and everybody goes there."""
    job.tell(Want(job.state.want + 1))
    newcomer = job.spawn()
    job.drain(newcomer), job.get_ready(newcomer), job.drain(newcomer)
    for process in job.members():
        job.drain(process), job.apply(process)
    job.reduce(job.members()[0])
    for process in job.members():
        job.apply(process)
    assert {process.generation for process in job.processes.values()} == {2}
    return newcomer


def test_a_newcomer_that_freezes_at_the_switch_does_not_hold_the_members_up() -> None:
    job, (first, _) = start(2)
    newcomer = take_proposal(job)
    newcomer.frozen = True
    before = len(first.lineage)
    while job.now_s < 18:
        job.round(0.5)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        15.0  3: w1 w2  (at once: lost w3)
        15.5  3 formed
        """,
    )
    assert len(first.lineage) > before + 3


def test_a_newcomer_that_hangs_at_the_switch_is_evicted_in_time() -> None:
    job, (first, _) = start(2)
    newcomer = take_proposal(job)
    newcomer.stuck = True
    before = len(first.lineage)
    while job.now_s < 25:
        job.round(0.5)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        21.0  w3 evicted: generation 2 could not be formed with it
        21.0  3: w1 w2  (at once: not formed in time)
        21.5  3 formed
        """,
    )
    assert len(first.lineage) > before + 3


def test_a_member_that_went_ahead_alone_is_brought_together_with_the_others() -> None:
    """One waits at the end of a loop for the other, which waits in the proposal already: nobody is to blame."""
    job, (first, second) = start(2)
    job.apply(first), job.apply(second), job.reduce(first), job.apply(first)
    job.loop_steps, job.hasty = len(first.lineage), True
    job.wait_at_end(first), job.drain(first)
    job.tell(Want(3))
    newcomer = job.spawn()
    job.drain(newcomer), job.get_ready(newcomer), job.drain(newcomer), job.drain(second)
    job.report_broken(second, ())
    second.to_coordinator.clear()
    assert (first.generation, second.generation) == (1, 2)
    while job.now_s < 23:
        job.round(0.5)
    expect(
        job,
        """
        10.0  2: w1 w2 w3  (planned: +w3 (want 3))
        21.0  3: w1 w2 w3  (at once: not formed in time)
        21.5  3 formed
        """,
    )
    assert first.held.loop == 1


# Links that are dead, and reports that say little.


def test_of_two_first_workers_with_a_broken_link_one_goes() -> None:
    job = Job(Settings(token="secret", min_workers=2, want=2))
    job.spawn(), job.spawn()
    job.broken_links.add(frozenset(("w1", "w2")))
    for _ in range(12):
        job.round(0.1)
    job.spawn()
    for _ in range(5):
        job.round(0.1)
    expect(
        job,
        """
        0.0  1: w1 w2  (at once: the first)
        0.4  2: w1 w2  (at once: broken; nobody who held state is left)
        0.8  w2 evicted: generation 2 could not be formed with it
        1.2  3: w1 w3  (at once: lost w2; nobody who held state is left)
        1.4  3 formed
        """,
    )


def test_a_newcomer_that_cannot_say_whom_it_misses_goes_after_some_tries() -> None:
    job, (first, _) = start(2)
    job.broken_links.add(frozenset(("w2", "w3")))
    job.tell(Want(3))
    newcomer = job.spawn()
    newcomer.vague = True
    before = len(first.lineage)
    while not newcomer.out and job.now_s < 100:
        job.round(0.5)
    for _ in range(3):
        job.round(0.5)
    assert transcript(job).splitlines()[-3:] == [
        "31.8  w3 evicted: generation 5 could not be formed with it",
        "31.8  6: w1 w2  (planned: -w3 (want 3))",
        "33.5  6 formed",
    ]
    assert len(first.lineage) > before + 40


def test_those_that_came_later_do_not_pay_for_one_that_cannot_say_whom_it_misses() -> None:
    job, _ = start(2)
    job.broken_links.add(frozenset(("w2", "w3")))
    job.tell(Want(4))
    job.spawn().vague = True
    settle(job)
    later = job.spawn()
    later.vague = True
    job.run(lambda: job.training(3))
    assert [p.name for p in job.members()] == ["w1", "w2", "w4"]
    assert not later.out


# A coordinator that did not look.


def test_a_coordinator_that_slept_through_a_formation_blames_nobody() -> None:
    job, (_, second, _) = start(3)
    job.kill(second)
    job.notice_closed()
    job.stall(15.0)
    settle(job)
    expect(
        job,
        """
        10.0  w2 evicted: generation 2 goes on without it: lost w2
        10.0  2: w1 w3  (at once: lost w2)
        25.0  2 formed
        """,
    )


def test_a_last_word_counts_though_the_end_of_the_process_was_seen_first() -> None:
    job = Job(Settings(token="secret"), loops=1, loop_steps=5)
    worker = job.spawn()
    job.run(lambda: worker.out == "finished")
    job.spawn()
    job.exit(worker)
    job.reap(worker)
    job.round(0.1)
    assert transcript(job).splitlines()[-1].endswith("done")
    assert job.state.number == 1


# Loops.


def test_when_all_die_steps_of_a_finished_loop_are_done_again_from_the_checkpoint() -> None:
    job = Job(Settings(token="secret"), loops=2, loop_steps=5)
    worker = job.spawn()
    job.run(lambda: len(worker.lineage) == 3)
    job.save(worker)
    job.run(lambda: len(worker.lineage) == 7)
    assert job.state.loops_done == 1
    job.kill(worker), job.notice_closed(), job.reap(worker)
    again = job.spawn()
    job.run(lambda: job.state.done)
    assert again.lineage == (1, 1, 1, 2, 2, 2, 2, 2, 2, 2)
    job.audit()


def test_a_leaver_that_is_behind_the_end_of_a_loop_does_not_stand_in() -> None:
    """Others are past that loop and would not wait for it; its release was lost with the coordinator."""
    job, (first, second) = start(2)
    job.loop_steps = len(first.lineage) + 5
    job.tell(Want(1))
    job.run(lambda: second.waiting)
    second.cut_off = True
    job.run(lambda: job.state.loops_done == 1)
    job.kill(first)
    job.restart_coordinator()
    second.cut_off = False
    newcomer = job.spawn()
    job.reap(first)
    job.run(lambda: job.training(1))
    assert transcript(job).splitlines()[-2].endswith("3: w3 -w2  (at once: lost w1; nobody who held state is left)")
    assert set(newcomer.lineage) == {3}


def test_a_leaver_in_a_first_generation_that_broke_helps_to_begin_anew() -> None:
    """Without it on the list nobody could be sure that it does not go on alone."""
    job = Job(Settings(token="secret"))
    first = job.spawn()
    job.drain(first), job.get_ready(first), job.drain(first)
    job.report_broken(first, ())
    job.drain(first)
    job.tell(Want(None, ("w1",)))
    job.spawn()
    job.run(lambda: first.out == "released")
    expect(
        job,
        """
        0.0  1: w1  (at once: the first)
        0.3  2: w1  (at once: broken; nobody who held state is left)
        0.4  2 formed
        0.4  3: w1 w2  (planned: +w2 (want 1))
        0.7  3 formed
        0.7  4: w2 -w1  (planned: -w1 (want 1))
        0.9  4 formed
        """,
    )
