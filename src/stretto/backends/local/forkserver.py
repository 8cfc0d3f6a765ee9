"""Warm interpreters: one per Python environment, with everything imported, of which workers are forks.

Importing torch takes seconds, a fork milliseconds. `ForkServer` starts an interpreter of the user's environment that
runs `forkhost.py`; `ForkServers` keeps a few of them, one per environment: those that were used last. What only counts
when an interpreter starts (flags, LD_* and PYTHON* variables, variables that libraries read while they are imported)
cannot be changed in one that runs; a worker that needs it is refused with the reason, and its launcher starts it in the
plain way.

A server knows nothing of any job: it is started with a few variables of ours and those that its environment is told
apart by, which all of its workers have in common (`_server_env`). All others a worker gets when it is a process of its
own.

The server ends with its owner, the process that made it, and its workers end with the server; a worker also ends with
whoever asked for it. Not so those that were asked for by `supervise`: they have a supervisor of their own.

One of another account has its ids before its interpreter starts, serves that account alone, and is asked for workers by
their supervisors, which are programs of ours (`tended`): nothing of it is ever run with our rights.

Not as in a new interpreter: all workers of a server share the seed of `hash`, and `ps` shows the server's command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias

from stretto import jobfiles
from stretto.accounts import Identity, acting
from stretto.backends.local.containment import MARK
from stretto.errors import StrettoError

MARK_ROOM = 96
"""What a fork has room for in the variable that says which launch, and whose, it belongs to."""

_HOST = Path(__file__).with_name("forkhost.py")

_BOOT = (
    "import sys; del sys.path[0]; import importlib.util as u;"
    " s = u.spec_from_file_location('_stretto_forkhost', sys.argv[1]); m = u.module_from_spec(s);"
    " s.loader.exec_module(m); m.serve(sys.argv[2])"
)
"""`__main__` is kept for the worker's script. The first entry of the path would be the current folder."""

_DESCRIBE = "import json, sys; print(json.dumps([sys.version, sys.prefix, [p for p in sys.path if p]]))"

_AT_START = (
    *("LD_", "PYTHON", "GLIBC_", "MALLOC_", "LC_ALL", "LC_CTYPE", "LANG"),
    *("TORCH", "PYTORCH", "ATEN_", "KINETO_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_", "NUMPY_"),
)
"""How names of variables begin that are read once: by the loader, the interpreter, or a library as it is imported."""

_APPLIED = frozenset({"PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT", "TORCH_HOME"}) | frozenset(
    f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "GOTO")
)
"""Of those, what the worker applies to itself, or what is read when it is used."""

_READ_LATER = ("TORCHELASTIC_", "TORCH_NCCL_")

