"""What is learned of jobs while they run, and used for those to come.

Speeds come from the steps that workers timed; where nobody timed any they are guessed (`estimate.belief`). Curves and
lengths of ended jobs are kept by class (the job's name, else its command), as a blob that the store keeps.
`core.estimate` does the thinking.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from stretto.core import exploring
from stretto.core.estimate import belief
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve, Window
from stretto.core.estimate.history import ClassHistory, learn
from stretto.core.request import JobRequest
from stretto.core.snapshot import FloatArray, History, IntArray
from stretto.jobs.model import Job
from stretto.server import lengths
from stretto.server.lengths import Ended, Learned, Lengths

_BESIDE_SHARE = 0.1
"""What a script does beside its steps counts from this part of a step on; so does a change of it."""
_SETTLED_STEPS = 64
"""After so many steps at a size more of them change little."""
_MOST_RUNS = 200
_MOST_BYTES = 2**16
"""Of what is stored of a class; all together must fit into one object of Kubernetes."""


class Known(msgspec.Struct, frozen=True):
    """What is kept of a class: its curve by device type, and its latest ended jobs."""

    curves: dict[str, ClassHistory] = {}
    ended: tuple[Ended, ...] = ()

    @property
    def timed(self) -> bool:
        return any(history.curve.workers for history in self.curves.values())


class Shape(NamedTuple):
    """What a job's row of rates depends on."""

    job: int
    klass: str
    low: int
    high: int
    pools: tuple[str, ...] = ()
    """Device types it can use; empty: any."""
    cautious: bool = False
    """Resizes are dear: no gain is promised beyond twice the widest size that was seen."""


