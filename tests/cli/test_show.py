"""Progress is for people who wait at a terminal, and for nobody else."""

from __future__ import annotations

import io
import sys

import pytest

from stretto.cli import show


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
