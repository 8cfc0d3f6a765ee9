"""Accounts of this machine: whose processes jobs are.

A server that root has started gives every job the account of its submitter: then nothing that a job does reaches what
the system keeps from that account. Name and number of the account are remembered with tokens and jobs, and both must
still belong together when something is started: a number that was given to somebody else meanwhile is nobody's right.

What has to be looked up or made where an account may write is done `acting` as that account: the thread that looks has
its rights on files and no more, and runs nothing of its.
"""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import platform
import pwd
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from stretto import jobfiles
from stretto.errors import StrettoError, UsageError
from stretto.jobs.model import Account, Job

_FIRST_UID = 1000
"""Below are the system's own, where /etc/login.defs says nothing else."""
_NOBODY = 65534
_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159}
"""The call itself, by processor: the C library's function changes all threads at once."""

_libc = ctypes.CDLL(None, use_errno=True)


class AccountRefused(StrettoError):
    """Nothing is run as this account, and why."""

    code = "account"


class Identity(NamedTuple):
    """All that makes a process an account's."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str
    shell: str

    @property
    def variables(self) -> dict[str, str]:
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def own() -> Account:
    """Whose process this is."""
    uid = os.geteuid()
    try:
        return Account(name=pwd.getpwuid(uid).pw_name, uid=uid)
    except KeyError:
        return Account(name=str(uid), uid=uid)


def _called() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def named(name: str) -> Account:
    """The account of this name, if jobs may run as it; raises `UsageError`. For root see `Accounts`."""
    try:
        uid = pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        raise UsageError(
            f"there is no account {name!r} on this machine",
            hint="make one (useradd), or name another with --account",
        ) from None
    if uid and uid < (first := first_uid()):
        raise UsageError(
            f"the account {name!r} is one of the system's (uid {uid}, people's begin at {first})",
            hint="name an account of a person with --account",
        )
    return Account(name=name, uid=uid)


def first_uid(login_defs: str = "/etc/login.defs") -> int:
    """The lowest number of a person's account."""
    with contextlib.suppress(OSError, ValueError), open(login_defs) as lines:
        for line in lines:
            words = line.split()
            if len(words) > 1 and words[0] == "UID_MIN":
                return int(words[1], 0)
    return _FIRST_UID


def identity(account: Account) -> Identity:
    """As the system knows it now; raises `AccountRefused` when name and number do not belong together any more."""
    try:
        entry = pwd.getpwnam(account.name)
    except (KeyError, ValueError):
        raise AccountRefused(f"there is no account {account.name!r} on this machine any more", hint=_ANEW) from None
    if entry.pw_uid != account.uid:
        raise AccountRefused(
            f"the account {account.name!r} has the uid {entry.pw_uid} now, and had {account.uid} when the job came",
            hint=_ANEW,
        )
    groups = tuple(sorted(set(os.getgrouplist(account.name, entry.pw_gid))))
    home, shell = entry.pw_dir or "/", entry.pw_shell or "/bin/sh"
    return Identity(account.name, account.uid, entry.pw_gid, groups, home, shell)


_ANEW = "an admin makes a new token (`stretto token create`), and the job is submitted with that"


