"""The pages say what is true: tables are up to date, links lead somewhere, and the README can be followed."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stretto.core.policies import BUILTIN
from stretto.sim import readers
from stretto.sim.generate import Workload
from stretto.sim.readers import plain
from stretto.sim.runner import world_names
from stretto.torch import Job

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
NOT_FOR_SCRIPTS = (
    "forget_parent",
    "ends_with_thread",
    "steps_before",
    "finish",
    "close",
    "be_between",
    "between_key",
    "recover",
    "refuse_forks",
    "uses_late",
    "refuse_threads",
    "members",
    "loop_seed",
    "in_loop",
    "goes_on",
    "pauses",
)
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_tables_of_policies_are_up_to_date(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.renewed(text) == text, f"{page.name}: run make docs"
        assert all(f"| `{name}` |" in text for name in BUILTIN)


def test_every_page_of_the_guide_shows_an_example_as_it_is(tables: ModuleType) -> None:
    """They are run by tests/torch/test_habits.py."""
    shown: list[str] = []
    for page in tables.GUIDE:
        text = page.read_text(encoding="utf-8")
        assert tables.renewed(text) == text, f"{page.name}: run make docs"
        assert tables.examples(text), page.name
        shown += tables.examples(text)
        assert f"](torch/{page.name})" in GUIDE, f"docs/torch.md has no link to {page.name}"
    assert sorted(shown) == sorted(path.name for path in tables.EXAMPLES.glob("*.py"))


def test_the_reference_has_every_call_of_a_script() -> None:
    for name, value in vars(Job).items():
        if (
            not name.startswith("_")
            and name not in NOT_FOR_SCRIPTS
            and (callable(value) or isinstance(value, property))
        ):
            assert f"`job.{name}" in GUIDE, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            target = page.parent / link if link else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


def anchors(page: Path) -> list[str]:
    """What its headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_setting_is_documented() -> None:
    sim, traces = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("sim.md", "traces.md"))
    for name in world_names():
        assert f"| `{name}` |" in sim
    for name in (*plain.REQUIRED, *plain.OPTIONAL, *Workload.__struct_fields__, *readers.FORMATS):
        assert f"`{name}`" in traces, name
    for format in readers.FORMATS:
        (row,) = (line for line in traces.splitlines() if line.startswith(f"| `{format}` |"))
        assert re.findall(r"`(\w+)`", row.split("|")[4]) == readers.option_names(format)


def test_the_readme_can_be_followed(tmp_path: Path) -> None:
    """Every line of it that begins with stretto, one after the other, as a new user would."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {
        **os.environ,
        "STRETTO_HOME": str(tmp_path / "data"),
        "VIRTUAL_ENV": sys.prefix,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("stretto ")]
    assert len(commands) >= 12

    def follow(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    try:
        for words in commands:
            if words[1:] == ["top"]:  # It is for a person to look at; tests/cli/test_top.py does.
                continue
            done = follow(words)
            assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    finally:
        follow(["stretto", "down", "--cancel-jobs"])
    assert (tmp_path / "out" / "report" / "report.html").is_file()
