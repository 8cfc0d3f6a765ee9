"""What a worker says of its steps is what they took, whatever else its script does."""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "paced.py"
CASE = {"step_s": 0.04, "evaluation_s": 0.3}


def windows(harness: Harness) -> dict[tuple[int, int], dict[str, Any]]:
    """By generation and number, as heartbeats told them."""
    with harness.changed:
        beats = [event["heartbeat"] for event in harness.events if event["event"] == "progress"]
    return {(told["generation"], told["number"]): told for beat in beats for told in beat["windows"]}


def noted(folder: Path) -> dict[int, list[float]]:
    """What the leader's script saw of its own steps, by generation."""
    found = defaultdict(list)
    for line in (folder / "w0.steps").read_text().splitlines():
        generation, seconds = json.loads(line)
        found[generation].append(seconds)
    return found


def test_windows_say_what_steps_took_at_every_size(tmp_path: Path) -> None:
    with chaos.warm_server() as warm:
        harness = Harness(
            tmp_path, [sys.executable, str(SCRIPT)], environment={"CASE": json.dumps(CASE)}, warm=warm,
            options=chaos.OPTIONS | {"heartbeat_s": 0.5},
        )  # fmt: skip
        with harness:
            for size in (1, 2, 1):
                if harness.members():
                    harness.want(size)
                harness.wait_members(size)
                formed = harness.last("formed")
                assert formed is not None
                _wait_for_windows(harness, formed["number"], size)
            (tmp_path / "enough").touch()
            assert harness.wait_over()["event"] == "done", harness.describe()
            _compare(windows(harness), noted(tmp_path))


def _wait_for_windows(harness: Harness, generation: int, size: int) -> None:
    def told() -> list[int]:
        return [window["members"] for (of, _), window in windows(harness).items() if of == generation]

    harness.wait(lambda: len(told()) >= 3, f"three windows of generation {generation}")
    assert set(told()) == {size}


def _compare(told: dict[tuple[int, int], dict[str, Any]], really: dict[int, list[float]]) -> None:
    for generation in {generation for generation, _ in told}:
        own = [window for (g, _), window in sorted(told.items()) if g == generation]
        truth_s = statistics.median(really[generation])
        assert truth_s >= CASE["step_s"] / own[0]["members"], "the script is paced"
        assert statistics.median(window["median_s"] for window in own) == pytest.approx(truth_s, rel=0.15)
        assert own[0]["median_s"] == pytest.approx(truth_s, rel=0.4), "the first window after a resize"
        for window in own:
            assert window["count"] >= (8 if window is not own[0] else 3), "the first one is wanted soon"
            assert window["median_s"] + window["spread_s"] < CASE["evaluation_s"]
    numbers = [number for _, number in sorted(told)]
    assert numbers == list(range(1, len(numbers) + 1)), "each is said, and none twice under another number"
