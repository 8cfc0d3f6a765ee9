"""Elastic jobs: workers meet at a coordinator, which lives in this process and outlives it in its journal.

The end is known from two sides: the coordinator hears how scripts end, the backend sees how processes do. A script that
never joins is a plain program: its exit code is all there is.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stretto import jobfiles, pins
from stretto.accounts import Identity, acting, own_folder
from stretto.backends.protocol import Exit
from stretto.control import stuck
from stretto.control.coordination import Coordination
from stretto.control.events import Done, Effect, Evicted, Failed, Formed, Progress
from stretto.control.journal import FileJournal, Journal
from stretto.control.roster import Settings, State
from stretto.jobs.events import Kept, Stuck
from stretto.jobs.model import Seat, Worker
from stretto.runtime.messages import NOTICE
from stretto.server.asked import at_home, workdir
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, End, Fault, Judgement, Surroundings, describe, fault_of
from stretto.server.drivers.speed import Speed

EVICTED_CODE = 75
_LONGEST_REASON = 200
_LONGEST_S = 1e9
"""Of pauses; who says more is mistaken."""


class ElasticDriver(Driver):
    def __init__(self, active: Active, surroundings: Surroundings, journal: Journal | None = None) -> None:
        """The journal: as `preparation` has made it."""
        super().__init__(active, surroundings)
        self._speed = Speed(active, surroundings, lambda: self.state)
        self._hanging: dict[str, float] = {}
        """Workers that were named, and for how long they have made no step."""
        self._took_part: set[str] = set()
        """Everybody who ever did, as far as we were there."""
        self._reasons: dict[str, str] = {}
        """Why the job goes on without somebody."""
        self.coordination = Coordination(
            _settings(active), self._journal() if journal is None else journal, watch=self._watch
        )
        self.coordination.open()
        self._committed = (0, surroundings.clock())
        self._took_part |= self.joined
        self._failed_exit: tuple[Worker, Exit] | None = None
        self._never_joined = False
        """Its script has ended without a word to us: it is not elastic, and not started anew in another's place."""

    @classmethod
    def preparation(cls, active: Active, around: Surroundings) -> Callable[[], Journal]:
        def prepare() -> FileJournal:
            url, who = _url(active, around), around.identity(active.job)
            return _prepared(around.folder, around.records, active.job.id, _settings(active), url, who)

        return prepare

    def _journal(self) -> Journal:
        return self.preparation(self.active, self.around)()

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
            "STRETTO_COORDINATOR": _url(self.active, self.around),
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
        who = self.around.identity(job)
        home = "" if who is None else who.home
        folder = os.path.join(workdir(job, self.active.file, home), at_home(named, home), f"{job.name}-{job.number}")
        return {"STRETTO_CHECKPOINT_DIR": os.path.normpath(folder)}

    def prepare(self, size: int) -> None:
        self._speed.launching()
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
        self._speed.exited(worker)
        self._confirm(worker, exit)
        self._look_who_hangs()
        ended, taken = exit.how == "exited", bool(worker.leaving) or exit.asked
        if ended and exit.status not in (0, EVICTED_CODE) and self._failed_exit is None and not exit.asked:
            self._failed_exit = worker, exit
        if ended and exit.status == 0 and not taken and self.state.named(worker.name) is None:
            self._never_joined = True
        if self.end is None:
            self.end = self._judge(worker, exit, left)
        if self.end is not None:
            return self.end
        return None if taken or (ended and exit.status == 0) else self._fault(worker, exit)

    def _fault(self, worker: Worker, exit: Exit) -> Fault:
        """A newcomer that fails while others train tells nothing of them, and their steps nothing of the next one."""
        newcomer = self.serving and worker.name not in self._took_part
        why = self._reasons.pop(worker.name, "")
        fault = fault_of(worker, exit)
        text = f"{fault.text}: {why}" if why and not exit.text else fault.text
        return replace(fault, text=text, newcomer=newcomer)

    def _confirm(self, worker: Worker, exit: Exit) -> None:
        """Tell the coordinator that its process is gone."""
        self.coordination.exited(worker.name, status=exit.status if exit.how == "exited" and not exit.asked else None)

    @property
    def serving(self) -> bool:
        """While it trains, faults of others cost it their help and nothing else."""
        return any(worker.name in self.joined for worker in self.active.job.workers if not worker.leaving)

    def fall_silent(self) -> None:
        self.coordination.fall_silent()

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
        taken = bool(worker.leaving) or exit.asked
        if not left and self._never_joined and (taken or exit.how == "exited"):
            times = self.active.job.launches
            said = f"its script never joined the job, and ran {times} times" if times > 1 else ""
            return End("succeeded", said, 0)
        if not left:
            # The machine has failed the last one: it is tried again.
            self._never_joined = False
        if left or exit.how != "exited" or exit.status != 0 or taken:
            return None
        known = state.named(worker.name)
        if known is None:
            return None
        # Who left was sent away from outside, and its job goes on.
        return End("succeeded", "", 0) if known.finished else None

    def _is_known(self, name: str) -> bool:
        worker = self.state.named(name)
        return worker is not None and not worker.gone

    def _watch(self, effect: Effect) -> None:
        number = self.active.number
        if isinstance(effect, Evicted):
            self._reasons[effect.worker] = effect.reason[:_LONGEST_REASON]
        if isinstance(effect, (Progress, Formed, Evicted)):
            self._look_who_hangs()
        match effect:
            case Progress(worker, heartbeat, committed):
                self._note_pause(committed)
                self._speed.heard(worker, heartbeat.windows, committed)
                progress = self.active.progress
                progress.steps = max(progress.steps, committed)
                progress.metrics = {name: value for name, value in heartbeat.metrics.items() if math.isfinite(value)}
                if heartbeat.paused_s < _LONGEST_S:
                    progress.paused_s = max(progress.paused_s, heartbeat.paused_s)
                if heartbeat.total > 0:
                    progress.total = heartbeat.total
                if heartbeat.saved > (progress.saved[0] if progress.saved is not None else -1):
                    progress.saved = heartbeat.saved, self.around.clock()
                self.around.progressed(number)
            case Failed(reason):
                self.end = self.end or End("failed", reason, 1)
                self.around.changed(number)
            case Done() | Formed() | Evicted():
                self._look_who_joined()
                # Heartbeats tell of the last steps a little late; the end of a loop is exact.
                self.active.progress.steps = max(self.active.progress.steps, self.state.loops_applied)
                self._speed.formed()
                self.around.changed(number)

    def _look_who_hangs(self) -> None:
        """Name whoever has begun to hang, and whoever moves again."""
        hanging, told = {}, []
        for worker in stuck.to_name(self.state):
            if worker.stuck is not None:
                hanging[worker.name] = worker.stuck.seconds
                told.append(Stuck(worker=worker.name, text=stuck.describe(worker), stack=worker.stuck.stack))
        self.active.progress.stuck = tuple(told)
        self.hung += [one for one in told if one.worker not in self._hanging]
        for name in self._hanging.keys() - hanging.keys():
            if self._is_known(name):
                text = f"{name} moves again after {self._hanging[name]:.0f} s"
                self.hung.append(Stuck(worker=name, text=text, moves=True))
        self._hanging = hanging

    def _look_who_joined(self) -> None:
        """A script that takes part hands its state over: a stop costs it nothing."""
        job = self.active.job
        if not self.joined <= self._took_part:
            self._took_part |= self.joined
            self.newcomers_failed = 0
        if not job.keeps and self.joined and job.workers:
            start_s = self.around.clock() - min(worker.launched_s for worker in job.workers)
            self.seen = Kept(how="its script has joined", start_s=round(start_s, 3))

    def _note_pause(self, committed: int) -> None:
        now_s = self.around.clock()
        if committed > self._committed[0]:
            self.longest_pause_s = max(self.longest_pause_s, now_s - self._committed[1])
            self._committed = committed, now_s


def _url(active: Active, around: Surroundings) -> str:
    return pins.below(around.url(), f"/v1/jobs/{active.job.id}/join")


def _settings(active: Active) -> Settings:
    asked = active.request
    return Settings(token=active.job.secret, min_workers=asked.min_workers, want=max(1, len(active.target)))


def _prepared(jobs: Path, records: Path, job: str, settings: Settings, url: str, who: Identity | None) -> FileJournal:
    """In a thread: its folder, its journal, and the notice that tells workers of an earlier server where we are now.
    Raises `OSError` and `JournalError`."""
    folder = jobs / job
    own_folder(folder, root=jobs, who=who)
    jobfiles.make_folder(records / job, root=records)
    journal = FileJournal(records / job / "journal", records)
    try:
        journal.load(settings)
        with acting(who):
            if _notice(folder / NOTICE, folder) != url.encode():
                jobfiles.write(folder / NOTICE, url.encode(), root=folder)
    except BaseException:
        journal.close()
        raise
    return journal


def _notice(path: Path, root: Path) -> bytes:
    """What is said there now."""
    with contextlib.suppress(OSError):
        return jobfiles.read(path, 4096, root=root)
    return b""
