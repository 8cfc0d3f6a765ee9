"""What the book writes down, written to the objects: the status of a job is made from what is known of it.

Most events need not be written before anything else happens: a launch is its pod, a size follows from the next
decision. Those that could not be known again (an end, a fault that counts) are durable when the status is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from stretto.jobs import events as e
from stretto.jobs.model import Job
from stretto.kubernetes.keeping import Card, Fenced
from stretto.kubernetes.learned import Learned
from stretto.kubernetes.register import Register
from stretto.store import Entry

_DURABLE = (e.Submitted, e.Exited, e.Retried, e.Kept, e.Interrupted, e.Ended, e.Wished, e.Scaled)
_PROGRESS_S = 10.0
_PROGRESS_PER_S = 10.0


class ObjectStore:
    """`append` and `put_learned` as the book and the loop want them."""

    def __init__(
        self, register: Register, learned: Learned, describe: Callable[[Job, Card], dict[str, Any]],
        fenced: Callable[[], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._register, self._describe, self._fenced, self._clock = register, describe, fenced, clock
        self.put_learned = learned.put
        self._count = 0
        self._told: dict[int, tuple[dict[str, Any], float]] = {}
        """By job: what was last written, and when."""
        self._turns, self._turns_s = _PROGRESS_PER_S, clock()

    def append(self, entries: Sequence[Entry]) -> Future[list[int]]:
        done: Future[list[int]] = Future()
        seqs = [self._count + i + 1 for i in range(len(entries))]
        self._count += len(entries)
        waiting = []
        for number, job in {entry.job.number: entry.job for entry in entries if entry.job is not None}.items():
            if any(
                entry.job is not None and entry.job.number == number and isinstance(entry.event, _DURABLE)
                for entry in entries
            ):
                waiting.append(self._write(job))
        gathered = asyncio.gather(*waiting)

        def finish(result: asyncio.Future[Any]) -> None:
            if result.cancelled():
                done.cancel()
            elif (error := result.exception()) is not None:
                if isinstance(error, Fenced):
                    self._fenced()
                done.set_exception(error)
            else:
                done.set_result(seqs)

        gathered.add_done_callback(finish)
        return done

    def refresh(self, job: Job) -> None:
        """Write what has changed of a job, unless only its progress has and that was told lately."""
        entry = self._register.get(job.number)
        if entry is None or entry.card.fenced:
            return
        told, at_s = self._told.get(job.number, ({}, 0.0))
        now = self._describe(job, entry.card)
        if _steady(now) == _steady(told):
            often_s = max(_PROGRESS_S, len(self._told) / _PROGRESS_PER_S)
            if now == told or self._clock() - at_s < often_s or not self._may_tell_progress():
                return
        self._told[job.number] = now, self._clock()
        entry.card.put(now, urgent=False)

    def _may_tell_progress(self) -> bool:
        """A few jobs a second, whoever has waited: a thousand that tell it all at once would hold everybody up."""
        now_s = self._clock()
        self._turns = min(_PROGRESS_PER_S, self._turns + (now_s - self._turns_s) * _PROGRESS_PER_S)
        self._turns_s = now_s
        if self._turns < 1:
            return False
        self._turns -= 1
        return True

    def forget(self, number: int) -> None:
        self._told.pop(number, None)

    def _write(self, job: Job) -> asyncio.Future[None]:
        entry = self._register.get(job.number)
        if entry is None:
            nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            nothing.set_result(None)
            return nothing
        now = self._describe(job, entry.card)
        self._told[job.number] = now, self._clock()
        return entry.card.put(now, urgent=True)


def _steady(status: dict[str, Any]) -> dict[str, Any]:
    """Without what changes all the time: progress, and the numbers in explanations."""
    changing = ("step", "accounts", "totalSteps", "message", "conditions")
    kept = {name: value for name, value in status.items() if name not in changing}
    kept["conditions"] = [(one["type"], one["status"], one["reason"]) for one in status.get("conditions") or ()]
    return kept
