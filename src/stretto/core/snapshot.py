"""What a policy may look at: the cluster and the active jobs, as columns, at one moment.

Every column has one entry per active job, in order of job number; numbers are given in order of
(submit time, id), so a smaller number came earlier. Arrays are never changed after the snapshot was
built. Units: seconds, milli-GPU, milli-CPU, MiB, and *steps* for work.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]

_T = TypeVar("_T", np.int64, np.float64)

GPU = 1000
"""One whole GPU, in milli-GPU."""

LOST_STARTS = 2.0
"""Work of so many starts is weighed like a start; more of it is not given away."""


class Nodes(msgspec.Struct, frozen=True, kw_only=True):
    """The machines that are up. `pool` is the index of the node's device type in `Snapshot.pools`."""

    name: tuple[str, ...]
    pool: IntArray
    devices: IntArray
    cpu_milli: IntArray
    memory_mib: IntArray
    gpu_memory_mib: IntArray
    """Memory of one device."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs that have finished: a bounded number per class, the latest ones. `size_s` is the time a job needed
    in all on its minimum of workers. Sorted by (class, job number): neighbours were submitted one after the other.
    """

    klass: IntArray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    job: IntArray = msgspec.field(default_factory=lambda: np.empty(0, np.int64))
    submit_s: FloatArray = msgspec.field(default_factory=lambda: np.empty(0))
    size_s: FloatArray = msgspec.field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.job)

    def of_class(self, klass: int) -> History:
        """The finished jobs of one class, in order of submission."""
        low, high = np.searchsorted(self.klass, (klass, klass + 1))
        return History(
            klass=self.klass[low:high],
            job=self.job[low:high],
            submit_s=self.submit_s[low:high],
            size_s=self.size_s[low:high],
        )

    def adding(self, klass: int, job: int, submit_s: float, size_s: float, limit: int = 500) -> History:
        """The history after one more job; the oldest of its class goes when there are more than `limit`."""
        low, high = (int(i) for i in np.searchsorted(self.klass, (klass, klass + 1)))
        at = low + int(np.searchsorted(self.job[low:high], job))
        full = high - low >= limit

        def with_one(column: NDArray[_T], value: float) -> NDArray[_T]:
            grown = np.insert(column, at, value)
            return np.delete(grown, low) if full else grown

        return History(
            klass=with_one(self.klass, klass),
            job=with_one(self.job, job),
            submit_s=with_one(self.submit_s, submit_s),
            size_s=with_one(self.size_s, size_s),
        )


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a policy may look at, immutable."""

    now_s: float
    pools: tuple[str, ...]
    """Device types. Most clusters have one."""
    capacity: IntArray
    """Milli-GPU per pool on nodes that are up."""
    nodes: Nodes
    rates: FloatArray
    """Throughput in steps/s: rates[pool, curve, workers]; rates[..., 0] == 0. Policies see rates that never fall with
    more workers: see `falls`."""
    falls: bool = False
    """Some of these speeds may fall with more workers: the cycle deals with it before a policy is asked."""
    spread_rates: FloatArray | None = None
    """Throughput by place: [pool, curve, workers, nodes spanned]; None where it is not known to matter."""
    history: History = msgspec.field(default_factory=History)

    # What was asked for. One entry per active job.
    job: IntArray
    """The job's number: unique, ascending, stable over its life; breaks every tie."""
    klass: IntArray
    """Jobs of one class (same script, model, user …) are expected to behave alike."""
    submit_s: FloatArray
    priority: IntArray
    """Larger is more urgent."""
    deadline_s: FloatArray
    """Absolute; inf when there is none."""
    requested: IntArray
    """Workers asked for: what rigid policies give."""
    min_workers: IntArray
    max_workers: IntArray
    step: IntArray | None = None
    """Sizes go up from the minimum by so many workers; 0: the minimum and powers of two. None: every size is possible.
    Policies need not look: see `core.steps`."""
    width: IntArray
    """Milli-GPU per worker."""
    fixed_milli: IntArray
    """Milli-GPU of fixed roles (parameter servers, a master), taken once while the job runs."""
    demand: IntArray
    """[job, 3]: CPU milli, memory MiB and GPU memory MiB per worker; zeros where nothing was asked."""
    curve: IntArray
    """Row of `rates` that holds now."""
    resize_s: FloatArray
    """What a change of workers costs the job, in seconds without progress."""
    start_s: FloatArray
    """What a start from zero costs it."""
    is_service: BoolArray
    wanted: IntArray
    """For services: the replicas the load asks for now. Zero for training jobs."""

    # What has happened so far.
    workers: IntArray
    """Workers now; 0 while waiting."""
    pool: IntArray
    """Pool it runs on, -1 while waiting."""
    placed: IntArray
    """[job, node] workers on each node; an empty [job, 0] array where GPUs are only counted."""
    reach: BoolArray | None = None
    """[job, node] where new workers of a job may go (who runs elsewhere may stay); None: on all nodes of its pool."""
    remaining: FloatArray
    """Work left, in steps, as far as known; nan when the length is unknown."""
    remaining_sd: FloatArray
    """Standard deviation of log(remaining): 0 when exact."""
    done: FloatArray
    """Work done so far, in steps."""
    ran_s: FloatArray
    """Time with workers, restarts included."""
    gpu_s: FloatArray
    """Attained service: GPU-seconds held."""
    waited_s: FloatArray
    """Time without workers since submission."""
    started_s: FloatArray
    """First start; nan before it."""
    changed_s: FloatArray
    """Last change of workers, or the submission."""
    restarts: IntArray
    """Starts and resizes so far."""

    # What was measured of speeds at several sizes. None: rates are what is known, and nobody explores.
    measured: dict[int, Any] | None = None
    """By job number: an `estimate.curve.Curve` of the job itself, on the pool that it runs on."""
    explores: BoolArray | None = None
    """Who may be tried at other sizes to learn its speed there."""
    guess: IntArray | None = None
    """The size at which such a job starts: where its class was fastest, or its minimum."""

    # What a stop would do. None everywhere: nobody loses anything.
    lost_s: FloatArray | None = None
    """Seconds of work that each job would lose if it were stopped now."""
    fragile: BoolArray | None = None
    """Whose progress ends with its processes, also while it still waits: such a job loses work when it is stopped."""
    unproven: BoolArray | None = None
    """Who is said to keep its progress but was never seen to: it may turn out to be fragile. None: nobody."""
    preemptible: BoolArray | None = None
    """Who may lose work to jobs of higher priority. None: everybody."""

    def __len__(self) -> int:
        return len(self.job)

    @property
    def total_milli(self) -> int:
        """Capacity of all pools together."""
        return int(self.capacity.sum())

    @property
    def pinned(self) -> BoolArray:
        """Who runs and would lose more by a stop than two starts cost: no equal may stop, move or resize it."""
        if self.lost_s is None:
            return np.zeros(len(self), np.bool_)
        pinned: BoolArray = (self.workers > 0) & (self.lost_s > LOST_STARTS * self.start_s)
        return pinned

    @property
    def asked(self) -> IntArray:
        """What rigid policies give: the workers asked for, within the job's limits."""
        asked: IntArray = np.clip(self.requested, self.min_workers, self.max_workers)
        return asked

    @property
    def need(self) -> IntArray:
        """Milli-GPU that each job takes at its requested size."""
        need: IntArray = self.asked * self.width + self.fixed_milli
        return need

    def used_milli(self, workers: IntArray, pool: IntArray) -> IntArray:
        """Milli-GPU per pool that these workers of all jobs take there."""
        runs = workers > 0
        need = (workers * self.width + self.fixed_milli)[runs]
        return np.bincount(pool[runs], need, len(self.pools)).astype(np.int64)

    def rate(self, workers: IntArray, pool: int = 0) -> FloatArray:
        """Steps per second of every job on that many workers of one pool."""
        top = self.rates.shape[2] - 1
        rate: FloatArray = self.rates[pool, self.curve, np.minimum(workers, top)]
        return rate

    def remaining_s(self, workers: IntArray, pool: int = 0) -> FloatArray:
        """Seconds left on that many workers: inf on none, nan when the length is unknown."""
        with np.errstate(divide="ignore", invalid="ignore"):
            left: FloatArray = np.where(self.remaining == 0, 0.0, self.remaining / self.rate(workers, pool))
        return left
