"""How fast the six models of the Pollux evaluation train: measured step times and gradient statistics.

`steps.csv` has the seconds of one optimizer step by nodes, workers and local batch (what one worker puts
through the model at once), and how many of them are synchronisation. `epochs.csv` has, by total batch and
epoch, the progress reached at the epoch's end and the squared norm and variance of the gradient.

Progress is counted in steps of the model's initial (smallest measured) batch. One step of a batch that is
`scale` times as large is worth `gain = (var + sqr) / (var / scale + sqr)` of them, between 1 and `scale`; so
goodput = gain / seconds per step. The work of a job, all its epochs, is the same at every batch and size.
"""

from __future__ import annotations

import csv
import functools
import math
from pathlib import Path

import msgspec
import numpy as np

from stretto.core.snapshot import FloatArray, IntArray

_DATA = Path(__file__).parent.parent / "data" / "pollux"

GPUS_PER_NODE = 4
"""Of the machines that were measured."""
MOST_WORKERS = 64
MOST_NODES = 16
_CANDIDATES = 50
_ROUNDING = 1e-8
_LOCAL_LIMIT = {"yolov3": 8}
"""The authors let this model use less than the largest local batch they measured."""


class Steps(msgspec.Struct, frozen=True):
    """One measured pair of nodes and workers: seconds by local batch, ascending."""

    local: FloatArray
    step_s: FloatArray
    sync_s: FloatArray


class Split(msgspec.Struct, frozen=True):
    """Total batches cut up for some number of workers, arrays of one shape."""

    local: IntArray
    """Samples that one worker puts through the model at once."""
    extra: IntArray
    """Passes before the one that synchronises and applies."""
    batch: IntArray
    """The total after rounding."""


