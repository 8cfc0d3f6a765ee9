"""What a script exchanges with the other workers: sums and means, rows, values of the leader.

In a loop's body they belong to the step, as gradients do. Only samples that count take part, so the result does not
depend on the number of workers; after a loss every call returns what this worker has, and the batch is done again. A
batch in several passes is added up on the way: workers meet in the last pass.

Between loops the calls are numbered. One that was cut short is repeated with those that are left; results are kept and
travel with the state, so whoever missed one, or comes later, gets it from there.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from stretto.runtime.saying import say
from stretto.torch import beside, chance
from stretto.torch.checks import TrainingError
from stretto.torch.data import Part
from stretto.torch.groups import Group, GroupBroken
from stretto.torch.leaves import Leaves, moved
from stretto.torch.packing import pack, unpack
from stretto.torch.state import Reply
from stretto.torch.wayback import Gathered, NoWayBack, Summed

if TYPE_CHECKING:
    from stretto.torch.job import Job

LARGE = 1 << 18
"""Bytes: sums of more are added up on the way instead of being gathered by everybody."""
MOST_BETWEEN = 1 << 20
"""Bytes of a result between loops: it travels with the state."""
MOST_KEPT = 1 << 26
"""Of all of them together."""
_REPLY_BYTES = 1 << 10
"""That each takes besides."""
_OPERATIONS = ("sum", "mean", "max", "min")
_STAMP = struct.Struct(">Q")
"""A generation, in an order of bytes in which the first is the least."""


class Share(NamedTuple):
    """What one pass of one worker gives to a sum."""

    order: int
    """Where its samples are in the global batch."""
    weight: float
    """How much they count in a mean."""
    tensors: list[Tensor]


class _Pass(NamedTuple):
    """The pass through the body that is under way."""

    part: Part
    rows: int
    """Samples of the step, of all workers together."""
    own: int
    """Of this worker in the step, so far."""
    last: bool
    several: bool
    """Whether a step of this loop may take several."""


class Collectives:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pass: _Pass | None = None
        self._calls = 0
        """Sums in this pass."""
        self._kept: list[list[Share]] = []
        """Of the passes of this step, by the number of the call."""
        self._passes = self._phase = self._own = 0
        self._between = 0
        """Calls since `_key` is as it is."""
        self._key = (-1, -1, -1)
        self._kept_bytes = 0
        self._acts = False
        """Something runs that only some workers do, or that is done once a step is applied."""
        self._functions = 0
        """Of the script, called for what this pass exchanges."""
        self.waits = False
        """Whether this worker waits for the others. Of any thread."""

    # Where the script is.

    def begin(self, part: Part, rows: int, *, first: bool, last: bool, several: bool, phase: int = 0) -> None:
        """A pass through the body, or of a phase, begins; its step has so many samples of all workers together."""
        if first or phase != self._phase:
            self._kept, self._passes, self._phase, self._own = [], 0, phase, 0
        self._own += len(part.indices)
        self._pass, self._calls, self._functions = _Pass(part, rows, self._own, last, several), 0, 0
        self._passes += 1

    def end(self) -> None:
        """It is over."""
        self._pass = None

    # What scripts call.

    def all_reduce(self, value: Any, operation: str = "sum") -> Any:
        """The sum (or mean, max, min) over the workers."""
        if operation not in _OPERATIONS:
            raise TrainingError(f"all_reduce(…, {operation!r})", hint=f"use one of {', '.join(_OPERATIONS)}")
        if self._inside("all_reduce"):
            given = Leaves(self._made(value))
            found = self._reduced(given.tensors, operation, given.kinds)
            return given.build(found, mean=operation == "mean")

        def contribute() -> bytes:
            return pack(Leaves(self._made(value)).plain())

        call = f"all_reduce(…, {operation!r})"
        return self._numbered(call, contribute, lambda each: _summed(call, operation, each), value)

    def all_gather(self, rows: Any) -> Any:
        """The rows of all workers, in the order of the global batch."""
        if not self._inside("all_gather"):

            def contribute() -> bytes:
                return pack(_rows(self._made(rows)).detach())

            return self._numbered("all_gather(…)", contribute, _together, rows)
        given = _rows(self._made(rows))
        self._refuse_passes("all_gather")
        if given.requires_grad and torch.is_grad_enabled():
            found: Tensor = Gathered.apply(self, given)  # type: ignore[no-untyped-call]
            return found
        return self.gathered(given.detach())[0]

    def broadcast(self, value: Any) -> Any:
        """What the leader has. A function is called by the leader; by others only where nothing counts."""

        def contribute() -> bytes:
            return pack(self._made(value)) if self._job.rank == 0 or self._on_its_way() else b""

        if not self._inside("broadcast"):
            return self._numbered("broadcast(…)", contribute, lambda each: each[0], value)
        self._refuse_passes("broadcast")
        told = self._in_body("broadcast(…)", contribute)
        given = pack(self._made(value)) if told is None else told[0]
        return moved(unpack(given), self._job.device)

    def barrier(self) -> None:
        """Wait for all workers."""
        if not self._inside("barrier"):
            self._numbered("barrier()", lambda: b"", lambda _: pack(None), None)
            return
        self._refuse_passes("barrier")
        self._in_body("barrier()", lambda: b"")

    # In the body.

    def _inside(self, name: str) -> bool:
        """Whether the script is in a loop's body; where it may not call this it gets an error."""
        self._job.refuse_forks()
        self._job.refuse_threads(f"job.{name}()")
        self.refuse_inside(f"job.{name}()")
        if self._pass is not None:
            self._job.uses_late()
        return self._pass is not None

    def refuse_inside(self, what: str) -> None:
        """Of something that only some workers call."""
        if self._acts:
            raise TrainingError(
                f"{what} in a function that is called after a step, by the leader alone, or by another exchange",
                hint="call it in the loop's body or between loops, and use its result in the function",
            )

    def _made(self, value: Any) -> Any:
        """A value, or what a function of the script returns, which exchanges nothing itself."""
        if not callable(value):
            return value
        job = self._job
        with self.by_oneself():
            if self._pass is None:
                # Its random numbers are those of this call: see `_numbered`.
                return value()
            self._functions += 1
            with chance.apart(job.device, job.loop_seed, *job.cursor[:2], self._phase, self._functions):
                return value()

    @contextlib.contextmanager
    def by_oneself(self) -> Iterator[None]:
        """What runs inside is not done by all workers, or not equally often: it exchanges nothing."""
        acts, self._acts = self._acts, True
        try:
            yield
        finally:
            self._acts = acts

    def _refuse_passes(self, name: str) -> None:
        assert self._pass is not None
        if self._pass.several:
            raise TrainingError(
                f"job.{name}() in a body that takes several passes for a step",
                hint="leave per_worker and accumulate out, and bitwise mode: one pass must have all samples of this "
                "worker (all_reduce is possible, its result is that of the global batch in the last pass)",
            )

    def _reduced(self, tensors: list[Tensor], operation: str, kinds: str) -> list[Tensor]:
        now = self._pass
        assert now is not None
        wanted = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        if now.several or operation in ("max", "min"):
            found = self.summed([one.detach() for one in tensors], operation, kinds)
            return [NoWayBack.apply(one, *tensors) for one in found] if wanted else found  # type: ignore[no-untyped-call]
        if wanted:
            return list(Summed.apply(self, operation, kinds, *tensors))  # type: ignore[no-untyped-call]
        return self.summed(tensors, operation, kinds)

    def summed(self, tensors: list[Tensor], operation: str, kinds: str) -> list[Tensor]:
        """Over the passes and workers of this step; before its last pass what this worker has so far."""
        now = self._pass
        assert now is not None
        number, self._calls = self._calls, self._calls + 1
        if number == len(self._kept):
            self._kept.append([])
        if now.several and len(self._kept[number]) != self._passes - 1:
            raise TrainingError(
                "job.all_reduce() was not called in every pass of this step",
                hint="call it in each pass through the body (its result is that of the global batch in the last one)",
            )
        order = now.part.virtual if self._job.virtual_ranks else now.part.first
        # What counts for nothing is kept, too, to be told apart from a call that was left out.
        weight = now.part.share if now.part.counts else -1.0
        if now.several:
            # Scripts use their tensors again.
            tensors = [one.clone() for one in tensors]
        own = [*self._kept[number], Share(order, weight, tensors)]
        if now.several:
            self._kept[number] = own
        shares = [one for one in own if one.weight >= 0.0]
        if not now.last or self._group() is None:
            return self._guessed(fold(operation, shares or own), operation)
        about = f"all_reduce(…, {operation!r}) of {kinds}"
        if not now.several and operation in ("sum", "mean") and _size(tensors) > LARGE:
            return self._summed_on_the_way(about, shares, tensors, operation)
        told = self._in_body(about, lambda: pack([list(one) for one in shares]))
        if told is None:
            return self._guessed(fold(operation, shares or own), operation)
        everything = [Share(*one) for given in told for one in unpack(given)]
        found = fold(operation, sorted(everything, key=lambda one: one.order))
        return [one.to(like.device) for one, like in zip(found, tensors, strict=True)]

    def _summed_on_the_way(
        self, about: str, shares: list[Share], tensors: list[Tensor], operation: str
    ) -> list[Tensor]:
        mean = operation == "mean"
        weighed = [one.cpu().to(_wide(one, mean=mean)) for one in tensors]
        if not shares:
            weighed = [torch.zeros_like(one) for one in weighed]
        elif mean:
            weighed = [one * shares[0].weight for one in weighed]
        if not self.add_up(about, weighed):
            return fold(operation, shares) if shares else tensors
        exact = [like.dtype.is_floating_point or like.dtype.is_complex for like in tensors]
        return [
            one.to(like.device, like.dtype if kept else one.dtype)
            for one, like, kept in zip(weighed, tensors, exact, strict=True)
        ]

    def gathered(self, rows: Tensor) -> tuple[Tensor, int, int]:
        """All that count, and which of them are this worker's."""
        now = self._pass
        assert now is not None
        about = f"all_gather(…) of {_rows_of(rows)}"
        told = self._in_body(about, lambda: pack(rows if now.part.counts else rows[:0]))
        if told is None:
            return self._filled(rows), 0, len(rows)
        each = [unpack(given) for given in told]
        rank = self._job.rank
        first = sum(len(one) for one in each[:rank])
        return torch.cat(each).to(rows.device), first, first + len(each[rank])

    def _void(self) -> bool:
        """Whether nothing of this pass counts: a rehearsal, or one in which a worker was lost."""
        job, now = self._job, self._pass
        lost = job.reducer is not None and job.reducer.failed is not None
        return now is not None and (lost or (job.world is not None and not job.generation))

    def _guessed(self, found: list[Tensor], operation: str) -> list[Tensor]:
        """Where nothing counts, a sum of about the size that it would have: bodies rely on it."""
        now = self._pass
        if now is None or operation != "sum" or not self._void():
            return found
        factor = now.rows / max(1, now.own)
        return [
            one * factor if one.is_floating_point() or one.is_complex() else (one * factor).round().long()
            for one in found
        ]

    def _filled(self, rows: Tensor) -> Tensor:
        """Where nothing counts, as many rows as there would be: this worker's own, again and again."""
        now = self._pass
        if now is None or not self._void() or not len(rows):
            return rows.clone()
        wanted = max(len(rows), round(len(rows) * now.rows / max(1, len(now.part.indices))))
        return rows[torch.arange(wanted, device=rows.device) % len(rows)]

    def meets(self, what: str) -> bool:
        """Whether what a model does in this pass is about all workers' samples."""
        if self._pass is not None and self._pass.several:
            raise TrainingError(
                f"{what} in a body that takes several passes for a step",
                hint="leave per_worker and accumulate out, and bitwise mode, in which BatchNorm is exact by itself",
            )
        self._job.uses_late()
        return self._group() is not None

    def share(self) -> float:
        """How much this worker's samples count; 1 where nobody else is asked."""
        now = self._pass
        if now is None or self._group() is None:
            return 1.0
        return now.part.share if now.part.counts else 0.0

    def counts(self) -> bool:
        return self._pass is None or self._pass.part.counts or self._group() is None

    def add_up(self, about: str, tensors: list[Tensor]) -> bool:
        """Over the workers, in place; False if there is nobody else, or not any more: then nothing is changed."""
        if self._group() is None:
            return False
        small = _size(tensors) <= LARGE
        told = self._in_body(about, lambda: pack(tensors) if small else b"")
        if told is None:
            return False
        if not small:
            copies = [one.cpu().clone() for one in tensors]
            if not self._try(lambda group: beside.add_up(group, about, copies)):
                return False
            for one, found in zip(tensors, copies, strict=True):
                one.copy_(found)
            return True
        each = [unpack(given) for given in told]
        for place, one in enumerate(tensors):
            total = each[0][place]
            for other in each[1:]:
                total = total + other[place]
            one.copy_(total)
        return True

    def _group(self) -> Group | None:
        """Whom a body exchanges with: nobody alone, in a rehearsal (which has no group) and after a loss."""
        job = self._job
        group = job.world.group if job.world is not None else None
        if self._pass is None or group is None or group.size == 1:
            return None
        return group if job.reducer is not None and job.reducer.failed is None else None

    def _in_body(self, about: str, contribute: Callable[[], bytes]) -> list[bytes] | None:
        """What everybody gave, by rank; None if there is nobody else, or not any more."""
        if self._group() is None:
            return None
        given = contribute()
        told: list[beside.Told] = []
        if not self._try(lambda group: told.extend(beside.exchange(group, about, given))):
            return None
        return [one.given for one in told]

    def _try(self, act: Callable[[Group], None]) -> bool:
        group, job = self._group(), self._job
        if group is None or job.reducer is None:
            return False
        self.waits = True
        try:
            act(group)
        except GroupBroken as broken:
            # The step is done again; until then everybody is on its own.
            job.reducer.fail(broken)
            return False
        finally:
            self.waits = False
        return True

    def _exchange(self, group: Group, about: str, given: bytes) -> list[beside.Told]:
        self.waits = True
        try:
            return beside.exchange(group, about, given)
        finally:
            self.waits = False

    # Between loops.

    def _on_its_way(self) -> bool:
        """Whether the job is in a later epoch, and does not know any more what it agreed on here: until the script is
        there nothing counts, and nobody else takes part."""
        job = self._job
        return job.world is not None and job.cursor.loop > job.between_key()[0]

    def _numbered(
        self, call: str, contribute: Callable[[], bytes], join: Callable[[list[bytes]], bytes], value: Any
    ) -> Any:
        """The result of a call between loops, made by `join` of what everybody gave of a value. What a function of the
        script returns can be made again for other workers. It may draw random numbers: on all workers generators are
        where the call sets them, whether they have called it, called it twice, or only got the result."""
        if not callable(value):
            return self._agreed(call, contribute, join, fixed=value is not None)
        job = self._job
        job.be_between(call)
        place = (job.between_key(), self._between if job.between_key() == self._key else 0, job.device)

        def made() -> bytes:
            chance.begin_exchange(*place)
            return contribute()

        found = self._agreed(call, made, join, fixed=False)
        chance.begin_exchange(*place, over=True)
        return found

    def _agreed(
        self, call: str, contribute: Callable[[], bytes], join: Callable[[list[bytes]], bytes], *, fixed: bool
    ) -> Any:
        job = self._job
        job.be_between(call)
        key = job.between_key()
        if key != self._key:
            self._key, self._between = key, 0
        number, self._between = self._between, self._between + 1
        about = f"{call} between loops, at {key[0]}.{key[1]}.{key[2]}"
        # Whoever comes in while this is repeated may have what another has given already.
        stamp = _STAMP.pack(job.generation if fixed else 0)
        members = job.members
        while True:
            known = [one for one in job.holder.replies if one.key == key]
            if number < len(known):
                if known[number].about != about:
                    raise TrainingError(
                        f"this worker is at job.{about}, the others were at job.{known[number].about}",
                        hint="let all workers call the same, equally often and in the same order",
                    )
                return moved(unpack(known[number].result.numpy().tobytes()), job.device)
            if self._on_its_way():
                return moved(unpack(join([contribute()])), job.device)
            group = job.world.group if job.world is not None else None
            if fixed and not members <= job.members:
                members &= job.members
                say(
                    f"a worker was lost in job.{call}: it is repeated with what those that are left "
                    f"({len(members)}) have; given a function instead of a value, it would be computed anew"
                )
            if group is None:
                self._keep(key, about, join([contribute()]))
                continue
            try:
                told = self._exchange(group, about, stamp + contribute())
                first = min(one.given[: _STAMP.size] for one in told)
                given = [one.given[_STAMP.size :] for one in told if one.given.startswith(first)]
                self._keep(key, about, join(given))
                # Nobody goes on, to its end perhaps, before all have it.
                self._exchange(group, about, b"")
            except GroupBroken as broken:
                job.recover(broken, between=True)
                self._refuse_ended(about, key, number)

    def _refuse_ended(self, about: str, key: tuple[int, int, int], number: int) -> None:
        """Whose script has ended had the result of all that it called, and so has everybody else."""
        world = self._job.world
        ended = world.member.ended if world is not None else ()
        if ended and number >= sum(one.key == key for one in self._job.holder.replies):
            raise TrainingError(
                f"the script of {', '.join(ended)} has ended, and this worker waits for it in job.{about}",
                hint="let all workers call the same, equally often",
            )

    def _keep(self, key: tuple[int, int, int], about: str, result: bytes) -> None:
        if len(result) > MOST_BETWEEN:
            raise TrainingError(
                f"job.{about} gives {len(result) / 2**20:.1f} MiB",
                hint="between loops at most 1 MiB: do it in the body of a loop, in pieces",
            )
        self._job.holder.add_reply(Reply(key, about, torch.frombuffer(bytearray(result), dtype=torch.uint8)))
        replies = self._job.holder.replies
        self._kept_bytes += len(result) + _REPLY_BYTES
        if self._kept_bytes > MOST_KEPT:
            self._kept_bytes = sum(len(one.result) + _REPLY_BYTES for one in replies)
        if self._kept_bytes > MOST_KEPT:
            raise TrainingError(
                f"{len(replies)} results of exchanges between loops take more than {MOST_KEPT >> 20} MiB: all are kept "
                "for workers that come later",
                hint="count epochs with `for epoch in job.epochs(n)`: then those of earlier epochs are forgotten",
            )


