"""How results are shown. Progress is for people who wait at a terminal, and for nobody else."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from stretto.cli import jobs, show
from stretto.client import Job


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_bar_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show.progress("fifo") as report:
        assert report is None
    assert capsys.readouterr().err == ""


def test_a_bar_for_long_runs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    with show.progress("fifo") as report:
        assert report is not None
        report(1, 10)
    assert sys.stderr.getvalue() == "", "it was over before anybody could wonder"
    monkeypatch.setattr(show, "_PATIENCE_S", -1.0)
    with show.progress("fifo") as report:
        assert report is not None
        report(3, 10)
    assert "fifo" in sys.stderr.getvalue()
    assert "3/10" in sys.stderr.getvalue()


def test_json_is_strict() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        show.as_json({"x": float("nan")})


def test_cells_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show.table(["[bold]name", "n"], [["[red]x", "1"]], title="[blue]t")
    out = capsys.readouterr().out
    assert all(word in out for word in ("[bold]name", "[red]x", "[blue]t"))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"elastic": {"min": 1, "max": 4}}, "4 workers"),
        ({"workers": 2, "elastic": {"min": 1, "max": 4}}, "2 workers"),
        ({"elastic": {"min": 1, "max": 16}}, "8 workers"),
        ({"workers": {"min": 1, "max": 8}}, "8 workers"),
        ({"workers": {"min": 1, "max": 8, "requested": 3}}, "3 workers"),
    ],
)
def test_what_a_job_asks_for_is_shown(fields: dict[str, Any], told: str) -> None:
    """Of a job file, of one whose sizes were scaled since, and of an object of Kubernetes."""
    assert jobs._asked(Job(level="elastic", min_workers=1, max_workers=8, spec=fields)) == told
    assert jobs._asked(Job(level="rigid", min_workers=2, max_workers=2, spec={"workers": 2})) == ""


def test_a_job_is_shown_with_every_size_that_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    speeds = [
        {"pool": "a100", "workers": 1, "rate": 9.8765, "spread": 0.123, "steps": 80},
        {"pool": "a100", "workers": 16, "rate": 120.4, "spread": 4.56, "steps": 1200},
    ]
    job = Job(
        id="7", name="digits", user="me", phase="running", wish="run", level="elastic", queue="default", priority=50,
        message="", exit_code=None, submitted_s=0.0, started_s=0.0, ended_s=None, waited_s=0.0, ran_s=9.0,
        device_s=9.0, workers=[], target=1, min_workers=1, max_workers=16, steps=500, total_steps=1000, rate=9.9,
        rate_timed=False, speeds=speeds, eta_s=50.0, spec={"run": "train.py"},
    )  # fmt: skip
    jobs._print_job(job, 10.0)
    lines = capsys.readouterr().out.splitlines()
    assert "steps            500/1000 50%, ~9.9 a second" in lines
    assert [line.split() for line in lines[-3:]] == [
        ["SIZE", "STEPS/S", "SPREAD", "TIMED"],
        ["1", "worker", "(a100)", "9.88", "±0.12", "80", "steps"],
        ["16", "workers", "(a100)", "120", "±4.6", "1200", "steps"],
    ]
