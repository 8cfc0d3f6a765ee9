"""Elastic jobs: workers meet at a coordinator, which lives in this process and outlives it in its journal.

The end is known from two sides: the coordinator hears how scripts end, the backend sees how processes do. A script that
never joins is a plain program: its exit code is all there is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from stretto.backends.protocol import Exit
from stretto.control.coordination import Coordination
from stretto.control.events import Done, Effect, Evicted, Failed, Formed, Progress
from stretto.control.journal import FileJournal, Journal
from stretto.control.roster import Settings, State
from stretto.core.estimate.curve import Window
from stretto.jobs.model import Seat, Worker
from stretto.runtime import messages as m
from stretto.server.asked import workdir
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings, describe

EVICTED_CODE = 75
_LONGEST_S, _MOST_STEPS = 1e9, 10**9
"""Of a window; what says more is a mistake."""


class ElasticDriver(Driver):
    def __init__(self, active: Active, surroundings: Surroundings) -> None:
        super().__init__(active, surroundings)
        job, asked = active.job, active.request
        self.coordination = Coordination(
            Settings(token=job.secret, min_workers=asked.min_workers, want=max(1, len(active.target))),
            self._journal(),
            watch=self._watch,
        )
        self.coordination.open()
        self._announce()
        self._size = 0
        """Workers that the speed is known, or expected, for."""
        self._counted = (0, 0)
        """Generation and number of the last window."""
        self._disturbed = (0, 0.0, 0.0)
        """The generation that newcomers were last seen beside, from when until when."""
        self._committed = (0, surroundings.clock())
        self._failed_exit: tuple[Worker, Exit] | None = None
        self._never_joined = False
        """Its script has ended without a word to us: it is not elastic, and not started anew in another's place."""

    def _journal(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileJournal(self.folder / "journal")

    def _announce(self) -> None:
        """Workers of an earlier server may know another address."""
        part = self.folder / f"{m.NOTICE}.part"
        part.write_text(self._url())
        part.replace(self.folder / m.NOTICE)

    def _url(self) -> str:
        return f"{self.around.url()}/v1/jobs/{self.active.job.id}/join"

    @property
    def state(self) -> State:
        return self.coordination.state

    @property
    def joined(self) -> frozenset[str]:
        gen = self.state.active
        if gen is None or not gen.formed:
            return frozenset()
        return frozenset(self.state.names(gen.formed))

    @property
    def ending(self) -> bool:
        if self._never_joined:
            return True
        return self.end is not None or self.state.over or any(w.finished for w in self.state.workers.values())

    def environment(self, worker: str, seat: Seat, member: int, size: int) -> dict[str, str]:
        job, file = self.active.job, self.active.file
        return {
            "STRETTO_COORDINATOR": self._url(),
            "STRETTO_TOKEN": job.secret,
            "STRETTO_WORKER": worker,
            "STRETTO_FOLDER": str(self.folder),
            "STRETTO_CONSISTENCY": file.consistency,
            "STRETTO_CHECKPOINT_S": f"{file.checkpoint.every:g}",
            "STRETTO_CHECKPOINT_KEEP": str(file.checkpoint.keep),
            **self._checkpoints(),
        }

    def _checkpoints(self) -> dict[str, str]:
        """Every job has a folder of its own in the one that was named: generations count from 1 in each."""
        job, named = self.active.job, self.active.file.checkpoint.dir
        if not named:
            return {}
        folder = os.path.join(workdir(job, self.active.file), os.path.expanduser(named), f"{job.name}-{job.number}")
        return {"STRETTO_CHECKPOINT_DIR": os.path.normpath(folder)}

    def prepare(self, size: int) -> None:
        self._disturb()
        if not self.state.over:
            self.coordination.want(max(1, size))

    def resize(self, size: int, leavers: Sequence[str]) -> Sequence[str]:
        """Members leave at a step boundary; who is none yet is simply ended."""
        if self.state.over or size < 1:
            return leavers
        members = [name for name in leavers if self._is_known(name)]
        self.coordination.want(size, members)
        return [name for name in leavers if name not in members]

    def exited(self, worker: Worker, exit: Exit, left: int) -> Judgement:
        self._look_at_newcomers(worker)
        self._confirm(worker, exit)
        ended, taken = exit.how == "exited", bool(worker.leaving) or exit.asked
        if ended and exit.status not in (0, EVICTED_CODE) and self._failed_exit is None and not exit.asked:
            self._failed_exit = worker, exit
        if ended and exit.status == 0 and not taken and self.state.named(worker.name) is None:
            self._never_joined = True
        if self.end is None:
            self.end = self._judge(worker, exit, left)
        if self.end is not None:
            return self.end
        return None if taken or (ended and exit.status == 0) else Fault(describe(worker, exit))

    def _confirm(self, worker: Worker, exit: Exit) -> None:
        """Tell the coordinator that its process is gone."""
        self.coordination.exited(worker.name)

    @property
    def serving(self) -> bool:
        """While it trains, faults of others cost it their help and nothing else."""
        return any(worker.name in self.joined for worker in self.active.job.workers if not worker.leaving)

    async def close(self) -> None:
        await self.coordination.stop()

    def _judge(self, worker: Worker, exit: Exit, left: int) -> End | None:
        state = self.state
        if state.failed:
            return End("failed", state.failed, 1)
        if self._failed_exit is not None and not worker.leaving and not exit.asked:
            who, how = self._failed_exit
            return End("failed", describe(who, how), how.status)
        if exit.how == "refused":
            return End("failed", describe(worker, exit), 127)
        if state.done:
            return End("succeeded", "", 0)
        if left or exit.how != "exited" or exit.status != 0 or worker.leaving or exit.asked:
            return None
        known = state.named(worker.name)
        if known is None:
            times = self.active.job.launches
            said = f"its script never joined the job, and ran {times} times" if times > 1 else ""
            return End("succeeded", said, 0)
        # Who left was sent away from outside, and its job goes on.
        return End("succeeded", "", 0) if known.finished else None

    def _is_known(self, name: str) -> bool:
        worker = self.state.named(name)
        return worker is not None and not worker.gone

    def _watch(self, effect: Effect) -> None:
        number = self.active.number
        match effect:
            case Progress(worker, heartbeat, committed):
                self._note_pause(committed)
                self._look_at_size()
                self._look_at_newcomers()
                self._measure(worker, heartbeat.windows)
                progress = self.active.progress
                progress.steps = max(progress.steps, committed)
                progress.metrics = {name: value for name, value in heartbeat.metrics.items() if math.isfinite(value)}
                progress.paused_s = max(progress.paused_s, heartbeat.paused_s)
                if heartbeat.total:
                    progress.total = heartbeat.total
                if heartbeat.saved > (progress.saved[0] if progress.saved is not None else -1):
                    progress.saved = heartbeat.saved, self.around.clock()
                self.around.progressed(number)
            case Failed(reason):
                self.end = self.end or End("failed", reason, 1)
                self.around.changed(number)
            case Done() | Formed() | Evicted():
                # Heartbeats tell of the last steps a little late; the end of a loop is exact.
                self.active.progress.steps = max(self.active.progress.steps, self.state.loops_applied)
                self._look_at_size()
                self.around.changed(number)

    def _note_pause(self, committed: int) -> None:
        now_s = self.around.clock()
        if committed > self._committed[0]:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self._committed[1])
            self._committed = committed, now_s

    def _look_at_size(self) -> None:
        """Another size has another speed: until it was timed, what is to be expected of it."""
        gen = self.state.active
        size = len(gen.members) if gen is not None else 0
        if size == self._size:
            return
        self._size = size
        progress, active = self.active.progress, self.active
        progress.window = None
        progress.rate = self.around.estimates.rate(active.number, active.request.klass, self._pool(), size)

    def _pool(self) -> str:
        return self.around.pools()[self.active.pool] if self.active.pool >= 0 else ""

    def _look_at_newcomers(self, *others: Worker) -> None:
        """Processes that are no members, and those given."""
        gen = self.state.active
        members = self.state.names(gen.members) if gen is not None else ()
        here = (*self.active.job.workers, *others)
        if any(not worker.leaving and worker.name not in members for worker in here):
            self._disturb()

    def _disturb(self) -> None:
        """Newcomers that start take time from those who train: what is timed meanwhile says nothing of the size."""
        gen, now_s = self.state.active, self.around.clock()
        if gen is not None:
            number, since_s, _ = self._disturbed
            self._disturbed = gen.number, since_s if number == gen.number else now_s, now_s

    def _measure(self, worker: str, windows: Sequence[m.Window]) -> None:
        gen = self.state.active
        if gen is None or self.state.names(gen.members[:1]) != (worker,):
            return
        for told in windows:
            if told.generation == gen.number and told.members == len(gen.members):
                self._take_in(told)

    def _take_in(self, told: m.Window) -> None:
        window = _window(told, self.around.clock())
        if window is None or (told.generation, told.number) <= self._counted:
            return
        self._counted = told.generation, told.number
        disturbed, since_s, until_s = self._disturbed
        beside_newcomers = disturbed == told.generation and window.began_s < until_s and window.ended_s > since_s
        if beside_newcomers or self.active.pool < 0:
            return
        self.active.progress.window, self.active.progress.rate = window, window.rate
        if self.around.estimates.observe(self.active.number, self._pool(), window):
            self.around.changed(self.active.number)


def _window(told: m.Window, now_s: float) -> Window | None:
    """As the server's clock has it; None if it cannot be."""
    times_s = (told.median_s, told.spread_s, told.lasted_s, told.age_s)
    if not all(0 <= time_s < _LONGEST_S for time_s in times_s) or not 0 < told.count < _MOST_STEPS or not told.median_s:
        return None
    ended_s = now_s - told.age_s
    return Window(told.members, told.count, told.median_s, told.spread_s, ended_s - told.lasted_s, ended_s)
