"""Sums whose bits do not depend on how many members there are.

The global batch is cut into a fixed number of virtual ranks, whose values are added up in the order of one fixed binary
tree: the ranks 2k and 2k+1 first, then the pairs, and so on; where the number is not a power of two, a node without a
right half is its left half. A member owns a contiguous range of virtual ranks. It adds what lies in the subtrees that
it owns completely, as soon as both halves are there; the members exchange these partial sums and everybody adds them up
along the rest of the tree. Each addition has the same operands whoever does it, so the sum has the same bits for
every number of members and every way to share out the ranks.

Memory, for values of size G, V virtual ranks and n members: a member holds at most 2 * log2(V) + 1 partial sums while
it adds up (1 + log2(V / n) when V / n is a power of two), and for the exchange (n + 1) * K * chunk, where K is the most
partial sums that a member has (1 in the aligned case) and a chunk is at most `chunk_mib`. Each member sends K * G to
each other.

`VirtualReducer` does this for the gradients of a model, with the interface of `Reducer`; nothing overlaps the backward
pass here. `TreeSum` does it for whatever it is given: batch statistics, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from stretto.torch.groups import Group, GroupBroken

Node = tuple[int, int]
"""Level (0: a virtual rank) and position on that level: it covers [position << level, (position + 1) << level)."""

ALIGNMENT = 16
NOBODY = -1
"""Stands for a virtual rank where a member owns none: it goes through the body for nothing."""


def subtrees(owned: range) -> list[Node]:
    """The largest subtrees that lie within the range, from left to right."""
    found: list[Node] = []
    for rank in owned:
        found.append((0, rank))
        while _siblings(found):
            level, position = found.pop()
            found[-1] = (level + 1, position >> 1)
    return found


class TreeSum:
    """Adds up one set of tensors over the virtual ranks. `like` has the shapes and types, in the order of the values.

    Where a type is not a floating one nothing is added: the value of virtual rank 0 is taken (counters, masks).
    """

    def __init__(self, virtual_ranks: int, like: Sequence[torch.Tensor]) -> None:
        self.virtual_ranks = virtual_ranks
        self._like = list(like)
        self._nodes: list[Node] = []
        self._sums: list[list[torch.Tensor]] = []
        self._used = [False] * len(like)

    @torch.no_grad()
    def add(self, rank: int, values: Sequence[torch.Tensor | None], weight: float | None = None) -> None:
        """Give the values of one virtual rank; in ascending order, without a gap. They are copied.

        None counts as zeros. With a weight each value is first multiplied by it.
        """
        if self._nodes and rank != _end(self._nodes[-1]):
            raise ValueError(f"virtual rank {rank} does not follow {_end(self._nodes[-1]) - 1}")
        for index, value in enumerate(values):
            self._used[index] |= value is not None
        leaf = [
            torch.zeros_like(like) if value is None else _weighted(value, weight)
            for value, like in zip(values, self._like, strict=True)
        ]
        self._nodes.append((0, rank))
        self._sums.append(leaf)
        while _siblings(self._nodes):
            level, position = self._nodes.pop()
            right = self._sums.pop()
            self._nodes[-1] = (level + 1, position >> 1)
            _add(self._sums[-1], right)

    @torch.no_grad()
    def total(
        self, group: Group | None, owned: Sequence[range], *, chunk_mib: float = 25.0
    ) -> list[torch.Tensor | None]:
        """The sums, equal on all members bit for bit; None where no virtual rank had a value.

        `owned` are the ranges of all members of the group by rank; together they are all virtual ranks, in order.
        Raises `GroupBroken`. The partial sums are used up.
        """
        self._check(group, owned)
        nodes = [subtrees(ranks) for ranks in owned]
        used = self._used
        totals: list[torch.Tensor] = []
        if group is None or group.size == 1:
            totals = self._along_the_tree(dict(zip(self._nodes, self._sums, strict=True)))
        else:
            rows = group.all_gather_now(torch.tensor(self._used, dtype=torch.uint8))
            used = torch.stack(rows).any(0).tolist() if rows else []
            for begin, end in _chunks(self._like, int(chunk_mib * (1 << 20))):
                totals += self._along_the_tree(self._exchange(group, nodes, begin, end))
        self._nodes, self._sums = [], []
        self._used = [False] * len(self._like)
        return [one if seen else None for one, seen in zip(totals, used, strict=True)]

    @torch.no_grad()
    def mean(
        self, group: Group | None, owned: Sequence[range], *, chunk_mib: float = 25.0
    ) -> list[torch.Tensor | None]:
        """As `total`, divided by the number of virtual ranks where the type is a floating one: for batch statistics."""
        found = self.total(group, owned, chunk_mib=chunk_mib)
        return [one / self.virtual_ranks if one is not None and _adds(one) else one for one in found]

    def _check(self, group: Group | None, owned: Sequence[range]) -> None:
        cuts = [ranks for ranks in owned if len(ranks)]
        if [rank for ranks in cuts for rank in ranks] != list(range(self.virtual_ranks)):
            raise ValueError(f"{list(owned)} do not share out {self.virtual_ranks} virtual ranks")
        member, size = (group.rank, group.size) if group is not None else (0, 1)
        if len(owned) != size or subtrees(owned[member]) != self._nodes:
            raise ValueError(f"values were added for other virtual ranks than {list(owned)} say of member {member}")

    def _exchange(self, group: Group, nodes: list[list[Node]], begin: int, end: int) -> dict[Node, list[torch.Tensor]]:
        """Everybody's partial sums of the values begin..end, as bytes: not every type can travel as what it is."""
        like = self._like[begin:end]
        most = max(len(some) for some in nodes)
        length = sum(_padded(one) for one in like)
        sent = torch.zeros(most, length, dtype=torch.uint8, device=like[0].device)
        for row, sums in zip(sent, self._sums, strict=False):
            for window, value in zip(_windows(row, like), sums[begin:end], strict=True):
                window.copy_(value)
        rows = group.all_gather_now(sent)
        return {
            node: _windows(row, like)
            for member, some in enumerate(nodes)
            for node, row in zip(some, rows[member], strict=False)
        }

    def _along_the_tree(self, known: dict[Node, list[torch.Tensor]]) -> list[torch.Tensor]:
        def at(level: int, position: int) -> list[torch.Tensor]:
            found = known.get((level, position))
            if found is not None:
                return found
            left = at(level - 1, 2 * position)
            if (2 * position + 1) << (level - 1) < self.virtual_ranks:
                _add(left, at(level - 1, 2 * position + 1))
            return left

        # Copies: what was exchanged lies in one block, which nobody should keep alive for the sake of a part of it.
        return [one.clone() for one in at((self.virtual_ranks - 1).bit_length(), 0)]


