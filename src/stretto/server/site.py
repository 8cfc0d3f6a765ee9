"""Where jobs run: everything in which one machine and a cluster differ, besides starting and ending processes.

The loop asks a site how a job is driven, how a worker is launched, what a policy is shown, and what still lies between
a worker and the place it should have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from stretto.accounts import Accounts, Identity
from stretto.backends.protocol import Backend, Launch, LaunchFault
from stretto.core import cycle, preempting
from stretto.core.cycle import CycleState
from stretto.core.policy import Policy
from stretto.core.snapshot import Snapshot
from stretto.jobs import events as e
from stretto.jobs.model import Job, Seat, Worker
from stretto.server import asked, deciding, drivers, loss, reconcile, view
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, Surroundings, records_beside
from stretto.server.drivers.service import PROXY, SOCKET
from stretto.server.estimates import Estimates
from stretto.server.tracebacks import last_alert, last_line, last_traceback

_LOG_TAIL = 20


class Decide(Protocol):
    """`cycle.decide`, or what writes down what it does."""

    def __call__(
        self, view: Snapshot, policy: Policy, state: CycleState, settings: cycle.Settings, fit: cycle.Fit | None = None
    ) -> cycle.Outcome: ...


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the loop wants decided."""

    jobs: Sequence[Active]
    """In order of number; nobody who is held back."""
    most: Mapping[int, int]
    """Lowers the maximum of some (quotas), by number."""
    policy: Policy
    settings: cycle.Settings
    state: CycleState
    decide: Decide = cycle.decide
    drained: Mapping[str, float]
    """Nodes that are to be left, and until when those may stay there who would lose their work."""
    now_s: float


class Site(Protocol):
    def pools(self) -> tuple[str, ...]:
        """The device types, in the order in which verdicts count them."""

    def ask(self, question: Question) -> Callable[[], deciding.Verdicts]:
        """Look at everything now; what is given back decides, in any thread. It raises `PolicyError` and the like."""

    def floor(self, situations: Sequence[reconcile.Situation]) -> reconcile.Floor:
        """What is free at this moment."""

    def preparation(self, active: Active, around: Surroundings) -> Callable[[], Any] | None:
        """What has to be done in a thread before there can be a driver; what it gives is `prepared`. It may raise."""

    def driver(self, active: Active, around: Surroundings, prepared: Any = None) -> Driver: ...

    def launch(self, active: Active, event: e.Launched, size: int, driver: Driver) -> Launch:
        """What is to be started. So many are launched together."""

    def identity(self, job: Job) -> Identity | None:
        """Whose processes its workers are; None: whoever we are. Raises `AccountRefused`."""

    def explanation(self, active: Active, worker: Worker) -> Callable[[], str] | None:
        """Looks up, in a thread, what a person would look up first of a process that failed. None: all is said."""


