"""What the coordinator of one job knows: its workers, and the generations that may still make progress.

Frozen values; the times in them come from outside. A worker is known by its incarnation (the process), never by its
name alone: a name may be used again once the process that had it is confirmed to have ended.

`open` is the heart of it: the last generation that anybody is known to have formed, and everything announced since.
Any of these may be making progress, heard of or not. A new list is *sound* only if it shares a member with each of
them (a member moves up, and its old generation stops), or one of their members is confirmed to have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stretto.runtime.messages import LoopEnd, Stuck


@dataclass(frozen=True, kw_only=True)
class Settings:
    token: str = field(repr=False)
    min_workers: int = 1
    """So many must be ready for the first generation."""
    want: int = 1
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    """A worker that is silent for so long counts as lost."""
    lease_s: float = 60.0
    """A worker that hears nothing for so long stops by itself."""
    formation_s: float = 10.0
    grace_s: float = 0.3
    """How long a broken group waits for a loss that explains it."""
    restart_grace_s: float = 5.0


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One process that has said hello, and the last we heard from it."""

    name: str
    incarnation: str
    address: str
    order: int
    """In which order workers came; the latest leave first."""
    heard_s: float
    connection: int | None = None
    away_s: float = 0.0
    """Without a connection: from when on it counts as lost."""
    ready: bool = False
    holds_state: bool = False
    generation: int = 0
    """The highest it says to be in, formed or not."""
    entered_s: float = 0.0
    """When it was first heard to be in that."""
    member_of: int = 0
    """The highest generation with it on the list that somebody has formed: the higher, the later its state."""
    applied: int = 0
    loop: int = 0
    step: int = -1
    stuck: Stuck | None = None
    """It has made no step for long, as it said last."""
    waits_s: float | None = None
    """Since when it says that it waits for others in a collective."""
    at_end: LoopEnd | None = None
    at_end_s: float = 0.0
    released: bool = False
    finished: bool = False
    loops: int = -1
    """How many its script had when it ended, if it said so."""
    out: str = ""
    """Why it is no longer part of the job."""
    exited: bool = False
    """The backend saw its process end; what it said before may not have been read yet."""
    content: bool = False
    """With status 0, of its own will."""
    ended: bool = False
    """Its process is confirmed to do nothing any more: it said bye, the backend saw it end, or its lease ran out."""

    @property
    def gone(self) -> bool:
        return bool(self.out) or self.ended

    def later(self, seconds: float) -> Worker:
        names = ("heard_s", "away_s", "entered_s", "at_end_s", "waits_s")
        return replace(self, **_moved({name: getattr(self, name) for name in names}, seconds))


