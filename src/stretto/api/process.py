"""The server as a process, `stretto up`: who holds a data directory, serves it.

    DATA/lock         held as long as the server lives; its process number is inside
    DATA/server.json  url, pid, version of the server that is ready; removed at a clean end
    DATA/token        the secret of the local admin, for the command line (0600)
    DATA/tls.key, crt the server's own key, if it makes one (0600)
    DATA/socket       where local users need no token (`local`), unless it is elsewhere
    DATA/stretto.db   the store, unless it is elsewhere
    DATA/jobs, runs   what belongs to jobs and their workers
    DATA/server.log   of a server in the background; bounded

It comes up in this order: lock, store, plane, port, and only when all of them are there it adopts what runs. It goes
down by SIGTERM or SIGINT: what is being answered is answered, workers go on. A second signal ends it at once, which
loses nothing either.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

import stretto
from stretto import jobfiles, pins, tuning
from stretto.accounts import Accounts
from stretto.api.tightening import tighten
from stretto.backends.local.runs import FolderInUse, server_lock, serving
from stretto.backends.local.supervisor import is_held
from stretto.clock import Clock
from stretto.errors import NotFound, Occupied, StrettoError, Unavailable, UsageError
from stretto.server.view import Quota
from stretto.visible import visible

if TYPE_CHECKING:
    from stretto.api.tls import Tls

DEFAULT_PORT = 8470
_DAY_S = 86400.0
_TIDY_EVERY_S = 3600.0
_LOOK_S = 0.02
_LOG_BYTES = 8 * 2**20
_PRUNED_AT_ONCE = 500
_SMALL = 1 << 16
"""More is in none of our own files."""
_MOST_FOLDERS = 10_000_000

_log = logging.getLogger("stretto.server")


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a server is told when it is started."""

    data: str
    """The data directory."""
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    """Names, beside its address, under which it answers."""
    port: int | None = None
    """None: the one it had before, at first 8470. 0: any that is free. Workers come back to it after a restart."""
    nodes: str = ""
    """`2x4`: two nodes of four devices each; what the machine has, if empty."""
    cpu: bool = False
    """Slots of the processor, whatever GPUs there are."""
    store: str = ""
    """A PostgreSQL URL or a file; DATA/stretto.db, if empty."""
    policy: str = ""
    """Empty: what was chosen last, at first `stretto`."""
    quotas: dict[str, Quota] = {}
    """By user; `*` is everybody else."""
    retention_s: float = 30 * _DAY_S
    """Ended jobs are forgotten after so long."""
    away_s: float = 600.0
    """Workers stop when no server was there for so long."""
    warm: bool = True
    """Workers may be forks of a warm interpreter."""
    record: str = ""
    """A file in which every decision is written down."""
    notify_to: tuple[str, ...] = ()
    """Networks that are not public and that job files may have told of their events."""
    reserve_mib: int | None = None
    """Of the data directory's disk, kept for the server; None: 512 MiB, or 5 % of a smaller disk."""
    shared: bool = False
    """All users' jobs run as the account of the server."""
    opened: bool = False
    """Everybody with a token reads everything."""
    allow_root: bool = False
    """Tokens may be made whose jobs run as root."""
    insecure: bool = False
    """It may listen where others than this machine reach it, though all that is said there can be read on the way."""
    tls: bool = False
    """With a key of its own, which is made at the first start."""
    tls_files: tuple[str, str] | None = None
    """A certificate and its key, instead."""
    socket: str = ""
    """Where local users are known by their account; DATA/socket, if empty."""


class Info(msgspec.Struct, frozen=True, kw_only=True):
    """Of a server that is ready."""

    url: str
    pid: int
    version: str
    slots: str = ""
    """What workers run on, in words: `2 h200`, `6 CPU slots (--cpu)`."""
    pin: str = ""
    """Of its key (`stretto.pins`), where TLS is spoken."""
    socket: str = ""
    """Where local users need no token; empty if there is none."""
    notes: tuple[str, ...] = ()
    """What is to be known about whose processes jobs are."""


