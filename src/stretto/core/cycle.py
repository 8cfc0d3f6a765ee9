"""One decision, the same in every world: a snapshot in, workers and places for every job out, each with its reason.

1. *Lower* each job's maximum to the size at which it is fastest (`ceilings`), except for policies that were published
   with sizes beyond it.
2. *Split*: jobs with GPUs first, then those without on the cores that are left (`cores`).
3. *Ask* the policy, and keep what it must not take: jobs that would lose their work (`pinned`, `reservations`).
4. *Drop* the resizes that do not pay (`hysteresis`) and what undoes a start of a moment ago (`sparing`), and *explore*
   sizes with what is free (`exploring`).
5. *Place* workers on nodes. Whoever does not fit gets fewer; where that is because of nodes that a job cannot use, the
   policy is asked again with what it can have at most, so that others get the rest.
6. *Explain*: whoever got less than was decided is told so.

The server, the Kubernetes controller, the simulator and forecasts call `decide`; a record of its arguments and its
outcome can be played again to the byte. Pure: no clock, no randomness.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.core import (
    ceilings,
    cores,
    exploring,
    hysteresis,
    pinned,
    placement,
    preempting,
    reasons,
    reservations,
    services,
    sparing,
    steps,
)
from stretto.core.decision import Decision, Memory
from stretto.core.options import Seconds
from stretto.core.pinned import Answer
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.reservations import Wait
from stretto.core.snapshot import GPU, BoolArray, FloatArray, IntArray, Snapshot

_T = TypeVar("_T", np.int64, np.float64, np.bool_)

_TRIES = 3
"""How often a policy is asked about one question because of places."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an administrator may choose."""

    placement: str = ""
    """Name of a placement; empty: devices are only counted."""
    hysteresis: bool | None = None
    """Whether resizes that do not pay are dropped; None: as the policy declares."""
    falls: bool | None = None
    """Whether policies are shown sizes at which a job is slower than on fewer workers; None: as the policy declares."""
    stops_lose_work: bool = False
    """Let policies stop jobs that lose their work by it, as they were published."""
    reserve_after_s: Seconds = 60.0
    """A job that such jobs keep waiting gets a reservation after so long."""


LIVE = Settings(placement="fewest-moves", hysteresis=True, falls=False)
"""What runs real jobs, where every resize costs something."""


class CycleState(msgspec.Struct, frozen=True, kw_only=True):
    """What the cycle remembers from one decision to the next. Plain values: it is stored and replayed."""

    policy: Memory = None
    cores: Memory = None
    """What the policy remembers of the jobs without GPUs."""
    blocked: dict[int, Wait] = {}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What should hold from now on. All arrays are in the order of the snapshot's jobs."""

    workers: IntArray
    pool: IntArray
    """-1 where there are no workers."""
    placed: IntArray
    """[job, node] workers; [job, 0] where devices are only counted."""
    reason: IntArray
    detail: FloatArray
    """[job, 2]: the numbers of the reason's sentence."""
    about: IntArray
    """[job, 4]: the numbers of the jobs that the sentence names (-1: none), and how many more it is about."""
    decided: IntArray
    """Workers as the policy wanted them, before places were looked for."""
    rejected: BoolArray
    state: CycleState
    wake_s: float


class Fit(Protocol):
    """What a site knows and policies do not see: resources besides devices, CPU and memory."""

    def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
        """The [job, node] workers for which everything suffices; some have other places, or fewer workers."""

    def after(self, view: Snapshot, placed: IntArray) -> Fit:
        """The same once these workers have what they need."""


class Whole(NamedTuple):
    """Sizes of the jobs before they were lowered to what is known to be of use."""

    workers: IntArray
    most: IntArray

    def only(self, keep: BoolArray) -> Whole:
        return Whole(self.workers[keep], self.most[keep])


