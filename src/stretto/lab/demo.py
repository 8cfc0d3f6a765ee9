"""Two real training jobs that do not fit together, on this machine: first as a gang scheduler has it, then elastic.

A server is started on a fresh data directory with six slots of the processor, whatever GPUs there are; each job asks
for four. The second comes when the first has done a quarter of its steps, as in the experiment of ElasticDL that this
repeats. Under `gang` it waits until the first has ended; under `stretto` it starts at once on what is free. Everything
is measured from the events of the server. What came of it is told by `stretto.lab.demo_table`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.api.process import Options, down, serve
from stretto.client import Client, Job
from stretto.errors import StrettoError, Unavailable
from stretto.lab.demo_table import ASKED, SLOTS, Run, Steps, draw, end_of, table
from stretto.visible import behind

_LOOK_S = 0.1
_COLUMN_S = 1.0
_PART = 4
"""The second job comes when this part of the first one's steps is done."""


def run(script: Path, arguments: Sequence[str], png: Path | None, say: Callable[[str], None] = print) -> list[Run]:
    """The whole story; its figures on the terminal, its picture in a file."""
    say(f"Two jobs, each asks for {ASKED} of {SLOTS} slots. {slots_text(len(os.sched_getaffinity(0)))}")
    with server() as client:
        _warm_up(client, script)
        runs = [_play(client, policy, script, arguments, say) for policy in ("gang", "stretto")]
    say("")
    for line in table(runs):
        say(line)
    if png is not None:
        draw(runs, png)
        say(f"picture: {png}")
    return runs


def slots_text(cores: int) -> str:
    if cores >= SLOTS:
        return "A slot is a core of this machine."
    return f"This machine has {cores} cores, so a slot is {cores / SLOTS:.2f} of one."


def options_for(data: Path) -> Options:
    """What `stretto up -d --cpu --nodes 1x6 --port 0` says: the story has six slots on every machine."""
    return Options(data=str(data), port=0, nodes=f"1x{SLOTS}", cpu=True)


@contextlib.contextmanager
def server() -> Iterator[Client]:
    """On a data directory of its own, ended with all its jobs. One that does not start says why itself."""
    data = Path(tempfile.mkdtemp(prefix="stretto-demo-"))
    try:
        serve(options_for(data), detach=True)
        try:
            with Client(data=data) as client:
                yield client
        finally:
            _end(data)
    finally:
        shutil.rmtree(data, ignore_errors=True)


def _end(data: Path) -> None:
    with contextlib.suppress(StrettoError):
        try:
            down(data, cancel_jobs=True)
        except Unavailable:
            down(data)


def _warm_up(client: Client, script: Path) -> None:
    """One short job, so that the first of the two does not pay for what is done once per machine."""
    client.run(_file("warm-up", script, ["--epochs", "1"], 1), timeout_s=120)


def _file(name: str, script: Path, arguments: Sequence[str], workers: int) -> dict[str, object]:
    return {
        "name": name,
        "run": [sys.executable, str(script), *arguments],
        "workers": workers,
        "elastic": {"min": 1, "max": workers},
    }


def _play(client: Client, policy: str, script: Path, arguments: Sequence[str], say: Callable[[str], None]) -> Run:
    client.set_policy(policy)
    say(f"\n{policy}: one column is {_COLUMN_S:g} s, digits are workers, dots are waiting")
    screen = _Screen()
    first = client.submit(_file(f"{policy}-first", script, arguments, ASKED))
    _watch(client, [first], screen, lambda now: is_time(now[0]))
    second = client.submit(_file(f"{policy}-second", script, arguments, ASKED))
    jobs = _watch(client, [first, second], screen, lambda now: all(job.ended for job in now))
    screen.close(jobs, say)
    for job in jobs:
        if job.phase != "succeeded":
            raise Unavailable(f"job {job.name} has {job.phase}: {job.message}", hint="the demo cannot go on")
    began_s = first.submitted_s
    return Run(policy, jobs, {job.name: _steps(client, job, began_s) for job in jobs}, began_s)


def is_time(first: Job) -> bool:
    """Whether the second job comes now; also if the first is done before anybody saw it under way."""
    return first.ended or bool(first.total_steps and first.steps * _PART >= first.total_steps)


def _watch(client: Client, jobs: list[Job], screen: _Screen, done: Callable[[list[Job]], bool]) -> list[Job]:
    """Look until it is done; the jobs as they are then."""
    while True:
        now = [client.job(job.number) for job in jobs]
        screen.show(now)
        if done(now):
            return now
        time.sleep(_LOOK_S)


def _steps(client: Client, job: Job, began_s: float) -> Steps:
    found, count = [(job.submitted_s - began_s, 0)], 0
    for event in client.events(job.number, limit=1000):
        if event.kind in ("launched", "exited"):
            count += 1 if event.kind == "launched" else -1
            found.append((event.at_s - began_s, count))
    return found


@dataclass
class _Screen:
    """A line per job that grows while they run; where there is no terminal, the finished lines."""

    rows: dict[str, str] = field(default_factory=dict)
    columns: int = 0
    painted: int = 0
    due_s: float = field(default_factory=time.monotonic)

    def show(self, now: Sequence[Job]) -> None:
        """A column more, if it is time for one."""
        if time.monotonic() < self.due_s:
            return
        for job in now:
            before = self.rows.get(job.name, " " * self.columns)
            self.rows[job.name] = before + (" " if job.ended else _cell(job))
        self.columns += 1
        self.due_s += _COLUMN_S
        if sys.stdout.isatty():
            self._repaint(now)

    def close(self, now: Sequence[Job], say: Callable[[str], None]) -> None:
        if sys.stdout.isatty():
            self._repaint(now)
            return
        for job in now:
            say(self._line(job))

    def _repaint(self, now: Sequence[Job]) -> None:
        if self.painted:
            behind(sys.stdout).write(f"\x1b[{self.painted}A")
        for job in now:
            behind(sys.stdout).write(f"\x1b[2K{self._line(job)}\n")
        self.painted = len(now)
        sys.stdout.flush()

    def _line(self, job: Job) -> str:
        total = job.total_steps or "?"
        done = f"{end_of(job) - job.submitted_s:.1f} s" if job.ended else f"{job.steps}/{total} steps"
        return f"{job.name:>14} │{self.rows.get(job.name, ''):<60}│ {done}"


def _cell(job: Job) -> str:
    return str(len(job.workers)) if job.workers else "."
