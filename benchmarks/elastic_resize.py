"""What a resize and a lost worker cost: ours in the process, against torchrun's elastic restart, in one run.

    python benchmarks/elastic_resize.py [--rounds 5] [--width 2048] [--layers 6] [--torchft]

A 25-million-parameter MLP with momentum (the state that travels is twice the model) on Gloo, one thread per worker. Per
round, ours and the peer in turn (every other round the peer first): 2 → 3 workers, 3 → 2, and `kill -9` of one of
three; each time until the first step of the new world is done, less an ordinary step. Resizes of ours: the longest gap
between two commits of any one who stays, less an ordinary step of the larger world; of torchrun's: from the last commit
of the old world. A kill: from the kill. With torchrun a third agent starts to grow, an agent gets SIGTERM to shrink,
and a killed worker is started again by its agent; steps that it does once more, back at its checkpoint, are not held
against it. torchft's survivors go on as two. The broadcast is of the same bytes, to one newcomer, over Gloo, in every
round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from _measure import interval, machine
from _verdict import report
from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness
from stretto.torch.groups import connect
from stretto.torch.rendezvous import Store

SCRIPTS = Path(__file__).parent / "scripts"
SETTLE = 6
"""Steps to look at on either side of a change."""
LONG_S = 180.0
CHANGES = ("grow", "shrink", "kill")
RATIO = 20
PEER_S = 90.0
"""How long a peer may take for a change."""

TORCHRUN = [
    "--nnodes=2:3", "--nproc-per-node=1", "--max-restarts=100", "--monitor-interval=0.1", "--rdzv-backend=c10d",
    "--rdzv-id=resize",
    "--rdzv-conf=last_call_timeout=1,join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=3",
]  # fmt: skip
"""Whole seconds are the least it takes. An agent in a rendezvous looks once a second, so that it may show its life only
every other second: with fewer than three attempts the living would be taken for dead."""
# Agents that share their store with the workers do not tell a newcomer of a later round where that store is: it waits
# for the address for ever, and all others for it. The second spares the agents an exchange of their roles.
TORCHRUN_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
LIGHTHOUSE = [
    "--min_replicas", "2", "--join_timeout_ms", "1000", "--quorum_tick_ms", "10", "--heartbeat_timeout_ms", "500",
]  # fmt: skip
COLLECTIVE_S = 2
"""torchft's time-out of a collective: several steps of the model."""


class Step(NamedTuple):
    at_s: float
    number: int
    size: int


def steps(path: Path) -> list[Step]:
    lines = path.read_text().splitlines() if path.exists() else []
    parts = [line.split() for line in lines]
    # The last line may still be in the making.
    return [Step(float(p[0]), int(p[1]), int(p[2])) for p in parts if len(p) == 4]


def ordinary_s(found: list[Step], size: int) -> float:
    """The median step of a world of that size."""
    return statistics.median(b.at_s - a.at_s for a, b in itertools.pairwise(found) if a.size == b.size == size)


def commits(found: list[Step]) -> list[float]:
    """When each step was done: when the next one began for the first time. A step begun again was not done."""
    firsts: dict[int, float] = {}
    for step in found:
        firsts.setdefault(step.number, step.at_s)
    return list(firsts.values())[1:]


def gap_s(found: list[Step], since_s: float) -> float:
    """The longest distance of two commits around a change."""
    return max(b - a for a, b in itertools.pairwise(commits(found)) if b > since_s)


def ours(folder: Path, model: dict[str, str], warm: ForkServer | None, few: int = 2) -> dict[str, float]:
    """One round: what each change cost the one of those who stay whom it cost most."""
    many = few + 1
    found: dict[str, float] = {}
    environment = {**model, "OMP_NUM_THREADS": "1", "STRETTO_CHECKPOINT_S": "1e9"}
    command = [sys.executable, str(SCRIPTS / "elastic_mlp.py")]
    with Harness(folder, command, workers=few, min_workers=few, environment=environment, warm=warm) as harness:
        harness.wait_members(few, LONG_S)

        def seen(member: str) -> list[Step]:
            return steps(folder / f"{member}.steps")

        def more(size: int) -> None:
            before = {member: len(seen(member)) for member in harness.members()}
            harness.wait(
                lambda: all(len([s for s in seen(m)[n:] if s.size == size]) > SETTLE for m, n in before.items()),
                f"steps of {size}",
                LONG_S,
            )

        more(few)
        for name, size in (("grow", many), ("shrink", few), ("again", many), ("kill", few)):
            before = harness.members()
            since_s = time.monotonic()
            if name == "kill":
                harness.worker(before[-1]).kill()
            else:
                harness.want(size)
            harness.wait_members(size, LONG_S)
            more(size)
            stayed = [seen(member) for member in harness.members() if member in before]
            if name == "kill":
                first_s = max(first_commit_s(notes, size, since_s) - ordinary_s(notes, few) for notes in stayed)
                took_s = first_s - since_s
            else:
                took_s = max(gap_s(notes, since_s) - ordinary_s(notes, many) for notes in stayed)
            found[name] = max(0.0, took_s)
    return found


