"""A data directory is nobody else's: what earlier versions, or whoever made it, have left open to others is closed.

Everything that is made today is made so. What is older is closed once, at the start of the server that holds the
directory: the folders and logs of jobs, the store, the directory itself. A directory that others keep files in, or that
belongs to somebody else, stays as it is, and that is said at every start: we do not lock people out of what is theirs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from stretto import jobfiles

_OURS = ("lock", "server.json", "token", "server.log", "server.log.1", "jobs", "runs", "tls.key", "tls.crt", "socket")
_STORE = "stretto.db"
_MOST_NAMES = 1_000_000
_MOST_LOGS = 100_000


def tighten(data: Path) -> Iterator[str]:
    """Close it; what is to be said about that. Raises nothing that one file alone is to blame for."""
    names = jobfiles.names(data, _MOST_NAMES)
    ours = [name for name in names if name in _OURS or name.startswith(_STORE)]
    jobs = data / "jobs"
    if "jobs" in ours and stat.S_IMODE(jobs.lstat().st_mode) & 0o077:
        closed = sum(_close_job(jobs, name) for name in jobfiles.names(jobs, _MOST_NAMES) if name.isdecimal())
        yield f"{closed} files and folders of jobs in {jobs} were open to others, and are not any more"
    # Afterwards: where this was interrupted it is begun again.
    closed = sum(_closes(data / name, data) for name in ours)
    about = data.stat()
    mode = stat.S_IMODE(about.st_mode)
    if not mode & 0o077:
        return
    others = sorted(set(names) - set(ours) - {name for name in names if name.startswith(".")})
    if others or about.st_uid != os.geteuid() or mode & stat.S_ISVTX:
        why = f"there is {others[0]} in it, which is not ours" if others else "it is not ours alone"
        yield f"the data directory {data} is open to others ({mode:04o}), and stays so: {why}"
        return
    os.chmod(data, 0o700)
    yield f"the data directory {data} was open to others ({mode:04o}), and is not any more"


def _close_job(jobs: Path, name: str) -> int:
    """Its logs, and the folders that lead to them; what else is in there is the job's own business."""
    closed, logs = 0, jobs / name / "logs"
    with contextlib.suppress(OSError):
        for log in jobfiles.names(logs, _MOST_LOGS, root=jobs):
            closed += _closes(logs / log, jobs)
    return closed + _closes(logs, jobs) + _closes(jobs / name, jobs)


def _closes(path: Path, root: Path) -> bool:
    with contextlib.suppress(OSError):
        return jobfiles.tighten(path, 0o700, root=root) >= 0
    return False
