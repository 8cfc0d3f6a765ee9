"""When does a tiny script finish its first optimizer step: forked from a warm interpreter, and as `python script.py`?

Both are started by `launch` in turns (every other time the plain one first), and measured from the call to the moment
the script writes the clock after its first step. The fork server has been started before, as on a node that is up; its
own start is printed beside.

    python benchmarks/first_step.py [--rounds 7] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from _measure import interval, machine
from _verdict import report
from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch

GOAL = 5.0

SCRIPT = """
import sys, time
import torch

device = sys.argv[1]
model = torch.nn.Linear(64, 10).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(32, 64, device=device), torch.zeros(32, dtype=torch.long, device=device)
loss = torch.nn.functional.cross_entropy(model(x), y)
loss.backward()
optimizer.step()
loss.item()
print(time.monotonic())
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    print(f"{machine()}; torch {version('torch')}")
    print("peer: python script.py in the same environment, its files in the page cache, its bytecode compiled")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), given.device]
        began_s = time.monotonic()
        with ForkServer(cache=Path(folder)) as server:
            if not server.wait_ready():
                sys.exit(f"no fork server: {server.failure}")
            print(f"fork server ready after {time.monotonic() - began_s:.2f} s with {server.modules} modules")
            first_step_s(command, server, folder)  # Once each unmeasured: files come from disk the first time.
            first_step_s(command, None, folder)
            pairs = [pair(number, command, server, folder) for number in range(given.rounds)]
    verdict(pairs, given.device)


def pair(number: int, command: list[str], server: ForkServer, folder: str) -> tuple[float, float]:
    """Forked and plain; who goes first every other time."""
    if number % 2:
        plain_s = first_step_s(command, None, folder)
        return first_step_s(command, server, folder), plain_s
    forked_s = first_step_s(command, server, folder)
    return forked_s, first_step_s(command, None, folder)


def first_step_s(command: list[str], server: ForkServer | None, folder: str) -> float:
    log = Path(folder, "log")
    log.unlink(missing_ok=True)
    began_s = time.monotonic()
    with launch(command, log=log, warm=server) as process:
        status = process.wait(120.0)
    if status != 0 or process.how != ("plain" if server is None else "forked"):
        sys.exit(f"the script ended with {status}, {process.how} ({process.why}):\n{log.read_text()}")
    return float(log.read_text().split()[-1]) - began_s


def verdict(pairs: list[tuple[float, float]], device: str) -> None:
    forked, plain = ([pair[side] for pair in pairs] for side in (0, 1))
    for name, times in (("forked", forked), ("python script.py", plain)):
        print(f"{name:17} median {statistics.median(times):6.3f} s, {min(times):.3f} to {max(times):.3f}")
    low, ratio, high = interval([theirs / ours for ours, theirs in pairs])
    print(f"ratio             median {ratio:6.2f}, {low:.2f} to {high:.2f}")
    report(
        "first_step",
        ours=round(statistics.median(forked), 4),
        peer=round(statistics.median(plain), 4),
        ratio=round(ratio, 2),
        unit="s from launch to the end of the first optimizer step",
        goal=f"ratio >= {GOAL}",
        ok=ratio >= GOAL,
        interval=[round(low, 2), round(high, 2)],
        rounds=len(pairs),
        device=device,
        machine=machine(),
    )


if __name__ == "__main__":
    main()
