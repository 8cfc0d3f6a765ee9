"""Quantities: what Kubernetes writes, in whole units; exact, rounded the safe way, refused with a reason."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.kubernetes import quantities

SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3),
    "M": Fraction(10**6), "G": Fraction(10**9), "T": Fraction(10**12), "Ki": Fraction(2**10), "Mi": Fraction(2**20),
    "Gi": Fraction(2**30), "Ti": Fraction(2**40),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "milli"),
    [
        ("100m", 100), ("2", 2000), ("1.5", 1500), (".5", 500), ("5.", 5000), ("1e3", 1_000_000), ("1E3", 1_000_000),
        ("12e-1", 1200), ("+2", 2000), ("-0", 0), ("0", 0), ("1n", 1), ("1u", 1), ("1001u", 2), ("1k", 10**6),
        (2, 2000), (0.5, 500), (0.1, 100), (1e-05, 1),
    ],
)  # fmt: skip
def test_cpu(text: Any, milli: int) -> None:
    assert quantities.milli(text) == milli


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("4Gi", 4096), ("128974848", 123), ("500M", 477), ("1Ki", 1), ("1", 1), ("1m", 1), ("0", 0), ("1Ti", 2**20),
        ("1Pi", 2**30), ("1Ei", 2**40), ("1E", 953674316407), ("1e9", 954), ("1048577", 2), (1048576, 1),
    ],
)  # fmt: skip
def test_memory(text: Any, mib: int) -> None:
    assert quantities.mib(text) == mib


def test_what_there_is_is_rounded_down() -> None:
    assert quantities.mib("1048577", up=False) == 1
    assert quantities.milli("1999u", up=False) == 1
    assert quantities.count("1500m", up=False) == 1
    assert quantities.count("1500m") == 2


@pytest.mark.parametrize("value", ["8", "8.0", "8000m", 8, 8.0, "0.8e1"])
def test_whole_things(value: Any) -> None:
    assert quantities.whole(value) == 8


@pytest.mark.parametrize("value", ["500m", "1.5", 0.25])
def test_no_part_of_a_device(value: Any) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        quantities.whole(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "4 Gi",
        "4GiB",
        "gi",
        "4gi",
        "1e",
        "e3",
        ".",
        "1..2",
        "0x10",
        "1_000",
        "١",
        "nan",
        "inf",
        "1e1000",
        "4\n",
    ],
)
def test_not_a_quantity(value: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantities.milli(value)


@pytest.mark.parametrize("value", [None, True, [], {}, b"1", float("nan"), float("inf")])
def test_not_even_text(value: Any) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantities.mib(value)


@pytest.mark.parametrize("value", ["-1", "-4Gi", "-1n", -1, -0.5])
def test_nothing_below_zero(value: Any) -> None:
    with pytest.raises(ValueError, match="is below 0"):
        quantities.count(value)


@pytest.mark.parametrize("value", ["1e30", "8Ei", "9223372036854775808", "9" * 40, "1e999"])
def test_nothing_beyond_what_kubernetes_holds(value: str) -> None:
    with pytest.raises(ValueError, match="too large"):
        quantities.count(value)


def test_a_long_text_is_shortened_in_the_error() -> None:
    with pytest.raises(ValueError) as caught:
        quantities.milli("x" * 10_000)
    assert len(str(caught.value)) < 200


@given(
    whole=st.integers(0, 10**6),
    digits=st.text("0123456789", max_size=12),
    suffix=st.sampled_from(sorted(SUFFIXES)),
)
def test_as_exact_fractions_have_it(whole: int, digits: str, suffix: str) -> None:
    text = f"{whole}.{digits}" if digits else str(whole)
    exact = Fraction(text) * SUFFIXES[suffix]
    nanos = -(-exact * 10**9 // 1)
    assert quantities.nanos(text + suffix) == nanos
    assert quantities.milli(text + suffix) == -(-nanos // 10**6)
    assert quantities.mib(text + suffix, up=False) == nanos // (10**9 * 2**20)


@given(mantissa=st.integers(0, 10**6), exponent=st.integers(-12, 9), letter=st.sampled_from("eE"))
def test_exponents(mantissa: int, exponent: int, letter: str) -> None:
    exact = Fraction(Decimal(mantissa).scaleb(exponent))
    assert quantities.nanos(f"{mantissa}{letter}{exponent}") == -(-exact * 10**9 // 1)


@given(st.integers(0, 2**40))
def test_texts_round_trip(value: int) -> None:
    assert quantities.milli(quantities.milli_text(value)) == value
    assert quantities.mib(quantities.mib_text(value)) == value


def test_texts_are_as_kubernetes_writes_them() -> None:
    assert [quantities.milli_text(value) for value in (1500, 2000, 1, 0)] == ["1500m", "2", "1m", "0"]
    assert [quantities.mib_text(value) for value in (1, 1024, 1536, 4096, 2**20, 2**30, 0)] == [
        "1Mi", "1Gi", "1536Mi", "4Gi", "1Ti", "1024Ti", "0Mi",
    ]  # fmt: skip
