"""What the outside asks of the control plane: everything that the API, and nothing else, calls.

Requests are checked here against what is there (names, sizes, nodes, phases); who may ask is the API's business. All
methods run in the event loop; what reads the store does so in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stretto import plugins
from stretto.accounts import Accounts
from stretto.backends.protocol import Backend, Node
from stretto.control.admission import Socket
from stretto.core import cycle, placement
from stretto.core.policy import Policy
from stretto.core.request import JobRequest
from stretto.core.snapshot import Snapshot
from stretto.errors import Conflict, Impossible, NotFound, StrettoError, Unavailable, UsageError
from stretto.jobs import events as e
from stretto.jobs import lifecycle
from stretto.jobs.model import ENDED, Account, Context, Job
from stretto.server import asked, cycle_settings, disk, loss
from stretto.server import view as views
from stretto.server.book import Active, Book
from stretto.server.drivers import service as services
from stretto.server.drivers.elastic import ElasticDriver
from stretto.server.estimates import Estimates, Known
from stretto.server.expected import Expected, expected
from stretto.server.lengths import Source, Total
from stretto.server.loop import Loop, Rules
from stretto.server.memory import MemoryKeeper, SpeedKeeper
from stretto.server.notifying import Notifier
from stretto.server.reaching import Reach
from stretto.server.site import LocalSite
from stretto.server.view import Quota
from stretto.sim import forecast as forecasts
from stretto.sim.live_record import Recorder
from stretto.spec.model import MOST_WORKERS, JobFile
from stretto.store import Page, Query, Store
from stretto.tasks import stop

_MOST_FORESEEN = 1_000
_log = logging.getLogger("stretto.server")

_LAST_WRITES_S = 5.0
_BEHIND = 10_000
"""A listener that is so many events behind is cut off: it can come back and read them from the store."""


_MOST_SHAPES = 1000
_FIRST_PORT = 1024
"""That anybody may listen on."""
_JOBS_AT_ONCE = 500
_MOST_NAMED = 3
_NO_ROOM = frozenset({"no-room", "behind-head", "lower-queue", "waits-for-turn", "fragmented"})
"""Reasons that say only that there is no room."""


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job has the workers it has."""

    job: int
    name: str
    phase: str
    workers: int
    target: int
    reason: str
    text: str
    policy: str
    facts: dict[str, Any]
    """The numbers beside it: sizes, priority, waiting time, what is free."""


class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from now; None where nobody can say."""

    job: int
    name: str
    start_s: float | None = None
    """0 if it runs."""
    end_s: float | None = None
    expected_from: Source | None = None
    """What its length was taken from; None: it has none."""
    start_guessed: bool = False
    end_guessed: bool = False
    """It hangs on a length that nobody knows: its own, or that of a job which may hold its room."""
    text: str = ""
    """Why nobody can say."""


class PolicyInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    options: dict[str, Any]
    placement: str
    settings: dict[str, Any] = {}
    """Of the cycle around it, where they are not as usual."""
    trouble: str = ""


class Watch:
    """One listener's queue."""

    def __init__(self, watches: set[Watch]) -> None:
        self._watches = watches
        self._queue: asyncio.Queue[e.Recorded | None] = asyncio.Queue()
        watches.add(self)

    def put(self, recorded: e.Recorded) -> None:
        if self._queue.qsize() >= _BEHIND:
            self.cut_off()
        else:
            self._queue.put_nowait(recorded)

    def cut_off(self) -> None:
        self.close()
        self._queue.put_nowait(None)

    def close(self) -> None:
        self._watches.discard(self)

    async def some(self) -> list[e.Recorded]:
        """What has come since the last time, at least one; nothing: it is over."""
        found = [await self._queue.get()]
        while found[-1] is not None and not self._queue.empty():
            found.append(self._queue.get_nowait())
        if found[-1] is None:
            # For those who ask once more.
            self._queue.put_nowait(None)
        return [recorded for recorded in found if recorded is not None]


