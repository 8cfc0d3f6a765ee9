"""`stretto check` as a user calls it; what it finds is tested in tests/testing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli import main

SCRIPT = """
import sys
import stretto.torch as stretto
raise KeyError(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "gone.py"], "there is no Python script gone.py"),
        (["check", "train.py", "--steps", "0"], "nothing would be compared"),
        (["check", "train.py", "--timeout", "0"], "no run ends in that time"),
        (["check", "train.py", "--keep", "."], "that is there already"),
    ],
)
def test_bad_input_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_script_gets_its_arguments_and_its_error_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["check", "train.py", "--json", "--keep", "kept", "--", "--epochs", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", *words],
        cwd=tmp_path, env={**os.environ, "VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["findings"] == ["1 worker: w0 ended with status 1: KeyError: ['--epochs', '3']"]
    assert found["equal"] is False
    assert "KeyError" in (tmp_path / "kept" / "1-worker" / "job" / "w0.log").read_text()


def test_a_script_beside_the_folder_is_run_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "here").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", "check", "../train.py", "--json"],
        cwd=tmp_path / "here", env={**os.environ, "VIRTUAL_ENV": sys.prefix, "PATH": f"{Path(sys.executable).parent}"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert json.loads(done.stdout)["findings"] == ["1 worker: w0 ended with status 1: KeyError: []"]


def test_the_command_line_does_not_import_torch() -> None:
    """Looking at jobs must stay quick: torch is imported by the workers of a check only."""
    told = "import sys; from stretto.cli import main, check; main(['check', 'gone.py']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
