"""Real accounts of this machine for tests, made and removed by them, and what accounts need: folders that they may pass
through, an interpreter that they may run. Where the tests are not root they are skipped; in CI that is a failure."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto import accounts
from stretto.jobs.model import Account

_PREFIX = "stretto-test"
NAMES = f"{_PREFIX}-ana-{os.getpid()}", f"{_PREFIX}-bob-{os.getpid()}"
"""Of this run alone: another may go on beside it."""
CLEO = f"{_PREFIX}-cleo-{os.getpid()}"
_PATIENCE_S = 60.0


def need_root() -> None:
    if os.geteuid() == 0:
        return
    text = "accounts are made and jobs run as them: that needs root"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


@contextlib.contextmanager
def account(name: str) -> Iterator[Account]:
    """With a home of its own. Nothing of it may run when it is removed."""
    for left in [entry.pw_name for entry in pwd.getpwall() if entry.pw_name.startswith(f"{_PREFIX}-")]:
        # Of runs that were killed.
        if not Path("/proc", left.rpartition("-")[2]).exists():
            remove(left)
    subprocess.run(
        ["useradd", "--create-home", "--groups", "users", "--shell", "/bin/sh", name], check=True, capture_output=True
    )
    made = Account(name=name, uid=pwd.getpwnam(name).pw_uid)
    try:
        yield made
        left = processes_of(made.uid)
    finally:
        for pid in processes_of(made.uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        remove(name)
    assert not left, f"{name} has left processes behind: {left}"


def remove(name: str) -> None:
    """With whatever still runs: its number is soon somebody else's."""
    with contextlib.suppress(KeyError):
        for pid in _processes_of(pwd.getpwnam(name).pw_uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        subprocess.run(["userdel", "--force", "--remove", name], check=True, capture_output=True)


def processes_of(uid: int, patience_s: float = 10.0) -> list[int]:
    """That live, and do not end within a moment."""
    deadline_s = time.monotonic() + patience_s
    while (found := _processes_of(uid)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


def _processes_of(uid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdecimal() and os.stat(f"/proc/{entry}").st_uid == uid:
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                found += [int(entry)] if state != "Z" else []
    return found


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """That every account may pass through; folders of pytest are closed."""
    path = Path(tempfile.mkdtemp(prefix="stretto-accounts-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def interpreter(folder: Path, who: Account) -> tuple[str, dict[str, str]]:
    """A Python with what is installed here that the account may run, and the variables that it needs. Where ours is in
    somebody's home, linked file by file into the folder."""
    base = Path(sys.base_prefix)
    if not accounts.unreachable(base, accounts.identity(who)):
        return sys.executable, {}
    there = folder / "python"
    if not there.exists():
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (there / "lib").mkdir(parents=True)
        (there / "bin").mkdir()
        ignored = shutil.ignore_patterns("site-packages", "test", "idlelib", "*.a")
        shutil.copytree(base / "lib" / version, there / "lib" / version, ignore=ignored, copy_function=_link)
        for library in (base / "lib").glob("libpython*.so*"):
            _link(str(library), str(there / "lib" / library.name))
        _link(str(base / "bin" / version), str(there / "bin" / version))
        packages = there / "lib" / version / "site-packages"
        packages.mkdir()
        (packages / "ours.pth").write_text(
            "\n".join(path for path in sys.path if "site-packages" in path or "/src" in path)
        )
        (there / "bin" / "python3").symlink_to(version)
    return str(there / "bin" / "python3"), {"LD_LIBRARY_PATH": str(there / "lib")}


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
