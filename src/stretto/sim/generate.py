"""Synthetic workloads in the plain format: the same settings and seed give the same rows, byte for byte.

Arrivals are Poisson at the rate that gives the wanted load: the GPU-seconds of all jobs, spread over as long as
`load` × `gpus` GPUs would need for them. Sizes are log-normal or Pareto. The mix of GPU counts is that of Microsoft's
Philly clusters, cut at the size of the cluster. Services follow the day: quiet at night, twice as busy at noon.

Curves that fall are those of a step that takes serial + parallel / n + sync × (n − 1) on n workers: fastest on one of
them where `sync` is large (`falls`), or at a size in the middle (`peak`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from stretto.core import options
from stretto.core.options import LONGEST_S, Seconds, Seed, Share
from stretto.core.snapshot import FloatArray, IntArray
from stretto.errors import UsageError
from stretto.sim.readers.plain import Row

_MIX = {1: 76_627, 2: 1_818, 4: 1_870, 8: 1_643, 16: 199, 32: 67}
"""How many jobs of the Philly trace asked for so many GPUs."""

_DAY_S = 86_400.0


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to make. Shares are 0..1."""

    jobs: Annotated[int, Meta(ge=1, le=10**6)] = 200
    """Training jobs."""
    gpus: Annotated[int, Meta(ge=1, le=10**5)] = 64
    """Size of the cluster that `load` speaks of; no job asks for more."""
    load: Annotated[float, Meta(gt=0, le=100)] = 0.8
    """GPU-seconds wanted / GPU-seconds there are, on average."""
    sizes: Literal["lognormal", "pareto"] = "lognormal"
    """Distribution of the durations."""
    median_s: Annotated[float, Meta(gt=0, le=LONGEST_S)] = 1200.0
    """Half of the jobs are shorter."""
    shape: Annotated[float, Meta(gt=0, le=10)] = 1.5
    """lognormal: sigma of the logarithm; pareto: the exponent (smaller is heavier)."""
    longest_s: Annotated[float, Meta(ge=1, le=LONGEST_S)] = 7 * _DAY_S
    """No job is longer."""
    wide: Share = 0.0
    """Share of jobs that ask for several GPUs; 0: as in Philly (7 %)."""
    elastic: Share = 0.0
    """Share of jobs that run on 1..2 × their GPUs, with a speed-up of n ** 0.7 … n ** 1."""
    curves: Literal["scales", "falls", "peak", "mixed"] = "scales"
    """How elastic jobs scale: to the end, not at all (fastest on one GPU), best in the middle, or a third each."""
    deadlines: Share = 0.0
    """Share of jobs with a deadline, 1.2 … 3 × their duration after submission."""
    priorities: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Levels, drawn evenly; 1: everybody alike."""
    services: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Services that run from the first to the last arrival."""
    replicas: Annotated[int, Meta(ge=1, le=10**5)] = 4
    """Replicas that a service wants at noon."""
    rigid: Share = 0.0
    """Share of jobs that lose everything when they are stopped. If this or the next is given the others are elastic."""
    restart: Share = 0.0
    """Share of jobs that go on from their last checkpoint."""
    checkpoint_s: Seconds = 0.0
    """How often jobs save, on average; 0: when they are stopped. Each draws half to one and a half of it."""
    preemptible: Share = 0.0
    """Share of the rigid jobs that may be stopped for more urgent ones all the same."""
    start_s: Seconds = 0.0
    """What a start costs, on average, drawn likewise; 0: left to the world."""
    resize_s: Seconds = 0.0
    """The same of a resize."""
    seed: Seed = 0


def parse(settings: Mapping[str, str]) -> Workload:
    """A workload from `key=value` settings, checked."""
    hint = "docs/traces.md lists the settings of the generator"
    wanted = options.read(Workload, settings, "the generator", hint)
    if wanted.replicas > wanted.gpus:
        raise UsageError(
            f"the generator: replicas is {wanted.replicas}; it must be at most gpus, {wanted.gpus}", hint=hint
        )
    if wanted.rigid + wanted.restart > 1:
        raise UsageError("the generator: rigid and restart, shares of the jobs, are more than 1 together", hint=hint)
    return wanted


def rows(wanted: Workload) -> list[Row]:
    """The workload, in order of submission."""
    random = np.random.default_rng(wanted.seed)
    gpus = _gpu_counts(wanted, random)
    duration = _durations(wanted, random)
    submit = _arrivals(wanted, random, float(gpus @ duration))
    found: list[Row] = [
        {"job_id": f"job-{j}", "submit_s": float(submit[j]), "gpus": int(gpus[j]), "duration_s": float(duration[j])}
        for j in range(wanted.jobs)
    ]
    # Questions that came later have draws of their own: older workloads stay what they were.
    later = np.random.default_rng((wanted.seed, 1)).random((wanted.jobs, 7))
    for row, more in zip(found, later.tolist(), strict=True):
        # One draw per question whatever the answer, so that a share changes only whom it concerns.
        draws = random.random(5)
        row |= _elastic(wanted, row, draws[0], draws[1]) | _deadline(wanted, row, draws[2], draws[3])
        row |= _falling(wanted, row, more[0], more[1]) | _stops(wanted, more[2], more[3]) | _costs(wanted, more[4:])
        if wanted.priorities > 1:
            row["priority"] = int(draws[4] * wanted.priorities)
    services = [_service(wanted, i, float(submit[-1])) for i in range(wanted.services)]
    return sorted(services + found, key=lambda row: float(row["submit_s"]))