def _summed(call: str, operation: str, each: list[bytes]) -> bytes:
    values = [Leaves(unpack(given)) for given in each]
    _check_same(call, [one.kinds for one in values])
    found = fold(operation, [Share(0, 1.0, one.tensors) for one in values])
    return pack(values[0].build(found, mean=operation == "mean"))


def _together(each: list[bytes]) -> bytes:
    rows = [unpack(given) for given in each]
    _check_same("all_gather(…)", [_rows_of(one) for one in rows])
    return pack(torch.cat(rows))


def _check_same(call: str, kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        raise TrainingError(
            f"the workers gave job.{call} different things: {'; '.join(sorted(set(kinds)))}",
            hint="give it the same shapes",
        )


def fold(operation: str, shares: list[Share]) -> list[Tensor]:
    """One after the other, in the order given."""
    columns = zip(*(one.tensors for one in shares), strict=True)
    weights = [max(one.weight, 0.0) for one in shares]
    return [_folded(operation, list(column), weights) for column in columns]


def _wide(tensor: Tensor, *, mean: bool) -> torch.dtype:
    """In which it is added up."""
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if mean or tensor.is_floating_point() else torch.int64


def _folded(operation: str, column: list[Tensor], weights: list[float]) -> Tensor:
    if operation == "mean":
        total = sum(weights)
        kind = column[0].dtype if column[0].is_floating_point() or column[0].is_complex() else torch.float64
        if len(column) == 1 or not total:
            return column[0].to(kind, copy=True)
        wide = torch.complex128 if column[0].is_complex() else torch.float64
        found = torch.zeros(column[0].shape, dtype=wide, device=column[0].device)
        for one, weight in zip(column, weights, strict=True):
            if weight:
                found += one.to(wide) * (weight / total)
        return found.to(kind)
    joins: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add, "max": torch.maximum, "min": torch.minimum,
    }  # fmt: skip
    join = joins[operation]
    found = column[0].clone()
    for one in column[1:]:
        found = join(found, one)
    return found


def _rows(given: Any) -> Tensor:
    if not isinstance(given, Tensor) or not given.dim():
        kind = "single number" if isinstance(given, Tensor) else type(given).__name__
        raise TrainingError(f"job.all_gather() of a {kind}", hint="give a tensor with a row for each sample")
    return given


def _rows_of(given: Tensor) -> str:
    return f"{str(given.dtype).removeprefix('torch.')} rows of {list(given.shape[1:])}"


def _size(tensors: list[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