def decide(
    view: Snapshot, policy: Policy, state: CycleState, settings: Settings, fit: Fit | None = None, when: str = ""
) -> Outcome:
    """Raises `PolicyError` and the like; `when` is added to what went wrong."""
    if settings.stops_lose_work and view.lost_s is not None:
        view = msgspec.structs.replace(view, lost_s=None)
    if not policy.traits.elastic:
        view = _as_asked(view)
    if policy.traits.sees_falls if settings.falls is None else settings.falls:
        view = msgspec.structs.replace(view, falls=False)
    whole, view = Whole(view.workers, view.max_workers), ceilings.lowered(view)
    plain = cores.without_gpus(view)
    if not plain.any():
        return _Turn(view, view, whole, policy, state.policy, state.blocked, settings, fit, when).outcome(state)
    wide = services.only(view, ~plain)
    gpus = _Turn(wide, wide, whole.only(~plain), policy, state.policy, state.blocked, settings, fit, when).outcome(
        state
    )
    placed = np.zeros_like(view.placed)
    placed[~plain] = gpus.placed
    rest = cores.question(view, plain, placed)
    left = fit.after(view, placed) if fit is not None else None
    second = _Turn(*rest, whole.only(plain), policy, state.cores, state.blocked, settings, left, when).outcome(state)
    return _together(view, plain, gpus, second)


def _as_asked(view: Snapshot) -> Snapshot:
    """To a policy that resizes nobody every training job has the size that was asked for, and no other is tried. A job
    that has another one already, because an elastic policy decided before, may keep it."""
    fixed = ~view.is_service & ((view.workers == 0) | (view.workers == view.asked))
    return msgspec.structs.replace(
        view,
        min_workers=np.where(fixed, view.asked, view.min_workers),
        max_workers=np.where(fixed, view.asked, view.max_workers),
        explores=None,
    )


