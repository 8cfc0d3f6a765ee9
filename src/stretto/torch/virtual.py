"""Bitwise mode: the passes through the body belong to virtual ranks, whoever does them.

The global batch is cut for a fixed number of virtual ranks. Each pass starts from the buffers and from random
generators (`chance`) that depend on the step and the virtual rank alone; gradients and buffers are added up in the
order of one tree (`bitwise`). So the result has the same bits for every number of workers and every history of resizes,
on one kind of hardware, with one number of threads and deterministic kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch

from stretto.runtime.order import Order, owned, virtual_slices
from stretto.torch.bitwise import NOBODY, TreeSum, VirtualReducer
from stretto.torch.data import IDLE, Part
from stretto.torch.groups import Group, GroupBroken
from stretto.torch.state import Holder


def fix_kernels(threads: int) -> None:
    """What else bits depend on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def parts(order: Order, step: int, rank: int, size: int, ranks: int) -> Iterator[Part]:
    """One pass per virtual rank that this member owns; one without samples gets one that counts for nothing, and so
    does a member that owns none."""
    indices, epoch = order.indices(step), order.loop.epoch(step)
    cuts = virtual_slices(len(indices), ranks)
    owns = owned(ranks, size)[rank]
    if not owns:
        yield Part(epoch, step, tuple(indices[:IDLE].tolist()), False, 0.0, NOBODY)
    for virtual in owns:
        start, stop = cuts[virtual]
        own = tuple(indices[start:stop].tolist())
        yield Part(epoch, step, own or tuple(indices[:IDLE].tolist()), bool(own), len(own) / len(indices), virtual)


class Passes:
    """One batch: the buffers and the random state of every pass."""

    def __init__(self, holder: Holder, reducer: VirtualReducer, ranks: int) -> None:
        self.holder, self.reducer, self.ranks = holder, reducer, ranks
        self.group: Group | None = None
        self._buffers: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._tree: TreeSum | None = None
        self._virtual = -1

    def start(self, group: Group | None, flags: Sequence[float]) -> None:
        """A batch begins."""
        self.group = group if group is not None and group.size > 1 else None
        self.reducer.exchange(self.group, self._shares(), flags)
        self._buffers = [buffer for model in self.holder.models for buffer in model.buffers()]
        self._before = [buffer.clone() for buffer in self._buffers]
        self._tree = TreeSum(self.ranks, self._before)
        self._virtual = -1

    def begin_phase(self, number: int) -> None:
        """All passes begin anew, on what the phase before has left; for the first on what the batch began with."""
        if number > 1:
            self.join_buffers()
            with torch.no_grad():
                for buffer, before in zip(self._buffers, self._before, strict=True):
                    before.copy_(buffer)
        self.reducer.begin_phase()
        self._tree = TreeSum(self.ranks, self._before)
        self._virtual = -1

    def begin(self, part: Part, weight: float) -> None:
        """A pass begins: as if it were the only one."""
        self._note()
        self._virtual = part.virtual
        with torch.no_grad():
            for buffer, before in zip(self._buffers, self._before, strict=True):
                buffer.copy_(before)
        self.reducer.begin(part.virtual, weight)

    def join_buffers(self) -> None:
        """After the last pass, before the step is applied: the mean over the virtual ranks, on all members."""
        if self._tree is None or self.reducer.failed is not None:
            return
        self._note()
        tree, self._tree = self._tree, None
        if not self._buffers:
            return
        try:
            found = tree.mean(self.group, self._shares())
        except GroupBroken as broken:
            self.reducer.fail(broken)
            return
        with torch.no_grad():
            for buffer, value in zip(self._buffers, found, strict=True):
                if value is not None:
                    buffer.copy_(value)

    def _shares(self) -> list[range]:
        return owned(self.ranks, self.group.size if self.group is not None else 1)

    def _note(self) -> None:
        """The buffers that the last pass left."""
        if self._virtual >= 0 and self._tree is not None:
            self._tree.add(self._virtual, self._buffers)
            self._virtual = -1
