"""Elastic training through the whole control plane: real workers that really train."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from machine import Machine, machine_of, play

from stretto.jobs.model import Job
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop

SCRIPT = """
import os, sys, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True))
while os.path.exists("wait"):
    time.sleep(0.02)
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
pause_s = float(os.environ.get("PAUSE_S", "0.02"))
for batch in job.batches(data, size=16, epochs=int(os.environ["EPOCHS"]), seed=1):
    loss = ((model(batch.x) - batch.y) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    time.sleep(0 if os.path.exists("hurry") else pause_s)
if job.rank == 0:
    print("result", model.weight.sum().item(), job.step, flush=True)
sys.exit(int(os.environ.get("EXIT", "0")))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


async def train(m: Machine, epochs: int, low: int = 1, high: int = 4, **more: Any) -> Job:
    env = {"EPOCHS": str(epochs), "OMP_NUM_THREADS": "1", **more.pop("env", {})}
    # Which size is the fastest is not asked here: it takes what it is given.
    sizes = {"min": low, "max": high, "explore": False}
    return await m.submit(f"{sys.executable} train.py", elastic=sizes, env=env, **more)


async def stepping(m: Machine, job: Job, steps: int) -> Job:
    return await m.until(job, lambda job: job.steps >= steps or job.ended, f"{steps} steps")


def elsewhere(m: Machine, job: Job) -> str:
    """A node that it is not on."""
    return next(node.name for node in m.plane.backend.nodes() if node.name != job.workers[0].seat.node)


def result(m: Machine, job: Job) -> tuple[float, int]:
    line = next(line for line in m.logs(job).splitlines() if line.startswith("result"))
    return float(line.split()[1]), int(line.split()[2])


def check_ledger(m: Machine, job: Job, epochs: int) -> None:
    """Every sample once per epoch, whoever was fed it."""
    ledgers = ledger_files(m.plane.folder / "jobs" / job.id / "ledger")
    audit(ledgers, {0: Loop(samples=64, size=16, epochs=epochs, seed=1)}).check()


def test_it_grows_into_what_is_free_and_shrinks_for_others(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x4", warm=True) as m:
            first = await train(m, 60, name="first")
            await m.running(first, 4)
            await stepping(m, first, 10)
            second = await train(m, 20, name="second")
            await m.until(second, lambda job: len(job.workers) >= 1, "a worker beside the first")
            done = await m.ended(second)
            assert done.steps == done.total_steps == 80
            first = await m.ended(first)
            assert (first.steps, first.exit_code, first.preemptions) == (240, 0, 0)
            assert first.resizes >= 2
            assert result(m, first)[1] == 240
            check_ledger(m, first, 60)
            alone = await m.ended(await train(m, 60, high=1, name="alone", env={"PAUSE_S": "0"}))
            assert result(m, alone)[0] == pytest.approx(result(m, first)[0], rel=1e-9)

    play(story())


def test_urgent_work_stops_it_at_a_checkpoint_and_it_goes_on(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2", policy="priority", warm=True) as m:
            job = await train(m, 40, low=2, high=2, priority=10, level="elastic")
            await stepping(m, job, 10)
            urgent = await m.submit("sleep 0.3", workers=2, priority=90)
            await m.ended(urgent)
            done = await m.ended(job)
            assert (done.preemptions, done.starts) == (1, 2)
            assert (done.keeps, done.lost_s) == (True, 0.0)
            assert done.start_s > 0
            assert (await m.kinds(done)).count("interrupted") == 1
            assert result(m, done)[1] == 160
            check_ledger(m, done, 40)
            assert "begins again" not in m.logs(done)

    play(story())


def test_a_killed_worker_is_replaced_and_nothing_is_lost(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x3", warm=True) as m:
            job = await train(m, 60)
            await stepping(m, await m.running(job, 3), 20)
            now = await m.plane.job(job.id)
            os.kill(now.workers[0].pid, signal.SIGKILL)
            done = await m.ended(job)
            assert done.launches > 3
            assert result(m, done)[1] == 240
            check_ledger(m, done, 60)

    play(story())


def test_a_restarted_server_finds_it_training(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            job = await train(m, 80)
            before = await stepping(m, await m.running(job, 2), 20)
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            again = await m.plane.job(job.id)
            assert [worker.pid for worker in again.workers] == [worker.pid for worker in before.workers]
            done = await m.ended(job)
            assert (done.launches, done.steps) == (2, 320)
            assert result(m, done)[1] == 320
            check_ledger(m, done, 80)

    play(story())


def test_it_moves_to_another_node_without_a_stop(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "2x1", warm=True) as m:
            job = await train(m, 80, high=1)
            now = await stepping(m, job, 10)
            there = elsewhere(m, now)
            await m.plane.migrate(job.id, there, "me")
            moved = await m.until(job, lambda job: job.migrations == 1, "moved")
            assert [worker.seat.node for worker in moved.workers] == [there]
            done = await m.ended(job)
            assert (done.starts, done.preemptions) == (1, 0)
            assert result(m, done)[1] == 320
            check_ledger(m, done, 80)

    play(story())


def test_one_that_is_suspended_while_it_moves_leaves_at_a_checkpoint(tmp_path: Path, script: Path) -> None:
    """Its old worker has been told to leave for somebody else, and waits for a new one that never comes."""

    async def story() -> None:
        async with machine_of(tmp_path, "2x1", warm=True) as m:
            job = await train(m, 80, high=1)
            now = await stepping(m, job, 10)
            there = elsewhere(m, now)
            (tmp_path / "wait").touch()
            await m.plane.migrate(job.id, there, "me")
            await m.running(job, 2)
            other = await m.submit("true")
            await m.until(job, lambda job: bool(job.workers[0].leaving), "asked to leave")
            await m.plane.wish(job.id, "suspend", "me")
            await m.until(job, lambda job: job.phase == "suspended", "suspended")
            assert "status=9" not in (await m.story(job.id))
            await m.ended(other)
            (tmp_path / "wait").unlink()
            await m.plane.wish(job.id, "run", "me")
            done = await m.ended(job)
            assert "begins again" not in m.logs(done)
            assert result(m, done)[1] == 320
            check_ledger(m, done, 80)

    play(story())


def test_a_server_that_comes_back_elsewhere_is_found(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            job = await train(m, 80, high=2)
            before = await stepping(m, job, 10)
            await m.running(job, 2)
        (tmp_path / "data" / "port").unlink()
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            done = await m.ended(job)
            assert (done.starts, done.preemptions) == (before.starts, 0)
            assert result(m, done)[1] == 320
            check_ledger(m, done, 80)

    play(story())


def test_scale_and_suspend(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x4", warm=True) as m:
            job = await train(m, 400)
            await m.running(job, 4)
            await m.plane.scale(job.id, None, 2, "me")
            await m.running(job, 2)
            await stepping(m, job, 10)
            await m.plane.wish(job.id, "suspend", "me")
            held = await m.until(job, lambda job: job.phase == "suspended", "suspended")
            assert held.workers == ()
            (tmp_path / "hurry").touch()
            await m.plane.wish(job.id, "run", "me")
            done = await m.ended(job)
            assert result(m, done)[1] == 1600
            check_ledger(m, done, 400)

    play(story())


def test_the_exit_code_of_the_script_is_the_jobs(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x1", warm=True) as m:
            job = await m.ended(await train(m, 2, high=1, env={"EXIT": "3"}), "failed")
            assert job.exit_code == 3
            (tmp_path / "train.py").write_text(SCRIPT.replace("job.report(loss=loss)", "raise RuntimeError('ouch')"))
            job = await m.ended(await train(m, 2, high=1, name="raises"), "failed")
            assert "RuntimeError: ouch" in job.message

    play(story())


def test_a_script_that_never_joins_is_a_program_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('just this')")

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.ended(await train(m, 1, high=1))
            assert "just this" in m.logs(job)

    play(story())


def test_without_a_server_it_stops_at_a_checkpoint_and_goes_on_with_the_next(tmp_path: Path, script: Path) -> None:
    async def story() -> None:
        async with machine_of(tmp_path, "1x2", warm=True, away_s=1.0) as m:
            job = await train(m, 150)
            before = await stepping(m, await m.running(job, 2), 20)
        async with asyncio.timeout(60):
            while any(os.path.exists(f"/proc/{worker.pid}") for worker in before.workers):
                await asyncio.sleep(0.05)
        (tmp_path / "hurry").touch()
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            done = await m.ended(job)
            assert done.starts == 2
            assert result(m, done)[1] == 600
            assert "begins again" not in m.logs(done)
            check_ledger(m, done, 150)

    play(story())
