"""Files that a job can write to or replace: the one way to open them.

What lies below a job's folder may be anything by the time somebody looks: a FIFO that nobody ever writes to, a link to
another's secret, a device, a folder, a file without end. So nothing there is opened but by these functions: step by
step from a folder that only the server can replace (`root`), through no link, without waiting, only if it is a regular
file, and never more of it than was asked for. What is something else is `Spoilt`; both that and every other `OSError`
is the trouble of one job, and the caller's to tell.

They wait for nobody but the disk; call them in a thread all the same where an event loop is. Standard library only:
supervisors load this file by path, in whatever Python their worker has.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Union

Path = Union[str, "os.PathLike[str]"]

_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_STEP = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SPOILT = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.ENODEV, errno.EWOULDBLOCK)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
_PASSING = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EIO,
    errno.EROFS, errno.ESTALE, errno.EFBIG,
})  # fmt: skip
_AT_ONCE = 1 << 20


class Spoilt(OSError):
    """It is there, and is not what it should be."""


def passes(error: BaseException) -> bool:
    """Whether it is the machine's fault, which may be over a little later: no room, no descriptors, a bad disk."""
    return isinstance(error, OSError) and not isinstance(error, Spoilt) and error.errno in _PASSING


def opened(path: Path, flags: int = os.O_RDONLY, mode: int = 0o600, *, root: Path | None = None) -> int:
    """A descriptor of a regular file. Without a `root` only the file itself is distrusted, not its folder."""
    with _parent(path, root) as (folder, name):
        try:
            fd = os.open(name, flags | _ALWAYS, mode, dir_fd=folder)
        except OSError as error:
            raise _told(error, path) from None
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind != stat.S_IFREG:
        os.close(fd)
        raise Spoilt(errno.EINVAL, f"there is {_KINDS.get(kind, 'something else')} in its place", os.fspath(path))
    return fd


def read(path: Path, most: int, *, root: Path | None = None) -> bytes:
    """All of it; `Spoilt` if that is more than so many bytes."""
    fd = opened(path, root=root)
    try:
        parts, left = [], most + 1
        while left and (part := os.read(fd, min(left, _AT_ONCE))):
            parts.append(part)
            left -= len(part)
    finally:
        os.close(fd)
    if not left:
        raise Spoilt(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return b"".join(parts)


def read_end(path: Path, most: int, *, root: Path | None = None) -> bytes:
    """At most so many bytes of its end, as it is at this moment."""
    fd = opened(path, root=root)
    try:
        size = os.fstat(fd).st_size
        return os.pread(fd, min(most, size), max(0, size - most))
    finally:
        os.close(fd)


def write(path: Path, contents: bytes, *, root: Path | None = None, mode: int = 0o600, durable: bool = False) -> None:
    """All of it or nothing, whatever is there now, but for a folder."""
    with _parent(path, root) as (folder, name):
        part = f".{name}.{os.urandom(4).hex()}"
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _ALWAYS, mode, dir_fd=folder)
            try:
                with open(fd, "wb") as file:
                    file.write(contents)
                    file.flush()
                    if durable:
                        os.fsync(fd)
                os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        except OSError as error:
            raise _told(error, path) from None


def append(path: Path, contents: bytes, *, root: Path | None = None) -> None:
    """To the end of it; it is made if it is not there."""
    fd = opened(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, root=root)
    with open(fd, "ab") as file:
        file.write(contents)


