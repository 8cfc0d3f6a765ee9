"""The demo: what it starts, when its second job comes, and what it makes of the figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from made_up_nvml import put
from stretto.cli import main
from stretto.client import Job
from stretto.lab import demo
from stretto.lab.demo_table import Run, apart, bound, costs, draw, factors, is_fair, table

SCRIPT = Path(__file__).parents[2] / "examples" / "paced.py"


def job(name: str, submitted_s: float, ended_s: float, slot_s: float, waited_s: float = 0.0) -> Job:
    return Job(
        name=name, phase="succeeded", submitted_s=submitted_s, ended_s=ended_s, waited_s=waited_s,
        ran_s=ended_s - submitted_s - waited_s, resizes=0, paused_s=0.0, device_s=slot_s,
    )  # fmt: skip


def gang(first: float = 80.0, second: float = 80.0) -> Run:
    jobs = [job("gang-first", 1000.0, 1020.0, first), job("gang-second", 1005.0, 1040.0, second, waited_s=15.0)]
    workers = {"gang-first": [(0.0, 4), (20.0, 0)], "gang-second": [(5.0, 0), (20.0, 4), (40.0, 0)]}
    return Run("gang", jobs, workers, began_s=1000.0)


def elastic(first: float = 80.0, second: float = 80.0) -> Run:
    jobs = [job("stretto-first", 2000.0, 2020.0, first), job("stretto-second", 2005.0, 2032.5, second)]
    workers = {"stretto-first": [(0.0, 4), (20.0, 0)], "stretto-second": [(5.0, 2), (20.0, 4), (32.5, 0)]}
    return Run("stretto", jobs, workers, began_s=2000.0)


def test_figures_of_a_run() -> None:
    run = gang()
    assert (run.makespan_s, run.arrival_s, run.completion_s()) == (40.0, 5.0, 27.5)
    assert run.utilisation == pytest.approx(160 / 240)
    assert run.costs() == {"first": 80.0, "second": 80.0}


def test_the_bound_has_four_slots_busy_until_the_second_comes_and_all_from_then_on() -> None:
    assert bound([gang(), elastic()]) == pytest.approx(5 + (160 - 20) / 6)
    assert bound([gang(first=90.0), elastic(second=78.0)]) == pytest.approx(5 + (158 - 20) / 6)


def test_the_same_costs_stand_beside_each_other_without_a_word() -> None:
    runs = [gang(), elastic(second=84.0)]
    assert is_fair(runs)
    assert costs(runs) == [
        "slot-seconds      gang   stretto   apart",
        "first             80.0      80.0      0%",
        "second            80.0      84.0      5%",
    ]


@pytest.mark.parametrize("runs", [[gang(first=105.0), elastic(first=65.0)], [gang(), elastic(second=88.1)]])
def test_costs_that_differ_are_said(runs: list[Run]) -> None:
    assert not is_fair(runs)
    assert "more than 10% more under one of them" in costs(runs)[-1]


def test_apart_is_seen_from_the_least() -> None:
    assert apart([105.0, 65.0]) == apart([65.0, 105.0]) == pytest.approx(40 / 65)


def test_the_factor_stands_beside_the_published_one() -> None:
    (line,) = factors([gang(), elastic()])
    assert "gang takes 1.23 times as long as stretto" in line
    assert "968 s against 809 s, 1.20 times" in line


def test_the_table_has_every_job_and_the_whole() -> None:
    lines = table([gang(), elastic()])
    assert lines[2].split() == ["gang", "second", "15.0s", "20.0s", "35.0s", "0", "0.00s"]
    assert lines[7].split() == ["gang", "40.0s", "27.5s", "67%", "1.41x"]
    assert lines[8].split() == ["stretto", "32.5s", "23.8s", "82%", "1.15x"]
    assert lines[9].split()[:2] == ["bound", "28.3s"]


def test_the_picture_is_written(tmp_path: Path) -> None:
    draw([gang(), elastic()], tmp_path / "out" / "two.png")
    assert (tmp_path / "out" / "two.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("phase", "steps", "total", "expected"),
    [
        ("running", 0, None, False),
        ("running", 41, 168, False),
        ("running", 42, 168, True),
        ("succeeded", 0, None, True),
    ],
)
def test_the_second_comes_after_a_quarter_of_the_first(
    phase: str, steps: int, total: int | None, expected: bool
) -> None:
    assert demo.is_time(Job(phase=phase, steps=steps, total_steps=total)) is expected


def test_a_slot_is_a_core_or_a_part_of_one() -> None:
    assert "a slot is 0.33 of one" in demo.slots_text(2)
    assert demo.slots_text(6) == "A slot is a core of this machine."


def test_its_server_has_cpu_slots_beside_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1")))
    with demo.server() as client:
        (node,) = client.nodes()
        assert (node.pool, node.devices) == ("cpu", 6)


def test_a_server_that_does_not_start_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(put(tmp_path / "nvml", "GPU-1")))
    as_before = demo.options_for
    monkeypatch.setattr(demo, "options_for", lambda data: msgspec.structs.replace(as_before(data), cpu=False))
    assert main(["lab", "demo", "--script", str(SCRIPT), "--png", str(tmp_path / "x.png")]) == 2
    said = capfd.readouterr().err
    assert "1 nodes of 6 GPUs cannot be made of 1 h200" in said
    assert said.count("--cpu") == 1
    assert "Traceback" not in said