class Application(msgspec.Struct, frozen=True, kw_only=True):
    """One model with everything that was measured of it."""

    name: str
    batches: FloatArray
    """Total batches whose gradients were measured, ascending; the first is the initial one."""
    work: FloatArray
    """[epoch] progress that each epoch takes."""
    grad_sqr: FloatArray
    """[batch, epoch]"""
    grad_var: FloatArray
    steps: dict[tuple[int, int], Steps]
    """(nodes, workers) → measurements."""
    local_min: int
    local_max: int

    @property
    def initial(self) -> int:
        return int(self.batches[0])

    @property
    def largest(self) -> int:
        return int(self.batches[-1])

    def most_workers(self, batch: int) -> int:
        """As many as still get the smallest local batch."""
        return max(1, min(MOST_WORKERS, batch // self.local_min))

    def split(self, batch: FloatArray, workers: int) -> Split:
        """Cut total batches evenly; what exceeds the local limit takes several passes.

        One worker alone takes at least two passes beyond the initial batch: the variance of the gradient
        cannot be estimated from a single one.
        """
        share = np.ceil(batch / workers - _ROUNDING)
        extra = np.ceil(share / self.local_max - _ROUNDING).astype(np.int64) - 1
        if workers == 1:
            extra = np.where(batch > self.initial + _ROUNDING, np.maximum(extra, 1), extra)
        local = np.ceil(share / (extra + 1) - _ROUNDING).astype(np.int64)
        local = np.minimum(local, self.largest // (workers * (extra + 1)))
        return Split(local, extra, workers * local * (extra + 1))

    def gain(self, batch: IntArray) -> FloatArray:
        """[batch, epoch] progress of one step, statistics linear between the measured batches."""
        high = np.clip(np.searchsorted(self.batches, batch), 1, len(self.batches) - 1)
        low = high - 1
        part = np.clip((batch - self.batches[low]) / (self.batches[high] - self.batches[low]), 0.0, 1.0)[:, None]
        sqr = (1 - part) * self.grad_sqr[low] + part * self.grad_sqr[high]
        var = (1 - part) * self.grad_var[low] + part * self.grad_var[high]
        gain: FloatArray = (var + sqr) / (var / (batch / self.initial)[:, None] + sqr)
        return gain

    def step_s(self, split: Split, workers: int, nodes: int) -> FloatArray:
        """Seconds from one applied step to the next, all passes together.

        Between measured numbers of workers on the same nodes: linear. Between measured numbers of nodes:
        linear at the same number of workers per node.
        """
        dense = workers / nodes
        rows = sorted({k for k, _ in self.steps})
        above = next(k for k in rows if k >= nodes)
        below = max(k for k in rows if k <= nodes)
        times = self._on_row(below, dense * below, split.local)
        if above > below:
            part = (nodes - below) / (above - below)
            times = (1 - part) * times + part * self._on_row(above, dense * above, split.local)
        step, sync = times
        whole: FloatArray = step + split.extra * (step - sync)
        return whole

    def _on_row(self, nodes: int, workers: float, local: IntArray) -> FloatArray:
        """[step and sync, …] on a measured number of nodes."""
        sizes = sorted(n for k, n in self.steps if k == nodes)
        above = next(n for n in sizes if n >= workers - _ROUNDING)
        below = max(n for n in sizes if n <= workers + _ROUNDING)
        times = self._measured(nodes, below, local)
        if above > below:
            part = (workers - below) / (above - below)
            times = (1 - part) * times + part * self._measured(nodes, above, local)
        return times

    def _measured(self, nodes: int, workers: int, local: IntArray) -> FloatArray:
        at = self.steps[nodes, workers]
        return np.stack([np.interp(local, at.local, at.step_s), np.interp(local, at.local, at.sync_s)])


def fewest_nodes(workers: int) -> int:
    return -(-workers // GPUS_PER_NODE)


def fixed_s(app: Application, batch: int, whole_seconds: bool = False) -> FloatArray:
    """[workers, nodes] seconds that a whole job takes at this total batch; inf on no workers."""
    table = np.full((MOST_WORKERS + 1, MOST_NODES + 1), np.inf)
    for workers in range(1, MOST_WORKERS + 1):
        split = app.split(np.array([float(batch)]), workers)
        steps = app.work / app.gain(split.batch)[0]
        for nodes in _spans(workers):
            epochs_s = steps * app.step_s(split, workers, nodes)[0]
            table[workers, nodes] = (whole(epochs_s) if whole_seconds else epochs_s).sum()
    return _fill(table)


def fixed_steps(app: Application, batch: int) -> float:
    """Optimizer steps that a job takes at this total batch."""
    return float((app.work / app.gain(np.array([batch]))[0]).sum())


def best_goodput(app: Application, pinned: int = 0, whole_seconds: bool = False) -> FloatArray:
    """[epoch, workers, nodes] progress/s at the best batch for each, or at the pinned one."""
    table = np.zeros((len(app.work), MOST_WORKERS + 1, MOST_NODES + 1))
    for workers in range(1, min(MOST_WORKERS, app.most_workers(app.largest)) + 1):
        smallest = max(app.initial, app.local_min * workers)
        batch = np.array([float(pinned)]) if pinned else np.geomspace(smallest, app.largest, _CANDIDATES)
        split = app.split(batch, workers)
        allowed = (split.local >= app.local_min) & (split.local <= app.local_max)
        gain = np.where(allowed[:, None], app.gain(split.batch), 0.0)
        for nodes in _spans(workers):
            table[:, workers, nodes] = (gain / app.step_s(split, workers, nodes)[:, None]).max(axis=0)
    if whole_seconds:
        work = app.work[:, None, None]
        with np.errstate(divide="ignore"):
            table = work / whole(work / table)
    return _fill(table)


def whole(seconds: FloatArray) -> FloatArray:
    """Rounded to whole seconds, at least one: how the authors' simulator counts an epoch."""
    return np.maximum(1.0, np.round(seconds))


def _spans(workers: int) -> range:
    return range(fewest_nodes(workers), min(workers, MOST_NODES) + 1)


def _fill(table: FloatArray) -> FloatArray:
    """Give pairs that the measured machines cannot form the value of the nearest number of nodes that they can."""
    for workers in range(1, MOST_WORKERS + 1):
        spans = _spans(workers)
        table[..., workers, : spans[0]] = table[..., workers, spans[0], None]
        table[..., workers, spans[-1] + 1 :] = table[..., workers, spans[-1], None]
    return table


@functools.cache
def load() -> dict[str, Application]:
    """The six models, by name."""
    steps = _rows("steps.csv")
    epochs = _rows("epochs.csv")
    return {name: _application(name, steps[name], epochs[name]) for name in steps}


def _rows(file: str) -> dict[str, FloatArray]:
    found: dict[str, list[list[float]]] = {}
    with (_DATA / file).open(newline="") as text:
        for line in list(csv.reader(text))[1:]:
            found.setdefault(line[0], []).append([float(cell) for cell in line[1:]])
    return {name: np.array(rows) for name, rows in found.items()}


def _application(name: str, steps: FloatArray, epochs: FloatArray) -> Application:
    batches = np.unique(epochs[:, 0])
    shape = (len(batches), -1)
    by_batch = epochs[np.lexsort((epochs[:, 1], epochs[:, 0]))]
    # Progress at the end of an epoch differs a little between the batches it was measured at.
    reached = by_batch[:, 2].reshape(shape).min(axis=0)
    measured: dict[tuple[int, int], Steps] = {}
    for nodes, workers in np.unique(steps[:, :2], axis=0).astype(int).tolist():
        local, step_s, sync_s = steps[(steps[:, 0] == nodes) & (steps[:, 1] == workers)][:, 2:].T
        measured[nodes, workers] = Steps(local, step_s, sync_s)
    alone = measured[1, 1].local
    return Application(
        name=name,
        batches=batches,
        work=np.diff(reached, prepend=0.0),
        grad_sqr=by_batch[:, 3].reshape(shape),
        grad_var=by_batch[:, 4].reshape(shape),
        steps=measured,
        local_min=math.ceil(alone[0]),
        local_max=_LOCAL_LIMIT.get(name, math.floor(alone[-1])),
    )
