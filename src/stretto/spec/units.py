"""Quantities with units, as people write them: `4Gi`, `500m`, `0.25`, `1h30m`; inside, numbers of the core's units.

Written out again they carry their unit, so that a file survives the round trip. The functions raise `ValueError` with a
sentence that says what to write instead; pydantic passes it on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, WithJsonSchema

_MIB = 2**20
_BYTES = {
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
}  # fmt: skip
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"[0-9]{1,15}(?:\.[0-9]{1,9})?"
_SIZE = re.compile(rf"({_NUMBER})\s*(Ki|Mi|Gi|Ti|k|K|M|G|T)B?")
_PART = re.compile(rf"({_NUMBER})\s*(ms|s|m|h|d)\s*")
_MILLI = re.compile(rf"({_NUMBER})(m?)")

_STEPS = re.compile(r"([0-9]{1,15})\s*steps?")

_TIMES = rf"({_NUMBER}\s*(ms|s|m|h|d)\s*)+"
_DURATION = rf"^{_TIMES}$"

MOST_MIB = 2**30
MOST_CPU_MILLI = 10**7
MOST_GPUS = 1024
MOST_SECONDS = 10 * 366 * 86400.0
_SHORTEST_S = math.nextafter(0.0, 1.0)
"""Anything above 0."""

_N = TypeVar("_N", int, float)


def mib(value: Any) -> int:
    """Memory in MiB, rounded up."""
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise _no(value, "an amount of memory; write a number with its unit, such as 512Mi or 4Gi")
    size = math.ceil(float(match[1]) * _BYTES[match[2]] / _MIB)
    return _within(value, size, 1, MOST_MIB, "memory goes from 1Mi to 1024Ti")


def cpu_milli(value: Any) -> int:
    """CPU in thousandths of a core."""
    milli = _milli(value, "a number of CPU cores; write a number, such as 2, 0.5 or 500m")
    return _within(value, milli, 1, MOST_CPU_MILLI, "cpu goes from 1m to 10000 cores")


def gpu_milli(value: Any) -> int:
    """GPUs in thousandths: a share of one below 1, whole GPUs from there on."""
    milli = _milli(value, "a number of GPUs; write a whole number, or a share such as 0.25")
    if milli > 1000 and milli % 1000:
        raise ValueError(
            f"{_quoted(value)} GPUs cannot be given; a share is below 1, more than one GPU is a whole number"
        )
    return _within(value, milli, 0, MOST_GPUS * 1000, f"gpu goes from 0 to {MOST_GPUS}")


def seconds(value: Any) -> float:
    """A length of time in seconds."""
    total = _seconds(value)
    if total is None:
        raise _no(value, "a length of time; write it with its unit, such as 30s, 5m, 4h or 1h30m")
    return _within(value, total, _SHORTEST_S, MOST_SECONDS, "give a time above 0 and up to 10 years")


@dataclass(frozen=True)
class Expectation:
    """How long a job is expected to be: a time, or a number of steps; the other one is 0."""

    seconds: float = 0.0
    steps: int = 0

    def written(self) -> float | str:
        return f"{self.steps} steps" if self.steps else self.seconds


def expectation(value: Any) -> Expectation:
    """`2h` or `5000 steps`."""
    if isinstance(value, Expectation):
        return value
    steps = _STEPS.fullmatch(value.strip()) if isinstance(value, str) else None
    if steps is not None and not int(steps[1]):
        raise ValueError(f"{_quoted(value)} is out of range; a job has at least 1 step")
    total = 0.0 if steps else _seconds(value)
    if total is None:
        raise _no(value, "a length; write a time such as 30m or 2h, or a number of steps such as 5000 steps")
    if steps is not None:
        return Expectation(steps=int(steps[1]))
    return Expectation(_within(value, total, _SHORTEST_S, MOST_SECONDS, "give a time above 0 and up to 10 years"))


def _no(value: Any, what: str) -> ValueError:
    return ValueError(f"{_quoted(value)} is not {what}")


def _within(value: Any, number: _N, least: float, most: float, rule: str) -> _N:
    if not least <= number <= most:
        raise ValueError(f"{_quoted(value)} is out of range; {rule}")
    return number


def _milli(value: Any, what: str) -> int:
    """Thousandths of a number or of a text like `0.5` or `500m`; below 0 when no number of them is in range."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 <= value <= 10**9:
            return -1
        return _at_least_one(value * 1000)
    match = _MILLI.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise _no(value, what)
    return _at_least_one(float(match[1]) * (1 if match[2] else 1000))


def _at_least_one(milli: float) -> int:
    """Rounded, but nothing that was asked for disappears."""
    return max(round(milli), 1) if milli > 0 else 0


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) <= MOST_SECONDS else -1.0
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()
    parts = _PART.findall(text)
    if "".join(f"{number}{unit}" for number, unit in parts) != re.sub(r"\s", "", text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _schema(description: str, pattern: str, example: str, number: bool = True) -> WithJsonSchema:
    text = {"type": "string", "pattern": pattern}
    shape = {"anyOf": [{"type": "number"}, text]} if number else text
    return WithJsonSchema({**shape, "description": description, "examples": [example]})


Memory = Annotated[
    int,
    BeforeValidator(mib),
    PlainSerializer(lambda size: f"{size}Mi"),
    _schema("Memory, for example 512Mi or 4Gi.", rf"^{_NUMBER}\s*(Ki|Mi|Gi|Ti|k|K|M|G|T)B?$", "4Gi", number=False),
]
Cpu = Annotated[
    int,
    BeforeValidator(cpu_milli),
    PlainSerializer(lambda milli: f"{milli}m"),
    _schema("CPU cores, for example 2, 0.5 or 500m.", rf"^{_NUMBER}m?$", "500m"),
]
Gpu = Annotated[
    int,
    BeforeValidator(gpu_milli),
    PlainSerializer(lambda milli: f"{milli}m"),
    _schema("GPUs: a whole number, or a share below 1.", rf"^{_NUMBER}m?$", "0.25"),
]
Duration = Annotated[
    float,
    BeforeValidator(seconds),
    _schema("A length of time, for example 30s, 5m or 1h30m; a number is in seconds.", _DURATION, "5m"),
]
Expect = Annotated[
    Expectation,
    PlainValidator(expectation),
    PlainSerializer(Expectation.written),
    _schema("2h, or 5000 steps; a number is in seconds.", rf"^({_TIMES}|[0-9]{{1,15}}\s*steps?)$", "2h"),
]
