"""Kubernetes quantities (`100m`, `1.5`, `4Gi`, `500M`, `1e3`) in the core's units, and back.

Exact: a quantity is a whole number of billionths, as Kubernetes itself has it (what is finer is rounded up). What was
asked for is rounded up to whole units; what there is may be rounded down. `ValueError` says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

MOST_COUNTED = 2**40
"""Of what others wrote no more is counted: no machine has as much, and sums over a cluster stay within 64 bits."""

_NANO = 10**9
_MIB = 2**20
_MOST = 2**63 - 1
"""Kubernetes holds no larger quantity."""

_SUFFIXES = {
    "n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 10**3), "": Fraction(1),
    "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "P": Fraction(10**15), "E": Fraction(10**18),
    "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30),
    "Ti": Fraction(2**40), "Pi": Fraction(2**50), "Ei": Fraction(2**60),
}  # fmt: skip
_QUANTITY = re.compile(
    r"(?P<sign>[+-]?)(?P<number>[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})"
    r"(?:[eE](?P<exponent>[+-]?[0-9]{1,3})|(?P<suffix>[KMGTPE]i|[numkMGTPE])?)"
)
_TEN = Fraction(10)
_BINARY = ("Mi", "Gi", "Ti")


def milli(value: Any, *, up: bool = True) -> int:
    """Thousandths, as CPU is counted."""
    return _units(nanos(value), _NANO // 1000, up)


def mib(value: Any, *, up: bool = True) -> int:
    """A number of bytes in MiB."""
    return _units(nanos(value), _NANO * _MIB, up)


def count(value: Any, *, up: bool = True) -> int:
    """Whole things: devices, pods, volumes."""
    return _units(nanos(value), _NANO, up)


def whole(value: Any) -> int:
    """Whole things, of which no part can be had."""
    if nanos(value) % _NANO:
        raise ValueError(f"{_quoted(value)} is not a whole number, and no part of one can be had")
    return count(value)


def nanos(value: Any) -> int:
    """Billionths of one, from a text or from a number as JSON has it."""
    if isinstance(value, str):
        return _parsed(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{_quoted(value)} is not a quantity; write a number, or a text such as 500m or 4Gi")
    return _parsed(str(value))


def counted(amounts: Mapping[str, int]) -> dict[str, int]:
    """What there is to count of some resources."""
    return {name: min(amount, MOST_COUNTED) for name, amount in amounts.items() if amount}


def milli_text(value: int) -> str:
    """Thousandths as Kubernetes writes them: 1500 is `1500m`, 2000 is `2`."""
    return f"{value}m" if value % 1000 else str(value // 1000)


def mib_text(value: int) -> str:
    """MiB as Kubernetes writes them, in the largest unit that leaves a whole number: 4096 is `4Gi`."""
    unit = 0
    while value and value % 1024 == 0 and unit < len(_BINARY) - 1:
        value, unit = value // 1024, unit + 1
    return f"{value}{_BINARY[unit]}"


@lru_cache(maxsize=4096)
def _parsed(text: str) -> int:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{_quoted(text)} is not a quantity; write a number with or without a unit, as 500m or 4Gi")
    power = match["exponent"]
    size = Fraction(match["number"]) * (_SUFFIXES[match["suffix"] or ""] if power is None else _TEN ** int(power))
    if match["sign"] == "-" and size:
        raise ValueError(f"{_quoted(text)} is below 0")
    if size > _MOST:
        raise ValueError(f"{_quoted(text)} is too large; the most is {_MOST}")
    return -(-size.numerator * _NANO // size.denominator)


def _units(number: int, unit: int, up: bool) -> int:
    return -(-number // unit) if up else number // unit


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