class Estimates:
    def __init__(self, learned: Mapping[str, bytes] | None = None) -> None:
        self._known: dict[str, Known] = {}
        self._numbers: dict[str, int] = {}
        self._own: dict[int, dict[str, Curve]] = {}
        self._beside_s: dict[int, float] = {}
        """By job: what its script does beside its usual steps, for each of them: slow ones, and what is in none."""
        self._rows: dict[Any, FloatArray] = {}
        self._own_rows: dict[int, dict[Any, FloatArray]] = {}
        self._history: History | None = None
        self.lengths = Lengths(self._learned)
        self.recall(learned or {})

    def recall(self, learned: Mapping[str, bytes]) -> None:
        """What was stored, before anything is asked."""
        for name, blob in sorted(learned.items()):
            # What an older version wrote otherwise is not worth failing for: it is learned again.
            with contextlib.suppress(msgspec.MsgspecError):
                self._known[name] = msgspec.json.decode(blob, type=Known)
                self.klass(name)
                self.lengths.learned(name)

    def klass(self, name: str) -> int:
        """The class as a number."""
        return self._numbers.setdefault(name, len(self._numbers))

    def observe(self, job: int, pool: str, window: Window) -> bool:
        """Steps that were timed; whether that teaches something new of the size."""
        own = self._own.setdefault(job, {})
        before = own.get(pool, Curve())
        own[pool] = curves.take_in(before, window)
        self._own_rows.pop(job, None)
        timed = dict(zip(before.workers, before.count, strict=True)).get(window.workers, 0.0)
        return own[pool] is not before and timed < _SETTLED_STEPS

    def best_size(self, klass: str) -> int:
        """Where jobs of the class were fastest; 0 if nobody knows."""
        found = [known.curve for known in self._known.get(klass, Known()).curves.values() if known.curve.workers]
        return exploring.best(curves.measured(found[0])).workers if found else 0

    def rate(self, job: int, klass: str, pool: str, workers: int) -> float:
        """Steps per second to be expected of a job on so many workers; 0 where nothing like it was ever timed."""
        step_s = self._step_s(job, klass, pool, workers)
        return 1 / (step_s + self._untimed_s(job, pool)) if step_s else 0.0

    def varies(self, job: int, pool: str) -> bool:
        """Whether the few steps of a window do not say how fast it is."""
        return job in self._beside_s or curves.slow_steps_s(self._own.get(job, {}).get(pool, Curve())) > 0

    def passes(self, job: int, klass: str, pool: str, workers: int, rate: float) -> None:
        """So many steps per second were counted by the clock. What its timed steps do not explain is done beside them,
        and takes as long at every size."""
        own = self._own.get(job, {}).get(pool, Curve())
        usual_s = self._step_s(job, klass, pool, workers) - curves.slow_steps_s(own)
        beside_s = 1 / rate - usual_s if own.workers and 1 / rate > (1 + _BESIDE_SHARE) * usual_s else 0.0
        had_s = self._beside_s.get(job, 0.0)
        if beside_s == had_s or (beside_s and had_s and abs(beside_s - had_s) < _BESIDE_SHARE / rate):
            return
        self._own_rows.pop(job, None)
        self._beside_s.pop(job, None)
        if beside_s:
            self._beside_s[job] = beside_s

    def _untimed_s(self, job: int, pool: str) -> float:
        """What is done beside each step and is in none that was timed."""
        slow_s = curves.slow_steps_s(self._own.get(job, {}).get(pool, Curve()))
        return max(0.0, self._beside_s.get(job, 0.0) - slow_s)

    def _step_s(self, job: int, klass: str, pool: str, workers: int) -> float:
        """By what was timed; 0: nothing was."""
        own = self._own.get(job, {}).get(pool, Curve())
        prior = self._known.get(klass, Known()).curves.get(pool, ClassHistory()).curve
        if not own.workers and not prior.workers:
            return 0.0
        return float(curves.step_s(own, np.array([float(workers)]), prior)[0])

    def ended(self, job: Job, request: JobRequest) -> bytes:
        """The job has succeeded: what is now known of its class, to be stored."""
        klass = request.klass
        known = self._known.get(klass, Known())
        by_pool = dict(known.curves)
        for pool, curve in self._own.get(job.number, {}).items():
            by_pool[pool] = learn(by_pool.get(pool, ClassHistory()), {}, math.nan, curve)
        known = Known(by_pool, (*known.ended, self._run(job, request))[-_MOST_RUNS:])
        while len(stored := msgspec.json.encode(known)) > _MOST_BYTES and len(known.ended) > 1:
            # Runs with long hyper-parameters: rather fewer of them.
            known = Known(by_pool, known.ended[len(known.ended) // 2 :])
        self._known[klass] = known
        self.klass(klass)
        self._renew(klass)
        self.forget(job.number)
        return stored

    def known(self, klass: str) -> Known | None:
        """What was learned of a class; None: nothing."""
        return self._known.get(klass)

    def classes(self) -> list[str]:
        """Those of which something was learned."""
        return sorted(self._known)

    def forget_class(self, klass: str) -> None:
        """As if no job of it had ever run. What is measured of jobs that run now stays."""
        self._known.pop(klass, None)
        self._renew(klass)
        self.lengths.forgotten(klass)

    def timed(self, shape: Shape) -> bool:
        """Whether the speed of its steps is known: its own, or its class's."""
        own, known = self._own.get(shape.job, {}), self._known.get(shape.klass)
        return any(curve.workers for curve in own.values()) or (known is not None and known.timed)

    def forget(self, job: int) -> None:
        self._own.pop(job, None)
        self._beside_s.pop(job, None)
        self._own_rows.pop(job, None)

    def measured(self, job: int) -> Mapping[str, Curve]:
        """What was measured of one job, by device type."""
        return self._own.get(job, {})

    def all_measured(self) -> dict[int, dict[str, Curve]]:
        """The same of all jobs, by number."""
        return {job: dict(by_pool) for job, by_pool in self._own.items()}

    def remember(self, job: int, measured: Any) -> None:
        """What `measured` was, as it was stored; what is not to be understood is measured again."""
        with contextlib.suppress(msgspec.ValidationError):
            found = msgspec.convert(measured, dict[str, Curve], strict=False)
            if found:
                self._own[job] = found
                self._own_rows.pop(job, None)

    def history(self) -> History:
        """The ended jobs, as policies see them."""
        if self._history is None:
            rows = sorted(
                (self._numbers[name], run.job, run.submit_s, run.size_s)
                for name, known in self._known.items()
                for run in known.ended
            )
            columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
            self._history = History(
                klass=np.array(columns[0], np.int64),
                job=np.array(columns[1], np.int64),
                submit_s=np.array(columns[2], np.float64),
                size_s=np.array(columns[3], np.float64),
            )
        return self._history

    def table(self, jobs: Sequence[Shape], pools: tuple[str, ...]) -> tuple[FloatArray, IntArray]:
        """Rates [pool, row, workers] and the row of every job. Jobs of which the same is known share a row."""
        rows: dict[object, int] = {}
        found: list[FloatArray] = []
        index: list[int] = []
        for key, shape in zip(self._keys(jobs), jobs, strict=True):
            if (at := rows.get(key)) is None:
                at = rows[key] = len(found)
                found.append(self._row(shape, pools))
            index.append(at)
        widest = max((row.shape[1] for row in found), default=1)
        table = np.zeros((len(pools), max(len(found), 1), widest))
        for r, row in enumerate(found):
            table[:, r, : row.shape[1]], table[:, r, row.shape[1] :] = row, row[:, -1:]
        return table, np.array(index, np.int64)

    def _row(self, shape: Shape, pools: tuple[str, ...]) -> FloatArray:
        key = self._keys([shape])[0], pools
        rows = self._own_rows.setdefault(shape.job, {}) if shape.job in self._own else self._rows
        if key not in rows:
            rows[key] = self._believed(shape, pools)
        return rows[key]

    def _keys(self, shapes: Sequence[Shape]) -> list[tuple[Any, ...]]:
        """Itself, its class, or, where nothing is known of either, only its sizes and pools."""
        own, known = self._own, self._known
        return [shape if shape.job in own else shape[1:] if shape.klass in known else shape[2:] for shape in shapes]

    def _believed(self, shape: Shape, pools: tuple[str, ...]) -> FloatArray:
        """[pool, workers]: as `core.estimate.belief` has it. At what size a job of which nothing is known begins is not
        decided here."""
        own = self._own.get(shape.job, {})
        known = self._known.get(shape.klass, Known()).curves
        rates = belief.believed(
            [own.get(pool, Curve()) for pool in pools],
            [known.get(pool, ClassHistory()).curve for pool in pools],
            shape.low,
            shape.high,
            first=shape.high,
            useless=[p for p, pool in enumerate(pools) if shape.pools and pool not in shape.pools],
        )
        if shape.job not in self._beside_s:
            return rates
        untimed_s = np.array([self._untimed_s(shape.job, pool) for pool in pools])
        slowed: FloatArray = rates / (1 + rates * untimed_s[:, None])
        return slowed

    def _learned(self, klass: str) -> Learned:
        known = self._known.get(klass)
        return Learned() if known is None else Learned(known.ended, known.timed)

    def _renew(self, klass: str) -> None:
        """What is known of the class has changed."""
        self._rows = {key: row for key, row in self._rows.items() if key[0][0] != klass}
        self._own_rows = {
            job: rows for job, rows in self._own_rows.items() if all(shape.klass != klass for shape, _ in rows)
        }
        self._history = None
        self.lengths.learned(klass)

    def _run(self, job: Job, request: JobRequest) -> Ended:
        """What is kept of one that has succeeded."""
        least = request.min_workers
        return Ended(
            job=job.number,
            submit_s=job.submitted_s,
            size_s=self._size_s(job, least),
            steps=job.steps,
            least=least,
            hyperparameters=dict(request.hyperparameters),
            asked=lengths.resources(request),
        )

    def _size_s(self, job: Job, minimum: int) -> float:
        """Seconds on its minimum of workers: by its curve where there is one, else what it took, as if linear; of one
        that holds no devices, as if it always ran on its minimum."""
        pool, own = next(iter(self._own.get(job.number, {}).items()), ("", None))
        if own is not None and own.workers and job.steps > 0:
            step_s = float(curves.step_s(own, np.array([float(minimum)]))[0])
            return job.steps * (step_s + self._untimed_s(job.number, pool))
        held_s = job.device_s * 1000 / job.width_milli / max(minimum, 1) if job.width_milli else job.ran_s
        return max(held_s, 1e-3)
