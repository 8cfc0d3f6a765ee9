"""The parent of one worker: it outlives the server, and writes down how the worker ended.

It is either a program of its own (`boot` in `runs.py`), which executes the worker's command, or a fork of a warm
interpreter, which forks the worker. Everything between it and the server goes through the run directory:

Where the worker is another account's than the server's, the supervisor is always a program of its own, and no user's
code ever runs in it. The worker has its account before its program starts; or it is made by a fork server of its
account, whose word on it (`forkhost.py`, `tend`) is believed only as far as it concerns that account's processes.

launch.json     what to start; complete before the supervisor is started
lock            held by the supervisor as long as it lives. Who else gets it must write `exit.json` before letting go
running.json    the supervisor and its worker, by process number and start time
orders          what the server wants, a line each (`terminate`, `kill`); SIGUSR1 says that there is a new one
tree.json       without control groups: its descendants as last seen, by process number and start time
exit.json       how it ended; written when nobody is left, and never changed
supervisor.log  what the supervisor itself had to complain about

The worker dies with its supervisor, and the supervisor ends whatever the worker leaves behind. When no server has held
the data directory's lock for a while the worker is asked to end, and after a grace period killed.

This file is loaded by path into interpreters where Stretto need not be installed: standard library only, and no thread
before the worker was forked.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import signal
import sys
import time
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING or __package__:
    from stretto import jobfiles
    from stretto.backends.local import containment
else:

    def _beside(name: str) -> Any:
        import importlib.util

        here = os.path.dirname(os.path.abspath(__file__))
        spec = importlib.util.spec_from_file_location(
            f"_stretto_{os.path.basename(name)}", os.path.normpath(os.path.join(here, f"{name}.py"))
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    containment, jobfiles = _beside("containment"), _beside("../../jobfiles")

LAUNCH, LOCK, RUNNING, ORDERS, EXIT = "launch.json", "lock", "running.json", "orders", "exit.json"
TREE, OWN_LOG = "tree.json", "supervisor.log"
WAKE = signal.SIGUSR1
ORDERED = {"terminate": signal.SIGTERM, "kill": signal.SIGUSR2}
"""The same orders as signals, for when the disk is too full to write one down."""

TICK_S = 1.0
"""How often it looks for a server, and at the size of the log."""
_ON_THE_WAY_S = 0.25
"""How long a shell may take from one program to the next."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_F_SETPIPE_SZ, _F_SETSIG = 1031, 10
_ANSWER_S, _FAMILY_S = 30.0, 5.0
"""For a fork server to make a worker; for the parent that it gave it to end with all of its family."""
_WIDE = 1 << 20
_GATHER_S = 0.002
_LAST_WORDS_S = 5.0
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_BLOCK = 4096
_MOST_BYTES = 1 << 24
"""Of one of its files: what a process may be given as arguments and variables is less, however it is written."""

_AWAITED = (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, WAKE, *ORDERED.values())

_libc = ctypes.CDLL(None, use_errno=True)


def supervise(folder: str, ready: int, how: str, why: str = "", asking: tuple[int, int] | None = None) -> None:
    """Be the supervisor of this run directory. Returns only in a worker that is to be a fork (`how` is `forked`).

    The descriptor `ready` gets one line when the worker runs, or when it could not be started. `asking`: a connection
    to the fork server that is to make the worker, and the request.
    """
    try:
        lock = take(folder)
        if lock < 0 or os.path.exists(os.path.join(folder, EXIT)):
            os._exit(0)
        launch = read(folder, LAUNCH)
        if launch is None:
            os._exit(0)
        os.chdir("/")
        is_worker = Supervisor(folder, launch, lock, ready, how, why, asking).run()
    except BaseException:
        with contextlib.suppress(BaseException):
            import traceback

            traceback.print_exc()
        os._exit(1)
    if not is_worker:
        os._exit(0)


def take(folder: str) -> int:
    """Take the lock of a run directory: its descriptor, or -1 when somebody has it or there is no such directory."""
    try:
        fd: int = jobfiles.opened(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT, root=os.path.dirname(folder))
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return -1
    return fd


def read(folder: str, name: str) -> dict[str, Any] | None:
    """The contents of one of its files; None when it is not there, or was never completed. A machine that has no room
    to read it, which says nothing of the file, is an `OSError`."""
    try:
        words = json.loads(jobfiles.read(os.path.join(folder, name), _MOST_BYTES, root=os.path.dirname(folder)))
    except OSError as error:
        if jobfiles.passes(error):
            raise
        return None
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, dict) else None


