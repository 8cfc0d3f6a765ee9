"""The simulated world's settings and what a run of it leaves behind."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from stretto.core import cycle
from stretto.core.options import Cost, Period, PeriodOrZero, Seconds, Seed, Spread
from stretto.core.snapshot import BoolArray, FloatArray, IntArray


class Failure(msgspec.Struct, frozen=True):
    """A node goes down or comes back."""

    at_s: float
    node: int
    up: bool = False


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the world charges and hides. The defaults are a free and honest world."""

    start_s: Cost = 0.0
    """Seconds without progress at every start from zero."""
    resize_s: Cost = 0.0
    """Seconds without progress at every change of size or place."""
    join_s: Cost = 0.0
    """Seconds until workers that are added to a running job take part. Until then it goes on as it was, unless its
    level says that it is restarted."""
    leave_s: Cost = 0.0
    """Seconds until workers that are taken from a running job have gone: who gets their room starts so much later."""
    lengths: Literal["known", "estimated", "unknown"] = "known"
    """Whether policies are told how much work is left, the truth or what finished jobs suggest."""
    estimate_sd: Spread = 0.0
    """Log-normal error of known lengths, as policies are told them; one factor per job, by seed."""
    curves: Literal["true", "learned"] = "true"
    """Whether policies see the speed-up of a job as it is, or as far as it was observed."""
    explore: bool = True
    """Learned curves: jobs are tried at other sizes with what is free. Otherwise sizes are what policies look for."""
    observe_s: Period = 30.0
    """Learned curves: seconds at one size that make one measurement of its speed."""
    observe_sd: Spread = 0.0
    """Learned curves: log-normal error of one measurement, by seed."""
    slot_s: PeriodOrZero = 0.0
    """Policies are asked at multiples of this time only; 0: whenever something happens."""
    gap_s: Seconds = 0.0
    """Policies are asked at least this long after they were last asked; what happens sooner waits."""
    placement: str = ""
    """Name of a placement; empty: GPUs are only counted."""
    failures: tuple[Failure, ...] = ()
    level: Literal["", "elastic", "restart", "rigid"] = ""
    """Of jobs of which the trace says none (see `sim.levels`); empty: a stop loses nothing."""
    checkpoint_s: Annotated[float, msgspec.Meta(ge=0, extra={"endless": True})] = 0.0
    """Seconds of progress between two checkpoints of a job of level `restart`; 0: it saves when it is stopped. Of other
    jobs, except rigid ones: what is lost, at most, when a failure leaves a job no worker."""
    preemptible: bool | None = None
    """Whether jobs may lose work to those of higher priority; None: all but rigid ones."""
    contention: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 0.0
    """How much jobs on one node slow each other down (see `sim.contention`)."""
    hysteresis: bool | None = None
    """Whether resizes that do not pay are dropped; None: as the policy declares."""
    stops_lose_work: bool = False
    """Policies may stop jobs that lose their work by it."""
    reserve_after_s: Seconds = 60.0
    """A job that such jobs keep waiting gets a reservation after so long."""
    seed: Seed = 0
    record: bool = False
    """Keep every decision, so that it can be drawn, explained or replayed."""

    @property
    def cycle(self) -> cycle.Settings:
        """What the decision cycle is told. Where nodes fail, or neighbours matter, nodes must be told apart."""
        return cycle.Settings(
            placement=self.placement or ("pack" if self.failures or self.contention else ""),
            hysteresis=self.hysteresis,
            stops_lose_work=self.stops_lose_work,
            reserve_after_s=self.reserve_after_s,
        )


class Change(msgspec.Struct, frozen=True):
    """One job's workers changed: what the timeline is drawn from."""

    at_s: float
    job: int
    workers: int
    pool: int
    reason: int
    first: float
    second: float
    nodes: tuple[int, ...] = ()
    """Workers on each node; empty where GPUs are only counted."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to every job of the trace, in the trace's order, and to the cluster."""

    policy: str
    start_s: FloatArray
    """First start; nan if it never ran."""
    finish_s: FloatArray
    """nan for jobs that were rejected."""
    gpu_s: FloatArray
    """GPU-seconds held."""
    preemptions: IntArray
    resizes: IntArray
    paused_s: FloatArray
    """Seconds with workers but without progress (starts and resizes)."""
    lost_s: FloatArray
    """Seconds of progress that stops and resizes have undone."""
    lost_to_failures_s: FloatArray
    """The same by nodes that failed."""
    rejected: BoolArray
    is_service: BoolArray
    events: int
    decisions: int
    changes: tuple[Change, ...] = ()
