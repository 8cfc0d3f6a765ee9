"""`stretto check` on real scripts: a right one passes, every wrong one is found, and everything else is said."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing.checking import DISTURBED, Check, Verdict, mirror

SCRIPT = Path(__file__).parent / "scripts" / "checked.py"
STEPS = 16


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with ForkServer(env={**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch")) as server:
        server.wait_ready()
        yield server


def checked(
    folder: Path, warm: ForkServer, *arguments: str, sizes: Sequence[int] = (2,), timeout_s: float = 120.0
) -> Verdict:
    source = folder / "source"
    source.mkdir()
    shutil.copy(SCRIPT, source)
    command = [sys.executable, SCRIPT.name, *arguments]
    checking = Check(command, folder / "check", source=source, steps=STEPS, sizes=sizes, timeout_s=timeout_s, warm=warm)
    verdict = checking.run()
    assert [path.name for path in source.iterdir()] == [SCRIPT.name], "a script writes into a copy of its folder"
    return verdict


def test_a_right_script_is_equal(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "right", sizes=(2, 3))
    assert verdict.equal, verdict
    assert not verdict.forgotten
    assert verdict.rows[-1].faults == {"growth": True, "kill": True, "leave": True}
    assert [row.workers for row in verdict.rows[:-1]] == ["1", "1", "2", "3"]
    assert {row.steps for row in verdict.rows} == {STEPS}
    assert all(row.comparison is not None and row.comparison.largest < 1e-12 for row in verdict.rows[1:])


@pytest.mark.parametrize(
    ("habit", "tensor", "cause"),
    [
        ("sum", "0.weight", "0.50 on 2"),
        ("rank", "0.weight", "job.rank"),
        ("plateau", "ReduceLROnPlateau[0].best", "the loss of its slice"),
        ("dropout", "0.weight", "dropout (2)"),
    ],
)
def test_a_wrong_script_is_found(tmp_path: Path, warm: ForkServer, habit: str, tensor: str, cause: str) -> None:
    verdict = checked(tmp_path, warm, habit)
    assert not verdict.equal
    found = verdict.rows[2].comparison
    assert found is not None
    assert found.parting is not None
    assert (found.parting.step, found.parting.name) == (1, tensor)
    assert any(f"2 workers: parts from one worker at step 1, in {tensor}" in text for text in verdict.findings)
    assert any(cause in text for text in verdict.causes), verdict.causes


def test_what_a_script_keeps_to_itself_shows_in_the_disturbed_run(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "counts")
    assert [row.run for row in verdict.rows[1:] if row.comparison and row.comparison.parting] == [DISTURBED]
    assert any("job.keep" in text for text in verdict.causes)


def test_what_only_the_end_of_a_script_uses_is_named(tmp_path: Path, warm: ForkServer) -> None:
    """An average that is not registered: the training is right, and what is made of it is not."""
    verdict = checked(tmp_path, warm, "shadow")
    assert verdict.equal
    assert set(verdict.forgotten) == {"shadow", "slow"}, "slow is its last part"


def test_weights_need_no_seed(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "unseeded", sizes=())
    assert verdict.equal, verdict
    assert any("does not seed its weights" in note for note in verdict.notes)


def test_a_script_that_is_random_by_itself_cannot_be_compared(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "random data", sizes=())
    (finding,) = verdict.findings
    assert finding.startswith("two runs on one worker differ by themselves")
    assert verdict.causes == ()


def test_a_training_too_short_for_faults_is_not_called_right(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "right", "1", sizes=())
    assert not verdict.equal
    assert verdict.findings[0].startswith("not tried: kill, leave; its 4 steps")


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        ("raises", "1 worker: it failed: ValueError: no label 7"),
        ("raises early", "1 worker: w0 ended with status 1: cannot open data.csv"),
        ("never trains", "1 worker: it ended without a step: it never went through a loop of job.batches()"),
    ],
)
def test_a_script_that_fails_by_itself_is_quoted(tmp_path: Path, warm: ForkServer, habit: str, said: str) -> None:
    verdict = checked(tmp_path, warm, habit)
    assert verdict.findings == (said,)
    assert len(verdict.rows) == 1


def test_a_script_that_hangs_is_shown_where(tmp_path: Path, warm: ForkServer) -> None:
    verdict = checked(tmp_path, warm, "hangs", timeout_s=6.0)
    (finding,) = verdict.findings
    assert "did not end within 6 s: w0 still ran, in wait_for_ever (checked.py" in finding
    assert "wait_for_ever" in verdict.rows[0].stacks


def test_a_folder_is_copied_but_for_what_is_large_or_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for name in ("data", ".git", "here/.venv", "__pycache__"):
        (source / name).mkdir(parents=True)
    (source / "data" / "small.csv").write_text("1")
    (source / "data" / "large.bin").write_text("12345")
    (source / "env" / "bin").mkdir(parents=True)
    monkeypatch.setattr("stretto.testing.checking.COPIED_FILE_BYTES", 4)
    assert mirror(source, target, aside=tmp_path) == ["data/large.bin"]
    assert not (target / "data" / "small.csv").is_symlink()
    assert (target / "data" / "large.bin").readlink() == source / "data" / "large.bin"
    assert [(target / name).is_symlink() for name in (".git", "env", "here", "here/.venv")] == [True, True, False, True]
    assert not (target / "__pycache__").exists()
