"""haproxy in front of a service's replicas: its configuration, and what is said to it while it runs.

It has a fixed number of places, all closed at first. Which replica has which place is known from its port alone, and
haproxy itself remembers it: so a restarted server reads how things are, a restarted haproxy is told again, and scaling
never reloads anything. `orders` compares how things are with how they should be, and is asked as often as one likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import os
import resource
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto import jobfiles

VARIABLE = "STRETTO_HAPROXY"
"""Which haproxy to use; `none`: do as if there were none."""

LOOPBACK = "127.0.0.1"
_CONFIG, _ADMIN = "haproxy.cfg", "admin.sock"
_FRONT, _BACK = "clients", "replicas"
_FEWEST_PLACES = 64
_NOBODY = 65534
_MOST_CONNECTIONS = 4000
_PATIENCE_S = 2.0
_CLOSED_PORT = 1
_MOST_SAID = 1 << 22
"""Of its statistics, in bytes."""


def find(environment: Mapping[str, str]) -> str | None:
    """Where haproxy is. Debian has it in a folder that is on the path of administrators only."""
    told = environment.get(VARIABLE)
    if told:
        return None if told == "none" else told
    path = environment.get("PATH", os.defpath)
    return shutil.which("haproxy", path=f"{path}:/usr/sbin:/usr/local/sbin")


@dataclass(frozen=True)
class Place:
    """What haproxy says of one of its servers."""

    name: str
    port: int
    status: str
    sessions: int

    @property
    def is_open(self) -> bool:
        return not self.status.startswith(("MAINT", "DRAIN"))

    @property
    def is_up(self) -> bool:
        return self.status.startswith("UP")


@dataclass(frozen=True)
class Report:
    """One look at haproxy. Counts are since its start."""

    places: tuple[Place, ...]
    requests: int = 0
    errors: int = 0
    """Answers 5xx, its own included."""
    latency_ms: float = 0.0
    """From a request's arrival to the first byte of its answer, over the last 1024 requests."""

    def of(self, port: int) -> Place | None:
        return next((place for place in self.places if place.port == port), None)


@dataclass(frozen=True)
class Replica:
    port: int
    answers: bool = False
    """Whether it can take requests."""
    leaving: bool = False


