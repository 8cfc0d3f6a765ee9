"""A worker that hangs, through the whole control plane: who asks is told which one, and where."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from machine import Machine, machine_of, play

from stretto.api import answers
from stretto.jobs import events as e
from stretto.jobs.model import Job

SCRIPT = """
import os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

def hangs():
    while os.path.exists("hang"):
        time.sleep(0.01)

for batch in job.batches(data, size=16, epochs=5000):
    if job.rank == 1 and job.step > 20:
        hangs()
    opt.zero_grad(); (model(batch.x) - batch.y).square().mean().backward(); opt.step()
    time.sleep(0.01)
"""


def test_who_hangs_is_named_moves_again_and_is_ended_at_last(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    hang = tmp_path / "hang"
    hang.touch()
    env = {"OMP_NUM_THREADS": "1", "STRETTO_STUCK_NAMED_S": "1", "STRETTO_STUCK_ENDED_S": "8"}

    async def story() -> None:
        async with machine_of(tmp_path, "1x2", warm=True) as m:
            run = f"{sys.executable} train.py"
            job = await m.submit(run, elastic={"min": 2, "max": 2, "explore": False}, env=env, stop={"grace": "1s"})
            await m.reason(job, "stuck")
            why = await m.plane.why(job.id)
            assert "has made no step for" in why.text
            assert "in the loop's body at train.py:1" in why.text
            assert m.plane.eta(job.number, None) is None
            job = await m.plane.job(job.id)
            shown = answers.job(m.plane, job)
            assert shown.reason == "stuck"
            [stuck] = shown.stuck
            assert any("hangs" in frame for frame in stuck.stack)
            hang.unlink()
            told = await hanging(m, job, 2)
            assert [event.moves for event in told] == [False, True]
            assert {event.worker for event in told} == {stuck.worker}
            assert "train.py:" in told[0].text
            hang.touch()
            done = await m.ended(job, "failed")
            assert done.message.startswith(f"worker {stuck.worker} has made no step for"), done.message
            assert "train.py:1" in done.message
            assert "STRETTO_STUCK_ENDED_S" in done.message

    play(story())


async def hanging(m: Machine, job: Job, count: int) -> list[e.Stuck]:
    """What was said of hanging workers, once there is so much of it."""
    while True:
        events = [recorded.event for recorded in await m.plane.events(job.id, 0, 1000)]
        found = [event for event in events if isinstance(event, e.Stuck)]
        if len(found) >= count:
            return found
        await asyncio.sleep(0.01)
