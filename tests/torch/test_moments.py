"""The moments between steps: a deed is done once, and nobody's loss in them changes a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness

SCRIPT = Path(__file__).parent / "scripts" / "moments.py"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


def start(
    folder: Path, warm: ForkServer, workers: int, case: str, environment: dict[str, str] | None = None, **how: Any
) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPT)],
        workers=workers,
        environment={"CASE": case, "OMP_NUM_THREADS": "1", **(environment or {})},
        options=chaos.OPTIONS,
        warm=warm,
        **how,
    )


def by_hand(folder: Path, case: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CASE": case, "STRETTO_FOLDER": str(folder), "OMP_NUM_THREADS": "1", **more}
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def found(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.found")}


def ended(tmp_path: Path, warm: ForkServer, workers: int, case: str) -> dict[str, dict[str, Any]]:
    with start(tmp_path, warm, workers, case, min_workers=workers) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        return found(tmp_path)


def test_what_follows_a_step_is_done_once_by_each_worker(tmp_path: Path, warm: ForkServer) -> None:
    """Also by one that learns from others that its step was applied: it has their state."""
    each = ended(tmp_path, warm, 2, "deeds")
    assert (tmp_path / "applied").exists()
    steps = list(range(40))
    assert {name: (one["count"], one["own"]) for name, one in each.items()} == {
        "w0": (steps, steps), "w1": (steps, steps),
    }  # fmt: skip
    assert [int(step) for step in (tmp_path / "by leader").read_text().split()] == steps
    assert sorted(path.name for path in tmp_path.glob("saved *")) == ["saved 10", "saved 20", "saved 30", "saved 40"]


def test_what_follows_the_step_of_a_break_is_done_too(tmp_path: Path, warm: ForkServer) -> None:
    each = ended(tmp_path, warm, 2, "deeds_of_a_break")
    assert (tmp_path / "applied").exists()
    assert [one["steps"] for one in each.values()] == [10, 10]
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "by leader").read_text() == "9 "


def test_a_stop_outlives_the_worker_that_asked_for_it(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 1, "stopping", replace=True) as harness:
        harness.wait(lambda: not harness.worker("w0").running, "the first has ended")
        harness.launch(1)
        assert harness.wait_over()["event"] == "done", harness.describe()
    # A stop takes effect one step later.
    assert found(tmp_path)["w1"]["steps"] == 12


def test_nobody_draws_an_epoch_before_the_others(tmp_path: Path, warm: ForkServer) -> None:
    assert by_hand(tmp_path / "hand", "hard_ones_first").returncode == 0
    hand = found(tmp_path / "hand")["alone"]["weights"]
    for one in ended(tmp_path / "job", warm, 2, "hard_ones_first").values():
        assert one["weights"][0] == pytest.approx(hand[0], rel=1e-9)


def test_a_leader_may_die_as_it_tells_of_its_statistics(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 3, "statistics") as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert harness.worker("w0").status == -9
    each = found(tmp_path)
    assert set(each) == {"w1", "w2"}
    assert each["w1"]["judged"] == each["w2"]["judged"]


def test_what_goes_wrong_in_a_break_ends_the_job(tmp_path: Path, warm: ForkServer) -> None:
    hand = by_hand(tmp_path / "hand", "saving_where_nothing_is")
    assert hand.returncode == 1
    assert "No such file or directory: '/nonexistent" in hand.stderr
    with start(tmp_path / "job", warm, 2, "saving_where_nothing_is") as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert "/nonexistent" in end["reason"]


def test_a_loop_in_a_variable_is_left_by_break_as_any_other(tmp_path: Path, warm: ForkServer) -> None:
    hand = by_hand(tmp_path / "hand", "held_by_a_variable")
    assert hand.returncode == 0, hand.stderr
    each = {**found(tmp_path / "hand"), **ended(tmp_path / "job", warm, 2, "held_by_a_variable")}
    assert {name: (one["length"], one["total"], one["there"], one["steps"]) for name, one in each.items()} == {
        "alone": (40, 1.0, True, 6), "w0": (40, 2.0, True, 6), "w1": (40, 2.0, True, 6),
    }  # fmt: skip


def test_functions_that_draw_leave_the_workers_alike(tmp_path: Path, warm: ForkServer) -> None:
    assert by_hand(tmp_path / "hand", "drawing").returncode == 0
    hand = found(tmp_path / "hand")["alone"]
    for one in ended(tmp_path / "job", warm, 2, "drawing").values():
        for name in ("bodies", "orders", "drawn", "total", "last"):
            assert one[name] == hand[name], name
    assert hand["orders"][0] != hand["orders"][1]
    assert hand["drawn"] not in hand["orders"]
    assert all(len(set(numbers)) == 4 for numbers in hand["bodies"])


def test_dicts_are_alike_in_any_order(tmp_path: Path, warm: ForkServer) -> None:
    ended(tmp_path, warm, 2, "filled_in_any_order")


def test_other_threads_exchange_nothing(tmp_path: Path, warm: ForkServer) -> None:
    hand = by_hand(tmp_path / "hand", "exchanging_in_a_thread")
    assert hand.returncode == 1
    assert "in another thread than that of the loop" in hand.stderr


@pytest.mark.parametrize("mode", [{}, {"consistency": "bitwise", "virtual_ranks": 2}], ids=["default", "bitwise"])
def test_more_workers_than_a_step_has_work_for(tmp_path: Path, warm: ForkServer, mode: dict[str, Any]) -> None:
    """Who has none goes along, and nothing changes; whoever it was that wanted so many."""
    join = {"JOIN": json.dumps(mode)}
    with start(tmp_path / "job", warm, 1, "few_samples", environment=join) as harness:
        harness.wait_applied(2)
        harness.want(3)
        assert harness.wait_over()["event"] == "done", harness.describe()
    each = found(tmp_path / "job")
    assert len(each) == 3
    (steps,) = {one["steps"] for one in each.values()}
    hand = by_hand(tmp_path / "hand", "few_samples", STOP=str(steps), **join)
    assert hand.returncode == 0, hand.stderr
    expected = found(tmp_path / "hand")["alone"]["weights"]
    for one in each.values():
        assert one["with_three"] or one["rank"]
        for here, there in zip(one["weights"], expected, strict=True):
            assert np.allclose(here, there, rtol=1e-9, atol=1e-12) if not mode else here == there


def test_a_worker_that_is_sent_away_ends_whatever_its_threads_wait_for(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, "a_thread_that_waits") as harness:
        harness.wait_members(2)
        harness.wait_applied(3)
        harness.want(1)
        harness.wait(lambda: sum(worker.running for worker in harness.workers) == 1, "one has ended")
        assert harness.wait_over()["event"] == "done", harness.describe()


def test_whoever_comes_later_may_look_at_a_batch_as_the_others_did(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 1, "a_look_first") as harness:
        harness.wait_applied(3)
        harness.want(2)
        assert harness.wait_over()["event"] == "done", harness.describe()
        assert "Exception ignored" not in harness.worker("w1").text()
    each = found(tmp_path)
    assert each["w0"]["weights"] == each["w1"]["weights"]
    assert each["w0"]["shape"] == each["w1"]["shape"] == [4]


def test_who_leaves_its_loop_before_it_is_a_member_does_not_come_to_what_follows(
    tmp_path: Path, warm: ForkServer
) -> None:
    with start(tmp_path, warm, 1, "leaving_at_first_sight") as harness:
        harness.wait_applied(3)
        harness.want(2)
        newcomer = harness.worker("w1")
        harness.wait(lambda: not newcomer.running, "the newcomer's end")
        assert newcomer.status == 1
        assert "the script left its loop by break in its first batch, which counted for nothing" in newcomer.text()
        assert harness.wait_over()["event"] == "done", harness.describe()
    assert set(found(tmp_path)) == {"w0"}


def test_a_backward_pass_that_failed_is_not_left_out_on_one_worker(tmp_path: Path, warm: ForkServer) -> None:
    """Alone nothing is wrong with it; in passes the others would count for the whole step."""
    assert by_hand(tmp_path / "hand", "a_failed_backward").returncode == 0
    error = "step 11: the script went on after a backward pass that had failed"
    assert error in by_hand(tmp_path / "passes", "a_failed_backward_in_passes").stderr
    with start(tmp_path / "job", warm, 2, "a_failed_backward", min_workers=2) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert error in end["reason"]


def grown(harness: Harness, to: int) -> None:
    harness.wait_members(2)
    harness.wait_applied(5)
    harness.want(to)


def test_parameters_without_elements_travel(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, "without_elements") as harness:
        grown(harness, 3)
        assert harness.wait_over()["event"] == "done", harness.describe()
    assert set(found(tmp_path)) == {"w0", "w1", "w2"}


@pytest.mark.parametrize("case", ["trained_in_a_thread", "cleaned_up"])
def test_who_leaves_is_no_leader(tmp_path: Path, warm: ForkServer, case: str) -> None:
    with start(tmp_path, warm, 2, case) as harness:
        grown(harness, 1)
        assert harness.wait_over()["event"] == "done", harness.describe()
    each = found(tmp_path)
    assert len(each) == (1 if case == "trained_in_a_thread" else 2)
    assert [one["steps"] for one in each.values() if one["leader"]] == [160]


def test_what_goes_wrong_in_a_first_batch_is_told(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, "failing_at_first_sight") as harness:
        grown(harness, 3)
        harness.wait(lambda: "w2" in {one.name for one in harness.workers if not one.running}, "its end")
        said = harness.worker("w2").text()
        assert "MemoryError: no room for the model" in said
        assert "by break" not in said


def test_an_error_counts_whoever_is_told_of_it(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, "a_hook_of_its_own", min_workers=2) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "ValueError: the data is odd" in end["reason"]


def test_newcomers_prove_all_that_is_trained(tmp_path: Path, warm: ForkServer) -> None:
    with start(tmp_path, warm, 2, "a_count_of_a_head") as harness:
        grown(harness, 3)
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "finds other gradients" in end["reason"]


def test_who_ends_without_a_word_is_not_begun_anew_for_ever(tmp_path: Path, warm: ForkServer) -> None:
    assert by_hand(tmp_path / "hand", "ending_without_a_word").returncode == 0
    with start(tmp_path / "job", warm, 2, "ending_without_a_word", min_workers=2) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed", harness.describe()
        assert "ended with status 0 and without a word, as by os._exit()" in end["reason"]
