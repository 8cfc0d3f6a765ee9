"""What runs inside the fork server: it imports, waits, and forks a worker for every request.

This file is loaded by path into the interpreter of the user's environment, where Stretto need not be installed:
standard library only, and nothing of ours. It never runs a multi-threaded operation, never asks for a GPU and never
imports user code, because a fork copies neither threads nor a CUDA context. Both are checked once the imports are done;
an environment that breaks the rule is refused with the reason, and its workers start in the plain way.

A request is one packet on the listening socket (`fork`) with four descriptors: a file that holds the request, and the
worker's standard input, output and error. Only the fork reads that file: nothing of a job ever lies in the memory that
the next one inherits. Who connects and does not ask, or asks for nonsense, holds up nobody. The answer is the worker's
pid with a descriptor of the process; a second answer, once it has ended, is its exit status. The connection ties a
worker to whoever asked for it: when it closes, the worker is killed. When the owner's end of the control socket closes,
or the server dies, all workers die.

Where this is another account's than the owner's, a worker is asked for with `tend`: the fork is its parent, which ends
its whole family, and all that it says to whoever asked is who there is and how it ended. That one, root's, watches
both, and believes nothing that it cannot look up (`supervisor.py`). Neither ends with us.

A request may also name a run directory (`supervise`, and one descriptor more). Then the fork is the launch's supervisor
(`supervisor.py`, loaded from beside this file), which outlives everybody here, and the worker is a fork of that.

The worker returns from the loop into `serve`, and from there runs the script in the real `__main__`. Exceptions leave
through the interpreter's own exit, so that `atexit`, exit codes and signals are those of `python script.py`; only the
last part of it is shorter (`_Leaving`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import resource
import runpy
import select
import selectors
import shutil
import signal
import site
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import Any, TextIO, cast

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

MARK = b"STRETTO_LAUNCH="

WORDS = {b"fork": 4, b"supervise": 5, b"tend": 4}
"""How many descriptors come with each."""
_MOST_PENDING, _PATIENCE_S = 64, 5.0
_MOST_REQUEST_BYTES = 1 << 26
_REAP_EVERY_MS = 1000

_libc = ctypes.CDLL(None)

FIRST_STEP = """
import io, json, sys
import torch
import torch.distributed
import torch.nn.parallel
from torch.utils.data import DataLoader, TensorDataset

data = DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4, shuffle=True)
for make in (torch.optim.SGD, torch.optim.AdamW):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    optimizer = make(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for x, y in data:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    schedule.step()
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    torch.load(file)
names = [name for name, module in list(sys.modules.items()) if getattr(module, "__spec__", None) is not None]
print(json.dumps([name for name in names if not name.startswith("__")]))
"""
"""Run once per environment in an interpreter that is thrown away: what does a first training step import?"""


class Unforkable(Exception):
    """Workers of this environment cannot be forked; the text says why."""


def serve(config_path: str) -> None:
    """Run the server. Returns only in workers, when their script has ended. `config_path`: of a descriptor that we have
    inherited for it."""
    with open(config_path) as file:
        config = json.load(file)
    # Before anything else is: what is registered first is called last.
    leaving = _Leaving()
    atexit.register(leaving.leave)
    control = socket.socket(fileno=config["control"])
    try:
        ready = _prepare(config)
    except Unforkable as reason:
        control.send(json.dumps({"failed": str(reason)}).encode())
        return
    os.close(int(os.path.basename(config_path)))
    host = Host(socket.socket(fileno=config["listener"]), control, _thread_setters(), config["owner"])
    supervisor = _beside("supervisor")
    gc.collect()
    gc.freeze()
    leaving.preloaded = frozenset(sys.modules)
    control.send(json.dumps(ready).encode())
    request = host.run()
    if request is None:
        # The owner may have died, and then nobody else would.
        if config["folder"]:
            shutil.rmtree(config["folder"], ignore_errors=True)
        os._exit(0)
    if "tended" in request:
        _tend(request.pop("tended"), supervisor.containment)
    if "supervise" in request:
        supervisor.supervise(request["supervise"], request["ready"], "forked")
    _become(request, ready["imported_env"], host.thread_setters)
    try:
        _run(request)
        leaving.status = 0
    except SystemExit as end:
        leaving.status = _status(end.code)
        raise
    except Exception:
        leaving.status = 1
        raise


class _Leaving:
    """The end of a worker, after its script, its threads and all handlers of `atexit`.

    An interpreter that ends goes through every object it has to take it apart, most of them pages that it shared with
    the fork server until then. That takes longer than many a step. Only what the script made is taken apart here, as
    Python would, so that files are written to their end; the rest goes with the process.
    """

    def __init__(self) -> None:
        self.preloaded: frozenset[str] = frozenset()
        self.status: int | None = None
        """The exit status of a script that has ended; None: Python's own way."""

    def leave(self) -> None:
        if self.status is None:
            return
        # Threads that nobody waits for go on meanwhile, without what the script has defined.
        threading.excepthook = lambda *_: None
        for name in ["__main__", *reversed([name for name in sys.modules if name not in self.preloaded])]:
            _take_apart(sys.modules.get(name))
        gc.collect()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(self.status)


def _take_apart(module: Any) -> None:
    """Let go of what a module defines, in Python's order: private names first."""
    names = vars(module) if isinstance(module, types.ModuleType) else {}
    for private in (True, False):
        for name in list(names):
            if name.startswith("_") == private and name != "__builtins__":
                names[name] = None


def _status(code: object) -> int:
    """Of `sys.exit(code)`."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _beside(name: str) -> Any:
    """A file of ours in this folder, as a module that nobody else sees."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec: Any = importlib.util.spec_from_file_location(f"_stretto_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prepare(config: dict[str, Any]) -> dict[str, Any]:
    """Import everything; refuse an environment whose imports leave something that a fork cannot copy."""
    began, before = time.monotonic(), dict(os.environ)
    for name in config["preload"]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise Unforkable(f"{error.name or name} is not installed in this environment") from None
        except Exception as error:
            raise Unforkable(f"importing {name} failed: {error!r}") from None
    if "torch" in config["preload"]:
        _import_first_step(config["cache"])
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise Unforkable(f"the imports started {threads - 1} threads, which a fork would lose")
    if _touched_gpu():
        raise Unforkable("the imports opened a GPU, which a fork cannot share")
    return {
        "modules": len(sys.modules),
        "names": sorted({name.partition(".")[0] for name in sys.modules}),
        "imported_env": {name: value for name, value in os.environ.items() if before.get(name) != value},
        "user_site": bool(site.ENABLE_USER_SITE),
        "seconds": time.monotonic() - began,
    }


def _import_first_step(cache: str) -> None:
    try:
        with open(cache) as file:
            names = json.load(file)
    except (OSError, ValueError):
        names = _observe_first_step()
        with contextlib.suppress(OSError):  # It is found anew the next time.
            os.makedirs(os.path.dirname(cache), exist_ok=True)
            part = f"{cache}.{os.getpid()}"
            with open(part, "w") as file:
                json.dump(names, file)
            os.replace(part, cache)
    for name in names:
        if name not in sys.modules:
            # A name that was assigned into sys.modules by its package is not importable by itself.
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _observe_first_step() -> list[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FIRST_STEP], env=env, cwd="/", capture_output=True, text=True)
    if done.returncode:
        raise Unforkable(f"a first training step failed in this environment: {done.stderr.strip()[-500:]}")
    return cast("list[str]", json.loads(done.stdout.splitlines()[-1]))


def _touched_gpu() -> bool:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return any(link.startswith(("/dev/nvidia", "/dev/kfd")) for link in links)


