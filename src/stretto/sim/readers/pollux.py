"""Workloads of the Pollux evaluation (petuum/adaptdl, OSDI'21): name, time, application, num_replicas, batch_size.

The applications are six models that were measured on 16 nodes of 4 T4 GPUs (`pollux_model`). A job runs for a
fixed number of epochs; its work is the same at every batch size and number of workers, its speed is not.

`batch=fixed`: each job keeps its batch_size; work is counted in optimizer steps, and a curve holds for the whole
job. `batch=adaptive`: each job always uses the batch with the highest goodput for its workers (what policies
with the trait `adapts_batch` are meant to run on); work is counted in steps of the model's initial batch, and
each epoch is a phase with a curve of its own, since larger batches pay off more as training proceeds.

`rates` holds for the fewest nodes, `spread_rates` by number of nodes. NCF is too small to gain from more: it
stays on one worker with its largest batch, as the authors have it. The workload's clock is kept (the first job
comes after time 0), because the authors' scheduling rounds are multiples of 60 s of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray, IntArray
from stretto.sim.readers import Rows, pollux_model
from stretto.sim.readers.pollux_model import MOST_WORKERS, Application, fewest_nodes
from stretto.sim.trace import Trace

_COLUMNS = ["name", "time", "application", "num_replicas", "batch_size"]
_PINNED = {"ncf": 32768}
"""Applications that stay on one worker, with the batch they use when it is adaptive."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    batch: Literal["fixed", "adaptive"] = "fixed"
    """Keep each job's batch size, or use the best one at every number of workers."""
    falling: bool = False
    """Keep the part of a curve where more workers are slower, also where placement is not looked at."""
    whole_seconds: bool = False
    """Round the seconds of every epoch, as the authors' simulator does."""


def read(path: Path, options: Options) -> Trace:
    """Read one workload."""
    rows = Rows(path, _COLUMNS)
    names, batches, asked = rows.text("application"), rows.ints("batch_size"), rows.ints("num_replicas")
    _check(rows, names, batches, asked)
    apps = pollux_model.load()
    jobs = list(zip(names, batches, strict=True))
    seconds = {kind: pollux_model.fixed_s(apps[kind[0]], kind[1], options.whole_seconds) for kind in sorted(set(jobs))}
    duration = [float(seconds[job][n, fewest_nodes(n)]) for job, n in zip(jobs, asked, strict=True)]
    if options.batch == "fixed":
        table, curve, phases = _fixed(jobs, seconds)
        most = [_most(apps[app], batch) for app, batch in jobs]
    else:
        table, curve, phases = _adaptive(names, options.whole_seconds)
        most = [_most(apps[app], apps[app].largest) for app in names]
    return Trace.build(
        path.stem,
        rows.text("name"),
        rows.floats("time"),
        asked,
        duration,
        rows=rows.numbers,
        work=[float(work.sum()) for work, _ in phases],
        curve=curve,
        rates=_packed(table, options.falling),
        min_workers=[1] * len(jobs),
        max_workers=[max(n, m) for n, m in zip(asked, most, strict=True)],
        classes=[f"{app}/{batch}" for app, batch in jobs],
        phases=phases if options.batch == "adaptive" else (),
        spread_rates=table[None],
        origin_s=0.0,
    )


def _check(rows: Rows, names: list[str], batches: list[int], asked: list[int]) -> None:
    apps = pollux_model.load()
    for i, (name, batch, workers) in enumerate(zip(names, batches, asked, strict=True)):
        if name not in apps:
            raise rows.error(i, f"application {name!r} was not measured", f"known: {', '.join(apps)}")
        low, high = apps[name].initial, apps[name].largest
        if not low <= batch <= high:
            raise rows.error(i, f"batch_size is {batch}", f"{name} was measured with {low}..{high}")
        if not 1 <= workers <= MOST_WORKERS:
            raise rows.error(i, f"num_replicas is {workers}", f"{name} was measured with 1..{MOST_WORKERS}")


def _most(app: Application, batch: int) -> int:
    return 1 if app.name in _PINNED else app.most_workers(batch)


def _fixed(
    jobs: list[tuple[str, int]], seconds: dict[tuple[str, int], FloatArray]
) -> tuple[FloatArray, list[int], list[tuple[FloatArray, IntArray]]]:
    """Optimizer steps/s by (application, batch); one phase per job."""
    apps = pollux_model.load()
    row = {kind: i for i, kind in enumerate(seconds)}
    steps = [pollux_model.fixed_steps(apps[app], batch) for app, batch in seconds]
    table = np.stack([work / table for work, table in zip(steps, seconds.values(), strict=True)])
    phases = [(np.array([steps[row[job]]]), np.array([row[job]])) for job in jobs]
    return table, [row[job] for job in jobs], phases


def _adaptive(names: list[str], whole_seconds: bool) -> tuple[FloatArray, list[int], list[tuple[FloatArray, IntArray]]]:
    """Progress/s by (application, epoch); a phase per epoch."""
    apps = pollux_model.load()
    tables: list[FloatArray] = []
    epochs: dict[str, tuple[FloatArray, IntArray]] = {}
    first = 0
    for name in sorted(set(names)):
        tables.append(pollux_model.best_goodput(apps[name], _PINNED.get(name, 0), whole_seconds))
        epochs[name] = (apps[name].work, first + np.arange(len(apps[name].work)))
        first += len(apps[name].work)
    return np.concatenate(tables), [int(epochs[name][1][0]) for name in names], [epochs[name] for name in names]


def _packed(table: FloatArray, falling: bool) -> FloatArray:
    """[1, curve, workers] on the fewest nodes. Unless curves may fall, a job leaves idle what would slow it down."""
    workers = np.arange(MOST_WORKERS + 1)
    needed = np.array([fewest_nodes(int(n)) for n in workers])
    measured = table[:, workers, needed]
    rates: FloatArray = measured if falling else np.maximum.accumulate(measured, axis=1)
    return rates[None]