def can_separate() -> str:
    """Why this process cannot start others as other accounts; empty if it can. Found out by trying."""
    if os.geteuid() != 0:
        return "it was not started by root"
    if platform.machine() not in _SETGROUPS:
        return f"it is not known how on {platform.machine()}"
    trial = Identity("nobody", _NOBODY, _NOBODY, (_NOBODY,), "/", "/bin/sh")
    problem: list[str] = []

    def work() -> None:
        try:
            with acting(trial):
                pass
        except OSError as error:
            problem.append(error.strerror or str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return problem[0] if problem else ""


@contextlib.contextmanager
def acting(who: Identity | None) -> Iterator[None]:
    """What this thread does to files is done with the rights of the account, and nothing else is: to signals and to
    other threads we are who we were. None: with our own. No thread or process is started meanwhile: it would keep
    these rights."""
    if who is None:
        yield
        return
    before, group = os.getgroups(), os.getegid()
    try:
        _set_groups(who.groups)
        _libc.setfsgid(who.gid)
        _libc.setfsuid(who.uid)
        # They say nothing of success: asked for what cannot be, they say how things are.
        if _libc.setfsuid(-1) != who.uid or _libc.setfsgid(-1) != who.gid:
            raise PermissionError(1, f"we may not act as {who.name}")
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(group)
        _set_groups(before)


def _set_groups(groups: tuple[int, ...] | list[int]) -> None:
    """Of this thread alone."""
    several = (ctypes.c_uint32 * len(groups))(*groups)
    number = ctypes.c_long(_SETGROUPS[platform.machine()])
    if _libc.syscall(number, ctypes.c_long(len(groups)), several):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def own_folder(path: Path, *, root: Path, who: Identity | None) -> None:
    """A folder for this account alone (0700), in one that only we can change. One of ours that is empty is given away;
    any other that is not the account's is refused."""
    jobfiles.make_folder(path, root=root)
    if who is None:
        return
    with jobfiles.folder(path, root=root) as fd:
        about = os.fstat(fd)
        if about.st_uid == os.geteuid() and not os.listdir(fd):
            os.fchown(fd, who.uid, who.gid)
            os.fchmod(fd, 0o700)
        elif about.st_uid != who.uid:
            raise PermissionError(13, f"it belongs to uid {about.st_uid}, and not to {who.name}", str(path))


def unreachable(path: Path, who: Identity) -> str:
    """What keeps the account from entering a folder; empty if nothing does."""
    with acting(who):
        for folder in (*reversed(path.absolute().parents), path.absolute()):
            try:
                about = os.stat(folder)
            except OSError:
                return f"{folder.parent} is closed to it"
            if not stat.S_ISDIR(about.st_mode):
                return f"{folder} is no folder"
        if not os.path.lexists(os.path.join(path, ".")):
            return f"{path} is closed to it"
    return ""


class Accounts:
    """What a server does about accounts."""

    def __init__(self, data: Path, *, shared: bool = False, allow_root: bool = False) -> None:
        self.data, self.shared, self.allow_root = data, shared, allow_root
        self.own = own()
        self._own_names = {self.own.name, _called()}
        """Of the users whose jobs are ours: that of our own command line may have its name from a variable."""
        self.why_not = "--shared was given" if shared else can_separate()
        """Why jobs run as the server's own account, all of them; empty: each runs as its submitter's."""
        self.own_token = ""
        """SHA-256 of the token that `stretto up` has made."""

    @property
    def separates(self) -> bool:
        return not self.why_not

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be said about it when a server starts."""
        if self.separates:
            return (
                "jobs run as the accounts of their submitters; the token of this server's own command line submits as "
                f"{self.own.name}, who may do everything here: for people, `stretto token create NAME`",
            )
        shared = "jobs of all users run" if self.shared else "all jobs run"
        end = "" if self.own.uid else ", who may do everything here"
        return (f"{shared} as {self.own.name}{end}: they reach each other and all that is {self.own.name}'s",)

    def for_token(self, user: str, role: str, name: str | None, *, shared: bool = False) -> Account | None:
        """As whom a new token will submit; raises `UsageError`. None: as the server itself."""
        if self.separates:
            return self._separate(user, role, name, shared)
        if name is not None:
            raise UsageError(f"--account: all jobs of this server run as {self.own.name} ({self.why_not})", hint=_HOW)
        if user not in self._own_names and not (self.shared or shared):
            raise UsageError(
                f"this server runs all jobs as {self.own.name}: whoever submits here can do what {self.own.name} can",
                hint=f"--shared says that {user} may; a server started by root runs jobs as their submitters",
            )
        return None

    def _separate(self, user: str, role: str, name: str | None, shared: bool) -> Account | None:
        if shared:
            raise UsageError("--shared: this server runs jobs as their submitters", hint="leave it out")
        if role == "viewer" and name is None:
            return None
        account = named(user if name is None else name)
        if account.uid == 0 and not self.allow_root:
            raise UsageError(
                "the account 'root' may do everything on this machine",
                hint="name another with --account, or start the server with --allow-root",
            )
        if account.uid and (why := unreachable(self.data, identity(account))):
            raise UsageError(
                f"the account {account.name!r} cannot reach the data directory {self.data}: {why}",
                hint="start the server with a --data that everybody may pass through, such as /var/lib/stretto",
            )
        return account

    def person(self, uid: int) -> Account | None:
        """Whose account that is, if its jobs could run as it: one of another person, on a server that tells them
        apart."""
        if not self.separates or uid in (self.own.uid, _NOBODY):
            return None
        try:
            return named(pwd.getpwuid(uid).pw_name)
        except (KeyError, UsageError):
            return None

    def refusal(self, account: Account | None, digest: str) -> str:
        """Why nothing may be changed or submitted with a token; empty if it may."""
        if not self.separates:
            return ""
        if account is None:
            return "this token names no account, and this server runs jobs as their submitters"
        if account.uid == 0 and not self.allow_root and digest != self.own_token:
            return "this token submits as root, and this server was not started with --allow-root"
        return ""

    def of(self, job: Job) -> Account | None:
        """As whom a job runs; None: as the server itself. Raises `AccountRefused`."""
        if not self.separates:
            return None
        account = job.account
        if account is None:
            if job.user in self._own_names:
                return None
            text = "it was submitted to a server that did not run jobs as their submitters"
            raise AccountRefused(text, hint=_ANEW)
        if account.uid:
            return account
        if job.user not in self._own_names and not self.allow_root:
            raise AccountRefused("it would run as root, and the server was not started with --allow-root", hint=_ANEW)
        return None

    def identity(self, job: Job) -> Identity | None:
        account = self.of(job)
        return None if account is None else identity(account)


_HOW = "leave it out; a server started by root runs jobs as their submitters"
