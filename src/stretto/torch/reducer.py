"""The global gradient, summed over the members while the backward pass still runs.

Parameters are put into buckets in the reverse of their order, which is about the order in which their gradients become
known. As soon as a bucket and all before it are complete, its sum over the members begins; when `backward()` returns,
`p.grad` holds the gradient of the global batch. Which group is used is decided anew at every boundary with `exchange`:
nothing is torn down or wrapped again when members come and go.

Each member contributes `weight * p.grad`, where the weights of all members add up to one. So what was in `p.grad`
before the backward pass, being the same for everybody, comes out unchanged (up to rounding), and several backward
passes in one batch add up to the right sum. A member with weight 0 contributes zeros, whatever it computed.

`p.grad` becomes a view of its bucket: no copy back. A bucket whose old gradients somebody still holds is not written to
again; it gets a new buffer. After a failure all buffers are abandoned, since a late peer may still write to them;
`backward()` does not raise then, but `failed` says so and the gradient is worth nothing.

With every backward pass travels a small vector: which parameters anybody used (one that nobody used keeps what it
had) and the caller's `flags`. It rides on the last bucket where that is float32 or float64, else it is a sum of its
own.

Micro-batches: `accumulate(share)` before each pass but the last, `conclude(share)` before the last, where the shares of
one member add up to one. Until then the weighted gradients are kept aside and the script sees zeros in `p.grad`, so
that clipping or logging in the loop's body cannot touch half a sum.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from stretto.errors import UsageError
from stretto.torch.frozen import Trained
from stretto.torch.groups import Group, GroupBroken, Pending

MIB = 1 << 20
LARGE = 1 << 16
"""Elements. A gradient of this size is put into its bucket when it appears: it is still in the cache, and its memory
serves the next one. Smaller ones go in together when the bucket is complete: for them calls cost more than memory."""

_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


class Reducer:
    """Hooks on the parameters of one model. All members must build it from the same parameters in the same order."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        bucket_mib: float = 25.0,
        first_bucket_mib: float = 1.0,
        flags: int = 4,
        trained: Trained | None = None,
    ) -> None:
        self.failed: GroupBroken | None = None
        """Why the gradient of this batch is worth nothing; None when it is good."""
        self.rounds = 0
        """Sums over the group that were completed since `exchange`: one per backward pass, none when alone."""
        self.backwards = 0
        """Backward passes that were heard since `exchange`."""
        self.carried: bool | None = None
        """Whether the first of them added to gradients of the batch before; None: there were none, or nobody looked."""
        self.began: Callable[[], None] = _nothing
        """Called when a backward pass begins."""
        self.rebuilt: Callable[[], None] = _nothing
        """Called when other parameters require gradients than before."""
        self.broke: Callable[[], None] = _nothing
        """Called when the gradient of a batch is lost: inside the backward pass, before the script can go on."""
        self._parameters = list({id(given): given for given in parameters}.values())
        self.known = trained or Trained()
        """What it is set up for, whether it requires gradients at the moment or not."""
        self._built = 0
        self._limits = (int(first_bucket_mib * MIB), int(bucket_mib * MIB))
        self._flags = [0.0] * flags
        self._group: Group | None = None
        self._weight = 1.0
        self._share = 1.0
        self._accumulating = False
        self._aside: dict[int, torch.Tensor] = {}
        self._trained: list[torch.nn.Parameter] = []
        self._in_round = False
        self._backward = -1
        """Which backward pass it is."""
        self._next = 0
        self._pending: list[Pending] = []
        self._hooks: list[Any] = []
        self._scaling: list[Any] = []
        self._result: torch.Tensor | None = None
        self._landed: torch.cuda.Event | None = None
        """When `_result` is there, if it comes from a GPU."""
        self._left: list[tuple[torch.Tensor, int] | None] = []
        """Gradients of the batch before, and how often they were written to; by parameter, if anybody looks."""
        self._build()

    def exchange(
        self, group: Group | None, weight: float = 1.0, flags: Sequence[float] = (), *, watch: bool = False
    ) -> None:
        """What the backward passes do from now on: sum over this group (None: nobody else) with this weight.

        `flags` are added up over the members (not weighted). Forgets a failure, and what was kept aside. `watch`: note
        what becomes of old gradients, and backward passes alone, too.
        """
        self._interrupt()
        self.tell(flags)
        self._group = group if group is not None and group.size > 1 else None
        self._weight = weight if self._group is not None else 1.0
        self._result = self._landed = None
        self._accumulating = False
        self._set_share(1.0)
        self._aside.clear()
        self.failed, self.rounds, self.backwards, self.carried = None, 0, 0, None
        if self._changed():
            self._build()
            self.rebuilt()
        self._left = [_written(given.grad) for given in self._trained] if watch else []
        self._listen(watch or self._group is not None)

    def tell(self, flags: Sequence[float]) -> None:
        """What the next sum carries instead."""
        self._flags = [*flags, *[0.0] * (len(self._flags) - len(flags))]

    def accumulate(self, share: float) -> None:
        """The next backward passes only add `share` times their gradient to what is kept aside."""
        self._accumulating = True
        self._set_share(share)
        self._listen(True)

    def conclude(self, share: float) -> None:
        """The next backward pass adds `share` times its gradient, and the sum is reduced over the group."""
        self._accumulating = False
        self._set_share(share)

    def contribute_nothing(self) -> None:
        """Take part in one sum without a backward pass; the global gradient is in `p.grad` afterwards."""
        if self._in_round:
            raise RuntimeError("a backward pass is under way")
        self._in_round = True
        self._finish()

    def fail(self, error: GroupBroken) -> None:
        """The gradient of this batch will not arrive."""
        if self.failed is None:
            # Without the frames that it went through: they would keep alive what scripts let go of.
            self.failed = error.with_traceback(None)
            self.broke()

    def take_in(self) -> None:
        """Parameters have begun to require gradients, and are about to be used."""
        if not self._in_round and self._changed():
            self._build()

    def unseen(self) -> bool:
        """Whether a parameter has a gradient that was not added up, because it required none when it was used."""
        return not all(self._required) and any(
            given.requires_grad and given.grad is not None and not known
            for given, known in zip(self._parameters, self._required, strict=True)
        )

    @property
    def listens(self) -> bool:
        """Whether backward passes are heard."""
        return bool(self._hooks)

    @property
    def flags(self) -> list[float]:
        """The sum of everybody's flags, as of the last backward pass (before it, and alone, the own ones).

        On a GPU reading it waits for that pass, not for what came after it.
        """
        if self._landed is not None:
            self._landed.synchronize()
        found: list[float] = self._flags if self._result is None else self._result.tolist()
        return found

    @property
    def awaits_others(self) -> bool:
        """Whether this member has sent all that it has to, and the sum is not there yet. Of any thread."""
        sent = self._in_round and self._next == len(self._buckets) and bool(self._pending)
        landed = self._landed
        return sent or (landed is not None and not landed.query())  # type: ignore[no-untyped-call]

    @property
    def interrupted(self) -> bool:
        """Asked outside of backward passes: whether the last one ended with an exception."""
        return self._in_round

    def forget_interrupted(self) -> None:
        """It was alone: nobody waits for the rest."""
        self._reset()

    @property
    def withholds(self) -> bool:
        """Whether gradients of earlier passes wait for one of the last pass, which had none."""
        return bool(self._aside) and self.failed is None

    def close(self) -> None:
        """Leave the parameters alone again."""
        self._interrupt()
        self._group = None
        self._set_share(1.0)
        self._listen(False)

    # Buckets.

    def _build(self) -> None:
        was_listening, share, kept = bool(self._hooks), self._share, self._kept_aside()
        self._listen(False)
        self._set_share(1.0)
        self.known.add(given for given in self._parameters if given.requires_grad)
        self._required, self._built = [id(given) in self.known.ids for given in self._parameters], self.known.version
        self._trained = [given for given, known in zip(self._parameters, self._required, strict=True) if known]
        self._aside = {index: kept[id(given)] for index, given in enumerate(self._trained) if id(given) in kept}
        self._left = []
        self._fired = bytearray(len(self._trained))
        slots = len(self._trained) + len(self._flags)
        cuts = _cut(self._trained, *self._limits)
        last = self._trained[cuts[-1][0]] if cuts else None
        rides = last is not None and last.dtype in (torch.float32, torch.float64)
        self._buckets = [
            _Bucket([(index, self._trained[index]) for index in cut], slots if rides and cut is cuts[-1] else 0)
            for cut in cuts
        ]
        self._rides = rides
        self._own = np.zeros(slots)
        self._sent = torch.from_numpy(self._own)
        self._tail = torch.zeros(slots, dtype=torch.float64, device=last.device if last is not None else "cpu")
        self._listen(was_listening)
        self._set_share(share)

    def _kept_aside(self) -> dict[int, torch.Tensor]:
        return {id(self._trained[index]): kept for index, kept in self._aside.items()}

    def _changed(self) -> bool:
        new = not all(self._required) and any(
            given.requires_grad and not known for given, known in zip(self._parameters, self._required, strict=True)
        )
        return (
            new
            or self._built != self.known.version
            or any(
                bucket.buffer.dtype != bucket.parameters[0].dtype or bucket.buffer.device != bucket.parameters[0].device
                for bucket in self._buckets
            )
        )

    # Hooks.

    def _listen(self, wanted: bool) -> None:
        """Alone and with whole batches there is nothing to hear, and nothing is paid for."""
        if wanted and not self._hooks:
            for bucket in self._buckets:
                for index, given in zip(bucket.indices, bucket.parameters, strict=True):
                    self._hooks.append(_after_accumulation(given, self._hook(index, bucket)))
        elif not wanted and self._hooks:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _hook(self, index: int, bucket: _Bucket) -> Callable[[torch.Tensor], None]:
        """Called for every parameter in every backward pass: as short as it can be."""
        large = self._trained[index].numel() >= LARGE

        def fired(_: torch.Tensor) -> None:
            if not self._in_round:
                self._begin()
            marks = self._fired
            if marks[index]:
                self._again(index, bucket)
                return
            marks[index] = 1
            if self._left:
                self._look_at(index)
            if not self._accumulating and self._group is not None and self.failed is None:
                if large:
                    bucket.take(index, self._weight, self._aside)
                bucket.left -= 1
                if not bucket.left:
                    self._advance()

        return fired

    def _set_share(self, share: float) -> None:
        self._share = share
        if share != 1.0 and not self._scaling:
            self._scaling = [_on_gradient(given, self._scale) for given in self._trained]
        elif share == 1.0 and self._scaling:
            for hook in self._scaling:
                hook.remove()
            self._scaling.clear()

    def _scale(self, gradient: torch.Tensor) -> torch.Tensor:
        # A mean over nothing is not a number: zero times it would not be zero.
        return gradient * self._share if self._share else torch.zeros_like(gradient)

    # A round: one backward pass.

    def _begin(self) -> None:
        self._in_round, self._backward = True, _backward_under_way()
        self.backwards += 1
        self.began()
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _look_at(self, index: int) -> None:
        """Whether a gradient was added to the one of the batch before; not if that was replaced, or written to before
        this pass was, by which it is set to zero."""
        before, self._left[index] = self._left[index], None
        if before is not None:
            gradient, writes = before
            added = self._trained[index].grad is gradient and gradient._version == writes + 1
            self.carried = bool(self.carried) or added

    def _again(self, index: int, bucket: _Bucket) -> None:
        """A gradient that came twice in one pass: no harm before it was put into its bucket."""
        summed = not self._accumulating and self._group is not None
        if _backward_under_way() != self._backward:
            raise UsageError(
                "a backward pass failed, and the script called backward() again in the same batch",
                hint="let the error end the script; or do smaller batches from the start (size=, per_worker=)",
            )
        if summed and (bucket in self._buckets[: self._next] or self._trained[index].numel() >= LARGE):
            raise UsageError(
                "a parameter got a second gradient in one backward pass, after its sum had begun",
                hint="with torch.utils.checkpoint pass use_reentrant=False",
            )

    def _advance(self) -> None:
        """Send what is complete, in the one order that is the same for everybody."""
        while self._next < len(self._buckets) and not self._buckets[self._next].left:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._group is None or self.failed is not None:
            return
        with torch.no_grad():
            bucket.complete(self._weight, self._fired, self._aside)
            if self._rides and self._next == len(self._buckets):
                self._write_tail()
        self._send(self._group, bucket.buffer)

    def _write_tail(self) -> None:
        """Only after everything else has been filled in: by then it is known what was used."""
        if self._rides:
            self._tail = self._buckets[-1].tail
        count = len(self._fired)
        self._own[:count] = list(self._fired) if 0 in self._fired else 1.0
        self._own[count:] = self._flags
        self._tail.copy_(self._sent)

    def _send(self, group: Group, tensor: torch.Tensor) -> None:
        try:
            self._pending.append(group.all_reduce(tensor))
        except GroupBroken as error:
            self.fail(error)

    def _finish(self) -> None:
        """The end of the backward pass."""
        with torch.no_grad():
            if self._accumulating:
                self._put_aside()
            elif self._group is None:
                self._take_back()
            elif self.failed is None:
                self._reduce(self._group)
            else:
                # Before all of it was sent, or in an earlier pass.
                self._abandon()
        self._reset()

    def _put_aside(self) -> None:
        for index, given in enumerate(self._trained):
            if not self._fired[index] or given.grad is None:
                continue
            check_dense(given.grad)
            if index in self._aside:
                self._aside[index].add_(given.grad)
                given.grad.zero_()
            else:
                self._aside[index] = given.grad
                given.grad = torch.zeros_like(given.grad)

    def _take_back(self) -> None:
        for index, kept in self._aside.items():
            given = self._trained[index]
            given.grad = kept if given.grad is None else kept.add_(given.grad)
        self._aside.clear()

    def _reduce(self, group: Group) -> None:
        while self._next < len(self._buckets):
            self._send_next()
        if not self._rides:
            self._write_tail()
            self._send(group, self._tail)
        self._aside.clear()
        if self.failed is None:
            self._wait()
        if self.failed is not None:
            self._abandon()
            return
        self._show_unused()
        self._keep_flags(self._tail[len(self._trained) :])
        self.rounds += 1

    def _keep_flags(self, summed: torch.Tensor) -> None:
        if not summed.is_cuda:
            self._result = summed.clone()
            return
        self._result = torch.empty(summed.shape, dtype=summed.dtype, pin_memory=True)
        self._result.copy_(summed, non_blocking=True)
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record()

    def _wait(self) -> None:
        try:
            for pending in self._pending:
                pending.wait()
        except GroupBroken as error:
            self.fail(error)

    def _show_unused(self) -> None:
        """Give the sum to parameters that only others used; what nobody used keeps what it had."""
        if 0 not in self._fired:
            return
        used = self._tail[: len(self._trained)].cpu() > 0
        for bucket in self._buckets:
            for index, given, view in zip(bucket.indices, bucket.parameters, bucket.views, strict=True):
                if used[index] and not self._fired[index]:
                    given.grad = view

    def _abandon(self) -> None:
        """Nobody knows who still writes to the buffers. Gradients become zeros: the script may still look at them."""
        self._tail = torch.zeros_like(self._tail)
        for bucket in self._buckets:
            bucket.renew()
            for given, view in zip(bucket.parameters, bucket.views, strict=True):
                if given.grad is not None:
                    given.grad = view

    def _reset(self) -> None:
        self._pending.clear()
        self._fired = bytearray(len(self._trained))
        self._next = 0
        self._in_round = False
        for bucket in self._buckets:
            bucket.left = len(bucket.parameters)
            bucket.fresh = False

    def _interrupt(self) -> None:
        """A backward pass that ended with an exception left its sum half done: let the others not wait for the rest."""
        if not self._in_round:
            return
        if self._group is not None:
            self._group.abort("a backward pass was interrupted")
            self._abandon()
        self._reset()


