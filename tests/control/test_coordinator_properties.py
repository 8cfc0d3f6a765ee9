"""What must never happen, under random interleavings of joins, leaves, losses, delays, duplicates, reconnects, false
reports, stalls and restarts."""

from __future__ import annotations

from collections.abc import Callable

from coordinator_rules import Rules
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_job import ENDLESS, Job
from simulated_worker import Process

from stretto.control import events as c
from stretto.control.journal import kept, replay
from stretto.control.roster import Settings, State, Worker

Act = Callable[[Job, Process, int], None]
Schedule = list[tuple[str, int, int]]


def _other(job: Job, process: Process, which: int) -> Process:
    others = [p for p in job.processes.values() if p is not process]
    return others[which % len(others)] if others else process


def _toggle_link(job: Job, process: Process, which: int) -> None:
    other = _other(job, process, which)
    if other is not process:
        job.broken_links ^= {frozenset((process.name, other.name))}


def _spawn(job: Job) -> Process | None:
    return job.spawn() if len(job.processes) < 9 else None


def _spawn_partitioned(job: Job, process: Process, which: int) -> None:
    """A newcomer that cannot reach one of the others."""
    newcomer = _spawn(job)
    if newcomer is not None:
        job.broken_links.add(frozenset((newcomer.name, process.name)))


def _spawn_again(job: Job, process: Process, which: int) -> None:
    """A backend may use a name again once it has confirmed the end of who had it."""
    known = job.state.workers.get(process.incarnation)
    if not process.alive and known is not None and known.ended and not _crashing(job):
        job.broken_links = {link for link in job.broken_links if process.name not in link}
        job.spawn(process.name)


def _crashing(job: Job) -> bool:
    return job.crash_after is not None or not job.up


def _slander(job: Job, process: Process, which: int) -> None:
    job.report_broken(process, (_other(job, process, which).name,) if which % 3 else ())


def _give_up(job: Job, process: Process, which: int) -> None:
    """Those who have not come into its generation have not done so for too long; it names them."""
    switch = process.entered
    if switch is not None and process.formed < switch.generation:
        late = [p.name for p in job.peers(switch) if p.generation < switch.generation]
        job.report_broken(process, () if process.vague else tuple(late))


def _busy(job: Job, process: Process, which: int) -> None:
    """In its script, where it sees nothing else."""
    if process.holds and process.formed == process.generation:
        process.stuck = True


def _long(job: Job, process: Process, which: int) -> None:
    """More than a generation may take to form; everybody is heard all the while."""
    for _ in range(15):
        job.round(1.0)


def _stall(job: Job, process: Process, which: int) -> None:
    """The coordinator does not look for a while; then it reads what was said meanwhile."""
    job.stall(7.0 + which)
    job.round(0.1)


def _set(field: str, value: bool) -> Act:
    return lambda job, process, which: setattr(process, field, value)


def _alone(act: Callable[[Job, Process], object]) -> Act:
    def do(job: Job, process: Process, which: int) -> None:
        act(job, process)

    return do