def default_data() -> Path:
    """`$STRETTO_HOME`, or a folder in the user's home."""
    given = os.environ.get("STRETTO_HOME")
    return Path(given) if given else Path.home() / ".local" / "share" / "stretto"


def serve(options: Options, *, detach: bool = False, ready: Callable[[Info], None] = lambda info: None) -> Info:
    """Serve until a signal comes; `ready` is called when it is. With `detach` a process in the background does, and
    this returns when that one is ready. Raises what keeps it from serving."""
    if detach:
        return _start_in_background(options)
    with _holding(Path(options.data), Accounts(Path(options.data), shared=options.shared).separates):
        return _run(_serve(options, ready, Clock()))


def running(data: Path) -> Info | None:
    """The server that is ready there, if there is one."""
    if not is_held(str(server_lock(data))):
        return None
    return _read_info(data)


def down(data: Path, *, cancel_jobs: bool = False, timeout_s: float = 60.0) -> None:
    """End the server that works there, and wait until the directory is free. Workers go on, unless all jobs are to be
    cancelled first."""
    lock = server_lock(data)
    if not is_held(str(lock)):
        raise NotFound(f"no server works in {data}", hint="`stretto up` starts one")
    deadline_s = time.monotonic() + timeout_s
    if cancel_jobs:
        _cancel_all(data, deadline_s)
    _send(data, signal.SIGTERM)
    while is_held(str(lock)):
        if time.monotonic() >= deadline_s:
            raise Unavailable(
                f"the server in {data} has not ended within {timeout_s:g} s", hint="look into its server.log"
            )
        time.sleep(_LOOK_S)


# In this process.


@contextlib.contextmanager
def _holding(data: Path, separates: bool) -> Iterator[None]:
    """Hold the data directory, and say so. `separates`: jobs of several accounts pass through it."""
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        with serving(data):
            _write_holder(data)
            for said in tighten(data, separates=separates):
                _log.warning("%s", said)
            with contextlib.suppress(FileNotFoundError):
                (data / "server.json").unlink()
            yield
    except FolderInUse:
        raise _occupied(data) from None
    except OSError as error:
        raise UsageError(
            f"the data directory {data} cannot be used: {error.strerror or error}", hint="give another one with --data"
        ) from None


def _occupied(data: Path) -> Occupied:
    info, pid = _read_info(data), _holder(data)
    who = f"process {pid or 'unknown'}" + (f" at {info.url}" if info is not None else "")
    return Occupied(
        f"another server ({who}) works in {data}", hint="use it, stop it (`stretto down`), or give another --data"
    )


def _run(work: Any) -> Info:
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        made: Info = runner.run(work)
        return made


async def _serve(options: Options, ready: Callable[[Info], None], clock: Clock) -> Info:
    from stretto.api.serving import HttpServer

    tuning.for_serving()
    stop = _signals()
    data = Path(options.data).absolute()
    tls = _tls(options, data)
    async with _opened(options, data, clock, tls.pin if tls else "") as (app, listening, info):
        near = _near(options, data)
        info = msgspec.structs.replace(info, socket=str(near.getsockname()) if near else "")
        server = HttpServer(app, listening, tls=tls, local=near)
        await server.start()
        _write_atomically(data / "server.json", msgspec.json.encode(info), 0o600)
        tidying = asyncio.create_task(_tidy_now_and_then(app.state.parts, data, options.retention_s))
        _log.info("ready at %s: %s, data in %s", info.url, info.slots, data)
        try:
            ready(info)
            await stop.wait()
        finally:
            _log.info("going down; workers go on")
            (data / "server.json").unlink(missing_ok=True)
            tidying.cancel()
            if info.socket:
                with contextlib.suppress(OSError):
                    Path(info.socket).unlink()
            await server.stop()
    return info


