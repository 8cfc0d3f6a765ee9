"""The jobs of a chaos run, and the proof that each of them ended once, well and with the right result.

Elastic ones train a small model: every sample must be in the ledger of what was really fed once an epoch, and the
weights must be those of an undisturbed run. Groups (restart, rigid) compute a number that depends on every one of their
steps; their members meet at the address of the first, and fail if it goes away.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.runtime.ledger import LedgerError, audit, ledger_files
from stretto.runtime.order import Loop

ENDED = ("Succeeded", "Failed", "Cancelled", "Invalid")
EPOCHS = (40, 60, 80)
"""Of four steps each."""
GROUP_STEPS = 150
SAMPLES, BATCH, SEED = 64, 16, 1
TOLERANCE = 1e-9

TRAIN = f"""
import json, os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn({SAMPLES}, 4, dtype=torch.float64)
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
data = TensorDataset(x, x.sum(1, keepdim=True))
for batch in job.batches(data, size={BATCH}, epochs=int(os.environ["EPOCHS"]), seed={SEED}):
    loss = ((model(batch.x) - batch.y) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(float(os.environ["PAUSE_S"]))
if job.rank == 0:
    part = os.environ["RESULT"] + f".{{os.getpid()}}"
    with open(part, "w") as file:
        json.dump({{"weights": [*model.weight.flatten().tolist(), model.bias.item()], "steps": job.step}}, file)
    os.replace(part, os.environ["RESULT"])
"""

GROUP = """
import json, os, socket, sys, time

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
meeting = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
state, result = os.environ["STATE"], os.environ["RESULT"]

def save(path, content):
    part = f"{path}.{os.getpid()}"
    with open(part, "w") as file:
        json.dump(content, file)
    os.replace(part, path)

if rank:
    end_s = time.monotonic() + 60
    while True:
        try:
            first = socket.create_connection(meeting, timeout=5)
            break
        except OSError:
            if time.monotonic() > end_s:
                sys.exit("nobody is at the meeting point")
            time.sleep(0.05)
    first.settimeout(None)
    sys.exit(0 if first.recv(4) == b"done" else "the first member is gone")

others = []
if size > 1:
    server = socket.create_server(meeting)
    server.settimeout(60)
    others = [server.accept()[0] for _ in range(size - 1)]
step, value = json.load(open(state)) if os.path.exists(state) else (0, 0)
while step < int(os.environ["STEPS"]):
    value = (value * 6364136223846793005 + step + 1) % 2**64
    step += 1
    time.sleep(float(os.environ["PAUSE_S"]))
    if step % 10 == 0:
        save(state, [step, value])
save(result, {"value": value, "steps": step})
for other in others:
    other.sendall(b"done")
"""

Kind = Literal["elastic", "restart", "rigid"]


class ChaosJob(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: Kind
    low: int
    high: int
    length: int
    """Epochs, or steps of a group."""
    priority: int


class Workplace:
    """A folder with the programs, the state and the results of all jobs."""

    def __init__(self, folder: Path, *, pause_s: float = 0.05) -> None:
        self.folder, self._pause_s = folder, pause_s
        for name in ("state", "results"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(TRAIN)
        (folder / "group.py").write_text(GROUP)

    def result(self, name: str) -> Path:
        return self.folder / "results" / f"{name}.json"

    def body(self, job: ChaosJob, namespace: str) -> dict[str, Any]:
        """The ElasticJob."""
        env = {"RESULT": str(self.result(job.name)), "PAUSE_S": str(self._pause_s)}
        if job.kind == "elastic":
            env |= {"EPOCHS": str(job.length)}
        else:
            env |= {"STEPS": str(job.length), "STATE": str(self.folder / "state" / f"{job.name}.json")}
        script = "train.py" if job.kind == "elastic" else "group.py"
        spec = {
            "workers": {"min": job.low, "max": job.high, "explore": False},
            "level": job.kind,
            "image": "none",
            "command": [sys.executable, str(self.folder / script)],
            "env": env,
            "resources": {"gpu": 0, "cpu": 1, "memory": "256Mi"},
            "checkpoint": {"dir": str(self.folder / "state"), "every": 1},
            "stop": {"grace": "5s"},
            "retries": 1000,
            "priority": job.priority,
        }
        about = {"name": job.name, "namespace": namespace}
        return {"apiVersion": "stretto.dev/v1alpha1", "kind": "ElasticJob", "metadata": about, "spec": spec}

    def alone(self, epochs: int, warm: ForkServer | None = None) -> list[float]:
        """The weights of a run that nobody disturbs, outside Stretto."""
        folder = self.folder / f"alone-{epochs}"
        folder.mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}
        env |= {"EPOCHS": str(epochs), "PAUSE_S": "0", "RESULT": str(folder / "result"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(self.folder / "train.py")]
        with launch(command, env=env, log=folder / "log", warm=warm) as process:
            assert process.wait(120.0) == 0, (folder / "log").read_text()
        weights: list[float] = json.loads((folder / "result").read_text())["weights"]
        return weights

    def check(self, job: ChaosJob, weights: list[float], own: Path | None) -> None:
        """Its result and its ledger. `own`: the folder of an elastic job."""
        assert self.result(job.name).exists(), f"{job.name} has no result"
        found = json.loads(self.result(job.name).read_text())
        if job.kind != "elastic":
            assert found == {"value": group_value(job.length), "steps": job.length}, f"{job.name}: {found}"
            return
        assert own is not None
        loop = Loop(samples=SAMPLES, size=BATCH, epochs=job.length, seed=SEED)
        assert found["steps"] == loop.total_steps, f"{job.name} did {found['steps']} of {loop.total_steps} steps"
        try:
            audit(ledger_files(own / "ledger"), {0: loop}).check()
        except (AssertionError, LedgerError) as error:
            raise AssertionError(f"{job.name}: {error}") from None
        far = float(np.linalg.norm(np.array(found["weights"]) - np.array(weights)))
        assert far <= TOLERANCE * float(np.linalg.norm(weights)), f"{job.name}: the weights differ by {far:.3g}"


def group_value(steps: int) -> int:
    value = 0
    for step in range(steps):
        value = (value * 6364136223846793005 + step + 1) % 2**64
    return value


def drawn(chance: random.Random, number: int) -> ChaosJob:
    """The so-manieth job of a seed."""
    kind: Kind = chance.choices(("elastic", "restart", "rigid"), (8, 1, 1))[0]
    high = chance.randint(1, 3)
    low = chance.randint(1, high) if kind == "elastic" and chance.random() < 0.3 else 1
    length = chance.choice(EPOCHS)
    priority = chance.randint(30, 70)
    if kind != "elastic":
        length, high = GROUP_STEPS, 2
        low = 2 if kind == "rigid" else 1
    return ChaosJob(name=f"{kind}-{number}", kind=kind, low=low, high=high, length=length, priority=priority)


class History:
    """How the phases of objects went, as everybody can see them: an end is the end, and there is one."""

    def __init__(self) -> None:
        self.phases: dict[str, list[str]] = {}
        """By name, in the order in which they came."""
        self._ends: dict[str, set[str]] = {}
        self.latest: dict[str, dict[str, Any]] = {}
        """The status of each."""

    def see(self, job: dict[str, Any]) -> None:
        name, status = job["metadata"]["name"], job.get("status") or {}
        phase = status.get("phase")
        seen = self.phases.setdefault(name, [])
        if phase and (not seen or seen[-1] != phase):
            seen.append(phase)
        if status.get("completionTime"):
            self._ends.setdefault(name, set()).add(status["completionTime"])
        self.latest[name] = status

    def ended(self, name: str) -> bool:
        return any(phase in ENDED for phase in self.phases.get(name, ()))

    def check(self, name: str) -> None:
        phases = self.phases.get(name, [])
        ends = [phase for phase in phases if phase in ENDED]
        told = f"{name} went {' → '.join(phases) or 'nowhere'}: {self.latest.get(name, {}).get('message', '')}"
        assert ends, f"has not ended: {told}"
        assert len(ends) == 1, f"has ended {len(ends)} times: {told}"
        assert phases[-1] == ends[0], f"has gone on after its end: {told}"
        assert len(self._ends.get(name, ())) == 1, f"has ended at {sorted(self._ends.get(name, ()))}: {told}"
        assert ends == ["Succeeded"], f"has not ended well: {told}"
