"""Scheduling stories with their expected transcripts: tests/scenarios/*.txt, one file per story.

A story is made of lines. `cluster 1x6` and `job NAME key=value …` (columns of the plain trace format, without the
units: submit, duration, deadline) set the scene; `run POLICY key=value …` plays it under a policy with settings. The
transcript stands below it, between `----` and an empty line. `REWRITE=1 pytest tests/test_scenarios.py` writes what
happens now into the files: read the difference before you keep it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stretto.sim import record, runner
from stretto.sim.readers import plain

STORIES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
UNITS = {"submit": "submit_s", "duration": "duration_s", "deadline": "deadline_s"}


class Story:
    """The scene so far, and what a `run` line makes of it."""

    def __init__(self, folder: Path) -> None:
        self.trace = folder / "story.csv"
        self.cluster = ""
        self.jobs: list[plain.Row] = []

    def follow(self, line: str) -> str | None:
        """Take one line; gives a transcript if it is a `run`."""
        verb, *words = line.split()
        if verb == "cluster":
            self.cluster = words[0]
        elif verb == "job":
            cells = dict(word.split("=", 1) for word in words[1:])
            self.jobs.append({"job_id": words[0], "submit_s": 0} | {UNITS.get(k, k): v for k, v in cells.items()})
        elif verb == "run":
            return self.run(words[0], runner.parse_settings(words[1:]))
        else:
            raise ValueError(f"a story has cluster, job and run lines, not {verb!r}")
        return None

    def run(self, policy: str, settings: dict[str, str]) -> str:
        with self.trace.open("w") as file:
            plain.write(self.jobs, file)
        case = runner.prepare(self.trace, "csv", self.cluster, policy, settings)
        return transcript(case)


def transcript(case: runner.Case) -> str:
    """What happened, a line each: ends, and changes of workers or of their places, in order of time."""
    ids = case.trace.ids
    wide = max(len(job) for job in ids)
    stories, outcome = record.why(case, range(len(ids)))
    events: list[tuple[float, int, str]] = []
    for name, causes in zip(ids, stories, strict=True):
        before = record.Cause(0.0, 0, 0, 0.0, 0.0)
        for i, cause in enumerate(causes):
            if i == 0 or (cause.workers, cause.nodes) != (before.workers, before.nodes):
                change = f"{before.workers:>2} → {cause.workers:>2}" if cause.workers or before.workers else "…"
                places = " ".join(f"{count}@{node}" for node, count in enumerate(cause.nodes) if count)
                where = f" [{places}]" if places else ""
                events.append((cause.at_s, 1, f"{name:<{wide}}  {change:>7}  {cause.sentence}{where}"))
            before = cause
    for name, submit, finish in zip(ids, case.trace.submit_s, outcome.result.finish_s, strict=True):
        if finish == finish:
            events.append((finish, 0, f"{name:<{wide}}     done  after {finish - submit:g} s"))
    events.sort(key=lambda event: event[:2])
    figures = outcome.metrics
    lines = [f"{round(at_s, 3):>7g} s  {text}" for at_s, _, text in events]
    return "\n".join([*lines, f"makespan {figures.makespan_s:g} s, mean completion {figures.avg_jct_s:g} s"])


def play(text: str, folder: Path) -> str:
    """The same story with the transcripts of today."""
    story = Story(folder)
    out: list[str] = []
    expected = False
    for line in text.splitlines():
        if expected:
            expected = bool(line.strip())
            if expected:
                continue
        if line.strip() == "----":
            expected = True
            continue
        out.append(line)
        if line.strip() and not line.startswith("#"):
            told = story.follow(line)
            if told is not None:
                out += ["----", told]
    return "\n".join(out).rstrip() + "\n"


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path, tmp_path: Path) -> None:
    told = play(path.read_text(encoding="utf-8"), tmp_path)
    if os.environ.get("REWRITE"):
        path.write_text(told, encoding="utf-8")
    assert told == path.read_text(encoding="utf-8")


def test_there_are_stories() -> None:
    assert "two-jobs-on-six-gpus" in {path.stem for path in STORIES}
