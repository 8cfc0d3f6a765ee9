"""Loops as people write them: the result is that of plain PyTorch over the same batches, or one clear error.

Every habit runs by hand, and as a job that grows, loses a worker inside its body and another one inside a sum, grows
again and shrinks; both are compared with a training that knows nothing of Stretto.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import mistakes
import pytest
import torch
from playing import (
    HABITS,
    KINDS,
    MOST_WORKERS,
    Habit,
    by_hand,
    hurry,
    results,
    schedule,
    started,
    strike,
    warm_server,
)

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness
from stretto.testing.harness import EVICTED_CODE


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with warm_server() as server:
        yield server


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small nets, two cores, and several processes that train on them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def struck(harness: Harness, folder: Path, sign: str) -> None:
    """The second worker dies there; another one comes in its place."""
    count = len(harness.members())
    assert strike(harness, folder, sign, harness.members()[1]), harness.describe()
    resized(harness, count)


def resized(harness: Harness, size: int) -> None:
    harness.want(size)
    harness.wait(lambda: len(harness.members()) == size or harness.over, f"{size} members")
    assert not harness.over, harness.describe()


@pytest.mark.parametrize("name", HABITS)
def test_a_habit_has_the_result_of_plain_pytorch(tmp_path: Path, warm: ForkServer, name: str) -> None:
    habit = Habit(name)
    status, text = by_hand(tmp_path / "hand", warm, name)
    assert status == 0, text
    assert not habit.far(results(tmp_path / "hand")["alone"]), "by hand"
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 1) as harness:
        harness.wait_applied(2)
        resized(harness, 3)
        struck(harness, folder, "body")
        struck(harness, folder, "sum")
        if habit.exchanges:
            struck(harness, folder, "exchange")
        resized(harness, 2)
        assert harness.applied() < 60, "the faults came too late"
        hurry(folder)
        assert harness.wait_over()["event"] == "done", harness.describe()
    found = results(folder)
    assert len(found) == 2, "those who were members at the end write the result"
    for worker, result in found.items():
        assert not habit.far(result), worker


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.REFUSED])
def test_a_mistake_is_refused_by_hand_and_elastic(tmp_path: Path, warm: ForkServer, name: str) -> None:
    error = mistakes.REFUSED[mistakes.ALL[name]]
    status, text = by_hand(tmp_path / "hand", warm, name)
    assert status == 1
    assert error in text
    assert "/stretto/torch/" not in text, "what is wrong is in the script"
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 2) as harness:
        hurry(folder)
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert error in end["reason"]


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.GROWN])
def test_a_worker_that_comes_later_shows_that_it_does_the_same(tmp_path: Path, warm: ForkServer, name: str) -> None:
    """Or the job ends: by hand there is nothing wrong."""
    status, text = by_hand(tmp_path / "hand", warm, name)
    assert status == 0, text
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 1) as harness:
        hurry(folder, 20)
        harness.wait_applied(20)
        harness.want(2)
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "which came later, finds other gradients than w0 for the same samples" in end["reason"]


def test_who_comes_later_cannot_be_counted_by_others(tmp_path: Path, warm: ForkServer) -> None:
    """`zip` cannot be told that a worker begins with step 20; by hand, and at any size, it is right."""
    assert by_hand(tmp_path / "hand", warm, "zipped")[0] == 0
    folder = tmp_path / "elastic"
    with started(folder, warm, "zipped", 1) as harness:
        hurry(folder, 20)
        harness.wait_applied(20)
        harness.want(2)
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "the batches of the loop are counted by zip()" in end["reason"]


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.OTHER_DATA])
def test_a_worker_that_comes_later_goes_through_the_same_loop(tmp_path: Path, warm: ForkServer, name: str) -> None:
    """Or it is refused before anybody waits for it, wherever it comes in; the others go on."""
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 1) as harness:
        hurry(folder, 60)
        harness.wait_applied(60)
        harness.want(2)
        newcomer = harness.worker("w1")
        harness.wait(lambda: not newcomer.running, "the newcomer's end")
        said = "the workers of the job differ in loop 0: here, on a worker that came later, it has 48 samples"
        assert said in newcomer.text()
        hurry(folder)
        assert harness.wait_over()["event"] == "done", harness.describe()


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.HARMLESS])
def test_a_worker_that_comes_later_is_not_refused_for_what_it_may_do(
    tmp_path: Path, warm: ForkServer, name: str
) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 1) as harness:
        hurry(folder, 20)
        harness.wait_applied(20)
        resized(harness, 3)
        harness.wait_applied(harness.applied() + 5)
        hurry(folder)
        assert harness.wait_over()["event"] == "done", harness.describe()


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.UNLIKE])
def test_what_workers_do_unlike_is_refused(tmp_path: Path, warm: ForkServer, name: str) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 2) as harness:
        hurry(folder)
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert mistakes.UNLIKE[mistakes.ALL[name]] in end["reason"]


@pytest.mark.parametrize("name", [one.__name__ for one in mistakes.PARTED])
def test_replicas_that_part_are_found_without_any_other_check(tmp_path: Path, warm: ForkServer, name: str) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, name, 2, WITHOUT="comparing_replicas_alone") as harness:
        hurry(folder)
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert mistakes.PARTED[mistakes.ALL[name]] in end["reason"]


def test_nobody_trains_on_after_another_has_ended(tmp_path: Path, warm: ForkServer) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, "the_leader_leaves", 2) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "ended after 3 loops, that of" in end["reason"]


def test_nobody_waits_for_one_who_left_the_loop_to_weigh_a_batch(tmp_path: Path, warm: ForkServer) -> None:
    folder = tmp_path / "elastic"
    with started(folder, warm, "the_leader_breaks", 2) as harness:
        hurry(folder)
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "not all workers left the loop at the same step" in end["reason"]


def test_a_step_that_was_lost_as_the_script_left_its_loop_is_done_by_others(tmp_path: Path, warm: ForkServer) -> None:
    """The first `break` of that habit is in step 37 of the job. A worker that dies in the sum may have sent its part of
    it already: then nothing is lost, and it is tried again."""
    habit = Habit("walking")
    for attempt in range(5):
        folder = tmp_path / f"elastic-{attempt}"
        with started(folder, warm, "walking", 2, min_workers=1, PACE_S="0.5") as harness:
            harness.wait_members(2)
            hurry(folder, 36)
            harness.wait_applied(36)
            victim = harness.members()[1]
            assert strike(harness, folder, "sum", victim), harness.describe()
            hurry(folder)
            assert harness.wait_over()["event"] == "done", harness.describe()
            evicted = [worker.status for worker in harness.workers].count(EVICTED_CODE)
        found = results(folder)
        assert found
        for worker, result in found.items():
            assert not habit.far(result), worker
        if evicted == 1:
            return
    raise AssertionError("no step was ever lost")


def test_epochs_of_epochs_go_on_from_a_checkpoint(tmp_path: Path, warm: ForkServer) -> None:
    """With exchanges between their loops: the results of earlier epochs are not kept, and nobody waits for them."""
    folder, habit = tmp_path / "elastic", Habit("folds_in_epochs")
    with started(folder, warm, "folds_in_epochs", 2, STRETTO_CHECKPOINT_S="0.5") as harness:
        hurry(folder, 30)
        harness.wait_applied(45)
        for name in harness.members():
            harness.worker(name).kill()
        harness.launch(2)
        harness.wait(lambda: len(harness.members()) == 2 or harness.over, "others go on")
        hurry(folder)
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert len(harness.workers) <= 8, harness.describe()
    found = results(folder)
    assert found
    for worker, result in found.items():
        assert not habit.far(result), worker


def test_random_schedules_have_everything_and_can_be_played() -> None:
    """At every size that they come through; see benchmarks/loop_schedules.py."""
    for seed in range(200):
        plan = schedule(seed)
        kinds = Counter(event.kind for event in plan.events)
        assert all(kinds[kind] >= 2 for kind in KINDS)
        sizes = [plan.workers, *(event.size for event in plan.events)]
        assert all(1 <= size <= MOST_WORKERS for size in sizes)
        for before, event in zip(sizes, plan.events, strict=False):
            grows, dies = event.kind == "growth", event.kind in ("body", "sum")
            assert event.size > before if grows else event.size == before - 1 if dies else event.size < before
    assert len({schedule(seed) for seed in range(200)}) == 200
