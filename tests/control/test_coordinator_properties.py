"""What must never happen, under random interleavings of joins, leaves, losses, delays, reconnects and restarts."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_job import Job, Process

from stretto.control import events as c
from stretto.control.journal import replay
from stretto.runtime import messages as m

Act = Callable[[Job, Process], None]


def _toggle_link(job: Job, process: Process) -> None:
    others = sorted(set(job.processes) - {process.name})
    if others:
        job.broken_links ^= {frozenset((process.name, others[len(process.lineage) % len(others)]))}


def _set(field: str, value: bool) -> Act:
    return lambda job, process: setattr(process, field, value)


ORDINARY: dict[str, Act] = {
    "connect": Job.connect,
    "ready": Job.get_ready,
    "up": Job.deliver_up,
    "down": Job.deliver_down,
    "drain": Job.drain,
    "exchange": Job.exchange,
    "take in": Job.take_in,
    "reduce": Job.reduce,
    "apply": Job.apply,
    "broken": Job.notice_broken,
    "save": Job.save,
    "closed": lambda job, process: job.notice_closed(),
    "soon": lambda job, process: job.advance(0.2),
    "round": lambda job, process: job.round(0.1),
}
PLANS: dict[str, Act] = {
    "spawn": lambda job, process: job.spawn() and None if len(job.processes) < 9 else None,
    "want 1": lambda job, process: job.tell(c.Want(1)),
    "want 2": lambda job, process: job.tell(c.Want(2)),
    "want 3": lambda job, process: job.tell(c.Want(3)),
    "want 4": lambda job, process: job.tell(c.Want(4)),
    "leave": lambda job, process: job.tell(c.Want(None, (process.name,))),
}
FAULTS: dict[str, Act] = {
    "kill": Job.kill,
    "reap": Job.reap,
    "cut": Job.cut,
    "freeze": _set("frozen", True),
    "thaw": _set("frozen", False),
    "cut off": _set("cut_off", True),
    "heal": _set("cut_off", False),
    "link": _toggle_link,
    "later": lambda job, process: job.advance(6.0),
    "much later": lambda job, process: job.advance(70.0),
    "restart": lambda job, process: job.restart_coordinator(),
    "crash": lambda job, process: setattr(job, "crash_after", 1),
    "crash late": lambda job, process: setattr(job, "crash_after", 3),
}


def _schedules(kinds: dict[str, Act]) -> st.SearchStrategy[list[tuple[str, int]]]:
    ordinary = st.sampled_from(["round", "round", *ORDINARY])
    special = st.sampled_from(sorted(set(kinds) - set(ORDINARY)))
    step = st.tuples(st.one_of(ordinary, ordinary, special), st.integers(0, 8))
    return st.lists(step, min_size=10, max_size=80)


def _play(job: Job, schedule: list[tuple[str, int]], kinds: dict[str, Act]) -> None:
    for kind, which in schedule:
        names = list(job.processes)
        job.log.append(f"        {kind} {names[which % len(names)]}")
        kinds[kind](job, job.processes[names[which % len(names)]])
        assert not job.state.failed


def _heal(job: Job) -> None:
    job.crash_after = None
    job.broken_links.clear()
    for process in job.processes.values():
        process.frozen = process.cut_off = False


def _supply(job: Job, size: int) -> None:
    """What a backend does: confirms ends, and starts what is missing."""
    for process in job.processes.values():
        if not process.alive:
            job.reap(process)
    there = [p for p in job.processes.values() if p.running and not _leaving(job, p)]
    for _ in range(size - len(there)):
        job.spawn()


def _leaving(job: Job, process: Process) -> bool:
    return f"i-{process.name}" in job.state.leaving or process.name in job.state.unexpected


def _must_settle(job: Job) -> None:
    """Faults are over: a generation of the wanted size forms and commits steps, in bounded time."""
    _heal(job)
    before = 0
    for _ in range(1500):
        settled = job.training(job.state.want) and job.state.newest is job.state.active
        before = before if settled else len(job.committed)
        if len(job.committed) > before + 3:
            break
        _supply(job, job.state.want)
        job.round(0.2)
    else:
        raise AssertionError("never settled:\n" + "\n".join(job.log[-60:]))
    job.audit()


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ORDINARY | PLANS | FAULTS))
def test_faults_never_fork_the_job_and_it_always_recovers(schedule: list[tuple[str, int]]) -> None:
    job = Job()
    job.spawn(), job.spawn()
    job.run(lambda: job.training(2))
    _play(job, schedule, ORDINARY | PLANS | FAULTS)
    _must_settle(job)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ORDINARY | PLANS))
def test_planned_changes_interrupt_nobody(schedule: list[tuple[str, int]]) -> None:
    """Nobody is evicted, and without a report of a broken group there is no switch that must be followed at once."""
    job = Job()
    job.spawn(), job.spawn()
    job.run(lambda: job.training(2))
    seen = len(job.effects)
    _play(job, schedule, ORDINARY | PLANS)
    _must_settle(job)
    sent = [e.message for e in job.effects[seen:] if isinstance(e, c.Send)]
    assert not [message for message in sent if isinstance(message, m.Evict)]
    unplanned = [e for e in job.effects[seen:] if isinstance(e, c.Announced) and not e.planned]
    assert all(e.why == "broken" for e in unplanned)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ORDINARY | PLANS | FAULTS))
def test_a_restart_forgets_nothing_that_was_announced(schedule: list[tuple[str, int]]) -> None:
    """After every event the journal alone gives the same generations, and never a number that was used."""
    job = Job()
    job.spawn()
    job.run(lambda: job.training(1))
    for kind, which in schedule:
        _play(job, [(kind, which)], ORDINARY | PLANS | FAULTS)
        again = replay(job.journal, job.settings, job.now_s)
        lists = [(g.number, g.members, g.leavers, g.planned) for g in job.state.open]
        assert [(g.number, g.members, g.leavers, g.planned) for g in again.open] == lists
        assert (again.number, again.want, again.loops_done) == (
            job.state.number,
            job.state.want,
            job.state.loops_done,
        )
        out = {key for key, w in job.state.workers.items() if w.out}
        assert {key for key, w in again.workers.items() if w.out} == out
