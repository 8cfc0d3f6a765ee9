"""Sentences: every number says what it counts, and one is one."""

from __future__ import annotations

import math

import pytest

from stretto.core.reasons import Reason, explain


@pytest.mark.parametrize("reason", Reason)
def test_one_is_not_several(reason: Reason) -> None:
    for text in (explain(reason, 1.0, 1.0), explain(reason, 1.0, 1.0, ["a"])):
        for wrong in ("1 workers", "1 GPUs", "1 jobs", "1 replicas", "1 were", "1 are", "{", "1.0"):
            assert wrong not in text.replace("1.00", "")


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "in about 0 s"),
        (0.44, "in about 0.4 s"),
        (12.6, "in about 13 s"),
        (-1.0, "in about 0 s"),
        (200.0, "in about 3 min"),
        (2e5, "in about 56 h"),
    ],
)
def test_times_have_a_unit(seconds: float, told: str) -> None:
    assert explain(Reason.RESERVED, 2.0, seconds) == f"waits with a reservation for 2 GPUs {told}"


def test_a_time_that_nobody_knows_is_said_to_be_so() -> None:
    assert explain(Reason.RESERVED, 2.0, math.inf) == "waits with a reservation for 2 GPUs at a time that nobody knows"


def test_the_rest_of_those_it_is_about_is_counted() -> None:
    assert explain(Reason.WAITS_FOR_PINNED, 1.0, 5.0, ["a", "b", "c"], 2) == (
        "waits: it needs 1 GPU, and 5 are held by jobs that would lose their work (a, b, c and 2 more)"
    )
    assert explain(Reason.RESERVED_FOR, 4.0, 20.0) == (
        "waits: another job has a reservation for 4 GPUs and comes first, expected to start in about 20 s"
    )
