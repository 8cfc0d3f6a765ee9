"""`stretto up` says what its slots are."""

from __future__ import annotations

from pathlib import Path

import pytest

from made_up_nvml import put
from stretto.cli import main


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