@contextlib.asynccontextmanager
async def _opened(
    options: Options, data: Path, clock: Clock, pin: str = ""
) -> AsyncIterator[tuple[Any, socket.socket, Info]]:
    """Store, plane, port; then the plane begins to work. `pin`: of the key, if TLS is spoken."""
    from stretto.api import Auth, create_app
    from stretto.api.hosts import Hosts, names
    from stretto.api.serving import address_of, bind
    from stretto.backends.local.backend import LocalBackend
    from stretto.backends.local.machine import discover
    from stretto.server.disk import Rules as Room
    from stretto.server.plane import Plane
    from stretto.store import Store

    accounts = Accounts(data, shared=options.shared, allow_root=options.allow_root)
    machine = discover(options.nodes, cpu=options.cpu)
    store = Store.open(options.store or str(data / "stretto.db"), clock=clock.wall)
    address = ""
    try:
        newest = store.events(limit=1, newest_first=True)
        clock.resume(store.setting("clock"), newest[0].at_s if newest else 0.0)
        store.put_setting("clock", clock.anchor())
        backend = LocalBackend(
            data, machine.nodes, machine=machine, warm=options.warm, away_s=options.away_s, clock=clock
        )
        plane = Plane(
            data,
            store,
            backend,
            url=lambda: pins.joined(f"wss://{address}", pin) if pin else f"ws://{address}",
            clock=clock,
            told=clock.told,
            heard=clock.heard,
            quotas=options.quotas,
            policy=options.policy,
            record=Path(options.record) if options.record else None,
            notify_to=options.notify_to,
            room=Room(reserve_mib=options.reserve_mib),
            accounts=accounts,
        )
        listening = bind(options.host, _port(options, plane.settings), insecure=options.insecure or bool(pin))
        with listening:
            address = address_of(listening)
            store.put_setting("port", listening.getsockname()[1]).result()
            _ensure_token(data, store, clock.wall(), accounts)
            hosts = Hosts(listening.getsockname()[0].partition("%")[0], names(options.hosts))
            app = create_app(plane, Auth(store, clock.wall, clock, accounts), hosts, opened=options.opened)
            info = Info(
                url=f"{'https' if pin else 'http'}://{address}", pid=os.getpid(), version=stretto.__version__,
                slots=str(machine), pin=pin, notes=accounts.notes,
            )  # fmt: skip
            await plane.open()
            try:
                yield app, listening, info
            finally:
                await plane.close()
    finally:
        store.close()


def _tls(options: Options, data: Path) -> Tls | None:
    from stretto.api import tls
    from stretto.api.hosts import names

    if options.tls_files is not None:
        certificate, key = options.tls_files
        return tls.given(Path(certificate), Path(key))
    return tls.made(data, names(options.hosts)) if options.tls else None


def _near(options: Options, data: Path) -> socket.socket | None:
    """The socket of local users. Nobody has asked for the usual one, so that it may be missing."""
    from stretto.api import local

    path = Path(options.socket) if options.socket else data / "socket"
    if not options.socket and not local.fits(path):
        _log.warning("there is no socket for local users: %s is too long a path for one; see --socket", path)
        return None
    return local.bind(path)


def _port(options: Options, settings: Mapping[str, Any]) -> int:
    if options.port is not None:
        return options.port
    port = settings.get("port")
    return port if isinstance(port, int) and 0 <= port < 1 << 16 else DEFAULT_PORT


