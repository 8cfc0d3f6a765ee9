"""What the live view draws."""

from __future__ import annotations

import pytest

from stretto.cli import drawing
from stretto.cli.following import Lines, progress_line


def points(*pairs: tuple[float, float]) -> list[dict[str, float]]:
    return [{"at_s": at_s, "used": used} for at_s, used in pairs]


def test_use_over_time() -> None:
    series = points((0, 2), (5, 4), (8, 0))
    assert drawing.resample(series, "used", 5, 10, 10) == [2, 2, 3, 4, 0]
    assert drawing.resample(series, "used", 2, 10, 4) == [4, 0], "what was before is not shown"
    assert drawing.resample(points((8, 1)), "used", 5, 10, 10) == [0, 0, 0, 0, 1]
    assert drawing.resample([], "used", 3, 10, 10) == [0, 0, 0]
    assert sum(drawing.resample(points((0, 3)), "used", 7, 10, 10)) == pytest.approx(21)


def test_a_chart() -> None:
    assert drawing.chart([0, 0.01, 1, 2, 4, 9], 4, 1) == [" ▁▂▄██"]
    assert drawing.chart([0, 0.01, 1, 2, 3, 4], 4, 2) == ["    ▄█", " ▁▄███"]
    assert drawing.chart([1, 2], 0, 1) == ["  "]


def test_devices_and_who_has_them() -> None:
    workers = [{"job": 12, "devices": [0, 1]}, {"job": 3, "devices": [1]}, {"job": 3, "devices": []}]
    assert drawing.cells({"devices": 3, "workers": workers}) == [("12", 12), ("12+", 12), ("·", None)]


def test_headline() -> None:
    cluster = {"used": 1.5, "devices": 4, "jobs": {"running": 2}, "policy": "srtf", "trouble": ""}
    assert drawing.headline(cluster) == "1.5/4 devices · 2 running · 0 queued · policy srtf"
    cluster |= {"jobs": {"suspended": 1}, "trouble": "no disk"}
    assert drawing.headline(cluster).endswith("1 suspended · policy srtf · TROUBLE: no disk")


def test_the_queue_comes_after_what_runs() -> None:
    rows = [("suspended", 50, 1), ("queued", 50, 2), ("queued", 90, 3), ("running", 50, 4), ("running", 50, 5)]
    jobs = [{"phase": phase, "priority": priority, "number": number} for phase, priority, number in rows]
    assert [job["number"] for job in drawing.in_order(jobs)] == [4, 5, 3, 2, 1]


def test_lines_of_several_workers_are_not_torn() -> None:
    lines = Lines(prefixed=True)
    assert lines.add("w0", "one\ntw") == "w0 | one\n"
    assert lines.add("w1", "a\n\nb\n") == "w1 | a\nw1 | \nw1 | b\n"
    assert lines.add("w0", "o\nthree") == "w0 | two\n"
    assert lines.rest() == "w0 | three\n"
    assert lines.rest() == ""
    assert Lines(prefixed=False).add("w0", "one\ntw") == "one\ntw"


def test_progress_line() -> None:
    job = {
        "name": "mnist", "phase": "running", "wish": "run", "workers": [{}, {}], "min_workers": 1, "max_workers": 4,
        "steps": 50, "total_steps": 100, "rate": 2.5, "eta_s": 20.0, "text": "",
    }  # fmt: skip
    line = progress_line(job)
    assert line == "mnist: running · 2/1..4 workers · ████████         50/100 50% · 2.5 steps/s · 20s left"
    queued = {**job, "phase": "queued", "workers": [], "steps": 0, "total_steps": None, "rate": 0.0, "eta_s": None}
    assert (
        progress_line({**queued, "text": "waits for 2 slots"}) == "mnist: queued · 0/1..4 workers · waits for 2 slots"
    )
