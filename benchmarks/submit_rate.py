"""Durable submissions per second: 8 clients that keep their connection, beside 8 loops of Slurm's `sbatch`.

Both sides take in the same number of jobs in every round, in turns, on the same machine, and neither starts any of
them: our only node is drained (the policy is still asked about every one of them), Slurm's jobs are held. An answer of
ours means that the job is on the disk (SQLite, WAL, synchronous=FULL); Slurm's that it is in memory, its state is saved
a little later. Each side is measured when the other one has come to rest. Our clients send a job file of JSON with an
idempotency key, as `stretto.client` does, over a plain socket each, from processes of their own; `sbatch` has no other
way in than a process per job.

Then the two command lines beside each other, one call at a time: `stretto submit FILE` and `sbatch FILE`, `stretto ps`
and `squeue`, wall-clock time and CPU time of the process.

    python benchmarks/submit_rate.py [--rounds 5] [--jobs 1000]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from _measure import interval, machine, wait_until_idle
from _server import Server, serving
from _slurm import INSTALL, Slurm
from _verdict import report

CLIENTS = 8
GOAL, AIM = 3.0, 5.0
PS_CPU_S = 0.35
CALLS = 7

JOB = {
    "name": "train-{number}",
    "run": "python train.py --epochs 10",
    "elastic": {"min": 1, "max": 4},
    "resources": {"gpu": 1, "cpu": 1},
    "priority": 50,
    "env": {"LR": "0.1"},
    "hyperparameters": {"epochs": 10, "batch": 256},
    "labels": {"team": "vision"},
}
YAML = "run: python train.py --epochs 10\nelastic: {min: 1, max: 4}\nresources: {gpu: 1, cpu: 1}\nenv: {LR: 0.1}\n"
BATCH = (
    "#!/bin/sh\n#SBATCH --job-name=train\n#SBATCH --ntasks=1\n#SBATCH --cpus-per-task=1\npython train.py --epochs 10\n"
)


class Call(NamedTuple):
    """One run of a program."""

    wall_s: float
    cpu_s: float


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--jobs", type=int, default=1000, help="on each side, in each round")
    given = options.parse_args()
    print(machine())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        slurm = _peer(stack, folder)
        server = stack.enter_context(serving(folder, "--nodes", "1x4", "--cold"))
        server.drain()
        measure(given.rounds, given.jobs, folder, server, slurm)


def _peer(stack: ExitStack, folder: Path) -> Slurm | None:
    if missing := Slurm.missing():
        print(f"peer: Slurm is not installed here ({', '.join(missing)} missing; {INSTALL}): ours alone")
        return None
    (folder / "job.sh").write_text(BATCH)
    slurm = stack.enter_context(Slurm())
    print(f"peer: {slurm.version}, {slurm.about}; sbatch --hold")
    return slurm


def measure(rounds: int, jobs: int, folder: Path, server: Server, slurm: Slurm | None) -> None:
    (folder / "job.yaml").write_text(YAML)
    ours, theirs, server_cpu_s = [], [], []
    submit_rate(server, CLIENTS, 0)  # Once each unmeasured.
    if slurm is not None:
        sbatch_rate(slurm, CLIENTS, folder)
    for number in range(1, rounds + 1):
        if slurm is not None:
            wait_until_idle(slurm.cpu_s)
        before_s = server.cpu_s()
        ours.append(submit_rate(server, jobs, number))
        server_cpu_s.append((server.cpu_s() - before_s) / jobs)
        if slurm is not None:
            wait_until_idle(server.cpu_s)
            theirs.append(sbatch_rate(slurm, jobs, folder))
    told("stretto, 8 clients", ours, "submissions/s")
    print(
        f"CPU of the server: {statistics.median(server_cpu_s) * 1e3:.2f} ms per submission, scheduling passes included"
    )
    told("sbatch, 8 loops", theirs, "submissions/s")
    command_line(folder, server, slurm)
    low, ratio, high = interval([a / b for a, b in zip(ours, theirs, strict=True)]) if theirs else (0.0, 0.0, 0.0)
    if theirs:
        print(f"ratio                median {ratio:8.2f}, {low:.2f} to {high:.2f}; aim {AIM:g}")
    report(
        "submit_rate",
        ours=round(statistics.median(ours), 1),
        peer=round(statistics.median(theirs), 1) if theirs else None,
        ratio=round(ratio, 2) if theirs else None,
        unit="durable submissions per second with 8 clients",
        goal=f"ratio >= {GOAL}",
        ok=ratio >= GOAL if theirs else None,
        interval=[round(low, 2), round(high, 2)] if theirs else None,
        rounds=rounds,
        jobs_per_round=jobs,
        machine=machine(),
    )


def told(name: str, values: list[float], unit: str) -> None:
    if values:
        low, middle, high = interval(values)
        print(f"{name:20} median {middle:8.1f} {unit}, {low:.1f} to {high:.1f}")


# Ours.


def submit_rate(server: Server, jobs: int, number: int) -> float:
    """Jobs per second from the moment that all clients are connected to the last answer."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(CLIENTS + 1)
    bodies = [_requests(server, number, client, jobs // CLIENTS) for client in range(CLIENTS)]
    clients = [context.Process(target=_client, args=(server.url, barrier, some)) for some in bodies]
    for client in clients:
        client.start()
    barrier.wait(30)
    began_s = time.monotonic()
    for client in clients:
        client.join(120)
    took_s = time.monotonic() - began_s
    if any(client.exitcode for client in clients):
        sys.exit("a client did not get the answer that it should")
    return jobs // CLIENTS * CLIENTS / took_s


def _requests(server: Server, number: int, client: int, count: int) -> list[bytes]:
    """Whole requests, made before the clock runs."""
    made = []
    for i in range(count):
        name = f"r{number}-c{client}-{i}"
        body = json.dumps({"job": {**JOB, "name": name}, "cwd": "/tmp", "env": {"LANG": "C.UTF-8"}}).encode()
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\nAuthorization: Bearer {server.token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nIdempotency-Key: {name}\r\n\r\n"
        )
        made.append(head.encode() + body)
    return made


def _client(url: str, barrier: Barrier, requests: list[bytes]) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        barrier.wait(30)
        for request in requests:
            connection.sendall(request)
            answer = _answer(connection)
            if not answer.startswith(b"HTTP/1.1 201"):
                sys.exit(answer.decode(errors="replace"))


def _answer(connection: socket.socket) -> bytes:
    """One response with a content-length, to its end."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _more(connection)
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += _more(connection)
    return head + body


def _more(connection: socket.socket) -> bytes:
    if not (data := connection.recv(65536)):
        sys.exit("the server closed the connection")
    return data


# Theirs.


def sbatch_rate(slurm: Slurm, jobs: int, folder: Path) -> float:
    loop = f"for i in $(seq {jobs // CLIENTS}); do sbatch --quiet --hold --parsable job.sh >/dev/null || exit 1; done"
    began_s = time.monotonic()
    loops = [subprocess.Popen(["bash", "-c", loop], env=slurm.environment, cwd=folder) for _ in range(CLIENTS)]
    codes = [one.wait(200) for one in loops]
    took_s = time.monotonic() - began_s
    if any(codes):
        sys.exit("sbatch failed")
    return jobs // CLIENTS * CLIENTS / took_s


# One call at a time.


def command_line(folder: Path, server: Server, slurm: Slurm | None) -> None:
    stretto = [str(Path(sys.executable).with_name("stretto"))]
    pairs = [
        ("submit", [*stretto, "submit", "job.yaml"], ["sbatch", "--hold", "job.sh"]),
        ("list", [*stretto, "ps"], ["squeue", "--noheader"]),
    ]
    for what, ours, theirs in pairs:
        sides: list[tuple[list[str], dict[str, str]]] = [(ours, server.environment)]
        if slurm is not None:
            sides.append((theirs, slurm.environment))
        calls = in_turns([lambda c=c, e=e: call(c, e, folder) for c, e in sides])  # type: ignore[misc]
        for (command, _), made in zip(sides, calls, strict=True):
            name = " ".join([os.path.basename(command[0]), *command[1:]])
            wall, cpu = interval([one.wall_s for one in made]), interval([one.cpu_s for one in made])
            print(
                f"{name:24} wall median {wall[1]:.3f} s, {wall[0]:.3f} to {wall[2]:.3f}; "
                f"CPU median {cpu[1]:.3f} s, {cpu[0]:.3f} to {cpu[2]:.3f}"
            )
        _verdict(what, calls)


def _verdict(what: str, calls: list[list[Call]]) -> None:
    """CPU time is what a loaded machine does not change much; wall-clock time is in the lines above and beside it."""
    cpu_s = [statistics.median(one.cpu_s for one in made) for made in calls]
    wall_s = [statistics.median(one.wall_s for one in made) for made in calls]
    report(
        f"submit_rate_cli_{what}",
        ours=round(cpu_s[0], 4),
        peer=round(cpu_s[1], 4) if len(cpu_s) > 1 else None,
        ratio=round(cpu_s[1] / cpu_s[0], 3) if len(cpu_s) > 1 else None,
        unit="s of CPU for one call",
        goal=f"ours < {PS_CPU_S}" if what == "list" else "none: shown beside each other",
        ok=cpu_s[0] < PS_CPU_S if what == "list" else None,
        wall_s=[round(one, 4) for one in wall_s],
    )


def in_turns(ways: list[Callable[[], Call]]) -> list[list[Call]]:
    """Every way as often as the others, one after the other; once each unmeasured."""
    for way in ways:
        way()
    rounds = [[way() for way in ways] for _ in range(CALLS)]
    return [[made[side] for made in rounds] for side in range(len(ways))]


def call(command: list[str], environment: dict[str, str], folder: Path) -> Call:
    """CPU is that of the process and of all whose end it waited for."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr as stderr:
        words = stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: {words.decode()}")
    return Call(time.monotonic() - began_s, used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    main()
