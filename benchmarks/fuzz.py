"""Fuzz the API of a real server for a while: histories of requests made from its own description, each history with
another seed.

    python benchmarks/fuzz.py --minutes 30

No answer may be a 5xx, none may be other than described, none may take long; the server's log has no traceback, and
what the server holds is bounded. It prints what was asked, and every failure once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from _server import Server
from _verdict import report
from stretto.testing.api_fuzzing import LONGEST_S, Tally, play

_HISTORIES, _STEPS = 25, 15
_MOST_MIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), "--nodes", "1x4", "--cold")
        server.start()
        try:
            fuzz(server, options.minutes * 60, options.seed)
        finally:
            server.stop()


def fuzz(server: Server, seconds: float, seed: int) -> None:
    tally, rounds = Tally(), 0
    pid, first_mib, until_s = _pid(server), 0, time.monotonic() + seconds
    while time.monotonic() < until_s:
        play(server.url, server.token, tally, histories=_HISTORIES, steps=_STEPS, seed=seed + rounds)
        rounds += 1
        first_mib = first_mib or _mib(pid)
    log = (server.data / "server.log").read_text() if (server.data / "server.log").exists() else ""
    log += server._log.read_text()
    failures = Counter(tally.failures)
    for text, times in failures.most_common():
        print(f"-- {times} times\n{text}\n")
    by_status = Counter[int]()
    for (_, status), count in tally.answers.items():
        by_status[status] += count
    operations = len({operation for operation, _ in tally.answers})
    print(f"{tally.requests} requests of {operations} operations, {tally.linked} of them made of earlier answers")
    print("answers:", ", ".join(f"{status}: {count}" for status, count in sorted(by_status.items())))
    last_mib = _mib(pid)
    print(f"slowest: {tally.slowest_s * 1000:.0f} ms ({tally.slowest}); memory {first_mib} MiB, {last_mib} MiB at last")
    bad = sum(count for status, count in by_status.items() if status >= 500)
    calm = "Traceback" not in log and tally.slowest_s < LONGEST_S and last_mib < _MOST_MIB
    report(
        "fuzz",
        ours=bad + len(failures),
        peer=None,
        ratio=None,
        unit="failures",
        goal="no 5xx, no answer that is not described, no traceback, none slower than 30 s, below 1 GiB",
        ok=not failures and not bad and calm,
        requests=tally.requests,
        linked=tally.linked,
        rounds=rounds,
        cut_short=tally.cut_short,
        seconds=round(seconds),
        tracebacks=log.count("Traceback"),
    )


def _pid(server: Server) -> int:
    assert server._process is not None
    return server._process.pid


def _mib(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 >> 20


if __name__ == "__main__":
    main()