_OWN = (
    *("PATH", "USER", "LOGNAME", "SHELL", "TZ", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LANGUAGE"),
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE"),
)
"""Variables that every server has, as we have them."""

_ALONE = frozenset(
    {"PYTHONPATH", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONMALLOCSTATS", "PYTHONTRACEMALLOC"}
) | frozenset({"PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONPROFILEIMPORTTIME", "LD_PRELOAD", "LD_AUDIT", "LD_DEBUG"})
"""For these no server is started: they differ from run to run, or are meant for one program."""

MOST_SERVERS, MOST_MIB, IDLE_S = 4, 4096, 1800.0
"""So many are kept, with so much memory together, and so long without being asked for anything."""
_JUST_S = 10.0
"""Who was asked for so short a time ago is about to fork."""
_MOST_REMEMBERED = 64


class ForkFailed(StrettoError):
    """The fork server could not make this worker."""

    code = "fork"


class Forked(NamedTuple):
    """A worker as its server hands it over."""

    pid: int
    pidfd: int
    connection: socket.socket
    """Carries the exit status; closing it kills the worker."""


@dataclass(frozen=True)
class Program:
    """What an interpreter's command line runs: a script or a module."""

    script: str
    module: str
    args: tuple[str, ...]
    unbuffered: bool


@dataclass(frozen=True)
class Environment:
    """A Python environment: the interpreter, what is installed beside it, and the variables that shape its start."""

    python: str
    version: str
    path: tuple[str, ...]
    start: Mapping[str, str]
    who: Identity | None = None

    @classmethod
    def of(cls, python: str, env: Mapping[str, str], who: Identity | None = None) -> Self:
        """Ask the interpreter; raises `ForkFailed` when it does not answer."""
        start = at_start(env)
        try:
            done = subprocess.run(
                [python, "-c", _DESCRIBE],
                env=_server_env(env, who),
                cwd="/",
                capture_output=True,
                text=True,
                timeout=60,
                **_as(who),
            )
            version, prefix, path = json.loads(done.stdout)
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            raise ForkFailed(f"{python} is not a Python interpreter that starts: {error}") from None
        return cls(os.path.abspath(python), f"{version} {prefix}", tuple(path), start, who)

    def key(self) -> str:
        """Changes when a package is installed, removed or exchanged."""
        with acting(self.who):
            interpreter = os.stat(self.python)
            about = [self.python, os.path.realpath(self.python), interpreter.st_mtime_ns, self.version]
            contents = [(folder, sorted(_contents(folder))) for folder in self.path]
        return hashlib.sha256(json.dumps([about, contents, sorted(self.start.items())]).encode()).hexdigest()[:24]


def _contents(folder: str) -> Iterable[tuple[str, int]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            # A package's folder changes when its modules are compiled, which changes nothing.
            dated = entry.name.endswith((".dist-info", ".egg-info")) or not entry.is_dir()
            if entry.name != "__pycache__":
                yield entry.name, entry.stat(follow_symlinks=False).st_mtime_ns if dated else 0


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    """The variables whose values cannot be given to an interpreter that runs already."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(_AT_START) and name not in _APPLIED and not name.startswith(_READ_LATER)
    }


def parse(command: Sequence[str]) -> Program | str:
    """What the arguments of an interpreter ask for, or why a fork cannot do it."""
    unbuffered = False
    rest = list(command[1:])
    while rest and rest[0] == "-u":
        unbuffered = True
        del rest[0]
    if not rest or rest[0] == "-":
        return "the interpreter would read its program from standard input"
    if rest[0] == "-m":
        return Program("", rest[1], tuple(rest[2:]), unbuffered) if rest[1:] else "no module is named after -m"
    if rest[0].startswith("-"):
        return f"the interpreter flag {rest[0]} only counts at its start"
    return Program(rest[0], "", tuple(rest[1:]), unbuffered)


class ForkServer:
    """One warm interpreter. Starts at once and imports in the background; refuses until that is done.

    It may be used from several threads.
    """

    def __init__(
        self,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        *,
        preload: Sequence[str] = ("torch",),
        cache: Path | None = None,
        who: Identity | None = None,
    ) -> None:
        """`who`: whose process it is; None: ours. `preload` is imported by name; with torch come the modules that a
        first training step imports.

        Their list is found once per environment and kept in `cache`.
        """
        env = os.environ if env is None else env
        self._busy = 0
        self._asking = threading.Lock()
        self.who = who
        self.environment = Environment.of(python, env, who)
        self.key = self.environment.key()
        self.failure = ""
        self.ready = False
        self.modules = 0
        self._names: frozenset[str] = frozenset()
        self._folder = "" if who else tempfile.mkdtemp(prefix="stretto-", dir=_short_folder())
        self.address = os.path.join(self._folder, "socket") if who is None else f"\0stretto-{secrets.token_hex(16)}"
        """Of another account's it is a name without a file, which nobody could replace."""
        self._said = -1
        self._home = env.get("HOME", "")
        self._imported_env: dict[str, str] = {}
        self._user_site = False
        self._hearing = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = self._start(_server_env(env, who), tuple(preload), cache or _cache_folder(who), theirs)

    def _start(
        self, env: dict[str, str], preload: tuple[str, ...], cache: Path, theirs: socket.socket
    ) -> subprocess.Popen[bytes]:
        if self.who is None:
            cache.mkdir(parents=True, exist_ok=True)
        with (
            theirs,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
            open(self._log(), "wb", buffering=0) as log,
            open(os.memfd_create("stretto-config"), "wb", buffering=0) as config,
        ):
            listener.bind(self.address)
            listener.listen(128)
            words = {
                "control": theirs.fileno(),
                "listener": listener.fileno(),
                "preload": preload,
                "cache": str(cache / f"first-step-{self.key}.json"),
                "folder": self._folder,
                "owner": os.geteuid(),
            }
            config.write(json.dumps(words).encode())
            passed = theirs.fileno(), listener.fileno(), config.fileno()
            return subprocess.Popen(
                [self.environment.python, "-c", _BOOT, str(_HOST), f"/proc/self/fd/{config.fileno()}"],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=passed,
                start_new_session=True,
                **_as(self.who),
            )

    def _log(self) -> Path | int:
        """Where it says what went wrong. Of another account's only the beginning, which a pipe takes: nobody reads it
        before its end, and it may be any amount."""
        if self.who is None:
            return Path(self._folder, "log")
        self._said, into = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        return into

    def _last_words(self) -> str:
        if self.who is None:
            return jobfiles.read_end(Path(self._folder, "log"), 2000).decode(errors="replace").strip()
        with contextlib.suppress(OSError):
            return os.read(self._said, 1 << 16).decode(errors="replace").strip()
        return ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, timeout_s: float = 120.0) -> bool:
        """Wait until it can fork; False when it never will (`failure` says why) or the time is over."""
        if not self.ready and not self.failure:
            select.select([self._control], [], [], timeout_s)
        self._listen()
        return self.ready and not self.failure

    def refusal(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> str:
        """Why this command cannot be a fork of this server; empty when it can."""
        self._listen()
        if self.failure:
            return self.failure
        if not self.ready:
            return "the fork server is still importing"
        with acting(self.who):
            ours = self._is_our_interpreter(command[0], env, cwd)
        if not ours:
            return f"{command[0]} is not the interpreter of this fork server, {self.environment.python}"
        program = parse(command)
        if isinstance(program, str):
            return program
        with acting(self.who):
            hidden = self._hides(program, cwd)
        return self._differs(env) or hidden or self._changed()

    def fork(self, command: Sequence[str], env: Mapping[str, str], cwd: str, stdio: tuple[int, int, int]) -> Forked:
        """Make a worker that runs the command; raises `ForkFailed`. The descriptors stay the caller's."""
        return self._request(_request(command, env, cwd), stdio)

    def supervise(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, folder: str, fds: tuple[int, int, int, int]
    ) -> tuple[int, int]:
        """Make a supervisor for this run directory, which makes the worker; raises `ForkFailed`.

        The descriptors are the supervisor's standard ones, and the one that it reports to. The answer is its pid, and a
        descriptor of the process. It is nobody's: it outlives the server and us.
        """
        forked = self._request({**_request(command, env, cwd), "supervise": folder}, fds)
        forked.connection.close()
        return forked.pid, forked.pidfd

    def tended(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[socket.socket, int]:
        """What a supervisor needs to ask for this worker: a connection, and a file with the request; raises
        `ForkFailed`."""
        request = json.dumps(_request(command, env, cwd)).encode()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._being_asked():
                connection.settimeout(30.0)
                connection.connect(self.address)
                connection.setblocking(True)
            file = os.memfd_create("stretto-request")
        except OSError as error:
            connection.close()
            raise ForkFailed(f"the fork server did not answer: {error!r}") from None
        rest = memoryview(request)
        while rest:
            rest = rest[os.write(file, rest) :]
        return connection, file

    def _request(self, request: dict[str, Any], fds: tuple[int, ...]) -> Forked:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with self._being_asked():
                word = b"supervise" if "supervise" in request else b"fork"
                return self._ask(connection, word, json.dumps(request).encode(), fds)
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            connection.close()
            raise ForkFailed(f"the fork server did not answer: {error!r}") from None
        except BaseException:
            connection.close()
            raise

    @contextlib.contextmanager
    def _being_asked(self) -> Iterator[None]:
        with self._asking:
            self._busy += 1
        try:
            yield
        finally:
            with self._asking:
                self._busy -= 1

    @property
    def busy(self) -> bool:
        """Whether it is forking at this moment."""
        return self._busy > 0

    def memory_mib(self) -> int:
        """What it holds; its workers share most of that."""
        try:
            with open(f"/proc/{self.pid}/statm") as file:
                return int(file.read().split()[1]) * resource.getpagesize() >> 20
        except (OSError, LookupError, ValueError):
            return 0

    def _ask(self, connection: socket.socket, word: bytes, request: bytes, fds: tuple[int, ...]) -> Forked:
        connection.settimeout(30.0)
        connection.connect(self.address)
        # A file of its own: a packet has a limit that an environment may exceed.
        with open(os.memfd_create("stretto-request"), "wb", buffering=0) as file:
            file.write(request)
            socket.send_fds(connection, [word], [file.fileno(), *fds])
        data, pidfds, _, _ = socket.recv_fds(connection, 65536, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            return Forked(_pid(data), pidfds[0], _unblocked(connection))
        except BaseException:
            for pidfd in pidfds:
                os.close(pidfd)
            raise

    def retire(self) -> None:
        """Take no more requests, and end when the last worker has ended."""
        self.failure = self.failure or "the fork server has been retired"
        with contextlib.suppress(OSError):
            self._control.send(b"retire")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def worn_out(self) -> bool:
        """Whether another one would do better: not so when this one found that its environment cannot be forked."""
        self._listen()
        return bool(self.ready and self.failure) or bool(self._changed())

    def close(self) -> None:
        """End the server and its workers, and wait for the server's end."""
        self.failure = self.failure or "the fork server has been closed"
        self._control.close()
        # In its loop it ends its workers, then itself; in an import it hears nothing.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0 if self.ready else 0.0)
        self._process.kill()
        self._process.wait()
        if self._said != -1:
            os.close(self._said)
            self._said = -1
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _listen(self) -> None:
        """Take the server's word on its imports, if it has spoken; notice when it has ended."""
        with self._hearing:
            self._listen_alone()

    def _listen_alone(self) -> None:
        if self.failure:
            return
        if not self.ready and select.select([self._control], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                self._hear(self._control.recv(1 << 20))
        if not self.failure and not self.alive:
            log = self._last_words()
            self.failure = f"the fork server has ended with status {self._process.returncode} {log[-500:]}".strip()

    def _hear(self, data: bytes) -> None:
        if not data:
            self._process.wait()
            return
        try:
            word: dict[str, Any] = json.loads(data)
            self.failure = str(word.get("failed", ""))
            if not self.failure:
                self.modules = int(word["modules"])
                self._names = frozenset(map(str, word["names"]))
                self._imported_env = {str(name): str(value) for name, value in word["imported_env"].items()}
                self._user_site = bool(word["user_site"])
                self.ready = True
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            # The interpreter is the user's.
            self.failure = f"the fork server does not speak our language: {error!r:.100}"

    def _is_our_interpreter(self, name: str, env: Mapping[str, str], cwd: str) -> bool:
        """Two environments may link to one interpreter, so the folder counts too."""
        found = os.path.join(cwd, name) if "/" in name else shutil.which(name, path=env.get("PATH", os.defpath))
        return found is not None and _identity(found) == _identity(self.environment.python)

    def _differs(self, env: Mapping[str, str]) -> str:
        if env.get("PYTHONPATH"):
            return "PYTHONPATH is set, and only counts at the interpreter's start"
        ours, theirs = self.environment.start, at_start(env)
        known = {(name, value) for each in (ours, self._imported_env) for name, value in each.items()}
        names = sorted({name for name, _ in theirs.items() - known} | (ours.keys() - theirs.keys()))
        if self._user_site and env.get("HOME", "") != self._home:
            names.append("HOME")
        names = [name for name in names if name != "PYTHONPATH"]
        return f"{', '.join(names)} differ from the fork server's, and only count at the start" if names else ""

    def _hides(self, program: Program, cwd: str) -> str:
        """A script that is not there is left to the interpreter to complain about."""
        script = os.path.join(cwd, program.script)
        if program.script and (not os.path.isfile(script) or script.endswith((".pyc", ".zip", ".pyz"))):
            return f"{program.script} is not a Python source file"
        folder = os.path.dirname(os.path.realpath(script)) if program.script else cwd
        for name in sorted(self._names & set(_importable(folder))):
            return f"{folder} has a module {name}, which the fork server has imported from elsewhere"
        return ""

    def _changed(self) -> str:
        return "" if self.environment.key() == self.key else "the environment's packages have changed"


class ForkServers:
    """One fork server per environment, made on first use, replaced when the environment's contents change.

    They are bounded in number and memory: to make room the one that was not asked for the longest time ends, and where
    all are at work there is none for a newcomer. Who is not asked for long ends, too, but for the first one of our own
    interpreter, which most jobs use. It may be used from several threads.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = ("torch",),
        cache: Path | None = None,
        most: int = MOST_SERVERS,
        most_mib: int = MOST_MIB,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._preload = tuple(preload)
        self._cache = cache
        self._most, self._most_mib, self._idle_s, self._clock = most, most_mib, idle_s, clock
        self._servers: dict[_Where, ForkServer] = {}
        """Who was asked last is last."""
        self._asked_s: dict[_Where, float] = {}
        self._own: _Where | None = None
        """Who stays though nobody asks."""
        self._retired: list[ForkServer] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._caretaker: threading.Thread | None = None

    def get(self, python: str, env: Mapping[str, str], who: Identity | None = None) -> ForkServer:
        """The server for this interpreter, these variables and this account; it may still be importing. Raises
        `ForkFailed`."""
        if alone := sorted(_ALONE & env.keys()):
            raise ForkFailed(f"{', '.join(alone)} only count at the interpreter's start")
        with self._lock:
            if self._caretaker is None:
                self._caretaker = threading.Thread(target=self._look_after, name="stretto-forkservers", daemon=True)
                self._caretaker.start()
            return self._get(python, env, who)

    def _get(self, python: str, env: Mapping[str, str], who: Identity | None) -> ForkServer:
        self._bury()
        where = _where(python, env, who)
        if self._own is None and who is None and where[0] == os.path.abspath(sys.executable):
            self._own = where
        server = self._servers.pop(where, None)
        if server is not None and server.worn_out():
            self._end(server)
            server = None
        if server is None:
            self._make_room()
            server = ForkServer(python, env, preload=self._preload, cache=self._cache if who is None else None, who=who)
        self._servers[where], self._asked_s[where] = server, self._clock()
        return server

    def tend(self) -> None:
        """End those that have not been asked for anything for long."""
        with self._lock:
            self._bury()
            for where in self._endable(self._idle_s):
                if where != self._own:
                    self._forget(where)

    def _look_after(self) -> None:
        while not self._closing.wait(max(0.1, min(60.0, self._idle_s / 4))):
            self.tend()

    def _make_room(self) -> None:
        """For one more. Raises `ForkFailed` where nobody can go."""
        while len(self._alive()) >= self._most or self._held_mib() > self._most_mib:
            endable = self._endable(_JUST_S)
            if not endable:
                raise ForkFailed(f"there are {len(self._alive())} fork servers, and all of them are at work")
            self._forget(endable[0])
        for where in [where for where, server in self._servers.items() if not server.alive][:-_MOST_REMEMBERED]:
            self._forget(where)

    def _alive(self) -> list[ForkServer]:
        """But for those that have been told to end."""
        return [server for server in self._servers.values() if server.alive]

    def _held_mib(self) -> int:
        return sum(server.memory_mib() for server in self._alive())

    def _endable(self, unasked_s: float) -> list[_Where]:
        """Who runs and has not been asked for so long, nor is at work; who was asked last is last."""
        now_s = self._clock()
        return [
            where for where, server in self._servers.items()
            if server.alive and not server.busy and now_s - self._asked_s[where] >= unasked_s
        ]  # fmt: skip

    def _forget(self, where: _Where) -> None:
        del self._asked_s[where]
        self._end(self._servers.pop(where))

    def _end(self, server: ForkServer) -> None:
        """At once while it imports; otherwise when the last worker that is tied to it has ended."""
        if server.ready and server.alive:
            server.retire()
            self._retired.append(server)
        else:
            server.close()

    def close(self) -> None:
        self._closing.set()
        if self._caretaker is not None:
            self._caretaker.join()
        for server in (*self._servers.values(), *self._retired):
            server.close()
        self._servers.clear()
        self._retired.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _bury(self) -> None:
        for server in [server for server in self._retired if not server.alive]:
            server.close()
            self._retired.remove(server)


_Where: TypeAlias = tuple[str, tuple[tuple[str, str], ...], Identity | None]
"""What environments are told apart by: the interpreter, the variables that shape its start, and whose it is."""


def _where(python: str, env: Mapping[str, str], who: Identity | None) -> _Where:
    return os.path.abspath(python), tuple(sorted(_shaping(env).items())), who


def _as(who: Identity | None) -> dict[str, Any]:
    """For `subprocess`: the program has these ids before it starts."""
    return {} if who is None else {"user": who.uid, "group": who.gid, "extra_groups": list(who.groups)}


def _shaping(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server that come from a job: all jobs that it serves have them in common."""
    home = {"HOME": env["HOME"]} if "HOME" in env else {}
    return {**at_start(env), **home}


def _pid(answer: bytes) -> int:
    """Of the worker that a server has made."""
    if not answer:
        raise ForkFailed("the fork server ended before it had made the worker")
    words: dict[str, Any] = json.loads(answer)
    if "error" in words:
        raise ForkFailed(f"the fork server could not fork: {str(words['error'])[:200]}")
    if type(words["pid"]) is not int or words["pid"] <= 1:
        raise ValueError("that is no process")
    return int(words["pid"])


def _unblocked(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    return connection


def _request(command: Sequence[str], env: Mapping[str, str], cwd: str) -> dict[str, Any]:
    program = parse(command)
    if isinstance(program, str):
        raise ForkFailed(program)
    return {
        "command": list(command),
        "script": program.script,
        "module": program.module,
        "args": program.args,
        "unbuffered": program.unbuffered,
        "env": dict(env),
        "cwd": cwd,
        "umask": umask(),
        "limits": limits(),
    }


_LIMITS = tuple(sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")}))


def _server_env(env: Mapping[str, str], who: Identity | None = None) -> dict[str, str]:
    """The variables of the server itself, and all that /proc ever shows of it and its workers: a few of ours, and those
    that it is known by. Numbers of threads are the workers', and a library must not start any."""
    own = {name: os.environ[name] for name in _OWN if name in os.environ}
    if who is not None:
        own.pop("TMPDIR", None)
        own |= who.variables
    shaping = {name: value for name, value in _shaping(env).items() if name not in _ALONE}
    return {**own, **shaping, "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1", MARK: "-" * MARK_ROOM}


def _cache_folder(who: Identity | None) -> Path:
    if who is not None:
        return Path(who.home, ".cache", "stretto")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "stretto")


def _short_folder() -> str:
    """A socket's path has room for about a hundred characters."""
    usual = tempfile.gettempdir()
    return usual if len(usual) < 70 else "/tmp"


def limits() -> list[tuple[int, tuple[int, int]]]:
    """The resource limits that a child of ours would have."""
    return [(which, resource.getrlimit(which)) for which in _LIMITS]


def umask() -> int:
    """Read, not set and restored: other threads may be creating files."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))


def _identity(python: str) -> tuple[str, str]:
    return os.path.realpath(os.path.dirname(os.path.abspath(python))), os.path.realpath(python)


def _importable(folder: str) -> Iterable[str]:
    """Names that an import would find in this folder before anywhere else."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((".py", ".so", ".pyc")):
                yield entry.name.partition(".")[0]
            elif os.path.exists(os.path.join(entry.path, "__init__.py")):
                yield entry.name
