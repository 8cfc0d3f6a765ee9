"""How shares of one node's devices are packed: by request, as many on a device as its milli and memory hold.

`pack` is a function of the shares alone, never of the order in which they came, so a node that was found to hold
some workers is found to hold them again. Best fit decreasing decides nearly always; where it needs too many
devices, a short exhaustive search has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

GPU = 1000
_SEARCH_STEPS = 4000


class Share(NamedTuple):
    """What one worker takes of one device."""

    milli: int
    mib: int


Shares: TypeAlias = dict[Share, int]
"""How many workers of each share."""


def times(share: Share, milli: int, mib: int) -> int:
    """How often the share fits into so much."""
    by_milli = milli // share.milli if share.milli else GPU
    by_mib = mib // share.mib if share.mib else GPU
    return min(by_milli, by_mib)


class Bins:
    """The shared devices of one node: what is left on each, and which shares it holds."""

    __slots__ = ("held", "mib", "milli", "size_mib")

    def __init__(self, size_mib: int) -> None:
        self.size_mib = size_mib
        self.milli: list[int] = []
        self.mib: list[int] = []
        self.held: list[Shares] = []

    def room(self, share: Share) -> int:
        """Workers of this share that fit beside what is there."""
        return sum(times(share, milli, mib) for milli, mib in zip(self.milli, self.mib, strict=True))

    def put(self, share: Share, count: int, limit: int) -> bool:
        """Best fit: the fullest device that still takes one; a new one, up to `limit`, when none does."""
        while count:
            spot = self._fullest(share)
            if spot < 0:
                if len(self.milli) >= limit or times(share, GPU, self.size_mib) < 1:
                    return False
                spot = self.open()
            several = min(count, times(share, self.milli[spot], self.mib[spot]))
            self.add(spot, share, several)
            count -= several
        return True

    def open(self) -> int:
        """Share one more device."""
        self.milli.append(GPU)
        self.mib.append(self.size_mib)
        self.held.append({})
        return len(self.milli) - 1

    def add(self, spot: int, share: Share, count: int) -> None:
        """Put workers on this device; the caller knows that they fit."""
        self.milli[spot] -= share.milli * count
        self.mib[spot] -= share.mib * count
        self.held[spot][share] = self.held[spot].get(share, 0) + count

    def drop(self, share: Share, count: int) -> None:
        """Take workers away, from the last device first."""
        for spot in reversed(range(len(self.held))):
            gone = min(count, self.held[spot].get(share, 0))
            if gone:
                self.add(spot, share, -gone)
                count -= gone

    def _fullest(self, share: Share) -> int:
        best, least = -1, (GPU + 1, 0)
        for spot, (milli, mib) in enumerate(zip(self.milli, self.mib, strict=True)):
            if milli >= share.milli and mib >= share.mib and (milli, mib) < least:
                best, least = spot, (milli, mib)
        return best


def size(share: Share, size_mib: int) -> int:
    """How large a share is, by its larger dimension: packing goes from large to small."""
    return max(share.milli * max(size_mib, 1), share.mib * GPU)


def descending(shares: Mapping[Share, int], size_mib: int) -> list[Share]:
    """The shares in the order in which they are packed."""
    return sorted(shares, key=lambda share: (-size(share, size_mib), -share.milli, -share.mib))


def pack(shares: Mapping[Share, int], limit: int, size_mib: int) -> tuple[Bins, bool] | None:
    """Shares on at most `limit` devices, and whether it took a search; None where no way was found."""
    order = descending(shares, size_mib)
    bins = Bins(size_mib)
    if all(bins.put(share, shares[share], limit) for share in order):
        return bins, False
    if not _could(shares, limit, size_mib):
        return None
    found = _search([share for share in order for _ in range(shares[share])], limit, size_mib)
    return (found, True) if found is not None else None


def _could(shares: Mapping[Share, int], limit: int, size_mib: int) -> bool:
    milli = sum(share.milli * count for share, count in shares.items())
    mib = sum(share.mib * count for share, count in shares.items())
    return milli <= limit * GPU and mib <= limit * size_mib


def _search(items: list[Share], limit: int, size_mib: int) -> Bins | None:
    """Depth first over the devices each item may go to; equal devices and equal items are tried once."""
    left = [(GPU, size_mib)] * limit
    at = [0] * len(items)
    steps = 0

    def go(i: int) -> bool:
        nonlocal steps
        if i == len(items):
            return True
        first = at[i - 1] if i and items[i] == items[i - 1] else 0
        tried: set[tuple[int, int]] = set()
        for spot in range(first, limit):
            milli, mib = left[spot]
            if milli < items[i].milli or mib < items[i].mib or left[spot] in tried:
                continue
            tried.add(left[spot])
            steps += 1
            if steps > _SEARCH_STEPS:
                return False
            left[spot] = (milli - items[i].milli, mib - items[i].mib)
            at[i] = spot
            if go(i + 1):
                return True
            left[spot] = (milli, mib)
        return False

    if len(items) > _SEARCH_STEPS // 8 or not go(0):
        return None
    bins = Bins(size_mib)
    for spot in sorted(set(at)):
        bins.open()
        for item, where in zip(items, at, strict=True):
            if where == spot:
                bins.add(len(bins.milli) - 1, item, 1)
    return bins
