"""Every check is needed: with it switched off a script ends well, and with another result than plain PyTorch has.

Where workers come to differ the comparison of replicas finds it alone (test_loops.py). Here are the mistakes that all
workers make alike; what `stretto check` says of each is shown as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import unchecked
from playing import RUN, by_norm, hurry, results, started, warm_server

from stretto.backends.local.forkserver import ForkServer
from stretto.testing.checking import Check

STEPS, MORE_STEPS = 12, 24
"""Of a check; of one in which it matters when a worker dies."""
ALIKE = "all runs do this alike, on one worker, too"
OTHER_NUMBERS = "no weight depends on it; what does (dropout) depends on the slices, anyhow, and is said"
NOT_FOUND = (ALIKE, OTHER_NUMBERS)


class Row(NamedTuple):
    """What becomes of a mistake."""

    without: str
    """The switch: of switching.py."""
    shows: str
    """How the result is wrong then: it `differs`, there is `none`, or why the job ends."""
    refused: str = ""
    """With the check on; where nothing is said it is right then."""
    found: str = "parts from one worker"
    """By `stretto check`, the check still being off; or why it cannot be."""


MATTERS = {
    # Two optimizers in one body, in passes.
    "adversaries_in_passes": Row("order_in_passes", "differs", "a backward pass follows a step() in one body"),
    "sharpness_in_passes": Row("order_in_passes", "differs", "a backward pass follows a change of parameters by hand"),
    # What the model changes in every forward pass, in passes.
    "counting_passes": Row("buffers_in_passes", "differs", "passes changes in every forward pass"),
    # Accumulation by hand.
    "accumulating": Row("left_over_gradients", "differs", found="with faults: parts from one worker"),
    # Several loops in an epoch.
    "loops_in_epochs": Row("loops_of_epochs", "differs", found=ALIKE),
    # Loops that the job knows nothing of.
    "a_loop_without_batches": Row(
        "steps_outside", "differs", "SGD was asked to step outside of the job's loops", "it ended without a step"
    ),
    "side_by_side": Row(
        "loops_at_once", "differs", "two loops of batches() or steps()", "its 1 steps were over before"
    ),
    # Ends.
    "leaving_alone": Row("loops_of_others", "differs", "ended after 1 loops, that of", "on one worker after 10"),
    "exiting_early": Row("exits", "none", "the script ended inside its loop, at step 26 of 30", ALIKE),
    # What is about the global batch, or about a sample.
    "normalizing_together": Row(
        "statistics_of_all", "1.running_mean, 1.running_var, 5.running_mean and 1 more came to differ"
    ),
    "own_against_all": Row("rows_of_all", "differs"),
    "a_sum_of_a_slice": Row("nothing", "differs", "never: replicas are alike, and so is every number in them"),
    "noisy": Row("numbers_by_sample", "differs"),
    "numbers_of_slices": Row("numbers_by_slice", "differs", found=OTHER_NUMBERS),
    "data_of_its_own": Row("readings", "differs", "is another when it is read again"),
}
NEVER = "never"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with warm_server() as server:
        yield server


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome(folder: Path, warm: ForkServer, name: str, without: str) -> tuple[str, list[float]]:
    """On two workers: why it failed, and how far each result is from plain PyTorch."""
    module: Any = unchecked.ALL.get(name) or importlib.import_module(f"habits.{name}")
    with started(folder, warm, name, 2, WITHOUT=without, PACE_S="30") as harness:
        if name == "accumulating":
            hurry(folder, 9)
            harness.wait_applied(9)
            (folder / "body-w1").touch()
        hurry(folder)
        # A job that has had no loop does not end.
        harness.wait(lambda: harness.over or not any(worker.running for worker in harness.workers), "the end")
        end = harness.last("failed")
        harness.wait(lambda: not any(worker.running for worker in harness.workers), "the workers' end")
    right = module.plain()
    off = [max(by_norm(found[part], right[part]) for part in right) for found in results(folder).values()]
    return ("" if end is None else str(end["reason"])), off


@pytest.mark.parametrize("name", MATTERS)
def test_without_its_check_a_mistake_ends_well_and_is_wrong(tmp_path: Path, warm: ForkServer, name: str) -> None:
    row = MATTERS[name]
    reason, off = outcome(tmp_path / "elastic", warm, name, row.without)
    if row.shows == "differs":
        assert not reason
        assert max(off) > 1e-3
    elif row.shows == "none":
        assert not reason
        assert not off
    else:
        assert row.shows in reason


@pytest.mark.parametrize("name", [name for name in unchecked.ALL if not MATTERS[name].refused.startswith(NEVER)])
def test_with_its_check_it_is_refused_or_right(tmp_path: Path, warm: ForkServer, name: str) -> None:
    """Habits are right in test_loops.py."""
    reason, off = outcome(tmp_path / "elastic", warm, name, "nothing")
    if MATTERS[name].refused:
        assert MATTERS[name].refused in reason
    else:
        assert not reason
        assert max(off) < 1e-9


@pytest.mark.parametrize("name", [name for name, row in MATTERS.items() if row.found not in NOT_FOUND])
def test_a_check_of_the_script_finds_it(
    tmp_path: Path, warm: ForkServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MATTERS[name]
    monkeypatch.setenv("WITHOUT", row.without)
    monkeypatch.setenv("PACE_S", "0")
    for folder in ("source", "out"):
        (tmp_path / folder).mkdir()
    command, source = [*RUN, name, str(tmp_path / "out")], tmp_path / "source"
    steps = MORE_STEPS if name == "accumulating" else STEPS
    verdict = Check(command, tmp_path / "check", source=source, steps=steps, sizes=(2,), warm=warm).run()
    assert any(row.found in finding for finding in verdict.findings), verdict
