"""The pages say what is true: tables are up to date, links lead somewhere, and the README can be followed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.core.policies import BUILTIN
from stretto.sim import readers
from stretto.sim.generate import Workload
from stretto.sim.readers import plain
from stretto.sim.runner import world_names

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_tables_of_policies_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.renewed(text) == text, f"{page.name}: run make docs"
        assert all(f"| `{name}` |" in text for name in BUILTIN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (page.parent / link).exists(), link


def test_every_setting_is_documented() -> None:
    sim, traces = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("sim.md", "traces.md"))
    for name in world_names():
        assert f"| `{name}` |" in sim
    for name in (*plain.REQUIRED, *plain.OPTIONAL, *Workload.__struct_fields__, *readers.FORMATS):
        assert f"`{name}`" in traces, name
    for format in readers.FORMATS:
        (row,) = (line for line in traces.splitlines() if line.startswith(f"| `{format}` |"))
        assert re.findall(r"`(\w+)`", row.split("|")[4]) == readers.option_names(format)


def test_the_readme_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("stretto ")]
    assert len(commands) >= 7
    for words in commands:
        assert main(words) == 0, (words, capsys.readouterr().err)
    assert (tmp_path / "out" / "report" / "report.html").is_file()