def first_commit_s(found: list[Step], size: int, since_s: float) -> float:
    """When the first step of the new world was done."""
    return commits([step for step in found if step.size == size and step.at_s > since_s])[0]


class Peer:
    """The processes of a peer's job, whose workers note their steps in files named after their process ids."""

    def __init__(self, folder: Path, model: dict[str, str], **environment: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.environment = {**os.environ, **model, **environment, "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
        self.processes: list[subprocess.Popen[bytes]] = []

    def launch(self, command: list[str]) -> None:
        with (self.folder / f"{len(self.processes)}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def notes(self) -> dict[int, list[Step]]:
        return {int(path.stem): steps(path) for path in self.folder.glob("*.steps")}

    def settle(self, size: int, since_s: float, old: set[int]) -> list[list[Step]]:
        """The steps of each worker of a world of that size, once there are some; no worker is one of the old."""
        end_s = time.monotonic() + PEER_S
        while time.monotonic() < end_s:
            new = [notes for pid, notes in self.notes().items() if pid not in old]
            new = [[step for step in notes if step.size == size and step.at_s > since_s] for notes in new]
            new = [notes for notes in new if len(notes) > SETTLE]
            if len(new) == size:
                return new
            time.sleep(0.05)
        raise TimeoutError(f"no world of {size} within {PEER_S:g} s")

    def close(self) -> None:
        """End everything: an agent must not start another worker while its workers are looked up."""
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        workers = [pid for process in self.processes for pid in children(process)]
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(process: subprocess.Popen[bytes]) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if process.poll() is None else []


def torchrun(folder: Path, model: dict[str, str]) -> dict[str, float]:
    """One round: what each change cost, as far as they came to an end."""
    found: dict[str, float] = {}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", *TORCHRUN, f"--rdzv-endpoint=127.0.0.1:{port}",
        str(SCRIPTS / "torchrun_mlp.py"),
    ]  # fmt: skip
    with contextlib.closing(Peer(folder, model, **TORCHRUN_ENVIRONMENT)) as job:

        def grow() -> None:
            job.launch(command)

        def kill() -> None:
            os.kill(children(job.processes[-1])[0], signal.SIGKILL)

        def shrink() -> None:
            job.processes[-1].terminate()

        grow()
        grow()
        job.settle(2, 0.0, set())
        for name, size, act in (("grow", 3, grow), ("kill", 3, kill), ("shrink", 2, shrink)):
            old = set(job.notes())
            since_s = time.monotonic()
            act()
            try:
                new = job.settle(size, since_s, old)
            except TimeoutError as error:
                print(f"torchrun, {name}: {error}")
                return found
            last_s = max(commits(notes)[-1] for pid, notes in job.notes().items() if pid in old)
            began_s = since_s if name == "kill" else last_s
            first_s = min(first_commit_s(notes, size, since_s) for notes in new)
            found[name] = max(0.0, first_s - began_s - ordinary_s(new[0], size))
    return found


def torchft_kill_s(folder: Path, model: dict[str, str], site: Path) -> float:
    """From the death of one of three replicas to the survivors' next commit, less an ordinary step."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"PYTHONPATH": str(site), "LIGHTHOUSE": f"http://127.0.0.1:{port}", "COLLECTIVE_S": str(COLLECTIVE_S)}
    with contextlib.closing(Peer(folder, model, **environment)) as job:
        job.launch([str(site / "bin" / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", *LIGHTHOUSE])
        for _ in range(3):
            job.launch([sys.executable, str(SCRIPTS / "torchft_mlp.py")])
        job.settle(3, 0.0, set())
        victim = job.processes[-1]
        since_s = time.monotonic()
        victim.kill()
        new = job.settle(2, since_s, {victim.pid})
        return max(0.0, min(notes[0].at_s for notes in new) - since_s - ordinary_s(new[0], 2))


def install_torchft(site: Path) -> None:
    """Into a folder of its own, beside the torch that is there."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    telemetry = [f"opentelemetry-{part}" for part in ("api", "sdk", "exporter-otlp-proto-http")]
    subprocess.run([*pip, *telemetry], check=True, stderr=subprocess.DEVNULL)
    subprocess.run([*pip, "--no-deps", "--upgrade", "torchft==0.2.0"], check=True, stderr=subprocess.DEVNULL)


def broadcast_s(elements: int) -> float:
    """A plain broadcast of the same bytes to one other process: the median of five."""
    context = multiprocessing.get_context("spawn")
    stores = [Store(), Store()]
    results: multiprocessing.SimpleQueue[list[float]] = context.SimpleQueue()
    other = context.Process(target=_broadcast, args=(1, [s.address for s in stores], elements, None))
    other.start()
    _broadcast(0, [s.address for s in stores], elements, results)
    other.join()
    for store in stores:
        store.close()
    return statistics.median(results.get())


def _broadcast(
    rank: int, addresses: list[str], elements: int, results: multiprocessing.SimpleQueue[list[float]] | None
) -> None:
    torch.set_num_threads(1)
    group = connect(1, rank, addresses, timeout_s=60.0)
    tensor = torch.zeros(elements)
    taken = []
    for _ in range(6):
        group.all_gather_bytes(b"ready")
        began_s = time.monotonic()
        group.broadcast(tensor, 0).wait()
        group.all_gather_bytes(b"done")
        taken.append(time.monotonic() - began_s)
    if results is not None:
        results.put(taken[1:])
    group.close()


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Where a checkpoint costs torchrun least."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(dir=base))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def shown(values: list[float]) -> str:
    if not values:
        return "none"
    return f"{statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f}, {len(values)} times)"


def seconds(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {found[name]:.3f} s" if name in found else f"{name} none" for name in CHANGES)


def configurations(with_torchft: bool) -> None:
    exports = " ".join(f"{key}={value}" for key, value in TORCHRUN_ENVIRONMENT.items())
    print(f"torchrun: {exports} torchrun {' '.join(TORCHRUN)}; a checkpoint in memory every 10 steps")
    if with_torchft:
        print(
            f"torchft 0.2.0: lighthouse {' '.join(LIGHTHOUSE)}; heartbeat every 100 ms, Gloo, collectives give up after"
            f" {COLLECTIVE_S} s, quorum during the forward pass, gradients by Manager.allreduce (its DDP wrapper fails"
            " an assertion when a peer dies over Gloo)"
        )


def a_round(number: int, folder: Path, model: dict[str, str], warm: ForkServer) -> tuple[dict[str, float], ...]:
    """What each change cost us and torchrun, who goes first every other time."""
    if number % 2:
        theirs = torchrun(folder / f"torchrun-{number}", model)
        return ours(folder / f"ours-{number}", model, warm), theirs
    mine = ours(folder / f"ours-{number}", model, warm)
    return mine, torchrun(folder / f"torchrun-{number}", model)


def figure(name: str, pairs: list[tuple[dict[str, float], ...]], limit_s: float) -> dict[str, Any]:
    """Of one change: ours and the peer's from least to greatest with the median between, and whether that is enough."""
    mine = [one[name] for one, _ in pairs]
    theirs = [other.get(name, PEER_S) for _, other in pairs]
    bound = any(name not in other for _, other in pairs)
    more = f" (or more: not every time within {PEER_S:g} s)" if bound else ""
    print(f"{name:8} ours {shown(mine)}; torchrun {shown(theirs)}{more}; at most {limit_s:.3f} s")
    ratio = statistics.median(theirs) / max(statistics.median(mine), 1e-3)
    return {
        "ours_s": [round(value, 4) for value in interval(mine)],
        "peer_s": [round(value, 3) for value in interval(theirs)],
        "ratio": round(ratio, 1),
        "limit_s": round(limit_s, 3),
        "peer_at_least": bound,
        "ok": statistics.median(mine) <= limit_s and ratio >= RATIO,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--torchft", action="store_true", help="beside it for the kill; installs it into a new folder")
    options = parser.parse_args()
    model = {"WIDTH": str(options.width), "LAYERS": str(options.layers)}
    parameters = options.layers * (options.width + 1) * options.width
    print(f"{machine()}; all workers share them")
    print(f"{parameters:,} parameters, {2 * 4 * parameters / 2**20:.0f} MiB of state, torch {torch.__version__}")
    configurations(options.torchft)
    pairs: list[tuple[dict[str, float], ...]] = []
    plain: list[float] = []
    torchft: list[float] = []
    with (
        memory_folder() as folder,
        ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch")) as warm,
    ):
        warm.wait_ready()
        if options.torchft:
            install_torchft(folder / "site")
        for number in range(options.rounds):
            plain.append(broadcast_s(2 * parameters))
            one, other = a_round(number, folder, model, warm)
            pairs.append((one, other))
            print(
                f"round {number + 1}: a broadcast {plain[-1]:.3f} s; ours {seconds(one)}; torchrun {seconds(other)}",
                flush=True,
            )
            if options.torchft:
                try:
                    torchft.append(torchft_kill_s(folder / f"torchft-{number}", model, folder / "site"))
                except TimeoutError as error:
                    print(f"torchft: {error}")
    print(f"a plain broadcast of the state: {shown(plain)}")
    planned_s = 0.05 + statistics.median(plain)
    figures = {name: figure(name, pairs, 0.5 if name == "kill" else planned_s) for name in CHANGES}
    if options.torchft:
        print(f"kill     torchft {shown(torchft)}: {', '.join(f'{value:.3f}' for value in torchft)}")
    least = min(figures.values(), key=lambda found: found["ratio"])
    report(
        "elastic_resize",
        ours=least["ours_s"][1],
        peer=least["peer_s"][1],
        ratio=least["ratio"],
        unit="s; of the change where the ratio is least",
        goal=f"every change within its limit and {RATIO} times sooner than the peer",
        ok=all(found["ok"] for found in figures.values()),
        changes=figures,
        torchft_kill_s=[round(value, 3) for value in interval(torchft)] if torchft else None,
        rounds=options.rounds,
        machine=machine(),
    )


if __name__ == "__main__":
    main()
