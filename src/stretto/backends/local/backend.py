"""One machine as a backend: worker processes, each with a supervisor that outlives the server.

A launch has exactly one end, whoever dies on the way. What makes it so is on disk (`runs.py`); here is what a living
server does about it: it starts supervisors, warm or plain, passes orders on, and watches each supervisor by a process
descriptor. When one ends, the exit is read; when there is none the supervisor was killed, and the server ends what is
left and writes the exit itself. A restarted server does the same with all launches it is told of, and finds those
whose supervisor lives by the lock that it holds.

Nothing here waits in the event loop: files are synced, and fork servers asked, in threads. The caller holds the data
directory (`runs.serving`); supervisors that see it free for `away_s` stop their workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from stretto import accounts, jobfiles
from stretto.accounts import AccountRefused, Identity
from stretto.backends.local import containment, supervisor
from stretto.backends.local.forkserver import ForkFailed, ForkServer, ForkServers
from stretto.backends.local.machine import Machine
from stretto.backends.local.runs import Running, Runs, lost, own_log, spawn
from stretto.backends.protocol import Exit, Launch, LaunchError, LaunchFault, News, Node, Started
from stretto.tasks import aside

T = TypeVar("T")

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
_LONGEST_REPORT = 1 << 16
_TRY_AGAIN_S = 1.0
"""After the machine had no room for what must be done."""
_THREADS = 8
_LOOKS_OF_A_JOB, _MOST_LOOKS = 2, 256
_PATIENCE_S, _LAST_S = 30.0, 10.0


@dataclass(eq=False)
class _Run:
    """What a living server knows of a launch."""

    launch: str
    pid: int = 0
    """Of the supervisor, once there is one to watch."""
    pidfd: int = -1
    listens: bool = False
    """Whether the supervisor is so far that a signal is an order to it."""
    orders: list[str] = field(default_factory=list)
    over: bool = False
    silent: bool = False
    """Nobody knows of it but us: it is ended and removed, and nothing is told."""
    work: asyncio.Task[None] | None = None
    """What starts it, or finds out what became of it."""

    @property
    def attended(self) -> bool:
        """Whether anybody will notice its end."""
        return self.pidfd != -1 or (self.work is not None and not self.work.done())


class LocalBackend:
    """See `stretto.backends.protocol.Backend`."""

    def __init__(
        self,
        folder: Path,
        nodes: tuple[Node, ...],
        *,
        machine: Machine | None = None,
        warm: bool = True,
        away_s: float = 600.0,
        log_mib: int = 256,
        preload: tuple[str, ...] = ("torch",),
        allow: Iterable[str] = containment.EVERYTHING,
        stuck_s: float = 10.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.time,  # noqa: TID251
    ) -> None:
        """`machine` knows what the nodes' devices are; without it they go by number. `allow` is what of the control
        groups may be used. A supervisor that has not obeyed a kill for `stuck_s` is killed itself. A file system of the
        user's that has not answered for `patience_s` is taken to hang."""
        self.runs = Runs(folder)
        self.means = containment.survey(self.runs.group_name, allow)
        """What can be limited here, and how launches are ended."""
        self._machine = Machine.of(nodes) if machine is None else machine
        self._nodes = nodes
        self._away_s = away_s
        self._log_bytes = log_mib << 20
        self._stuck_s = stuck_s
        self._patience_s = patience_s
        self._rooms: weakref.WeakValueDictionary[int, asyncio.Semaphore] = weakref.WeakValueDictionary()
        """By job: room for threads that look at files of its user's."""
        self._all_room = asyncio.Semaphore(_MOST_LOOKS)
        self._clock = clock
        self._forks = ForkServers(preload=preload) if warm else None
        self._pool = ThreadPoolExecutor(_THREADS, "stretto-backend")
        self._tasks: set[asyncio.Task[None]] = set()
        self._known: dict[str, _Run] = {}
        self._tell: Callable[[News], None] = lambda _: None

    async def open(self, known: Iterable[str], tell: Callable[[News], None]) -> None:
        """Adopt what lives, report what does not. Launches that nobody knows of are ended in the background."""
        self._tell = tell
        await self._start_threads()
        wanted = list(dict.fromkeys(known))
        found = await self._in_thread(self.runs.all)
        for launch in wanted:
            self._known[launch] = _Run(launch)
        for launch in set(found) - set(wanted):
            self._known[launch] = _Run(launch, silent=True)
        await self._in_thread(lambda: containment.sweep(self.means, {*wanted, *found}, self.runs.owner))
        await asyncio.gather(*(self._attend(run) for run in list(self._known.values())))

    def warm_up(self, env: Mapping[str, str]) -> None:
        """Let the interpreter that we run in import what training needs: most jobs use the same."""
        forks = self._forks
        if forks is not None:
            self._task(self._in_thread(lambda: _begin(forks, env)))

    def nodes(self) -> tuple[Node, ...]:
        return self._nodes

    async def launch(self, launch: Launch) -> None:
        """Start it, once. What was begun is completed though the caller be cancelled."""
        if launch.id in self._known:
            return
        run = self._known[launch.id] = _Run(launch.id)
        run.work = self._task(self._launch(run, launch))
        await asyncio.shield(run.work)

    def attends(self, launch: str) -> bool:
        run = self._known.get(launch)
        if run is None or run.over:
            return False
        if not run.attended:
            _log.warning("nobody looked after launch %s; it is looked for", launch)
            self._attend(run)
        return True

    def terminate(self, launch: str) -> None:
        self._order(launch, "terminate")

    def kill(self, launch: str) -> None:
        run = self._known.get(launch)
        if run is not None and not run.over and "kill" not in run.orders:
            self._order(launch, "kill")
            asyncio.get_running_loop().call_later(self._stuck_s, self._kill_stuck, run)

    def forget(self, launch: str) -> None:
        run = self._known.get(launch)
        if run is not None and run.over:
            del self._known[launch]
            self._task(self._in_thread(lambda: self._remove(launch)))

    async def close(self) -> None:
        """Let go of everything. What is being started or settled is waited for, and then runs on; not for ever, where
        the machine has no room for it: the next server finds it."""
        while self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=_LAST_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in self._known.values():
            self._unwatch(run)
        self._known.clear()
        if self._forks is not None:
            await self._in_thread(self._forks.close)
        await self._in_thread(lambda: containment.remove_parents(self.means))
        self._pool.shutdown()

    # Starting.

    async def _launch(self, run: _Run, launch: Launch) -> None:
        """Whatever happens, this ends with a process that is watched, an exit that is told, or a `LaunchError`."""
        try:
            found = await self._looked_at(launch)
            launch, env, who = found.launch, found.env, found.who
            await self._in_thread(lambda: self._prepare(launch, env, who))
        except BaseException:
            del self._known[run.launch]
            raise
        server, why = await self._warm_server(launch, env, who, found.python)
        try:
            for order in run.orders:
                self.runs.order(launch.id, order)
            out, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            # Nobody was asked to start anything yet.
            del self._known[launch.id]
            await self._in_thread(lambda: self._remove(launch.id))
            raise LaunchFault(_described(error)) from None
        word: dict[str, Any] = {}
        try:
            try:
                how, why = await self._in_thread(lambda: self._start(run, launch, env, server, why, into))
            except OSError:
                os.close(out)
                raise
            finally:
                os.close(into)
            word = await _line(out)
            if "refused" in word:
                await self._refused(run, word)
            run.listens = bool(word)
            self._watch(run)
        except (OSError, ValueError) as error:
            # The machine has no room for another process, or for a look at it; whether one came into being is for the
            # lock to say.
            _log.warning("launch %s: %s", launch.id, error)
            await self._settle(run)
            return
        if word.get("pid"):
            if word.get("how") == "plain" and how == "forked":
                how, why = "plain", str(word.get("why", ""))
            self._tell(Started(launch=run.launch, pid=word["pid"], how=how, why=why))

    async def _looked_at(self, launch: Launch) -> _Found:
        """Everything that can be known to be wrong before anything is written. The worker's environment with it."""
        if launch.node not in {node.name for node in self._nodes}:
            raise LaunchError(f"there is no node {launch.node!r}")
        who = await self._in_thread(lambda: _identity(launch))
        own = {} if who is None else who.variables
        env = {**own, **launch.env, **self._machine.variables(launch), containment.MARK: self.runs.mark(launch.id)}
        if self._machine.quota_milli(launch) and not self.means.cpu:
            # Nobody enforces it here: who can pace itself does (`stretto.runtime.pacer`).
            env["STRETTO_CPU_SHARE"] = f"{self._machine.quota_milli(launch) / 1000:g}"
        try:
            return await self._beside(launch.job, lambda: _look(launch, env, self.runs.data, who))
        except TimeoutError:
            text = f"its working directory {launch.cwd}, or a folder of its PATH, does not answer"
            raise LaunchFault(text, hint="is it on a file system that is away?") from None

    async def _beside(self, job: int, work: Callable[[], T]) -> T:
        """Where the user's own files are looked at: in a thread of its own, since their file system may hang for ever,
        and in few of them for one job. Raises `TimeoutError`; then the thread is left to itself, and takes that job's
        room until it comes back."""
        loop, room, taken = asyncio.get_running_loop(), self._room_of(job), 0

        def worked() -> T:
            try:
                return work()
            finally:
                with contextlib.suppress(RuntimeError):  # The loop has ended.
                    loop.call_soon_threadsafe(_release, room, self._all_room)

        async with asyncio.timeout(self._patience_s):
            try:
                for each in (room, self._all_room):
                    await each.acquire()
                    taken += 1
            except BaseException:
                _release(*(room, self._all_room)[:taken])
                raise
            return await aside(worked)

    def _room_of(self, job: int) -> asyncio.Semaphore:
        room = self._rooms.get(job)
        if room is None:
            room = self._rooms[job] = asyncio.Semaphore(_LOOKS_OF_A_JOB)
        return room

    def _prepare(self, launch: Launch, env: dict[str, str], who: Identity | None) -> None:
        """In a thread: write the run directory."""
        try:
            self._write(launch, env, who)
        except OSError as error:
            raise LaunchFault(_described(error, str(self.runs.folder))) from None

    def _write(self, launch: Launch, env: dict[str, str], who: Identity | None) -> None:
        quota_milli = self._machine.quota_milli(launch)
        words = {
            "away_s": self._away_s,
            "log_bytes": self._log_bytes,
            "box": containment.box(self.means, launch.id, quota_milli, launch.memory_mib, mark=env[containment.MARK]),
        }
        try:
            self.runs.create(launch, env, self._machine.affinity(launch), who, **words)
        except ValueError as error:
            raise LaunchError(str(error)) from None

    async def _warm_server(
        self, launch: Launch, env: dict[str, str], who: Identity | None, python: str
    ) -> tuple[ForkServer | None, str]:
        """The server that can fork this worker, or why there is none. One that still imports is waited for: the worker
        itself would need as long."""
        if self._forks is None or not launch.warm:
            return None, "forks are switched off" if self._forks is None else "no fork was asked for"
        if not python:
            return None, f"{launch.command[0]} is no Python interpreter"
        forks = self._forks
        while True:
            try:
                server, why = await self._beside(launch.job, lambda: _willing(forks, python, launch, env, who))
            except Exception as error:
                # Without one it only starts later.
                _log.warning("no fork server for %s", launch.id, exc_info=error)
                return None, f"the fork server cannot be asked: {error}"
            if server is None or server.ready or server.failure:
                return (None, why) if why else (server, "")
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _start(
        self, run: _Run, launch: Launch, env: dict[str, str], server: ForkServer | None, why: str, ready: int
    ) -> tuple[Any, str]:
        """In a thread: start the supervisor, and say how and why so."""
        path = self.runs.path(launch.id)
        if server is not None and server.who is not None:
            return self._start_tended(run, launch, env, server, ready)
        if server is not None:
            try:
                with open(own_log(path), "a") as log, open(os.devnull) as nothing:
                    fds = nothing.fileno(), log.fileno(), log.fileno(), ready
                    run.pid, run.pidfd = server.supervise(launch.command, env, launch.cwd, str(path), fds)
                return "forked", ""
            except ForkFailed as error:
                why = error.message
        run.pid = spawn(path, ready, why)
        run.pidfd = os.pidfd_open(run.pid)
        return "plain", why

    def _start_tended(
        self, run: _Run, launch: Launch, env: dict[str, str], server: ForkServer, ready: int
    ) -> tuple[Any, str]:
        """The supervisor is a program of ours, and asks the fork server, which is somebody else's, itself."""
        path, connection, request, why = self.runs.path(launch.id), None, -1, ""
        try:
            connection, request = server.tended(launch.command, env, launch.cwd)
        except ForkFailed as error:
            why = error.message
        try:
            asking = () if connection is None else (connection.fileno(), request)
            run.pid = spawn(path, ready, why, asking)
        finally:
            if connection is not None:
                connection.close()
                os.close(request)
        run.pidfd = os.pidfd_open(run.pid)
        return "plain" if why else "forked", why

    async def _refused(self, run: _Run, word: Mapping[str, Any]) -> None:
        """The supervisor could not start the worker; nothing may be left of the attempt when the caller hears it."""
        await _readable(run.pidfd)
        self._unwatch(run)
        _reap(run.pid)
        run.over = True
        del self._known[run.launch]
        await self._in_thread(lambda: self._remove(run.launch))
        raise (LaunchFault if word.get("passing") else LaunchError)(word["refused"])

    # Watching.

    def _watch(self, run: _Run) -> None:
        asyncio.get_running_loop().add_reader(run.pidfd, self._ended, run)
        if run.orders:
            self._signal(run, supervisor.WAKE)

    def _unwatch(self, run: _Run) -> None:
        if run.pidfd != -1:
            asyncio.get_running_loop().remove_reader(run.pidfd)
            os.close(run.pidfd)
            run.pidfd, run.listens = -1, False

    def _ended(self, run: _Run) -> None:
        """A supervisor has."""
        self._unwatch(run)
        _reap(run.pid)
        # What it has written may be anything by now: it is looked at in a thread.
        self._attend(run)

    def _attend(self, run: _Run) -> asyncio.Task[None]:
        run.work = self._task(self._settle(run))
        return run.work

    async def _settle(self, run: _Run) -> None:
        """Find out about a launch whose supervisor we do not watch: watch it, or report its end. A machine that has no
        room for the look, or for the exit that we have to write, is asked until it has."""
        exit, trouble = None, ""
        while exit is None:
            wait_s = _LOOK_AGAIN_S
            try:
                self._unwatch(run)
                if self._adopt(run, await self._in_thread(lambda: self._find_running(run.launch))):
                    return
                # None: it has a supervisor, which has not yet said who it is, or is just going.
                exit = await self._in_thread(lambda: self._find_exit(run.launch))
            except OSError as error:
                wait_s = _TRY_AGAIN_S
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("launch %s: %s; it is tried again", run.launch, error)
            if exit is None:
                await asyncio.sleep(wait_s)
        self._over(run, exit)

    def _find_exit(self, launch: str) -> Exit | None:
        """In a thread: the exit that is written, or the one that we have to write. None: its supervisor lives."""
        try:
            return self.runs.exit(launch) or self.runs.give_up(launch, self._clock())
        except (ValueError, TypeError, LookupError, jobfiles.Spoilt) as error:
            return lost(launch, str(error), self._clock())
        except OSError as error:
            if jobfiles.passes(error):
                raise
            return lost(launch, _described(error), self._clock())

    def _find_running(self, launch: str) -> Running | None:
        """In a thread: who runs, as far as is written."""
        try:
            return None if self.runs.exit(launch) else self.runs.running(launch)
        except (ValueError, TypeError, LookupError):
            return None

    def _adopt(self, run: _Run, running: Running | None) -> bool:
        if running is None:
            return False
        try:
            pidfd = os.pidfd_open(running.pid)
        except OSError:
            return False
        now = containment.look_up(running.pid)
        if now is None or now.start != running.start:
            os.close(pidfd)
            return False
        run.pid, run.pidfd, run.listens = running.pid, pidfd, True
        self._watch(run)
        if run.silent:
            self.kill(run.launch)
        else:
            self._tell(Started(launch=run.launch, pid=running.worker, how="adopted"))
        return True

    def _over(self, run: _Run, exit: Exit) -> None:
        run.over = True
        if run.silent:
            self.forget(run.launch)
        else:
            self._tell(exit)

    # Ordering.

    def _order(self, launch: str, what: str) -> None:
        run = self._known.get(launch)
        if run is None or run.over:
            return
        run.orders.append(what)
        self._pass_on(run, what)

    def _pass_on(self, run: _Run, what: str) -> None:
        if run.over:
            return
        try:
            self.runs.order(run.launch, what)
        except OSError:  # The disk is full. A restarted server will not know that it had asked.
            if run.pidfd == -1 or not run.listens:
                asyncio.get_running_loop().call_later(_TRY_AGAIN_S, self._pass_on, run, what)
            self._signal(run, supervisor.ORDERED[what])
        self._signal(run, supervisor.WAKE)

    def _signal(self, run: _Run, number: int) -> None:
        """A supervisor that does not listen yet looks for orders by itself before it starts anything."""
        if run.pidfd != -1 and run.listens:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.pidfd, number)

    def _kill_stuck(self, run: _Run) -> None:
        if not run.over and run.pidfd != -1:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(run.pidfd, signal.SIGKILL)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start_threads(self) -> None:
        """All of them now: one that could not be started when it is needed would leave its work to chance."""
        together = threading.Barrier(_THREADS)
        await asyncio.gather(*(self._in_thread(lambda: together.wait(_PATIENCE_S)) for _ in range(_THREADS)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _remove(self, launch: str) -> None:
        """In a thread. What stays is found by the next server."""
        try:
            self.runs.remove(launch)
        except OSError as error:
            _log.warning("%s cannot be removed: %s", launch, error)


class _Found(NamedTuple):
    """What there is to know before a launch is written down."""

    launch: Launch
    env: dict[str, str]
    python: str
    """The interpreter that its command names; empty when it is another program."""
    who: Identity | None
    """Whose process it will be, if not ours."""


def _look(launch: Launch, env: dict[str, str], data: Path, who: Identity | None) -> _Found:
    """In a thread that may hang. A `python` that is nowhere is ours."""
    with accounts.acting(who):
        if launch.command[:1] in (("python",), ("python3",)) and not _program(launch, env):
            launch = msgspec.structs.replace(launch, command=(sys.executable, *launch.command[1:]))
        python = _interpreter(launch, env) if launch.command else ""
    _check(launch, env, data, who)
    return _Found(launch, env, python, who)


def _release(*rooms: asyncio.Semaphore) -> None:
    for room in rooms:
        room.release()


def _identity(launch: Launch) -> Identity | None:
    """Whose process it will be, if not ours; raises `LaunchError`."""
    if launch.account is None:
        return None
    try:
        return accounts.identity(launch.account)
    except AccountRefused as error:
        raise LaunchError(error.message, hint=error.hint) from None


def _check(launch: Launch, env: dict[str, str], data: Path, who: Identity | None) -> None:
    """Find out what would keep it from starting; raises `LaunchError`."""
    # First of all: a helper runs in its job's folder.
    if launch.folder:
        accounts.own_folder(Path(launch.folder), root=data, who=who)
    root = _make_log_folder(launch, str(data))
    if not launch.command:
        raise LaunchError("there is no command to run", hint="give a program and its arguments")
    if who is None:
        _look_for_program(launch, env)
    elif why := accounts.unreachable(Path(launch.folder or data), who):
        hint = "start the server with a --data that everybody may pass through"
        raise LaunchError(f"the account {who.name} cannot reach {launch.folder}: {why}", hint=hint)
    try:
        fd = jobfiles.opened(launch.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, root=root)
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, 0o600)
            if who is not None:
                os.fchown(fd, who.uid, who.gid)
        os.close(fd)
    except OSError as error:
        raise _unwritable(launch, error) from None


def _look_for_program(launch: Launch, env: dict[str, str]) -> None:
    """Of one that runs as ourselves. What another account would find is not for us to look up: its own process does,
    once it has that account's rights."""
    if not os.path.isdir(launch.cwd):
        raise LaunchError(f"there is no folder {launch.cwd} to run in", hint="give an existing working directory")
    if not os.access(launch.cwd, os.X_OK):
        raise LaunchError(f"the folder {launch.cwd} may not be entered", hint="change its permissions")
    if not _program(launch, env):
        name = launch.command[0]
        raise LaunchError(f"there is no program {name!r}", hint="give its full path, or put its folder on PATH")


def _described(error: OSError, where: str = "") -> str:
    place = error.filename or where
    return f"{place}: {error.strerror or error}" if place else str(error.strerror or error)


def _make_log_folder(launch: Launch, data: str) -> str | None:
    """And the folder on the way to it that no job can replace."""
    root, folder = supervisor.log_root(launch.log, data), os.path.dirname(launch.log)
    try:
        if root is not None:
            jobfiles.make_folder(folder, root=root)
        else:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise _unwritable(launch, error) from None
    return root


def _unwritable(launch: Launch, error: OSError) -> LaunchError:
    kind = LaunchFault if jobfiles.passes(error) else LaunchError
    return kind(f"the log {launch.log} cannot be written: {error.strerror}")


def _program(launch: Launch, env: dict[str, str]) -> str | None:
    name = launch.command[0]
    path = os.path.join(launch.cwd, name) if "/" in name else name
    return shutil.which(path, path=env.get("PATH", os.defpath))


def _interpreter(launch: Launch, env: dict[str, str]) -> str:
    """The Python that the command names; empty when it is another program."""
    found = _program(launch, env)
    name = os.path.basename(launch.command[0])
    return found if found and (name == "python" or name.startswith(("python3", "python2"))) else ""


def _begin(forks: ForkServers, env: Mapping[str, str]) -> None:
    with contextlib.suppress(ForkFailed):
        forks.get(sys.executable, env)


def _willing(
    forks: ForkServers, python: str, launch: Launch, env: dict[str, str], who: Identity | None
) -> tuple[ForkServer | None, str]:  # fmt: skip
    """The fork server for this worker, and why it would not make it."""
    try:
        server = forks.get(python, env, who)
    except ForkFailed as error:
        return None, error.message
    return server, server.refusal(launch.command, env, launch.cwd)


def _reap(pid: int) -> None:
    """If it was a child of ours; one that a server before us started, or a fork, is somebody else's."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, _resolve, future)
    try:
        await future
    finally:
        loop.remove_reader(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _line(fd: int) -> dict[str, Any]:
    """What a supervisor reports when it has started; empty when it died before, or says what none would. Closes the
    descriptor."""
    data = b""
    try:
        while not data.endswith(b"\n"):
            await _readable(fd)
            if not (more := os.read(fd, 65536)) or len(data) > _LONGEST_REPORT:
                return {}
            data += more
    finally:
        os.close(fd)
    return _report(data)


def _report(line: bytes) -> dict[str, Any]:
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    pid, refused = (words.get("pid", 0), words.get("refused", "")) if isinstance(words, dict) else (None, None)
    return words if type(pid) is int and isinstance(refused, str) else {}
