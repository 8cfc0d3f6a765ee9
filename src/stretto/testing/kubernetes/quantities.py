"""Amounts as Kubernetes writes them ("500m", "2", "256Gi"), as whole numbers: millicores of CPU, units of the rest.

Read apart from `stretto.kubernetes.quantities`: the played kubelet checks what the controller counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal

_SUFFIXES = {
    "": Decimal(1), "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
}  # fmt: skip


def amount(resource: str, text: str) -> int:
    """Rounded up, as Kubernetes does."""
    number = text.rstrip("numkKMGTPi")
    value = Decimal(number) * _SUFFIXES[text[len(number) :]]
    return int((value * 1000 if resource == "cpu" else value).to_integral_value(ROUND_CEILING))


def amounts(resources: Mapping[str, str]) -> dict[str, int]:
    return {name: amount(name, text) for name, text in resources.items()}