class _Turn:
    """One question to the policy, with all that follows from its answer."""

    def __init__(
        self,
        view: Snapshot,
        places: Snapshot,
        whole: Whole,
        policy: Policy,
        memory: Memory,
        blocked: dict[int, Wait],
        settings: Settings,
        fit: Fit | None,
        when: str,
    ) -> None:
        """`places`: the same jobs as placements see them."""
        self._places, self._whole = places, whole
        self._view, self._policy, self._memory, self._settings = view, policy, memory, settings
        self._blocked, self._fit, self._when = blocked, fit, when

    def outcome(self, state: CycleState) -> Outcome:
        if not len(self._view):
            return _nothing(self._view, msgspec.structs.replace(state, blocked={}))
        out = np.zeros(len(self._view), np.bool_)
        self._cut_from = np.zeros(len(self._view), np.int64)
        shown = self._view
        for _ in range(_TRIES):
            answer, placed, got = self._served(shown, out)
            short = (got < answer.decision.workers) & ((got >= shown.min_workers) | self._fitted)
            if (shown.reach is None and not self._fitted.any()) or not short.any():
                break
            out |= short & (got < shown.min_workers)
            self._cut_from = np.where(short, answer.decision.workers, self._cut_from)
            high = np.where(short & ~out, got, shown.max_workers)
            shown = msgspec.structs.replace(shown, max_workers=high, requested=np.minimum(shown.requested, high))
        return self._explained(answer, placed, got, out, state)

    def _served(self, shown: Snapshot, out: BoolArray) -> tuple[Answer, IntArray, IntArray]:
        """The answer, [job, node] workers, and workers. Urgent jobs that are given room in pieces may stop others, too.
        Nobody is stopped for an urgent job that finds no place by it: whoever would be is spared, and if others would
        be instead, everybody is."""
        spared, in_pieces = np.zeros(len(shown), np.bool_), np.zeros(len(shown), np.bool_)
        while True:
            answer = self._ask(preempting.sparing(shown, spared) if spared.any() else shown, out, in_pieces)
            decision, placed = answer.decision, self._placed(shown, answer)
            got = placed.sum(axis=1) if self._settings.placement else decision.workers
            vain = preempting.in_vain(shown, decision.reason, answer.about, decision.workers, got)
            if vain.any():
                spared = spared | vain | shown.pinned if spared.any() else vain
                continue
            more = preempting.in_pieces(shown, decision.workers, got) & ~self._fitted & ~in_pieces
            if not more.any():
                return answer, placed, got
            in_pieces = in_pieces | more

    def _ask(self, shown: Snapshot, out: BoolArray, in_pieces: BoolArray) -> Answer:
        """About all but those for whom there is no room of something that policies do not see."""
        waiting = pinned.Waiting(self._blocked, self._settings.reserve_after_s, in_pieces[~out])
        some, places = services.only(shown, ~out), services.only(self._places, ~out)
        answer = pinned.ask(self._policy, some, places, self._memory, waiting, self._when)
        wants = self._settings.hysteresis
        if self._policy.traits.hysteresis if wants is None else wants:
            answer = answer._replace(decision=hysteresis.settle(some, answer.decision))
        if wants and not self._policy.traits.rounds and not self._settings.stops_lose_work:
            answer = answer._replace(decision=sparing.spare(some, answer.decision))
        # In rounds a size that turns out bad would be kept until the next one.
        if some.explores is not None and not self._policy.traits.rounds:
            whole = msgspec.structs.replace(
                some, workers=self._whole.workers[~out], max_workers=self._limits(shown)[~out]
            )
            decision = exploring.explored(whole, some.max_workers, answer.decision)
            answer = answer._replace(decision=decision)
        return _spread(answer, out) if out.any() else answer

    def _limits(self, shown: Snapshot) -> IntArray:
        """How far sizes may be tried: not beyond what was found to have no place."""
        lowered: IntArray = np.where(shown.max_workers < self._view.max_workers, shown.max_workers, self._whole.most)
        return lowered

    # Places.

    def _placed(self, shown: Snapshot, answer: Answer) -> IntArray:
        self._fitted = np.zeros(len(shown), np.bool_)
        decision, places = answer.decision, self._places
        if not self._settings.placement:
            return shown.placed
        if decision.nodes is not None and shown.reach is None:
            return decision.nodes
        placed = _place(self._settings.placement, places, decision)
        if (answer.kept & (placed != places.placed).any(axis=1)).any():
            # This one never moves what runs.
            placed = _place("pack", places, decision)
        if self._fit is None:
            return placed
        fitted = self._fit(places, placed, decision.pool)
        self._fitted = fitted.sum(axis=1) < placed.sum(axis=1)
        return fitted

    # Reasons.

    def _explained(self, answer: Answer, placed: IntArray, got: IntArray, out: BoolArray, state: CycleState) -> Outcome:
        view, decision = self._view, answer.decision
        reason, detail = decision.reason.copy(), decision.detail.copy()
        self._say_why_no_more(got, reason, detail)
        free = float(view.capacity.sum() - (got * view.width).sum()) / GPU
        for j in np.flatnonzero(got != decision.workers).tolist():
            code, *numbers = reasons.fragmented(int(decision.workers[j]), int(got[j]), free)
            reason[j], detail[j] = code, numbers
        reason[(self._fitted | out) & (got == 0)] = Reason.SCARCE
        waits = answer.wanted & (got == 0)
        rejected = np.zeros(len(view), np.bool_) if decision.rejected is None else decision.rejected
        if view.lost_s is None:
            blocked = reservations.still_waiting(view, self._blocked)
        else:
            kept = waits & (view.pinned | reservations.guarded(view)).any()
            in_pieces = (view.workers == 0) & (decision.workers > 0) & (got == 0)
            crowded = reservations.crowded_out(view) & ~out & ~rejected
            blocked = reservations.remembered(view, got, answer.blocked, kept, in_pieces, ~answer.wanted, crowded)
        return Outcome(
            workers=got, pool=np.where(got > 0, decision.pool, -1), placed=placed, reason=reason, detail=detail,
            about=answer.about, decided=decision.workers, rejected=rejected,
            state=CycleState(policy=decision.memory, cores=state.cores, blocked=blocked), wake_s=decision.wake_s,
        )  # fmt: skip

    def _say_why_no_more(self, got: IntArray, reason: IntArray, detail: FloatArray) -> None:
        """Policies see maximums that were lowered: to what has a place, or what is known of a job's speed."""
        lowered = (reason == Reason.AT_MAXIMUM) & (got > 0) & (got < self._whole.most)
        if not lowered.any():
            return
        untried = exploring.untried(self._view, got)
        reason[lowered] = np.where(untried[lowered], Reason.NOT_TRIED, Reason.NO_USE_FOR_MORE)
        cut = lowered & (self._cut_from > got)
        reason[cut], detail[cut, 0], detail[cut, 1] = Reason.CUT_TO_ROOM, got[cut], self._cut_from[cut]


