"""Restart and rigid jobs: any program, started as a group with the variables that torchrun would set.

A group ends well when all members end with 0. One that fails takes the others with it; whether the script or the
machine is to blame is judged when all have ended: a member that the machine killed explains why others raised.

A restart job is looked at closely: what is new in its folder of checkpoints it would not lose by a stop. If it writes
there when it is asked to end, and ends by itself, it loses nothing at all. That it does not is no news of one that had
hardly been started.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from stretto import jobfiles
from stretto.accounts import acting, own_folder
from stretto.backends.protocol import Exit
from stretto.jobs.events import Kept
from stretto.jobs.model import Seat, Worker
from stretto.server import loss
from stretto.server.asked import at_home, workdir
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings, describe, fault_of
from stretto.server.drivers.torchrun import contract
from stretto.server.saves import Saves
from stretto.tasks import aside, stop

_LOOK_S, _LONGEST_REST_S = 1.0, 60.0
_RESTS = 50.0
"""Times as long as a look took, nobody looks again: where there are many files, or they are far away, it is seldom."""
_LONGEST_LOOK_S = 10.0
_AT_REST_S = 1.0
"""A file that was written to a moment ago may not be whole."""
_START_S = 5.0
"""What a script needs until it can save when it is asked to end, as long as nobody knows better."""
_CLOCK_TICK_S = 0.02
"""Files may be dated so much too early."""


class GroupDriver(Driver):
    def __init__(self, active: Active, surroundings: Surroundings) -> None:
        super().__init__(active, surroundings)
        self._port = next((worker.port for worker in active.job.workers), 0)
        self._ended_well = bool(active.job.workers) and active.job.finished > 0
        self._taken = False
        """A member was taken away by somebody else, and the others cannot go on without it."""
        self._fault: Fault | None = None
        self._error: End | None = None
        self._stopped_s: float | None = None
        self._asked_s: float | None = None
        """When all were asked to leave."""
        self._ends: list[Exit] = []
        """How those ended."""
        self._early = False
        """They were asked so soon after their start that their script may not have been able to listen."""
        self.checkpoints = self._find_checkpoints() if active.job.level == "restart" else None
        self._saves = (
            None if self.checkpoints is None else Saves(self.checkpoints, surroundings.clock, surroundings.heard)
        )
        self._asking: asyncio.Task[float] | None = None
        self._looking = None if self._saves is None else asyncio.create_task(self._look(self._saves))

    @property
    def joined(self) -> frozenset[str]:
        return frozenset(worker.name for worker in self.active.job.workers if worker.pid)

    @property
    def port(self) -> int:
        return self._port

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
        self._port, self._ended_well, self._taken, self._fault, self._error = _free_port(), False, False, None, None
        self._asked_s, self._ends = None, []
        if self.checkpoints is not None and not self.active.file.checkpoint.dir:
            who = self.around.identity(self.active.job)
            own_folder(self.folder, root=self.around.folder, who=who)
            with acting(who):
                jobfiles.make_folder(self.checkpoints, root=self.folder)

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        job, file = self.active.job, self.active.file
        given = {"STRETTO_WORKER": worker}
        if self.checkpoints is not None or file.checkpoint.dir:
            given["STRETTO_CHECKPOINT_DIR"] = file.checkpoint.dir or str(self.checkpoints)
        if size == 1 and job.level == "rigid":
            return given
        return contract(
            member, size, self._port, restarts=job.starts, max_restarts=file.retries, run_id=job.id, env=given
        )

    def stop(self, leavers: Sequence[str]) -> Sequence[str]:
        self._asked_s, self._ends = self.around.clock(), []
        start_s = loss.weighed_s(self.active.job, _START_S)
        self._early = any(self._asked_s - loss.began_s([worker]) <= start_s for worker in self.active.job.workers)
        return leavers

    async def close(self) -> None:
        await stop(self._looking)
        await stop(self.looking_back)
        await stop(self._asking)

    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        if worker.leaving:
            self._ends.append(exit)
        if not left and self._asked_s is not None and self.active.job.level == "restart":
            self._look_back(self._asked_s)
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
                self._fault = self._fault or fault_of(worker, exit)
        if left:
            return None
        self._taken = False
        if self._fault:
            fault, self._fault, self._error = self._fault, None, None
            return fault
        if self._error is not None:
            self.end = self._error
        elif self._ended_well:
            self.end = End("succeeded", "", 0)
        return self.end

    # What it saves.

    def _find_checkpoints(self) -> Path | None:
        """Where it saves what it wants to keep; None: nobody can look there."""
        job, named = self.active.job, self.active.file.checkpoint.dir
        if not named:
            return self.folder / "checkpoints"
        who = self.around.identity(job)
        home = "" if who is None else who.home
        return Path(os.path.normpath(os.path.join(workdir(job, self.active.file, home), at_home(named, home))))

    async def _look(self, saves: Saves) -> None:
        rest_s = _LOOK_S
        while True:
            await asyncio.sleep(rest_s)
            if self.active.job.workers:
                rest_s = await self._look_once(saves, _AT_REST_S)

    async def _look_once(self, saves: Saves, at_rest_s: float) -> float:
        """Gives back how long to wait before the next look."""
        async with self.around.looks:
            began_s = time.monotonic()
            saved_s = await self._newest_s(saves, at_rest_s)
            took_s = time.monotonic() - began_s
        if saved_s > self.active.saved_s:
            self.active.saved_s = saved_s
            self.around.changed(self.active.number)
        return min(max(_LOOK_S, _RESTS * took_s), _LONGEST_REST_S)

    async def _newest_s(self, saves: Saves, at_rest_s: float) -> float:
        """A file system that does not answer holds up nobody else's looks. There is one thread for it, no more."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(aside(partial(self._look_into, saves, at_rest_s)))
        await asyncio.wait([self._asking], timeout=_LONGEST_LOOK_S)
        return self._asking.result() if self._asking.done() else self.active.saved_s

    def _look_into(self, saves: Saves, at_rest_s: float) -> float:
        """In a thread: the folder is where the job's account says, and only what that may see is looked at."""
        with acting(self.around.identity(self.active.job)):
            return saves.newest_s(at_rest_s)

    def _look_back(self, asked_s: float) -> None:
        """All were asked to end, and have. Has it saved?"""
        self._asked_s = None
        if not all(end.how == "exited" for end in self._ends):
            self._judge(saved=False)
        elif self._saves is None:
            self._judge(saved=self._says_it_saved())
        else:
            self.looking_back = asyncio.create_task(self._look_for_last_save(self._saves, asked_s))

    async def _look_for_last_save(self, saves: Saves, asked_s: float) -> None:
        await self._look_once(saves, 0.0)
        self._judge(saved=self.active.saved_s >= asked_s - _CLOCK_TICK_S)
        self.around.changed(self.active.number)

    def _judge(self, *, saved: bool) -> None:
        if saved:
            self.seen = Kept(how="it saved its state when it was asked to end")
        elif self.active.job.keeps and not self._early:
            self.seen = Kept(how="it was asked to end, and has not saved its state", keeps=False)

    def _says_it_saved(self) -> bool:
        """Of one whose files nobody can look at."""
        return False


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
