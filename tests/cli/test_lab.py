"""`stretto lab field` on a small piece of an ITP trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.lab import field

TRACE = Path(__file__).parent.parent / "data" / "itp" / "cluster01.csv"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "elasticflow" / "elasticflow"
    folder.mkdir(parents=True)
    (folder / "cluster01.csv").write_text("".join(TRACE.read_text().splitlines(keepends=True)[:40]))
    return tmp_path / "data"


def test_the_field_is_run_once_kept_and_put_on_the_page(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "field.jsonl", tmp_path / "field.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- /table -->\nafter\n")
    words = ["lab", "field", "--data", str(data), "--results", str(results), "--page", str(page), "-n", "1"]
    words += ["--traces", "itp-01", "--policies", "afs-l,stretto,elastic-fifo"]
    assert main(words) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(lines) == 8  # afs-l known, elastic-fifo unknown, stretto both; each at two costs
    assert {line["key"].split()[2] for line in lines} == {"afs-l", "elastic-fifo", "stretto"}
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| itp-01 | **stretto** |" in text
    verdict = capsys.readouterr().out
    assert "itp-01 known" in verdict
    assert "not run: srtf" in verdict
    assert main(words) == 0
    assert len(results.read_text().splitlines()) == 8, "nothing is run twice"


def test_own_cost_differs_from_equal_cost_for_others_only() -> None:
    world = field.WORLDS[0]
    pause = {
        (policy, cost): field.Case(world, "known", policy, cost).settings["resize_s"]
        for policy in ("afs-l", "stretto")
        for cost in ("own", "equal")
    }
    assert pause == {
        ("afs-l", "own"): "30.0",
        ("afs-l", "equal"): "0.5",
        ("stretto", "own"): "0.5",
        ("stretto", "equal"): "0.5",
    }


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--traces", "itp-99"], "itp-01"),
        (["--policies", "nobody"], "stretto"),
    ],
)
def test_unknown_names_list_the_known_ones(
    data: Path, tmp_path: Path, words: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "field", "--data", str(data), "--results", str(tmp_path / "r"), *words]) == 2
    assert names in capsys.readouterr().err


def test_a_missing_folder_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "field", "--data", str(tmp_path / "none"), "--results", str(tmp_path / "r")]) == 2
    assert "does not exist" in capsys.readouterr().err