def write(folder: str, name: str, words: dict[str, Any], durable: bool = True) -> None:
    """Put a file there, all of it or nothing; durable: it is still there after the machine has lost its power."""
    part = os.path.join(folder, f".{name}.{os.getpid()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "w") as file:
            json.dump(words, file)
            file.flush()
            if durable:
                os.fsync(fd)
        _put_in_place(part, os.path.join(folder, name))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    if durable:
        sync(folder)


def complain(text: str) -> None:
    """Nobody dies of a log that cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _put_in_place(part: str, path: str) -> None:
    """Whatever is there now: a folder in the way of an exit would keep it from ever being known."""
    try:
        os.replace(part, path)
    except IsADirectoryError:
        os.rename(path, f"{part}.aside")
        os.replace(part, path)


def sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def become(account: dict[str, Any]) -> None:
    """Be this account from now on, and for good; nothing of its has been opened, looked up or run before."""
    os.setgroups(account["groups"])
    os.setresgid(account["gid"], account["gid"], account["gid"])
    os.setresuid(account["uid"], account["uid"], account["uid"])


def log_root(log: str, data: str) -> str | None:
    """The folder on the way to a log that only the server can replace; None: the log's own is trusted."""
    return data if log.startswith(data + os.sep) else None


def ended(status: int) -> dict[str, Any]:
    """How a process ended, from what `wait` says."""
    if os.WIFSIGNALED(status):
        return {"how": "signalled", "status": os.WTERMSIG(status)}
    return {"how": "exited", "status": os.WEXITSTATUS(status)}


class Supervisor:
    """One launch, from the lock to the exit."""

    def __init__(
        self,
        folder: str,
        launch: dict[str, Any],
        lock: int,
        ready: int,
        how: str,
        why: str,
        asking: tuple[int, int] | None = None,
    ) -> None:
        self.folder = folder
        self.launch = launch
        self.lock = lock
        self.ready = ready
        self.how = how
        self.why = why
        self.account: dict[str, Any] | None = launch.get("account")
        """Whose process the worker will be, if not ours."""
        self.box = containment.Box(launch["box"])
        self.worker = 0
        self.asking = asking
        self.family: Family | None = None
        """Of a worker that is no child of ours."""
        self.status: int | None = None
        self.text = ""
        self.asked = False
        self.orders_read = 0
        self.kill_at_s: float | None = None
        self.server_seen_s = time.monotonic()
        self.unwritten: dict[str, Any] | None = None
        """What is to be written down about us, as long as it could not be."""
        self.log = -1
        self.pump: Pump | None = None
        self.tree: list[tuple[int, int]] = []

    def run(self) -> bool:
        """True in the worker, False in the supervisor when all is over."""
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if orders := self._next_orders():
            self.asked = True
            number = signal.SIGKILL if "kill" in orders else signal.SIGTERM
            self._finish({"how": "signalled", "status": int(number)}, "it was asked to end before it had started")
            self._tell({"pid": 0})
            return False
        problem, passing = self._start()
        if problem:
            self._refuse(problem, passing)
            return False
        if not self.worker:
            return True
        self._announce()
        if self.how == "forked" or self.family is not None:
            self._take_in()
        self._watch()
        self._end_tree()
        if self.pump is not None:
            with contextlib.suppress(OSError):  # Its end is told, whatever becomes of its log.
                self.pump.finish()
        self._finish(ended(self.status or 0), self.box.out_of_memory() or self.text)
        return False

    def _start(self) -> tuple[str, bool]:
        """Fork the worker; what kept it from running, if anything did, and whether that may pass. In the worker
        `self.worker` is 0."""
        parent = os.getpid()
        try:
            self.box.make()
            root = log_root(self.launch["log"], os.path.dirname(self.launch["server_lock"]))
            self.log = jobfiles.opened(self.launch["log"], os.O_RDWR | os.O_APPEND | os.O_CREAT, root=root)
            problems, into = os.pipe2(os.O_CLOEXEC)
            output, says = _wide_pipe()
            if self.account is not None:  # Scripts open /dev/stderr by its name.
                os.fchown(says, self.account["uid"], self.account["gid"])
            self.worker = self._ask_for_fork(says) or os.fork()
        except OSError as error:
            return f"{error.filename or 'a process'}: {error.strerror}", jobfiles.passes(error)
        if self.worker == 0:
            os.close(problems)
            os.close(output)
            self._become_worker(parent, into, says)
            return "", False
        os.close(into)
        os.close(says)
        if self.family is not None:
            self.family.begin()
        with open(problems, "rb") as file:
            number, _, problem = file.read().decode(errors="replace").partition(" ")
        passing = number.isdecimal() and jobfiles.passes(OSError(int(number), problem))
        if not problem:
            try:
                self.pump = Pump(output, self.log, self.launch["log_bytes"])
                return "", False
            except RuntimeError as error:  # No more threads.
                problem, passing = str(error), True
                self._signal_worker(signal.SIGKILL)
        os.close(output)
        if self.family is not None:
            self._end_tree()
        else:
            os.waitpid(self.worker, 0)
        return problem, passing

    def _ask_for_fork(self, says: int) -> int:
        """The process number of a worker that another account's fork server has made for us; 0: there is none, and we
        start it ourselves."""
        if self.asking is None or self.account is None:
            return 0
        connection, request = self.asking
        try:
            self.family = Family.asked_for(connection, request, says, self.account["uid"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            self.why = f"the fork server could not fork: {error}"[:300]
            return 0
        finally:
            os.close(request)
        if self.launch["affinity"]:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self.family.worker, self.launch["affinity"])
        return self.family.worker

    def _signal_worker(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.family is not None:
                signal.pidfd_send_signal(self.family.worker_fd, number)
            else:
                os.kill(self.worker, number)

    def _become_worker(self, parent: int, into: int, says: int) -> None:
        """In the fork. Returns when the rest is done by the warm interpreter."""
        try:
            os.close(self.lock)
            os.close(self.ready)
            os.setsid()
            self._apply_limits()
            self._connect_streams(says)
            if self.account is not None:
                become(self.account)
            # A change of account would take it back.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            os.chdir(self.launch["cwd"])
            if self.how == "forked":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
                os.close(into)
                return
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; programs do not expect that.
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
            os.execvpe(self.launch["command"][0], self.launch["command"], self.launch["env"])
        except OSError as error:
            text = f"{error.errno} {error.filename or self.launch['command'][0]}: {error.strerror}"
            os.write(into, text.encode())
            os._exit(127)

    def _apply_limits(self) -> None:
        if self.how != "forked":
            self.box.enter()
        if self.launch["affinity"]:
            with contextlib.suppress(OSError):  # Cores come and go.
                os.sched_setaffinity(0, self.launch["affinity"])
        for which, limits in self.launch["limits"]:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(which, tuple(limits))
        os.umask(self.launch["umask"])

    def _connect_streams(self, says: int) -> None:
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for number, fd in enumerate((nothing, says, says)):
            os.dup2(fd, number)
        for fd in (nothing, says, self.log):
            os.close(fd)

    def _announce(self) -> None:
        us, worker = containment.look_up(os.getpid()), containment.look_up(self.worker)
        words = {
            "pid": os.getpid(),
            "start": us.start if us else 0,
            "worker": self.worker,
            "worker_start": worker.start if worker else 0,
            "how": self.how,
            "why": self.why,
        }
        self.unwritten = words
        self._write_down()
        how = "plain" if self.family is None else "forked"
        self._tell({"pid": self.worker, "how": how, "why": self.why} if self.asking else {"pid": self.worker})

    def _write_down(self) -> None:
        """Where the disk is full the server has it from us, and the next one waits until there is room."""
        if self.unwritten is not None:
            with contextlib.suppress(OSError):
                write(self.folder, RUNNING, self.unwritten, durable=False)
                self.unwritten = None

    def _take_in(self) -> None:
        """Put the worker into its groups while it runs: the kernel takes its time, which a warm start has not."""
        try:
            self.box.take_in(self.worker)
        except OSError as error:
            complain(f"{error.filename}: {error.strerror}")

    def _tell(self, words: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(self.ready, json.dumps(words).encode() + b"\n")
        os.close(self.ready)

    def _refuse(self, problem: str, passing: bool) -> None:
        self._finish({"how": "lost" if passing else "refused", "status": 0}, problem)
        self._tell({"refused": problem, "passing": passing})

    def _watch(self) -> None:
        """Wait for the worker's end, and do meanwhile what there is to do."""
        self._reap()
        tick_s = time.monotonic() + TICK_S
        while self.status is None:
            wanted_s = tick_s if self.kill_at_s is None else min(tick_s, self.kill_at_s)
            found = signal.sigtimedwait(_AWAITED, max(0.0, wanted_s - time.monotonic()))
            self._reap()
            self._obey([order for order, number in ORDERED.items() if found is not None and found.si_signo == number])
            self._obey(self._next_orders())
            now_s = time.monotonic()
            if now_s >= tick_s:
                tick_s = now_s + TICK_S
                for chore in (self._write_down, self._look_for_server, self._bound_log, self._note_tree):
                    try:
                        chore()
                    except OSError as error:  # The worker does not die of what fails here.
                        complain(f"{error.filename or chore.__name__}: {error.strerror}")
            if self.kill_at_s is not None and now_s >= self.kill_at_s:
                self.kill_at_s = None
                self._end_tree()

    def _next_orders(self) -> list[str]:
        try:
            text: bytes = jobfiles.read(os.path.join(self.folder, ORDERS), _MOST_BYTES)[self.orders_read :]
        except OSError:
            return []
        text = text[: text.rfind(b"\n") + 1]
        self.orders_read += len(text)
        return [order for order in text.decode(errors="replace").split() if order in ORDERED]

    def _obey(self, orders: list[str]) -> None:
        self.asked = self.asked or bool(orders)
        if "kill" in orders:
            self._end_tree()
        elif orders and self.status is None:
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        """The worker alone: one that saves its state may still need its data loaders. A shell is not what runs: there
        its programs are asked too."""
        programs = self._programs() if self.launch.get("shell") else []
        for pid in (self.worker, *programs) if self.status is None else ():
            if pid == self.worker:
                self._signal_worker(signal.SIGTERM)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _programs(self) -> list[int]:
        """What the shell runs. One that is just about to run something is given a moment: on the way there it would
        keep the word to itself, and the program would never hear of it."""
        deadline_s = time.monotonic() + _ON_THE_WAY_S
        while True:
            try:
                programs = [each.pid for each in containment.processes().values() if each.parent == self.worker]
            except OSError:
                return []
            on_the_way = not programs or _command_line(self.worker) in map(_command_line, programs)
            if not on_the_way or time.monotonic() > deadline_s:
                return programs
            signal.sigtimedwait((signal.SIGCHLD,), 0.005)
            self._reap()
            if self.status is not None:
                return []

    def _look_for_server(self) -> None:
        """Nobody there for too long: ask the worker to end, once, and set the time for its killing."""
        now_s = time.monotonic()
        if is_held(self.launch["server_lock"], unknown=True):
            self.server_seen_s = now_s
        elif now_s - self.server_seen_s >= self.launch["away_s"] and not self.text:
            self.text = f"no server was there for {self.launch['away_s']:g} s"
            self.kill_at_s = now_s + self.launch["grace_s"]
            self._obey(["terminate"])

    def _bound_log(self) -> None:
        if self.pump is not None:
            self.pump.look()

    def _note_tree(self) -> None:
        """For the server, should we be killed: without a control group it could not find those without the mark."""
        if self.box.home:
            return
        found = [containment.look_up(pid) for pid in self._offspring()]
        tree = sorted((each.pid, each.start) for each in found if each is not None)
        if tree != self.tree:
            self.tree = tree
            with contextlib.suppress(OSError):
                write(self.folder, TREE, {"tree": tree}, durable=False)

    def _others(self) -> list[Any]:
        """The launch's processes, as far as they descend from each other."""
        found: list[Any] = containment.descendants(os.getpid()) if self.family is None else self.family.members()
        return found

    def _offspring(self) -> list[int]:
        if self.family is not None:
            return [each.pid for each in self.family.members()]
        found: list[int] = containment.offspring(os.getpid())
        return found

    def _reap(self) -> bool:
        """Collect who has ended; whether anybody of the tree is left."""
        if self.family is not None:
            status = self.family.heard()
            if self.status is None:
                self.status = status
            return not self.family.over
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self.worker:
                self.status = status

    def _end_tree(self) -> None:
        """Kill until nobody is left. As subreaper we are everybody's ancestor: no children means no descendants."""
        pause_s, patient_s = 0.001, time.monotonic() + _FAMILY_S
        while self._reap():
            self.box.strike()
            with contextlib.suppress(OSError):  # No descriptor to look with: at the next turn.
                containment.kill_all(self._others())
            if self.family is not None and time.monotonic() > patient_s:
                self.family.end()
            signal.sigtimedwait((signal.SIGCHLD,), pause_s)
            pause_s = min(0.25, pause_s * 2)
        if self.family is not None:
            # Its parent was one of them: what it says of the others is not all that counts.
            self.text = self.box.out_of_memory() or self.text
            self.box.end(self.worker, self.family.worker_start, self.tree)

    def _finish(self, how: dict[str, Any], text: str) -> None:
        words = {**how, "text": text, "at_s": time.time(), "asked": self.asked}  # noqa: TID251
        while True:
            try:
                write(self.folder, EXIT, words)
                break
            except FileNotFoundError:
                break  # The run directory is gone, and with it everybody who might ask.
            except OSError as error:
                complain(f"{EXIT}: {error.strerror}")
                signal.sigtimedwait((WAKE,), TICK_S)
        with contextlib.suppress(OSError):
            self.box.remove()


class Family:
    """A worker that a fork server of its account has made, and the parent that it was given there.

    Both are that account's, and so is all that they say. What we do to them as root we do by descriptors of processes
    that we have found to be the account's.
    """

    def __init__(self, connection: Any, parent: int, worker: int, fds: tuple[int, int]) -> None:
        self._connection = connection
        self.parent, self.worker = parent, worker
        self.parent_fd, self.worker_fd = fds
        self.parent_start, self.worker_start = _start(parent), _start(worker)
        self._told = False
        """It has said how the worker ended."""
        self.over = False
        """The parent has ended, and all that were below it, if it was left alone."""

    @classmethod
    def asked_for(cls, connection: int, request: int, says: int, uid: int) -> Family:
        """Raises what kept the fork server from making one."""
        import socket

        asking = socket.socket(fileno=connection)
        asking.settimeout(_ANSWER_S)
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        fds: list[int] = []
        try:
            socket.send_fds(asking, [b"tend"], [request, nothing, says, says])
            data, fds, _, _ = socket.recv_fds(asking, 4096, 2, socket.MSG_CMSG_CLOEXEC)
            words = json.loads(data)
            if "error" in words:
                raise ValueError(str(words["error"])[:200])
            parent, worker = words["parent"], words["worker"]
            if len(fds) != 2 or not (_is_of(fds[0], parent, uid) and _is_of(fds[1], worker, uid)):
                raise ValueError("it names a process that is not its account's")
        except BaseException:
            for fd in fds:
                os.close(fd)
            asking.close()
            raise
        finally:
            os.close(nothing)
        # What it says wakes us as a child's end does.
        asking.setblocking(False)
        fcntl.fcntl(asking, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(asking, _F_SETSIG, signal.SIGCHLD)
        fcntl.fcntl(asking, fcntl.F_SETFL, fcntl.fcntl(asking, fcntl.F_GETFL) | os.O_ASYNC)
        return cls(asking, parent, worker, (fds[0], fds[1]))

    def begin(self) -> None:
        """All is ready for it."""
        with contextlib.suppress(OSError):
            self._connection.send(b"go")

    def heard(self) -> int | None:
        """How the worker ended, once that is known. Of the connection others may have got hold: its end is not all that
        says that the parent has ended, and who says more than one word says nothing any more."""
        if self.over:
            return None
        status: int | None = None
        try:
            data = self._connection.recv(4096)
            status = _status(data)
            self.over = status is None or self._told
            self._told = True
        except BlockingIOError:
            self.over = _start(self.parent) != self.parent_start
        except OSError:
            self.over = True
        if self.over:
            self._connection.close()
            self.end()
            return int(signal.SIGKILL) if status is None else status
        return status

    def members(self) -> list[Any]:
        """All but the parent, if that is still who it was."""
        found: list[Any] = containment.descendants(self.parent)
        return found if _start(self.parent) == self.parent_start else []

    def end(self) -> None:
        """The parent does not do its part, or has done it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.parent_fd, signal.SIGKILL)


def _start(pid: int) -> int:
    """When this process was started; 0: it is not there."""
    about = containment.look_up(pid)
    return about.start if about else 0


def _status(data: bytes) -> int | None:
    """What `wait` has said; nothing that cannot be."""
    try:
        status = json.loads(data)["status"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    known = type(status) is int and (os.WIFEXITED(status) or os.WIFSIGNALED(status))
    return status if known and 0 <= status < 1 << 16 else None


def _is_of(pidfd: int, pid: Any, uid: int) -> bool:
    """Whether this is a descriptor of that process, which lives and is the account's."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as about:
            described = [line.split()[1] for line in about if line.startswith("Pid:")]
        with open(f"/proc/{int(pid)}/status") as about:
            owners = next(line.split()[1:] for line in about if line.startswith("Uid:"))
        # It has not ended meanwhile, so that the number was its own when we looked.
        signal.pidfd_send_signal(pidfd, 0)
    except (OSError, ValueError, TypeError, StopIteration):
        return False
    return described == [str(pid)] and set(owners) == {str(uid)}


class Pump:
    """Takes what the worker says out of a pipe into its log, in a thread: so whoever says more than there is room for
    waits until the beginning was given up, and the log is never larger than it may be.

    Short pieces are gathered for a moment. What a full disk does not take is lost, and the worker goes on.
    """

    def __init__(self, output: int, log: int, most_bytes: int) -> None:
        """Raises `RuntimeError` when there can be no thread."""
        self._output, self._log, self._most = output, log, most_bytes
        self._chunk = max(_BLOCK, min(_WIDE, most_bytes // 8))
        self._lost = 0
        self._writing = _thread.allocate_lock()
        self._over = _thread.allocate_lock()
        self._over.acquire()
        _thread.start_new_thread(self._run, ())

    def finish(self) -> None:
        """All that was said is in the log. Whoever could say more has ended, unless somebody else holds the pipe: who
        does is not waited for."""
        if self._over.acquire(timeout=_LAST_WORDS_S):
            os.close(self._output)
        self.look()

    def look(self) -> None:
        """A worker may also write to its log by itself."""
        if self._writing.acquire(timeout=_GATHER_S):
            try:
                bound(self._log, self._most)
            finally:
                self._writing.release()

    def _run(self) -> None:
        try:
            while data := os.read(self._output, self._chunk):
                self._keep(data)
                if len(data) < self._chunk:
                    time.sleep(_GATHER_S)
        finally:
            self._over.release()

    def _keep(self, data: bytes) -> None:
        lost, self._lost = self._lost, 0
        note = b"\n[%d bytes were lost: the disk was full]\n" % lost if lost else b""
        rest = memoryview(note + data)
        try:
            with self._writing:
                bound(self._log, self._most - len(rest))
                while rest:
                    rest = rest[os.write(self._log, rest) :]
        except OSError:
            self._lost = len(rest) if len(rest) <= len(data) else lost + len(data)


def _wide_pipe() -> tuple[int, int]:
    """One that takes as much at once as it may."""
    output, says = os.pipe2(os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        fcntl.fcntl(output, _F_SETPIPE_SZ, _WIDE)
    return output, says


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def is_held(path: str, unknown: bool = False) -> bool:
    """Whether somebody holds the lock on this file; we hold it ourselves for an instant, shared, to find out.
    `unknown`: what to say where the machine has no room to look."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        return unknown and jobfiles.passes(error)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def bound(log: int, most_bytes: int) -> None:
    """When a log takes more room than that, give back its beginning up to the half.

    Offsets stay what they were: the beginning becomes a hole, which reads as zeros and takes no room.
    """
    about = os.fstat(log)
    if about.st_blocks * 512 <= most_bytes:
        return
    hole = (about.st_size - most_bytes // 2) // _BLOCK * _BLOCK
    if hole > 0 and not punch(log, hole):
        _copy_and_truncate(log, most_bytes // 2)


def punch(log: int, hole: int) -> bool:
    """False where the file system has no holes."""
    call = _libc.fallocate64 if hasattr(_libc, "fallocate64") else _libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    while call(log, _PUNCH_HOLE, 0, hole):
        if ctypes.get_errno() != errno.EINTR:
            return False
    return True


def _copy_and_truncate(log: int, keep: int) -> None:
    """What is written between the two steps is lost, and offsets begin anew."""
    end = os.pread(log, keep, max(0, os.fstat(log).st_size - keep))
    os.ftruncate(log, 0)
    os.write(log, end)


def main() -> None:
    """As a program: run directory; descriptor to report to, and behind a comma how many follow it that are for asking a
    fork server; why it is not a fork."""
    folder, fds, why = sys.argv[-3:]
    ready, _, asks = fds.partition(",")
    first, count = int(ready) + 1, int(asks or 0)
    os.closerange(first + count, resource.getrlimit(resource.RLIMIT_NOFILE)[0])  # What the server leaves open.
    supervise(folder, int(ready), "plain", why, (first, first + 1) if count else None)


if __name__ == "__main__":
    main()
