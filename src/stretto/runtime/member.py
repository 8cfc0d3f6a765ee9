"""What one worker knows of its job: what the coordinator said last, and what it must be told again.

The channel's thread brings messages in (`hear`), the training thread looks and waits. Nothing here talks or trains.
Facts that the coordinator must know (`Ready`, `Formed`, …) are kept: the channel repeats them after a reconnection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stretto.runtime.messages import (
    Alive,
    Broken,
    Bye,
    Committed,
    End,
    Evict,
    Fail,
    Formed,
    Heartbeat,
    Hello,
    Leaving,
    LoopEnd,
    Message,
    Ready,
    Release,
    Switch,
    Welcome,
)
from stretto.runtime.messages import Window as TimedWindow
from stretto.runtime.pace import Window
from stretto.runtime.watchdog import Watchdog

_MOST_WINDOWS = 8
"""Kept for heartbeats: some of these may be lost."""


class Evicted(Exception):
    """The job goes on without this worker, which must end without writing anything."""


class JobFailed(Exception):
    """The job as a whole has failed."""


class Member:
    """The worker's side of membership. All fields are guarded by `changed`."""

    def __init__(self, worker: str, incarnation: str, token: str, address: str) -> None:
        self.changed = threading.Condition()
        self.worker, self.incarnation, self.token, self.address = worker, incarnation, token, address
        self.generation = 0
        self.members: tuple[str, ...] = ()
        self.ended: tuple[str, ...] = ()
        """As in `Switch`."""
        self.applied = 0
        self.holds_state = False
        self.loop, self.step = 0, 0
        self.metrics: dict[str, float] = {}
        self.total = 0
        """Steps of the job as far as its script has said; 0: not known."""
        self.paused_s = 0.0
        """Spent on getting into generations since it is a member."""
        self.saved = -1
        """Applied steps of the last checkpoint that it has written; -1: none."""
        self.windows: tuple[Window, ...] = ()
        """The latest, by the monotonic clock; only while it leads its generation."""
        self.epochs: tuple[tuple[int, ...], ...] = ()
        """As in `Heartbeat`: where its script is."""
        self.epochs_told: tuple[tuple[int, ...], ...] = ()
        """Where the job is."""
        self.welcome: Welcome | None = None
        self.loops_done = 0
        self.newest: Switch | None = None
        """The highest generation that was announced."""
        self.announced: dict[int, Switch] = {}
        """All that are above the generation this worker is in."""
        self.released = False
        self.out: Exception | None = None
        """Why this worker must end."""
        self.watchdog = Watchdog(time.monotonic)
        self.heard_s = time.monotonic()
        self.listeners: list[Callable[[Message], None]] = []
        self._facts: dict[type[Message], Message] = {}

    # The channel's side.

    def hello(self) -> Hello:
        with self.changed:
            return Hello(
                worker=self.worker,
                incarnation=self.incarnation,
                address=self.address,
                generation=self.generation,
                applied=self.applied,
                holds_state=self.holds_state,
                ready=Ready in self._facts,
            )

    def facts(self) -> list[Message]:
        """What must be said again on a new connection."""
        with self.changed:
            return list(self._facts.values())

    def heartbeat(self) -> Heartbeat:
        with self.changed:
            stuck = self.watchdog.look()
            return Heartbeat(
                generation=self.generation,
                loop=self.loop,
                step=self.step,
                applied=self.applied,
                metrics=dict(self.metrics),
                total=self.total,
                paused_s=self.paused_s,
                saved=self.saved,
                epochs=self.epochs,
                windows=tuple(_said(window, time.monotonic()) for window in self.windows),
                stuck=(stuck,) if stuck is not None else (),
                waits=self.watchdog.in_collective(),
            )

    def hear(self, message: Message) -> None:
        """Take a message in, and tell whoever listens."""
        with self.changed:
            self.heard_s = time.monotonic()
            self._take(message)
            self.changed.notify_all()
        if not isinstance(message, Alive):
            for listener in self.listeners:
                listener(message)

    def _take(self, message: Message) -> None:
        if isinstance(message, (Welcome, Switch)):
            self.epochs_told = message.epochs
        if isinstance(message, Welcome):
            self.welcome = message
            self.loops_done = max(self.loops_done, message.loops_done)
        elif isinstance(message, Switch):
            # Who holds nothing may be told that the job goes back behind what it was told first.
            self.loops_done = max(self.loops_done, message.loops_done) if self.holds_state else message.loops_done
            if message.generation > max(self.generation, self.newest.generation if self.newest else 0):
                self.newest = self.announced[message.generation] = message
        elif isinstance(message, End):
            self.loops_done = max(self.loops_done, message.loop + 1)
        elif isinstance(message, Release):
            self.released = True
        elif isinstance(message, Evict):
            self.out = self.out or Evicted(message.reason)
        elif isinstance(message, Fail):
            self.out = self.out or JobFailed(message.text)

    def lease_over(self, now_s: float) -> bool:
        """Whether nothing was heard for so long that others may have been put in this worker's place."""
        with self.changed:
            return self.welcome is not None and now_s - self.heard_s > self.welcome.lease_s

    def end(self, why: Exception) -> None:
        """The worker must end; the first reason counts."""
        with self.changed:
            self.out = self.out or why
            self.changed.notify_all()

    # The training thread's side.

    def state(self, fact: Ready | Formed | Committed | Broken | LoopEnd | Leaving | Bye) -> Message:
        """Keep a fact for reconnections, and give it back to be sent."""
        with self.changed:
            self._facts[type(fact)] = fact
        return fact

    def enter(self, switch: Switch) -> None:
        """This worker is in that generation now."""
        with self.changed:
            self.generation = switch.generation
            self.members = tuple(peer.worker for peer in switch.members)
            self.ended = switch.ended
            self.announced = {g: given for g, given in self.announced.items() if g > switch.generation}
            for kind in (Formed, Committed, Broken, LoopEnd):
                self._facts.pop(kind, None)

    def timed(self, window: Window) -> None:
        """A window of steps is complete: heartbeats tell of it if this worker leads the generation."""
        with self.changed:
            leads = self.members[:1] == (self.worker,)
            self.windows = (*self.windows, window)[-_MOST_WINDOWS:] if leads else ()

    def pending(self) -> Switch | None:
        """The newest generation that this worker is not in yet."""
        with self.changed:
            newest = self.newest
            return newest if newest is not None and newest.generation > self.generation else None

    def urgent(self) -> bool:
        """Whether what is under way should be abandoned."""
        with self.changed:
            newest = self.newest
            return self.out is not None or (
                newest is not None and newest.generation > self.generation and not newest.planned
            )

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until the condition holds; raises if this worker must end before."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while True:
                if condition():
                    return True
                if self.out is not None:
                    raise self.out
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                self.changed.wait(left_s)


def _said(window: Window, now_s: float) -> TimedWindow:
    return TimedWindow(
        number=window.number,
        generation=window.generation,
        members=window.members,
        count=window.count,
        median_s=window.median_s,
        spread_s=window.spread_s,
        lasted_s=window.ended_s - window.began_s,
        age_s=max(0.0, now_s - window.ended_s),
        mean_s=window.mean_s,
        slow=window.slow,
        slow_s=window.slow_s,
    )
