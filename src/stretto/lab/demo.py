"""Two real training jobs that do not fit together, on this machine: first as a gang scheduler has it, then elastic.

A server is started on a fresh data directory with six slots; each job asks for four. Under `gang` the second waits
until the first has ended. Under `stretto` both train at once and share what is there. Everything is measured from the
events of the server: who had how many workers when, how long anybody waited, how long training paused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.client import Client, Job
from stretto.errors import StrettoError, Unavailable

SLOTS, ASKED = 6, 4
_READY_S = 60.0
_LOOK_S = 0.25
_COLUMN_S = 1.0

Steps = list[tuple[float, int]]
"""Moments, from the first submission on, and the workers from then on."""


@dataclass(frozen=True)
class Run:
    """What one policy made of the two jobs."""

    policy: str
    jobs: list[Job]
    workers: dict[str, Steps]
    began_s: float

    @property
    def makespan_s(self) -> float:
        return max(_end(job) for job in self.jobs) - self.began_s

    @property
    def utilisation(self) -> float:
        return sum(float(job["device_s"]) for job in self.jobs) / (SLOTS * self.makespan_s)

    def completion_s(self) -> float:
        return sum(_end(job) - job.submitted_s for job in self.jobs) / len(self.jobs)


def run(script: Path, arguments: Sequence[str], png: Path | None, say: Callable[[str], None] = print) -> list[Run]:
    """The whole story; its figures on the terminal, its picture in a file."""
    say(f"Two jobs, each asks for {ASKED} of {SLOTS} slots. {slots_text()}")
    with _server() as client:
        _warm_up(client, script)
        runs = [_play(client, policy, script, arguments, say) for policy in ("gang", "stretto")]
    say("")
    for line in table(runs):
        say(line)
    if png is not None:
        _draw(runs, png)
        say(f"picture: {png}")
    return runs


def slots_text() -> str:
    cores = len(os.sched_getaffinity(0))
    if cores >= SLOTS:
        return "A slot is a core of this machine."
    return f"This machine has {cores} cores, so a slot is {cores / SLOTS:.2f} of one."


@contextlib.contextmanager
def _server() -> Iterator[Client]:
    """On a data directory of its own, ended with all its jobs."""
    data = Path(tempfile.mkdtemp(prefix="stretto-demo-"))
    command = [sys.executable, "-m", "stretto.cli"]
    up = subprocess.Popen(
        [*command, "up", "--data", str(data), "--port", "0", "--nodes", f"1x{SLOTS}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield _connect(data, up)
    finally:
        subprocess.run([*command, "down", "--data", str(data), "--cancel-jobs"], capture_output=True, check=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            up.wait(10)
        up.kill()
        up.communicate()
        shutil.rmtree(data, ignore_errors=True)


def _connect(data: Path, up: subprocess.Popen[bytes]) -> Client:
    deadline_s = time.monotonic() + _READY_S
    while True:
        with contextlib.suppress(StrettoError):
            client = Client(data=data)
            client.cluster()
            return client
        if up.poll() is not None or time.monotonic() > deadline_s:
            up.kill()
            raise Unavailable(
                f"the server did not start: {up.communicate()[1].decode(errors='replace').strip()[-500:]}"
            )
        time.sleep(0.05)


def _warm_up(client: Client, script: Path) -> None:
    """One short job, so that the first of the two does not pay for what is done once per machine."""
    client.run(_file("warm-up", script, ["--rounds", "1"], 1), timeout_s=120)


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
    jobs = [client.submit(_file(f"{policy}-{name}", script, arguments, ASKED)) for name in ("first", "second")]
    began_s = jobs[0].submitted_s
    _watch(client, jobs, say)
    jobs = [client.job(job.number) for job in jobs]
    for job in jobs:
        if job.phase != "succeeded":
            raise Unavailable(f"job {job.name} has {job.phase}: {job.message}", hint="the demo cannot go on")
    return Run(policy, jobs, {job.name: _steps(client, job, began_s) for job in jobs}, began_s)


def _watch(client: Client, jobs: list[Job], say: Callable[[str], None]) -> None:
    """A line per job that grows while they run; where there is no terminal, the finished lines."""
    live = sys.stdout.isatty()
    rows: dict[str, str] = {job.name: "" for job in jobs}
    due_s = time.monotonic()
    while True:
        now = [client.job(job.number) for job in jobs]
        if time.monotonic() >= due_s:
            for job in now:
                rows[job.name] += " " if job.ended else _cell(job)
            if live:
                _repaint(rows, now, first=len(next(iter(rows.values()))) == 1)
            due_s += _COLUMN_S
        if all(job.ended for job in now):
            break
        time.sleep(_LOOK_S)
    if not live:
        for job in now:
            say(_line(job, rows[job.name]))


def _cell(job: Job) -> str:
    return str(len(job.workers)) if job.workers else "."


def _line(job: Job, row: str) -> str:
    done = f"{job.steps}/{job.total_steps or '?'} steps" if not job.ended else f"{_end(job) - job.submitted_s:.1f} s"
    return f"{job.name:>14} │{row:<60}│ {done}"


def _repaint(rows: dict[str, str], now: list[Job], *, first: bool) -> None:
    if not first:
        sys.stdout.write(f"\x1b[{len(now)}A")
    for job in now:
        sys.stdout.write(f"\x1b[2K{_line(job, rows[job.name])}\n")
    sys.stdout.flush()


def _steps(client: Client, job: Job, began_s: float) -> Steps:
    found, count = [(job.submitted_s - began_s, 0)], 0
    for event in client.events(job.number, limit=1000):
        if event.kind in ("launched", "exited"):
            count += 1 if event.kind == "launched" else -1
            found.append((event.at_s - began_s, count))
    return found


def _end(job: Job) -> float:
    assert job.ended_s is not None
    return job.ended_s


# What came of it.


def table(runs: Sequence[Run]) -> list[str]:
    """Waiting, running and completion of each job, then the whole beside the bound."""
    heads = ("", "job", "waited", "ran", "done after", "resizes", "paused", "slot-seconds")
    lines = [_row(heads)]
    for run in runs:
        for job in run.jobs:
            times = (job.waited_s, job.ran_s, _end(job) - job.submitted_s)
            cells = (run.policy, job.name.removeprefix(f"{run.policy}-"), *(f"{time_s:.1f}s" for time_s in times))
            lines.append(_row((*cells, str(job["resizes"]), f"{job['paused_s']:.2f}s", f"{job['device_s']:.1f}")))
    bound_s = bound(runs)
    lines += ["", f"{'':<10} {'all done':>9} {'mean completion':>16} {'slots in use':>13} {'over the bound':>15}"]
    for run in runs:
        lines.append(
            f"{run.policy:<10} {run.makespan_s:>8.1f}s {run.completion_s():>15.1f}s {run.utilisation:>12.0%}"
            f" {run.makespan_s / bound_s:>14.2f}x"
        )
    lines.append(
        f"{'bound':<10} {bound_s:>8.1f}s   all {SLOTS} slots busy all the time, at the fewest slot-seconds seen here"
    )
    return lines


def _row(cells: Sequence[str]) -> str:
    widths = (-10, -8, 8, 8, 11, 8, 8, 13)
    return " ".join(f"{c:<{-wide}}" if wide < 0 else f"{c:>{wide}}" for c, wide in zip(cells, widths, strict=True))


def bound(runs: Sequence[Run]) -> float:
    """All work at the least slot-seconds that any run of it took, spread over all slots without a gap."""
    least: dict[str, float] = {}
    for run in runs:
        for job in run.jobs:
            name = job.name.removeprefix(f"{run.policy}-")
            least[name] = min(least.get(name, float("inf")), float(job["device_s"]))
    return sum(least.values()) / SLOTS


def _draw(runs: Sequence[Run], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs), 1, sharex=True, figsize=(8, 2.2 * len(runs)), squeeze=False)
    last_s = max(run.makespan_s for run in runs)
    for axis, run in zip(axes[:, 0], runs, strict=True):
        names = list(run.workers)
        moments = sorted({at_s for steps in run.workers.values() for at_s, _ in steps} | {0.0, run.makespan_s})
        heights = [[_at(run.workers[name], moment) for moment in moments] for name in names]
        labels = [name.removeprefix(f"{run.policy}-") for name in names]
        axis.stackplot(moments, heights, labels=labels, step="post", colors=("#3b6ea5", "#c8553d"))
        axis.axhline(SLOTS, color="#6b6b6b", linewidth=0.8, linestyle="--")
        axis.set(ylabel="workers", ylim=(0, SLOTS + 0.8), xlim=(0, last_s * 1.02))
        axis.set_title(
            f"{run.policy}: all done after {run.makespan_s:.1f} s, {run.utilisation:.0%} of the slots in use"
        )
        axis.legend(loc="upper right", frameon=False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=120)
    pyplot.close(figure)


def _at(steps: Steps, moment_s: float) -> int:
    return next((count for at_s, count in reversed(steps) if at_s <= moment_s), 0)
