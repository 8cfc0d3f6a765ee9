"""From a job file to what runs: the command, the variables, the request."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stretto.backends.protocol import SHELL
from stretto.core.request import JobRequest
from stretto.jobs.model import Job
from stretto.spec.model import JobFile

_SHELL = re.compile(r"[|&;<>()$`\\*?\[\]#~{}!\n]|^\s*\w+=")
"""What only a shell understands."""

_BUILTIN = frozenset(
    {
        ".",
        ":",
        "cd",
        "eval",
        "exec",
        "exit",
        "export",
        "read",
        "set",
        "shift",
        "source",
        "trap",
        "ulimit",
        "umask",
        "wait",
    }
)

_BASE = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "XDG_CACHE_HOME"),
)
"""Variables that a job has from the server where it does not bring them along."""


_OF_AN_ACCOUNT = frozenset({"HOME", "USER", "LOGNAME", "SHELL", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR", "TMPDIR"})


def request_of(job: Job, file: JobFile) -> JobRequest:
    """What it asks for now: scaling changes the sizes of the job file."""
    asked = file.request(job.name)
    low, high = job.min_workers, job.max_workers
    level = asked.level if job.level == "service" else job.level
    return msgspec.structs.replace(
        asked, level=level, min_workers=low, max_workers=high, requested=min(max(asked.requested, low), high)
    )


def class_of(job: Job) -> str:
    """As its request says it, without all the rest: `JobFile.request`."""
    run = job.spec.get("run", "")
    return str(job.spec.get("name") or (run if isinstance(run, str) else " ".join(run)))


def command(file: JobFile, folder: Path, env: Mapping[str, str] | None) -> tuple[str, ...]:
    """What a worker executes. `setup` comes before it, once for all workers of the job that share the folder. Without
    variables nothing is looked for: whoever starts it does that."""
    if file.setup is None:
        return argv(file.run, env)
    done = shlex.quote(str(folder / "setup.done"))
    setup = f"if [ ! -e {done} ]; then\n{_line(file.setup)}\ntouch {done}\nfi"
    lock = shlex.quote(str(folder / "setup.lock"))
    failed = '{ code=$?; echo "its setup ended with exit code $code" >&2; exit $code; }'
    return _shell(f"flock {lock} /bin/sh -ec {shlex.quote(setup)} || {failed}\n{_line(file.run)}")


def argv(command: str | tuple[str, ...], env: Mapping[str, str] | None) -> tuple[str, ...]:
    """A program and its arguments: a line that needs no shell gets none, so that it can be a fork of a warm
    interpreter."""
    if isinstance(command, str):
        words = [] if _SHELL.search(command) else _split(command)
        if not words or words[0] in _BUILTIN:
            return _shell(command)
        command = tuple(words)
    if env is None or command[0] not in ("python", "python3"):
        return command
    found = shutil.which(command[0], path=env.get("PATH", os.defpath))
    return command if found is not None else (sys.executable, *command[1:])


def _shell(line: str) -> tuple[str, ...]:
    """When it is asked to end, the shell lets the program under way do so, and starts no other."""
    return (*SHELL, f"trap 'exit 143' TERM\n{line}")


def _line(command: str | tuple[str, ...]) -> str:
    return command if isinstance(command, str) else shlex.join(command)


def _split(line: str) -> list[str]:
    """Its words; none if the quotes are not closed: the shell will say so."""
    try:
        return shlex.split(line)
    except ValueError:
        return []


def environment(job: Job, file: JobFile, server: Mapping[str, str], *, alien: bool = False) -> dict[str, str]:
    """The variables of its workers, without what depends on the worker. `alien`: they run as another account than the
    server, which gives them what is its own."""
    given = {**usual(server), **job.context.env}
    if alien:
        given = {name: value for name, value in given.items() if name not in _OF_AN_ACCOUNT}
    return {**given, **file.env, "STRETTO_JOB": job.id}


def usual(server: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that brings none along."""
    return {"PYTHONUNBUFFERED": "1", **{name: server[name] for name in _BASE if name in server}}


def workdir(job: Job, file: JobFile, home: str = "") -> str:
    return os.path.normpath(os.path.join(at_home(job.context.cwd, home), at_home(file.workdir, home)))


def at_home(path: str, home: str = "") -> str:
    """With what `~` means: our own home, unless another is given."""
    if home and (path == "~" or path.startswith("~/")):
        return home + path[1:]
    return os.path.expanduser(path)
