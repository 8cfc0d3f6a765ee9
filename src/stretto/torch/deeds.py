"""What a script wants done once a step is applied: by every worker, by the leader alone, or a file of the whole state.

A body asks for it; it is done when the step counts, once, however many passes and tries that takes. What the leader was
to do and did not, since it was lost in that very step, its successor does: so everybody remembers what the leader of
the last step owes.

A worker whose own try failed while others had the step applied gets their state, in which all this has left its traces
already. It does its part, too, since figures of its own may depend on it, and then has that state once more. If it is
the leader, one of those others stands in for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stretto.torch import chance
from stretto.torch.checkpoints import write_file

if TYPE_CHECKING:
    from stretto.torch.job import Job

Act = Callable[[], Any]


class Asked(NamedTuple):
    """By one batch, of this worker itself."""

    of_all: list[Act]
    stop: bool
    """Whether it asked to end the loop."""


class Deeds:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._of_all: list[Act] = []
        self._of_leader: list[Act] = []
        self._files: dict[Path, None] = {}
        self.stop = False
        """The body has asked to end the loop: it counts if its batch does."""
        self._first: list[Act] = []
        """What a leader begins with."""
        self._owed: list[Act] = []
        """Of the last step: done, unless its leader was lost in it."""
        self.steps_owed = 0
        """Whether what is done now is about the step before."""

    # What a body asks for.

    def ask_all(self, act: Act) -> None:
        self._of_all.append(act)

    def ask_leader(self, act: Act) -> None:
        self._of_leader.append(act)

    def ask_file(self, path: Path) -> None:
        self._files[path] = None

    def begin_with(self, act: Act) -> None:
        """Whoever becomes the leader does this before anything else."""
        self._first.append(act)

    def take(self) -> Asked:
        """What was asked for; nothing is, from here on."""
        asked = Asked(self._of_all, self.stop)
        self.drop()
        return asked

    def drop(self) -> None:
        """The batch is done again."""
        self._of_all, self._of_leader, self._files, self.stop = [], [], {}, False

    # Once the step is applied.

    def do(self) -> bool:
        """All but the files; whether there was anything."""
        acts, self._of_all = self._of_all, []
        self._call(acts)
        # Whoever led before took part in this step: what it owed it had done.
        self._owed, self._of_leader = self._of_leader, []
        asked = bool(acts or self._owed)
        if self._job.rank == 0:
            self.lead()
        return asked

    def catch_up(self, asked: Asked) -> None:
        """Others have applied the step in which this worker's try failed, and this worker has their state. What the
        leader was to do one of them does: this worker may not even know of it, or have guessed what was exchanged."""
        if asked.of_all:
            skeleton, tensors = self._job.holder.take(self._job.cursor)
            kept = [tensor.clone() for tensor in tensors]
            self._call(asked.of_all)
            self._job.holder.put(skeleton, kept)

    def stand_in(self) -> None:
        """For a leader that does not know that the last step was applied."""
        owed, self._owed = self._owed, []
        self._call(owed)

    def lead(self) -> None:
        """What the leader is there for: what it was to begin with, and what is left to do of the last step."""
        first, owed, self._first, self._owed = self._first, self._owed, [], []
        self.steps_owed = int(bool(owed))
        self._call(first)
        self.steps_owed = 0
        self._call(owed)

    def save(self) -> bool:
        """The files, from one worker; others owe them while the loop lasts. Whether there were any."""
        wanted, self._files = self._files, {}
        if self._job.rank == 0:
            for path in wanted:
                self._write(path)
        elif self._job.in_loop:
            self._owed += [lambda path=path: self._write(path) for path in wanted]  # type: ignore[misc]
        return bool(wanted)

    def settle_debts(self) -> None:
        """Whoever led before is known to have done what it owed."""
        self._owed = []

    def end(self) -> None:
        """A loop is over: what its leader left undone is done now, or never."""
        if self._owed and self._job.rank == 0:
            self.lead()
        self._owed, self.stop = [], False

    def _write(self, path: Path) -> None:
        write_file(path, *self._job.holder.take(self._job.cursor))

    def _call(self, acts: list[Act]) -> None:
        """Not all workers do this, or not at the same time: it leaves no trace in random numbers, and exchanges
        nothing."""
        if not acts:
            return
        with self._job.collectives.by_oneself(), chance.apart(self._job.device):
            for act in acts:
                act()
