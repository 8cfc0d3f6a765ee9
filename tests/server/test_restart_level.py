"""Jobs that resize by restart: scripts that know torchrun's variables and nothing of us."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from machine import Machine, machine_of, play

from stretto.jobs.model import Job
from stretto.server.drivers.torchrun import contract
from stretto.server.tracebacks import last_traceback

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_restart.py"


def test_the_contract_is_torchruns(tmp_path: Path) -> None:
    """Ask torchrun itself: the same names, and the same values where they are not chosen freely."""
    script = tmp_path / "script.py"
    script.write_text("import json, os; json.dump(dict(os.environ), open(os.environ['RANK'] + '.json', 'w'))")
    base = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    subprocess.run([*words, str(script)], env=base, cwd=tmp_path, capture_output=True, check=True, timeout=120)
    for rank in (0, 1):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        ours = contract(rank, 2, 1, restarts=0, max_restarts=0, run_id="none", env=base)
        free = {
            "MASTER_PORT",
            "MASTER_ADDR",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_USE_AGENT_STORE",
            "TORCHELASTIC_ERROR_FILE",
        }
        for name in (theirs.keys() | ours.keys()) - free - {"TORCHELASTIC_SIGNALS_TO_HANDLE"}:
            assert ours.get(name) == theirs.get(name), name
        assert (theirs.keys() & free) - ours.keys() <= {"TORCHELASTIC_ERROR_FILE"}


def test_a_plain_ddp_script_is_resized_and_goes_on(tmp_path: Path) -> None:
    async def wrote(m: Machine, job: Job, text: str) -> None:
        await m.until(job, lambda job: text in m.logs(job), f"where it writes {text!r}")

    async def story() -> None:
        async with machine_of(tmp_path, "1x3", warm=True) as m:
            command = [sys.executable, str(EXAMPLE), "--steps", "400"]
            job = await m.submit(command, elastic={"min": 2, "max": 2}, level="restart")
            await wrote(m, job, "step 20 ")
            await m.plane.scale(job.id, 3, 3, "me", force=True)
            await wrote(m, job, "with 3 ranks")
            await m.plane.scale(job.id, 1, 1, "me", force=True)
            done = await m.ended(job)
            assert (done.keeps, done.lost_s) == (True, 0.0), "it was seen to save when it was asked to end"
            text = m.logs(done)
        starts = [(int(step), int(size)) for step, size in re.findall(r"started at step (\d+) with (\d+) ranks", text)]
        ends = [int(step) for step in re.findall(r"ended at step (\d+)", text)]
        assert [size for _, size in starts] == [2, 3, 1]
        assert [step for step, _ in starts] == [0, *ends[:2]]
        assert 0 < ends[0] < ends[1] < ends[2] == 400
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", text)]
        assert losses[-1] < 0.1 < losses[0]
        assert float(re.findall(r"accuracy ([\d.]+)", text)[-1]) > 0.98

    play(story())


def test_a_traceback_is_found_at_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("fine\n")
    assert last_traceback(log) == ""
    log.write_text(
        "x" * 100_000 + "\nTraceback (most recent call last):\n  in f\nValueError: bad data\n", encoding="utf-8"
    )
    assert last_traceback(log) == "Traceback (most recent call last):\n  in f\nValueError: bad data"
    assert last_traceback(tmp_path / "none") == ""
