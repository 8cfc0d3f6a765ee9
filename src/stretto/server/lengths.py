"""How long jobs are: the one source of lengths for the loop, the forecast, ETAs and explanations.

In this order: what the workers said (exact); what earlier runs of the class needed, judged by the hyper-parameters and
the resources asked for; what the user expects; otherwise nobody knows. The class gives way to the user's word only
where its runs differ more than people's guesses do. What a job has outlived corrects its estimate, and a hint never
ends anything: who outlives it is taken to last as long again.

Lengths are in steps where the class has told its steps and its speed. Otherwise they are in seconds on so many workers
(a class's on the minimum, a user's on the number asked for) and turned into steps by the speed that is believed, so
that work left over speed is always the seconds left.

A queue of ten thousand jobs asks often: jobs of one class that ask for the same share a `Prospect`, which is made
again only when the class has learned something.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from stretto.core.estimate.history import ClassHistory, learn, lengths
from stretto.core.estimate.remaining import left_of_all, left_of_hints
from stretto.core.request import JobRequest
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray

Source: TypeAlias = Literal["total", "class", "hint", "unknown"]

_HINT_SD = 0.7
"""People's guesses: wrong by a factor of two either way. As a single earlier run is."""
_AT_ONCE = 1000
"""Prospects that are made again for one snapshot."""
_ENOUGH = 3
"""So many runs that told their steps are worth more than all that did not."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of a run. Older versions wrote the first three only."""

    job: int
    submit_s: float
    size_s: float
    """Seconds that it needed on its minimum of workers."""
    steps: int = 0
    """0: it did not tell."""
    least: int = 0
    """The minimum of workers; 0: not known."""
    hyperparameters: dict[str, float | str] = {}
    asked: tuple[int, ...] = ()
    """See `resources`."""


class Learned(NamedTuple):
    """What is known of a class."""

    runs: Sequence[Ended] = ()
    timed: bool = False
    """Whether the speed of its steps was measured."""


class Total(NamedTuple):
    """A job's work in all: log(work) has this mean and standard deviation."""

    mean_log: float = math.nan
    sd_log: float = 0.0
    on: int = 0
    """The work is in seconds on so many workers; 0: in steps."""
    source: Source = "unknown"
    runs: int = 0
    """Earlier runs that it was learned from."""

    def packed(self) -> bytes:
        return _PACK(self.mean_log, self.sd_log, self.on, self.source == "hint")


_PACK = struct.Struct("4d").pack
_UNKNOWN = Total()
_UNKNOWN_PACKED = _UNKNOWN.packed()


class Asked(NamedTuple):
    """What is expected of a job depends on this."""

    klass: str
    hyperparameters: tuple[tuple[str, float | str], ...]
    least: int
    resources: tuple[int, ...]
    hint: Total | None


class Prospect:
    """Of all jobs that ask for the same. `total` is made by `Lengths`."""

    __slots__ = ("__weakref__", "asked", "features", "klass", "packed", "total", "version")

    def __init__(self, asked: Asked) -> None:
        self.asked, self.klass, self.version = asked, asked.klass, -1
        self.features: dict[str, float | str] = {}
        """Made when they are first needed: most classes have no history."""
        self.total, self.packed = _UNKNOWN, _UNKNOWN_PACKED

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.asked.hyperparameters)

    def become(self, total: Total) -> None:
        self.total, self.packed = total, total.packed()


class Totals(NamedTuple):
    """Of many jobs, as columns."""

    mean_log: FloatArray
    sd_log: FloatArray
    on: IntArray
    hinted: BoolArray


