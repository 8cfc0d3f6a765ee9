"""The control plane of a cluster: ElasticJobs in, worker pods out, with the loop and the policies of one machine.

One process leads (`leading`); it keeps nothing to itself. When it starts it reads the objects and everybody's pods,
signs every job that runs with its term, adopts the pods that live and goes on. What it knows of jobs it writes to
their status (`store`), what it wants of the cluster it asks for through pods (`backend`); the loop in between is the
server's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from stretto import plugins
from stretto.control.admission import Socket
from stretto.core import cycle
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU
from stretto.errors import SpecError, StrettoError
from stretto.jobs import events as e
from stretto.jobs.model import Cause, Context, Job, Level
from stretto.kubernetes import elastic_job, pods, status, worker_secrets
from stretto.kubernetes.backend import ClusterBackend
from stretto.kubernetes.client import Api
from stretto.kubernetes.cluster import Cluster
from stretto.kubernetes.events import Announcer
from stretto.kubernetes.fields import GPU_RESOURCE
from stretto.kubernetes.keeping import Card, Fenced, term_of
from stretto.kubernetes.learned import Learned
from stretto.kubernetes.model import ElasticJob, Pod, PodSpec
from stretto.kubernetes.register import Entry, Key, Register
from stretto.kubernetes.service_keeping import ServiceKeeper
from stretto.kubernetes.site import ClusterSite
from stretto.kubernetes.store import ObjectStore
from stretto.server import cycle_settings
from stretto.server.asked import request_of
from stretto.server.book import Active, Book, Said
from stretto.server.drivers.elastic import ElasticDriver
from stretto.server.estimates import Estimates
from stretto.server.loop import Loop, Rules
from stretto.server.memory import MemoryKeeper
from stretto.server.view import Quota
from stretto.sim.live_record import Recorder
from stretto.spec.model import JobFile

_log = logging.getLogger("stretto.kubernetes")

_REFRESH_S = 1.0
_AGAIN_S = 1.0
_REVISIT_S = 10.0
_LONGEST_ADOPTION_S = 60.0
_CLAIMS = 32
"""So many jobs are claimed at a time."""


class Anew(StrettoError):
    """A job that could not be adopted can be now: by a controller that begins again."""

    code = "anew"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str = "stretto-system"
    """Where its lease is, and what it learns."""
    url: str
    """Where workers reach the controller: `ws://host:port`."""
    policy: str = "stretto"
    policy_options: dict[str, Any] = {}
    placement: str = "fewest-moves"
    settings: dict[str, Any] = {}
    """Of the cycle around the policy: see `cycle_settings`."""
    gpu_resource: str = GPU_RESOURCE
    quotas: dict[str, Quota] = {}
    """By namespace; `*` is every other."""
    record: str = ""
    """A file in which every decision is written down."""


class Controller:
    """A controller that leads. `run` it until it is cancelled or fenced; the workers go on without it."""

    def __init__(self, api: Api, term: int, identity: str, options: Options, clock: Callable[[], float]) -> None:
        self._api, self._term, self._clock, self._options = api, term, clock, options
        self.register = Register()
        self.cluster = Cluster(api, options.gpu_resource, clock)
        self.learned = Learned(api, options.namespace, clock)
        self.store = ObjectStore(self.register, self.learned, self._describe, self._be_fenced, clock)
        self.book = Book(self.store, clock, lane=lambda number: number)  # type: ignore[arg-type]
        self.backend = ClusterBackend(api, self.cluster, self.register, clock)
        estimates = Estimates()
        rules = Rules(
            plugins.find(options.policy, options.policy_options),
            cycle_settings.read(options.settings, msgspec.structs.replace(cycle.LIVE, placement=options.placement)),
            options.quotas,
        )
        self.loop = Loop(
            self.book, self.backend, estimates, rules, ClusterSite(self.cluster, self.register, estimates),
            folder=Path("/nonexistent"), url=lambda: options.url, environment={}, clock=clock,
            decide=Recorder(Path(options.record)).decide if options.record else cycle.decide,
        )  # fmt: skip
        self._memory = MemoryKeeper(self.learned.put_memory, clock)
        self.loop.remembered = lambda: self._memory.keep(self.loop.rules.policy, self.loop.state)
        self.services = ServiceKeeper(api, options.gpu_resource, clock)
        self._announcer = Announcer(api, self.register, identity, clock)
        self.book.listeners += [self._announcer, self._hear]
        self._next = 1
        self._taking_in: dict[Key, asyncio.Task[None]] = {}
        self._refused: dict[Key, int] = {}
        """Objects that are no jobs, by the generation that was refused."""
        self.lost_s: dict[str, float] = dict.fromkeys(get_args(Cause), 0.0)
        """Seconds of work that jobs lost, by cause, since this controller leads."""
        self._fenced = asyncio.Event()
        self.ready = asyncio.Event()
        """Everything that runs has been adopted."""

    async def run(self) -> None:
        """Until cancelled; raises `Fenced` when another controller has taken over."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.cluster.run()), group.create_task(self._until_fenced())]
            began = False
            try:
                self.loop.estimates.recall(await self.learned.load())
                self.loop.state = self._memory.recalled(self.learned.memory, self.loop.rules.policy)
                await self.cluster.synced()
                await self._adopt()
                self.ready.set()
                began = True
                self.cluster.changed = lambda: self.loop.wake(decide=True, urgent=True)
                self.cluster.jobs.on_change(self._changed)
                # Some have come, changed or gone meanwhile.
                for key in {*self.cluster.jobs.items, *(entry.key for entry in self.register)}:
                    self._look_again(key)
                tasks += [
                    group.create_task(work)
                    for work in (
                        self.loop.run(), self.services.run(), self._announcer.run(), self.learned.run(),
                        self._refresh(), self._revisit(),
                    )
                ]  # fmt: skip
                await asyncio.gather(*tasks)
            finally:
                self.ready.clear()
                for task in (*tasks, *self._taking_in.values()):
                    task.cancel()
                await self.loop.close()
                await self.book.close()
                for entry in self.register:
                    await entry.card.close()
                if began:
                    self._memory.keep(self.loop.rules.policy, self.loop.state, at_once=True)
                await self.learned.close()

    async def join(self, namespace: str, name: str, socket: Socket) -> None:
        """A worker has connected."""
        key = namespace, name
        entry = self.register.of(key)
        driver = self.loop.drivers.get(entry.number) if entry is not None else None
        if not isinstance(driver, ElasticDriver):
            later = not self.ready.is_set() or key in self.register.aside
            await socket.close(1013 if later else 1008, f"job {namespace}/{name} has no coordinator now")
            return
        await driver.coordination.serve(socket)

    # Starting.

    async def _adopt(self) -> None:
        jobs = list(self.cluster.jobs.items.values())
        self._term = max([self._term, *(term_of(job.status) + 1 for job in jobs)])
        self._next = 1 + max((int(job.status.get("number") or 0) for job in jobs), default=0)
        gate = asyncio.Semaphore(_CLAIMS)

        async def one(job: ElasticJob) -> Job | None:
            async with gate:
                try:
                    async with asyncio.timeout(_LONGEST_ADOPTION_S):
                        return await self._known(job)
                except Fenced:
                    raise
                except Exception as error:
                    # One that cannot be adopted must not keep the others from it.
                    _log.error("%s/%s cannot be adopted: %s", *job.metadata.key, error or "no answer in time")
                    self.register.aside.setdefault(job.metadata.key, None)
                    return None

        found = await asyncio.gather(*(one(job) for job in jobs if _is_known(job)))
        self.book.load([job for job in found if job is not None])
        for active in self.book:
            active.file = self.register[active.number].file
            active.request = self._request(active.job, active.file)
        await self.loop.open()
        for active in self.book:
            # Some were missing.
            active.target = tuple(sorted(worker.seat for worker in active.job.workers if not worker.leaving))
        for entry in self.register:
            # It may have been changed while nobody led.
            self._update(entry, entry.object)

    async def _known(self, job: ElasticJob) -> Job | None:
        """A job that was taken in by an earlier controller."""
        examined = await self._examine(job)
        if examined is None:
            return None
        entry, level, secret = examined
        if entry.file.is_service:
            self.services.put(job, entry.card)
            return None
        kept = entry.card.status.get("accounts") or {}
        found = [pods.worker_of(pod) for pod in self._living(job)]
        workers = sorted(
            (worker for worker in found if not status.is_past(kept, worker)), key=lambda worker: worker.launched_s
        )
        workers += status.missing(kept, workers)
        known = status.known(kept, entry.file.model_dump(mode="json"), level, secret, workers)
        self.register.add(entry)
        self.loop.estimates.remember(entry.number, kept.get("speeds"))
        return known

    async def _examine(self, job: ElasticJob) -> tuple[Entry, Level, str] | None:
        """Sign and read it. None: it is nobody's job, or one whose pods go on though it makes no sense any more."""
        card = Card(self._api, job, self._term)
        await card.claim()
        if card.gone or _has_ended(card.status):
            return None
        try:
            entry, level = self._read(job, int(job.status["number"]), card)
        except SpecError as error:
            if not self._living(job):
                self._refuse(job, card, error)
                return None
            self.register.aside[job.metadata.key] = job.metadata.generation
            text = f"its pods go on without a controller until it is mended: {error.message}"
            self._tell_refusal(job, card, text)
            return None
        # Sizes may have been changed so that another level would be read from the object.
        level = (card.status.get("accounts") or {}).get("level", level)
        secret = "" if entry.file.is_service else await worker_secrets.token(self._api, job, level)
        return entry, level, secret

    def _living(self, job: ElasticJob) -> list[Pod]:
        """Its workers; those of an object that had its name before are not."""
        meta = job.metadata
        return [
            pod
            for pod in self.cluster.pods_of(meta.namespace, meta.name)
            if not pods.is_told(pod) and any(owner.uid == meta.uid for owner in pod.metadata.owner_references)
        ]

    async def _revisit(self) -> None:
        """Can those that were put aside be adopted by now? Then begin anew, which costs nobody anything."""
        while True:
            await asyncio.sleep(_REVISIT_S)
            for key, generation in list(self.register.aside.items()):
                job = self.cluster.jobs.items.get(key)
                if job is None or not _is_known(job):
                    del self.register.aside[key]
                elif generation != job.metadata.generation and await self._is_adoptable(job):
                    raise Anew(f"{'/'.join(key)} can be adopted now")

    async def _is_adoptable(self, job: ElasticJob) -> bool:
        try:
            async with asyncio.timeout(_LONGEST_ADOPTION_S):
                return await self._examine(job) is not None
        except Fenced:
            raise
        except Exception as error:
            _log.warning("%s/%s still cannot be adopted: %s", *job.metadata.key, error or "no answer in time")
            return False

    # Objects that come, change and go.

    def _changed(self, old: ElasticJob | None, new: ElasticJob | None) -> None:
        job = new or old
        assert job is not None
        key, entry = job.metadata.key, self.register.of(job.metadata.key)
        if entry is not None and entry.object.metadata.uid != job.metadata.uid:
            if new is not None:
                self._dismiss(entry)  # Its name is in use again.
            return
        if new is None or new.metadata.is_leaving:
            self._refused.pop(key, None)
            self.services.remove(key)
            if entry is not None:
                self._dismiss(entry)
            return
        if entry is not None:
            if entry.object.metadata.generation != new.metadata.generation:
                self._update(entry, new)
            else:
                entry.object = new
        elif (card := self.services.card(key)) is not None and new.spec.get("service"):
            self._update_service(new, card)
        elif key not in self._taking_in and key not in self.register.aside and not _has_ended(new.status):
            task = self._taking_in[key] = asyncio.create_task(self._take_in(new))
            task.add_done_callback(lambda done: self._took(key, done))

    def _took(self, key: Key, task: asyncio.Task[None]) -> None:
        self._taking_in.pop(key, None)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Fenced):
            self._be_fenced()
        elif isinstance(error, StrettoError):
            _log.warning("%s/%s could not be taken in: %s", *key, error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._look_again, key)
        elif error is not None:
            _log.error("%s/%s could not be taken in", *key, exc_info=error)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._look_again, key)
        elif self.register.of(key) is not None:
            # It may have changed, or gone, while we were at it.
            self._look_again(key)
        else:
            # It has gone or ended; what we see of it may be a little behind.
            asyncio.get_running_loop().call_later(_AGAIN_S, self._look_again, key)

    def _look_again(self, key: Key) -> None:
        if (job := self.cluster.jobs.items.get(key)) is not None and not self._fenced.is_set():
            if self.register.of(key) is None and self._refused.get(key) == job.metadata.generation:
                return
            if self.register.of(key) is None and _has_ended(job.status):
                return
            self._changed(None, job)
        elif (entry := self.register.of(key)) is not None:
            self._dismiss(entry)

    async def _take_in(self, job: ElasticJob) -> None:
        """A new job: it has a number, a secret and a status before anything is done for it."""
        key = job.metadata.key
        if self._refused.get(key) == job.metadata.generation:
            return
        card = Card(self._api, job, self._term)
        await card.claim()
        if card.gone or _has_ended(card.status):
            return
        number = int(card.status.get("number") or 0)
        if not number:
            number, self._next = self._next, self._next + 1
        try:
            entry, level = self._read(job, number, card)
        except SpecError as error:
            self._refuse(job, card, error)
            return
        if entry.file.is_service:
            self.services.put(job, card)
            return
        try:
            secret = await worker_secrets.token(self._api, job, level)
        except StrettoError as error:
            card.put({"phase": "Pending", "reason": "Trouble", "message": str(error)}, urgent=False)
            raise
        self.register.add(entry)
        now_s = self._clock()
        asked = self._first_request(entry)
        meta = job.metadata
        created_s = meta.creation_timestamp.timestamp() if meta.creation_timestamp is not None else now_s
        made = Job(
            number=number,
            name=status.qualified(meta.namespace, meta.name),
            user=meta.namespace,
            # Clocks differ; nobody has waited since tomorrow.
            submitted_s=min(created_s, now_s),
            changed_s=min(created_s, now_s),
            spec=entry.file.model_dump(mode="json"),
            context=Context(cwd="/"),
            level=level,
            width_milli=asked.width_milli or asked.cpu_milli,
            min_workers=asked.min_workers,
            max_workers=asked.max_workers,
            secret=secret,
            phase="suspended" if job.spec.get("suspend") else "queued",
            wish="suspend" if job.spec.get("suspend") else "run",
        )
        try:
            await self.book.submit(made, entry.file, asked, "", "")
        except BaseException:
            self.register.remove(number)
            raise
        self.loop.wake(decide=True)

    def _read(self, job: ElasticJob, number: int, card: Card) -> tuple[Entry, Level]:
        meta = job.metadata
        body = {
            "metadata": {"name": meta.name, "namespace": meta.namespace, "labels": dict(meta.labels)},
            "spec": job.spec,
        }
        found = elastic_job.read(body, self._options.gpu_resource)
        after = tuple(status.qualified(meta.namespace, name) for name in found.file.after)
        file = found.file.model_copy(update={"after": after})
        shape = msgspec.convert(found.template["spec"], PodSpec)
        entry = Entry(
            number=number, object=job, file=file, template=found.template, shape=shape, requests=found.requests,
            card=card,
        )  # fmt: skip
        return entry, file.request(meta.name).level

    def _request(self, job: Job, file: JobFile) -> JobRequest:
        """What it asks for, with the sizes that it has by now."""
        return self._with_needs(request_of(job, file), self.register[job.number])

    def _first_request(self, entry: Entry) -> JobRequest:
        return self._with_needs(entry.file.request(status.qualified(entry.namespace, entry.name)), entry)

    def _with_needs(self, asked: JobRequest, entry: Entry) -> JobRequest:
        """What Kubernetes counts for a whole pod."""
        meta = entry.object.metadata
        about = {"metadata": {"name": meta.name, "labels": meta.labels}}
        needs = entry.requests
        return msgspec.structs.replace(
            asked,
            klass=status.qualified(meta.namespace, elastic_job.job_class(about)),
            cpu_milli=needs.get("cpu", 0),
            memory_mib=needs.get("memory", 0),
            width_milli=needs.get(self._options.gpu_resource, 0) * GPU,
        )

    def _refuse(self, job: ElasticJob, card: Card, error: SpecError) -> None:
        """It is no job; it is looked at again when it has been changed."""
        self._refused[job.metadata.key] = job.metadata.generation
        self._tell_refusal(job, card, error.message)

    def _tell_refusal(self, job: ElasticJob, card: Card, text: str) -> None:
        fields = status.refusal(text, card.status, job.metadata.generation, self._clock())
        written = card.put(fields, urgent=True)
        written.add_done_callback(lambda done: None if done.cancelled() else done.exception())

    def _update(self, entry: Entry, job: ElasticJob) -> None:
        """Sizes, priority, suspension and the like can be changed while it runs."""
        active = self.book.active(entry.number)
        if active is None:
            return
        try:
            changed, level = self._read(job, entry.number, entry.card)
        except SpecError as error:
            entry.object = job
            self._tell_of_mistake(entry, active, error)
            return
        entry.object, entry.file, entry.requests = job, changed.file, changed.requests
        entry.template, entry.shape, entry.mistake = changed.template, changed.shape, ""
        if job.spec.get("level") and level != active.job.level:
            self._tell_of_mistake(entry, active, SpecError("spec.level cannot be changed; make another job of it"))
        asked, before = self._first_request(entry), active.job
        happened: list[e.Event] = []
        if (asked.min_workers, asked.max_workers) != (before.min_workers, before.max_workers):
            happened.append(e.Scaled(min_workers=asked.min_workers, max_workers=asked.max_workers, by="kubernetes"))
        wish = "suspend" if job.spec.get("suspend") else "run"
        if wish != before.wish and before.wish != "cancel":
            why = "suspended" if wish == "suspend" else "resumed"
            happened.append(e.Wished(wish=wish, by="kubernetes", why=f"{why} by its object"))  # type: ignore[arg-type]
        active.file = changed.file
        if happened:
            self.book.record(entry.number, *happened)
        active.request, active.row = self._request(active.job, active.file), None
        self.loop.wake(decide=True, urgent=True)

    def _tell_of_mistake(self, entry: Entry, active: Active, error: SpecError) -> None:
        entry.mistake = f"goes on as it was: {error.message}"
        active.ground = Said("invalid", entry.mistake)

    def _dismiss(self, entry: Entry) -> None:
        """Its object is going: its workers go first, and nothing is written any more."""
        active = self.book.active(entry.number)
        if active is None:
            if entry.key not in self._taking_in:
                self.register.remove(entry.number)
            return
        if active.job.wish != "cancel":
            entry.object = msgspec.structs.replace(
                entry.object,
                metadata=msgspec.structs.replace(
                    entry.object.metadata, deletion_timestamp=datetime.fromtimestamp(self._clock(), UTC)
                ),
            )
            self.book.record(entry.number, e.Wished(wish="cancel", by="kubernetes", why="its object was deleted"))
            self.loop.wake(decide=True, urgent=True)

    def _update_service(self, job: ElasticJob, card: Card) -> None:
        try:
            self._read(job, 0, card)
        except SpecError as error:
            self._refuse(job, card, error)
        else:
            self.services.put(job, card)

    # What is told.

    def _describe(self, job: Job, card: Card) -> dict[str, Any]:
        entry, active = self.register.get(job.number), self.book.active(job.number)
        driver = self.loop.drivers.get(job.number)
        progress = active.progress if active is not None else None
        view = status.View(
            job=job,
            generation=entry.object.metadata.generation if entry is not None else 0,
            mistake=entry.mistake if entry is not None else "",
            reason=active.reason if active is not None else _said(job),
            target=len(active.target) if active is not None else 0,
            ready=len(driver.joined) if driver is not None else 0,
            step=max(job.steps, progress.steps) if progress is not None else job.steps,
            total=progress.total if progress is not None else job.total_steps,
            checkpoint=progress.saved if progress is not None else None,
            speeds=self.loop.estimates.measured(job.number),
        )
        return status.describe(view, card.status, self._clock())

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_S)
            for active in self.book:
                self.store.refresh(active.job)

    def _hear(self, recorded: e.Recorded, job: Job | None) -> None:
        """An end that is written down: the job is nobody's any more."""
        if isinstance(recorded.event, e.Interrupted):
            self.lost_s[recorded.event.cause] += recorded.event.lost_s
        if job is not None and isinstance(recorded.event, e.Ended):
            entry = self.register.remove(job.number)
            self.store.forget(job.number)
            if entry is not None:
                self._follow(entry)

    def _follow(self, ended: Entry) -> None:
        """Another object may have its name by now."""
        job = self.cluster.jobs.items.get(ended.key)
        if job is not None and job.metadata.uid != ended.object.metadata.uid:
            self._look_again(ended.key)

    def _be_fenced(self) -> None:
        self._fenced.set()

    async def _until_fenced(self) -> None:
        await self._fenced.wait()
        raise Fenced("another controller has taken over", hint="this one ends")


def _said(job: Job) -> Said:
    """Why a job is as it is that the loop does not know yet, or no more."""
    return Said(job.phase, job.message or f"has {job.phase}") if job.ended else Said("new", "was accepted just now")


def _is_known(job: ElasticJob) -> bool:
    return bool(job.status.get("number")) and not _has_ended(job.status) and not job.metadata.is_leaving


def _has_ended(told: Mapping[str, Any]) -> bool:
    return told.get("phase") in status.ENDED