def _backward_under_way() -> int:
    """Its number; -1 outside of one."""
    number: int = torch._C._current_graph_task_id()
    return number


class _Bucket:
    """Parameters of one type on one device, with one buffer for their gradients: large ones, small ones, the tail."""

    def __init__(self, members: list[tuple[int, torch.nn.Parameter]], tail: int) -> None:
        members = sorted(members, key=lambda member: member[1].numel() < LARGE)
        self.indices = [index for index, _ in members]
        self.parameters = [given for _, given in members]
        self.position = {index: position for position, index in enumerate(self.indices)}
        self.large = sum(given.numel() >= LARGE for given in self.parameters)
        self.left = len(members)
        self.extra = tail
        self.renew()

    def renew(self) -> None:
        """A new buffer; whoever holds a part of the old one keeps it."""
        first = self.parameters[0]
        sizes = [given.numel() for given in self.parameters]
        elements, large = sum(sizes), sum(sizes[: self.large])
        self.buffer = torch.zeros(elements + self.extra, dtype=first.dtype, device=first.device)
        self.small, self.tail = self.buffer[large:elements], self.buffer[elements:]
        self.storage = self.buffer.untyped_storage()
        offsets = itertools.accumulate(sizes, initial=0)
        self.views = [
            _window(self.buffer, offset, given) for offset, given in zip(offsets, self.parameters, strict=False)
        ]
        self.idle = self._holders()
        self.fresh = True

    def take(self, index: int, weight: float, aside: dict[int, torch.Tensor]) -> None:
        """Put in one gradient, and let the parameter show it from there."""
        position = self.position[index]
        given = self.parameters[position]
        with torch.no_grad():
            grad = _joined(aside.get(index), given.grad)
            self._free(grad is self.views[position])
            view = self.views[position]
            self._put(grad, view, weight)
            given.grad = view

    def complete(self, weight: float, fired: bytearray, aside: dict[int, torch.Tensor]) -> None:
        """Put in what is not in yet: small ones, and what had no gradient in this pass."""
        grads = [given.grad for given in self.parameters]
        if aside:
            self._late(weight, fired, aside)
            grads = [_joined(aside.get(index), grad) for index, grad in zip(self.indices, grads, strict=True)]
        at_home = all(map(operator.is_, grads[self.large :], self.views[self.large :]))
        self._free(at_home)
        for position in range(self.large):
            if not fired[self.indices[position]]:
                self._put(grads[position], self.views[position], weight)
        if weight == 0.0:
            self.small.zero_()
        elif at_home:
            self.small.mul_(weight)
        else:
            self._put_small(grads[self.large :], self.views[self.large :], weight)
        for position in range(self.large, len(self.parameters)):
            if fired[self.indices[position]]:
                self.parameters[position].grad = self.views[position]
        self.fresh = False

    def _late(self, weight: float, fired: bytearray, aside: dict[int, torch.Tensor]) -> None:
        """What got its gradient in an earlier micro-batch only."""
        for index in self.indices:
            if index in aside and not fired[index]:
                fired[index] = 1
                if self.position[index] < self.large:
                    self.take(index, weight, aside)

    def _free(self, at_home: bool) -> None:
        """Before the first is put in: not where a script still holds gradients of an earlier pass."""
        if not self.fresh and not at_home and self._holders() != self.idle:
            self.renew()
        self.fresh = True

    def _put(self, grad: torch.Tensor | None, view: torch.Tensor, weight: float) -> None:
        if grad is None or weight == 0.0:
            view.zero_()
            return
        try:
            torch.mul(grad, weight, out=view)
        except RuntimeError:
            check_dense(grad)
            raise

    def _put_small(self, grads: list[torch.Tensor | None], views: list[torch.Tensor], weight: float) -> None:
        pairs = []
        for grad, view in zip(grads, views, strict=True):
            if grad is None:
                view.zero_()
            else:
                pairs.append((grad, view))
        if not pairs:
            return
        try:
            torch._foreach_copy_([view for _, view in pairs], [grad for grad, _ in pairs])
        except RuntimeError:
            for grad, _ in pairs:
                check_dense(grad)
            raise
        self.small.mul_(weight)

    def _holders(self) -> int:
        """How often the views are held: more than when nobody uses them means that a script kept one."""
        return sum(map(sys.getrefcount, self.views)) + _use_count(self.storage._cdata)