class Host:
    """The loop of the server: requests come in, exits go out."""

    def __init__(self, listener: socket.socket, control: socket.socket, thread_setters: list[Any], owner: int) -> None:
        """`owner`: whose processes may ask."""
        self.owner = owner
        self.listener = listener
        self.control = control
        self.thread_setters = thread_setters
        self.pid = os.getpid()
        self.workers: dict[int, socket.socket] = {}
        self.pending: dict[socket.socket, float] = {}
        """Who has connected and not asked yet, and until when they may; the oldest first."""
        self.retired = False
        self.wake_out, self.wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.selector = selectors.DefaultSelector()
        for source in (listener, control, self.wake_out):
            self.selector.register(source, selectors.EVENT_READ)

    def run(self) -> dict[str, Any] | None:
        """Serve until the owner goes (None); in a fork, return what the worker is to be."""
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        signal.set_wakeup_fd(self.wake_in, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while not (self.retired and not self.workers and not self.pending):
            found = self.selector.select(min(self.pending.values()) - time.monotonic() if self.pending else None)
            self._turn_away_slow()
            for key, _ in found:
                if key.fileobj is self.listener:
                    self._accept()
                elif key.fileobj in self.pending:
                    if (request := self._take(key.fileobj)) is not None:
                        return request
                elif key.fileobj is self.control:
                    if not self._retire():
                        self._kill_all()
                        return None
                elif key.fileobj == self.wake_out:
                    self._reap()
                else:
                    self._client_gone(cast("socket.socket", key.fileobj))
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            # No descriptor is left, it may be: somebody who does not ask has one.
            self._drop_oldest()
            time.sleep(0.01)
            return
        if len(self.pending) >= _MOST_PENDING:
            self._drop_oldest()
        connection.setblocking(False)
        if _peer_uid(connection) != self.owner:
            _refuse(connection, PermissionError("another user's process asked for a worker"))
            return
        self.pending[connection] = time.monotonic() + _PATIENCE_S
        self.selector.register(connection, selectors.EVENT_READ)

    def _drop_oldest(self) -> None:
        for connection in list(self.pending)[:1]:
            self._let_go(connection)
            connection.close()

    def _turn_away_slow(self) -> None:
        now_s = time.monotonic()
        while self.pending and next(iter(self.pending.values())) <= now_s:
            self._drop_oldest()

    def _let_go(self, connection: socket.socket) -> None:
        del self.pending[connection]
        self.selector.unregister(connection)

    def _take(self, connection: socket.socket) -> dict[str, Any] | None:
        """Take one request and fork. Only the fork gets a request back."""
        self._let_go(connection)
        fds: list[int] = []
        try:
            word, fds, _, _ = socket.recv_fds(connection, 64, 5, socket.MSG_CMSG_CLOEXEC)
            if WORDS.get(word) != len(fds):
                raise ValueError("that is no request")
            pid = os.fork()
        except Exception as error:
            _close(fds)
            _refuse(connection, error)
            return None
        if pid == 0:
            return self._leave(connection, word, fds)
        _close(fds)
        if word == b"tend":
            # It answers itself.
            connection.close()
            return None
        self._answer(connection, pid)
        if word == b"supervise":
            connection.close()
        else:
            self.workers[pid] = connection
            self.selector.register(connection, selectors.EVENT_READ)
        return None

    def _leave(self, connection: socket.socket, word: bytes, fds: list[int]) -> dict[str, Any]:
        """In the fork: let go of everything of the server's, and read what is wanted."""
        supervises = word == b"supervise"
        os.setsid()
        if word == b"fork":
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self.pid:
                os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.selector.close()
        _close([self.wake_in, self.wake_out])
        for each in (self.listener, self.control, *self.workers.values(), *self.pending):
            each.close()
        if word != b"tend":
            connection.close()
        for number, fd in enumerate(fds[1:4]):
            os.dup2(fd, number)
        try:
            request = _read_request(fds[0])
            if supervises != ("supervise" in request):
                raise ValueError("it asks for two things")
        except Exception as error:
            os.write(2, f"this worker cannot be started: {error}\n".encode(errors="replace"))
            os._exit(127)
        _close(fds[:4])
        if word == b"tend":
            return {**request, "tended": connection}
        return {**request, "ready": fds[4]} if supervises else request

    def _answer(self, connection: socket.socket, pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        # A client that has gone already is noticed by its closed connection, and its worker killed then.
        with contextlib.suppress(OSError):
            socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)

    def _client_gone(self, connection: socket.socket) -> None:
        if connection.fileno() == -1:  # Its worker was collected in this same turn of the loop.
            return
        self.selector.unregister(connection)
        for pid, each in self.workers.items():
            if each is connection:
                _kill_group(pid)

    def _retire(self) -> bool:
        """The owner said that no more requests will come; False when it has gone."""
        if not self.control.recv(16):
            return False
        self.retired = True
        return True

    def _kill_all(self) -> None:
        for pid in self.workers:
            _kill_group(pid)
        while self.workers:
            self._collect(next(iter(self.workers)))

    def _reap(self) -> None:
        """Collect who has ended: workers, and what ended workers left to us as their subreaper."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake_out, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in self.workers:
                    # Before the leader is collected its number, which names the group, cannot be anybody else's.
                    _kill_group(ended.si_pid)
                self._collect(ended.si_pid)

    def _collect(self, pid: int) -> None:
        """Reap a process, and tell whoever asked for it how it ended."""
        _, status = os.waitpid(pid, 0)
        connection = self.workers.pop(pid, None)
        if connection is None:
            return
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection)
        with contextlib.suppress(OSError):
            connection.send(json.dumps({"exit_status": os.waitstatus_to_exitcode(status)}).encode())
        connection.close()


def _tend(connection: socket.socket, containment: Any) -> None:
    """Be the parent of a worker, and end with all of its family; only the worker comes back from here.

    It begins when whoever asked says so: what only root can do for it is done by then.
    """
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    begins, may_begin = os.pipe2(os.O_CLOEXEC)
    parent, worker = os.getpid(), os.fork()
    if worker == 0:
        os.setsid()
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        connection.close()
        os.close(may_begin)
        if os.getppid() != parent or not os.read(begins, 1):
            os._exit(1)
        os.close(begins)
        return
    os.close(begins)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    fds = [os.pidfd_open(parent), os.pidfd_open(worker)]
    with contextlib.suppress(BaseException):
        socket.send_fds(connection, [json.dumps({"parent": parent, "worker": worker}).encode()], fds)
        status = _attend(connection, may_begin, worker, fds[1])
        if status is not None:
            connection.send(json.dumps({"status": status}).encode())
    _end_family(containment)
    os._exit(0)


def _attend(connection: socket.socket, may_begin: int, worker: int, pidfd: int) -> int | None:
    """How the worker ended, as `wait` says it; None: whoever asked for it has gone."""
    poller = select.poll()
    for source in (connection.fileno(), pidfd):
        poller.register(source, select.POLLIN)
    while True:
        for source, _ in poller.poll(_REAP_EVERY_MS):
            if source == pidfd:
                return os.waitpid(worker, 0)[1]
            if not connection.recv(16):
                return None
            os.write(may_begin, b"1")
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == worker:
                    break
                os.waitpid(ended.si_pid, 0)


def _end_family(containment: Any) -> None:
    """As subreaper we are everybody's ancestor: no children means no descendants."""
    pause_s = 0.001
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        with contextlib.suppress(OSError):
            containment.kill_all(containment.descendants(os.getpid()))
        time.sleep(pause_s)
        pause_s = min(0.25, pause_s * 2)


def _read_request(fd: int) -> dict[str, Any]:
    about = os.fstat(fd)
    if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_REQUEST_BYTES:
        raise ValueError("that is no file with a request")
    data = bytearray()
    while len(data) < about.st_size and (more := os.pread(fd, about.st_size - len(data), len(data))):
        data += more
    request = json.loads(data)
    if not isinstance(request, dict):
        raise ValueError("that is no request")
    return request


def _refuse(connection: socket.socket, error: Exception) -> None:
    with contextlib.suppress(OSError):
        connection.send(json.dumps({"error": repr(error)}).encode())
    connection.close()


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _become(request: dict[str, Any], imported_env: dict[str, str], thread_setters: list[Any]) -> None:
    """Make the fork what a new interpreter with this request and these imports would be.

    Some libraries set variables, where they are not set, as they are imported.
    """
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    for which, limits in request["limits"]:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, tuple(limits))
    env = {**imported_env, **request["env"]}
    if "LC_CTYPE" in os.environ and "LC_CTYPE" not in env:
        # Python itself sets it at start where the locale is C.
        env["LC_CTYPE"] = os.environ["LC_CTYPE"]
    os.environ.clear()
    os.environ.update(env)
    _show_mark(env)
    time.tzset()
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    _open_streams(request["unbuffered"] or bool(env.get("PYTHONUNBUFFERED")))
    _forget()
    for setter in thread_setters:
        setter(env)


