"""What a restart job has saved, by the files in its folder of checkpoints."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import pytest
from machine import play
from played_machine import played

from stretto.server import loss
from stretto.server.saves import Saves

RESTART = {"elastic": {"min": 1, "max": 2}, "level": "restart"}


class Folder:
    def __init__(self, path: Path) -> None:
        self.path, self.now_s = path, 1000.0
        self.saves = Saves(path, lambda: self.now_s)

    def write(self, name: str, dated_s: float) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        os.utime(path, (dated_s, dated_s))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_the_newest_checkpoint_counts(folder: Folder) -> None:
    assert folder.saves.newest_s() == 0
    folder.write("a.pt", 900.0)
    folder.write("step-20/model.safetensors", 950.0)
    folder.write("step-10/model.safetensors", 920.0)
    assert folder.saves.newest_s() == 950


@pytest.mark.parametrize(
    "name",
    [
        "events.out.tfevents.1700000000.host.1.0", "runs/Jan01/events.out.tfevents.1", "train.log", "train.log.1",
        "OUT.TXT", "metrics.jsonl", "trainer_state.json", "history.csv", ".state.pt", ".cache/state.pt", "state.pt.tmp",
        "state.pt.part", "step-30.tmp/model.pt", "wandb/run-1/files/media.bin", "state.pt.lock",
    ],
)  # fmt: skip
def test_what_scripts_write_beside_their_checkpoints_does_not(folder: Folder, name: str) -> None:
    folder.write("a.pt", 900.0)
    folder.write(name, 950.0)
    assert folder.saves.newest_s() == 900


def test_what_is_being_written_counts_when_it_is_whole(folder: Folder) -> None:
    folder.write("a.pt", 999.5)
    assert folder.saves.newest_s(at_rest_s=1.0) == 0
    folder.now_s = 1001.0
    assert folder.saves.newest_s(at_rest_s=1.0) == 999.5


def test_a_date_is_read_once_by_the_clock_that_was_there(folder: Folder) -> None:
    """The machine's clock is set back, and forward; what was written when does not change."""
    step_s = 0.0
    folder.saves = Saves(folder.path, lambda: folder.now_s, lambda at_s: at_s - step_s)
    folder.write("a.pt", 900.0)
    assert folder.saves.newest_s() == 900
    step_s = -600.0
    assert folder.saves.newest_s() == 900
    folder.now_s = 1010.0
    folder.write("b.pt", 405.0)
    assert folder.saves.newest_s() == 1005
    step_s, folder.now_s = 3600.0, 1020.0
    assert folder.saves.newest_s() == 1005
    folder.write("c.pt", 4615.0)
    assert folder.saves.newest_s() == 1015


def test_a_file_of_the_future_was_written_when_it_was_first_seen(folder: Folder) -> None:
    """It does not save its job for ever; not even when its time has come."""
    folder.write("unpacked.pt", 9000.0)
    assert folder.saves.newest_s() == 0, "it was there before anybody looked"
    for folder.now_s in (1100.0, 1200.0, 9500.0):
        assert folder.saves.newest_s() == 0
    folder.write("ahead.pt", 9600.0)
    for folder.now_s in (9501.0, 9550.0, 9700.0):
        assert folder.saves.newest_s() == 9501
    folder.write("ahead.pt", 9800.0)
    folder.now_s = 9720.0
    assert folder.saves.newest_s() == 9720
    folder.write("right.pt", 9730.0)
    folder.now_s = 9740.0
    assert folder.saves.newest_s() == 9730


def test_a_log_beside_a_checkpoint_saves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        async with played(tmp_path, 1) as m:
            job = await m.begun("saver", **RESTART)
            active = m.plane.book.jobs[job.number]
            where = Path(m.backend.of(job)[0].env["STRETTO_CHECKPOINT_DIR"])
            m.save(m.backend.of(job)[0])
            await m.until(job, lambda job: bool(active.saved_s))
            await m.after(500.0)
            log = where / "train.log"
            log.write_text("step 1")
            os.utime(log, (m.clock(), m.clock()))
            future = where / "unpacked.pt"
            future.write_text("x")
            os.utime(future, (m.clock() + 1e6, m.clock() + 1e6))
            await m.comes(lambda: loss.lost_s(active, m.clock()) < 60)
            assert active.saved_s <= m.clock()
            await m.after(500.0)
            await asyncio.sleep(1.5)
            assert loss.lost_s(active, m.clock()) >= 500

    play(story())


def test_nobody_waits_for_a_slow_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others start and end while somebody looks whether a job has saved; then what it lost is said."""
    goes_on, right = threading.Event(), Saves.newest_s

    def slow(self: Saves, at_rest_s: float = 0.0) -> float:
        assert threading.current_thread() is not threading.main_thread()
        goes_on.wait(30)
        return right(self, at_rest_s)

    async def story() -> None:
        async with played(tmp_path, 2, policy="priority") as m:
            job = await m.begun("far", **RESTART)

            def saves(launch: object) -> int:
                m.save(launch)  # type: ignore[arg-type]
                return 143

            m.backend.when_asked[job.number] = saves
            await m.after(300.0)
            monkeypatch.setattr(Saves, "newest_s", slow)
            urgent = await m.begun("urgent", priority=90, workers=2)
            m.backend.finish(urgent)
            await m.until(urgent, lambda job: job.ended)
            assert not await m.interruptions(job)
            goes_on.set()
            found = await m.until(job, lambda job: job.keeps)
            await m.after()
            (event,) = await m.interruptions(job)
            assert (event.cause, event.lost_s, found.lost_s) == ("preempted", 0.0, 0.0)

    try:
        play(story())
    finally:
        goes_on.set()


def test_where_it_takes_long_it_is_looked_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def slow(self: Saves, at_rest_s: float = 0.0) -> float:
        looks.append(at_rest_s)
        time.sleep(0.1)
        return 0.0

    async def story() -> None:
        monkeypatch.setattr(Saves, "newest_s", slow)
        async with played(tmp_path, 1) as m:
            await m.begun("far", **RESTART)
            await m.comes(lambda: bool(looks))
            await asyncio.sleep(2.0)
            assert len(looks) == 1

    play(story())
