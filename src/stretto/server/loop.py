"""The scheduling loop: observes, decides, acts; level-triggered, so that it may be killed anywhere.

*Deciding* asks the policy for targets, when something changed that matters to it or when it asked to be woken. *Acting*
compares targets with what lives (`reconcile`) and carries out the difference. Both may be asked for at any time and
as often as one likes; bursts become one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from stretto.backends.protocol import Backend, Exit, LaunchError, LaunchFault, News, Started
from stretto.control.journal import JournalError
from stretto.core import cycle
from stretto.core.agenda import Agenda
from stretto.core.cycle import CycleState
from stretto.core.policy import Policy
from stretto.errors import StrettoError
from stretto.jobs import events as e
from stretto.jobs.model import Job, Seat, Worker
from stretto.server import deciding, loss, reconcile, taking, troubles, view
from stretto.server.book import Active, Book, Said
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings
from stretto.server.estimates import Estimates
from stretto.server.neighbours import Neighbours
from stretto.server.site import Decide, Question, Site
from stretto.server.troubles import Trouble
from stretto.server.view import Cluster, Hold, Quota
from stretto.tasks import aside

_log = logging.getLogger("stretto.server")

_RECORD_PROGRESS_S = 10.0
_BACK_OFF_S, _LONGEST_BACK_OFF_S = 1.0, 300.0
_FAILED_GRACE_S = 5.0
_AFTER_MISTAKE_S = 1.0
_LONGEST_TEXT = 200
_SHORT_S, _LONGEST_REST_S = 0.005, 1.0
_LOOK_EVERY_S = 5.0
_NOTHING_THERE = "there is no process of it, no supervisor, and no start under way"
_LONGEST_LOOK_S = 5.0
"""For what a failed worker's log says."""
_LONGEST_PREPARATION_S = 30.0
_TROUBLE_IS_OVER_S = 120.0


@dataclass
class Rules:
    """What can be changed while jobs run."""

    policy: Policy
    settings: cycle.Settings = field(default_factory=lambda: cycle.LIVE)
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    """By user; `*` is everybody else."""
    drained: Mapping[str, float] = field(default_factory=dict)
    """Nodes that are to be left, and until when those may stay there who would lose their work."""
    drained_by: Mapping[str, str] = field(default_factory=dict)
    """Who wants that."""


