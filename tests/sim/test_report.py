"""The page stands alone and escapes what it shows; text and pictures agree with the run."""

from __future__ import annotations

import csv
import io
import re
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stretto.errors import MissingExtra
from stretto.sim import figures, report, runner
from stretto.sim.runner import Outcome

TRACE = """job_id,submit_s,gpus,duration_s
<b>a</b>,0,4,100
b,10,2,20
c,20,2,5
"""


@pytest.fixture
def outcomes(tmp_path: Path) -> list[Outcome]:
    path = tmp_path / "jobs.csv"
    path.write_text(TRACE)
    cases = runner.prepare_all([path], "csv", "1x4", ["fifo", "srtf"], {})
    return [runner.run(case.recorded()) for case in cases]


def test_files(outcomes: list[Outcome], tmp_path: Path) -> None:
    written = report.write(outcomes, tmp_path / "out" / "deep")
    names = {path.name for path in written}
    pictures = {"timeline.png", "utilisation.png", "completion.png"}
    assert names == pictures | {"report.html", "figures.csv", "jobs-jobs-fifo.csv", "jobs-jobs-srtf.csv"}
    for path in written:
        assert path.stat().st_size > 0
        assert path.suffix != ".png" or path.read_bytes().startswith(b"\x89PNG")


def test_page_stands_alone(outcomes: list[Outcome]) -> None:
    page = report.page(outcomes, report.draw(outcomes))
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert len(sources) == 3
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "<script" not in page
    assert "http" not in page
    assert "<th>fifo</th>" in page


def test_page_escapes_names(outcomes: list[Outcome]) -> None:
    case = msgspec.structs.replace(
        outcomes[0].case, trace=msgspec.structs.replace(outcomes[0].case.trace, name="<script>x</script>")
    )
    page = report.page([runner.run(case)], {})
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_jobs_csv(outcomes: list[Outcome]) -> None:
    rows = list(csv.DictReader(io.StringIO(report.jobs_csv(outcomes[1]))))
    assert [row["job_id"] for row in rows] == ["<b>a</b>", "b", "c"]
    assert [float(row["jct_s"]) for row in rows] == [120.0, 20.0, 5.0]
    assert [float(row["wait_s"]) for row in rows] == [0.0, 0.0, 0.0]
    assert rows[0]["deadline_s"] == ""
    assert [row["preemptions"] for row in rows] == ["1", "0", "0"]


def test_metrics_csv(outcomes: list[Outcome]) -> None:
    rows = list(csv.DictReader(io.StringIO(report.metrics_csv([each.metrics for each in outcomes]))))
    assert [row["policy"] for row in rows] == ["fifo", "srtf"]
    assert [float(row["avg_jct_s"]) for row in rows] == [each.metrics.avg_jct_s for each in outcomes]


def test_in_use_adds_up_to_what_was_held(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        at, held = figures.in_use(outcome)
        assert held[-1] == 0
        assert (held >= 0).all()
        assert held.max() <= 4
        assert (held[:-1] * np.diff(at)).sum() == pytest.approx(outcome.result.gpu_s.sum())


def test_text_timeline(outcomes: list[Outcome]) -> None:
    lines = figures.text(outcomes[1], until_s=120, width=24)
    assert lines[0] == "<b>a</b> │44....444444444444444444│ 120 s"
    assert lines[1] == "       b │  2222                  │ 20 s"
    assert lines[2] == "       c │    2                   │ 5 s"
    assert len({len(line.split("│")[1]) for line in lines[:3]}) == 1


def test_many_jobs_get_no_timeline(tmp_path: Path) -> None:
    path = tmp_path / "many.csv"
    rows = [f"{i},{i},1,5" for i in range(figures.FEW + 1)]
    path.write_text("\n".join(["job_id,submit_s,gpus,duration_s", *rows]))
    outcome = runner.run(runner.prepare(path, "csv", "1x4", "fifo", {}).recorded())
    assert set(report.draw([outcome])) == {"utilisation", "completion"}


def test_without_matplotlib(outcomes: list[Outcome], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        report.write(outcomes, tmp_path / "out")
    assert not (tmp_path / "out").exists(), "nothing is written when it cannot be complete"
