"""A workload as columns, one entry per job, in order of (submit time, id).

Readers (`stretto.sim.readers`) and the generator build one with `Trace.build`, which checks every value,
sorts, and shifts times to start at 0. A job has `work` in steps and runs at `rates[pool, curve, workers]`
steps/s. A job whose speed-up is not known is rigid: its work is its duration in seconds and its curve
is 1 step/s from `requested` workers on, 0 below. A curve may fall: more workers may be slower than fewer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from stretto.core.snapshot import GPU, FloatArray, IntArray
from stretto.errors import TraceError

LARGEST = 100_000
"""Workers of one job, at most: a typing error should not ask for terabytes of tables."""

LATEST_S = 1e12
"""Times beyond this are not seconds (31,000 years; milliseconds of today's clock are larger)."""


LEVELS = ("elastic", "restart", "rigid")
"""What becomes of a job's progress when it is stopped (see `sim.levels`)."""
UNSAID, ELASTIC, RESTART, RIGID = -1, 0, 1, 2


class Load(msgspec.Struct, frozen=True):
    """A service's load curve: from each time on (seconds after the trace's start), replicas wanted."""

    at_s: FloatArray
    wanted: IntArray

    def wanted_at(self, now_s: float) -> int:
        """Replicas wanted at this moment."""
        i = int(np.searchsorted(self.at_s, now_s, side="right"))
        return int(self.wanted[i - 1]) if i else 0

    def next_s(self, now_s: float) -> float:
        """When it next changes; inf if it does not."""
        i = int(np.searchsorted(self.at_s, now_s, side="right"))
        return float(self.at_s[i]) if i < len(self.at_s) else math.inf


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable workload. Columns are as in `core.snapshot.Snapshot`."""

    name: str
    ids: tuple[str, ...]
    submit_s: FloatArray
    requested: IntArray
    min_workers: IntArray
    max_workers: IntArray
    work: FloatArray
    curve: IntArray
    rates: FloatArray
    pools: tuple[str, ...] = ("gpu",)
    duration_s: FloatArray
    """Seconds on `requested` workers of the first pool: what rigid policies see."""
    deadline_s: FloatArray
    priority: IntArray
    klass: IntArray
    classes: tuple[str, ...]
    width: IntArray
    demand: IntArray
    step: IntArray | None = None
    """Steps between a job's sizes, as in the snapshot; None: every size is possible."""
    phases: tuple[tuple[FloatArray, IntArray], ...] = ()
    """Per job, where its speed changes with progress: (work, curve) of each phase; empty: one phase."""
    spread_rates: FloatArray | None = None
    """Throughput by place: [pool, curve, workers, nodes spanned], where `rates` is for the fewest nodes (and so
    is the entry for one node, where that cannot be); None: placement does not matter."""
    services: tuple[Load | None, ...] = ()
    """Per job: the load curve of a service, None for training; empty: no services."""

    # What starts and stops mean to each job. None, or a cell without a value: as the world's settings have it.
    level: IntArray | None = None
    """A number of `LEVELS`, or UNSAID."""
    start_s: FloatArray | None = None
    """Seconds without progress at every start from zero; nan: unsaid. So in the next two columns."""
    resize_s: FloatArray | None = None
    checkpoint_s: FloatArray | None = None
    """Seconds of progress between two checkpoints; 0: it saves when it is stopped; inf: it never does."""
    preemptible: IntArray | None = None
    """1: it may lose work to jobs of higher priority, 0: it may not, or UNSAID."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def elastic(self) -> bool:
        """Whether any job may run at more than one size."""
        return bool((self.min_workers < self.max_workers).any())

    @property
    def best_rates(self) -> FloatArray:
        """[curve, workers] steps/s on the best pool and, where placement matters, in the best place."""
        best: FloatArray = self.rates.max(axis=0)
        return best if self.spread_rates is None else np.maximum(best, self.spread_rates.max(axis=(0, 3)))

    @property
    def need_milli(self) -> IntArray:
        need: IntArray = self.requested * self.width
        return need

    def rigid(self) -> Trace:
        """The same jobs at their requested sizes and durations only.

        On several pools a duration alone would say nothing: there the throughputs stay.
        """
        if len(self.pools) > 1:
            return msgspec.structs.replace(self, min_workers=self.requested, max_workers=self.requested)
        if self.spread_rates is not None:
            return self._rigid_spread()
        sizes, curve = np.unique(self.requested, return_inverse=True)
        return msgspec.structs.replace(
            self,
            min_workers=self.requested,
            max_workers=self.requested,
            work=self.duration_s,
            curve=curve.astype(np.int64),
            rates=np.repeat(rigid_rates(sizes)[None], len(self.pools), axis=0),
            phases=(),
        )

    def _rigid_spread(self) -> Trace:
        """`rigid` where placement matters: spread over more nodes, a job slows down as its own curve does there."""
        assert self.spread_rates is not None
        kinds, curve = np.unique(np.stack((self.requested, self.curve), axis=1), axis=0, return_inverse=True)
        by_nodes = self.spread_rates[:, kinds[:, 1], kinds[:, 0]]
        rates = rigid_rates(kinds[:, 0])[None]
        return msgspec.structs.replace(
            self,
            min_workers=self.requested,
            max_workers=self.requested,
            work=self.duration_s,
            curve=curve.reshape(-1).astype(np.int64),
            rates=rates,
            phases=(),
            spread_rates=rates[..., None] * (by_nodes / by_nodes[..., 1:2])[:, :, None, :],
        )

    @staticmethod
    def build(
        name: str,
        ids: Sequence[str],
        submit_s: Sequence[float],
        requested: Sequence[int],
        duration_s: Sequence[float],
        *,
        rows: Sequence[int] | None = None,
        work: Sequence[float] | None = None,
        curve: Sequence[int] | None = None,
        rates: FloatArray | None = None,
        min_workers: Sequence[int] | None = None,
        max_workers: Sequence[int] | None = None,
        pools: tuple[str, ...] = ("gpu",),
        deadline_s: Sequence[float] | None = None,
        priority: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        width_milli: Sequence[int] | None = None,
        demand: Sequence[tuple[int, int, int]] | None = None,
        step: Sequence[int] | None = None,
        phases: Sequence[tuple[FloatArray, IntArray]] = (),
        spread_rates: FloatArray | None = None,
        services: Sequence[Load | None] = (),
        origin_s: float | None = None,
        level: Sequence[int] | None = None,
        start_s: Sequence[float] | None = None,
        resize_s: Sequence[float] | None = None,
        checkpoint_s: Sequence[float] | None = None,
        preemptible: Sequence[int] | None = None,
    ) -> Trace:
        """Check, sort by (submit, id) and shift to time 0. `rows` are line numbers for messages.

        Time 0 is the first submission unless `origin_s` says which moment of the file's clock it is.
        """
        n = len(ids)
        where = list(rows) if rows is not None else list(range(1, n + 1))
        if n == 0:
            raise TraceError(f"trace {name!r} has no jobs", hint="give a file with at least one job")
        submit = np.asarray(submit_s, np.float64)
        duration = np.asarray(duration_s, np.float64)
        asked = np.asarray(requested, np.int64)
        _check_ids(name, ids, where)
        _check(name, ids, where, ~(abs(submit) < LATEST_S), submit, "submit time", "must be in seconds")
        wrong = ~((duration >= 0) & (duration < LATEST_S))
        _check(name, ids, where, wrong, duration, "duration", "must be ≥ 0, in seconds")
        _check(name, ids, where, (asked < 1) | (asked > LARGEST), asked, "number of GPUs", f"must be 1..{LARGEST}")
        if curve is None or rates is None or work is None:
            sizes, index = np.unique(asked, return_inverse=True)
            steps, row = duration, index.astype(np.int64)
            table = np.repeat(rigid_rates(sizes)[None], len(pools), axis=0)
            low = high = asked
        else:
            steps, row, table = np.asarray(work, np.float64), np.asarray(curve, np.int64), rates
            low = np.asarray(min_workers, np.int64) if min_workers is not None else asked
            high = np.asarray(max_workers, np.int64) if max_workers is not None else asked
            _check(name, ids, where, ~(np.isfinite(steps) & (steps >= 0)), steps, "work", "must be ≥ 0")
            _check(name, ids, where, (low < 1) | (low > high), low, "minimum", "must be 1..maximum")
        due = np.full(n, np.inf) if deadline_s is None else np.asarray(deadline_s, np.float64)
        _check(name, ids, where, np.isnan(due), due, "deadline", "must be a number, or empty for none")
        for what, column in (("start", start_s), ("resize", resize_s), ("checkpoint", checkpoint_s)):
            if column is not None:
                cost = np.asarray(column, np.float64)
                _check(
                    name,
                    ids,
                    where,
                    (cost < 0) | (cost == np.inf) & (what != "checkpoint"),
                    cost,
                    f"{what}_s",
                    "must be ≥ 0, in seconds",
                )
        names = tuple(sorted(set(classes))) if classes is not None else ("",)
        number = {c: i for i, c in enumerate(names)}
        klass = np.array([number[c] for c in classes] if classes is not None else [0] * n, np.int64)
        order = np.array(sorted(range(n), key=lambda i: (submit[i], _sortable(ids[i]))), np.int64)
        start = submit.min() if origin_s is None else origin_s
        spots = order.tolist()
        return Trace(
            name=name,
            ids=tuple(ids[i] for i in spots),
            submit_s=submit[order] - start,
            requested=asked[order],
            min_workers=low[order],
            max_workers=high[order],
            work=steps[order],
            curve=row[order],
            rates=table,
            pools=pools,
            duration_s=duration[order],
            deadline_s=due[order] - start,
            priority=(np.zeros(n, np.int64) if priority is None else np.asarray(priority, np.int64))[order],
            klass=klass[order],
            classes=names,
            width=(np.full(n, GPU) if width_milli is None else np.asarray(width_milli, np.int64))[order],
            demand=(np.zeros((n, 3), np.int64) if demand is None else np.asarray(demand, np.int64))[order],
            step=None if step is None else np.asarray(step, np.int64)[order],
            phases=tuple(phases[i] for i in spots) if phases else (),
            spread_rates=spread_rates,
            services=tuple(services[i] for i in spots) if services else (),
            level=None if level is None else np.asarray(level, np.int64)[order],
            start_s=None if start_s is None else np.asarray(start_s, np.float64)[order],
            resize_s=None if resize_s is None else np.asarray(resize_s, np.float64)[order],
            checkpoint_s=None if checkpoint_s is None else np.asarray(checkpoint_s, np.float64)[order],
            preemptible=None if preemptible is None else np.asarray(preemptible, np.int64)[order],
        )


def rigid_rates(sizes: IntArray) -> FloatArray:
    """One curve per size: 1 step/s from that many workers on, none below."""
    return (np.arange(int(sizes.max()) + 1)[None, :] >= sizes[:, None]).astype(np.float64)


def _check_ids(name: str, ids: Sequence[str], rows: list[int]) -> None:
    seen: dict[str, int] = {}
    for row, job in zip(rows, ids, strict=True):
        if not job:
            raise TraceError(f"trace {name!r}, row {row}: the job has no id", hint="give every job an id of its own")
        if job in seen:
            raise TraceError(
                f"trace {name!r}, row {row}: job id {job!r} was used in row {seen[job]} already",
                hint="give every job an id of its own",
            )
        seen[job] = row


def _check(
    name: str,
    ids: Sequence[str],
    rows: list[int],
    bad: np.ndarray[tuple[int], np.dtype[np.bool_]],
    values: FloatArray | IntArray,
    what: str,
    rule: str,
) -> None:
    if bad.any():
        i = int(np.argmax(bad))
        raise TraceError(
            f"trace {name!r}, row {rows[i]} (job {ids[i]!r}): {what} is {values[i]}",
            hint=f"{what} {rule}",
        )


def _sortable(job: str) -> tuple[int, int, str]:
    """Numeric ids in numeric order before all others."""
    return (0, int(job), "") if job.isascii() and job.isdigit() else (1, 0, job)