ORDINARY: dict[str, Act] = {
    "connect": _alone(Job.connect),
    "ready": _alone(Job.get_ready),
    "up": _alone(Job.deliver_up),
    "down": _alone(Job.deliver_down),
    "drain": _alone(Job.drain),
    "repeat": _alone(Job.repeat),
    "exchange": _alone(Job.exchange),
    "take in": _alone(Job.take_in),
    "reduce": _alone(Job.reduce),
    "apply": _alone(Job.apply),
    "broken": _alone(Job.notice_broken),
    "save": _alone(Job.save),
    "wait at end": _alone(Job.wait_at_end),
    "go on": _alone(Job.go_on),
    "finish": _alone(Job.finish),
    "exit": _alone(Job.exit),
    "reap": _alone(Job.reap),
    "closed": lambda job, process, which: job.notice_closed(),
    "late": lambda job, process, which: job.arrive_late(),
    "soon": lambda job, process, which: job.advance(0.2),
    "stall": _stall,
    "round": lambda job, process, which: job.round(0.1),
}
PLANS: dict[str, Act] = {
    "spawn": lambda job, process, which: _spawn(job) and None,
    "want": lambda job, process, which: job.tell(c.Want(1 + which % 4)),
    "leave": lambda job, process, which: job.tell(c.Want(None, (process.name,))),
    "want less": lambda job, process, which: job.tell(c.Want(1 + which % 2, (process.name, f"w{which}"))),
}
FAULTS: dict[str, Act] = {
    "kill": _alone(Job.kill),
    "cut": _alone(Job.cut),
    "freeze": _set("frozen", True),
    "thaw": _set("frozen", False),
    "cut off": _set("cut_off", True),
    "heal": _set("cut_off", False),
    "stick": _set("stuck", True),
    "unstick": _set("stuck", False),
    "vague": _set("vague", True),
    "link": _toggle_link,
    "spawn partitioned": _spawn_partitioned,
    "spawn again": _spawn_again,
    "slander": _slander,
    "give up": _give_up,
    "later": lambda job, process, which: job.advance(6.0),
    "much later": lambda job, process, which: job.advance(70.0),
    "restart": lambda job, process, which: job.restart_coordinator(),
    "crash": lambda job, process, which: setattr(job, "crash_after", which),
    "stop": lambda job, process, which: job.stop_coordinator(),
    "start": lambda job, process, which: job.start_coordinator(),
    "keep what matters": lambda job, process, which: job.keep_what_matters(),
}
ALL = ORDINARY | PLANS | FAULTS
LONG_STEPS: dict[str, Act] = {
    "busy": _busy,
    "free": _set("stuck", False),
    "give up": _give_up,
    "kill": _alone(Job.kill),
    "vague": _set("vague", True),
    "long": _long,
}


def _schedules(kinds: dict[str, Act]) -> st.SearchStrategy[Schedule]:
    ordinary = st.sampled_from(["round", "round", "round", *ORDINARY])
    special = st.sampled_from(sorted(set(kinds) - set(ORDINARY)))
    step = st.tuples(st.one_of(ordinary, ordinary, special), st.integers(0, 8), st.integers(0, 8))
    return st.lists(step, min_size=10, max_size=80)


def _begin(workers: int, *, min_workers: int = 1, loops: int = ENDLESS) -> Job:
    job = Job(Settings(token="secret", min_workers=min_workers, want=workers), loops=loops, loop_steps=9)
    job.watch = Rules()
    for _ in range(workers):
        job.spawn()
    job.run(lambda: job.training(workers))
    return job


def _play(job: Job, schedule: Schedule, kinds: dict[str, Act]) -> None:
    for kind, which, other in schedule:
        names = list(job.processes)
        process = job.processes[names[which % len(names)]]
        job.log.append(f"        {kind} {process.name} {other}")
        kinds[kind](job, process, other)
        assert not job.state.failed


def _end_faults(job: Job, *, heal: bool) -> None:
    """Nothing new goes wrong; who is frozen, cut off or partitioned comes back, or never does."""
    job.crash_after = None
    job.start_coordinator()
    job.beat_s = job.now_s
    for process in job.processes.values():
        process.stuck = False
    if heal:
        job.broken_links.clear()
        for process in job.processes.values():
            process.frozen = process.cut_off = False


def _supply(job: Job, size: int) -> None:
    """What a backend does: confirms ends, and starts what is missing."""
    for process in job.processes.values():
        job.reap(process)
    there = [p for p in job.processes.values() if p.running and not p.cut_off and not _leaving(job, p)]
    for _ in range(size - len(there)):
        job.spawn()


def _leaving(job: Job, process: Process) -> bool:
    return process.incarnation in job.state.leaving or process.name in job.state.unexpected


