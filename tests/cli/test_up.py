"""`stretto up` says what its slots are, and what is wrong with its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_up_nvml import put
from stretto.cli import main
from stretto.cli.server import quotas_of
from stretto.errors import UsageError
from stretto.server.view import Quota


def test_cpu_slots_on_a_machine_with_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", "GPU-2")))
    data = ["--data", str(tmp_path / "data")]
    assert main(["up", "-d", "--port", "0", "--cpu", "--slots", "3", *data]) == 0
    try:
        assert ": 3 CPU slots (--cpu)" in capfd.readouterr().out
        assert main(["nodes", *data]) == 0
        assert capfd.readouterr().out.splitlines()[1].split()[:3] == ["local", "cpu", "0/3"]
    finally:
        assert main(["down", *data]) == 0


def test_more_gpus_than_there_are_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1", "GPU-2")))
    assert main(["up", "-d", "--port", "0", "--nodes", "1x2", "--data", str(tmp_path / "data")]) == 2
    said = capfd.readouterr().err
    assert "1 nodes of 2 GPUs cannot be made of 1 h200" in said
    assert "`--cpu` uses the processor instead" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a=-1"], "-1 devices"),
        (["a=nan"], "nan devices"),
        (["a=1e400"], "inf devices"),
        (["a=1,-2"], "-2 jobs"),
        (["a=1", "a=2"], "twice for a"),
        (["a="], "sets no limit"),
        (["=1"], "whose"),
        ([""], "whose"),
        (["a=1,2,3"], "cannot be understood"),
    ],
)
def test_quotas_that_cannot_be(given: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        quotas_of(given)
    assert error.value.hint


def test_quotas() -> None:
    assert quotas_of(["a=2", "b=0.5,3", "*=,7"]) == {"a": Quota(2.0), "b": Quota(0.5, 3), "*": Quota(jobs=7)}


@pytest.mark.parametrize("command", ["up", "controller"])
@pytest.mark.parametrize("file", ["nowhere/record.jsonl", "folder", "record.jsonl.gz", "/proc/version", "/proc/new"])
def test_a_record_that_cannot_be_written_is_told_at_once(
    command: str, file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    more = ["--data", str(tmp_path / "data")] if command == "up" else []
    assert main([command, "--port", "0", "--record", str(tmp_path / file), *more]) == 2
    said = capfd.readouterr().err
    assert str(tmp_path / file) in said
    assert "hint" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]
