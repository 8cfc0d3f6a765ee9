"""How long it takes from a submission to the first step, and from a job's end to the first step on its slots.

*Reaction.* From a submission to its launch and from a cancellation to the signal, by the server's events.

*Submission.* The same script with one optimizer step is started in turns in three ways, and measured from the call to
the moment after its step: as a job of a running server (from `Client.submit`: durable, scheduled, launched, joined),
forked from a warm interpreter by the runtime alone (`benchmarks/first_step.py`), and as `python train.py` by hand.
Server and fork servers are up and have run the script once. Outside the server the script is a world of one.

*Freed slots.* A training job ends on a full machine of two slots, measured from the end of the loop of its last worker
(its interpreter has still to go) to the end of the first step of the workers that get its slots: those of a job that
waited because its minimum did not fit, and the one by which a running job grows.

    python benchmarks/server_latency.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from _measure import interval, machine
from _server import serving, until
from _verdict import report
from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.client import Client

SCRIPT = Path(__file__).parent / "scripts" / "first_step.py"
REACTION_S, MORE_S, FREED_S = 0.05, 0.15, 1.0
FOR_EVER = 1_000_000


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    print(f"{machine()}; torch {version('torch')}")
    print("peers: the runtime's fork server without a control plane; python train.py, its files in the page cache")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        with serving(folder, "--nodes", "1x2") as server, ForkServer(cache=folder) as warm, server.client() as client:
            if not warm.wait_ready():
                sys.exit(f"no fork server: {warm.failure}")
            reaction(client, given.rounds)
            submission(client, warm, folder, given.rounds)
            freed(client, folder, given.rounds)


# From what happens to what is done about it.


def reaction(client: Client, rounds: int) -> None:
    """By the server's own events: from a submission to its launch, and from a cancellation to the worker's signal."""
    times = {"submission to launch": [], "cancellation to signal": []}  # type: dict[str, list[float]]
    for _ in range(rounds):
        job = client.submit({"run": ["sleep", "60"]}, cwd="/")
        until(lambda number=job.number: any(one["pid"] for one in client.job(number).workers), "a process")
        client.cancel(job)
        client.wait(job, timeout_s=60)
        at_s = {event.kind: event.at_s for event in reversed(client.events(job))}
        times["submission to launch"].append(at_s["launched"] - at_s["submitted"])
        times["cancellation to signal"].append(at_s["leaving"] - at_s["wished"])
    for name, some in times.items():
        told(name, some)
    report(
        "server_latency_reaction",
        ours=max(ms(some) for some in times.values()),
        peer=None,
        ratio=None,
        unit="ms from a submission to its launch, or a cancellation to the signal (the slower)",
        goal=f"below {REACTION_S * 1e3:g}",
        ok=all(statistics.median(some) < REACTION_S for some in times.values()),
        most=round(max(max(some) for some in times.values()) * 1e3, 1),
        rounds=rounds,
    )


# From a submission to the first step.


def submission(client: Client, warm: ForkServer, folder: Path, rounds: int) -> None:
    ways: dict[str, Callable[[Path], float]] = {
        "through the server": lambda place: through_server(client, place),
        "fork server alone": lambda place: by_launch(place, warm),
        "python train.py": lambda place: by_launch(place, None),
    }
    for way in ways.values():  # Once each unmeasured.
        way(fresh(folder / "place"))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        turn = list(ways)[number % 3 :] + list(ways)[: number % 3]
        for name in turn:
            times[name].append(ways[name](fresh(folder / "place")))
    for name, some in times.items():
        told(name, some)
    ours, forked, plain = times.values()
    more_s = [mine - theirs for mine, theirs in zip(ours, forked, strict=True)]
    told("more than fork alone", more_s)
    report(
        "server_latency_warm",
        ours=ms(ours),
        peer=ms(forked),
        ratio=round(statistics.median(forked) / statistics.median(ours), 3),
        unit="ms from submission to the end of the first step; the peer is the runtime's own warm start",
        goal=f"at most {MORE_S * 1e3:g} ms more",
        ok=statistics.median(more_s) <= MORE_S,
        more=ms(more_s),
        rounds=rounds,
    )
    low, ratio, high = interval([theirs / mine for mine, theirs in zip(ours, plain, strict=True)])
    report(
        "server_latency_hand",
        ours=ms(ours),
        peer=ms(plain),
        ratio=round(ratio, 2),
        unit="ms from submission to the end of the first step; the peer is python train.py by hand",
        goal="ratio > 1",
        ok=ratio > 1,
        interval=[round(low, 2), round(high, 2)],
        rounds=rounds,
    )


def through_server(client: Client, place: Path) -> float:
    began_s = time.monotonic()
    job = client.submit(training(place, 1, low=1, high=1), cwd=place)
    ended = client.wait(job, timeout_s=60)
    if ended.phase != "succeeded":
        sys.exit(f"the job {ended.phase}: {ended.message}\n{client.logs(job)}")
    return noted(place, "w0.first") - began_s


def by_launch(place: Path, warm: ForkServer | None) -> float:
    began_s = time.monotonic()
    with launch([sys.executable, str(SCRIPT), str(place), "1"], log=place / "log", warm=warm) as process:
        status = process.wait(60.0)
    if status != 0 or process.how != ("plain" if warm is None else "forked"):
        sys.exit(f"the script ended with {status}, {process.how} ({process.why}):\n{(place / 'log').read_text()}")
    return noted(place, "alone.first") - began_s


# From a job's end to the first step on its slots.


def freed(client: Client, folder: Path, rounds: int) -> None:
    times = {"a waiting job starts": [], "a running job grows": []}  # type: dict[str, list[float]]
    for number in range(rounds + 1):
        found = waiting_starts(client, folder), running_grows(client, folder)
        for some, one in zip(times.values(), found, strict=True):
            if number:  # The first is not measured.
                some.append(one)
    for name, some in times.items():
        told(name, some)
    worst = max(times.values(), key=statistics.median)
    report(
        "server_latency",
        ours=ms(worst),
        peer=None,
        ratio=None,
        unit="ms from a job's end to the first step of those who get its slots (the slower of two kinds)",
        goal=f"below {FREED_S * 1e3:g}",
        ok=all(statistics.median(some) < FREED_S for some in times.values()),
        most=round(max(max(some) for some in times.values()) * 1e3, 1),
        rounds=rounds,
        machine=machine(),
    )


def waiting_starts(client: Client, folder: Path) -> float:
    """Both slots taken by one job, another waits for both."""
    first, second = fresh(folder / "first"), fresh(folder / "second")
    holder = client.submit(training(first, FOR_EVER, low=2, high=2), cwd=first)
    stepped(first, 2)
    waiter = client.submit(training(second, FOR_EVER, low=2, high=2), cwd=second)
    until(lambda: client.why(waiter).reason != "new", "a decision about the one that waits")
    end_s = end(client, holder, first)
    newcomer_s = stepped(second, 2)
    end(client, waiter, second)
    return newcomer_s - end_s


def running_grows(client: Client, folder: Path) -> float:
    """One slot each; when the one ends, the other grows from one worker to two."""
    first, second = fresh(folder / "first"), fresh(folder / "second")
    holder = client.submit(training(first, FOR_EVER, low=1, high=1), cwd=first)
    stepped(first, 1)
    grower = client.submit(training(second, FOR_EVER, low=1, high=2), cwd=second)
    stepped(second, 1)
    end_s = end(client, holder, first)
    newcomer_s = stepped(second, 2)
    end(client, grower, second)
    return newcomer_s - end_s


def training(place: Path, epochs: int, *, low: int, high: int) -> dict[str, object]:
    return {
        "run": [sys.executable, str(SCRIPT), str(place), str(epochs)],
        "elastic": {"min": low, "max": high},
    }


def fresh(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place


def stepped(place: Path, workers: int) -> float:
    """When so many workers have had their first step: the time of the last one."""
    found = until(
        lambda: len(some := list(place.glob("w*.first"))) >= workers and some, f"{workers} workers that train"
    )
    return max(float(path.read_text()) for path in found)


def end(client: Client, job: object, place: Path) -> float:
    """Let it end; the end of its last worker's loop."""
    (place / "end").touch()
    ended = client.wait(job, timeout_s=60)  # type: ignore[arg-type]
    if ended.phase != "succeeded":
        sys.exit(f"the job {ended.phase}: {ended.message}\n{client.logs(ended)}")
    return max(float(path.read_text()) for path in place.glob("w*.last"))


def noted(place: Path, name: str) -> float:
    return float((place / name).read_text())


def told(name: str, times: Sequence[float]) -> None:
    low, middle, high = interval(times)
    print(f"{name:22} median {middle * 1e3:7.1f} ms, {low * 1e3:.1f} to {high * 1e3:.1f}; most {max(times) * 1e3:.1f}")


def ms(times: Sequence[float]) -> float:
    return round(statistics.median(times) * 1e3, 1)


if __name__ == "__main__":
    main()
