"""What came of the demo: a table of both runs, what the same job cost under each scheduler, and a picture.

Schedulers are compared, and nothing else, only if a job costs the same slot-seconds under both; so those stand beside
each other, and a difference that would show in the result is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.client import Job

SLOTS, ASKED = 6, 4
FAIR = 0.10
"""How far the slot-seconds of a job may be apart before that is said."""
_GANG_S, _ELASTIC_S = 968, 809
"""ElasticDL's benchmark report, experiment 1: ResNet20 on six GPUs, until both jobs were done."""

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
        return max(end_of(job) for job in self.jobs) - self.began_s

    @property
    def utilisation(self) -> float:
        return sum(float(job["device_s"]) for job in self.jobs) / (SLOTS * self.makespan_s)

    @property
    def arrival_s(self) -> float:
        """When the last job came."""
        return max(job.submitted_s for job in self.jobs) - self.began_s

    def completion_s(self) -> float:
        return sum(end_of(job) - job.submitted_s for job in self.jobs) / len(self.jobs)

    def costs(self) -> dict[str, float]:
        """Slot-seconds by job, without the policy in their names."""
        return {job.name.removeprefix(f"{self.policy}-"): float(job["device_s"]) for job in self.jobs}


def end_of(job: Job) -> float:
    assert job.ended_s is not None
    return job.ended_s


def table(runs: Sequence[Run]) -> list[str]:
    """Waiting, running and completion of each job, then the whole beside the bound, then what each job cost."""
    return [*_by_job(runs), "", *_whole(runs), "", *costs(runs), "", *factors(runs)]


def _by_job(runs: Sequence[Run]) -> list[str]:
    lines = [_row(("", "job", "waited", "ran", "done after", "resizes", "paused"))]
    for run in runs:
        for job in run.jobs:
            times = (job.waited_s, job.ran_s, end_of(job) - job.submitted_s)
            cells = (run.policy, job.name.removeprefix(f"{run.policy}-"), *(f"{time_s:.1f}s" for time_s in times))
            lines.append(_row((*cells, str(job["resizes"]), f"{job['paused_s']:.2f}s")))
    return lines


def _row(cells: Sequence[str]) -> str:
    widths = (-10, -8, 8, 8, 11, 8, 8)
    return " ".join(f"{c:<{-wide}}" if wide < 0 else f"{c:>{wide}}" for c, wide in zip(cells, widths, strict=True))


def _whole(runs: Sequence[Run]) -> list[str]:
    bound_s = bound(runs)
    lines = [f"{'':<10} {'all done':>9} {'mean completion':>16} {'slots in use':>13} {'over the bound':>15}"]
    lines += [
        f"{run.policy:<10} {run.makespan_s:>8.1f}s {run.completion_s():>15.1f}s {run.utilisation:>12.0%}"
        f" {run.makespan_s / bound_s:>14.2f}x"
        for run in runs
    ]
    why = f"{ASKED} slots busy until the second comes, then all {SLOTS}, at the fewest slot-seconds seen here"
    return [*lines, f"{'bound':<10} {bound_s:>8.1f}s   {why}"]


def bound(runs: Sequence[Run]) -> float:
    """All work at the least slot-seconds that any run of it took: on what the first job asked for until the second
    comes, on all slots without a gap from then on."""
    least: dict[str, float] = {}
    for run in runs:
        for name, cost in run.costs().items():
            least[name] = min(least.get(name, float("inf")), cost)
    arrival_s = min(run.arrival_s for run in runs)
    return arrival_s + max(0.0, sum(least.values()) - ASKED * arrival_s) / SLOTS


def costs(runs: Sequence[Run]) -> list[str]:
    """What each job took, under each scheduler; that they are not comparable, if they are not."""
    lines = [f"{'slot-seconds':<12} {' '.join(f'{run.policy:>9}' for run in runs)}   apart"]
    for name in runs[0].costs():
        taken = [run.costs()[name] for run in runs]
        lines.append(f"{name:<12} {' '.join(f'{cost:>9.1f}' for cost in taken)} {apart(taken):>7.0%}")
    if not is_fair(runs):
        lines.append(
            f"The same job cost more than {FAIR:.0%} more under one of them: its speed differed, not only the order."
        )
    return lines


def is_fair(runs: Sequence[Run]) -> bool:
    """Whether every job cost the same under all, so that only the schedulers are compared."""
    return all(apart([run.costs()[name] for run in runs]) <= FAIR for name in runs[0].costs())


def apart(taken: Sequence[float]) -> float:
    """How much more the most is than the least."""
    return max(taken) / min(taken) - 1


def factors(runs: Sequence[Run]) -> list[str]:
    """The first run against the last, beside what was published."""
    factor = runs[0].makespan_s / runs[-1].makespan_s
    return [
        f"{runs[0].policy} takes {factor:.2f} times as long as {runs[-1].policy}; "
        f"published for this story on six GPUs: {_GANG_S} s against {_ELASTIC_S} s, {_GANG_S / _ELASTIC_S:.2f} times"
    ]


def draw(runs: Sequence[Run], png: Path) -> None:
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
