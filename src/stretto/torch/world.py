"""A worker among its peers: which generation it is in, how it gets into the next, how state gets to who lacks it.

Everything happens when the training thread asks, at a step boundary, with two exceptions: connecting to a planned
generation runs in a thread while training goes on; and an urgent message aborts the group that the training thread
may be waiting in. See docs/design/runtime.md.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from stretto.runtime.channel import LEASE_OVER, Channel
from stretto.runtime.member import Evicted, Member
from stretto.runtime.messages import (
    Broken,
    Bye,
    Committed,
    Evict,
    Fail,
    Formed,
    Leaving,
    LoopEnd,
    Message,
    Ready,
    Release,
    Switch,
)
from stretto.runtime.pace import Pace
from stretto.runtime.saying import say
from stretto.torch import background, checks
from stretto.torch.groups import Group, GroupBroken
from stretto.torch.packing import pack, unpack
from stretto.torch.rendezvous import Store
from stretto.torch.state import Holder
from stretto.torch.transfer import Counter, Sending, Shape, Staging, expected_shapes, kept_until_step, receive
from stretto.torch.undo import Habits

EVICTED_CODE = 75
"""Exit status of a worker that the job goes on without."""
_LAST_WORD_S, _RELEASED_S = 30.0, 2.0
"""How long the last word waits for a coordinator that is away."""
_ENDED_S = 5.0
"""After which a worker that has left is ended, though other threads of its script do not end."""


class Cursor(NamedTuple):
    """Where the job is: the loop, the next step in it, how many steps were applied in all, and whether all agreed to
    end the loop here."""

    loop: int = 0
    step: int = 0
    applied: int = 0
    over: int = 0


class _Card(NamedTuple):
    """What a member tells the others when a generation forms."""

    holds: bool
    """Whether it holds state at all."""
    cursor: Cursor
    size: int
    """Of the generation that it comes from."""
    by_hand: bool | None
    goes_on: bool | None
    """As in `Habits`."""
    counter: tuple[str, int]
    """Where it would hand its state out."""
    replies: int
    """As `Holder.replies_ever`."""
    between: bool
    """Whether its script is between two loops, where it may still change the state before the next one."""
    late: list[tuple[int, bool]]
    """As `Late.told`."""
    says: tuple[int, str]
    """As `World.says`."""

    @classmethod
    def read(cls, text: bytes) -> _Card:
        holds, cursor, size, by_hand, goes_on, counter, replies, between, late, says = json.loads(text)
        return cls(holds, Cursor(*cursor), size, by_hand, goes_on, tuple(counter), replies, between, late, tuple(says))


def _may_feed_alone(cards: list[_Card], sources: list[int]) -> bool:
    """Whether those with state may do the next steps without the others: not if their slices would grow, which might
    not fit into their memory."""
    held = [card for card in cards if card.holds]
    return len(held) == len(sources) and all(card.size <= len(sources) for card in held)


def _end_hard() -> None:
    """Python waits for all threads of a script that ends, and some may wait for what comes after the loop."""
    threading.main_thread().join()
    time.sleep(_ENDED_S)
    sys.stdout.flush()
    os._exit(0)


def _refuse_other_loop(says: tuple[int, str], theirs: list[tuple[int, str]]) -> None:
    """Of a newcomer, before anybody waits for it: it might think that the loop is over."""
    loop, own = says
    others = {told for number, told in theirs if number == loop}
    if others and own not in others:
        raise checks.other_loop(loop, own, min(others))


class World:
    """This worker's place in its job."""

    def __init__(
        self, url: str, worker: str, token: str, host: str, device: torch.device, holder: Holder,
        notice: Path | None = None,
    ) -> None:  # fmt: skip
        self.device, self.holder = device, holder
        self.store = Store(host, token)
        self.member = Member(worker, secrets.token_hex(8), token, self.store.address)
        self.member.listeners.append(self._heard)
        self.channel = Channel(url, self.member, notice)
        self.group: Group | None = None
        self.restore: Callable[[], Cursor | None] = lambda: None
        """Restores the last checkpoint, if there is one; asked when nobody holds state."""
        self.between = False
        """Whether the script is between two loops, and exchanges something there."""
        self.again = False
        """Somebody came in while all others were between loops: what they have in the next one must be shared anew."""
        self._early = False
        """This worker did."""
        self.formation_s = 30.0
        self.overlap = True
        """Whether members may train on while their state is on its way to newcomers."""
        self.habits = Habits()
        self.pace = Pace(time.monotonic)
        self.feeders: tuple[int, ...] = (0,)
        """The ranks that the next batch is cut for: those that held state when it began."""
        self.proves = True
        """Whether newcomers are to show that they compute the same."""
        self.says = (-1, "")
        """The loop that this worker's script is at, and what it goes through there."""
        self.stands_in = False
        """Whether the last step is news to the leader of this generation, and this worker is the first that has it."""
        self.unproven: dict[int, int] = {}
        """Newcomers that have not yet, and of whom they had their state; by rank."""
        self._overlaps = False
        """Whether state is on its way while the next step is done."""
        self._staging = Staging(device)
        self._sending: Sending | None = None
        self._lock = threading.Lock()
        self._connecting: dict[int, Group] = {}
        self._connected: dict[int, Group] = {}
        self._broken: dict[int, GroupBroken] = {}
        self._committed = 0
        self.closed = False
        self.leaving = False
        """It was told to end."""

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def size(self) -> int:
        return self.group.size if self.group is not None else 1

    def open(self, timeout_s: float) -> None:
        self.channel.open(timeout_s)

    def close(self, last: Bye) -> None:
        """Say the last word and let go of everything."""
        self.closed = True
        # Who was released has been written off already.
        self.channel.close(last, _RELEASED_S if self.member.released else _LAST_WORD_S)
        self._drop_all()
        self.store.close()

    def forget(self) -> None:
        """In a forked child: the connections are its parent's, who must not notice what becomes of these copies."""
        self.closed = True
        for group in (*self._connecting.values(), *self._connected.values(), self.group):
            if group is not None:
                group.forget()

    def saved(self, steps: int) -> None:
        """A checkpoint is whole: the next heartbeat tells."""
        with self.member.changed:
            self.member.saved = steps

    def ask_to_leave(self) -> None:
        """May be called at any moment, from a signal handler."""
        self.leaving = True
        self.channel.send(self.member.state(Leaving()))

    def check_lease(self) -> None:
        """Before anything that counts: others may have been put in the place of a worker that was asleep."""
        if self.member.lease_over(time.monotonic()):
            self.give_up(Evicted(LEASE_OVER))

    # What rides on the reduction.

    def offset(self) -> int:
        """How far ahead the generation is that this worker is prepared to go to at this boundary; 0 for none."""
        switch = self.member.pending()
        if switch is None or not switch.planned:
            return 0
        with self._lock:
            prepared = self.member.worker in switch.leavers or switch.generation in self._connected
        return switch.generation - self.member.generation if prepared else 0

    def loses(self, offset: int) -> bool:
        """Whether somebody leaves with the generation so far ahead."""
        stay = {peer.worker for peer in self.member.announced[self.member.generation + offset].members}
        return not stay.issuperset(self.member.members)

    def take_up(self, offset: int, cursor: Cursor) -> Cursor:
        """All members are prepared for the generation so far ahead: go there."""
        switch = self.member.announced[self.member.generation + offset]
        if self.member.worker not in [peer.worker for peer in switch.members]:
            return self._leave(switch, cursor)
        return self._form(switch, cursor)

    # Into a generation.

    def join(self, fingerprint: dict[str, str], cursor: Cursor) -> Cursor:
        """Become a member: as a newcomer, say that everything is built, and wait for the first generation."""
        self.channel.send(self.member.state(Ready(fingerprint=fingerprint)))
        return self._form(self._next(0), cursor)

    def recover(self, cursor: Cursor, cause: GroupBroken | None) -> Cursor:
        """The group broke, or a new generation must be followed at once."""
        left = self.member.generation
        if self._sending is not None and self._sending.spoiled:
            self.habits.by_hand = True
        self._let_go()
        if not self.member.urgent():
            self._report(left, cause)
        return self._form(self._next(left), cursor)

    @property
    def place(self) -> tuple[int, int]:
        """Which slice of the next batch is this worker's (-1: none), and how many there are."""
        return self.feeders.index(self.rank) if self.rank in self.feeders else -1, len(self.feeders)

    @property
    def proving(self) -> bool:
        """Whether the next batch is the one in which newcomers show it."""
        return bool(self.unproven) and not self._overlaps

    @property
    def part_of(self) -> int:
        """Whose slice of that batch this newcomer does as well; -1 for all others."""
        return self.feeders.index(self.unproven[self.rank]) if self.proving and self.rank in self.unproven else -1

    def finish_sending(self) -> None:
        """Before a step is applied: what is on its way to others must have arrived. Raises `GroupBroken`."""
        if self._sending is not None:
            self._sending.wait()

    def committed(self, cursor: Cursor) -> None:
        """A reduction has succeeded: what was applied before it is committed, and everybody holds state."""
        if self._overlaps:
            self._overlaps = False
        else:
            self.unproven = {}
        if not self.unproven:
            self.feeders = tuple(range(self.size))
        if self._committed != self.member.generation:
            self._committed = self.member.generation
            fact = Committed(generation=self.member.generation, applied=cursor.applied)
            self.channel.send(self.member.state(fact))

    def stepped(self, *, plain: bool) -> None:
        """A step was settled, in the same generation; `plain`: there was nothing beside it. While another generation
        is prepared steps are slower than they will be."""
        window = self.pace.step(counts=plain and self.member.pending() is None)
        if window is None:
            return
        self.member.timed(window)
        if window.first and self.rank == 0:
            # What a new size is worth is wanted at once.
            self.channel.send(self.member.heartbeat())

    def share_again(self, cursor: Cursor) -> Cursor:
        """At the beginning of a loop: whoever came in between loops gets the state that the others begin it with."""
        while self.again and self.group is not None:
            try:
                return self._agree(self.group, cursor, self.size, planned=False)
            except GroupBroken as broken:
                cursor = self.recover(cursor, broken)
        return cursor

    def end_loop(self, cursor: Cursor, how: str) -> Cursor:
        """Wait until everybody is at the end of the loop."""
        loop = cursor.loop
        while self.member.loops_done <= loop:
            self.say_loop_end(cursor, how)
            self.member.wait(lambda: self.member.loops_done > loop or self.member.urgent())
            if self.member.loops_done <= loop:
                if self.member.out is not None:
                    self.give_up(self.member.out)
                cursor = self.recover(cursor, None)
        return cursor

    def say_loop_end(self, cursor: Cursor, how: str) -> None:
        member = self.member
        fact = LoopEnd(
            generation=member.generation, loop=cursor.loop, applied=cursor.applied, how=how, step=member.step
        )
        self.channel.send(self.member.state(fact))

    def give_up(self, why: Exception) -> NoReturn:
        """End because the coordinator says so."""
        if isinstance(why, Evicted):
            say(f"this worker is out of its job: {why}")
            # Nothing of the user's script may run any more: it could write over what the job goes on with.
            os._exit(EVICTED_CODE)
        self._drop_all()
        raise why

    def _form(self, switch: Switch, cursor: Cursor) -> Cursor:
        """Enter a generation, or a later one if it breaks: connect, learn who holds what, take what is missing."""
        began_s, counts = time.monotonic(), self.member.holds_state
        while True:
            self.check_lease()
            self.member.enter(switch)
            if not switch.planned:
                # The time to form it counts from when all are there.
                self.channel.send(self.member.heartbeat())
            before = self.group
            size_before = self.size
            try:
                group = self._connection(switch)
                with self._lock:
                    self.group = group
                if self.member.urgent():
                    raise GroupBroken("another generation was announced")
                found = self._agree(group, cursor, size_before, switch.planned)
            except GroupBroken as broken:
                self._let_go()
                if self.member.out is not None:
                    self.give_up(self.member.out)
                holds = self.member.holds_state
                if not self.member.urgent() and (holds or self.member.pending() is None):
                    self._report(switch.generation, broken, switch)
                switch = self._next(switch.generation)
                continue
            finally:
                # Not before: a slower peer may still be reading the last reduction.
                if before is not None:
                    before.retire()
            with self.member.changed:
                self.member.applied, self.member.holds_state = found.applied, True
                self.member.paused_s += time.monotonic() - began_s if counts else 0.0
            fact = Formed(generation=switch.generation, applied=found.applied, loop=found.loop)
            self.channel.send(self.member.state(fact))
            self.pace.enter(switch.generation, self.size)
            return found

    def _agree(self, group: Group, cursor: Cursor, before: int, planned: bool) -> Cursor:
        """The exchange that every formation begins with; afterwards all hold the state of whoever was furthest, or
        will hold it before their next step."""
        self._sending, self.stands_in = None, False
        self.unproven, self._overlaps = {}, False
        if group.size == 1:
            self.feeders = (0,)
            if self._early:
                self.give_up(Evicted("all who knew what was done between two loops are gone"))
            return cursor if self.member.holds_state else self.restore() or cursor
        counter = Counter(group, self.store.host)
        try:
            return self._share_state(group, counter, cursor, before, planned)
        finally:
            if self._sending is None:
                counter.close()

    def _share_state(self, group: Group, counter: Counter, cursor: Cursor, before: int, planned: bool) -> Cursor:
        habits, holds = self.habits, self.member.holds_state and not self._early
        replies, late = self.holder.replies_ever, habits.late.told()
        known = habits.by_hand, habits.goes_on
        mine = _Card(holds, cursor, before, *known, counter.card, replies, self.between, late, self.says)
        everybody = [_Card.read(card) for card in group.all_gather_bytes(json.dumps(mine).encode())]
        if not holds:
            _refuse_other_loop(self.says, [card.says for card in everybody if card.holds])
        begun = any(card.holds for card in everybody)
        if not begun:
            if group.rank == 0:
                cursor = self.restore() or cursor
            start = Cursor(*json.loads(self._from_leader(group, json.dumps(cursor))))
            everybody[0] = everybody[0]._replace(holds=True, cursor=start)
        self._share_replies(group, everybody)
        furthest = max((card.cursor for card in everybody if card.holds), key=lambda c: (c.applied, c))
        sources = [r for r, card in enumerate(everybody) if card.holds and card.cursor.applied == furthest.applied]
        # Who is in the next loop already has done everything before it.
        sources = [r for r in sources if not everybody[r].between] or sources
        self.again = everybody[sources[0]].between and not all(card.holds for card in everybody)
        self._early = self.again and not holds
        behind = [
            rank for rank, card in enumerate(everybody)
            if not card.holds or card.cursor.applied != furthest.applied
        ]  # fmt: skip
        self.stands_in = 0 in behind and group.rank == sources[0]
        served = {rank: sources[i % len(sources)] for i, rank in enumerate(behind)}
        alone = _may_feed_alone(everybody, sources)
        overlaps = planned and self.overlap and alone and all(everybody[r].by_hand is False for r in sources)
        if begun and alone and self.proves:
            self.unproven = {rank: source for rank, source in served.items() if not everybody[rank].holds}
        self._overlaps = overlaps
        self.feeders = tuple(sources if overlaps or self.unproven else range(group.size))
        if group.rank in served:
            source = everybody[served[group.rank]]
            self.holder.put(*receive(group, source.counter, self._staging))
            self._staging.clear()
            habits.by_hand = habits.by_hand or source.by_hand
            habits.goes_on = habits.goes_on or source.goes_on
            habits.late.hear(source.late)
        elif receivers := list(served.values()).count(group.rank):
            keep = kept_until_step(self.holder) if overlaps else None
            self._sending = Sending(group, counter, receivers, *self.holder.take(furthest), keep)
            if not overlaps:
                self.finish_sending()
        return furthest

    def _share_replies(self, group: Group, cards: list[_Card]) -> None:
        """Of an exchange between loops that was cut short some may have the result: then all do."""
        held = {rank: card.replies for rank, card in enumerate(cards) if card.holds}
        if len(set(held.values())) == 1:
            return
        teller = max(held, key=lambda rank: held[rank])
        told = [list(one) for one in self.holder.replies]
        found = group.all_gather_bytes(pack(told) if group.rank == teller else b"")[teller]
        if group.rank in held and held[group.rank] != held[teller]:
            self.holder.put_replies(unpack(found), held[teller])

    def _from_leader(self, group: Group, text: str) -> str:
        return group.all_gather_bytes(text.encode() if group.rank == 0 else b"")[0].decode()

    def _next(self, after: int) -> Switch:
        """The next generation to be in: the newest above `after`, planned or not."""

        def there() -> bool:
            switch = self.member.pending()
            return self.member.released or (switch is not None and switch.generation > after)

        try:
            self.member.wait(there)
        except Exception as why:
            self.give_up(why)
        switch = self.member.pending()
        if switch is None:
            self.go()
        if self.member.worker not in [peer.worker for peer in switch.members]:
            if self.member.worker in switch.leavers:
                return self._wait_for_release(switch)
            self.give_up(Evicted(f"generation {switch.generation} has no place for it"))
        return switch

    def _leave(self, switch: Switch, cursor: Cursor) -> Cursor:
        """Stop at this boundary, and keep the state until the others do not need it any more."""
        self._let_go()
        again = self._wait_for_release(switch)
        return self._form(again, cursor)

    def _wait_for_release(self, switch: Switch) -> Switch:
        """Ends the process once released; the generation to go back to if the others need this worker after all."""

        def needed() -> Switch | None:
            newest = self.member.newest
            if newest is None or newest.generation <= switch.generation:
                return None
            return newest if self.member.worker in [peer.worker for peer in newest.members] else None

        try:
            self.member.wait(lambda: self.member.released or needed() is not None)
        except Exception as why:
            self.give_up(why)
        again = needed()
        if again is None:
            self.go()
        return again

    def go(self) -> NoReturn:
        """End from inside the loop: nobody needs this worker any more."""
        self.close(Bye(reason="left"))
        if threading.current_thread() is not threading.main_thread():
            # An exit would end this thread only, and the script would go on as if it had trained to the end.
            sys.stdout.flush()
            os._exit(0)
        threading.Thread(target=_end_hard, name="stretto-leaves", daemon=True).start()
        raise SystemExit(0)

    # Connections.

    def _heard(self, message: Message) -> None:
        """In the channel's thread."""
        if isinstance(message, Switch) and message.planned:
            if not self.member.holds_state:
                # A newcomer waits in one proposal at a time.
                self._abort_below(message.generation)
            elif self.member.worker in [peer.worker for peer in message.members]:
                # It replaces one that this worker was not ready for: nobody can have taken that without it.
                self._abort_connecting(message.generation)
                self._connect_in_background(message)
        elif isinstance(message, Release):
            # A newcomer may be waiting for those who have just finished.
            self._abort_connecting(sys.maxsize)
        elif isinstance(message, (Switch, Evict, Fail)):
            self._abort_below(message.generation if isinstance(message, Switch) else sys.maxsize)

    def _abort_below(self, generation: int) -> None:
        with self._lock:
            groups = [*self._connecting.values(), *self._connected.values()]
            if self.group is not None:
                groups.append(self.group)
        for group in groups:
            if group.generation < generation:
                group.abort("another generation was announced")

    def _abort_connecting(self, generation: int) -> None:
        with self._lock:
            replaced = [group for number, group in self._connecting.items() if number < generation]
        for group in replaced:
            group.abort("another generation was announced")

    def _connect_in_background(self, switch: Switch) -> None:
        group = self._new_group(switch)
        if group is None:
            return

        def connect() -> None:
            broken = None
            try:
                group.connect(self.formation_s)
                if switch.planned:
                    self._make_room(group)
            except GroupBroken as error:
                broken = error
                group.close()
            with self._lock:
                self._connecting.pop(switch.generation, None)
                if broken is None:
                    self._connected[switch.generation] = group
                else:
                    self._broken[switch.generation] = broken
            with self.member.changed:
                self.member.changed.notify_all()

        background.start(f"stretto-generation-{switch.generation}", connect)

    def _make_room(self, group: Group) -> None:
        """Before anybody waits for it: memory for the state that is about to arrive."""
        told = expected_shapes(self.holder) if self.member.holds_state else []
        for card in group.all_gather_bytes(json.dumps(told).encode()):
            if not self.member.holds_state:
                self._staging.prepare(Shape.read(size, dtype) for size, dtype in json.loads(card))

    def _new_group(self, switch: Switch) -> Group | None:
        """A group for the generation, unless there is one already."""
        with self._lock:
            if switch.generation in self._connecting or switch.generation in self._connected:
                return None
            workers = [peer.worker for peer in switch.members]
            rank = workers.index(self.member.worker)
            addresses = [peer.address for peer in switch.members]
            group = Group(switch.generation, rank, addresses, self.device, self.member.token)
            self._connecting[switch.generation] = group
            return group

    def _connection(self, switch: Switch) -> Group:
        """The connected group of the generation; raises if that fails, or is not wanted any more."""
        self._connect_in_background(switch)

        def settled() -> bool:
            with self._lock:
                return switch.generation not in self._connecting

        # An urgent message aborts it, so this ends.
        with self.member.changed:
            while not settled():
                self.member.changed.wait()
        with self._lock:
            group = self._connected.pop(switch.generation, None)
            broken = self._broken.pop(switch.generation, None)
        if group is None:
            raise broken or GroupBroken(f"generation {switch.generation} could not be formed")
        return group

    def _report(self, generation: int, cause: GroupBroken | None, switch: Switch | None = None) -> None:
        missing = cause.missing if cause is not None else ()
        suspects = tuple(switch.members[rank].worker for rank in missing) if switch is not None else ()
        text = cause.cause if cause is not None else "left"
        fact = Broken(generation=generation, cause=text, suspects=suspects)
        self.channel.send(self.member.state(fact))

    def _let_go(self) -> None:
        """Close the group in use, and those of generations that are over."""
        with self._lock:
            group, self.group = self.group, None
            over = [self._connected.pop(g) for g in list(self._connected) if g < self.member.generation]
        for old in (group, *over):
            if old is not None:
                old.close()

    def _drop_all(self) -> None:
        self._abort_below(sys.maxsize)
        with self._lock:
            groups = [*self._connected.values(), *([self.group] if self.group is not None else [])]
            self.group = None
            self._connected.clear()
        for group in groups:
            group.close()