def _place(name: str, view: Snapshot, decision: Decision) -> IntArray:
    """[job, node] workers. Who has none and gets none is no concern of a placement: that is most of a long queue."""
    concerned = (decision.workers > 0) | view.placed.any(axis=1)
    some = services.only(view, concerned)
    placed = np.zeros((len(view), len(view.nodes.name)), np.int64)
    found = placement.load(name)(some, decision.workers[concerned], decision.pool[concerned])
    placed[concerned] = steps.trimmed(some, found)
    return placed


def _spread(answer: Answer, out: BoolArray) -> Answer:
    """The answer on some of the jobs as one on all; those left out get nothing."""
    n, decision = len(out), answer.decision

    def wide(column: NDArray[_T], fill: float) -> NDArray[_T]:
        spread = np.full((n, *column.shape[1:]), fill, column.dtype)
        spread[~out] = column
        return spread

    whole = Decision(
        workers=wide(decision.workers, 0), pool=wide(decision.pool, 0), reason=wide(decision.reason, Reason.SCARCE),
        detail=wide(decision.detail, 0.0), memory=decision.memory, wake_s=decision.wake_s,
        rejected=None if decision.rejected is None else wide(decision.rejected, False),
    )  # fmt: skip
    kept, about, wanted = wide(answer.kept, False), wide(answer.about, -1), wide(answer.wanted, False)
    return Answer(whole, kept, about, wanted, answer.blocked)


def _nothing(view: Snapshot, state: CycleState) -> Outcome:
    none = np.empty(0, np.int64)
    return Outcome(
        workers=none, pool=none, placed=view.placed, reason=none, detail=np.empty((0, 2)),
        about=np.empty((0, 4), np.int64), decided=none, rejected=np.empty(0, np.bool_), state=state, wake_s=math.inf,
    )  # fmt: skip


def _together(view: Snapshot, plain: BoolArray, gpus: Outcome, rest: Outcome) -> Outcome:
    """Both answers as one."""
    columns = {}
    for name in ("workers", "pool", "placed", "reason", "detail", "about", "decided", "rejected"):
        some, others = getattr(gpus, name), getattr(rest, name)
        column = np.empty((len(view), *others.shape[1:]), others.dtype)
        column[~plain], column[plain] = some, others
        columns[name] = column
    columns["pool"][plain & (columns["workers"] > 0)] = cores.pool_of(view)
    # What is too large for the cores that jobs with GPUs leave is not too large for the cluster.
    reason, cores_needed = columns["reason"], columns["detail"][:, 0]
    only_now = plain & (reason == Reason.TOO_LARGE) & (cores_needed * GPU <= view.nodes.cpu_milli.sum())
    reason[only_now] = Reason.NO_ROOM
    state = CycleState(
        policy=gpus.state.policy, cores=rest.state.policy, blocked=gpus.state.blocked | rest.state.blocked
    )  # fmt: skip
    return Outcome(**columns, state=state, wake_s=min(gpus.wake_s, rest.wake_s))