class Proxy:
    """The haproxy of one service."""

    def __init__(self, folder: Path, root: Path) -> None:
        """The folder is below `root`, and the job can put anything in its place."""
        self.folder, self.root = folder, root

    def prepare(
        self, program: str, host: str, port: int, health: str | None, most: int, *, lowered: bool = False
    ) -> tuple[str, ...]:
        """Write its configuration; the command that starts it. `lowered`: it gives up root's rights when it listens."""
        jobfiles.make_folder(self.folder, root=self.root)
        jobfiles.write(self.folder / _CONFIG, configuration(host, port, health, most, lowered).encode(), root=self.root)
        # Relative to its folder: the name of a Unix socket is short, a folder's need not be.
        return program, "-db", "-C", str(self.folder), "-f", _CONFIG

    async def look(self) -> Report:
        """Raises OSError when it is not there."""
        return report(await self._say("show stat"))

    async def tell(self, orders: Sequence[str]) -> None:
        for order in orders:
            answer = (await self._say(order)).strip()
            if any(word in answer for word in ("No such", "Require", "Unknown", "Invalid", "Permission denied")):
                raise OSError(f"haproxy refused {order!r}: {answer}")

    async def _say(self, words: str) -> str:
        with jobfiles.folder(self.folder, root=self.root) as folder:
            async with asyncio.timeout(_PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{_ADMIN}")
                try:
                    writer.write(words.encode() + b"\n")
                    return (await _all(reader)).decode()
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()


async def _all(reader: asyncio.StreamReader) -> bytes:
    """Until the end; whoever says more than haproxy ever would is somebody else."""
    said = b""
    while part := await reader.read(_MOST_SAID):
        said += part
        if len(said) > _MOST_SAID:
            raise OSError("what answers is not haproxy: it says too much")
    return said


def configuration(host: str, port: int, health: str | None, most: int, lowered: bool = False) -> str:
    places = max(_FEWEST_PLACES, 2 * most)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    room = _MOST_CONNECTIONS if files < 0 else max(10, min(_MOST_CONNECTIONS, (files - 2 * places - 100) // 2))
    address = f"[{host}]" if ":" in host else host
    check = f"    option httpchk GET {health}\n" if health else ""
    rights = f"    uid {_NOBODY}\n    gid {_NOBODY}\n" if lowered else ""
    # A request that never reached a replica is given to another one. One that did is not tried again: it may have
    # been what killed it. Connections to replicas are not kept: the replica may close one just when the next request
    # comes, and programs that wait for all their connections would not end. Without noreuseport two haproxies would
    # share a port, and neither would say so.
    return f"""\
global
    stats socket unix@{_ADMIN} mode 600 level admin
    log stdout format raw local0 notice
    nbthread {max(1, min(4, len(os.sched_getaffinity(0))))}
    maxconn {room}
    noreuseport
{rights}\
defaults
    mode http
    log global
    retries 3
    option redispatch 1
    option http-server-close
    timeout connect 5s
    timeout http-request 30s
    timeout http-keep-alive 60s
    timeout client 10m
    timeout server 10m
    timeout tunnel 1h
frontend {_FRONT}
    bind {address}:{port}
    default_backend {_BACK}
backend {_BACK}
    balance leastconn
    option forwardfor
{check}\
    default-server check inter 1s fastinter 200ms downinter 500ms rise 1 fall 2
    server-template s 1-{places} {LOOPBACK}:{_CLOSED_PORT} disabled
"""


def report(text: str) -> Report:
    """What `show stat` says."""
    rows = csv.reader(io.StringIO(text.removeprefix("# ")))
    at = {name: column for column, name in enumerate(next(rows, ()))}
    places: list[Place] = []
    requests = errors = 0
    latency_ms = 0.0
    for row in rows:
        if not row:
            continue
        name = row[at["svname"]]
        if name == "FRONTEND":
            requests, errors = _whole(row[at["req_tot"]]), _whole(row[at["hrsp_5xx"]])
        elif name == "BACKEND":
            latency_ms = float(sum(_whole(row[at[part]]) for part in ("qtime", "ctime", "rtime")))
        else:
            port = _whole(row[at["addr"]].rpartition(":")[2])
            places.append(Place(name, port, row[at["status"]], _whole(row[at["scur"]])))
    return Report(tuple(places), requests, errors, latency_ms)


def orders(places: Sequence[Place], replicas: Iterable[Replica]) -> Iterator[str]:
    """What to say so that exactly those replicas get requests that should."""
    by_port = {replica.port: replica for replica in replicas}
    for place in places:
        if place.is_open and place.port not in by_port:
            yield f"set server {_BACK}/{place.name} state maint"
    free = (place for place in places if place.status.startswith("MAINT") and place.port not in by_port)
    at = {place.port: place for place in places}
    for port, replica in by_port.items():
        its = at.get(port)
        if replica.leaving:
            if its is not None and its.is_open:
                yield f"set server {_BACK}/{its.name} state drain"
        elif replica.answers and (its is None or not its.is_open):
            its = its or next(free, None)
            if its is not None:
                yield f"set server {_BACK}/{its.name} addr {LOOPBACK} port {port}"
                yield f"set server {_BACK}/{its.name} state ready"


async def answers(port: int, health: str | None, patience_s: float = 1.0) -> bool:
    """Whether a replica can take requests: it accepts a connection, and says so where it was told how."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            try:
                if health is None:
                    return True
                writer.write(f"GET {health} HTTP/1.0\r\nHost: {LOOPBACK}\r\n\r\n".encode())
                words = (await reader.readline()).split()
                return len(words) > 1 and words[1][:1] in (b"2", b"3")
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        return False


def _whole(text: str) -> int:
    return int(text) if text.strip().isdecimal() else 0