class Lengths:
    def __init__(self, known: Callable[[str], Learned]) -> None:
        self._known = known
        self._prospects: weakref.WeakValueDictionary[Asked, Prospect] = weakref.WeakValueDictionary()
        self._versions: dict[str, int] = {}
        self._news = 0
        self._nobody = Prospect(Asked("", (), 1, (), None))
        self._nobody.version = 0

    def learned(self, klass: str) -> None:
        """The class has learned something."""
        self._news += 1
        self._versions[klass] = self._news

    def forgotten(self, klass: str) -> None:
        """Nothing is known of the class any more."""
        self.learned(klass)
        for one in list(self._prospects.values()):
            if one.klass == klass:
                one.become(_UNKNOWN)

    def of(self, request: JobRequest) -> Prospect:
        """What to expect of such a job: the same object for all that ask for the same."""
        if request.is_service:
            return self._nobody
        asked = Asked(
            request.klass, request.hyperparameters, request.min_workers, resources(request), _hint_of(request)
        )
        found = self._prospects.get(asked)
        if found is None:
            found = self._prospects[asked] = Prospect(asked)
        return found

    def totals(self, prospects: Sequence[Prospect]) -> Totals:
        self._refresh(prospects)
        table = np.frombuffer(b"".join([one.packed for one in prospects]), np.float64).reshape(-1, 4)
        return Totals(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), table[:, 3] > 0)

    def total(self, prospect: Prospect) -> Total:
        self._refresh([prospect])
        return prospect.total

    def _refresh(self, prospects: Iterable[Prospect]) -> None:
        """Make those again whose class has learned something since; not too many at a time."""
        now, groups = self._versions.get, dict[tuple[str, int, tuple[str, ...]], list[Prospect]]()
        old = [one for one in prospects if one.version != now(one.klass, 0)]
        if len(old) > _AT_ONCE:
            old = _most_urgent(old)
        for one in old:
            if one.version == (version := now(one.klass, 0)):
                continue
            one.version = version
            if version:
                groups.setdefault((one.klass, one.asked.least, one.names), []).append(one)
            elif one.asked.hint:
                one.become(one.asked.hint)
        for (klass, _, _), some in groups.items():
            for one, total in zip(some, totals(self._known(klass), some), strict=True):
                one.become(total)


def _most_urgent(old: list[Prospect]) -> list[Prospect]:
    """One run more changes little where there were some: those that were made longest ago, and all without an estimate
    of their class."""
    must: list[Prospect] = []
    may: list[Prospect] = []
    for one in old:
        (may if one.version >= 0 and one.total.runs > 1 else must).append(one)
    may.sort(key=lambda one: one.version)
    return must + may[: max(0, _AT_ONCE - len(must))]


def resources(request: JobRequest) -> tuple[int, ...]:
    """What was asked for and may say something of the length."""
    return request.requested, request.width_milli, request.cpu_milli, request.memory_mib


def totals(learned: Learned, alike: Sequence[Prospect]) -> list[Total]:
    """For jobs of one class and minimum whose hyper-parameters have the same names."""
    known = _of_class(learned, alike) if learned.runs else [None] * len(alike)
    return [_better(total, one.asked.hint) for total, one in zip(known, alike, strict=True)]


def _better(known: Total | None, hint: Total | None) -> Total:
    if known is None or (hint is not None and hint.sd_log < known.sd_log):
        return hint or _UNKNOWN
    return known


def _hint_of(request: JobRequest) -> Total | None:
    """What the user said is the mean of what is expected."""
    amount, on = (request.expect_steps, 0) if request.expect_steps else (request.expect_s, request.requested)
    return Total(math.log(amount) - _HINT_SD**2 / 2, _HINT_SD, on, "hint") if amount else None


def _of_class(learned: Learned, prospects: Sequence[Prospect]) -> list[Total | None]:
    runs, least = learned.runs, prospects[0].asked.least
    told = [run for run in runs if run.steps > 0]
    by_steps = learned.timed and len(told) >= min(_ENOUGH, len(runs))
    known = _alike(told if by_steps else runs, prospects[0].names)
    # One of which the minimum is not known is taken to have had the same. Who had another did as much work in all.
    sizes = [run.steps if by_steps else run.size_s * (run.least or least) / least for run in known]
    history = ClassHistory()
    for run, size in zip(known, sizes, strict=True):
        history = learn(history, _features(run.hyperparameters, run.asked), size)
    if not history.runs:
        return [None] * len(prospects)
    on, count = 0 if by_steps else least, len(history.runs)
    for one in prospects:
        one.features = one.features or _features(dict(one.asked.hyperparameters), one.asked.resources)
    found = lengths(history, [one.features for one in prospects])
    return [Total(length.mean_log, length.sd_log, on, "class", count) for length in found]


