"""Restart and rigid jobs: any program, started as a group with the variables that torchrun would set.

A group ends well when all members end with 0. One that fails takes the others with it; whether the script or the
machine is to blame is judged when all have ended: a member that the machine killed explains why others raised.
"""

from __future__ import annotations

import socket

from stretto.backends.protocol import Exit
from stretto.jobs.model import Seat, Worker
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings, describe
from stretto.server.drivers.torchrun import contract


class GroupDriver(Driver):
    def __init__(self, active: Active, surroundings: Surroundings) -> None:
        super().__init__(active, surroundings)
        self._port = 0
        self._ended_well = bool(active.job.workers) and active.job.finished > 0
        self._taken = False
        """A member was taken away by somebody else, and the others cannot go on without it."""
        self._fault = ""
        self._error: End | None = None
        self._stopped_s: float | None = None

    @property
    def joined(self) -> frozenset[str]:
        return frozenset(worker.name for worker in self.active.job.workers if worker.pid)

    @property
    def ending(self) -> bool:
        return self._ended_well or super().ending

    @property
    def failing(self) -> bool:
        return bool(self._fault or self._error or self._taken) or super().failing

    def watch_pauses(self) -> None:
        super().watch_pauses()
        self._stopped_s = None

    def pause_s(self) -> float:
        """Since the first member ended: asked when all of the next ones have a process."""
        return 0.0 if self._stopped_s is None else self.around.clock() - self._stopped_s

    def prepare(self, size: int) -> None:
        self._port, self._ended_well, self._taken, self._fault, self._error = _free_port(), False, False, "", None

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        job, file = self.active.job, self.active.file
        given = {"STRETTO_WORKER": worker}
        if file.checkpoint.dir:
            given["STRETTO_CHECKPOINT_DIR"] = file.checkpoint.dir
        if size == 1 and job.level == "rigid":
            return given
        return contract(
            member, size, self._port, restarts=job.starts, max_restarts=file.retries, run_id=job.id, env=given
        )

    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        if worker.leaving and self._stopped_s is None:
            self._stopped_s = self.around.clock()
        if exit.how == "refused":
            self._error = self._error or End("failed", describe(worker, exit), 127)
        elif exit.how == "exited" and exit.status == 0 and not exit.asked:
            self._ended_well = self._ended_well or not worker.leaving
        elif not worker.leaving:
            if exit.asked:
                self._taken = True
            elif exit.how == "exited":
                self._error = self._error or End("failed", describe(worker, exit), exit.status)
            else:
                self._fault = self._fault or describe(worker, exit)
        if left:
            return None
        self._taken = False
        if self._fault:
            fault, self._fault, self._error = Fault(self._fault), "", None
            return fault
        if self._error is not None:
            self.end = self._error
        elif self._ended_well:
            self.end = End("succeeded", "", 0)
        return self.end


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
