"""What the live view draws, as plain text: use over time, devices and who has them. Pure; the time is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_HEIGHTS = " ▁▂▃▄▅▆▇█"


class Cell(NamedTuple):
    """One device: what stands in it, and whose it is."""

    text: str
    job: int | None


def resample(series: Sequence[Mapping[str, Any]], field: str, width: int, now_s: float, span_s: float) -> list[float]:
    """The mean of a quantity in each of `width` equal parts of the last `span_s` seconds.

    A point holds until the next one; before the first there was nothing.
    """
    edges = [now_s - span_s + span_s * i / width for i in range(width + 1)]
    ends = [float(point["at_s"]) for point in series[1:]] + [max(now_s, float(series[-1]["at_s"]))] if series else []
    sums = [0.0] * width
    for point, end_s in zip(series, ends, strict=True):
        begin_s = float(point["at_s"])
        first = max(0, int((begin_s - edges[0]) / span_s * width))
        for i in range(first, width):
            if edges[i] >= end_s:
                break
            sums[i] += float(point[field]) * max(0.0, min(end_s, edges[i + 1]) - max(begin_s, edges[i]))
    return [total / (span_s / width) for total in sums]


def chart(values: Sequence[float], most: float, rows: int) -> list[str]:
    """A bar for each value, so many lines high; anything above nothing is seen."""
    whole = len(_HEIGHTS) - 1
    heights = [_height(value, most, rows * whole) for value in values]
    return [
        "".join(_HEIGHTS[max(0, min(whole, height - row * whole))] for height in heights)
        for row in reversed(range(rows))
    ]  # fmt: skip


def _height(value: float, most: float, full: int) -> int:
    if value <= 0 or most <= 0:
        return 0
    return max(1, min(full, round(value / most * full)))


def cells(node: Mapping[str, Any]) -> list[Cell]:
    """The devices of a node, each with the number of the job that has it; `+` where several share it."""
    holders: dict[int, list[int]] = {}
    for worker in node["workers"]:
        for device in worker["devices"]:
            holders.setdefault(device, []).append(worker["job"])
    made = []
    for device in range(node["devices"]):
        jobs = holders.get(device, [])
        text = f"{jobs[0]}{'+' if len(set(jobs)) > 1 else ''}" if jobs else "·"
        made.append(Cell(text, jobs[0] if jobs else None))
    return made


def headline(cluster: Mapping[str, Any], wide: bool = True) -> str:
    jobs = cluster["jobs"]
    parts = [
        f"{cluster['used']:g}/{cluster['devices']:g} devices",
        f"{jobs.get('running', 0)} running",
        f"{jobs.get('queued', 0)} queued",
    ]
    parts += [f"{jobs['suspended']} suspended"] if jobs.get("suspended") else []
    parts += [f"policy {cluster['policy']}"] if wide else []
    parts += [f"TROUBLE: {cluster['trouble']}"] if cluster.get("trouble") else []
    return " · ".join(parts)


def in_order(jobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that run, then the queue, then those that were suspended; the oldest of each first."""
    ranks = {"running": 0, "queued": 1, "suspended": 2}
    return sorted(jobs, key=lambda job: (ranks.get(job["phase"], 3), -job["priority"], job["number"]))
