"""What the scheduling loop asks of a backend, and what it is told.

A backend starts and ends processes and knows its nodes; it decides nothing. Everything is asked for by a launch id that
the caller chose and has made durable: a backend that is asked again for a launch it knows starts nothing a second time,
and every launch it was ever asked for ends in exactly one `Exit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, Protocol, TypeAlias

import msgspec

from stretto.errors import StrettoError
from stretto.jobs.model import Account

SHELL = ("/bin/sh", "-c")
"""How a command begins that is a line for the shell: to be asked to end are the programs that it runs."""


class LaunchError(StrettoError):
    """It is certain that nothing runs under this launch id, and why: no such program, no such folder, …"""

    code = "launch"


class LaunchFault(LaunchError):
    """Nothing runs, and it is the machine's fault: no room on the disk, no more processes. It may work later."""

    code = "launch-fault"


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine, or what a machine presents as one."""

    name: str
    pool: str
    """Its device type: `cpu` where slots are counted instead of GPUs."""
    devices: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int = 0
    """Of one device."""
    host: str = "127.0.0.1"
    """Where its workers can be reached."""


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """One process to be started."""

    id: str
    """Unique for ever; also the name of its run directory: letters, digits, `-` and `.`."""
    job: int
    worker: str
    node: str
    devices: tuple[int, ...] = ()
    """Indices on the node."""
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    """All variables of the worker; the backend adds those of its devices, limits and account."""
    account: Account | None = None
    """As whom it runs; None: as the server."""
    log: str
    """The file that its output is appended to."""
    folder: str = ""
    """Of its job: there, and its account's, before it starts."""
    warm: bool = True
    """Whether it may be a fork of a warm interpreter."""
    cpu_milli: int = 0
    """What it may use, enforced where the system allows; 0: no limit."""
    memory_mib: int = 0
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL, when nobody is there to say so: the server has gone for good."""


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A launch is over: none of its processes is left."""

    launch: str
    how: Literal["exited", "signalled", "lost", "refused"]
    """`lost`: its supervisor died or never came. `refused`: nothing was started (see `LaunchError`)."""
    status: int = 0
    """Exit code, or the number of the signal."""
    text: str = ""
    """What a person should know: `out of memory (limit 512 MiB)`, why it was lost."""
    at_s: float = 0.0
    """Seconds since 1970."""
    asked: bool = False
    """Whether it was asked to end: by us, or by whoever else may (a drained node, more urgent pods)."""
    never: bool = False
    """Nothing was ever started: the server that was to do it has died."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A launch has a process."""

    launch: str
    pid: int
    """Of the worker."""
    how: Literal["forked", "plain", "adopted"]
    why: str = ""
    """Why it is not a fork, where one would have been possible."""


News: TypeAlias = Started | Exit


class Backend(Protocol):
    """All methods are called from one event loop, and `tell` is called in it."""

    async def open(self, known: Iterable[str], tell: Callable[[News], None]) -> None:
        """Begin. For each known launch, which has no recorded end: adopt what lives (`Started`), report what does not
        (`Exit`). Whatever else is found of earlier launches is ended."""

    def warm_up(self, env: Mapping[str, str]) -> None:
        """Make ready, in the background, what launches with such variables will need."""

    def nodes(self) -> tuple[Node, ...]: ...

    async def launch(self, launch: Launch) -> None:
        """Start it; `Started` follows, and `Exit` at its end. Raises `LaunchError` when nothing was started."""

    def attends(self, launch: str) -> bool:
        """Whether anything stands behind this launch: a start under way, a process that is watched, an end that is
        still to be told. What was left alone is looked after again."""

    def terminate(self, launch: str) -> None:
        """Ask it to end: SIGTERM to the worker alone. An unknown or ended launch is no error."""

    def kill(self, launch: str) -> None:
        """End all of its processes."""

    def forget(self, launch: str) -> None:
        """Its end is recorded: remove what is kept of it (not its log)."""

    async def close(self) -> None:
        """Let go of everything without ending it: the workers go on, and the next `open` adopts them."""
