"""What measurements share: the name of the machine, and the interval of a median."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Sequence
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