class Loop:
    """Owned by one event loop. `wake` is all that others need to call."""

    def __init__(
        self,
        book: Book,
        backend: Backend,
        estimates: Estimates,
        rules: Rules,
        site: Site,
        *,
        folder: Path,
        url: Callable[[], str],
        environment: Mapping[str, str],
        clock: Callable[[], float],
        heard: Callable[[float], float] = lambda at_s: at_s,
        decide: Decide = cycle.decide,
    ) -> None:
        self._decider = decide
        self.book, self.backend, self.estimates, self.rules = book, backend, estimates, rules
        self.site, self.environment, self.clock = site, environment, clock
        self.holds: dict[int, Hold] = {}
        self.trouble = ""
        """Why the last decision could not be made."""
        self.decisions = 0
        self.decision_s = 0.0
        """How long the last one took."""
        self.act_s = 0.0
        """How long the last comparison of targets with what lives took."""
        self.drivers: dict[int, Driver] = {}
        self._around = Surroundings(
            folder=folder,
            url=url,
            changed=self._changed,
            progressed=self._progressed,
            estimates=estimates,
            pools=site.pools,
            clock=clock,
            heard=heard,
            terminate=self._terminate,
            environment=environment,
            disturbed=self._disturbed,
            identity=site.identity,
        )
        self._neighbours = Neighbours(backend.nodes, clock)
        self._launches: dict[str, tuple[int, str]] = {}
        self._deadlines: dict[str, float] = {}
        """When a worker that was asked to leave is killed, by launch."""
        self._asked: set[str] = set()
        """Launches that were sent a signal."""
        self.state = CycleState()
        """What the cycle and the policy remember."""
        self.remembered: Callable[[], float] = lambda: math.inf
        """Called after every decision, when progress is written down, and when it last asked to be."""
        self._keep_s = math.inf
        """When what has changed since is written down, though nothing happens any more."""
        self.pinned: tuple[int, ...] = ()
        """Numbers of the jobs that would have lost their work by a stop when it was last decided."""
        self._agenda = Agenda()
        self._decided_s = -math.inf
        """When the policy was last asked."""
        self._adopting = False
        self._unstarted: list[Exit] = []
        """Ends of launches that the last server died over, before it had begun them."""
        self._starting: set[str] = set()
        """Launches that are being written down or asked for."""
        self._heard: set[str] = set()
        """Launches whose end is known, and not yet what it means."""
        self._unattended: set[str] = set()
        """Launches behind which nothing was when it was last looked."""
        self._look_s = math.inf
        """When what is believed to run is compared with what is there."""
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.troubles: dict[int, Trouble] = {}
        """Of single jobs, by number: for these nothing is done for a while."""
        self._readied: set[int] = set()
        """Jobs for whose driver something is being made ready."""
        self._untold: dict[int, list[tuple[Worker, Exit]]] = {}
        """Ends of workers whose job has no driver yet, by its number."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.backend.nodes(), self.rules.drained)

    async def open(self) -> None:
        """Adopt what runs."""
        alive = [active for active in self.book if active.job.workers or active.job.helpers]
        await asyncio.gather(*(self._make_driver(active) for active in alive))
        for active in self.book:
            processes = (*active.job.workers, *active.job.helpers)
            for worker in processes:
                self._launches[worker.launch] = active.number, worker.name
            if processes:
                self._look_s = self.clock() + _LOOK_EVERY_S
            for worker in processes:
                if worker.leaving:
                    self._deadlines[worker.launch] = self._give_up_s(active)
            if active.job.workers:
                active.pool = self._pool_of(active.target)
                self._note_keeping(active)
        self._adopting = True
        try:
            await self.backend.open(list(self._launches), self._tell)
        finally:
            self._adopting = False
        self._complete_starts()

    async def run(self) -> None:
        """Until cancelled. A mistake of ours must not stop it: it is said, and everything is looked at again."""
        while True:
            try:
                await self._wait()
                await self._turn()
                # Others want the event loop, too; what happens meanwhile is one turn's work.
                await asyncio.sleep(min(2 * self.act_s, _LONGEST_REST_S) if self.act_s > _SHORT_S else 0)
            except Exception as error:
                self._tell_trouble(error)
                self._touch(urgent=True)
                await asyncio.sleep(_AFTER_MISTAKE_S)

    async def _turn(self) -> None:
        self._woken.clear()
        now_s = self.clock()
        self._kill_overdue(now_s)
        self._end_overdue(now_s)
        self._keep_overdue(now_s)
        self._look_for_lost(now_s)
        decided = now_s >= self._ask_s() and await self._decide(now_s)
        began_s = time.monotonic()
        self._act()
        self.act_s = time.monotonic() - began_s
        if decided:
            self.trouble = ""

    async def close(self) -> None:
        """Let go; the workers go on."""
        for task in list(self._tasks):
            task.cancel()
        for driver in self.drivers.values():
            await driver.close()
        await self.backend.close()

    def wake(self, *, decide: bool, act: bool = True, urgent: bool = False) -> None:
        """Something has changed; `decide`: something that a policy should know; `urgent`: that even one which decides
        in rounds should know now. Without `act` nothing can be done before it was asked, and if that is about to happen
        anyway nobody is woken."""
        if act or self._agenda.wake_s > self.clock():
            self._woken.set()
        if decide:
            self._touch(urgent=urgent)

    def _touch(self, *, urgent: bool) -> None:
        self._agenda = self._agenda.touched(self.clock(), rounds=self.rules.policy.traits.rounds, urgent=urgent)

    def set_policy(self, policy: Policy, settings: cycle.Settings) -> None:
        """From now on. What the last policy remembered means nothing to this one."""
        self.rules.policy, self.rules.settings = policy, settings
        self.state = CycleState(blocked=self.state.blocked)
        self.wake(decide=True, urgent=True)

    # Waiting.

    def _ask_s(self) -> float:
        """When the policy is asked next, as things are."""
        held_s = min((hold.until_s for hold in self.holds.values()), default=math.inf)
        return max(self._agenda.rest_s, min(self._agenda.wake_s, held_s, self._patience_s()))

    def _patience_s(self) -> float:
        """When those have to leave a drained node who may still stay there to end."""
        return min((s for s in self.rules.drained.values() if s > self._decided_s), default=math.inf)

    async def _wait(self) -> None:
        """Until somebody wakes us, or a decision or a deadline is due."""
        left_s = min(self._ask_s(), self._next_due_s()) - self.clock()
        if left_s <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if math.isinf(left_s) else left_s):
                await self._woken.wait()

    def _next_due_s(self) -> float:
        times = [self._keep_s, self._look_s, *self._deadlines.values(), *self._troubles_end_s()]
        for active in self.book.lively.values():
            times.append(self._limit_s(active))
            if active.job.workers and active.job.not_before_s > self.clock():
                times.append(active.job.not_before_s)
        return min(times)

    # Deciding.

    async def _decide(self, now_s: float) -> bool:
        """Ask, and take over what is answered; whether there was an answer. What happens meanwhile is the next
        decision's business."""
        self._agenda = msgspec.structs.replace(self._agenda, wake_s=math.inf)
        self._decided_s = now_s
        began_s, policy = time.monotonic(), self.rules.policy
        decide = self.site.ask(self._question(now_s))
        try:
            answer: deciding.Verdicts | Exception = await asyncio.to_thread(decide)
        except Exception as error:
            answer = error
        self.decision_s = time.monotonic() - began_s
        touched_s = self._agenda.wake_s
        wake_s = min(touched_s, answer.wake_s if isinstance(answer, deciding.Verdicts) else math.inf)
        self._agenda = self._agenda.answered(now_s, self.clock(), self.decision_s, wake_s)
        if policy is not self.rules.policy:
            # Another one was chosen meanwhile; what this one remembers means nothing to it.
            self._touch(urgent=True)
        elif isinstance(answer, Exception):
            self._be_in_trouble(answer)
        else:
            self._take_over(answer)
            return True
        return False

    def _question(self, now_s: float) -> Question:
        jobs = [self.book.jobs[number] for number in sorted(self.book.jobs)]
        self.holds, most = view.held(jobs, self.book.names, self.rules.quotas, now_s)
        shown = [active for active in jobs if active.number not in self.holds] if self.holds else jobs
        for number, hold in self.holds.items():
            with self._about(self.book.jobs[number]):
                self._hold(self.book.jobs[number], hold)
        return Question(
            jobs=shown, most=most, policy=self.rules.policy, settings=self.rules.settings, state=self.state,
            decide=self._decider, drained=self.rules.drained, now_s=now_s,
        )  # fmt: skip

    def _take_over(self, answer: deciding.Verdicts) -> None:
        self.decisions += 1
        self.state, self.pinned = answer.state, answer.pinned
        known = self.book.jobs
        for number, verdict in answer.of.items():
            active = known.get(number)
            if active is None:
                continue
            if active.target or verdict.seats or verdict.rejected:
                with self._about(active):
                    self._apply(active, verdict)
            else:
                active.ground = verdict.ground
        for number in answer.stranded:
            self._drop_move(number)
        self._keep_by(self.remembered())

    def _drop_move(self, number: int) -> None:
        """It could not be moved as it was asked to. Later it would lose more than whoever asked has agreed to."""
        active = self.book.active(number)
        if active is not None and active.job.node:
            why = f"there is no room for it on {active.job.node} without losing work for nothing"
            self.book.record(number, e.Moved(node="", by="stretto", why=why))
            self.wake(decide=True)

    def _be_in_trouble(self, error: Exception) -> None:
        """What runs goes on as it is, and everybody can read why. The policy is asked once more without what it
        remembered; a mistake that is not its own may be over a little later."""
        if self.state.policy is not None or self.state.cores is not None:
            self.state = CycleState(blocked=self.state.blocked)
            self._touch(urgent=True)
            return
        self._tell_trouble(error)
        if not isinstance(error, StrettoError):
            again_s = min(self._agenda.wake_s, self.clock() + _AFTER_MISTAKE_S)
            self._agenda = msgspec.structs.replace(self._agenda, wake_s=again_s)

    def _tell_trouble(self, error: Exception) -> None:
        """To whoever asks: `why`, `policy get` and `/readyz`. In the log once, a mistake of ours with where it was."""
        told = error if isinstance(error, StrettoError) else _mistake(error)
        if str(told) != self.trouble:
            _log.warning("no decision could be made: %s", told, exc_info=None if told is error else error)
        self.trouble = str(told)
        for active in self.book:
            if not active.target and active.number not in self.holds:
                active.ground = Said("trouble", f"waits: {told.message}")

    def _apply(self, active: Active, verdict: deciding.Verdict) -> None:
        if active.job.wish != "run" or len(verdict.seats) > active.request.max_workers:
            # It changed while the policy was thinking; that has woken us again.
            return
        if verdict.rejected:
            self._finish(active, End("failed", verdict.ground.text))
            return
        before = len(active.target)
        self.book.aim(active, verdict.seats, verdict.pool, verdict.ground)
        if before != len(verdict.seats):
            ground = verdict.ground
            self.book.record(
                active.number,
                e.Resized(workers=len(verdict.seats), before=before, reason=ground.name, text=ground.text),
            )

    def _hold(self, active: Active, hold: Hold) -> None:
        if active.target:
            event = e.Resized(workers=0, before=len(active.target), reason=hold.name, text=hold.text)
            self.book.record(active.number, event)
        self.book.aim(active, (), -1, hold)

    # Acting.

    def _act(self) -> None:
        self._forget_troubles()
        lively = [active for _, active in sorted(self.book.lively.items())]
        concerned = [active for active in lively if active.target or active.job.workers]
        for active in lively:
            with self._about(active):
                self._tend(active)
        situations = [self._situation(active) for active in concerned]
        for action in reconcile.actions(situations, self.site.floor):
            active_now = self.book.active(action.job)
            if active_now is not None and not self._is_hindered(active_now.number):
                with self._about(active_now):
                    self._carry_out(active_now, action)
        for active in concerned:
            if not active.target:
                with self._about(active):
                    self._hurry(active)

    def _tend(self, active: Active) -> None:
        processes, cancelled = active.job.workers or active.job.helpers, active.job.wish == "cancel"
        if not self._is_hindered(active.number):
            if active.job.level == "service":
                self._tend_helpers(active)
            if processes:
                self._is_driven(active)
        elif processes and cancelled:
            self._give_up(active, End("cancelled", active.job.message))
        if not processes and cancelled:
            self._finish(active, End("cancelled", active.job.message))
        elif active.job.node:
            self._look_at_move(active)

    def _carry_out(self, active: Active, action: reconcile.Action) -> None:
        if not self._is_driven(active):
            return
        match action:
            case reconcile.Stop(workers=workers):
                self._leave(active, workers)
                for name in self._driver(active).stop(workers):
                    self._signal(active, name, hard=False)
            case reconcile.Shrink(workers=workers, left=left):
                self._leave(active, workers)
                for name in self._driver(active).resize(left, workers):
                    self._signal(active, name, hard=active.job.level == "elastic")
            case reconcile.Start(seats=seats) | reconcile.Grow(seats=seats):
                self._launch(active, seats)
        self.troubles.pop(active.number, None)

    def _hurry(self, active: Active) -> None:
        """Members that were to leave when others had come: nobody comes any more."""
        for worker in active.job.workers:
            if worker.leaving and worker.launch not in self._asked:
                self._signal(active, worker.name, hard=False)

    def _look_at_move(self, active: Active) -> None:
        """Has a job that was asked to move arrived?"""
        job, driver = active.job, self.drivers.get(active.number)
        if driver is None or not job.workers:
            return
        arrived = all(worker.seat.node == job.node and not worker.leaving for worker in job.workers)
        if arrived and driver.joined >= {worker.name for worker in job.workers}:
            moved = e.Migrated(node=job.node, paused_s=round(driver.pause_s(), 3))
            self.book.record(active.number, moved, e.Moved(node="", by="stretto"))

    def _situation(self, active: Active) -> reconcile.Situation:
        with self._about(active):
            return self._as_seen(active, self.drivers.get(active.number))
        return self._as_seen(active, None)

    def _as_seen(self, active: Active, driver: Driver | None) -> reconcile.Situation:
        failing = driver is not None and driver.failing
        hindered = active.job.not_before_s > self.clock() or self._is_hindered(active.number)
        return reconcile.Situation(
            job=active.number,
            level=active.job.level,
            target=() if failing else active.target,
            workers=active.job.workers,
            joined=driver.joined if driver is not None else frozenset(),
            width_milli=active.request.width_milli,
            paused=hindered or bool(self.book.trouble),
            ending=driver is not None and driver.ending,
        )

    def _leave(self, active: Active, workers: Sequence[str]) -> None:
        for name in workers:
            worker = active.job.worker(name)
            if worker is not None:
                self._deadlines[worker.launch] = self._give_up_s(active)
        failing, drained = self._driver(active).failing, self.rules.drained.keys()
        taken, why = taking.taken(active, workers, drained, self.rules.drained_by, failing=failing), active.ground.text
        if taken is None:
            why = "the job has failed" if failing else why
        elif taken.cause == "asked":
            why = taken.text
        preempted = taken is not None and taken.cause == "preempted"
        lost_s = 0.0 if taken is None else round(loss.parted_s(active.job, workers, self.clock()), 3)
        if taken is not None and lost_s:
            taken = msgspec.structs.replace(taken, told=True)
        self.book.record(
            active.number, *(e.Leaving(worker=name, why=why, preempted=preempted, taken=taken) for name in workers)
        )
        if taken is not None and lost_s:
            self.book.record(active.number, taking.interrupted(taken, lost_s))

    def _give_up_s(self, active: Active) -> float:
        """When who is asked to leave now is killed."""
        driver, grace_s = self.drivers.get(active.number), active.file.stop.grace
        if driver is None:
            return self.clock() + grace_s
        if driver.failing and not (driver.end is not None and driver.end.polite):
            return self.clock() + min(_FAILED_GRACE_S, grace_s)
        return self.clock() + grace_s + driver.drain_s

    def _terminate(self, number: int, name: str) -> None:
        active = self.book.active(number)
        if active is not None:
            self._signal(active, name, hard=False)

    def _signal(self, active: Active, name: str, *, hard: bool) -> None:
        worker = active.job.worker(name)
        if worker is not None:
            self._asked.add(worker.launch)
            (self.backend.kill if hard else self.backend.terminate)(worker.launch)

    def _launch(self, active: Active, seats: Sequence[Seat]) -> None:
        """Write down what will be started, and start it when that is durable."""
        driver = self._driver(active)
        # Those that move are still among the members until the newcomers are.
        driver.prepare(sum(not worker.leaving for worker in active.job.workers) + len(seats))
        first, members = active.job.launches, driver.members(len(seats))
        events = [
            e.Launched(
                worker=f"w{first + i}",
                launch=f"{active.number}.w{first + i}.{secrets.token_hex(4)}",
                seat=seat,
                member=member,
                port=driver.port,
            )
            for i, (seat, member) in enumerate(zip(seats, members, strict=True))
        ]
        self._begin(active, events)

    def _tend_helpers(self, active: Active) -> None:
        """Start what the workers need and is not there; end what is not needed any more."""
        if (active.number not in self.drivers and not active.target) or not self._is_driven(active):
            return
        wanted, job = self._driver(active).helpers, active.job
        for helper in job.helpers:
            if helper.name not in wanted and not helper.leaving:
                self._leave(active, [helper.name])
                self._signal(active, helper.name, hard=False)
        missing = wanted - {helper.name for helper in job.helpers}
        if not missing or job.not_before_s > self.clock() or self.book.trouble:
            return
        node = next(seat.node for seat in (*active.target, *(worker.seat for worker in job.workers)))
        events = [
            e.Launched(
                worker=name, launch=f"{active.number}.{name}.{secrets.token_hex(4)}", seat=Seat(node), helper=True
            )
            for name in sorted(missing)
        ]
        self._begin(active, events)

    def _complete_starts(self) -> None:
        """A start that the last server died over is completed, not begun anew: who runs already waits for the rest."""
        ends, self._unstarted = self._unstarted, []
        for exit in ends:
            number, name = self._launches[exit.launch]
            active = self.book.active(number)
            if active is None or not self._is_completed(active, name, exit):
                self._tell(exit)

    def _is_completed(self, active: Active, name: str, exit: Exit) -> bool:
        """Begin it once more, if its job can and should go on."""
        with self._about(active):
            worker, driver = active.job.worker(name), self.drivers.get(active.number)
            if worker is None or driver is None or driver.end or driver.failing:
                return False
            again = e.Launched(
                worker=name,
                launch=f"{active.number}.{name}.{secrets.token_hex(4)}",
                seat=worker.seat,
                member=worker.member,
                helper=worker in active.job.helpers,
                port=worker.port,
                again=True,
            )
            durable = self._begin(active, [again], len(active.job.workers) + active.job.finished)
            del self._launches[exit.launch]
            durable.add_done_callback(partial(self._forget, exit.launch))
            return True
        return False

    def _forget(self, launch: str, recorded: asyncio.Future[None]) -> None:
        if not recorded.cancelled():
            self.backend.forget(launch)

    def _begin(self, active: Active, events: Sequence[e.Launched], size: int = 0) -> asyncio.Future[None]:
        """`size`: how many are started together, if it is not these."""
        for event in events:
            self._launches[event.launch] = active.number, event.worker
            self._starting.add(event.launch)
            self._neighbours.launched(active.number, event.worker, event.seat)
        self._look_s = min(self._look_s, self.clock() + _LOOK_EVERY_S)
        durable = self.book.record(active.number, *events)
        self.spawn(self._start(active, events, size or len(events), durable))
        return durable

    async def _start(
        self, active: Active, events: Sequence[e.Launched], size: int, durable: asyncio.Future[None]
    ) -> None:
        try:
            await durable
            await asyncio.gather(*(self._start_one(active, event, size) for event in events))
        finally:
            self._starting.difference_update(event.launch for event in events)

    async def _start_one(self, active: Active, event: e.Launched, size: int) -> None:
        worker = active.job.worker(event.worker)
        if event.launch not in self._launches or worker is None:
            return
        if worker.leaving:
            # It was asked to end while this was being written down, when there was nobody yet to ask.
            text = "it was asked to end before it had started"
            self._tell(Exit(launch=event.launch, how="signalled", status=15, text=text, at_s=self.clock()))
            return
        try:
            await self.backend.launch(self.site.launch(active, event, size, self._driver(active)))
        except Exception as error:
            # Whatever it is, it ends the launch and nothing else.
            if not isinstance(error, LaunchError):
                _log.warning("launch %s: %s", event.launch, error, exc_info=error)
                self.backend.kill(event.launch)
            again = isinstance(error, (LaunchFault, OSError)) and not troubles.is_final(error)
            how: Literal["lost", "refused"] = "lost" if again else "refused"
            self._tell(Exit(launch=event.launch, how=how, text=_why_not(error), at_s=self.clock()))

    def _look_for_lost(self, now_s: float) -> None:
        """Compare the processes that are believed to run with what is there. Behind which there was nothing twice ends
        as lost: its seat is free, and its job goes on, or ends as it was asked to."""
        if now_s < self._look_s:
            return
        believed = {
            process.launch: (active, process.name)
            for active in self.book.lively.values()
            for process in (*active.job.workers, *active.job.helpers)
        }
        looked_at = believed.keys() - self._starting - self._heard
        alone = {launch for launch in looked_at if not self.backend.attends(launch)}
        for launch in alone & self._unattended:
            active, name = believed[launch]
            _log.warning("job %s: nothing is behind %s (%s); it is given up", active.job.id, name, launch)
            self._launches.setdefault(launch, (active.number, name))
            with self._about(active):
                self._tell(Exit(launch=launch, how="lost", text=_NOTHING_THERE, at_s=self.clock()))
        self._unattended = alone
        self._look_s = now_s + _LOOK_EVERY_S if believed else math.inf

    def _driver(self, active: Active) -> Driver:
        if active.number not in self.drivers:
            self.drivers[active.number] = self.site.driver(active, self._around)
        return self.drivers[active.number]

    def _is_driven(self, active: Active) -> bool:
        """Whether there is a driver. If one has to be made ready that is begun; things are looked at again when it
        is."""
        if active.number in self.drivers or self.site.preparation(active, self._around) is None:
            return True
        if active.number not in self._readied:
            self.spawn(self._make_driver(active))
        return False

    async def _make_driver(self, active: Active) -> None:
        number = active.number
        self._readied.add(number)
        prepare, prepared = self.site.preparation(active, self._around), None
        try:
            if prepare is not None:
                async with asyncio.timeout(_LONGEST_PREPARATION_S):
                    prepared = await aside(prepare)
            if self.book.active(number) is active and number not in self.drivers:
                self.drivers[number] = self.site.driver(active, self._around, prepared)
            if active.job.workers:
                self.troubles.pop(number, None)
        except Exception as error:
            self._in_trouble(active, error)
        finally:
            self._readied.discard(number)
            if prepared is not None and number not in self.drivers:
                prepared.close()
        if number in self.drivers:
            for worker, exit in self._untold.pop(number, []):
                self._over(active, worker, exit)
        self.wake(decide=False)

    # A job's own trouble.

    @contextlib.contextmanager
    def _about(self, active: Active) -> Iterator[None]:
        """What goes wrong in here is this job's trouble, and nobody else's."""
        try:
            yield
        except Exception as error:
            self._in_trouble(active, error)

    def _in_trouble(self, active: Active, error: Exception) -> None:
        """It fails, if that will not be over by itself; otherwise it is left alone for a while."""
        number, text = active.number, troubles.told(error)
        before = self.troubles.get(number)
        if before is None or before.text != text:
            ours = None if isinstance(error, (OSError, JournalError)) else error
            _log.warning("job %d is in trouble: %s", number, text, exc_info=ours)
        if self.book.active(number) is not active:
            return
        trouble = self.troubles[number] = troubles.next_trouble(before, text, self.clock())
        processes, cancelled = active.job.workers or active.job.helpers, active.job.wish == "cancel"
        last = not processes and trouble.times > active.file.retries and not troubles.is_the_machines(error)
        if troubles.is_final(error) or cancelled or last:
            self._give_up(active, End("cancelled" if cancelled else "failed", text))
        else:
            self.book.record(number, e.Retried(not_before_s=trouble.until_s, text=text, afresh=True))
        self.wake(decide=True)

    def _give_up(self, active: Active, end: End) -> None:
        """Nobody can drive it. Its workers are ended first."""
        del self.troubles[active.number]
        if not active.job.workers and not active.job.helpers:
            self._finish(active, end)
            return
        before = self.drivers.get(active.number)
        self.drivers[active.number] = troubles.Abandoned(active, self._around, end)
        if before is not None:
            self.spawn(before.close())
        for worker, exit in self._untold.pop(active.number, []):
            self._over(active, worker, exit)

    def tell_of_damage(self, found: Mapping[int, str]) -> None:
        """What was found as the store was read: these jobs are in trouble, or were, for as long as that is told."""
        for number, text in found.items():
            _log.warning("job %d is in trouble: %s", number, text)
            self.troubles[number] = Trouble(text, self.clock())

    def _is_hindered(self, number: int) -> bool:
        trouble = self.troubles.get(number)
        return trouble is not None and trouble.until_s > self.clock()

    def _troubles_end_s(self) -> Iterator[float]:
        """When jobs are tried again."""
        now_s = self.clock()
        return (trouble.until_s for trouble in self.troubles.values() if trouble.until_s > now_s)

    def _forget_troubles(self) -> None:
        """Those that have not come again."""
        now_s = self.clock()
        for number, trouble in list(self.troubles.items()):
            if now_s - trouble.until_s > _TROUBLE_IS_OVER_S:
                del self.troubles[number]

    # What happens.

    def _tell(self, news: News) -> None:
        number, name = self._launches.get(news.launch, (0, ""))
        active = self.book.active(number)
        worker = active.job.worker(name) if active is not None else None
        if isinstance(news, Started):
            if active is not None and worker is not None:
                # Who is found is not younger for it: what it would lose is counted from its beginning.
                began_s = worker.began_s or worker.launched_s if news.how == "adopted" else 0.0
                event = e.Running(
                    worker=name, launch=news.launch, pid=news.pid, how=news.how, why=news.why, began_s=began_s
                )
                self.book.record(number, event)
                if active.job.level != "elastic":
                    # Of an elastic one its coordinator tells when it takes part.
                    self._neighbours.takes_part(number, {name})
                    self.wake(decide=False)
            return
        if self._adopting and news.never and worker is not None and not worker.pid and not worker.leaving:
            self._unstarted.append(news)
            return
        if active is None or worker is None or worker.launch != news.launch:
            self._let_go(news.launch)
            self.backend.forget(news.launch)
            return
        helps = worker in active.job.helpers
        failed = news.how == "exited" and (news.status or helps) and not worker.leaving
        explain = self.site.explanation(active, worker) if failed else None
        if explain is None:
            self._over(active, worker, news)
        else:
            self._heard.add(news.launch)
            self.spawn(self._explain(active, worker, news, explain))

    async def _explain(self, active: Active, worker: Worker, exit: Exit, look: Callable[[], str]) -> None:
        """With what its log says, if that can be read within a moment."""
        text = ""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_LONGEST_LOOK_S):
                text = await aside(look)
        self._over(active, worker, msgspec.structs.replace(exit, text=text) if text else exit)

    def _over(self, active: Active, worker: Worker, exit: Exit) -> None:
        """A worker has ended, and all that can be said about it is known."""
        number = active.number
        if self.book.active(number) is not active:
            self._let_go(exit.launch)
            self.backend.forget(exit.launch)
        elif number not in self.drivers and self.site.preparation(active, self._around) is not None:
            # Nobody can say yet what it means.
            self._heard.add(exit.launch)
            self._untold.setdefault(number, []).append((worker, exit))
        else:
            self._let_go(exit.launch)
            with self._about(active):
                self._exited(active, worker, exit)

    def _let_go(self, launch: str) -> None:
        self._heard.discard(launch)
        self._launches.pop(launch, None)
        self._deadlines.pop(launch, None)
        self._asked.discard(launch)

    def _exited(self, active: Active, worker: Worker, exit: Exit) -> None:
        events: list[e.Event] = []
        if exit.asked and not worker.leaving:
            # By somebody else than us. Whatever its exit code says, it has not finished.
            events.append(e.Leaving(worker=worker.name, why=exit.text or "was asked to end", preempted=False))
        events.append(
            e.Exited(worker=worker.name, launch=exit.launch, how=exit.how, status=exit.status, text=exit.text)
        )
        before = active.job
        self._neighbours.exited(active.number, worker)
        durable = self.book.record(active.number, *events)
        durable.add_done_callback(partial(self._forget, exit.launch))
        judgement = self._driver(active).exited(worker, exit, len(active.job.workers))
        self._note_keeping(active)
        if not active.job.workers and before.workers:
            self._note_interruption(active, before, worker, exit, judgement)
        # What was lost while there was no server, with the whole machine perhaps, is nobody's fault.
        if isinstance(judgement, Fault) and not (self._adopting and exit.how == "lost"):
            self._retry(active, judgement)
        self._settle(active)
        self.wake(decide=True)

    def _note_keeping(self, active: Active) -> None:
        """What its driver has seen of its ability to keep its progress."""
        driver = self.drivers.get(active.number)
        if driver is None or driver.seen is None:
            return
        seen, driver.seen = driver.seen, None
        if seen.keeps != active.job.keeps:
            self.book.record(active.number, seen)

    def _note_hanging(self, active: Active) -> None:
        driver = self.drivers.get(active.number)
        if driver is not None and driver.hung:
            hung, driver.hung = driver.hung, []
            self.book.record(active.number, *hung)
            self.remembered()

    def _note_interruption(self, active: Active, before: Job, worker: Worker, exit: Exit, judgement: Judgement) -> None:
        """Its last worker has ended. If it wanted to go on, what was its work worth that is gone?"""
        number = active.number
        if isinstance(judgement, End) or self._driver(active).end is not None or active.job.wish == "cancel":
            return
        taken = worker.taken or taking.accident(worker, exit, judgement)
        if taken is None or taken.told or active.request.is_service:
            return
        stopped, at_s = taken.cause == "preempted" and not active.target, self.clock()

        def tell() -> None:
            known = msgspec.structs.replace(before, keeps=active.job.keeps)
            lost_s = round(loss.lost_s(active, at_s, known), 3)
            if number in self.book.jobs and (lost_s or stopped):
                self.book.record(number, taking.interrupted(taken, lost_s))

        if (looking := self._driver(active).looking_back) is None:
            tell()
        else:
            self.spawn(_after(looking, tell))

    def _settle(self, active: Active) -> None:
        """Is this the end?"""
        if active.job.workers or active.job.helpers or active.number not in self.book.jobs:
            return
        driver = self.drivers.get(active.number)
        if driver is not None and driver.end is not None:
            self._finish(active, driver.end)
        elif active.job.wish == "cancel":
            self._finish(active, End("cancelled", active.job.message))

    def _finish(self, active: Active, end: End) -> None:
        events: list[e.Event] = []
        if _has_progressed(active):
            events.append(active.progress.event())
        events.append(e.Ended(phase=end.phase, message=end.message, exit_code=end.exit_code))
        active.target = ()
        self.book.record(active.number, *events)
        self.troubles.pop(active.number, None)
        driver = self.drivers.pop(active.number, None)
        if driver is not None:
            self.spawn(driver.close())
        if end.phase == "succeeded" and not active.request.is_service:
            learned = self.estimates.ended(active.job, active.request)
            self.book.store.put_learned(active.request.klass, learned)
        else:
            self.estimates.forget(active.number)
        self.wake(decide=True)

    def _retry(self, active: Active, fault: Fault) -> None:
        """The machine failed it. Progress since the last time wipes the slate clean. What fails several workers at
        once, or more of them before it is tried again, is one fault. Newcomers that fail one after the other are tried
        ever more seldom, however well the others train."""
        if active.job.not_before_s > self.clock():
            return
        if active.progress.steps > active.job.steps:
            self._record_progress(active)
        driver = self._driver(active)
        afresh = driver.recovered
        failures = 0 if afresh else active.job.failures
        if failures >= active.file.retries and not driver.serving:
            kind = "" if active.request.is_service else "machine "
            message = f"{fault.text}; given up after {failures + 1} {kind}faults without progress in between"
            driver.end = driver.end or End("failed", message)
            return
        tries, text = failures, fault.text
        if fault.newcomer:
            tries, driver.newcomers_failed = max(failures, driver.newcomers_failed), driver.newcomers_failed + 1
        wait_s = min(_BACK_OFF_S * 2 ** min(tries, 20), _LONGEST_BACK_OFF_S)
        if fault.newcomer and driver.newcomers_failed > 1:
            text += f"; {driver.newcomers_failed} newcomers in a row have failed, the next is tried after {wait_s:g} s"
        self.book.record(active.number, e.Retried(not_before_s=self.clock() + wait_s, text=text, afresh=afresh))

    def _changed(self, number: int) -> None:
        """A driver's answers have changed."""
        active = self.book.active(number)
        if active is None:
            return
        with self._about(active):
            if (driver := self.drivers.get(number)) is not None:
                self._neighbours.takes_part(number, driver.joined)
            self._note_keeping(active)
            self._note_hanging(active)
            self._settle(active)
        self.wake(decide=True, urgent=active.request.is_service)

    def _disturbed(self, number: int, since_s: float, until_s: float) -> bool:
        active = self.book.active(number)
        seats = [worker.seat for worker in active.job.workers] if active is not None else []
        return self._neighbours.disturbed(number, seats, since_s, until_s)

    def _progressed(self, number: int) -> None:
        active = self.book.active(number)
        if active is None:
            return
        self._note_hanging(active)
        if self.clock() - active.progress.recorded_s >= _RECORD_PROGRESS_S:
            self._record_progress(active)
        else:
            self._keep_by(self.clock() + _RECORD_PROGRESS_S)

    def _record_progress(self, active: Active) -> None:
        progress = active.progress
        progress.recorded_s = self.clock()
        self.book.record(active.number, progress.event())
        self._keep_by(self.remembered())

    # Deadlines.

    def _keep_by(self, due_s: float) -> None:
        """Something has changed that is written down now and then: nothing more need happen for it to be."""
        if due_s < self._keep_s:
            self._keep_s = due_s
            self._woken.set()

    def _keep_overdue(self, now_s: float) -> None:
        if now_s < self._keep_s:
            return
        self._keep_s = math.inf
        for active in list(self.book.lively.values()):
            if _has_progressed(active):
                with self._about(active):
                    self._progressed(active.number)
        self._keep_by(self.remembered())

    def _kill_overdue(self, now_s: float) -> None:
        for launch, due_s in list(self._deadlines.items()):
            if now_s >= due_s:
                self.backend.kill(launch)
                self._deadlines[launch] = now_s + 1.0

    def _end_overdue(self, now_s: float) -> None:
        for active in self.book.lively.values():
            driver = self.drivers.get(active.number)
            if driver is not None and now_s >= self._limit_s(active):
                limit = f"ran longer than its limit of {active.file.stop.after:g} s (stop.after)"
                driver.end = End("failed", limit, polite=True)
                self.wake(decide=False)

    def end(self, number: int, why: str) -> None:
        """It has failed, whatever it does."""
        active, driver = self.book.active(number), self.drivers.get(number)
        if active is not None and driver is not None and driver.end is None:
            driver.end = End("failed", why)
            self.wake(decide=False)

    def _limit_s(self, active: Active) -> float:
        """When its run time reaches its limit."""
        driver = self.drivers.get(active.number)
        over = active.job.wish != "run" or driver is None or driver.end is not None
        if active.file.stop.after is None or not active.job.workers or over:
            return math.inf
        return active.job.changed_s + max(0.0, active.file.stop.after - active.job.ran_s)

    def _pool_of(self, seats: Iterable[Seat]) -> int:
        pools = {node.name: node.pool for node in self.backend.nodes()}
        names = [pools[seat.node] for seat in seats if seat.node in pools]
        return self.site.pools().index(names[0]) if names else -1

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Let something go on beside the loop; it ends with it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("what went on beside the loop has failed: %s", error, exc_info=error)


def _has_progressed(active: Active) -> bool:
    """Since that was last written down."""
    progress, job = active.progress, active.job
    return progress.steps != job.steps or progress.total != job.total_steps


def _why_not(error: Exception) -> str:
    """Why something could not be started, in a line."""
    if isinstance(error, StrettoError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    return f"the server itself failed: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]}"


def _mistake(error: Exception) -> StrettoError:
    """What should not have been raised, as an error that can be told."""
    text = f"the scheduler itself failed: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]}"
    return StrettoError(text, hint="it is tried again every second; the server's log says where")


async def _after(task: asyncio.Task[None], then: Callable[[], None]) -> None:
    await asyncio.wait([task])
    then()
