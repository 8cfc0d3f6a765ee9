"""All jobs that have not ended, in memory, and the one way to change them.

An event is applied to the job at once and handed to the store, which keeps the order; whoever must not go on before it
is durable waits for what `record` returns. While the store cannot write (disk full, database away) nothing is accepted
and nothing is launched, what happens anyway is kept and written when it can.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from stretto.core.estimate.curve import Window
from stretto.core.request import JobRequest
from stretto.errors import StrettoError
from stretto.jobs import events as e
from stretto.jobs import lifecycle
from stretto.jobs.model import Job, Seat
from stretto.server.asked import request_of
from stretto.spec.model import MOST_WORKERS, JobFile
from stretto.store import Damaged, Entry, Refused, Store, StoreError
from stretto.tasks import stop

_AGAIN_S = 1.0
_LONGEST_WHY = 500


@dataclass
class Progress:
    """How far a job has come, as its workers said last."""

    steps: int = 0
    total: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    paused_s: float = 0.0
    rate: float = 0.0
    """Steps per second on the workers it has: as timed last, or to be expected; 0: nobody knows."""
    window: Window | None = None
    """The steps that were timed last, if they were done by as many workers as it has."""
    saved: tuple[int, float] | None = None
    """The steps of the last checkpoint that is whole, and when that was heard."""
    recorded_s: float = 0.0
    """When it was last made an event."""
    stuck: tuple[e.Stuck, ...] = ()
    """The workers that make no steps and hold it up, as they stand now."""

    def event(self) -> e.Progressed:
        return e.Progressed(
            steps=self.steps, total_steps=self.total, metrics=dict(self.metrics), paused_s=round(self.paused_s, 6)
        )


class Reasoned(Protocol):
    """A stable name, and a sentence."""

    @property
    def name(self) -> str: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True)
class Said:
    name: str
    text: str


_NEW = Said("new", "was accepted just now")


@dataclass
class Active:
    """A job and what is known of it beyond its events. The loop owns `target`, `pool` and `ground`."""

    job: Job
    file: JobFile
    request: JobRequest
    target: tuple[Seat, ...] = ()
    """The seats it should have."""
    pool: int = -1
    ground: Reasoned = _NEW
    """Why it has this size."""
    wanted: int = 0
    """For a service: the replicas that its load asks for."""
    progress: Progress = field(default_factory=Progress)
    saved_s: float = 0.0
    """When the newest checkpoint was written that its driver has seen (level restart); 0: none."""
    row: Any = None
    """What `view` has made of it for the last snapshot."""

    @property
    def number(self) -> int:
        return self.job.number

    @property
    def reason(self) -> Reasoned:
        """Why it has the workers it has at this moment; first of all, which of them hang."""
        if self.progress.stuck and self.job.workers:
            return Said("stuck", f"{'; '.join(one.text for one in self.progress.stuck)} ({self.ground.text})")
        if not self.target or self.job.workers or self.job.wish != "run":
            return self.ground
        several = f"{len(self.target)} workers" if len(self.target) > 1 else "1 worker"
        return Said("starting", f"gets {several} as soon as the places are free ({self.ground.text})")


class Listener(Protocol):
    def __call__(self, recorded: e.Recorded, job: Job | None) -> None: ...


@dataclass
class _Lane:
    waiting: list[tuple[list[Entry], asyncio.Future[None]]] = field(default_factory=list)
    pump: asyncio.Task[None] | None = None


class Book:
    """Owned by the event loop; nothing here blocks."""

    def __init__(
        self, store: Store, clock: Callable[[], float], lane: Callable[[int | None], object] = lambda number: None
    ) -> None:
        """`lane`: of a job's events. Those of one lane are written together and in order; a lane whose writes fail does
        not hold up the others."""
        self.store, self.clock, self._lane = store, clock, lane
        self.jobs: dict[int, Active] = {}
        self.lively: dict[int, Active] = {}
        """Those that do not only wait, perhaps with some that do by now. Most of a long queue only waits."""
        self.names: dict[str, int] = {}
        self.listeners: list[Listener] = []
        """Told of every event once it is durable, in order."""
        self.trouble = ""
        """Why the store cannot write at the moment."""
        self.recovered: Callable[[], None] = lambda: None
        """Called when it can again."""
        self._lanes: dict[object, _Lane] = {}
        self._unreadable: list[tuple[Job, str]] = []
        self._mended: list[Damaged] = []

    def load(self, jobs: Sequence[Job], damaged: Sequence[Damaged] = ()) -> None:
        for job in jobs:
            self._take_over(job)
        for one in damaged:
            if one.whole:
                self._mended.append(one)
                self._take_over(one.job)
            else:
                self._unreadable.append((one.job, one.job.message))

    def _take_over(self, job: Job) -> None:
        try:
            file = JobFile.model_validate(job.spec)
            request = request_of(job, file)
            if not 1 <= job.min_workers <= job.max_workers <= MOST_WORKERS:
                raise ValueError(f"{job.min_workers}..{job.max_workers} workers cannot be")
        except (ValueError, StrettoError) as error:
            # Written by another version, or damaged. The others can go on.
            text = f"its job file cannot be read any more: {str(error)[:_LONGEST_WHY]}"
            self._unreadable.append((job, text))
        else:
            self._enter(job, file, request)

    def end_unreadable(self) -> dict[int, str]:
        """Jobs that were loaded and cannot be understood have failed; their workers belong to nobody. Those that were
        made again from their events are written down anew. Which they are, by number, and why."""
        unreadable, mended = self._unreadable, self._mended
        self._unreadable, self._mended = [], []
        for job, text in unreadable:
            event, now_s = e.Ended(phase="failed", message=text), self.clock()
            self._write(job.number, [Entry(now_s, event, lifecycle.apply(job, event, now_s))])
        for one in mended:
            if one.job.number in self.jobs:
                text = f"its row could not be read, and was made again from its events: {one.why}"
                self.record(one.job.number, e.Noted(what="mended", data={"why": text}))
        return {**{one.job.number: one.why for one in mended}, **{job.number: text for job, text in unreadable}}

    def active(self, number: int) -> Active | None:
        return self.jobs.get(number)

    def __iter__(self) -> Iterator[Active]:
        return iter(list(self.jobs.values()))

    async def submit(self, job: Job, file: JobFile, request: JobRequest, key: str, digest: str) -> Active:
        """Take a job in. Raises `StoreError`, and then nothing was accepted. What was begun is completed, though
        whoever asked for it may have gone."""
        event = e.Submitted(job=job, key=key, digest=digest)
        # Its name is taken from now on; nobody sees it before it is durable.
        self.names[job.name] = job.number
        return await asyncio.shield(self._submit(Entry(job.submitted_s, event, job), job, file, request))

    async def _submit(self, entry: Entry, job: Job, file: JobFile, request: JobRequest) -> Active:
        try:
            seqs = await asyncio.wrap_future(self.store.append([entry]))
        except BaseException:
            if self.names.get(job.name) == job.number:
                del self.names[job.name]
            raise
        active = self._enter(job, file, msgspec.structs.replace(request, name=job.name))
        self._tell([entry], seqs)
        return active

    def record(self, number: int, *events: e.Event) -> asyncio.Future[None]:
        """Apply the events now; the future is done when they are durable."""
        now_s = self.clock()
        active = self.jobs[number]
        entries = []
        for event in events:
            active.job = lifecycle.apply(active.job, event, now_s)
            entries.append(Entry(now_s, event, active.job))
        if any(isinstance(event, e.Scaled) for event in events):
            active.request = request_of(active.job, active.file)
        self._look_after(active)
        if active.job.ended:
            del self.jobs[number]
            if self.names.get(active.job.name) == number:
                del self.names[active.job.name]
        return self._write(number, entries)

    def aim(self, active: Active, seats: tuple[Seat, ...], pool: int, ground: Reasoned) -> None:
        """What a job should have from now on, and why."""
        active.target, active.pool, active.ground = seats, pool, ground
        if seats:
            self.lively[active.number] = active

    def note(self, what: str, by: str = "", **data: object) -> asyncio.Future[None]:
        """Something that concerns no job."""
        return self._write(None, [Entry(self.clock(), e.Noted(what=what, by=by, data=data), None)])

    async def settled(self) -> None:
        """Everything that was recorded is durable."""
        while waiting := [
            future for lane in self._lanes.values() for _, future in lane.waiting if not future.done()
        ]:  # fmt: skip
            await asyncio.wait(waiting)

    async def close(self) -> None:
        for lane in list(self._lanes.values()):
            await stop(lane.pump)

    def _enter(self, job: Job, file: JobFile, request: JobRequest) -> Active:
        active = self.jobs[job.number] = Active(job, file, request)
        active.progress.steps, active.progress.total = job.steps, job.total_steps
        active.progress.metrics, active.progress.paused_s = dict(job.metrics), job.paused_s
        active.target = tuple(sorted(worker.seat for worker in job.workers if not worker.leaving))
        self.names[job.name] = job.number
        self._look_after(active)
        return active

    def _look_after(self, active: Active) -> None:
        job = active.job
        is_lively = job.workers or job.helpers or job.node or job.wish != "run" or job.level == "service"
        if not job.ended and (is_lively or active.target):
            self.lively[job.number] = active
        else:
            self.lively.pop(job.number, None)

    def _write(self, number: int | None, entries: list[Entry]) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        name = self._lane(number)
        lane = self._lanes.setdefault(name, _Lane())
        lane.waiting.append((entries, future))
        if lane.pump is None or lane.pump.done():
            lane.pump = asyncio.create_task(self._write_all(name, lane))
        return future

    async def _write_all(self, name: object, lane: _Lane) -> None:
        """Everything that waits goes to the store together, again and again until it is there."""
        while lane.waiting:
            batch = lane.waiting[:]
            entries = [entry for some, _ in batch for entry in some]
            try:
                seqs = await asyncio.wrap_future(self.store.append(entries))
            except Refused as error:
                # What is in memory and what is written do not agree: only a restart, from what is written, helps.
                self.trouble = f"{error.message}; restart the server"
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                        future.exception()
                raise
            except StoreError as error:
                self.trouble = str(error)
                await asyncio.sleep(_AGAIN_S)
                continue
            recovered, self.trouble = bool(self.trouble), ""
            if recovered:
                self.recovered()
            del lane.waiting[: len(batch)]
            self._tell(entries, seqs)
            for _, future in batch:
                if not future.done():
                    future.set_result(None)
        self._lanes.pop(name, None)

    def _tell(self, entries: Sequence[Entry], seqs: Sequence[int]) -> None:
        for seq, entry in zip(seqs, entries, strict=True):
            number = entry.job.number if entry.job is not None else None
            recorded = e.Recorded(seq=seq, at_s=entry.at_s, job=number, event=entry.event)
            for listener in self.listeners:
                listener(recorded, entry.job)