def _alike(runs: Sequence[Ended], names: Sequence[str]) -> Sequence[Ended]:
    """Those with the same hyper-parameters, if there are some to compare: a feature that is not known of all runs says
    nothing, and a class may have got its first ones lately."""
    some = [run for run in runs if run.asked and all(name in run.hyperparameters for name in names)]
    return some if len(some) > 1 else runs


def _features(hyperparameters: dict[str, float | str], asked: Sequence[int]) -> dict[str, float | str]:
    given = dict(zip(("asked workers", "asked gpu", "asked cpu", "asked memory"), asked, strict=False))
    return {**given, **hyperparameters}


# In snapshots.


def worker_s(columns: dict[str, Any], at: IntArray) -> FloatArray:
    """Seconds of single workers that some jobs had; of those that hold no devices, as if on their minimum."""
    width = columns["width"][at]
    held_s = columns["gpu_s"][at] * GPU / np.maximum(width, 1)
    counts = (width > 0) & (held_s > 0)
    seconds: FloatArray = np.where(counts, held_s, columns["ran_s"][at] * columns["min_workers"][at])
    return seconds


def tell(
    columns: dict[str, Any], known: Totals, rates: FloatArray, curve: IntArray, timed: Callable[[int], bool]
) -> None:
    """Write `remaining` and `remaining_sd` for the jobs whose workers have not said them.

    `timed`: whether the speed of the job in that row was ever measured. Of one whose was not, a number of steps does
    not say how long it is, and the steps it told do not say how far it has come; its time does.
    """
    at = np.flatnonzero(np.isnan(columns["remaining"]) & ~np.isnan(known.mean_log))
    if (known.on[at] == 0).any():
        at = at[[on > 0 or timed(j) for j, on in zip(at.tolist(), known.on[at].tolist(), strict=True)]]
    if not len(at):
        return
    on = known.on[at]
    unit = np.where(on > 0, speed(rates, curve[at], np.maximum(on, 1), columns["pool"][at]), 1.0)
    at, on, unit = at[unit > 0], on[unit > 0], unit[unit > 0]
    left, sd, done = columns["remaining"].copy(), columns["remaining_sd"].copy(), columns["done"].copy()
    begun = at[(done[at] > 0) & (on > 0)]
    mute = begun[[not timed(j) for j in begun.tolist()]] if len(begun) else begun
    if len(mute):
        low = np.maximum(columns["min_workers"][mute], 1)
        done[mute] = worker_s(columns, mute) / low * speed(rates, curve[mute], low, columns["pool"][mute])
    for some, left_of in ((~known.hinted[at], left_of_all), (known.hinted[at], left_of_hints)):
        here, each = at[some], unit[some]
        work, sd[here] = left_of(known.mean_log[here], known.sd_log[here], done[here] / each)
        left[here] = work * each
    columns |= {"remaining": left, "remaining_sd": sd, "done": done}


def speed(rates: FloatArray, curve: IntArray, workers: IntArray, pool: IntArray) -> FloatArray:
    """Steps per second of some jobs on so many workers: of the pool that each runs on, else of the first one that it
    can use. 0: of none."""
    found = rates[:, curve, np.minimum(workers, rates.shape[2] - 1)]
    each = np.arange(len(curve))
    runs = (pool >= 0) & (found[np.maximum(pool, 0), each] > 0)
    speeds: FloatArray = found[np.where(runs, pool, (found > 0).argmax(axis=0)), each]
    return speeds
