"""What the world does to a server: `kill -9` of it, of its workers, of both, while jobs are submitted all the time.

`play(seed, rounds, folder)` runs a real server process in rounds of faults and a stream of jobs of three kinds: plain
programs, groups that restart, elastic training. Afterwards every job that was accepted must have ended once, well and
with the right result; none may have run twice at the same time; and no process may be left. What is not so is an
`AssertionError` that says which job and how.

Each job proves its own part: it holds a lock while it runs (a second process that finds it held leaves a mark), and
writes its result to a file of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.client import Client
from stretto.errors import StrettoError

DEADLINE_S = 180.0

_PLAIN = """
import fcntl, os, sys, time
name, work_s = sys.argv[1], float(sys.argv[2])
lock = open(name + ".lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(name + ".twice", "w").close()
    sys.exit(9)
end_s = time.monotonic() + work_s
while time.monotonic() < end_s:
    time.sleep(0.01)
with open(name + ".part", "w") as file:
    file.write("result " + name)
os.replace(name + ".part", name + ".result")
"""

_STEPS = 3
"""Of an epoch of the training."""

_TRAIN = """
import os, sys, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

name, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
x = torch.randn(48, 3, dtype=torch.float64)
job = stretto.join()
model = job.model(torch.nn.Linear(3, 1).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
for batch in job.batches(TensorDataset(x, x.sum(1, keepdim=True)), size=16, epochs=epochs, seed=1):
    loss = ((model(batch.x) - batch.y) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    time.sleep(0.01)
if job.rank == 0:
    with open(name + ".part", "w") as file:
        file.write(f"result {name} {job.step}")
    os.replace(name + ".part", name + ".result")
"""


@dataclass
class Tally:
    """What was done, and to how many jobs."""

    accepted: dict[int, str] = field(default_factory=dict)
    """Job number and kind."""
    refused: int = 0
    """Submissions that were given up because no server answered in time."""
    faults: Counter[str] = field(default_factory=Counter)
    adopted: int = 0
    """Workers that were found running after a restart."""


class Server:
    """`stretto up` as a process that may be killed."""

    def __init__(self, data: Path, nodes: str, log: Path) -> None:
        self.data, self.nodes, self.log = data, nodes, log
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        first = [] if (self.data / "stretto.db").exists() else ["--port", "0"]
        command = [sys.executable, "-m", "stretto.cli", "up", "--data", str(self.data), "--nodes", self.nodes, *first]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def client(self, patience_s: float = 0.0) -> Client:
        return Client(data=self.data, patience_s=patience_s)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"the server has ended:\n{self.log.read_text()[-3000:]}")
            with contextlib.suppress(StrettoError, OSError), self.client() as client:
                client.cluster()
                return True
            return False

        until(ready, "the server is ready")


def play(
    seed: int, rounds: int, folder: Path, *, nodes: str = "1x4", train: bool = True, say: Callable[[str], None] = print
) -> Tally:
    """Rounds of faults under a stream of submissions, and the proof that nothing was lost."""
    chance = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plain.py").write_text(textwrap.dedent(_PLAIN))
    (folder / "train.py").write_text(textwrap.dedent(_TRAIN))
    server = Server(folder / "data", nodes, folder / "server.log")
    tally = Tally()
    server.start()
    server.wait_ready()
    stop = threading.Event()
    submitting = threading.Thread(target=_submit, args=(server, folder, seed, tally, stop, train), daemon=True)
    submitting.start()
    try:
        for number in range(rounds):
            fault = chance.choice(["server", "workers", "both", "server twice"])
            _strike(fault, server, chance, tally)
            tally.faults[fault] += 1
            if number % 10 == 9:
                say(f"round {number + 1}: {len(tally.accepted)} jobs accepted")
        stop.set()
        submitting.join(DEADLINE_S)
        server.wait_ready()
        _check_jobs(server, folder, tally)
    finally:
        stop.set()
        _end(server)
    _check_processes(server.data)
    return tally


def _submit(server: Server, folder: Path, seed: int, tally: Tally, stop: threading.Event, train: bool) -> None:
    """Jobs of all kinds, each with a key: whatever happens to the answer, it is one job."""
    chance = random.Random(seed + 1)
    count = 0
    while not stop.is_set():
        kind = chance.choice(["plain", "plain", "plain", "group"] + (["train"] if train else []))
        name = f"{kind}-{count}"
        count += 1
        try:
            with server.client(patience_s=DEADLINE_S) as client:
                job = client.submit(_job(kind, name, chance), cwd=folder, key=f"{seed}-{name}")
            tally.accepted[job.number] = kind
        except (StrettoError, OSError):
            tally.refused += 1
        stop.wait(chance.uniform(0.05, 0.8))


def _job(kind: str, name: str, chance: random.Random) -> dict[str, Any]:
    common: dict[str, Any] = {
        "name": name,
        "retries": 1000,
        "stop": {"grace": "5s"},
        "priority": chance.randint(0, 100),
    }
    if kind == "train":
        epochs = str(chance.randint(5, 15))
        return {**common, "run": [sys.executable, "train.py", name, epochs], "elastic": {"min": 1, "max": 3}}
    run = [sys.executable, "-S", "plain.py", name, f"{chance.uniform(0.0, 1.0):.2f}"]
    return {**common, "run": run, "level": "restart" if kind == "group" else "rigid"}


def _strike(fault: str, server: Server, chance: random.Random, tally: Tally) -> None:
    """At a moment that nobody chose."""
    time.sleep(chance.uniform(0.0, 2.0))
    if fault in ("workers", "both"):
        alive = list(_workers(server.data))
        for pid in chance.sample(alive, min(len(alive), chance.randint(1, 3))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if fault == "workers":
        return
    server.kill()
    if fault == "server twice":
        server.start()
        time.sleep(chance.uniform(0.0, 1.5))
        server.kill()
    time.sleep(chance.uniform(0.0, 0.3))
    tally.adopted += sum(1 for _ in _workers(server.data))
    server.start()
    if chance.random() < 0.7:
        server.wait_ready()


def _check_jobs(server: Server, folder: Path, tally: Tally) -> None:
    with server.client(patience_s=DEADLINE_S) as client:
        for number, kind in sorted(tally.accepted.items()):
            job = client.wait(number, timeout_s=DEADLINE_S)
            told = [event.kind for event in client.events(number, limit=1000) if event.kind == "ended"]
            assert job.phase == "succeeded", f"job {number} ({kind}): {job.phase}, {job.message}"
            assert told == ["ended"], f"job {number} ({kind}) has ended {len(told)} times"
            result = folder / f"{job.name}.result"
            assert result.exists(), f"job {number} ({kind}) has no result"
            assert result.read_text().startswith(f"result {job.name}"), f"job {number}: {result.read_text()!r}"
            if kind == "train":
                steps, epochs = int(result.read_text().split()[2]), int(job.spec["run"][3])
                assert steps == epochs * _STEPS, f"job {number}: {steps} steps in {epochs} epochs"
        listed = {job.number for job in client.jobs()}
        assert set(tally.accepted) <= listed, f"lost: {set(tally.accepted) - listed}"
    twice = sorted(path.name for path in folder.glob("*.twice"))
    assert not twice, f"ran twice at the same time: {twice}"


def _end(server: Server) -> None:
    if server.process is not None and server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _check_processes(data: Path) -> None:
    def gone() -> bool:
        return not list(_ours(data))

    until(gone, "no process is left", lambda: "\n".join(f"{pid}: {_command(pid)}" for pid in _ours(data)))


def _workers(data: Path) -> Iterator[int]:
    """Processes of jobs, by the mark that the backend leaves in their environment."""
    mark = f"STRETTO_JOB_FOLDER={data}/".encode()
    for pid, environment in _environments():
        if mark in environment:
            yield pid


def _ours(data: Path) -> Iterator[int]:
    """Everything that belongs to this data directory: workers, supervisors, fork servers, the server."""
    for pid, environment in _environments():
        if (str(data).encode() in environment or str(data) in _command(pid)) and pid != os.getpid():
            yield pid


def _environments() -> Iterator[tuple[int, bytes]]:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(name), Path(f"/proc/{name}/environ").read_bytes()


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def until(condition: Callable[[], bool], what: str, more: Callable[[], str] = lambda: "") -> None:
    """Look again and again, for so long at most."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {DEADLINE_S:g} s still not: {what}\n{more()}")
        time.sleep(0.02)
