"""`stretto up` and `stretto down`: the server on this machine."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.cli import show, words
from stretto.cli.options import DATA, Json, policy_for_server
from stretto.errors import UsageError

if TYPE_CHECKING:
    from stretto.api.process import Info
    from stretto.server.view import Quota

Data = Annotated[Path | None, DATA]
_DATABASE = "STRETTO_DATABASE"
_PATIENCE_S = 10.0
_QUOTA = "write USER=DEVICES, USER=DEVICES,JOBS or USER=,JOBS"


def up(
    *,
    detach: Annotated[
        bool, Parameter(name=["--detach", "-d"], negative=(), help="In the background; returns when it is ready.")
    ] = False,
    data: Data = None,
    host: Annotated[str, Parameter(help="Where it listens.")] = "127.0.0.1",
    tls: Annotated[
        bool, Parameter(negative=(), help="Speak TLS, with a key that is made at the first start and kept.")
    ] = False,
    tls_cert: Annotated[Path | None, Parameter(help="Speak TLS with this certificate (PEM); with --tls-key.")] = None,
    tls_key: Annotated[Path | None, Parameter(help="Its key.")] = None,
    socket: Annotated[
        Path | None,
        Parameter(help="The socket at which local users need no token; default: `socket` in the data directory."),
    ] = None,
    insecure: Annotated[
        bool, Parameter(negative=(), help="Listen beyond this machine, though nothing is encrypted.")
    ] = False,
    allow_host: Annotated[
        list[str], Parameter(negative=(), help="A name, beside its address, that clients call it by; may be repeated.")
    ] = [],  # noqa: B006
    notify_to: Annotated[
        list[str],
        Parameter(negative=(), help="A private network that `notify` of a job file may reach; may be repeated."),
    ] = [],  # noqa: B006
    port: Annotated[
        int | None, Parameter(help="0: any that is free. Default: the one it had before, at first 8470.")
    ] = None,
    nodes: Annotated[
        str | None, Parameter(help="2x4 presents two nodes of four devices; default: this machine.")
    ] = None,
    slots: Annotated[int | None, Parameter(help="One node with so many slots; the same as --nodes 1xSLOTS.")] = None,
    cpu: Annotated[
        bool, Parameter(negative=(), help="Slots of the processor, as if this machine had no GPUs.")
    ] = False,
    policy: Annotated[str, Parameter(help="The policy; default: the one chosen last, at first stretto.")] = "",
    db: Annotated[
        str | None,
        Parameter(help="postgresql://… without a password, or a file; default: SQLite in the data directory."),
    ] = None,
    db_file: Annotated[
        Path | None, Parameter(help="A file with that URL in it, password and all; or set STRETTO_DATABASE.")
    ] = None,
    quota: Annotated[
        list[str],
        Parameter(
            negative=(), help="USER=DEVICES or USER=DEVICES,JOBS at a time; * is everybody else; may be repeated."
        ),
    ] = [],  # noqa: B006
    retention: Annotated[str, Parameter(help="Ended jobs are forgotten after so long.")] = "30d",
    away: Annotated[str, Parameter(help="Workers stop at a checkpoint when no server was there for so long.")] = "10m",
    reserve: Annotated[
        str | None, Parameter(help="Nothing is accepted with less free on its disk: 1Gi; 0Mi: never refused for that.")
    ] = None,
    record: Annotated[
        Path | None, Parameter(help="Write every decision to this file: `stretto sim replay` plays it again.")
    ] = None,
    shared: Annotated[
        bool, Parameter(negative=(), help="Jobs of all users run as this server's account, and reach all that is its.")
    ] = False,
    opened: Annotated[
        bool,
        Parameter(
            name="--open", negative=(), help="Whoever has a token reads everybody's job files, logs and results."
        ),
    ] = False,
    allow_root: Annotated[bool, Parameter(negative=(), help="Tokens may be made whose jobs run as root.")] = False,
    warm: Annotated[bool, Parameter(negative="--cold", help="Workers may be forks of a warm interpreter.")] = True,
    json: Json = False,
) -> None:
    """Start the server on this machine."""
    from stretto.api.process import Options, serve, set_up_logging
    from stretto.client.finding import data_folder

    if nodes is not None and slots is not None:
        raise UsageError("--nodes and --slots say the same thing twice", hint="leave out one of the two")
    if slots is not None and slots < 1:
        raise UsageError(f"{slots} slots are too few", hint="give a number above 0")
    if port is not None and not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port", hint="give 1..65535, or 0 for any that is free")
    if record is not None:
        from stretto.sim import live_record

        live_record.check(record.absolute())
    options = Options(
        data=str((data or data_folder()).absolute()),
        host=host,
        insecure=insecure,
        tls=tls,
        tls_files=given_files(tls_cert, tls_key),
        socket=str(socket.absolute()) if socket else "",
        hosts=tuple(allow_host),
        notify_to=tuple(notify_to),
        port=port,
        nodes=nodes or (f"1x{slots}" if slots else ""),
        cpu=cpu,
        store=_database(db, db_file),
        policy=policy_for_server(policy),
        quotas=quotas_of(quota),
        retention_s=words.seconds(retention),
        away_s=words.seconds(away),
        warm=warm,
        reserve_mib=None if reserve is None else words.disk_mib(reserve),
        shared=shared,
        opened=opened,
        allow_root=allow_root,
        record=str(record.absolute()) if record else "",
    )
    if detach:
        _ready(serve(options, detach=True), json)
        return
    set_up_logging()
    serve(options, ready=lambda info: _ready(info, json))


def down(
    *,
    data: Data = None,
    cancel_jobs: Annotated[
        bool, Parameter(negative=(), help="Cancel every job first, and wait for their ends.")
    ] = False,
    json: Json = False,
) -> None:
    """Stop the server on this machine. Its jobs go on for a while, and a new server takes them over."""
    from stretto.api.process import down as end
    from stretto.api.process import running
    from stretto.client.finding import data_folder

    folder = (data or data_folder()).absolute()
    with _process_gone(running(folder)):
        end(folder, cancel_jobs=cancel_jobs)
    if json:
        show.as_json({"data": str(folder), "running": False})
    else:
        print("the server has ended" + (", and all jobs" if cancel_jobs else "; jobs that run go on for a while"))


@contextmanager
def _process_gone(info: Info | None) -> Iterator[None]:
    """The data directory is free a little before the process has gone, which is waited for here; not for ever."""
    try:
        process = os.pidfd_open(info.pid if info is not None else 0)
    except OSError:
        yield
        return
    try:
        yield
        select.select([process], [], [], _PATIENCE_S)
    finally:
        os.close(process)


def _ready(info: Info, json: bool) -> None:
    if json:
        key = {"key": info.pin} if info.pin else {}
        told = {"url": info.url, "pid": info.pid, "version": info.version, "slots": info.slots, "notes": info.notes}
        show.as_json({**told, **key})
    else:
        print(f"ready at {info.url} (process {info.pid}): {info.slots}")
        if info.pin:
            print(f"its key is {info.pin}")
        for note in info.notes:
            show.note(note)
    sys.stdout.flush()


def given_files(certificate: Path | None, key: Path | None) -> tuple[str, str] | None:
    """Of `--tls-cert` and `--tls-key`."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError("--tls-cert and --tls-key belong together", hint="give both, or --tls for a key of its own")
    return str(certificate.absolute()), str(key.absolute())