def _gpu_counts(wanted: Workload, random: np.random.Generator) -> IntArray:
    sizes = np.array([n for n in _MIX if n <= wanted.gpus])
    weight = np.array([_MIX[int(n)] for n in sizes], np.float64)
    if wanted.wide and len(sizes) > 1:
        weight[1:] *= wanted.wide / weight[1:].sum()
        weight[0] = 1 - wanted.wide
    counts: IntArray = random.choice(sizes, wanted.jobs, p=weight / weight.sum())
    return counts


def _durations(wanted: Workload, random: np.random.Generator) -> FloatArray:
    if wanted.sizes == "lognormal":
        times = np.exp(wanted.shape * random.standard_normal(wanted.jobs))
    else:
        above = np.asarray(random.pareto(wanted.shape, wanted.jobs), np.float64)
        times = (1 + above) / math.pow(2, 1 / wanted.shape)  # half of the draws are below 1
    whole: FloatArray = np.rint(np.minimum(np.maximum(wanted.median_s * times, 1.0), wanted.longest_s))
    return whole


def _arrivals(wanted: Workload, random: np.random.Generator, gpu_s: float) -> FloatArray:
    mean_s = gpu_s / (wanted.load * wanted.gpus) / wanted.jobs
    times = np.cumsum(random.exponential(mean_s, wanted.jobs))
    rounded: FloatArray = np.round(times - times[0], 1)
    return rounded


def _elastic(wanted: Workload, row: Row, draw: float, exponent: float) -> Row:
    if draw >= wanted.elastic:
        return {}
    most = min(2 * int(row["gpus"]), wanted.gpus)
    return {"min": 1, "max": most, "speedup": str(round(0.7 + 0.3 * exponent, 2))}


def _falling(wanted: Workload, row: Row, kind: float, draw: float) -> Row:
    """The points of a curve that falls, for an elastic job that is to have one."""
    chosen = wanted.curves if wanted.curves != "mixed" else ("scales", "falls", "peak")[int(3 * kind)]
    if "max" not in row or chosen == "scales":
        return {}
    most = int(row["max"])
    best = 1 if chosen == "falls" else round(2 * (most / 4) ** draw) if most >= 4 else min(most, 2)
    serial, sync = (0.5, 0.3 + 0.7 * draw) if chosen == "falls" else (0.1, 0.9 / best**2)
    sizes = sorted({n for n in (*(2**k for k in range(17)), best, most, int(row["gpus"])) if n <= most})
    points = [(n, 1 / (serial + (1 - serial) / n + sync * (n - 1))) for n in sizes]
    return {"speedup": ";".join(f"{n}:{speed:.4g}" for n, speed in points)}


def _stops(wanted: Workload, draw: float, may: float) -> Row:
    """The level of a job, and what becomes of it when it is stopped."""
    if not wanted.rigid and not wanted.restart:
        return {}
    if draw < wanted.rigid:
        return {"level": "rigid"} | ({"preemptible": "true"} if may < wanted.preemptible else {})
    return {"level": "restart" if draw < wanted.rigid + wanted.restart else "elastic"}


def _costs(wanted: Workload, draws: list[float]) -> Row:
    """Seconds around what is usual, where anything is said of it."""
    usual = (("start_s", wanted.start_s), ("resize_s", wanted.resize_s), ("checkpoint_s", wanted.checkpoint_s))
    return {name: round(mean * (0.5 + draw), 3) for (name, mean), draw in zip(usual, draws, strict=True) if mean}


def _deadline(wanted: Workload, row: Row, draw: float, slack: float) -> Row:
    if draw >= wanted.deadlines:
        return {}
    return {"deadline_s": round(row["submit_s"] + (1.2 + 1.8 * slack) * row["duration_s"], 1)}


def _service(wanted: Workload, number: int, end_s: float) -> Row:
    """A service whose load rises from half of `replicas` at midnight to all of them at noon, hour by hour."""
    hours = range(max(1, math.ceil(end_s / 3600)))
    wave = [0.75 - 0.25 * math.cos(2 * math.pi * hour * 3600 / _DAY_S) for hour in hours]
    load = ";".join(
        f"{hour * 3600}:{max(1, round(wanted.replicas * level))}" for hour, level in zip(hours, wave, strict=True)
    )
    row: Row = {"job_id": f"service-{number}", "submit_s": 0.0, "gpus": wanted.replicas}
    return row | {"duration_s": max(end_s, 1.0), "min": 1, "max": wanted.replicas, "speedup": "linear", "load": load}
