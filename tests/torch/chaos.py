"""The small training of scripts/elastic.py under schedules of faults, and the check of what is promised.

Every schedule must end, with every sample fed exactly once per epoch and the weights of a run on one worker.
benchmarks/chaos_schedules.py runs them by the hundred.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import AnyLoop, Loop, Turns
from stretto.testing import Harness
from stretto.testing.faults import Played, play, schedule
from stretto.testing.harness import HarnessError

SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
CASE: dict[str, Any] = {"samples": 240, "size": 24, "epochs": 16, "pause_s": 0.004, "per_worker": 9}
BITWISE: dict[str, Any] = {**CASE, "epochs": 10, "bitwise": True, "per_worker": None}
"""With BatchNorm and dropout, in float32: only bitwise mode makes it independent of size."""
MODES = {
    "default": {**CASE, "loops": 2, "epochs": 12, "pause_s": 0.012, "linger": 8},
    "bitwise": {**BITWISE, "loops": 2, "epochs": 8, "pause_s": 0.006, "linger": 8},
}
"""Of the schedules: two loops, of which the second lingers until no strikes are left, and then hurries."""
BODIES: dict[str, tuple[str, ...]] = {
    "plain": ("default", "bitwise"),
    "phases": ("default", "bitwise"),
    "attempt": ("default", "bitwise"),
    "collectives": ("default", "bitwise"),
    "steps": ("default", "bitwise"),
    "syncnorm": ("default",),
}
"""How the loop may be written, and the modes in which that is possible."""
_ONE_PASS = ("collectives", "syncnorm")
"""Their steps take one pass through the body."""
OPTIONS = {"heartbeat_s": 0.2, "heartbeat_timeout_s": 1.5, "restart_grace_s": 2.0, "formation_s": 5.0}
TRANSFER_S = 0.3
"""How long a state travels in schedules that strike meanwhile."""
TOLERANCE = 1e-9
STATUSES = {0: "left or finished", 75: "evicted", -signal.SIGKILL: "killed"}
"""How a worker may end, whatever happens to it."""


def of_mode(mode: str, body: str) -> dict[str, Any]:
    """The case of a schedule."""
    return {**MODES[mode], "body": body, **({"per_worker": None} if body in _ONE_PASS else {})}


def warm_server() -> ForkServer:
    server = ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch"))
    server.wait_ready()
    return server


def reference(
    folder: Path, case: dict[str, Any], script: Path = SCRIPT, warm: ForkServer | None = None
) -> dict[str, Any]:
    """The result of one worker outside Stretto."""
    folder.mkdir(parents=True, exist_ok=True)
    given = json.dumps({**case, "pause_s": 0.0})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STRETTO_FOLDER": str(folder), "CASE": given}
    log = folder / "alone.log"
    with launch([sys.executable, str(script)], env=environment, log=log, warm=warm) as process:
        assert process.wait(120.0) == 0, log.read_text()
    found: dict[str, Any] = json.loads((folder / "alone.result").read_text())
    return found


def trial(seed: int, folder: Path, case: dict[str, Any], expected: dict[str, Any], warm: ForkServer | None) -> Played:
    """One schedule, played to its end and checked; raises `AssertionError`."""
    plan = schedule(seed)
    slow = any(strike.when == "transfer" for strike in plan.strikes)
    harness = Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=plan.workers,
        environment={
            "CASE": json.dumps({**case, "transfer_s": TRANSFER_S if slow else 0.0}),
            "OMP_NUM_THREADS": "1",
            "STRETTO_CHECKPOINT_S": str(plan.checkpoint_s),
        },
        options=OPTIONS,
        warm=warm,
    )
    signs = {"transfer": lambda: _sending(harness), "end": (folder / "ending").exists}
    with harness:
        try:
            played = play(plan, harness, signs, calm=(folder / "hurry").touch, deadline_s=120.0)
        except HarnessError as error:
            raise HarnessError(f"{error}\n{_stacks(harness)}") from None
        check(harness, case, expected)
        check_ends(harness)
    return played


def _sending(harness: Harness) -> bool:
    return any(worker.running and (harness.folder / f"{worker.name}.sending").exists() for worker in harness.workers)


def check(harness: Harness, case: dict[str, Any], expected: dict[str, Any]) -> None:
    """The promises."""
    if harness.last("done") is None:
        raise AssertionError(f"the job was not done\n{harness.describe()}")
    check_ledger(harness.folder, case)
    check_weights(harness.folder, case, expected)


def check_ends(harness: Harness) -> None:
    """Nobody fell over what happened to the others."""
    odd = [worker for worker in harness.workers if worker.status not in STATUSES]
    if odd:
        raise AssertionError("\n".join(f"{w.name} ended with {w.status}\n{w.text()}" for w in odd))


def check_ledger(folder: Path, case: dict[str, Any]) -> None:
    """Every sample once per epoch, of the indices really fed to the model."""
    loops: dict[int, AnyLoop] = {
        number: Loop(samples=case["samples"], size=case["size"], epochs=case["epochs"], seed=case.get("seed", number))
        for number in range(case.get("loops", 1))
    }
    if case.get("body") == "steps":
        loops = {number: Turns(total_steps=loop.total_steps, seed=loop.seed) for number, loop in loops.items()}
    audit(ledger_files(folder / "ledger"), loops).check()


def check_weights(folder: Path, case: dict[str, Any], expected: dict[str, Any]) -> None:
    """What each of those that finished holds is what one worker alone came to."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("w*.result"))}
    if not results:
        raise AssertionError("nobody finished")
    bound = 0.0 if case.get("bitwise") else TOLERANCE
    for name, result in results.items():
        for count in ("steps", "last_epoch"):
            if result[count] != expected[count]:
                raise AssertionError(f"{name}: {count} is {result[count]}, alone it is {expected[count]}")
        there, here = np.array(expected["weights"]), np.array(result["weights"])
        apart = np.linalg.norm(here - there) / np.linalg.norm(there)
        if not apart <= bound:
            raise AssertionError(
                f"{name}: the weights differ from those of one worker alone by {apart:.3g} of their norm, at most "
                f"{bound:g} is right; {_first_difference(result, expected, bound)}"
            )


def _first_difference(result: dict[str, Any], expected: dict[str, Any], bound: float) -> str:
    """Of the norms of the parameters before each step; a newcomer has not seen the first ones."""
    there = expected.get("course", {})
    for step, norm in sorted(result.get("course", {}).items(), key=lambda item: int(item[0])):
        if abs(norm - there[step]) > bound * abs(there[step]):
            return f"for the first time after step {int(step) - 1}"
    return "for the first time after the last step that this worker saw"


def restores(folder: Path) -> int:
    """How often a checkpoint was restored."""
    lines = [line for path in ledger_files(folder / "ledger") for line in path.read_text().split("\n")]
    return sum(line.startswith("restored ") and not line.startswith("restored 0 0 ") for line in lines)


def _stacks(harness: Harness) -> str:
    """Where every worker that still runs stands."""
    running = [worker for worker in harness.workers if worker.running]
    before = {worker.name: len(worker.text()) for worker in running}
    for worker in running:
        worker.thaw()
        worker.process.signal(signal.SIGUSR1)
    harness.wait(lambda: all(len(w.text()) > before[w.name] or not w.running for w in running), "the stacks", 5.0)
    return "\n".join(f"-- where {worker.name} stands\n{worker.text()[before[worker.name] :]}" for worker in running)
