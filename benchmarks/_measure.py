"""What measurements share: the name of the machine, and the interval of a median."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def machine() -> str:
    """Processor, cores that may be used, system and interpreter."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return (
        f"{names[0] if names else platform.processor()} ({platform.machine()}), {cores} cores, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    )


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the order statistics that enclose the true one with 95 % (sign test; of fewer than 6 values
    these are the least and the greatest, and enclose it with less)."""
    ordered = sorted(values)
    count = len(ordered)
    outside, rank = 0.0, 0
    while rank < (count - 1) // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 0.05:
            break
        rank += 1
    rank = max(0, rank - 1)
    return ordered[rank], statistics.median(ordered), ordered[count - 1 - rank]


def cpu_s(pid: int) -> float:
    """What a process has used so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_idle(used_s: Callable[[], float], most_s: float = 15.0) -> None:
    """Wait until something uses next to no CPU any more, but not for ever."""
    end_s = time.monotonic() + most_s
    before_s = -1.0
    while (now_s := used_s()) - before_s > 0.01 and time.monotonic() < end_s:
        before_s = now_s
        time.sleep(0.3)