class Plane:
    def __init__(
        self,
        folder: Path,
        store: Store,
        backend: Backend,
        *,
        url: Callable[[], str],
        clock: Callable[[], float],
        told: Callable[[float], float] = lambda at_s: at_s,
        heard: Callable[[float], float] = lambda at_s: at_s,
        quotas: Mapping[str, Quota] | None = None,
        policy: str = "",
        environment: Mapping[str, str] | None = None,
        record: Path | None = None,
        notify_to: Iterable[str] = (),
        room: disk.Rules | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        """`told`: what people's clocks call a moment of `clock`, `heard`: the other way round. `record`: a file in
        which every decision is written down. `notify_to`: networks that job files may have told of their events, beside
        the public ones. `room`: how the disk is looked after. `accounts`: None: all jobs run as the server's own."""
        self.folder, self.store, self.backend, self.clock, self.told = folder, store, backend, clock, told
        self._loaded = store.load()
        self.book = Book(store, clock)
        self.book.load(self._loaded.jobs, self._loaded.damaged)
        settings = self._loaded.settings
        chosen = cycle_settings.chosen(settings.get("policy"))
        if policy and policy != chosen["name"]:
            chosen = {**chosen, "name": policy, "options": {}}
            store.put_setting("policy", chosen)
        self._lost = ""
        """Why the policy that was chosen earlier is not the one that decides."""
        rules = Rules(
            self._policy(chosen, optional=not policy),
            cycle_settings.read(
                chosen.get("settings", {}), msgspec.structs.replace(cycle.LIVE, placement=chosen["placement"])
            ),
            quotas or {},
            *_drained(settings.get("drained", {}), settings.get("drained_by", {})),
        )
        self._options: dict[str, Any] = dict(chosen["options"])
        surroundings = os.environ if environment is None else environment
        estimates, jobs = Estimates(self._loaded.learned), folder / "jobs"
        site = LocalSite(backend, estimates, jobs, surroundings, accounts)
        self._recorder = Recorder(record) if record is not None else None
        self.loop = Loop(
            self.book, backend, estimates, rules, site, folder=jobs, url=url, environment=surroundings, clock=clock,
            heard=heard,             decide=self._recorder.decide if self._recorder is not None else cycle.decide,
        )  # fmt: skip
        self._memory = MemoryKeeper(lambda kept: store.put_setting("memory", kept), clock)
        self.loop.state = self._memory.recalled(settings.get("memory"), rules.policy)
        self._speeds = SpeedKeeper(lambda kept: store.put_setting("measured", kept), estimates, clock)
        self._speeds.recall(settings.get("measured"), self.book.jobs)
        self.loop.remembered = self._keep_memories
        self.disk = disk.Disk(self.book, folder, room or disk.Rules(), self.loop.end, clock)
        self._next = self._loaded.next_number
        self._running: asyncio.Task[None] | None = None
        self._watches: set[Watch] = set()
        self._forecasting = asyncio.Semaphore(2)
        """They may take long, and others need threads too."""
        self._fitting: tuple[tuple[Node, ...], set[object]] = (), set()
        """Shapes of jobs that are known to be possible on these nodes."""
        self.book.recovered = lambda: self.loop.wake(decide=True)
        self.book.listeners += [self._publish, Notifier(self.loop.spawn, Reach(notify_to), told)]

    def _policy(self, chosen: Mapping[str, Any], *, optional: bool) -> Policy:
        try:
            return plugins.find(chosen["name"], chosen["options"])
        except StrettoError as error:
            if not optional:
                raise
            # Jobs run, and must not end because a file was moved.
            self._lost = f"stretto decides, because the chosen policy cannot be loaded: {error.message}"
            _log.error("%s", self._lost)
            return plugins.find("stretto", {})

    async def open(self) -> None:
        """Adopt what runs, and go on."""
        damaged = self.book.end_unreadable()
        await self.loop.open()
        self.loop.tell_of_damage(damaged)
        await self.disk.look_for_room()
        self.loop.spawn(self.disk.watch_room())
        self.loop.spawn(self.disk.watch_jobs())
        self._running = asyncio.create_task(self.loop.run())
        self.backend.warm_up(asked.usual(self.loop.environment))
        self.book.note("started")

    async def close(self) -> None:
        """Let go; the workers go on without us."""
        await stop(self._running)
        await self.loop.close()
        self._keep_memories(at_once=True)
        if self._recorder is not None:
            self._recorder.close()
        with contextlib.suppress(TimeoutError):
            # A store that cannot write now will not be waited for: the backend tells the next server what happened.
            async with asyncio.timeout(_LAST_WRITES_S):
                await self.book.settled()
        await self.book.close()
        self.dismiss()

    def _keep_memories(self, *, at_once: bool = False) -> float:
        """What the next server has to know beyond what has happened; when to look again whether it does."""
        again_s = self._memory.keep(self.loop.rules.policy, self.loop.state, at_once=at_once)
        return min(again_s, self._speeds.keep(at_once=at_once))

    def dismiss(self) -> None:
        """Tell all who watch that nothing more will come; connections may close then, and nobody has died of it."""
        for driver in self.loop.drivers.values():
            driver.fall_silent()
        for watch in list(self._watches):
            watch.cut_off()

    @property
    def settings(self) -> Mapping[str, Any]:
        """As they were when the server started."""
        return self._loaded.settings

    @property
    def listeners(self) -> int:
        return len(self._watches)

    @property
    def ready(self) -> str:
        """Why it cannot take jobs now; empty if it can."""
        if self._running is None or self._running.done():
            return "the scheduling loop does not run"
        return self.book.trouble or self.loop.trouble or self.disk.trouble

    # Jobs in.

    async def submit(
        self,
        file: JobFile,
        context: Context,
        user: str,
        *,
        key: str = "",
        digest: str = "",
        account: Account | None = None,
    ) -> Job:
        """Accept a job: durable when this returns. The same key gives the same job again. `account`: as which it runs,
        where accounts are told apart."""
        try:
            return await self._accept(file, context, user, key, digest, account)
        except StrettoError:
            # A key that came before is found out here, where it costs others nothing: whatever was in order then, its
            # name for one, need not be now.
            known = await asyncio.to_thread(self.store.submitted_with, user, key) if key else None
            if known is None:
                raise
        job, before = known
        if before != digest:
            raise Conflict(
                f"the idempotency key {key!r} came with another job file before (job {job.id})",
                hint="use a new key for a new job",
            )
        return self._current(job)

    async def _accept(
        self, file: JobFile, context: Context, user: str, key: str, digest: str, account: Account | None
    ) -> Job:
        if self.disk.trouble:
            raise Unavailable(f"nothing is accepted now: {self.disk.trouble}", hint="make room on its disk")
        request = self.check(file, user)
        if file.service is not None and file.service.port < _FIRST_PORT and account is not None and account.uid:
            raise UsageError(
                f"service.port: {file.service.port} is for root alone", hint=f"choose one from {_FIRST_PORT} on"
            )
        number = self._next
        job = msgspec.structs.replace(self._new_job(number, file, request, context, user), account=account)
        if (holder := self.book.names.get(job.name)) is not None:
            raise Conflict(
                f"the name {job.name!r} is taken by job {holder}, which has not ended",
                hint="give it another name, or wait for it, or cancel it",
            )
        self._next += 1
        active = await self.book.submit(job, file, request, key, digest)
        self.loop.wake(decide=True, act=False)
        return active.job

    def preview(self, file: JobFile, context: Context, user: str) -> Job:
        """The job that this would be; its number is 0. Raises what is wrong with it."""
        return self._new_job(0, file, self.check(file, user), context, user)

    def check(self, file: JobFile, user: str) -> JobRequest:
        """What it asks for, if it could be accepted; raises what is wrong with it."""
        request = file.request()
        if file.roles:
            raise UsageError("roles: fixed roles beside the workers cannot be run yet", hint="leave out roles")
        missing = [name for name in file.after if name not in self.book.names and not self.store.latest(name)]
        if missing:
            raise NotFound(f"after: there is no job called {missing[0]!r}", hint="name jobs that were submitted before")
        quota = self.loop.rules.quotas.get(user, self.loop.rules.quotas.get("*"))
        if quota is not None and quota.jobs is not None:
            mine = sum(active.job.user == user for active in self.book)
            if mine >= quota.jobs:
                raise Conflict(
                    f"{user} has {mine} jobs that have not ended, and may have {quota.jobs}",
                    hint="wait for some of them, or cancel some",
                )
        self._check_possible(request)
        services.check(file, self.book, self.loop.environment)
        if quota is not None and quota.devices is not None:
            need = request.min_workers * request.width_milli / 1000
            if need > quota.devices:
                raise Impossible(
                    f"it needs {need:g} devices at least, and {user} may have {quota.devices:g} at a time",
                    hint="ask for fewer workers, or for a larger quota",
                )
        return request

    def _check_possible(self, request: JobRequest) -> None:
        """Whether its minimum would fit if nobody else were here. What fitted once need not be tried again."""
        cluster = views.Cluster(self.backend.nodes())
        shape = request.min_workers, request.width_milli, request.demand, request.fixed_milli, request.pools
        known_nodes, shapes = self._fitting
        if known_nodes == cluster.nodes and shape in shapes:
            return
        job = Job(
            number=0, name=request.name, user="", submitted_s=0.0, spec={}, context=Context(cwd="/"), level="rigid"
        )
        probe = Active(job, JobFile(run="true"), request)
        view = views.snapshot([probe], cluster, Estimates(), 0.0, {})
        pools = [p for p, name in enumerate(cluster.pools) if not request.pools or name in request.pools]
        workers = np.array([request.min_workers], np.int64)
        for pool in pools:
            if int(placement.load("pack")(view, workers, np.array([pool], np.int64)).sum()) == request.min_workers:
                if known_nodes != cluster.nodes or len(shapes) >= _MOST_SHAPES:
                    self._fitting = cluster.nodes, (shapes := set())
                shapes.add(shape)
                return
        raise Impossible(
            f"{_need(request)} could never be placed here: there {_there(cluster)}",
            hint="ask for fewer workers or less per worker" + ("" if pools else f"; types here: {cluster.pools}"),
        )

    def _new_job(self, number: int, file: JobFile, request: JobRequest, context: Context, user: str) -> Job:
        now_s = self.clock()
        return Job(
            number=number,
            name=file.name or self._free_name(f"job-{number}"),
            user=user,
            submitted_s=now_s,
            changed_s=now_s,
            spec=file.model_dump(mode="json", exclude_unset=True),
            context=context,
            level="service" if request.is_service else request.level,
            width_milli=request.width_milli,
            min_workers=request.min_workers,
            max_workers=request.max_workers,
            secret=secrets.token_urlsafe(24),
        )

    def _free_name(self, name: str) -> str:
        """Somebody may have called a job of theirs as we would call this one."""
        while name in self.book.names:
            name += "-x"
        return name

    # Jobs out.

    async def job(self, ref: str) -> Job:
        """By number or name (the latest of that name)."""
        if (active := self._active(ref)) is not None:
            return self._current(active.job)
        found: Job | None = None
        if ref.isdecimal() and len(ref) < 19:
            found = await asyncio.to_thread(self.store.job, int(ref))
        if found is None:
            found = await asyncio.to_thread(self.store.latest, ref)
        if found is None:
            raise NotFound(f"there is no job {ref!r}", hint="`stretto ps --all` lists them all")
        return self._current(found)

    async def jobs(self, query: Query) -> Page[Job]:
        page = await asyncio.to_thread(self.store.jobs, query)
        return Page([self._current(job) for job in page.items], page.next)

    async def events(self, ref: str | None, after: int, limit: int, newest_first: bool = False) -> list[e.Recorded]:
        number = None if ref is None else (await self.job(ref)).number
        return await asyncio.to_thread(
            lambda: self.store.events(job=number, after=after, limit=limit, newest_first=newest_first)
        )

    def expected(self, numbers: Iterable[int]) -> dict[int, Expected]:
        """How long these jobs run; of those that have not ended and are no services."""
        found = [self.book.jobs[number] for number in sorted(set(numbers) & self.book.jobs.keys())]
        jobs = [active for active in found if not active.request.is_service]
        if not jobs:
            return {}
        estimates = self.loop.estimates
        view = views.snapshot(jobs, self.loop.cluster, estimates, self.clock(), {})
        timed = [estimates.timed(active.row.shape) for active in jobs]
        told = zip(jobs, expected(view, [_total(active) for active in jobs], timed), strict=True)
        return {active.number: one for active, one in told}

    def eta(self, number: int, told: Expected | None) -> float | None:
        """Seconds that a running job still needs at its speed; None where nobody knows."""
        active = self.book.active(number)
        if active is None or not active.job.workers or active.progress.stuck:
            return None
        if active.progress.total is None or not active.progress.rate:
            return told.left_s if told is not None and active.progress.total is None else None
        return max(0, active.progress.total - active.progress.steps) / active.progress.rate

    async def why(self, ref: str) -> Why:
        job = await self.job(ref)
        active = self.book.active(job.number)
        cluster = self.loop.cluster
        if active is None:
            reason, target = str(job.phase), 0
            text = f"has {_ended(job)}" + (f": {job.message}" if job.message else "")
        else:
            reason, text, target = active.reason.name, active.reason.text, len(active.target)
        if active is not None:
            text += self._about_pinned(active) + _about_drained(job, cluster.drained, self.clock())
            text += _about_newcomers(active, self.clock())
        told = self.expected([job.number]).get(job.number)
        if told is not None and not job.workers and (told.source != "unknown" or self._needs_lengths):
            text = f"{text}; {told.text}"
        used = sum(len(a.job.workers) * a.job.width_milli for a in self.book) / 1000
        total = sum(node.devices for node in cluster.nodes if node.name not in cluster.drained)
        return Why(
            job=job.number,
            name=job.name,
            phase=job.phase,
            workers=len(job.workers),
            target=target,
            reason=reason,
            text=text,
            policy=self.loop.rules.policy.name,
            facts={
                "min_workers": job.min_workers,
                "max_workers": job.max_workers,
                "priority": active.request.priority if active else None,
                "waited_s": round(job.waited_s, 3),
                "expected_s": None if told is None or told.seconds is None else round(told.seconds, 3),
                "expected_from": told.source if told is not None else None,
                "devices_used": used,
                "devices_total": total,
                "leaving": sum(bool(worker.leaving) for worker in job.workers),
                "trouble": self.loop.trouble or self.book.trouble or self._lost,
            },
        )

    @property
    def _needs_lengths(self) -> bool:
        return "length" in self.loop.rules.policy.traits.uses

    def _about_pinned(self, active: Active) -> str:
        """Whom nobody stops for a job that waits, where that is not all that its reason says."""
        waits = not active.target and not active.job.workers and active.number not in self.loop.holds
        named = [self.book.jobs[number].job.name for number in self.loop.pinned if number in self.book.jobs]
        if not waits or not named or active.reason.name not in _NO_ROOM:
            return ""
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        return f"; jobs that would lose their work are not stopped for it ({', '.join(named[:_MOST_NAMED])}{more})"

    async def forecast(self) -> list[Foreseen]:
        """When each waiting job will start and each running one end, if nothing else comes."""
        return await self._foresee([])

    async def foresee(self, file: JobFile, context: Context, user: str) -> Foreseen:
        """The same for a job that was not submitted; raises what would be wrong with it."""
        job = self._new_job(self._next, file, self.check(file, user), context, user)
        probe = Active(job, file, asked.request_of(job, file))
        return next(one for one in await self._foresee([probe]) if one.job == job.number)

    async def _foresee(self, more: list[Active]) -> list[Foreseen]:
        now_s, rules = self.clock(), self.loop.rules
        jobs = sorted([*self.book, *more], key=lambda active: active.number)
        holds, most = views.held(jobs, self.book.names, rules.quotas, now_s)
        shown = [active for active in jobs if active.number not in holds]
        asked_for = {active.number for active in more}
        if len(shown) > _MOST_FORESEEN:
            # Those that run, those that were asked for, and the first of the queue: the rest comes after them anyway.
            first = {active.number for active in [a for a in shown if not a.target][:_MOST_FORESEEN]}
            shown = [a for a in shown if a.target or a.number in first or a.number in asked_for]
        view = views.snapshot(shown, self.loop.cluster, self.loop.estimates, now_s, most)
        async with self._forecasting:
            found = await asyncio.to_thread(forecasts.forecast, view, rules.policy, self.loop.state, rules.settings)
        sources = self._sources(shown, view)
        unknown = np.array([source == "unknown" for source in sources], np.bool_)
        guessed = forecasts.guessed(found, unknown, view.min_workers < view.max_workers)
        columns = (found.start_s, found.end_s, guessed.start, guessed.end)
        told = zip(shown, sources, *(column.tolist() for column in columns), strict=True)
        answers = [
            Foreseen(
                job=a.number,
                name=a.job.name,
                start_s=_finite(start_s),
                end_s=_finite(end_s),
                expected_from=source,
                start_guessed=start_guessed,
                end_guessed=end_guessed,
                text=_unforeseen(a, start_s, end_s),
            )
            for a, source, start_s, end_s, start_guessed, end_guessed in told
        ]
        answers += [
            Foreseen(job=a.number, name=a.job.name, text=holds[a.number].text) for a in jobs if a.number in holds
        ]
        return answers

    def _sources(self, jobs: list[Active], view: Snapshot) -> list[Source | None]:
        """What the length of each job was taken from; also unknown where steps are known and not how long one takes."""
        timed = [self.loop.estimates.timed(active.row.shape) for active in jobs]
        told = expected(view, [_total(active) for active in jobs], timed)
        return [
            None if active.request.is_service else "unknown" if one.left_s is None else one.source
            for active, one in zip(jobs, told, strict=True)
        ]

    # Changes.

    async def wish(self, ref: str, wish: str, by: str, why: str = "", *, force: bool = False) -> Job:
        """cancel, suspend or run (resume). What would lose much work is not suspended unless by force."""
        active = await self._not_ended(ref)
        if wish == active.job.wish:
            return self._current(active.job)
        if active.job.wish == "cancel":
            raise Conflict(f"job {active.job.id} is being cancelled", hint="submit it again instead")
        if wish == "suspend" and active.request.is_service:
            raise Conflict(f"job {active.job.id} is a service", hint="scale it down, or cancel it")
        if wish == "suspend":
            self._check_loss(active, "suspending", force)
        await self._record(active, e.Wished(wish=wish, by=by, why=why or f"{_DONE[wish]} by {by}"))  # type: ignore[arg-type]
        return self._current(active.job)

    async def scale(self, ref: str, low: int | None, high: int | None, by: str, *, force: bool = False) -> Job:
        active = await self._not_ended(ref)
        job = active.job
        if job.level == "rigid":
            raise Conflict(
                f"job {job.id} is rigid: it has {job.max_workers} workers or none",
                hint="give it an elastic section, and level restart if its script cannot resize by itself",
            )
        new_low, new_high = low if low is not None else job.min_workers, high if high is not None else job.max_workers
        if low is None and high is not None:
            new_low = min(new_low, new_high)
        if not 1 <= new_low <= new_high <= MOST_WORKERS:
            raise UsageError(
                f"{new_low}..{new_high} workers cannot be", hint=f"1 <= min <= max <= {MOST_WORKERS} must hold"
            )
        request = msgspec.structs.replace(active.request, min_workers=new_low, max_workers=new_high)
        self._check_possible(request)
        if active.target and len(active.target) not in request.sizes():
            self._check_loss(active, "scaling", force)
        await self._record(active, e.Scaled(min_workers=new_low, max_workers=new_high, by=by))
        return self._current(active.job)

    async def migrate(self, ref: str, node: str, by: str, *, force: bool = False) -> Job:
        active = await self._not_ended(ref)
        known = {one.name: one for one in self.backend.nodes()}
        if node not in known:
            raise NotFound(f"there is no node {node!r}", hint=f"nodes: {', '.join(known)}")
        if node in self.loop.rules.drained:
            raise Conflict(f"node {node} is drained", hint="take it into use again first")
        if not active.target:
            raise Conflict(f"job {active.job.id} has no workers that could move", hint="wait until it runs")
        if known[node].devices * 1000 < active.request.min_workers * active.request.width_milli:
            raise Impossible(f"node {node} is too small for job {active.job.id}", hint="choose another")
        if all(seat.node == node for seat in active.target):
            if not active.job.node:
                raise Conflict(f"job {active.job.id} is on node {node} already", hint="choose another")
            # It was asked to move elsewhere, and may stay.
            await self._record(active, e.Moved(node="", by=by))
            return self._current(active.job)
        self._check_room(active, known[node])
        self._check_loss(active, "moving", force)
        if (driver := self.loop.drivers.get(active.number)) is not None:
            driver.watch_pauses()
        await self._record(active, e.Moved(node=node, by=by))
        return self._current(active.job)

    def _check_room(self, active: Active, node: Node) -> None:
        """Beside those who stay where they are because they would lose their work."""
        others = [self.book.jobs[number] for number in self.loop.pinned if number in self.book.jobs]
        stay = [
            (other, held)
            for other in others
            if other is not active and (held := sum(seat.node == node.name for seat in other.target))
        ]
        free = node.devices * 1000 - sum(held * other.request.width_milli for other, held in stay)
        if active.request.min_workers * active.request.width_milli > free:
            names = ", ".join(other.job.name for other, _ in stay[:_MOST_NAMED])
            raise Conflict(
                f"node {node.name} has no room for job {active.job.id} beside jobs that would lose their work: {names}",
                hint="wait until they have ended, or choose another node",
            )

    def _check_loss(self, active: Active, doing: str, force: bool) -> None:
        """Whoever would lose much work is not stopped by mistake."""
        lost_s = loss.lost_s(active, self.clock())
        if lost_s > loss.FORCED_S and not force:
            raise Conflict(
                f"{doing} job {active.job.id} would lose {lost_s:.0f} s of its work",
                hint="let it end, or say that you mean it: --force",
            )

    async def drain(self, node: str, drained: bool, by: str, *, within_s: float = math.inf) -> None:
        """Leave a node, or take it into use again. Jobs that would lose their work by it may stay for so long."""
        if node not in {one.name for one in self.backend.nodes()}:
            raise NotFound(f"there is no node {node!r}", hint="`stretto nodes` lists them")
        names = {name: until_s for name, until_s in self.loop.rules.drained.items() if name != node}
        who = {name: whom for name, whom in self.loop.rules.drained_by.items() if name != node}
        if drained:
            names[node], who[node] = self.clock() + within_s, by
        self.loop.rules.drained, self.loop.rules.drained_by = names, who
        self.store.put_setting("drained", {name: _finite(until_s) for name, until_s in sorted(names.items())})
        self.store.put_setting("drained_by", who)
        await self.book.note("drained" if drained else "undrained", by, node=node)
        self.loop.wake(decide=True, urgent=True)

    def policy(self) -> PolicyInfo:
        rules = self.loop.rules
        return PolicyInfo(
            name=rules.policy.name,
            options=self._options,
            placement=rules.settings.placement,
            settings=cycle_settings.unusual(rules.settings),
            trouble=self.loop.trouble or self._lost,
        )

    async def set_policy(self, name: str, options: dict[str, Any], place: str | None, by: str) -> PolicyInfo:
        own, options = cycle_settings.split(options)
        before = self.loop.rules.settings
        settings = cycle_settings.read(own, msgspec.structs.replace(before, placement=place or before.placement))
        place = settings.placement
        policy = await asyncio.to_thread(plugins.find, name, options)
        placement.load(place)
        self._options, self._lost = options, ""
        self.loop.set_policy(policy, settings)
        more = {"settings": unusual} if (unusual := cycle_settings.unusual(settings)) else {}
        self.store.put_setting("policy", {"name": name, "options": options, "placement": place, **more})
        await self.book.note("policy", by, name=name, options=options, placement=place, **more)
        return self.policy()

    # What was learned.

    def classes(self) -> list[str]:
        """Those of which something was learned."""
        return self.loop.estimates.classes()

    def known(self, klass: str) -> Known:
        found = self.loop.estimates.known(klass)
        if found is None:
            raise NotFound(f"nothing was learned of a class {klass!r}", hint="`stretto class list` lists them all")
        return found

    async def forget_class(self, klass: str, by: str) -> None:
        """As if no job of it had ever run; when this returns, for good."""
        self.known(klass)
        self.loop.estimates.forget_class(klass)
        await asyncio.wrap_future(self.store.forget_learned(klass))
        await self.book.note("forgot", by, klass=klass)
        self.loop.wake(decide=True)

    async def forget_classes_without_jobs(self) -> None:
        """Retention has forgotten the last job of some: what was learned of them says what they did."""
        unused = set(self.classes()) - {active.request.klass for active in self.book}
        unused -= await asyncio.to_thread(self._classes_with_jobs, frozenset(unused))
        for klass in sorted(unused & set(self.classes()) - {active.request.klass for active in self.book}):
            await self.forget_class(klass, "retention")

    async def classes_with_jobs(self, looked_for: frozenset[str], user: str) -> set[str]:
        """Those of which a job of this user is stored."""
        return await asyncio.to_thread(self._classes_with_jobs, looked_for, user)

    def _classes_with_jobs(self, looked_for: frozenset[str], user: str | None = None) -> set[str]:
        """Those of which a job is stored. In a thread."""
        found: set[str] = set()
        query = Query(limit=_JOBS_AT_ONCE, user=user)
        while found < looked_for:
            page = self.store.jobs(query)
            found |= looked_for & {asked.class_of(job) for job in page.items}
            if page.next is None:
                break
            query = msgspec.structs.replace(query, after=page.next)
        return found

    # Workers and watchers.

    async def join(self, ref: str, socket: Socket) -> None:
        """A worker has connected: whatever it says is between it and its coordinator."""
        active = self._active(ref)
        driver = self.loop.drivers.get(active.number) if active is not None else None
        if not isinstance(driver, ElasticDriver):
            await socket.close(1008, f"job {ref} has no coordinator now")
            return
        await driver.coordination.serve(socket)

    def watch(self) -> Watch:
        """Every event from this moment on. Ends when the listener falls far behind, or with the server."""
        return Watch(self._watches)

    def logs(self, job: Job) -> Path:
        """Where the logs of its workers are: `w0.log` and so on."""
        return self.folder / "records" / job.id / "logs"

    def _publish(self, recorded: e.Recorded, job: Job | None) -> None:
        for watch in list(self._watches):
            watch.put(recorded)

    def _active(self, ref: str) -> Active | None:
        if ref.isdecimal() and len(ref) < 19 and (active := self.book.active(int(ref))) is not None:
            return active
        return self.book.active(self.book.names.get(ref, -1))

    async def _not_ended(self, ref: str) -> Active:
        active = self._active(ref)
        if active is None:
            job = await self.job(ref)
            raise Conflict(f"job {job.id} has {_ended(job)}", hint="submit it again")
        return active

    async def _record(self, active: Active, event: e.Event) -> None:
        if self.book.trouble:
            raise Unavailable(f"nothing can be written down now: {self.book.trouble}", hint="try again later")
        durable = self.book.record(active.number, event)
        self.loop.wake(decide=True, urgent=True)
        await durable

    def _current(self, job: Job) -> Job:
        """As it is now: times counted up, progress as last heard."""
        active = self.book.active(job.number)
        if active is None or job.phase in ENDED:
            return job
        now = lifecycle.accounted(active.job, self.clock())
        progress = active.progress
        return msgspec.structs.replace(
            now,
            steps=progress.steps,
            total_steps=progress.total,
            metrics=dict(progress.metrics),
            paused_s=progress.paused_s,
        )


_ENDED = {"succeeded": "ended well", "failed": "failed", "cancelled": "been cancelled"}


def _ended(job: Job) -> str:
    """How, if that is written down already."""
    return _ENDED.get(job.phase, "ended")


_DONE = {"cancel": "cancelled", "suspend": "suspended", "run": "resumed"}


def _total(active: Active) -> Total:
    """What is expected of one that `views` has just made a row of."""
    total = active.progress.total
    return active.row.prospect.total if total is None else Total(source="total")


def _drained(stored: Any, by: Any) -> tuple[dict[str, float], dict[str, str]]:
    """As they were stored: with no end to their patience where none is given; and who wanted it."""
    try:
        names = stored if isinstance(stored, dict) else dict.fromkeys(stored)
        found = {str(name): math.inf if until_s is None else float(until_s) for name, until_s in names.items()}
        return found, {str(name): str(whom) for name, whom in dict(by).items()}
    except (TypeError, ValueError) as error:
        _log.error("which nodes are drained cannot be read any more, and none is: %s", error)
        return {}, {}


def _about_newcomers(active: Active, now_s: float) -> str:
    """Why a job that runs gets no more workers for now."""
    job = active.job
    left_s = job.not_before_s - now_s
    if left_s <= 0 or not job.workers or sum(not worker.leaving for worker in job.workers) >= len(active.target):
        return ""
    return f"; the next worker is tried in {left_s:.0f} s: {job.message}"


def _about_drained(job: Job, drained: Mapping[str, float], now_s: float) -> str:
    """What drained nodes mean to it."""
    if not job.workers:
        names = ", ".join(sorted(drained))
        return f"; drained {'nodes' if len(drained) > 1 else 'node'}: {names}" if drained else ""
    here = sorted({worker.seat.node for worker in job.workers} & drained.keys())
    if not here:
        return ""
    until_s = min(drained[node] for node in here)
    rest = f" within {until_s - now_s:.0f} s" if now_s < until_s < math.inf else ""
    return f"; {', '.join(here)} is drained: it leaves when it can, or has ended{rest}"


def _unforeseen(active: Active, start_s: float, end_s: float) -> str:
    """Why nobody can say when it starts or ends; empty where that is known."""
    if not math.isfinite(start_s):
        return "as things are it does not start"
    if math.isfinite(end_s):
        return ""
    return "a service ends when it is asked to" if active.request.is_service else "as things are it does not end"


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _need(request: JobRequest) -> str:
    parts = [f"{request.width_milli / 1000:g} devices"] if request.width_milli else []
    parts += [f"{request.cpu_milli / 1000:g} cores"] if request.cpu_milli else []
    parts += [f"{request.memory_mib} MiB"] if request.memory_mib else []
    parts += [f"{request.gpu_memory_mib} MiB of GPU memory"] if request.gpu_memory_mib else []
    kind = f" on {' or '.join(request.pools)}" if request.pools else ""
    workers = "1 worker" if request.min_workers == 1 else f"{request.min_workers} workers"
    return f"{workers} with {', '.join(parts) or 'nothing'} each{kind}"


def _there(cluster: views.Cluster) -> str:
    kinds: dict[tuple[str, int, int, int, int], int] = {}
    for node in cluster.nodes:
        kind = node.pool, node.devices, node.cpu_milli, node.memory_mib, node.gpu_memory_mib
        kinds[kind] = kinds.get(kind, 0) + 1
    told = [
        f"{count} {'node' if count == 1 else 'nodes'} with {devices} {pool} {'slots' if pool == 'cpu' else 'devices'}"
        f"{f' of {gpu_mib} MiB' if gpu_mib else ''}, {cpu / 1000:g} cores and {mib} MiB"
        for (pool, devices, cpu, mib, gpu_mib), count in kinds.items()
    ]
    return "are " + "; ".join(told) if told else "are no nodes"
