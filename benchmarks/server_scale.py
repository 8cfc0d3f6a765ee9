"""10,000 queued jobs: how long a submission, a list and a scheduling pass take then, and what memory that needs.

The only node is drained, so that all of them wait; they come in through the API, half of them named (every name is a
class of its own to the estimates) and half of few commands. Then, one call at a time over one connection: submissions,
and lists of a page with and without filters, from the first byte sent to the last one read. A pass is asked for by a
submission, or by taking the node into use and leaving it again (a few jobs really start then, and stop); its time is
what the server says of it, `decision_s` of `/v1/cluster`: snapshot, policy, placement, verdicts.

    python benchmarks/server_scale.py [--jobs 10000] [--calls 300] [--passes 80]
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from _measure import interval, machine
from _server import Server, serving, until
from _verdict import report
from stretto.client import Client

GOAL_S, MOST_MB, MOST_IDLE_MB = 0.1, 500.0, 200.0
CLIENTS = 8
LISTS: dict[str, dict[str, object]] = {
    "a page": {},
    "queued, oldest first": {"phase": "queued", "order": "oldest"},
    "by name": {"name": "job-of-team-7*"},
    "by label": {"labels": {"team": "t7"}},
    "by user and level": {"user": "nobody", "level": "elastic"},
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=10_000)
    options.add_argument("--calls", type=int, default=300, help="of each kind")
    options.add_argument("--passes", type=int, default=80)
    given = options.parse_args()
    print(f"{machine()}\npeer: none; the goals are absolute")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), "--nodes", "1x4", "--cold") as server:
        server.drain()
        idle_mb = server.memory_mb()
        print(f"idle: {idle_mb:.0f} MB, ready after {server.ready_after_s:.1f} s")
        began_s = time.monotonic()
        fill(server, given.jobs)
        print(f"{given.jobs} jobs submitted in {time.monotonic() - began_s:.1f} s by {CLIENTS} clients")
        with server.client() as client:
            until(lambda: client.cluster().jobs["queued"] >= given.jobs, "the queue")
            measure(server, client, given.calls, given.passes, idle_mb)


def fill(server: Server, jobs: int) -> None:
    def some(first: int) -> None:
        with server.client() as client:
            for number in range(first, jobs, CLIENTS):
                client.submit(job(number), cwd="/tmp", env={})

    threads = [threading.Thread(target=some, args=(first,)) for first in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def job(number: int, name: str = "") -> dict[str, object]:
    team = number % 50
    named = {"name": f"job-of-team-{team}-{number}"} if number % 2 else {}
    return {
        **named,
        **({"name": name} if name else {}),
        "run": f"sleep {1000 + team}",
        "elastic": {"min": 1 + number % 2, "max": 2 + number % 3},
        "priority": 40 + number % 20,
        "labels": {"team": f"t{team}"},
    }


def measure(server: Server, client: Client, calls: int, passes: int, idle_mb: float) -> None:
    submits = [took_s(lambda i=i: client.submit(job(i, f"late-{i}"), cwd="/tmp", env={})) for i in range(calls)]  # type: ignore[misc]
    verdict("server_scale_submit", "submission", submits)
    lists: list[float] = []
    for name, filters in LISTS.items():
        times = [took_s(lambda f=filters: page(client, f)) for _ in range(calls)]  # type: ignore[misc]
        lists += times
        told(f"list: {name}", times)
    verdict("server_scale_list", "list of 100 jobs", lists)
    busy(client, calls)
    decisions(server, client, passes)
    memory(server, idle_mb)


def took_s(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def page(client: Client, filters: dict[str, object]) -> None:
    list(client.jobs(limit=100, **filters))  # type: ignore[arg-type]


def busy(client: Client, calls: int) -> None:
    """The same lists while the queue grows and passes follow each other."""
    with submitting(client):
        told("list, passes running", [took_s(lambda: page(client, {})) for _ in range(calls)])


@contextmanager
def submitting(client: Client) -> Iterator[None]:
    over = threading.Event()

    def more() -> None:
        number = 0
        while not over.is_set():
            client.submit(job(0, f"more-{(number := number + 1)}"), cwd="/tmp", env={})
            over.wait(0.02)

    thread = threading.Thread(target=more)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def decisions(server: Server, client: Client, passes: int) -> None:
    """When a job has come; and when the node has come or gone."""
    waiting = [decision_s(client, lambda i=i: client.submit(job(i, f"pass-{i}"))) for i in range(passes)]  # type: ignore[misc]
    told("pass, node drained", waiting)
    placing = []
    for _ in range(passes // 5):
        placing.append(decision_s(client, server.undrain))
        placing.append(decision_s(client, server.drain))
    told("pass, node comes, goes", placing)
    verdict("server_scale_pass", "scheduling pass", waiting + placing)


def decision_s(client: Client, ask: Callable[[], object]) -> float:
    """Of the first decision that began after the last one was over."""
    before = quiet(client)
    ask()
    # Whoever looks often slows it down.
    return until(lambda: (now := client.cluster()).decisions > before and now.decision_s, "a decision", every_s=0.1)


def quiet(client: Client) -> int:
    """How many decisions there were when no more came for a while."""
    count = -1
    while count != (now := client.cluster().decisions):
        count = now
        time.sleep(0.3)
    return int(count)


def memory(server: Server, idle_mb: float) -> None:
    full_mb, most_mb = server.memory_mb(), server.memory_mb("VmHWM")
    print(f"memory: {idle_mb:.0f} MB idle, {full_mb:.0f} MB now, {most_mb:.0f} MB at most")
    report(
        "server_scale_memory",
        ours=round(most_mb, 1),
        peer=None,
        ratio=None,
        unit="MB resident in the server at most",
        goal=f"below {MOST_MB:g}, idle below {MOST_IDLE_MB:g}",
        ok=most_mb < MOST_MB and idle_mb < MOST_IDLE_MB,
        idle=round(idle_mb, 1),
    )


def told(name: str, times: Sequence[float]) -> None:
    low, middle, high = interval(times)
    print(
        f"{name:28} median {middle * 1e3:6.1f} ms, {low * 1e3:.1f} to {high * 1e3:.1f}; "
        f"p99 {p99(times) * 1e3:6.1f} ms, most {max(times) * 1e3:.1f} ms of {len(times)}"
    )


def verdict(name: str, what: str, times: Sequence[float]) -> None:
    told(what, times)
    report(
        name,
        ours=round(p99(times) * 1e3, 1),
        peer=None,
        ratio=None,
        unit=f"ms, p99 of a {what} with 10,000 queued jobs",
        goal=f"below {GOAL_S * 1e3:g}",
        ok=p99(times) < GOAL_S,
        median=round(statistics.median(times) * 1e3, 2),
        count=len(times),
    )


def p99(times: Sequence[float]) -> float:
    return sorted(times)[math.ceil(0.99 * len(times)) - 1]


if __name__ == "__main__":
    main()