class VirtualReducer:
    """The global gradient, bit for bit the same for every number of members.

    `exchange` at the start of a batch, then `begin` before each pass through the body: one per owned virtual rank, in
    ascending order, or one as `NOBODY` where none is owned. After the backward pass of the last one `p.grad` holds what
    it held before plus the sum over all virtual ranks of weight * gradient; until then the script sees zeros (or what
    was there before). Several backward passes in one body are several sums. `contribute_nothing` stands for one.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], virtual_ranks: int, *, flags: int = 4) -> None:
        self.failed: GroupBroken | None = None
        self.rounds = 0
        """Sums that were completed since `exchange`."""
        self.backwards = 0
        """Backward passes since `exchange`."""
        self.began: Callable[[], None] = lambda: None
        """Called when a backward pass begins."""
        self.rebuilt: Callable[[], None] = lambda: None
        """Called when other parameters require gradients than before."""
        self.broke: Callable[[], None] = lambda: None
        """Called when the gradient of a batch is lost."""
        self._parameters = list({id(given): given for given in parameters}.values())
        self._virtual_ranks = virtual_ranks
        self._flags = np.zeros(flags)
        self._result = np.zeros(flags)
        self._group: Group | None = None
        self._owned: Sequence[range] = [range(virtual_ranks)]
        self._rank, self._weight = 0, 1.0
        self._passes = 0
        self._in_round = False
        self._trees: list[TreeSum] = []
        self._fresh: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor | None] = {}
        self._required: list[bool] = []
        self._hooks: list[Any] = []

    def exchange(self, group: Group | None, owned: Sequence[range], flags: Sequence[float] = ()) -> None:
        """Who sums from now on, and which virtual ranks each member of the group owns."""
        if self._in_round and self._group is not None:
            self._group.abort("a backward pass was interrupted")
        self._flags[:] = [*flags, *[0.0] * (len(self._flags) - len(flags))]
        self._group = group if group is not None and group.size > 1 else None
        self._result = self._flags.copy()
        self._owned = owned
        self.failed, self.rounds, self.backwards = None, 0, 0
        self._trees, self._passes, self._in_round = [], 0, False
        self._fresh, self._before = {}, {}
        self._listen()

    def begin(self, rank: int, weight: float) -> None:
        """The next backward passes are those of this virtual rank, whose part of the batch has this weight."""
        self._rank, self._weight, self._passes = rank, weight, 0

    def begin_phase(self) -> None:
        """The passes begin anew, with sums of their own."""
        self._trees, self._passes = [], 0

    @property
    def listens(self) -> bool:
        """Whether backward passes are heard."""
        return bool(self._hooks)

    def fail(self, error: GroupBroken) -> None:
        """The gradient of this batch will not arrive."""
        if self.failed is None:
            # Without the frames that it went through: they would keep alive what scripts let go of.
            self.failed = error.with_traceback(None)
            self.broke()

    def contribute_nothing(self) -> None:
        """Take part in one sum without a virtual rank."""
        self._sum(self._tree())

    @property
    def flags(self) -> list[float]:
        """The sum of everybody's flags, as of the last sum (before it, and alone, the own ones)."""
        found: list[float] = self._result.tolist()
        return found

    def take_in(self) -> None:
        """Parameters have begun to require gradients, and are about to be used."""
        self._listen()

    def unseen(self) -> bool:
        """Whether a parameter has a gradient that was not added up, because it required none when it was used."""
        return any(
            given.requires_grad and given.grad is not None and not known
            for given, known in zip(self._parameters, self._required, strict=True)
        )

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._required = [], []

    def _listen(self) -> None:
        required = [given.requires_grad for given in self._parameters]
        if required == self._required:
            return
        self.close()
        self.rebuilt()
        self._required = required
        for index, given in enumerate(self._parameters):
            if given.requires_grad:
                self._hooks.append(_on_gradient(given, self._hook(index, given)))

    def _hook(self, index: int, given: torch.nn.Parameter) -> Callable[[torch.Tensor], None]:
        """Before a gradient is added to `p.grad`: put aside what is there, so that the two stay apart."""

        def arrives(gradient: torch.Tensor) -> None:
            if not self._in_round:
                self._in_round = True
                self.backwards += 1
                self.began()
                torch.autograd.Variable._execution_engine.queue_callback(self._finish)
            if index in self._fresh:
                self._fresh[index] = self._fresh[index] + gradient.detach()
            else:
                self._fresh[index] = gradient.detach()
                self._before[index] = given.grad
            given.grad = None

        return arrives

    def _tree(self) -> TreeSum:
        """That of this backward pass: the first one of every virtual rank make one sum, the second ones another."""
        if self._passes == len(self._trees):
            self._trees.append(TreeSum(self._virtual_ranks, self._parameters))
        self._passes += 1
        return self._trees[self._passes - 1]

    @torch.no_grad()
    def _finish(self) -> None:
        tree = self._tree()
        fresh = [self._fresh.get(index) for index in range(len(self._parameters))]
        if self._weight == 0.0:
            # Not zero times what was found: a mean over nothing is not a number.
            fresh = [None if one is None else torch.zeros_like(one) for one in fresh]
        if self._rank != NOBODY:
            tree.add(self._rank, fresh, self._weight)
        for index, before in self._before.items():
            given = self._parameters[index]
            given.grad = torch.zeros_like(given) if before is None else before
        member = self._group.rank if self._group is not None else 0
        seen = self._before
        self._fresh, self._before, self._in_round = {}, {}, False
        if self._rank in (NOBODY, *self._owned[member][-1:]) and self.failed is None:
            for index, before in seen.items():
                self._parameters[index].grad = before
            self._sum(tree)

    @torch.no_grad()
    def _sum(self, tree: TreeSum) -> None:
        try:
            totals = tree.total(self._group, self._owned)
            if self._group is not None:
                flags = torch.from_numpy(self._flags.copy())
                self._group.all_reduce(flags).wait()
                self._result = flags.numpy()
        except GroupBroken as error:
            self.fail(error)
            totals = [torch.zeros_like(given) if given.requires_grad else None for given in self._parameters]
        else:
            self.rounds += 1
        for given, total in zip(self._parameters, totals, strict=True):
            if total is not None:
                given.grad = total if given.grad is None else given.grad + total


