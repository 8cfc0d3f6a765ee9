"""Random snapshots of any size: what decisions are timed on, and tried out with.

The jobs are the kind a shared cluster sees: a dozen models whose speed-up flattens at different widths (up to
64 workers), log-normal lengths, requests that are powers of two, ages that reach back a day, some of them
running at their requested size. The same arguments always give the same snapshot.
"""

from __future__ import annotations

import numpy as np

from stretto.core.snapshot import GPU, FloatArray, IntArray, Nodes, Snapshot

TOP = 64
"""The widest job."""
_DEVICES = 8
_PLENTY = 2**40
_DAY_S = 86_400.0
_SERIAL = np.array([0.001, 0.002, 0.004, 0.008, 0.012, 0.02, 0.03, 0.045, 0.07, 0.1, 0.15, 0.25])
"""Share of a step that does not get shorter with more workers, a model each."""
_STEPS_PER_S = np.array([9.0, 4.0, 1.5, 12.0, 0.7, 6.0, 2.5, 20.0, 0.3, 3.0, 8.0, 1.0])
"""Speed of each model on one worker."""


def snapshot(
    jobs: int,
    gpus: int,
    seed: int = 0,
    *,
    running_share: float = 0.5,
    types: tuple[str, ...] = ("gpu",),
) -> Snapshot:
    """So many jobs on so many GPUs, of which about `running_share` are in use; device types share the GPUs."""
    random = np.random.default_rng(seed)
    now_s = 10 * _DAY_S
    nodes, capacity = _nodes(gpus, types)
    curve = random.integers(0, len(_SERIAL), jobs)
    requested = np.minimum(2 ** random.choice(7, jobs, p=[0.4, 0.18, 0.16, 0.14, 0.08, 0.03, 0.01]), max(gpus, 1))
    low = np.maximum(1, requested // random.choice([1, 2, 4, 64], jobs, p=[0.05, 0.1, 0.15, 0.7]))
    rates = _rates(random, len(types))
    alone_s = random.lognormal(8.0, 1.6, jobs)
    done_share = random.uniform(0.0, 0.9, jobs)
    age_s = np.sort(random.exponential(_DAY_S / 3, jobs))[::-1].copy()
    workers, pool = _running(random.permutation(jobs), requested, capacity, running_share)
    runs = workers > 0
    ran_s = np.where(runs, age_s * random.uniform(0.1, 1.0, jobs), 0.0)
    done_share = np.where(runs, done_share, 0.0)
    work = alone_s * rates[0, curve, requested]
    zero = np.zeros(jobs, np.int64)
    return Snapshot(
        now_s=now_s,
        pools=types,
        capacity=capacity,
        nodes=nodes,
        rates=rates,
        job=np.arange(jobs),
        klass=curve,
        submit_s=now_s - age_s,
        priority=random.integers(0, 3, jobs),
        deadline_s=np.where(random.random(jobs) < 0.3, now_s + 2 * alone_s, np.inf),
        requested=requested,
        min_workers=low,
        max_workers=np.maximum(requested, 2 ** random.integers(2, 7, jobs)),
        width=np.full(jobs, GPU),
        fixed_milli=zero,
        demand=np.zeros((jobs, 3), np.int64),
        curve=curve,
        resize_s=np.full(jobs, 0.5),
        start_s=np.full(jobs, 5.0),
        is_service=np.zeros(jobs, np.bool_),
        wanted=zero,
        workers=workers,
        pool=pool,
        placed=np.zeros((jobs, 0), np.int64),
        remaining=work * (1 - done_share),
        remaining_sd=np.zeros(jobs),
        done=work * done_share,
        ran_s=ran_s,
        gpu_s=ran_s * workers,
        waited_s=age_s - ran_s,
        started_s=np.where(runs, now_s - ran_s, np.nan),
        changed_s=np.where(runs, now_s - ran_s / 2, now_s - age_s),
        restarts=np.where(runs, 1 + random.integers(0, 4, jobs), 0),
    )


def _nodes(gpus: int, types: tuple[str, ...]) -> tuple[Nodes, IntArray]:
    devices: list[int] = []
    kinds: list[int] = []
    capacity = np.zeros(len(types), np.int64)
    for kind in range(len(types)):
        count = gpus // len(types) + (kind < gpus % len(types))
        capacity[kind] = count * GPU
        sizes = [_DEVICES] * (count // _DEVICES) + [count % _DEVICES] * bool(count % _DEVICES)
        devices += sizes
        kinds += [kind] * len(sizes)
    plenty = np.full(len(devices), _PLENTY)
    return (
        Nodes(
            name=tuple(f"node-{i}" for i in range(len(devices))),
            pool=np.array(kinds, np.int64),
            devices=np.array(devices, np.int64),
            cpu_milli=plenty,
            memory_mib=plenty,
            gpu_memory_mib=plenty,
        ),
        capacity,
    )


def _rates(random: np.random.Generator, types: int) -> FloatArray:
    """Amdahl curves; every further device type is slower, by a factor that depends on the model."""
    n = np.arange(TOP + 1)
    speedup = n / (1 + _SERIAL[:, None] * np.maximum(n - 1, 0))
    factor = np.cumprod(random.uniform(0.3, 0.9, (types, len(_SERIAL))), axis=0)
    factor /= factor[0]
    rates: FloatArray = factor[:, :, None] * (_STEPS_PER_S[:, None] * speedup)[None]
    return rates


def _running(order: IntArray, requested: IntArray, capacity: IntArray, share: float) -> tuple[IntArray, IntArray]:
    """Workers and pool of the jobs that run: in that order, each where most room is left."""
    free = (capacity * share).astype(np.int64) // GPU
    workers, pool = np.zeros(len(order), np.int64), np.full(len(order), -1, np.int64)
    for j in order.tolist():
        best = int(np.argmax(free))
        if requested[j] <= free[best]:
            workers[j], pool[j] = requested[j], best
            free[best] -= requested[j]
    return workers, pool