@dataclass(frozen=True, kw_only=True)
class Generation:
    number: int
    members: tuple[str, ...]
    """Incarnations, in order of rank."""
    leavers: tuple[str, ...] = ()
    planned: bool = False
    announced_s: float = 0.0
    attempt: int = 0
    """How many formations of these members failed just before."""
    taken_s: float | None = None
    """When the first member was heard to have formed it: from then on everybody is in it."""
    entered_s: float | None = None
    """Of a proposal: when a member of the active generation was first heard to have gone into it."""
    formed: frozenset[str] = frozenset()
    start: int = 0
    """Steps applied when it was formed; before that, when it was announced."""
    committed: bool = False
    suspects: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Who reported it broken, and whom it could not reach."""
    broken_s: float | None = None

    @property
    def complete(self) -> bool:
        return self.formed >= set(self.members)

    def concerns(self, key: str) -> bool:
        return key in self.members or key in self.leavers

    def later(self, seconds: float) -> Generation:
        names = ("announced_s", "taken_s", "entered_s", "broken_s")
        return replace(self, **_moved({name: getattr(self, name) for name in names}, seconds))


@dataclass(frozen=True, kw_only=True)
class State:
    settings: Settings
    want: int
    workers: Mapping[str, Worker] = field(default_factory=dict)
    open: tuple[Generation, ...] = ()
    number: int = 0
    """The highest ever used."""
    joined: int = 0
    leaving: frozenset[str] = frozenset()
    unexpected: frozenset[str] = frozenset()
    """Names that were told to leave before they said hello."""
    loops_done: int = 0
    loops_applied: int = 0
    """Steps applied at the end of the last of them."""
    epochs: tuple[tuple[int, ...], ...] = ()
    """Where the script counts epochs, as in `Heartbeat`. Not journalled: whoever does not know goes the long way."""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    fingerprint_of: str = ""
    failed: str = ""
    done: bool = False

    @property
    def over(self) -> bool:
        return self.done or bool(self.failed)

    # Who is where.

    @property
    def active(self) -> Generation | None:
        """The generation that everybody in it must be in, or go to at once."""
        return next((g for g in reversed(self.open) if not g.planned or g.taken_s is not None), None)

    @property
    def ahead(self) -> Generation | None:
        """The proposal that a member of the active generation has gone into, though nobody is known to have formed it:
        the active one makes no progress any more."""
        active = self.active
        later = [g for g in self.open if active is not None and g.number > active.number]
        return next((g for g in reversed(later) if g.entered_s is not None), None)

    @property
    def newest(self) -> Generation | None:
        return self.open[-1] if self.open else None

    def named(self, name: str) -> Worker | None:
        """The latest process with this name."""
        found = [w for w in self.workers.values() if w.name == name]
        return max(found, key=lambda w: w.order, default=None)

    def on(self, connection: int) -> Worker | None:
        return next((w for w in self.workers.values() if w.connection == connection), None)

    def leads(self, key: str) -> bool:
        """Whether it does what one worker does for all: the first of the generation, or of those who wait for one."""
        if self.active is not None:
            return self.active.members[0] == key
        waiting = [w for w in self.workers.values() if not w.gone and w.incarnation not in self.leaving]
        return bool(waiting) and min(waiting, key=lambda w: w.order).incarnation == key

    def names(self, keys: Iterable[str]) -> tuple[str, ...]:
        return tuple(self.workers[key].name for key in keys)

    def phase(self, key: str) -> str:
        """joining, ready, member, leaving or gone."""
        worker = self.workers[key]
        if worker.gone or worker.released:
            return "gone"
        if key in self.leaving:
            return "leaving"
        if self.active is not None and key in self.active.members:
            return "member"
        return "ready" if worker.ready else "joining"

    @property
    def committed(self) -> int:
        """Steps that every member of the generation is known to have applied."""
        gen = self.active
        return min((self.workers[key].applied for key in gen.members), default=0) if gen else 0

    # Who is there.

    def lost_s(self, worker: Worker) -> float:
        """When the worker counts as lost if nothing more is heard of it."""
        if worker.connection is None:
            return worker.away_s
        return worker.heard_s + self.settings.heartbeat_timeout_s

    def lease_ends_s(self, worker: Worker) -> float:
        """When a silent worker has surely stopped by itself: its lease, and a margin for answers under way."""
        return worker.heard_s + self.settings.lease_s + self.settings.heartbeat_timeout_s

    def lost(self, key: str, now_s: float) -> bool:
        worker = self.workers[key]
        return worker.gone or now_s >= self.lost_s(worker)

    def reachable(self, key: str, now_s: float) -> bool:
        return self.workers[key].connection is not None and not self.lost(key, now_s)

    def usable(self, key: str, now_s: float) -> bool:
        """May be put on a list."""
        worker = self.workers[key]
        over = worker.exited or worker.finished or worker.released
        return self.reachable(key, now_s) and not over

    def absent(self, gen: Generation) -> list[str]:
        """Members that have not come into the generation yet, and may be busy: their script sees it at its next step,
        or in its next loop. Who holds nothing has nothing else to do."""
        if gen.taken_s is not None:
            return []
        members = [self.workers[key] for key in gen.members]
        return [w.incarnation for w in members if w.generation < gen.number and w.holds_state and not w.gone]

    def newcomers(self, now_s: float) -> list[str]:
        """Ready, wanted, and not in the active generation, in the order they came."""
        gen = self.active
        inside = set(gen.members) if gen else set()
        found = [
            w
            for key, w in self.workers.items()
            if w.ready and key not in inside and key not in self.leaving and self.usable(key, now_s)
        ]
        return [w.incarnation for w in sorted(found, key=lambda w: w.order)]

    # What may be done.

    def holds(self, key: str) -> bool:
        """Holds state from which the job can go on. One that is behind the end of a loop cannot: others are past it."""
        worker = self.workers[key]
        return worker.holds_state and worker.applied >= self.loops_applied

    def sound(self, members: Iterable[str]) -> bool:
        """Somebody on the list holds state, and no open generation can go on beside it."""
        chosen = set(members)
        return any(self.holds(key) for key in chosen) and self.fenced(chosen)

    def fenced(self, chosen: set[str]) -> bool:
        return all(chosen & set(g.members) or any(self.workers[key].ended for key in g.members) for g in self.open)

    # Changes.

    def with_worker(self, worker: Worker) -> State:
        return replace(self, workers={**self.workers, worker.incarnation: worker})

    def later(self, seconds: float) -> State:
        """As if everything had happened so much later."""
        workers = {key: worker.later(seconds) for key, worker in self.workers.items()}
        return replace(self, workers=workers, open=tuple(g.later(seconds) for g in self.open))

    def with_generation(self, gen: Generation) -> State:
        return replace(self, open=tuple(gen if g.number == gen.number else g for g in self.open))


def _moved(times: Mapping[str, float | None], seconds: float) -> dict[str, Any]:
    return {name: at_s + seconds for name, at_s in times.items() if at_s is not None}


def unique(keys: Iterable[str]) -> Iterator[str]:
    return iter(dict.fromkeys(keys))
