"""How things are said."""

from __future__ import annotations

import math

import pytest

from stretto.cli import words
from stretto.errors import UsageError


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0s"),
        (0.44, "0.4s"),
        (1, "1s"),
        (9.94, "9.9s"),
        (9.96, "10s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (192, "3m12s"),
        (3600, "1h"),
        (3660 + 59, "1h1m"),
        (3600 + 59, "1h"),
        (86400 * 2 + 3600 * 4, "2d4h"),
        (-5, "0s"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_spans(seconds: float | None, said: str) -> None:
    assert words.span(seconds) == said


def test_moments() -> None:
    assert words.ago(100.0, 292.0) == "3m12s ago"
    assert words.ago(None, 292.0) == "-"
    assert words.ahead(292.0, 100.0) == "in 3m12s"
    assert words.ahead(99.0, 100.0) == "now"
    assert words.ahead(None, 100.0) == "-"


def job(**fields: object) -> dict[str, object]:
    return {
        "id": "12", "name": "mnist", "phase": "running", "wish": "run", "workers": [{}, {}, {}], "min_workers": 1,
        "max_workers": 8, "steps": 0, "total_steps": None, "started_s": 1.0, "ran_s": 192.0, "message": "",
        "exit_code": None, **fields,
    }  # fmt: skip


def test_sizes() -> None:
    assert words.size(job()) == "3/1..8"
    assert words.size(job(min_workers=4, max_workers=4, workers=[])) == "0/4"
    assert words.parse_sizes("1..4") == (1, 4)
    assert words.parse_sizes(" 4 ") == (4, 4)
    assert words.parse_sizes("2-3") == (2, 3)


@pytest.mark.parametrize("text", ["", "0", "4..1", "0..4", "-1", "1..", "four", "1..2..3", "1.5"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of workers"):
        words.parse_sizes(text)


@pytest.mark.parametrize("text", ["", "h", "5", "-1h", "0s", "1w", "nand", "infd"])
def test_lengths_of_time_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="not a length of time"):
        words.seconds(text)


def test_lengths_of_time() -> None:
    assert words.seconds("1.5h") == 5400
    assert words.seconds("30d") == 30 * 86400


def test_pairs() -> None:
    assert words.pairs(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    for text in ("a", "=1"):
        with pytest.raises(UsageError, match="not a pair"):
            words.pairs([text])


def test_phases() -> None:
    assert words.phase(job()) == "running"
    assert words.phase(job(wish="cancel")) == "cancelling"
    assert words.phase(job(wish="suspend")) == "suspending"
    assert words.phase(job(wish="suspend", phase="suspended")) == "suspended"
    assert words.phase(job(wish="cancel", phase="cancelled")) == "cancelled"


def test_progress() -> None:
    assert words.progress(job()) == "-"
    assert words.progress(job(steps=7)) == "7"
    assert words.progress(job(steps=1200, total_steps=5000)) == "1200/5000 24%"
    assert words.progress(job(steps=4999, total_steps=5000)) == "4999/5000 99%", "not done before it is"
    assert words.bar(0.5, 4) == "██  "
    assert words.bar(0.3, 4) == "█▎  "
    assert words.bar(7.0, 4) == "████"


def test_rates() -> None:
    assert words.rate({}) == "-"
    assert words.rate({"rate": 0.0, "rate_timed": False}) == "-"
    assert words.rate({"rate": 27.8123, "rate_timed": True}) == "27.8"
    assert words.rate({"rate": 27.8123, "rate_timed": False}) == "~27.8"
    assert words.rate({"rate": 1234.5}) == "1230"
    assert words.rate({"rate": 0.012345}) == "0.0123"


def test_lost_work_is_told_in_one_line() -> None:
    lost = {"stopped for urgent-job": 12.0, "node-1 lost": 30.0}
    told = words.lost(job(lost_s=42.0, lost=lost))
    assert told == "42s of work: stopped for urgent-job (12s), node-1 lost (30s)"
    assert (words.lost(job(lost_s=0.0)), words.lost(job())) == ("", "")


def test_outcomes() -> None:
    assert words.outcome(job(phase="succeeded")) == "job 12 (mnist) succeeded after 3m12s"
    failed = job(phase="failed", exit_code=3, message="ValueError: no")
    assert words.outcome(failed) == "job 12 (mnist) failed after 3m12s (exit code 3): ValueError: no"
    assert words.outcome(job(phase="cancelled", started_s=None)) == "job 12 (mnist) was cancelled"
    there = job(phase="succeeded", id="vision/mnist")
    assert words.outcome(there) == "job vision/mnist succeeded after 3m12s"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"kind": "submitted", "job": {"user": "ann", "name": "mnist"}}, "submitted by ann as mnist"),
        ({"kind": "wished", "wish": "cancel", "by": "ann", "why": ""}, "ann wants it to cancel"),
        ({"kind": "scaled", "min_workers": 1, "max_workers": 4, "by": "ann"}, "ann wants 1..4 workers"),
        ({"kind": "moved", "node": "", "by": "ann"}, "ann wants it on any node"),
        ({"kind": "launched", "worker": "w0", "seat": {"node": "n0", "devices": [1, 2]}}, "w0 starts on n0 [1,2]"),
        ({"kind": "running", "worker": "w0", "pid": 7}, "w0 runs (pid 7)"),
        ({"kind": "leaving", "worker": "w0", "why": "shrink"}, "w0 leaves: shrink"),
        ({"kind": "exited", "worker": "w0", "how": "exited", "status": 3, "text": ""}, "w0 ended with status 3"),
        ({"kind": "exited", "worker": "w0", "how": "signalled", "status": 9}, "w0 was ended by signal 9"),
        ({"kind": "exited", "worker": "w0", "how": "lost", "text": "gone"}, "w0 was lost: gone"),
        ({"kind": "resized", "before": 1, "workers": 3, "text": "room"}, "1 → 3 workers: room"),
        ({"kind": "resized", "before": 2, "workers": 1, "text": ""}, "2 → 1 worker"),
        ({"kind": "retried", "text": "lost", "not_before_s": 1.0}, "is tried again: lost"),
        ({"kind": "progressed", "steps": 5, "total_steps": 10, "metrics": {"loss": 0.25}}, "step 5/10 50% (loss 0.25)"),
        ({"kind": "kept", "how": "its script has joined"}, "keeps its progress: its script has joined"),
        ({"kind": "kept", "how": "it was killed", "keeps": False}, "does not keep its progress: it was killed"),
        ({"kind": "interrupted", "text": "stopped for a", "lost_s": 42.4}, "stopped for a: 42s of its work are lost"),
        ({"kind": "stuck", "worker": "w1", "text": "w1 stands", "stack": ["a.py:1 f"], "moves": False}, "w1 stands"),
        ({"kind": "migrated", "node": "n1", "paused_s": 0.25}, "moved to n1, paused for 0.2s"),
        ({"kind": "ended", "phase": "failed", "message": "no"}, "failed: no"),
        ({"kind": "noted", "what": "drained", "by": "ann", "data": {"node": "n0"}}, "server: drained by ann (node n0)"),
        ({"kind": "sung", "by": "ann", "note": "a", "loud": None}, "sung: by ann, note a"),
        ({"kind": "slept"}, "slept"),
    ],
)
def test_events(event: dict[str, object], said: str) -> None:
    assert words.event(event) == said


def test_a_traceback_in_one_line() -> None:
    assert words.one_line("w0 failed: Traceback:\n  File x\n    import y\nImportError: y\n") == (
        "w0 failed: Traceback: … ImportError: y"
    )
    assert words.one_line("") == ""
    assert words.one_line("a\nb") == "a … b"
