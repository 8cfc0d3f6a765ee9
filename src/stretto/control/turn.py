"""One event being handled: the state so far, and the effects so far, in the order they are to be carried out."""

from __future__ import annotations

from dataclasses import replace

from stretto.control.events import Effect, Journal, Send
from stretto.control.journal import Record
from stretto.control.roster import Generation, State, Worker
from stretto.runtime.messages import Message


class Turn:
    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []

    def journal(self, record: Record) -> None:
        self.effects.append(Journal(record))

    def send(self, key: str, message: Message) -> None:
        """To a worker that cannot be reached nothing is sent: it gets what holds when it comes back."""
        worker = self.state.workers[key]
        if worker.connection is not None:
            self.effects.append(Send(worker.connection, worker.name, message))

    def update(self, key: str, **changes: object) -> Worker:
        worker = replace(self.state.workers[key], **changes)  # type: ignore[arg-type]
        self.state = self.state.with_worker(worker)
        return worker

    def change(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]

    def change_generation(self, gen: Generation, **changes: object) -> Generation:
        changed = replace(gen, **changes)  # type: ignore[arg-type]
        self.state = self.state.with_generation(changed)
        return changed