def _database(given: str | None, file: Path | None) -> str:
    """Where the store is. A password comes by a file or by a variable, which is not passed on: arguments are there for
    everybody on the machine to see."""
    from stretto.store.secrets import has_password

    variable = os.environ.pop(_DATABASE, "").strip()
    if given and has_password(given):
        raise UsageError(
            "--db: a password in an argument can be read by everybody on this machine",
            hint=f"write the URL into a file of yours alone and give it with --db-file, or set {_DATABASE}; "
            "and change the password",
        )
    if given and file:
        raise UsageError("--db and --db-file are both given", hint="keep one of them")
    if file is None:
        return given or variable
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"--db-file {file}: cannot be read: {error}", hint="it holds one line, the URL") from None
    if not text or "\n" in text:
        raise UsageError(f"--db-file {file}: does not hold one line", hint="write the URL into it, and nothing else")
    return text


def quotas_of(texts: list[str]) -> dict[str, Quota]:
    """`ana=4,20`, `ana=4`, `ana=,20`; each user once."""
    found: dict[str, Quota] = {}
    for text in texts:
        user, sign, limits = text.partition("=")
        if not sign or not user.strip():
            raise UsageError(f"--quota {text!r} does not say whose it is, or how much", hint=_QUOTA)
        if user in found:
            raise UsageError(f"--quota is given twice for {user}", hint="give each user one: USER=DEVICES,JOBS")
        found[user] = _quota(text, limits)
    return found


def _quota(text: str, limits: str) -> Quota:
    from stretto.server.view import Quota

    devices, _, jobs = (part.strip() for part in limits.partition(","))
    if not devices and not jobs:
        raise UsageError(f"--quota {text!r} sets no limit", hint=_QUOTA)
    try:
        return Quota(devices=float(devices) if devices else None, jobs=int(jobs) if jobs else None)
    except ValueError:
        raise UsageError(f"--quota {text!r} cannot be understood", hint=_QUOTA) from None
    except UsageError as error:
        raise UsageError(f"--quota {text!r}: {error.message}", hint=error.hint) from None