class LocalSite:
    """This machine: jobs have folders, logs and the variables of their submitter."""

    def __init__(
        self,
        backend: Backend,
        estimates: Estimates,
        folder: Path,
        environment: Mapping[str, str],
        accounts: Accounts | None = None,
    ) -> None:
        self._backend, self._estimates, self._folder, self._environment = backend, estimates, folder, environment
        self._accounts, self._records = accounts, records_beside(folder)

    def pools(self) -> tuple[str, ...]:
        return view.Cluster(self._backend.nodes()).pools

    def ask(self, question: Question) -> Callable[[], deciding.Verdicts]:
        jobs, most = question.jobs, question.most
        cluster = view.Cluster(self._backend.nodes(), question.drained)
        look = partial(view.snapshot, jobs, cluster, self._estimates, question.now_s, most)
        seats = {active.number: view.kept(active, most.get(active.number)) for active in jobs if active.target}
        names = {active.number: active.job.name for active in jobs}

        def decide_on(shown: Snapshot) -> deciding.Verdicts:
            decided = question.decide(shown, question.policy, question.state, question.settings)
            found = deciding.verdicts(shown, decided, partial(deciding.on_devices, seats), names)
            vain = deciding.in_vain(shown, decided, found)
            # Parts of a device may be free where nobody who may not be moved lets a whole one come together.
            return decide_on(preempting.sparing(shown, shown.pinned | vain)) if vain.any() else found

        snapshot, moves = look(), _moves(jobs)
        if not moves:
            return partial(decide_on, snapshot)
        staying = look(staying=moves)

        def decide_on_moves() -> deciding.Verdicts:
            """Without moves that would lose work for nothing, or others' work: as if nobody had asked for them."""
            answer = decide_on(snapshot)
            stranded = _stranded(answer, moves, seats)
            return msgspec.structs.replace(decide_on(staying), stranded=stranded) if stranded else answer

        return decide_on_moves

    def floor(self, situations: Sequence[reconcile.Situation]) -> reconcile.Floor:
        return reconcile.Devices(situations)

    def preparation(self, active: Active, around: Surroundings) -> Callable[[], Any] | None:
        return drivers.preparation(active, around)

    def driver(self, active: Active, around: Surroundings, prepared: Any = None) -> Driver:
        return drivers.driver_for(active, around, prepared)

    def identity(self, job: Job) -> Identity | None:
        return None if self._accounts is None else self._accounts.identity(job)

    def launch(self, active: Active, event: e.Launched, size: int, driver: Driver) -> Launch:
        return self._helper(active, event, driver) if event.helper else self._worker(active, event, size, driver)

    def _worker(self, active: Active, event: e.Launched, size: int, driver: Driver) -> Launch:
        job, file = active.job, active.file
        who = self.identity(job)
        env = asked.environment(job, file, self._environment, alien=who is not None)
        env |= driver.environment(event.worker, event.seat, event.member, size)
        env["STRETTO_JOB_FOLDER"] = str(self._folder / job.id)
        return Launch(
            id=event.launch,
            job=job.number,
            worker=event.worker,
            node=event.seat.node,
            devices=event.seat.devices,
            # Who starts it looks for the program: in this thread a PATH on a file system that hangs would hold up all.
            command=driver.command(event.member, None),
            warm=driver.warm,
            cwd=asked.workdir(job, file, "" if who is None else who.home),
            env=env,
            account=None if who is None else job.account,
            log=self._log(job, event.worker),
            folder=str(self._folder / job.id),
            cpu_milli=active.request.cpu_milli,
            memory_mib=active.request.memory_mib,
            grace_s=file.stop.grace,
        )

    def _helper(self, active: Active, event: e.Launched, driver: Driver) -> Launch:
        """It has nothing of the job's surroundings, and no limits."""
        try:
            command = driver.helper_command(event.worker)
            # The proxy is ours, and does what we have written down for it.
            alien = event.worker != PROXY and self.identity(active.job) is not None
        except OSError as error:
            raise LaunchFault(f"{error.filename}: {error.strerror}") from None
        return Launch(
            id=event.launch,
            job=active.number,
            worker=event.worker,
            node=event.seat.node,
            command=command,
            warm=False,
            cwd=str(self._folder / active.job.id if event.worker != PROXY else self._records / active.job.id),
            env={name: self._environment[name] for name in ("PATH", "LANG", "TZ") if name in self._environment},
            account=active.job.account if alien else None,
            log=self._log(active.job, event.worker),
            folder=str(self._folder / active.job.id),
            grace_s=active.file.stop.grace,
        )

    def _log(self, job: Job, worker: str) -> str:
        return str(self._records / job.id / "logs" / f"{worker}.log")

    def explanation(self, active: Active, worker: Worker) -> Callable[[], str]:
        """The end of the script's traceback; of a helper, its own complaint."""
        log = Path(self._log(active.job, worker.name))
        if worker.name == PROXY:
            return partial(last_alert, log, self._records)
        if worker.name == SOCKET:
            return partial(last_line, log, self._records)
        return lambda: "\n".join(last_traceback(log, self._records).splitlines()[-_LOG_TAIL:])


class _Move(NamedTuple):
    node: str
    loses: bool
    """Whether it loses its work by it."""


def _moves(jobs: Sequence[Active]) -> dict[int, _Move]:
    """Where those go, by number, who were asked to and are not on their way yet."""
    return {
        active.number: _Move(active.job.node, math.isfinite(loss.since_s(active)))
        for active in jobs
        if active.job.node and any(seat.node != active.job.node for seat in active.target)
    }


def _stranded(
    answer: deciding.Verdicts, moves: Mapping[int, _Move], seats: Mapping[int, Sequence[Seat]]
) -> tuple[int, ...]:
    """Who should not move now: all of them if that would change anything for a pinned job; otherwise those who would
    lose their work without arriving."""
    got = {number: verdict.seats for number, verdict in answer.of.items()}
    if any(sorted(got.get(number, ())) != sorted(seats.get(number, ())) for number in answer.pinned):
        return tuple(moves)
    return tuple(
        number
        for number, move in moves.items()
        if move.loses and {seat.node for seat in got.get(number, ())} != {move.node}
    )