def _must_settle(job: Job, *, heal: bool = True) -> None:
    """Faults are over: a generation of the wanted size forms and commits steps, in bounded time, and stays."""
    _end_faults(job, heal=heal)
    before = len(job.committed)
    for _ in range(2000):
        gen = job.state.active
        settled = job.training(job.state.want) and gen is job.state.newest and not set(gen.members) & job.state.leaving
        before = before if settled else len(job.committed)
        if len(job.committed) > before + 3:
            break
        _supply(job, job.state.want)
        job.round(0.2)
    else:
        raise AssertionError("never settled:\n" + "\n".join(job.log[-60:]))
    if not job.hasty:
        job.audit()
    number, steps = job.state.number, len(job.committed)
    for _ in range(30):
        job.round(3.0)
    assert job.state.number == number, "never at rest:\n" + "\n".join(job.log[-60:])
    assert len(job.committed) > steps + 10


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ALL), st.integers(1, 3), st.booleans(), st.booleans())
def test_faults_never_fork_the_job_and_it_always_recovers(
    schedule: Schedule, workers: int, heal: bool, hasty: bool
) -> None:
    job = _begin(workers, min_workers=workers)
    job.hasty = hasty
    _play(job, schedule, ALL)
    _must_settle(job, heal=heal)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ORDINARY | PLANS), st.integers(1, 3))
def test_planned_changes_interrupt_nobody(schedule: Schedule, workers: int) -> None:
    """Nobody is evicted, and without a report of a broken group there is no switch that must be followed at once."""
    job = _begin(workers)
    seen = len(job.effects)
    _play(job, schedule, ORDINARY | PLANS)
    _must_settle(job)
    assert not [e for e in job.effects[seen:] if isinstance(e, c.Evicted)]
    unplanned = [e for e in job.effects[seen:] if isinstance(e, c.Announced) and not e.planned]
    assert all(e.why == "broken" for e in unplanned)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ORDINARY | LONG_STEPS), st.integers(2, 4))
def test_who_is_only_busy_is_never_put_out(schedule: Schedule, workers: int) -> None:
    job = _begin(workers, min_workers=workers)
    _play(job, schedule, ORDINARY | LONG_STEPS)
    _long(job, next(iter(job.processes.values())), 0)
    put_out = {e.worker for e in job.effects if isinstance(e, c.Evicted)}
    killed = {p.name for p in job.processes.values() if not p.alive and not p.out}
    assert put_out <= killed, "\n".join(job.log[-60:])
    _must_settle(job)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ALL), st.booleans())
def test_a_job_ends_once_all_its_steps_are_done(schedule: Schedule, heal: bool) -> None:
    job = _begin(2, loops=3)
    _play(job, schedule, ALL)
    _end_faults(job, heal=heal)
    for _ in range(2000):
        if job.state.done:
            break
        _supply(job, job.state.want)
        job.round(0.2)
    assert job.state.done, "never done:\n" + "\n".join(job.log[-60:])
    for _ in range(5):
        job.round(0.2)
    assert not [p.name for p in job.processes.values() if p.running and not p.cut_off], "nobody is left waiting"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ALL))
def test_a_restart_forgets_nothing_that_was_announced(schedule: Schedule) -> None:
    """After every event the journal alone gives the same generations, and never a number that was used."""
    job = _begin(1)
    for step in schedule:
        _play(job, [step], ALL)
        if job.up:
            again = replay(job.journal, job.settings, job.now_s)
            assert _remembered(again) == _remembered(job.state)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(_schedules(ALL))
def test_a_journal_of_what_matters_forgets_nothing(schedule: Schedule) -> None:
    job = _begin(1)
    for step in schedule:
        _play(job, [step], ALL)
        again = replay(kept(job.state), job.settings, job.now_s)
        assert _remembered(again) == _remembered(job.state)
        assert [w.holds_state for w in _listed(again)] == [w.holds_state for w in _listed(job.state)]


def _listed(state: State) -> list[Worker]:
    return [state.workers[key] for gen in state.open for key in gen.members]


def _remembered(state: State) -> dict[str, object]:
    return {
        "lists": [(g.number, g.members, g.leavers, g.planned, g.taken_s is not None) for g in state.open],
        "plain": (state.number, state.want, state.loops_done, state.loops_applied, state.failed, state.done),
        "leaving": (state.leaving, state.unexpected),
        "script": (dict(state.fingerprint), state.fingerprint_of),
        "out": {key: (w.out, w.ended, w.finished) for key, w in state.workers.items() if w.gone},
    }
