"""Services: replicas behind haproxy, as many as the load asks for.

haproxy is a process of the job like its replicas: launched through the backend, adopted after a restart, started again
when it dies, ended with the job. Every replica has a port of its own, remembered with it. About once a second the
driver looks at haproxy, tells it what is not as it should be, and derives from what it counted how many replicas to
wish for. A replica takes part once haproxy says that it is up; one that leaves is drained, and asked to end when it has
no more requests, or after the grace.

Without haproxy all replicas inherit one listening socket (`server.listening`), which a process of the job keeps. Then
nobody counts requests: such a service is scaled by its CPU use only.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import os
import secrets
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stretto.backends.protocol import Exit
from stretto.errors import Occupied, UsageError
from stretto.jobs.model import Seat, Worker
from stretto.server import asked, listening, load, proxy
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings, describe
from stretto.spec.model import JobFile, Service
from stretto.tasks import stop

PROXY, SOCKET = "proxy", "socket"
"""The helper of a service, by name: which one it is says how the service is reached."""
HELPERS = frozenset({PROXY, SOCKET})

HEALTHY_S = 30.0
"""After so long without a fault earlier ones are forgotten."""
_LOOK_S, _LOOK_AGAIN_S = 1.0, 0.1
"""How often it looks; how often while replicas come or go."""
_SETTLED_S = 10.0
"""A proxy that has lived so long did not die of its configuration: it is started again at once."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Below those that the kernel gives to outgoing connections."""