def make_folder(path: Path, *, root: Path, mode: int = 0o700) -> None:
    """With all that lead to it below the root, which is made as well if it is not there."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    parts = _steps(path, root)
    for count, name in enumerate(parts):
        with _folder(root, parts[:count], path) as folder:
            try:
                os.mkdir(name, mode, dir_fd=folder)
            except FileExistsError:
                continue
            except OSError as error:
                raise _told(error, path) from None
    with _folder(root, parts, path):
        pass


@contextlib.contextmanager
def folder(path: Path, *, root: Path) -> Iterator[int]:
    """A descriptor of a folder."""
    with _folder(root, _steps(path, root), path) as fd:
        yield fd


def names(path: Path, most: int, *, root: Path | None = None) -> list[str]:
    """What is in a folder; no more than so many, whichever these are."""
    found: list[str] = []
    with _folder(*_anchored(path, root), path) as folder, os.scandir(folder) as entries:
        for entry in entries:
            if len(found) == most:
                break
            found.append(entry.name)
    return found


def tighten(path: Path, mode: int, *, root: Path) -> int:
    """Take from a file or folder what only others may do with it; the rights that it had, or -1 if nothing was to be
    done. Raises OSError."""
    with _parent(path, root) as (folder, name):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        had = os.fstat(fd).st_mode
        if not had & 0o077 or not (stat.S_ISREG(had) or stat.S_ISDIR(had)):
            return -1
        os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(had) & mode)
        return stat.S_IMODE(had)
    finally:
        os.close(fd)


def remove(path: Path, *, root: Path) -> None:
    """A whole tree, however deep it is and whatever its rights are; what cannot be removed stays.

    Folders within are moved up beside the tree and emptied there one after the other: so neither the stack nor the
    number of descriptors has to be as large as the tree is deep. What an interruption leaves is named `.gone-…`.
    """
    with contextlib.suppress(OSError), _parent(path, root) as (folder, name):
        gone = f".gone-{os.urandom(6).hex()}"
        os.rename(name, gone, src_dir_fd=folder, dst_dir_fd=folder)
        _remove_flat(folder, [gone])


def remove_gone(root: Path) -> None:
    """What removals that were interrupted have left in this folder."""
    with contextlib.suppress(OSError), _folder(root, (), root) as folder:
        _remove_flat(folder, [name for name in names(root, _AT_ONCE) if name.startswith(".gone-")])


def _remove_flat(root: int, waiting: list[str]) -> None:
    while waiting:
        name = waiting.pop()
        try:
            fd = os.open(name, _STEP, dir_fd=root)
        except OSError:
            _ignoring(os.unlink, name, root)
            continue
        try:
            with contextlib.suppress(OSError):
                os.fchmod(fd, 0o700)
            with os.scandir(fd) as entries:
                found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            for inner, is_folder in found:
                if not is_folder:
                    _ignoring(os.unlink, inner, fd)
                    continue
                gone = f".gone-{os.urandom(6).hex()}"
                with contextlib.suppress(OSError):
                    _allow(inner, fd)
                    os.rename(inner, gone, src_dir_fd=fd, dst_dir_fd=root)
                    waiting.append(gone)
        except OSError:
            pass
        finally:
            os.close(fd)
        _ignoring(os.rmdir, name, root)


def _allow(name: str, folder: int) -> None:
    """A folder can be moved and opened only by whoever may write to it."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{fd}", 0o700)
    finally:
        os.close(fd)


def _ignoring(what: object, name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        what(name, dir_fd=folder)  # type: ignore[operator]


@contextlib.contextmanager
def _parent(path: Path, root: Path | None) -> Iterator[tuple[int, str]]:
    """The folder that it is in, and its name there."""
    if root is None:
        base, name = os.path.split(os.fspath(path))
        parts: tuple[str, ...] = (name,)
    else:
        base, parts = os.fspath(root), _steps(path, root)
    if not parts or parts[-1] in ("", ".", ".."):
        raise ValueError(f"{os.fspath(path)} is no file below {base}")
    with _folder(base or ".", parts[:-1], path) as folder:
        yield folder, parts[-1]


def _anchored(path: Path, root: Path | None) -> tuple[Path, tuple[str, ...]]:
    return (path, ()) if root is None else (root, _steps(path, root))


def _steps(path: Path, root: Path) -> tuple[str, ...]:
    """The names that lead from the root to it."""
    inner = os.path.relpath(os.path.abspath(path), os.path.abspath(root))
    parts = tuple(part for part in inner.split(os.sep) if part != ".")
    if ".." in parts:
        raise ValueError(f"{os.fspath(path)} is not below {os.fspath(root)}")
    return parts


@contextlib.contextmanager
def _folder(root: Path, parts: tuple[str, ...], path: Path) -> Iterator[int]:
    """Its descriptor: the root by whatever links lead there, the rest through none."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts:
            try:
                inner = os.open(part, _STEP, dir_fd=fd)
            except OSError as error:
                raise _told(error, path) from None
            os.close(fd)
            fd = inner
        yield fd
    finally:
        os.close(fd)


def _told(error: OSError, path: Path) -> OSError:
    """The same about the path that was asked for."""
    if error.errno in _SPOILT:
        text = "there is a link or something else in its place"
        return Spoilt(error.errno, text, os.fspath(path))
    return OSError(error.errno, error.strerror, os.fspath(path))