def _siblings(nodes: list[Node]) -> bool:
    """Whether the last two are the halves of one node."""
    if len(nodes) < 2:
        return False
    (level, position), (right_level, right_position) = nodes[-2:]
    return level == right_level and position % 2 == 0 and right_position == position + 1


def _end(node: Node) -> int:
    level, position = node
    return (position + 1) << level


def _adds(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _weighted(value: torch.Tensor, weight: float | None) -> torch.Tensor:
    return value.detach().clone() if weight is None or not _adds(value) else value.detach() * weight


def _add(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    for one, other in zip(left, right, strict=True):
        if _adds(one):
            one.add_(other)


def _padded(value: torch.Tensor) -> int:
    return -(-value.nbytes // ALIGNMENT) * ALIGNMENT


def _windows(row: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The row of bytes as the tensors that lie in it."""
    found, offset = [], 0
    for one in like:
        found.append(row[offset : offset + one.nbytes].view(one.dtype).view(one.shape))
        offset += _padded(one)
    return found


def _chunks(like: Sequence[torch.Tensor], limit: int) -> list[tuple[int, int]]:
    """Runs of values on one device, of at most this many bytes unless one alone is larger."""
    found: list[tuple[int, int]] = []
    size = 0
    for index, one in enumerate(like):
        fits = found and size + one.nbytes <= limit and like[found[-1][0]].device == one.device
        if fits:
            found[-1] = (found[-1][0], index + 1)
            size += one.nbytes
        else:
            found.append((index, index + 1))
            size = one.nbytes
    return found


def _on_gradient(given: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> Any:
    return given.register_hook(hook)  # type: ignore[no-untyped-call]
