"""A data directory is nobody else's: what earlier versions, or whoever made it, have left open to others is closed.

Everything that is made today is made so. What is older is closed once, at the start of the server that holds the
directory: the folders and logs of jobs, the store, the directory itself. Where jobs run as several accounts these have
to pass through it and through `jobs` to their own folders (0711), and see nothing on the way. A directory that others
keep files in, or that belongs to somebody else, stays as it is, and that is said at every start: we do not lock people
out of what is theirs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stretto import jobfiles

_OURS = (
    *("lock", "server.json", "token", "server.log", "server.log.1", "jobs", "records", "runs"),
    *("tls.key", "tls.crt", "socket"),
)
_STORE = "stretto.db"
_MOST_NAMES = 1_000_000
_MOST_LOGS = 100_000


_RECORDS = ("journal", "logs", "proxy")
"""What earlier versions kept of a job among its own files."""


def tighten(data: Path, *, separates: bool = False) -> Iterator[str]:
    """Close it; what is to be said about that. Raises nothing that one file alone is to blame for."""
    passed = 0o711 if separates else 0o700
    for name, mode in (("records", 0o700), ("jobs", passed)):
        (data / name).mkdir(mode=mode, exist_ok=True)
    yield from _close(data, passed)
    _move_records(data)
    if separates:
        # Not before all that is in them was closed.
        for folder in (data / "jobs", data):
            mode = stat.S_IMODE(folder.stat().st_mode)
            os.chmod(folder, mode | 0o711)


def _move_records(data: Path) -> None:
    """Take what the server believes out of the reach of jobs. Whoever has it open keeps it; where this was interrupted
    it goes on."""
    jobs, records = data / "jobs", data / "records"
    for number in jobfiles.names(jobs, _MOST_NAMES):
        if not number.isdecimal():
            continue
        with contextlib.suppress(OSError), jobfiles.folder(jobs / number, root=jobs) as source:
            names = [name for name in _RECORDS if _is_plain(name, source)]
            if not names:
                continue
            jobfiles.make_folder(records / number, root=records)
            with jobfiles.folder(records / number, root=records) as target:
                for name in names:
                    if not os.path.lexists(f"/proc/self/fd/{target}/{name}"):
                        os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)


def _is_plain(name: str, folder: int) -> bool:
    """Only what belongs to us can be ours."""
    try:
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False
    return about.st_uid == os.geteuid() and (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode))


def _close(data: Path, passed: int) -> Iterator[str]:
    """`passed`: what others may do with the folders that they have to pass through."""
    names = jobfiles.names(data, _MOST_NAMES)
    ours = [name for name in names if name in _OURS or name.startswith(_STORE)]
    jobs = data / "jobs"
    if "jobs" in ours and stat.S_IMODE(jobs.lstat().st_mode) & ~passed:
        closed = sum(_close_job(jobs, name) for name in jobfiles.names(jobs, _MOST_NAMES) if name.isdecimal())
        yield f"{closed} files and folders of jobs in {jobs} were open to others, and are not any more"
    # Afterwards: where this was interrupted it is begun again.
    for name in ours:
        _closes(data / name, data, passed if name == "jobs" else 0o700)
    about = data.stat()
    mode = stat.S_IMODE(about.st_mode)
    if not mode & 0o777 & ~passed:
        return
    others = sorted(set(names) - set(ours) - {name for name in names if name.startswith(".")})
    if others or about.st_uid != os.geteuid() or mode & stat.S_ISVTX:
        why = f"there is {others[0]} in it, which is not ours" if others else "it is not ours alone"
        yield f"the data directory {data} is open to others ({mode:04o}), and stays so: {why}"
        return
    os.chmod(data, mode & passed)
    yield f"the data directory {data} was open to others ({mode:04o}), and is not any more"


def _close_job(jobs: Path, name: str) -> int:
    """Its logs, and the folders that lead to them; what else is in there is the job's own business."""
    closed, logs = 0, jobs / name / "logs"
    with contextlib.suppress(OSError):
        for log in jobfiles.names(logs, _MOST_LOGS, root=jobs):
            closed += _closes(logs / log, jobs)
    return closed + _closes(logs, jobs) + _closes(jobs / name, jobs)


def _closes(path: Path, root: Path, mode: int = 0o700) -> bool:
    with contextlib.suppress(OSError):
        return jobfiles.tighten(path, mode, root=root) >= 0
    return False