def _cut(parameters: list[torch.nn.Parameter], first_limit: int, limit: int) -> list[list[int]]:
    """Buckets as lists of positions, in the order in which they are summed: that in which they become complete."""
    done: list[list[int]] = []
    growing: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in reversed(range(len(parameters))):
        kind = (parameters[index].dtype, parameters[index].device)
        growing.setdefault(kind, []).append(index)
        if sum(parameters[position].nbytes for position in growing[kind]) >= (limit if done else first_limit):
            done.append(growing.pop(kind))
    return done + sorted(growing.values(), key=lambda cut: -cut[-1])


def _nothing() -> None:
    pass


def _written(gradient: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    return None if gradient is None else (gradient, gradient._version)


def _window(buffer: torch.Tensor, offset: int, given: torch.Tensor) -> torch.Tensor:
    """A tensor of its own on a part of the buffer, laid out as the parameter is."""
    stride = torch.empty_like(given, device="meta").stride()
    return buffer.new_empty(0).set_(buffer.untyped_storage(), offset, given.shape, stride)


def _joined(kept: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    if kept is None or grad is None:
        return grad if kept is None else kept
    return kept.add_(grad)


def check_dense(grad: torch.Tensor | None) -> None:
    if grad is not None and grad.layout != torch.strided:
        raise UsageError(
            f"a gradient has the layout {grad.layout}, which cannot be summed over workers",
            hint="use dense gradients, for example nn.Embedding(..., sparse=False)",
        )


def _after_accumulation(given: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    with _thawed(given):
        return given.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _on_gradient(given: torch.nn.Parameter, hook: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    with _thawed(given):
        return given.register_hook(hook)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _thawed(given: torch.nn.Parameter) -> Iterator[None]:
    """A frozen parameter takes no hooks, but keeps those that it has."""
    required = given.requires_grad
    given.requires_grad_(True)
    try:
        yield
    finally:
        given.requires_grad_(required)