def _show_mark(env: dict[str, str]) -> None:
    """Let /proc show the launch that we belong to: it shows the variables as they lay in memory at the server's start.

    There the server has an entry of the same name, with room for any launch id.
    """
    mark = env.get(MARK.decode().rstrip("="), "").encode()
    if not mark:
        return
    with open("/proc/self/stat", "rb") as file:
        begin, end = map(int, file.read().rpartition(b")")[2].split()[47:49])
    shown = ctypes.string_at(begin, end - begin).split(b"\0")
    for number, entry in enumerate(shown):
        if entry.startswith(MARK) and len(mark) <= len(entry) - len(MARK):
            at = begin + sum(len(each) + 1 for each in shown[:number]) + len(MARK)
            ctypes.memmove(at, mark.ljust(len(entry) - len(MARK), b"\0"), len(entry) - len(MARK))


def _open_streams(unbuffered: bool) -> None:
    system = cast("Any", sys)
    system.stdin = system.__stdin__ = _stream(0, "r", sys.stdin, unbuffered)
    system.stdout = system.__stdout__ = _stream(1, "w", sys.stdout, unbuffered)
    system.stderr = system.__stderr__ = _stream(2, "w", sys.stderr, unbuffered)


def _stream(fd: int, mode: str, old: TextIO, unbuffered: bool) -> TextIO:
    buffer: Any = open(fd, mode + "b", 0 if unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
    getattr(buffer, "raw", buffer).name = ("<stdin>", "<stdout>", "<stderr>")[fd]
    stream = io.TextIOWrapper(
        buffer,
        encoding=old.encoding,
        errors=old.errors,
        newline="\n" if mode == "w" else None,
        line_buffering=not unbuffered and (fd == 2 or buffer.isatty()),
        write_through=unbuffered,
    )
    cast("Any", stream).mode = mode
    return stream


def _forget() -> None:
    """Drop what a fork would share and new interpreters do not: random state, keys, caches of the environment.

    The standard library's random module does so by itself. The seed of `hash` stays: a running interpreter cannot
    change it.
    """
    loaded = cast("dict[str, Any]", sys.modules)
    seed = _seed_of_job(os.environ)
    if seed is not None and "random" in loaded:
        loaded["random"].seed(seed)
    if "numpy.random" in loaded:
        loaded["numpy.random"].seed(None if seed is None else seed & 0xFFFFFFFF)
    if "torch" in loaded:
        # Only the CPU's generator: those of GPUs are made, from a constant, when the GPU is first used.
        generator = loaded["torch"].default_generator
        generator.seed() if seed is None else generator.manual_seed(seed)
    if "multiprocessing.process" in loaded:
        loaded["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in loaded:
        loaded["tempfile"].tempdir = None
    importlib.invalidate_caches()


def _seed_of_job(env: Mapping[str, str]) -> int | None:
    """What an elastic script draws before its first loop must be alike on all workers, whether it seeds or not: its
    data, for one. The same number as in `stretto.torch.chance`."""
    if not ("STRETTO_COORDINATOR" in env and "STRETTO_TOKEN" in env):
        return None
    return int.from_bytes(hashlib.sha256(env["STRETTO_TOKEN"].encode()).digest()[:8], "big") >> 2 | 1 << 61


def _thread_setters() -> list[Any]:
    """How to tell each loaded library the number of threads that the worker's variables ask for.

    They read the variables when they are loaded, which for a worker is too early.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if ".so" in line}
    setters: list[Any] = []
    for path in sorted(paths):
        name = os.path.basename(path)
        if "openblas" in name:
            setters += _openblas_setter(path)
        elif name.startswith(("libgomp", "libiomp", "libomp")):
            setters.append(_openmp_setter(path))
    if "torch" in sys.modules:
        setters.append(_set_torch_threads)
    return setters


def _openblas_setter(path: str) -> list[Any]:
    library = ctypes.CDLL(path)
    for prefix in ("scipy_", ""):
        for suffix in ("64_", "_64", ""):
            call = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if call is not None:
                return [lambda env, call=call: call(_openblas_threads(env))]
    return []


def _openblas_threads(env: dict[str, str]) -> int:
    """It was loaded with one thread, whatever the variables say: without any, it takes all cores."""
    cores = len(os.sched_getaffinity(0))
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    return min(cores, next((n for n in (_count(env, name) for name in names) if n), cores))


def _openmp_setter(path: str) -> Any:
    call = ctypes.CDLL(path).omp_set_num_threads

    def set_threads(env: dict[str, str]) -> None:
        if count := _count(env, "OMP_NUM_THREADS"):
            call(count)

    return set_threads


def _set_torch_threads(env: dict[str, str]) -> None:
    if count := _count(env, "MKL_NUM_THREADS") or _count(env, "OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(count)


def _count(env: dict[str, str], name: str) -> int:
    """The variable's number; 0 when there is none. OpenMP allows a list, one number per level."""
    first = env.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def _run(request: dict[str, Any]) -> None:
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if not name.startswith("__")]:
        delattr(main, name)
    sys.orig_argv = request["command"]
    sys.argv = [request["script"] or "-m", *request["args"]]
    try:
        if request["module"]:
            sys.path.insert(0, os.getcwd())
            cast("Any", runpy)._run_module_as_main(request["module"])
        else:
            _run_script(main, request["script"])
    except SystemExit:
        raise
    except BaseException as error:
        _show(error)
        # It leaves by the interpreter's own exit, which would show it a second time with our frames.
        sys.excepthook = lambda *_: None
        raise


def _run_script(main: Any, script: str) -> None:
    path = os.path.join(os.getcwd(), script)
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__cached__ = None
    main.__spec__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _show(error: BaseException) -> None:
    """Print an exception that nobody caught, through the user's hook, without the frames of this file."""
    _strip(error)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        second.__context__ = None
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), _strip(second), second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _strip(error: BaseException) -> BaseException:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return error.with_traceback(trace)
