"""Random schedules of faults and resizes on a real job; reproducible by seed as far as the machine's timing allows.

    python tests/torch/chaos.py --seeds 0:200

Every schedule must end, with every sample fed exactly once per epoch and the weights of a run on one worker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from stretto.backends.local.forkserver import ForkServer
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
CASE: dict[str, Any] = {"samples": 240, "size": 24, "epochs": 16, "pause_s": 0.004, "per_worker": 9}
BITWISE: dict[str, Any] = {**CASE, "epochs": 10, "bitwise": True, "per_worker": None}
"""With BatchNorm and dropout, in float32: only bitwise mode makes it independent of size."""
FAULTS = ("kill", "kill", "kill two", "freeze", "join", "join", "leave", "leave", "coordinator", "kill newcomer")
OPTIONS = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 1.5, "restart_grace_s": 2.0, "formation_s": 5.0}
MOST = 4


def warm_server() -> ForkServer:
    server = ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch"))
    server.wait_ready()
    return server


def reference(folder: Path, case: dict[str, Any], script: Path = SCRIPT) -> dict[str, Any]:
    """The result of one worker outside Stretto."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STRETTO_FOLDER": str(folder), "CASE": json.dumps(case)}
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(script)], env=environment, check=True, timeout=120)
    found: dict[str, Any] = json.loads((folder / "alone.result").read_text())
    return found


def run(seed: int, folder: Path, case: dict[str, Any], warm: ForkServer | None) -> tuple[Harness, list[str]]:
    """One schedule; the job is over when this returns."""
    chance = random.Random(seed)
    story: list[str] = []
    harness = Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=chance.randint(1, 3),
        environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
        options=OPTIONS,
        warm=warm,
    )
    with harness:
        harness.wait(lambda: bool(harness.members()) or harness.over, "a first generation")
        for _ in range(chance.randint(1, 5)):
            moment_s = time.monotonic() + chance.uniform(0.0, 0.6)
            harness.wait(lambda end_s=moment_s: harness.over or time.monotonic() >= end_s, "a moment")  # type: ignore[misc]
            if harness.over:
                break
            fault = chance.choice(FAULTS)
            story.append(fault)
            _strike(harness, fault, chance)
            _keep_alive(harness)
        end = _to_the_end(harness)
        story.append(end["event"])
    return harness, story


def _strike(harness: Harness, fault: str, chance: random.Random) -> None:
    alive = [worker for worker in harness.workers if worker.running]
    members = [worker for worker in alive if worker.name in harness.members()]
    if fault == "kill" and members:
        chance.choice(members).kill()
    elif fault == "kill two":
        for worker in chance.sample(members, min(2, len(members))):
            worker.kill()
    elif fault == "kill newcomer":
        harness.want(min(len(members) + 1, MOST))
        newest = harness.workers[-1]
        moment_s = time.monotonic() + chance.uniform(0.0, 0.4)
        harness.wait(lambda: time.monotonic() >= moment_s or harness.over, "a moment")
        newest.kill()
    elif fault == "freeze" and len(members) > 1:
        worker = chance.choice(members)
        worker.freeze()
        gone = worker.name
        harness.wait(lambda: gone not in harness.members() or harness.over, "the frozen one is out")
        worker.thaw()
    elif fault == "join":
        harness.want(min(len(members) + 1, MOST))
    elif fault == "leave" and len(members) > 1:
        harness.want(len(members) - 1)
    elif fault == "coordinator":
        harness.kill_coordinator()
        harness.start_coordinator()


def _keep_alive(harness: Harness) -> None:
    """What a control plane does: a job without workers gets new ones."""
    if not any(worker.running for worker in harness.workers) and not harness.over:
        harness.launch(1)


def _to_the_end(harness: Harness) -> dict[str, Any]:
    def over() -> bool:
        _keep_alive(harness)
        return harness.over

    harness.wait(over, "the end of the job", 40.0)
    return harness.wait_over(30.0)


def check(harness: Harness, case: dict[str, Any], expected: dict[str, Any]) -> None:
    """The promises."""
    end = harness.last("done")
    assert end is not None, harness.describe()
    loops = {
        number: Loop(samples=case["samples"], size=case["size"], epochs=case["epochs"], seed=case.get("seed", number))
        for number in range(case.get("loops", 1))
    }
    audit(ledger_files(harness.folder / "ledger"), loops).check()
    results = [json.loads(path.read_text()) for path in harness.folder.glob("w*.result")]
    assert results, "nobody finished"
    for result in results:
        assert result["steps"] == expected["steps"]
        assert result["last_epoch"] == expected["last_epoch"]
        there, here = np.array(expected["weights"]), np.array(result["weights"])
        if case.get("bitwise"):
            assert (here == there).all()
        else:
            assert np.linalg.norm(here - there) <= 1e-9 * np.linalg.norm(there)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:20")
    parser.add_argument("--bitwise", action="store_true")
    options = parser.parse_args()
    first, last = (int(part) for part in options.seeds.split(":"))
    case = BITWISE if options.bitwise else CASE
    failed = 0
    with tempfile.TemporaryDirectory() as folder, warm_server() as warm:
        expected = reference(Path(folder, "alone"), case)
        for seed in range(first, last):
            began_s = time.monotonic()
            try:
                harness, story = run(seed, Path(folder, f"seed-{seed}"), case, warm)
                check(harness, case, expected)
                print(f"{seed}: {', '.join(story)} ({time.monotonic() - began_s:.1f} s)", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"{seed}: FAILED\n{error}", flush=True)
    print(f"{failed} of {last - first} schedules failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
