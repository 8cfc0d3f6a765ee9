"""What a job can put in the place of a file, and that it holds nobody up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disks import deep_below
from stretto import jobfiles

DEADLINE_S = 60.0
F_SETSIG = 10


def soon(work: Callable[[], Any]) -> Any:
    """What it gives or raises; whoever waits for ever fails the test and not the run."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert found, "it waits for somebody"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    other = path.parent / "secret"
    other.write_text("secret")
    path.symlink_to(other)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sockets(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            listener.bind(path.name)
        finally:
            os.chdir(here)


KINDS = [fifo, link, folder, device, sockets]
USES: list[Callable[[Path, Path], Any]] = [
    lambda path, root: jobfiles.read(path, 100, root=root),
    lambda path, root: jobfiles.read_end(path, 100, root=root),
    lambda path, root: jobfiles.append(path, b"x", root=root),
    lambda path, root: os.close(jobfiles.opened(path, os.O_RDWR | os.O_CREAT, root=root)),
    lambda path, root: os.close(jobfiles.opened(path, os.O_WRONLY | os.O_CREAT)),
]


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("use", USES)
def test_what_is_no_file_is_said_at_once(
    tmp_path: Path, put: Callable[[Path], None], use: Callable[[Path, Path], Any]
) -> None:
    path = tmp_path / "7" / "log"
    path.parent.mkdir()
    put(path)
    with pytest.raises(jobfiles.Spoilt) as told:
        soon(lambda: use(path, tmp_path))
    assert told.value.filename == str(path)
    if put is link:
        assert (path.parent / "secret").read_text() == "secret"


@pytest.mark.parametrize("use", USES[:4])
def test_no_link_on_the_way_is_followed(tmp_path: Path, use: Callable[[Path, Path], Any]) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "log").write_text("another's")
    (tmp_path / "7").symlink_to(tmp_path / "8")
    with pytest.raises(jobfiles.Spoilt):
        use(tmp_path / "7" / "log", tmp_path)
    with pytest.raises(jobfiles.Spoilt):
        jobfiles.make_folder(tmp_path / "7" / "logs", root=tmp_path)
    with pytest.raises(ValueError):
        use(tmp_path / "7" / ".." / ".." / "log", tmp_path)
    assert (tmp_path / "8" / "log").read_text() == "another's"
    assert [path.name for path in (tmp_path / "8").iterdir()] == ["log"]


def test_a_lease_of_somebody_elses_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("x")
    with path.open() as file:
        fcntl.fcntl(file, F_SETSIG, signal.SIGURG)  # Which is ignored.
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        with pytest.raises(jobfiles.Spoilt):
            soon(lambda: jobfiles.opened(path, os.O_RDWR))


def test_no_more_is_read_than_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(1 << 42)
        file.seek(0, os.SEEK_END)
        file.write(b"end")
    with pytest.raises(jobfiles.Spoilt):
        jobfiles.read(path, 1000)
    assert jobfiles.read_end(path, 5) == b"\0\0end"
    path.write_bytes(b"12345")
    assert jobfiles.read(path, 5) == jobfiles.read_end(path, 9) == b"12345"


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path, over = tmp_path / "log", threading.Event()
    path.write_bytes(b"x")

    def grow() -> None:
        with path.open("ab") as file:
            while not over.is_set() and file.tell() < 1 << 28:
                file.write(b"x" * 65536)

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for _ in range(50):
            assert len(jobfiles.read_end(path, 1000)) <= 1000
            with contextlib.suppress(jobfiles.Spoilt):
                assert len(jobfiles.read(path, 1 << 16)) <= 1 << 16
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("put", [fifo, link, device, sockets])
def test_whatever_is_there_is_written_over(tmp_path: Path, put: Callable[[Path], None]) -> None:
    path = tmp_path / "7" / "notice"
    jobfiles.make_folder(path.parent, root=tmp_path)
    put(path)
    soon(lambda: jobfiles.write(path, b"here", root=tmp_path))
    assert path.read_bytes() == b"here"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    if put is link:
        assert (path.parent / "secret").read_text() == "secret"


def test_a_folder_in_the_way_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "notice").mkdir()
    with pytest.raises(jobfiles.Spoilt):
        jobfiles.write(tmp_path / "notice", b"here", root=tmp_path)
    assert os.listdir(tmp_path) == ["notice"]


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "7").write_text("")
    with pytest.raises(jobfiles.Spoilt) as told:
        jobfiles.make_folder(tmp_path / "7" / "logs", root=tmp_path)
    assert told.value.filename == str(tmp_path / "7" / "logs")


def test_folders_are_for_us_alone(tmp_path: Path) -> None:
    jobfiles.make_folder(tmp_path / "jobs" / "7" / "logs", root=tmp_path / "jobs")
    for path in (tmp_path / "jobs", tmp_path / "jobs" / "7", tmp_path / "jobs" / "7" / "logs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_names_are_counted(tmp_path: Path) -> None:
    for name in ("a\nb", "c", "\udcff", "d"):
        (tmp_path / name).write_text("")
    assert sorted(jobfiles.names(tmp_path, 10)) == sorted(["a\nb", "c", "\udcff", "d"])
    assert len(jobfiles.names(tmp_path, 2)) == 2


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    top = tmp_path / "7"
    top.mkdir()
    with deep_below(top):
        fd = os.open(top, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("d", dir_fd=fd)
            inner = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = inner
        os.symlink(kept, "link", dir_fd=fd)
        os.mkfifo("fifo", dir_fd=fd)
        os.close(fd)
        (top / "closed").mkdir()
        (top / "closed" / "file").write_text("x")
        (top / "closed").chmod(0)
        soon(lambda: jobfiles.remove(top, root=tmp_path))
        assert os.listdir(tmp_path) == ["kept"]
    assert (kept / "file").read_text() == "x"


def test_what_somebody_has_spoilt_is_not_waited_for() -> None:
    """Though the number be one that a machine in trouble gives, as a lease on a file does."""
    assert jobfiles.passes(OSError(errno.EAGAIN, "no room for a process"))
    assert jobfiles.passes(OSError(errno.ENOSPC, "no room"))
    assert not jobfiles.passes(jobfiles.Spoilt(errno.EAGAIN, "a lease"))
    assert not jobfiles.passes(OSError(errno.EACCES, "not allowed"))
    assert not jobfiles.passes(TimeoutError())


def test_a_removal_that_was_interrupted_is_completed(tmp_path: Path) -> None:
    (tmp_path / ".gone-1" / "a").mkdir(parents=True)
    (tmp_path / "7").mkdir()
    jobfiles.remove_gone(tmp_path)
    assert os.listdir(tmp_path) == ["7"]


def test_rights_are_only_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "7"
    path.mkdir(mode=0o755)
    assert jobfiles.tighten(path, 0o700, root=tmp_path) == 0o755
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert jobfiles.tighten(path, 0o700, root=tmp_path) == -1
    (tmp_path / "link").symlink_to("/etc/passwd")
    before = os.stat("/etc/passwd").st_mode
    assert jobfiles.tighten(tmp_path / "link", 0o600, root=tmp_path) == -1
    assert os.stat("/etc/passwd").st_mode == before
