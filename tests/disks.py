"""Machines in trouble, for tests: a disk without room, a process without descriptors, folders without end. The errors
are the kernel's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "8m") -> Iterator[Path]:
    """A file system of its own with little room; where none can be mounted, the test is skipped."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no small disk can be made here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def dead_disk(folder: Path) -> Iterator[Path]:
    """A file system that answers nothing, as one whose server is away; at the end whoever waits for it gets an error.
    Where none can be mounted, the test is skipped."""
    folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no dead disk can be made here: {error}")
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if libc.mount(b"dead", os.fsencode(folder), b"fuse", 0, options.encode()):
        os.close(device)
        pytest.skip(f"no dead disk can be made here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", str(folder)], check=False)


@contextlib.contextmanager
def deep_below(folder: Path) -> Iterator[None]:
    """What is made there may be deeper than what tidies up after the tests can follow; it goes at the end."""
    try:
        yield
    finally:
        subprocess.run(["rm", "-rf", "--", str(folder)], check=False)


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No room at all for a while."""
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_room(fd: int) -> Iterator[None]:
    """What is written to this descriptor of ours finds no room: it works everywhere, and for this one file."""
    kept = os.dup(fd)
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, fd, inheritable=False)
    os.close(full)
    try:
        yield
    finally:
        os.dup2(kept, fd, inheritable=False)
        os.close(kept)


@contextlib.contextmanager
def cannot_write(pid: int) -> Iterator[None]:
    """That process can write to no file: as on a full disk, for it alone."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """We can open nothing any more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be opened for writing in there; where that cannot be had, the test is skipped."""
    for words in (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)]):
        done = subprocess.run(["mount", *words], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no folder can be made read-only here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
