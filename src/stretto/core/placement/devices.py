"""Which devices of its node each worker gets.

A worker of one GPU or more has whole devices for itself. A narrower one shares a device with others, by request: the
sum of their milli is at most 1000 and their memory fits. Among the devices that take it, the fullest is chosen.
Workers that have a seat keep it; only where a newcomer would find none is its node dealt out afresh.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from stretto.core.placement.room import Shape, shape_of
from stretto.core.placement.sharing import GPU, Share, pack, size
from stretto.core.snapshot import IntArray, Snapshot
from stretto.errors import PolicyError


class Seat(msgspec.Struct, frozen=True, order=True):
    """One worker's devices, by index on its node; none for a worker without a GPU."""

    node: int
    job: int
    """The job's number."""
    role: bool
    """The seat of the job's fixed roles, not of a worker."""
    devices: tuple[int, ...]
    milli: int
    """What it takes of each of its devices, 1000 when it has them for itself."""
    mib: int


def assign(view: Snapshot, placed: IntArray, pool: IntArray, held: Iterable[Seat] = ()) -> tuple[Seat, ...]:
    """A seat for every placed worker, in order of node, job and device; `held` are the seats taken now."""
    taken: dict[int, list[Seat]] = {}
    for seat in held:
        taken.setdefault(seat.node, []).append(seat)
    seats: list[Seat] = []
    for node in np.flatnonzero(placed.any(axis=0)).tolist():
        seats += _node(view, placed, pool, node, taken.get(node, []))
    return tuple(sorted(seats))


class _Guest(msgspec.Struct, frozen=True):
    """A worker, or a job's fixed roles, that needs a seat."""

    job: int
    role: bool
    shape: Shape


class _Devices:
    """The devices of one node while seats are given out."""

    def __init__(self, node: int, count: int, size_mib: int) -> None:
        self.node, self.size_mib = node, size_mib
        self.milli, self.mib = [GPU] * count, [size_mib] * count

    def whole(self) -> list[int]:
        return [i for i, (milli, mib) in enumerate(zip(self.milli, self.mib, strict=True)) if self._unused(milli, mib)]

    def _unused(self, milli: int, mib: int) -> bool:
        return milli == GPU and mib == self.size_mib

    def fullest(self, share: Share) -> list[int]:
        """The device for a share: a shared one before an unused one."""
        fits = [i for i in range(len(self.milli)) if self.milli[i] >= share.milli and self.mib[i] >= share.mib]
        fits.sort(key=lambda i: (self._unused(self.milli[i], self.mib[i]), self.milli[i], self.mib[i], i))
        return fits[:1]

    def seat(self, guest: _Guest, devices: Sequence[int]) -> Seat | None:
        """Seat the guest on these devices, if it fits there."""
        milli, mib = _per_device(guest.shape)
        if any(self.milli[i] < milli or self.mib[i] < mib for i in devices):
            return None
        alone = guest.shape.devices > 0
        for i in devices:
            self.milli[i] -= milli
            self.mib[i] = 0 if alone else self.mib[i] - mib
        return Seat(self.node, guest.job, guest.role, tuple(devices), milli, mib)


def _node(view: Snapshot, placed: IntArray, pool: IntArray, node: int, held: list[Seat]) -> list[Seat]:
    guests = _guests(view, placed, pool, node)
    count, size_mib = int(view.nodes.devices[node]), int(view.nodes.gpu_memory_mib[node])
    kept = _around(guests, _Devices(node, count, size_mib), held)
    if kept is None:
        kept = _afresh(guests, _Devices(node, count, size_mib))
    if kept is None:
        raise PolicyError(
            f"the workers placed on node {view.nodes.name[node]!r} do not fit its {count} devices",
            hint="the placement was not carried out; this is a defect of the placement",
        )
    return kept


def _guests(view: Snapshot, placed: IntArray, pool: IntArray, node: int) -> list[_Guest]:
    guests: list[_Guest] = []
    for j in np.flatnonzero(placed[:, node]).tolist():
        number, where = int(view.job[j]), int(pool[j])
        cpu, memory, mib = view.demand[j].tolist()
        guests += [_Guest(number, False, shape_of(where, int(view.width[j]), cpu, memory, mib))] * int(placed[j, node])
        if view.fixed_milli[j] and not placed[j, :node].any():
            guests.append(_Guest(number, True, shape_of(where, int(view.fixed_milli[j]), 0, 0, 0)))
    return guests


def _around(guests: list[_Guest], devices: _Devices, held: list[Seat]) -> list[Seat] | None:
    """Everybody who has a seat keeps it, the others find one; None if one of them cannot."""
    seats: list[Seat] = []
    rest: list[_Guest] = []
    free = sorted(held)
    for guest in guests:
        mine = next((seat for seat in free if _suits(seat, guest, len(devices.milli))), None)
        kept = devices.seat(guest, mine.devices) if mine else None
        if mine is None or kept is None:
            rest.append(guest)
        else:
            free.remove(mine)
            seats.append(kept)
    for guest in sorted(rest, key=lambda guest: _large_first(guest, devices.size_mib)):
        seat = _find(guest, devices)
        if seat is None:
            return None
        seats.append(seat)
    return seats


def _suits(seat: Seat, guest: _Guest, count: int) -> bool:
    same = (seat.job, seat.role, seat.milli, seat.mib) == (guest.job, guest.role, *_per_device(guest.shape))
    return same and len(seat.devices) == _device_count(guest.shape) and all(i < count for i in seat.devices)


def _find(guest: _Guest, devices: _Devices) -> Seat | None:
    if guest.shape.share is not None:
        spot = devices.fullest(guest.shape.share)
        return devices.seat(guest, spot) if spot else None
    spots = devices.whole()[: guest.shape.devices]
    return devices.seat(guest, spots) if len(spots) == guest.shape.devices else None


def _afresh(guests: list[_Guest], devices: _Devices) -> list[Seat] | None:
    """Whole devices from the front, shares as `sharing.pack` puts them behind."""
    seats: list[Seat] = []
    shared: dict[Share, list[_Guest]] = {}
    for guest in guests:
        if guest.shape.share is not None:
            shared.setdefault(guest.shape.share, []).append(guest)
            continue
        seat = _find(guest, devices)
        if seat is None:
            return None
        seats.append(seat)
    spots = devices.whole()
    packed = pack({share: len(waiting) for share, waiting in shared.items()}, len(spots), devices.size_mib)
    if packed is None:
        return None
    for spot, shares in zip(spots, packed[0].held, strict=False):
        for share, count in shares.items():
            for _ in range(count):
                seat = devices.seat(shared[share].pop(0), [spot])
                assert seat is not None
                seats.append(seat)
    return seats


def _per_device(shape: Shape) -> tuple[int, int]:
    if shape.share is not None:
        return shape.share
    return (GPU, shape.device_mib) if shape.devices else (0, 0)


def _device_count(shape: Shape) -> int:
    return 1 if shape.share is not None else shape.devices


def _large_first(guest: _Guest, size_mib: int) -> tuple[int, int, int]:
    share = guest.shape.share
    return (-guest.shape.devices, -size(share, size_mib) if share else 0, guest.job)
