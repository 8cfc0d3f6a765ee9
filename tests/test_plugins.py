"""Policies from files and packages: found by path, kept apart from the built-in ones, refused with a clear word."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from stretto import plugins
from stretto.core import policy as registry
from stretto.errors import PolicyError, StrettoError, UsageError
from stretto.sim import runner

GOOD = """
import numpy as np
from stretto.core.decision import Decision
from stretto.core.policy import Traits, policy
from stretto.core.reasons import Reason

@policy({name!r}, traits=Traits())
def mine(view, memory, options):
    '''Runs nobody wide.'''
    {body}
"""

ONE_BY_ONE = """
    workers = np.zeros(len(view), np.int64)
    if len(view):
        workers[0] = view.requested[0]
    return Decision.of(view, workers, np.full(len(view), Reason.RUNS, np.int64))
"""


def file_of(folder: Path, body: str = ONE_BY_ONE, name: str = "mine") -> str:
    path = folder / "mine.py"
    path.write_text(GOOD.format(name=name, body=body.strip()))
    return str(path)


def run(folder: Path, policy: str, cluster: str = "1x4") -> runner.Outcome:
    trace = folder / "jobs.csv"
    trace.write_text("job_id,submit_s,gpus,duration_s\na,0,1,10\nb,0,2,10\n")
    return runner.run(runner.prepare(trace, "csv", cluster, policy, {}))


def test_a_file_runs(tmp_path: Path) -> None:
    assert run(tmp_path, file_of(tmp_path)).metrics.makespan_s == 20


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parent.parent / "examples" / "widest_first.py"
    assert run(tmp_path, str(example)).metrics.policy == "widest-first"
    assert run(tmp_path, f"{example}:widest-first").metrics.finished == 2


def test_the_declared_example_runs(tmp_path: Path) -> None:
    """The second example of docs/policies.md, and it decides as the first one does."""
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text()
    block = re.search(r"```python\n(@list_policy.*?)```", page, re.DOTALL)
    assert block is not None
    path = tmp_path / "declared.py"
    path.write_text(
        "from stretto.core.listing import ListRule\n"
        "from stretto.core.policy import NoOptions, Traits, list_policy\n" + block[1]
    )
    declared = plugins.find(str(path))
    assert (declared.name, declared.rule is None) == ("widest-first", False)
    assert declared.summary == "Order of width, the widest first; what fits runs; preempts for wider jobs."
    example = Path(__file__).parent.parent / "examples" / "widest_first.py"
    found, expected = run(tmp_path, str(path), cluster="1x2"), run(tmp_path, str(example), cluster="1x2")
    assert found.result.finish_s.tolist() == expected.result.finish_s.tolist() == [20, 10]


def test_a_file_does_not_replace_a_built_in(tmp_path: Path) -> None:
    found = plugins.find(file_of(tmp_path, name="fifo"))
    assert found.name == "fifo"
    assert found.rule is None
    assert plugins.find("fifo").rule is not None
    assert registry.load("fifo").rule is not None


def test_a_file_that_imports_a_built_in_leaves_it_usable(tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name == "stretto.core.policies.srtf"]:
        del sys.modules[module]
    path = tmp_path / "uses.py"
    path.write_text("from stretto.core.policies import srtf\n" + GOOD.format(name="uses", body=ONE_BY_ONE.strip()))
    assert plugins.find(str(path)).name == "uses"
    assert plugins.find("srtf").name == "srtf"


def test_several_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    text = GOOD.format(name="one", body=ONE_BY_ONE.strip()) + GOOD.format(name="two", body=ONE_BY_ONE.strip())
    path.write_text(text)
    with pytest.raises(UsageError, match="several"):
        plugins.find(str(path))
    assert plugins.find(f"{path}:two").name == "two"
    with pytest.raises(UsageError, match="three"):
        plugins.find(f"{path}:three")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("1/0", "ZeroDivisionError: division by zero (line 1 of bad.py)"),
        ("def (", "SyntaxError"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("x = 1", "registers no policy"),
        ("", "registers no policy"),
    ],
)
def test_a_file_that_cannot_be_loaded(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(PolicyError) as error:
        plugins.find(str(path))
    assert word in str(error.value)
    assert "bad.py" in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        plugins.find(str(tmp_path / "none.py"))


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("raise ValueError('no idea')", "no idea"),
        ("return None", "NoneType"),
        ("return Decision.of(view, np.zeros(99, np.int64), np.ones(len(view), np.int64))", "shape"),
        ("return Decision.of(view, np.zeros(len(view)), np.ones(len(view), np.int64))", "whole numbers"),
        ("return Decision.of(view, np.full(len(view), 9), np.ones(len(view), np.int64))", "allowed are"),
        ("return Decision.of(view, -np.ones(len(view), np.int64), np.ones(len(view), np.int64))", "negative"),
        ("return Decision.of(view, view.requested * 0, np.zeros(len(view), np.int64))", "no reason"),
        ("return Decision.of(view, view.requested * 0, np.ones(len(view), np.int64))", "waiting for ever"),
        ("return Decision.of(view, view.requested, np.ones(len(view), np.int64), pool=np.ones(len(view)))", "pool"),
        ("return Decision.of(view, view.requested, np.ones(len(view), np.int64), wake_s=-1.0)", "woken"),
        ("return Decision.of(view, view.requested, np.ones(len(view), np.int64), wake_s=float('nan'))", "woken"),
        ("return Decision.of(view, view.requested, np.ones(len(view), np.int64), rejected=np.ones(7))", "rejected"),
        ("return Decision.of(view, view.requested, np.full(len(view), 999))", "reason"),
        ("import nothing_of_that_name", "nothing_of_that_name"),
    ],
)
def test_a_policy_that_breaks_its_contract(tmp_path: Path, body: str, word: str) -> None:
    with pytest.raises(StrettoError) as error:
        run(tmp_path, file_of(tmp_path, body))
    assert word in str(error.value)
    assert "mine" in str(error.value)
    assert error.value.exit_code in (3, 4)


# Installed packages.


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution on the path that offers two policies and one that cannot be loaded."""
    text = GOOD.format(name="house", body=ONE_BY_ONE.strip()) + GOOD.format(name="garden", body=ONE_BY_ONE.strip())
    (tmp_path / "house_policies.py").write_text(text)
    info = tmp_path / "house_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: house-policies\nVersion: 1.0\n")
    points = "house = house_policies\ngarden = house_policies:mine\nbroken = house_nothing\n"
    (info / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.installed.cache_clear()
    yield tmp_path
    sys.modules.pop("house_policies", None)
    plugins.installed.cache_clear()


@pytest.mark.usefixtures("package")
def test_installed_policies() -> None:
    assert plugins.find("house").name == "house"
    assert plugins.find("garden").name == "garden"
    assert {"house", "garden", "broken", "fifo"} <= set(plugins.names())
    with pytest.raises(PolicyError, match="house_nothing"):
        plugins.find("broken")


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError) as error:
        plugins.find("fifoo")
    assert "did you mean 'fifo'" in error.value.hint
    assert "srtf" in error.value.hint
