"""The controller as a process: it serves at once, competes for the lease, and works while it has it.

A leader that is not one any more ends: whatever it had begun is completed by the next, and its pod is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from stretto import pins, tuning
from stretto.api import tls
from stretto.api.hosts import Hosts, names
from stretto.api.serving import HttpServer, address_of, bind
from stretto.api.tls import Tls
from stretto.clock import Clock
from stretto.errors import StrettoError
from stretto.kubernetes import access, own_key
from stretto.kubernetes.client import Api
from stretto.kubernetes.controller import Anew, Controller, Options
from stretto.kubernetes.keeping import Fenced
from stretto.kubernetes.leading import Leading
from stretto.kubernetes.serving import Parts, application
from stretto.tasks import stop


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    options: Options
    """Its `url` may be empty: then it is the address that is listened on."""
    host: str = "0.0.0.0"
    port: int = 8080
    context: str = ""
    kubeconfig: str = ""
    hosts: tuple[str, ...] = ()
    """Names, beside its address and that of `url`, under which it answers."""
    tls: bool = False
    """With a key that is kept in a secret, and made if there is none."""
    tls_files: tuple[str, str] | None = None
    """A certificate and its key, instead."""
    insecure: bool = False
    """It may listen where others reach it, though all that is said there can be read on the way."""
    lease_s: float = 15.0
    connections: int = 64


def run(work: Coroutine[Any, Any, None]) -> None:
    """On the fastest event loop there is."""
    tuning.for_serving()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def serve(settings: Settings, ready: Callable[[str], None] = lambda address: None) -> None:
    """Until SIGTERM or SIGINT, or until the lease is lost (then it raises `Fenced`)."""
    speaks_tls = settings.tls or settings.tls_files is not None
    listening = bind(settings.host, settings.port, insecure=settings.insecure or speaks_tls)
    address = address_of(listening)
    hosts = _hosts(settings, listening)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    identity = f"{socket.gethostname()}_{uuid.uuid4()}"
    found = access.find(settings.context, Path(settings.kubeconfig) if settings.kubeconfig else "")
    # The lease must not wait for its turn behind thousands of pods.
    async with (
        _private_folder() as folder,
        Api(found, connections=settings.connections, user_agent="stretto-controller") as api,
        Api(found, connections=1, user_agent="stretto-controller") as own,
    ):
        key = await _key(settings, own, hosts, folder)
        options = _reached(settings.options, address, key)
        leading = Leading(
            own, identity, namespace=options.namespace, duration_s=settings.lease_s,
            renew_deadline_s=settings.lease_s * 2 / 3, retry_s=settings.lease_s * 2 / 15,
        )  # fmt: skip
        parts = Parts(lambda: leading.is_leader)
        server = HttpServer(application(parts, hosts), listening, tls=key)
        await server.start()
        ready(address)
        try:
            await _work(api, leading, parts, identity, options, ending)
        finally:
            await server.stop()
            await leading.close()


@contextlib.asynccontextmanager
async def _private_folder() -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        yield Path(folder)


def _hosts(settings: Settings, listening: socket.socket) -> Hosts:
    own = urlsplit(settings.options.url).hostname
    allowed = names(settings.hosts) | ({own.rstrip(".")} if own else set())
    return Hosts(listening.getsockname()[0].partition("%")[0], allowed)


async def _key(settings: Settings, api: Api, hosts: Hosts, folder: Path) -> Tls | None:
    if settings.tls_files is not None:
        certificate, key = settings.tls_files
        return tls.given(Path(certificate), Path(key))
    return await own_key.found_or_made(api, settings.options.namespace, hosts.allowed, folder) if settings.tls else None


def _reached(options: Options, address: str, key: Tls | None) -> Options:
    """With the address that workers are given: where it says nothing else, with the key that we show."""
    url = options.url or f"{'wss' if key else 'ws'}://{address}"
    if key is not None and not pins.parted(url)[1]:
        url = pins.joined(url, key.pin)
    return msgspec.structs.replace(options, url=url)


async def _work(
    api: Api, leading: Leading, parts: Parts, identity: str, options: Options, ending: asyncio.Event
) -> None:
    over = asyncio.create_task(ending.wait())
    leads = asyncio.create_task(leading.acquire())
    await asyncio.wait([over, leads], return_when=asyncio.FIRST_COMPLETED)
    if not leads.done():
        await stop(leads)
        return
    lost = asyncio.create_task(leading.lost.wait())
    try:
        while not over.done():
            parts.controller = Controller(api, leads.result(), identity, options, Clock())
            with contextlib.suppress(Anew):
                await _control(parts.controller, over, lost)
    finally:
        parts.controller = None
        for task in (over, lost):
            task.cancel()
        await asyncio.gather(over, lost, return_exceptions=True)


async def _control(controller: Controller, over: asyncio.Task[Any], lost: asyncio.Task[Any]) -> None:
    """Until it is over or lost; raises what the controller ends with."""
    work = asyncio.create_task(controller.run())
    try:
        await asyncio.wait([over, lost, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            _unwrap(work)
        if lost.done() and not over.done():
            raise Fenced("the lease was lost", hint="this controller ends; another one leads")
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _unwrap(work: asyncio.Task[None]) -> None:
    """The first error of ours in the group, alone."""
    try:
        work.result()
    except BaseExceptionGroup as group:
        ours = group.subgroup(StrettoError)
        while ours is not None:
            first = ours.exceptions[0]
            if not isinstance(first, BaseExceptionGroup):
                raise first from None
            ours = first
        raise
