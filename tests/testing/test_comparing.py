"""Where two runs part, and why, from made-up records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from stretto.testing.comparing import Case, Comparison, Part, Record, causes, compare, goes_its_own_way
from stretto.torch.recording import SUMS, Digest


def record(step: int, *, rank: int = 0, size: int = 1, dtype: str = "float64", **values: Any) -> Record:
    """Parameters `a`, `b`; whatever begins with `v_` is a plain value, with `m_` a moment, with `s_` a buffer."""
    kinds = {"v": "value", "m": "optimizer momentum_buffer", "s": "buffer"}
    parts = {
        name: Part(
            kinds.get(name[0], "parameter") if name[1:2] == "_" else "parameter",
            dtype,
            np.size(value),
            np.atleast_1d(np.asarray(value, dtype=float)),
        )
        for name, value in values.items()
    }
    return Record(step, rank, worker=f"w{rank}", size=size, parts=parts)


def line(*records: Record) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for one in records:
        found.setdefault(one.step, []).append(one)
    return found


START = np.array([1.0, 2.0])
STEPS = [START, START + 0.1, START + 0.3]
ALONE = line(*(record(i, a=a, b=[3.0]) for i, a in enumerate(STEPS)))


def other(**changed: Mapping[int, Any]) -> dict[int, list[Record]]:
    """The same run but for some values at some steps."""
    return line(
        *(
            record(i, **{"a": a, "b": [3.0], **{name: at[i] for name, at in changed.items() if i in at}})
            for i, a in enumerate(STEPS)
        )
    )


def test_equal_runs_do_not_part() -> None:
    found = compare(ALONE, other(), {})
    assert (found.parting, found.largest, found.steps, found.blurred) == (None, 0.0, 2, ())
    assert causes(ALONE, [Case(2, False, found)]) == []


def test_the_first_step_and_tensor_are_named() -> None:
    found = compare(ALONE, other(b={2: [3.3]}), {})
    assert found.parting is not None
    assert (found.parting.step, found.parting.name, found.parting.tensors, found.parting.of) == (2, "b", 1, 2)
    assert found.parting.difference == pytest.approx(0.3 / 3.3)


@pytest.mark.parametrize(("dtype", "allowed"), [("float64", 1e-9), ("float32", 1e-4), ("bfloat16", 1e-2), ("int64", 0)])
def test_what_is_allowed_depends_on_the_type(dtype: str, allowed: float) -> None:
    reference = line(record(1, dtype=dtype, a=[1.0]))
    for difference, parts in ((allowed / 2, False), (2 * allowed + 1e-11, True)):
        found = compare(reference, line(record(1, dtype=dtype, a=[1.0 + difference])), {})
        assert (found.parting is not None) is parts


def test_what_rounding_does_by_itself_is_allowed() -> None:
    """And a tensor of which nothing but rounding is left is not judged, and said to be so."""
    off = other(b={2: [3.0 + 3e-8]})
    assert compare(ALONE, off, {}).parting is not None
    assert compare(ALONE, off, other(b={2: [3.0 + 3e-9]})).parting is None
    found = compare(ALONE, other(b={2: [4.0]}), other(b={2: [3.1]}))
    assert found.parting is None
    assert found.blurred == ("b",)


def test_a_gradient_of_rounding_only_is_small_beside_others() -> None:
    reference, there = line(record(1, a=[1.0], b=[1e-16])), line(record(1, a=[1.0], b=[-1e-16]))
    assert compare(reference, there, {}).parting is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_is_different_unless_it_is_so_in_both(value: float) -> None:
    found = compare(ALONE, other(b={2: [value]}), {})
    assert found.parting is not None
    assert found.parting.difference == math.inf
    assert compare(other(b={2: [value]}), other(b={2: [value]}), {}).parting is None


def test_a_part_that_only_one_of_them_has_is_a_difference() -> None:
    for reference, there in ((ALONE, other(c={2: [1.0]})), (other(c={2: [1.0]}), ALONE)):
        found = compare(reference, there, {})
        assert found.parting is not None
        assert found.parting.name == "c"


def scaled(size: int, factor: float) -> Comparison:
    moved = {1: START + 0.1 * factor, 2: START + 0.3 * factor}
    return compare(ALONE, other(a=moved), {})


def test_updates_that_shrink_with_the_number_of_workers_are_of_a_sum() -> None:
    found = causes(ALONE, [Case(2, False, scaled(2, 1 / 2)), Case(3, False, scaled(3, 1 / 3))])
    assert len(found) == 1
    assert "0.50 on 2, 0.33 on 3" in found[0]
    assert "sum" in found[0]
    assert not any("sum" in text for text in causes(ALONE, [Case(2, False, scaled(2, 0.8))]))


def test_random_numbers_and_batch_norm_are_named() -> None:
    traits = {"dropout": ["drop"], "batch_norm": ["norm"]}
    reference = {i: [replace(r[0], drawn=("torch",), traits=traits)] for i, r in ALONE.items()}
    found = causes(reference, [Case(2, False, scaled(2, 0.8))])
    assert [("drop" in text, "BatchNorm (norm)" in text) for text in found] == [(True, False), (False, True)]


def test_workers_that_differ_from_each_other_are_told_from_those_that_are_wrong_together() -> None:
    run = line(record(1, size=2, v_lr=0.1, a=[1.0]), record(1, rank=1, size=2, v_lr=0.2, a=[1.0]))
    reference = line(record(1, v_lr=0.2, a=[1.0]))
    found = compare(reference, run, {})
    assert found.replicas is not None
    assert found.replicas.name == "v_lr"
    (text,) = causes(reference, [Case(2, False, found)])
    assert "differ from each other after step 1, in v_lr" in text
    (text,) = causes(ALONE, [Case(2, False, scaled(2, 0.8))])
    assert "agree with each other" in text


def test_what_only_the_disturbed_run_shows() -> None:
    calm = compare(ALONE, other(), {})
    (text,) = causes(ALONE, [Case(2, False, calm), Case(0, True, scaled(2, 0.8))])
    assert "job.keep" in text


def test_a_run_that_differs_from_its_own_repetition() -> None:
    assert goes_its_own_way(ALONE, other()) == 0.0
    assert goes_its_own_way(ALONE, other(a={1: START - 0.1, 2: START})) > 0.5


def test_digests_keep_the_distance() -> None:
    """Also of large tensors, of which only sums are kept; small ones are kept whole."""
    chance = torch.Generator().manual_seed(0)
    digest = Digest()
    small = torch.randn(SUMS, generator=chance)
    assert torch.equal(torch.from_numpy(digest.of(small)), small.double())
    large = torch.randn(300, 700, generator=chance)
    moved = large + 1e-3 * torch.randn(300, 700, generator=chance)
    kept = np.linalg.norm(digest.of(moved) - digest.of(large))
    assert kept == pytest.approx(float((moved - large).norm()), rel=0.2)
    assert np.array_equal(digest.of(large), Digest().of(large.clone()))