class ServiceDriver(Driver):
    def __init__(self, active: Active, surroundings: Surroundings) -> None:
        super().__init__(active, surroundings)
        assert active.file.service is not None
        self.service: Service = active.file.service
        self.program = proxy.find(surroundings.environment)
        self.helper = self._chosen_helper()
        self.warm = self.helper == PROXY
        self.drain_s = active.file.stop.grace
        self.proxy = proxy.Proxy(self.records / "proxy", surroundings.records)
        self._joined: frozenset[str] = frozenset()
        self._draining: dict[str, float] = {}
        """Since when those are, by launch."""
        self._told: set[str] = set()
        """Launches that were asked to end."""
        self._well_since_s: float | None = None
        self._starts_anew = False
        """The listening socket is lost: replicas that have it must end before there can be another."""
        self._requests, self._errors = load.Rate(), load.Rate()
        self._cpu: dict[int, float] = {}
        """CPU seconds of replicas at the last look, by process."""
        self._wishes = load.Wishes(self.service.hold)
        self._measured_s = 0.0
        self._woken = asyncio.Event()
        # After a restart the load is not known yet: what runs is what was wanted.
        active.wanted = len(active.target)
        self._wishes.add(surroundings.clock(), active.wanted)
        self._tending = asyncio.create_task(self._tend())

    @property
    def joined(self) -> frozenset[str]:
        return self._joined

    @property
    def failing(self) -> bool:
        return self._starts_anew or super().failing

    @property
    def serving(self) -> bool:
        return bool(self._joined)

    @property
    def recovered(self) -> bool:
        return self._well_since_s is not None and self.around.clock() - self._well_since_s >= HEALTHY_S

    @property
    def helpers(self) -> frozenset[str]:
        """It comes with the first replica and goes after the last; between them it stays though there be none."""
        job = self.active.job
        over = self.end is not None or job.wish == "cancel"
        needed = bool(job.workers) or (not over and bool(self.active.target or job.helpers))
        return frozenset({self.helper}) if needed and not self._starts_anew else frozenset()

    def helper_command(self, name: str) -> tuple[str, ...]:
        service = self.service
        if name == PROXY and self.program is not None:
            most = self.active.request.max_workers
            lowered = self.around.identity(self.active.job) is not None
            return self.proxy.prepare(self.program, service.host, service.port, service.health, most, lowered=lowered)
        return (*_listening(), "hold", str(self.folder), service.host, str(service.port))

    def members(self, count: int) -> Sequence[int]:
        """The ports of newcomers."""
        if self.helper == SOCKET:
            return [self.service.port] * count
        return free_ports(count, {self.service.port, *(worker.member for worker in self.active.job.workers)})

    def command(self, member: int, env: Mapping[str, str] | None) -> tuple[str, ...]:
        file = self.active.file
        run = _with_port(file.run, member)
        words = asked.command(file.model_copy(update={"run": run}), self.folder, env)
        return words if self.helper == PROXY else (*_listening(), "take", str(self.folder), *words)

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        return {"STRETTO_WORKER": worker, "PORT": str(member)}

    def resize(self, size: int, leavers: Sequence[str]) -> Sequence[str]:
        return self.stop(leavers)

    def stop(self, leavers: Sequence[str]) -> Sequence[str]:
        """Drained first, unless nobody could do that or nobody is to wait for it."""
        if self.helper == SOCKET or self.failing:
            return leavers
        self._woken.set()
        return ()

    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        self._draining.pop(worker.launch, None)
        self._told.discard(worker.launch)
        self._joined -= {worker.name}
        self._woken.set()
        if worker.name in (PROXY, SOCKET):
            return self._helper_exited(worker, exit)
        if not left:
            self._starts_anew = False
        if worker.leaving:
            return None
        if exit.how == "refused":
            self.end = self.end or End("failed", describe(worker, exit), 127)
            return self.end
        return self._fault(describe(worker, exit))

    async def close(self) -> None:
        await stop(self._tending)

    def _chosen_helper(self) -> str:
        """As it was begun; what was installed meanwhile is for those that start later."""
        job = self.active.job
        if job.helpers:
            return job.helpers[0].name
        if job.workers:
            return SOCKET if job.workers[0].member == self.service.port else PROXY
        return PROXY if self.program else SOCKET

    def _helper_exited(self, worker: Worker, exit: Exit) -> Judgement:
        self._requests.clear()
        self._joined = frozenset()
        if worker.leaving:
            return None
        self._starts_anew = worker.name == SOCKET and bool(self.active.job.workers)
        if "Address already in use" in exit.text:
            said = f"port {self.service.port} on {self.service.host} is in use by another program"
            exit = msgspec.structs.replace(exit, text=said)
        text = describe(worker, exit)
        if exit.how == "refused":
            self.end = self.end or End("failed", text, 127)
            return self.end
        lived_s = self.around.clock() - worker.launched_s
        return None if lived_s >= _SETTLED_S else self._fault(text)

    def _fault(self, text: str) -> Judgement:
        """Several at a time are one."""
        return None if self.active.job.not_before_s > self.around.clock() else Fault(text)

    # Looking.

    async def _tend(self) -> None:
        while True:
            self._woken.clear()
            changing = await self._look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S if changing else _LOOK_S):
                    await self._woken.wait()

    async def _look(self) -> bool:
        """See how things are, and do what is to be done; whether something is under way."""
        try:
            joined = await (self._look_at_proxy() if self.helper == PROXY else self._look_at_processes())
        except (OSError, TimeoutError, ValueError, LookupError, csv.Error):
            # It is not there, or not yet: nobody is served, and who leaves need not wait.
            joined = frozenset()
            self._let_go(worker for worker in self.active.job.workers if worker.leaving)
        if joined != self._joined:
            self._joined = joined
            self.around.changed(self.active.number)
        self._note_health()
        return joined != {worker.name for worker in self.active.job.workers}

    async def _look_at_processes(self) -> frozenset[str]:
        await self._measure(None)
        helper = self.active.job.worker(SOCKET)
        if helper is None or not helper.pid:
            return frozenset()
        return frozenset(worker.name for worker in self.active.job.workers if worker.pid and not worker.leaving)

    async def _look_at_proxy(self) -> frozenset[str]:
        seen = await self.proxy.look()
        await self._measure(seen)
        workers = self.active.job.workers
        orders = list(proxy.orders(seen.places, await self._replicas(workers, seen)))
        if orders:
            await self.proxy.tell(orders)
            seen = await self.proxy.look()
        self._let_go(worker for worker in workers if worker.leaving and self._is_drained(worker, seen))
        up = {place.port for place in seen.places if place.is_up}
        return frozenset(worker.name for worker in workers if worker.member in up and not worker.leaving)

    async def _replicas(self, workers: Sequence[Worker], seen: proxy.Report) -> list[proxy.Replica]:
        """haproxy believes that a new server is up until it has found otherwise: so newcomers are asked first."""

        async def replica(worker: Worker) -> proxy.Replica:
            place = seen.of(worker.member)
            known = place is not None and place.is_open
            new = bool(worker.pid) and not worker.leaving and not known
            answers = known or (new and await proxy.answers(worker.member, self.service.health))
            return proxy.Replica(worker.member, answers, bool(worker.leaving))

        return list(await asyncio.gather(*(replica(worker) for worker in workers)))

    def _is_drained(self, worker: Worker, seen: proxy.Report) -> bool:
        """At the earliest at the second look: what was under way when it was closed is counted by then."""
        place, now_s = seen.of(worker.member), self.around.clock()
        since_s = self._draining.setdefault(worker.launch, now_s)
        if place is None or now_s - since_s >= self.drain_s or self.failing:
            return True
        return now_s > since_s and not place.sessions and not place.is_up

    def _let_go(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.launch not in self._told:
                self._told.add(worker.launch)
                self.around.terminate(self.active.number, worker.name)

    def _note_health(self) -> None:
        """Since when as many serve as should."""
        if not self.active.target or len(self._joined) < len(self.active.target):
            self._well_since_s = None
        elif self._well_since_s is None:
            self._well_since_s = self.around.clock()

    # Load.

    async def _measure(self, seen: proxy.Report | None) -> None:
        now_s = self.around.clock()
        if now_s - self._measured_s < _LOOK_S * 0.9:
            return
        metrics = {"replicas_up": float(len(self._joined))}
        target = self.service.target
        wish: int | None = None
        if seen is not None:
            rate = self._requests.add(now_s, seen.requests)
            errors = self._errors.add(now_s, seen.errors)
            metrics |= {"requests_per_s": rate, "errors_per_s": errors, "latency_ms": seen.latency_ms}
            if target.requests is not None:
                wish = load.wish(rate, target.requests, self.active.wanted)
        if target.cpu is not None and (used := await self._cpu_percent(now_s)) is not None:
            percent, replicas = used
            metrics["cpu_percent"] = percent
            wish = load.wish(percent * replicas, target.cpu, replicas)
        self._measured_s = now_s
        self.active.progress.metrics = {name: round(value, 2) for name, value in metrics.items()}
        if wish is not None:
            self._want(now_s, wish)

    async def _cpu_percent(self, now_s: float) -> tuple[float, int] | None:
        """Of what a replica may use, on average over those that were there at the last look too; and how many."""
        pids = [worker.pid for worker in self.active.job.workers if worker.name in self._joined and worker.pid]
        before, self._cpu = self._cpu, await asyncio.to_thread(load.cpu_s, pids)
        span_s, same = now_s - self._measured_s, before.keys() & self._cpu.keys()
        if not same or not 0 < span_s < 10 * _LOOK_S:
            return None
        used_s = sum(max(0.0, self._cpu[pid] - before[pid]) for pid in same) / len(same)
        each_milli = self.active.request.cpu_milli or 1000
        return 100 * used_s / span_s / (each_milli / 1000), len(same)

    def _want(self, now_s: float, wish: int) -> None:
        asked_for = self.active.request
        size = min(max(wish, asked_for.min_workers), asked_for.max_workers)
        wanted = self._wishes.add(now_s, size)
        if wanted != self.active.wanted:
            self.active.wanted = wanted
            self.around.changed(self.active.number)


def check(file: JobFile, others: Iterable[Active], environment: Mapping[str, str]) -> None:
    """Whether a service could be reached as it wants to be; raises what is in the way."""
    service = file.service
    if service is None:
        return
    if service.target.requests is not None and proxy.find(environment) is None:
        raise UsageError(
            "service.target.requests: requests are counted by haproxy, which is not installed here",
            hint="install it (apt-get install haproxy), or scale by CPU use: target: {cpu: 80}",
        )
    for other in others:
        theirs = other.file.service
        if theirs is not None and theirs.port == service.port and other.job.name not in file.after:
            raise Occupied(
                f"service.port: {service.port} belongs to job {other.number} ({other.job.name})",
                hint="choose another port, or cancel that job",
            )
    if not file.after:
        _try(service)


def free_ports(count: int, taken: set[int]) -> list[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    start = secrets.randbelow(_PORTS)
    for i in range(_PORTS):
        port = _FIRST_PORT + (start + i) % _PORTS
        if len(found) == count:
            break
        if port not in taken and _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind((proxy.LOOPBACK, port))
        except OSError:
            return False
    return True


def _try(service: Service) -> None:
    """Somebody else's port, or one that we may not have, is better refused than found out later."""
    with socket.socket(socket.AF_INET6 if ":" in service.host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((service.host, service.port))
        except OSError as error:
            raise Occupied(
                f"service.port: {service.port} on {service.host} cannot be had: {os.strerror(error.errno or 0)}",
                hint="choose another port, or end the program that has it",
            ) from None


def _with_port(run: str | tuple[str, ...], port: int) -> str | tuple[str, ...]:
    if isinstance(run, str):
        return run.replace("{port}", str(port))
    return tuple(word.replace("{port}", str(port)) for word in run)


def _listening() -> tuple[str, ...]:
    return sys.executable, "-I", "-S", listening.__file__