def _signals() -> asyncio.Event:
    """Set by the first signal; the second ends the process."""
    stop = asyncio.Event()

    def received(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    return stop


def _ensure_token(data: Path, store: Any, now_s: float, accounts: Accounts) -> None:
    """The local command line has a token that works, and submits as we. The file is written first: a hash without a
    secret is of no use to anybody."""
    from stretto.api.auth import digest_of, make_token, new_secret
    from stretto.api.local import own_name

    path = data / "token"
    try:
        secret = jobfiles.read(path, _SMALL).decode().strip()
    except (OSError, UnicodeDecodeError):
        secret = ""
    own = accounts.own
    known = store.token_by_hash(digest_of(secret)) if secret else None
    if known is not None:
        accounts.own_token = known.hash
        if (known.account, known.uid) != (own.name, own.uid):
            store.give_account(known.id, own.name, own.uid).result()
        return
    fresh = not store.tokens()
    if not (fresh and secret):
        secret = new_secret()
        _write_atomically(path, f"{secret}\n".encode(), 0o600)
    accounts.own_token = digest_of(secret)
    store.add_token(make_token(secret, own_name(), "admin", now_s, account=own)).result()


# Tidying up.


async def _tidy_now_and_then(parts: Any, data: Path, retention_s: float) -> None:
    while True:
        try:
            await _tidy(parts, data, parts.plane.clock() - retention_s)
        except Exception as error:
            # What cannot be removed today may be tomorrow, and there is more to remove.
            _log.warning(
                "tidying up: %s", error, exc_info=None if isinstance(error, (StrettoError, OSError)) else error
            )
        await asyncio.sleep(min(_TIDY_EVERY_S, max(1.0, retention_s / 10)))


async def _tidy(parts: Any, data: Path, before_s: float) -> None:
    """Forget jobs that ended before then, with their folders; and bound our own log."""
    store = parts.plane.store
    while await asyncio.wrap_future(store.prune(before_s, _PRUNED_AT_ONCE)) == _PRUNED_AT_ONCE:
        pass
    parts.observed.recount(await asyncio.to_thread(store.count))
    await parts.plane.forget_classes_without_jobs()
    for kind in ("jobs", "records"):
        await asyncio.to_thread(_remove_folders, store, data / kind, parts.plane.told(before_s))
    _bound_log(data)


def _remove_folders(store: Any, jobs: Path, before_s: float) -> None:
    """Those of jobs that nobody knows any more. A folder that has changed since then is a newer job's."""
    jobfiles.remove_gone(jobs)
    for name in _numbers(jobs):
        with contextlib.suppress(FileNotFoundError):
            old = (jobs / name).lstat().st_mtime < before_s
            if old and store.job(int(name)) is None:
                jobfiles.remove(jobs / name, root=jobs)


def _numbers(jobs: Path) -> list[str]:
    try:
        return [name for name in jobfiles.names(jobs, _MOST_FOLDERS) if name.isdecimal() and len(name) < 19]
    except FileNotFoundError:
        return []


def _bound_log(data: Path) -> None:
    """Only if standard error goes there: keep the last one beside it, and begin a new one."""
    path = data / "server.log"
    try:
        about, ours = path.stat(), os.fstat(2)
    except OSError:
        return
    if (about.st_dev, about.st_ino) != (ours.st_dev, ours.st_ino) or about.st_size < _LOG_BYTES:
        return
    path.rename(data / "server.log.1")
    _connect_log(path)


def _connect_log(path: Path) -> None:
    fd = jobfiles.opened(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


# In the background.


def _start_in_background(options: Options) -> Info:
    """A process of its own, in a session of its own; it says through a pipe how it went."""
    options = msgspec.structs.replace(options, data=os.path.abspath(options.data))
    out, into = os.pipe()
    try:
        process = subprocess.Popen(
            # Its arguments are there for all to see: what it is told comes by a pipe. The folder is for people.
            [sys.executable, "-m", "stretto.api.process", options.data, str(into)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[into],
            cwd="/",
        )
    finally:
        os.close(into)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as told:
        told.write(msgspec.json.encode(options))
    with open(out, "rb") as pipe:
        word = json.loads(pipe.read() or b"{}")
    if "url" in word:
        # It is not waited for: it outlives us.
        process.returncode = 0
        return Info(**word)
    process.wait()
    raise _told_error(word, options)


def _told_error(word: dict[str, Any], options: Options) -> StrettoError:
    if "message" not in word:
        return Unavailable("the server ended before it was ready", hint=f"look into {options.data}/server.log")
    error = StrettoError(word["message"], hint=word["hint"])
    error.code, error.exit_code = word["code"], word["exit_code"]
    return error


def main() -> int:
    """What `_start_in_background` starts: the descriptor that waits for the outcome; options on standard input."""
    options, into = msgspec.json.decode(sys.stdin.buffer.read(), type=Options), int(sys.argv[2])
    os.set_inheritable(into, False)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)

    def ready(info: Info) -> None:
        os.write(into, msgspec.json.encode(info))
        os.close(into)

    try:
        with contextlib.suppress(OSError):
            os.makedirs(options.data, mode=0o700, exist_ok=True)
            _connect_log(Path(options.data) / "server.log")
            _bound_log(Path(options.data))
        set_up_logging()
        serve(options, ready=ready)
    except StrettoError as error:
        _log.error("%s", error)
        words = {"code": error.code, "exit_code": error.exit_code, "message": error.message, "hint": error.hint}
        with contextlib.suppress(OSError):
            os.write(into, msgspec.json.encode(words))
        return error.exit_code
    return 0


class LogFormatter(logging.Formatter):
    """For people at a terminal: nobody's text is obeyed by it, or begins a line of ours."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\n", "\n    ")
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def set_up_logging() -> None:
    """To standard error, with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # A log that cannot be written is not worth a traceback, which would go there, too.
    logging.raiseExceptions = False
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for talkative in ("uvicorn", "alembic"):
        logging.getLogger(talkative).setLevel(logging.WARNING)


# Files, and other servers.


def _write_atomically(path: Path, contents: bytes, mode: int) -> None:
    jobfiles.write(path, contents, mode=mode, durable=True)


def _write_holder(data: Path) -> None:
    """Who holds the directory, into the file that is locked."""
    fd = jobfiles.opened(server_lock(data), os.O_WRONLY)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
    finally:
        os.close(fd)


def _read_info(data: Path) -> Info | None:
    try:
        return msgspec.json.decode(jobfiles.read(data / "server.json", _SMALL), type=Info)
    except (OSError, msgspec.MsgspecError):
        return None


def _holder(data: Path) -> int:
    """The process that holds the directory, as it said itself; 0 if that cannot be read."""
    try:
        return int(jobfiles.read(server_lock(data), _SMALL))
    except (OSError, ValueError):
        return 0


def _send(data: Path, number: int) -> None:
    """Through a descriptor, so that a process number that was given to somebody else meanwhile harms nobody."""
    pid = _holder(data)
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        raise Unavailable(f"who works in {data} is not to be found", hint="is it on another machine?") from None
    try:
        if _holder(data) == pid and is_held(str(server_lock(data))):
            signal.pidfd_send_signal(pidfd, number)
    except PermissionError:
        raise Unavailable(f"process {pid} belongs to somebody else", hint="ask them to stop it") from None
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def _cancel_all(data: Path, deadline_s: float) -> None:
    """Cancel every job that has not ended, and wait until all have."""
    while (found := _active_jobs(data)) and time.monotonic() < deadline_s:
        for job in found:
            if job["wish"] != "cancel":
                _ask(data, "POST", f"/v1/jobs/{job['id']}/cancel")
        time.sleep(_LOOK_S)
    if found:
        raise Unavailable(f"{len(found)} jobs have not ended in time", hint="try again, or end the server without them")


def _active_jobs(data: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _ask(data, "GET", "/v1/jobs?phase=active&limit=1000")["items"]
    return found


def _ask(data: Path, method: str, path: str) -> dict[str, Any]:
    info = _read_info(data)
    if info is None:
        raise Unavailable(f"the server in {data} is not ready", hint="try again later")
    connection = _connection(info)
    try:
        secret = jobfiles.read(data / "token", _SMALL).decode().strip()
        connection.request(method, path, headers={"Authorization": f"Bearer {secret}"})
        answer = connection.getresponse()
        found: dict[str, Any] = msgspec.json.decode(answer.read())
    except (OSError, http.client.HTTPException, msgspec.MsgspecError) as error:
        raise Unavailable(f"{info.url} cannot be asked: {error}", hint="try again later") from None
    finally:
        connection.close()
    if answer.status >= 400 and answer.status != 409:
        raise Unavailable(f"{info.url}: {found.get('detail')}", hint=str(found.get("hint", "")))
    return found


def _connection(info: Info) -> http.client.HTTPConnection:
    address = urlsplit(info.url).netloc
    if info.pin:
        return http.client.HTTPSConnection(address, timeout=30, context=pins.context(info.pin))
    return http.client.HTTPConnection(address, timeout=30)


if __name__ == "__main__":
    sys.exit(main())
