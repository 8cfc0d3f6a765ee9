"""`kill -9` at any moment: whatever was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from places import Opener, Place

from stretto.jobs import events as e

_HUNG_S = 60.0

WRITES = """
import sys, threading, time
sys.path.insert(0, sys.argv[3])
from histories import after, follow, job, submission
from stretto.jobs import events as e
from stretto.store import Store

store = Store.open(sys.argv[1], clock=time.time)
lock, number = threading.Lock(), store.load().next_number

def write(seed):
    global number
    while True:
        with lock:
            mine, number = number, number + 1
        first = job(mine, labels={"round": sys.argv[2]})
        told = [submission(first, f"key{mine}", "d"), *follow(first, e.Scaled(min_workers=2, max_workers=3, by="x"))]
        store.append(told).result()
        sys.stdout.write(f"{mine} 2\\n")
        sys.stdout.flush()
        more = follow(after(told), e.Wished(wish="suspend", by="x"), e.Wished(wish="run", by="x"), at_s=2000.0)
        store.append(more).result()
        sys.stdout.write(f"{mine} 4\\n")
        sys.stdout.flush()

for seed in range(4):
    threading.Thread(target=write, args=(seed,), daemon=True).start()
sys.stdout.write("0 0\\n")
sys.stdout.flush()
threading.Event().wait()
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_writer_killed_at_any_moment(place: Place, opened: Opener, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged: dict[int, int] = {}
    for turn in range(6):
        _write_and_die(place, str(turn), rng.randrange(1, 120), rng, acknowledged)
        store = opened(place)
        assert store.verify() == []
        _check(store.events(limit=100_000), acknowledged)
        store.close()
    assert len(acknowledged) > 6


def _write_and_die(place: Place, turn: str, lines: int, rng: random.Random, acknowledged: dict[int, int]) -> None:
    folder = str(Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, place.url, turn, folder], stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout is not None
    # One that hangs is killed too, and then its lines end too early.
    deadline = threading.Timer(_HUNG_S, process.kill)
    deadline.start()
    try:
        for _ in range(lines):
            _note(process.stdout.readline(), acknowledged)
        # So many more instructions, whatever they are.
        for _ in range(rng.randrange(200_000)):
            pass
    finally:
        deadline.cancel()
        deadline.join()
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
        process.stdout.close()
        assert process.wait(60) == -signal.SIGKILL
    # What was in the pipe had been acknowledged as well; the last line may be torn.
    for line in rest.splitlines(keepends=True):
        if line.endswith("\n"):
            _note(line, acknowledged)


def _note(line: str, acknowledged: dict[int, int]) -> None:
    assert line.endswith("\n"), "the writer ended by itself"
    number, events = map(int, line.split())
    if number:
        acknowledged[number] = max(events, acknowledged.get(number, 0))


def _check(told: list[e.Recorded], acknowledged: dict[int, int]) -> None:
    assert [each.seq for each in told] == list(range(1, len(told) + 1))
    stored: dict[int, int] = {}
    for each in told:
        assert each.job is not None
        stored[each.job] = stored.get(each.job, 0) + 1
    assert set(stored.values()) <= {2, 4}, "half an append"
    assert not {number: n for number, n in acknowledged.items() if stored.get(number, 0) < n}
