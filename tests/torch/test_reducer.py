"""The same script on one process with the whole batch and on three with unequal slices: the same gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_crew import Crew

from stretto.errors import UsageError
from stretto.torch import reducer as reducer_module
from stretto.torch.groups import Group, Store, connect
from stretto.torch.reducer import LARGE, Reducer

BATCH = 12
SLICES = [(0, 5), (5, 9), (9, 12)]
EMPTY = [(0, 7), (7, 7), (7, 12)]


class Part:
    """What a script sees: its slice of the batch, and the reducer set up for it."""

    def __init__(self, group: Group | None, rank: int, slices: list[tuple[int, int]]) -> None:
        self.group = group
        self.rank = rank
        self.begin, self.end = slices[rank] if group else (0, BATCH)
        self.weight = (self.end - self.begin) / BATCH

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.begin : self.end]

    def exchange(self, reducer: Reducer, flags: tuple[float, ...] = ()) -> None:
        reducer.exchange(self.group, self.weight, flags)


Script = Callable[[Part], Any]


def data(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, 6, generator=made, dtype=torch.float64).to(dtype),
        torch.randn(BATCH, 3, generator=made, dtype=torch.float64).to(dtype),
    )


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def grads(model: nn.Module) -> list[np.ndarray | None]:
    return [None if p.grad is None else p.grad.double().numpy().copy() for p in model.parameters()]


def small(model: nn.Module, **more: Any) -> Reducer:
    """Buckets so small that there are several."""
    return Reducer(model.parameters(), bucket_mib=0.0004, first_bucket_mib=0.0001, **more)


# Running a script in one process and in three.


def host(kept: SimpleNamespace, _rank: int) -> str:
    kept.store = Store()
    return str(kept.store.address)


def join(kept: SimpleNamespace, rank: int, generation: int, addresses: list[str]) -> None:
    kept.group = connect(generation, rank, addresses, timeout_s=30)


def play(kept: SimpleNamespace, rank: int, script: Script, slices: list[tuple[int, int]], large: int) -> Any:
    reducer_module.LARGE = large
    return script(Part(kept.group, rank, slices))


class World:
    def __init__(self) -> None:
        self.crew = Crew(3)
        self.addresses = self.crew.call(host)
        self.crew.call(join, 1, self.addresses)

    def everywhere(self, script: Script, slices: list[tuple[int, int]] = SLICES, large: int = LARGE) -> list[Any]:
        return self.crew.call(play, script, slices, large)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    with made.crew:
        yield made


def alone(script: Script) -> Any:
    torch.set_num_threads(1)
    return script(Part(None, 0, SLICES))


def same(world: World, script: Script, slices: list[tuple[int, int]] = SLICES) -> None:
    """Everybody's answer is the one-worker answer, whether gradients count as small, large or both."""
    expected = alone(script)
    for large in (LARGE, 20, 1):
        for answer in world.everywhere(script, slices, large):
            close(answer, expected, 1e-12)


def close(answer: Any, expected: Any, tolerance: float) -> None:
    if isinstance(expected, list | tuple):
        assert len(answer) == len(expected)
        for one, other in zip(answer, expected, strict=True):
            close(one, other, tolerance)
    elif expected is None or isinstance(expected, bool | str):
        assert answer == expected
    else:
        assert answer is not None
        scale = float(np.max(np.abs(expected), initial=0.0)) or 1.0
        np.testing.assert_allclose(np.asarray(answer) / scale, np.asarray(expected) / scale, rtol=0, atol=tolerance)


# Scripts.


def one_pass(part: Part, reducer_of: Callable[[nn.Module], Reducer] = small) -> Any:
    model = net()
    reducer = reducer_of(model)
    part.exchange(reducer)
    if part.weight:
        x, y = data()
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
    else:
        reducer.contribute_nothing()
    assert reducer.failed is None
    assert reducer.rounds == (1 if part.group else 0)
    return grads(model)


def one_bucket(part: Part) -> Any:
    return one_pass(part, lambda model: Reducer(model.parameters()))


def training(part: Part, set_to_none: bool) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    reducer = small(model)
    norms = []
    for step in range(4):
        part.exchange(reducer)
        x, y = data(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    return [p.detach().numpy().copy() for p in model.parameters()], norms


def training_new_gradients(part: Part) -> Any:
    return training(part, True)


def training_kept_gradients(part: Part) -> Any:
    return training(part, False)


def several_passes(part: Part) -> Any:
    model = net()
    reducer = small(model)
    part.exchange(reducer)
    x, y = data()
    loss = F.mse_loss(model(part.of(x)), part.of(y))
    loss.backward(retain_graph=True)
    first = grads(model)
    loss.backward()
    (model(part.of(x)) ** 2).mean().backward()
    assert reducer.rounds == (3 if part.group else 0)
    return first, grads(model)


class Branches(nn.Module):
    """One branch is used by nobody, one only where the slice begins at 5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.shared, self.some, self.never = (nn.Linear(6, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.shared(x)
        chosen = (rows >= 5) & (rows < 9)
        return torch.cat([out[~chosen], out[chosen] + self.some(x[chosen])]) if chosen.any() else out


def branches(part: Part) -> Any:
    model = Branches()
    reducer = small(model)
    x, y = data()
    rows = torch.arange(BATCH)
    found = []
    for _ in range(2):
        part.exchange(reducer)
        # Rows are regrouped by branch; targets that do not depend on the row keep the loss the same.
        F.mse_loss(model(part.of(x), part.of(rows)), torch.ones_like(part.of(y))).backward()
        found.append(grads(model))
    assert model.never.weight.grad is None
    return found


def untouched(part: Part) -> Any:
    model = Branches()
    given = torch.full_like(model.never.weight, 0.1)
    model.never.weight.grad = given
    reducer = small(model)
    x, _ = data()
    part.exchange(reducer)
    model.shared(part.of(x)).mean().backward()
    return bool((given == 0.1).all()), model.never.weight.grad is given


def freezing(part: Part) -> Any:
    model = net()
    model[0].requires_grad_(False)
    reducer = small(model)
    x, y = data()
    found = []
    for frozen in (0, 2, None):
        for index in (0, 2, 4):
            model[index].requires_grad_(index != frozen)
        model.zero_grad()
        part.exchange(reducer)
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        found.append(grads(model))
    return found


def tied(part: Part) -> Any:
    model = net()
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())
    twin = nn.Linear(8, 8, dtype=torch.float64)
    twin.weight = model[2].weight
    reducer = Reducer([*model.parameters(), *twin.parameters()])
    part.exchange(reducer)
    x, y = data()
    hidden = twin(torch.tanh(model[0](part.of(x))))
    F.mse_loss(model[4](torch.tanh(model[2](hidden))), part.of(y)).backward()
    return grads(model), grads(twin)


def laid_out(part: Part) -> Any:
    torch.manual_seed(3)
    model = nn.Conv2d(2, 4, 3, dtype=torch.float64).to(memory_format=torch.channels_last)
    reducer = small(model)
    x = torch.randn(BATCH, 2, 5, 5, dtype=torch.float64)
    part.exchange(reducer)
    (model(part.of(x)) ** 2).mean().backward()
    assert model.weight.grad is not None
    return grads(model), model.weight.grad.stride() == model.weight.stride()


def reentrant(part: Part) -> Any:
    model = net()
    reducer = small(model)
    part.exchange(reducer)
    x, y = data()
    hidden = model[0](part.of(x))
    hidden = checkpoint(model[1:4], hidden, use_reentrant=True)
    F.mse_loss(model[4](hidden), part.of(y)).backward()
    return grads(model)


def parts_of_a_slice(part: Part) -> list[tuple[torch.Tensor, float]]:
    """Rows of the micro-batches, unequal, with their shares of the slice."""
    rows = torch.arange(part.begin, part.end)
    cuts = [rows[:1], rows[1:3], rows[3:]] if part.group else [rows]
    return [(cut, len(cut) / len(rows)) for cut in cuts if len(cut)]


def micro_batches(part: Part, left_over: bool, micro_alone: bool = False) -> Any:
    model = net()
    reducer = small(model)
    x, y = data()
    if left_over:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    part.exchange(reducer, (1.0,))
    passes = parts_of_a_slice(part)
    if micro_alone and part.group is None:
        passes = [(torch.arange(0, 5), 5 / 12), (torch.arange(5, 12), 7 / 12)]
    for rows, share in passes[:-1]:
        reducer.accumulate(share)
        F.mse_loss(model(x[rows]), y[rows]).backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        (model(x[rows]) ** 2).mean().backward()
    rows, share = passes[-1]
    reducer.conclude(share)
    F.mse_loss(model(x[rows]), y[rows]).backward()
    (model(x[rows]) ** 2).mean().backward()
    found = grads(model)
    # The next batch is a whole one again.
    model.zero_grad()
    part.exchange(reducer)
    F.mse_loss(model(part.of(x)), part.of(y)).backward()
    return found, grads(model)


def micro_batches_afresh(part: Part) -> Any:
    return micro_batches(part, False)


def micro_batches_on_top(part: Part) -> Any:
    return micro_batches(part, True)


def micro_batches_alone(part: Part) -> Any:
    return micro_batches(part, False, micro_alone=True)


def several_types(part: Part) -> Any:
    """The last bucket is of a type too coarse for the flags: they travel by themselves."""
    torch.manual_seed(4)
    coarse, fine = nn.Linear(6, 8, dtype=torch.bfloat16), nn.Linear(8, 3, dtype=torch.float64)
    reducer = Reducer([*coarse.parameters(), *fine.parameters()])
    x, y = data()
    part.exchange(reducer, (1001.0, 0.25))
    hidden = coarse(part.of(x).bfloat16())
    F.mse_loss(fine(hidden.double()), part.of(y)).backward()
    return [p.grad is not None for p in coarse.parameters()], grads(fine), grads(coarse)


def not_finite(part: Part) -> Any:
    model = net()
    reducer = small(model)
    part.exchange(reducer)
    x, y = data()
    loss = F.mse_loss(model(part.of(x)), part.of(y)) * (math.inf if part.rank == 1 else 1.0)
    loss.backward()
    return [p.grad is not None and bool(torch.isfinite(p.grad).all()) for p in model.parameters()]


def weightless_nan(part: Part) -> Any:
    """Weight 0 and yet a backward pass, with garbage: it must not count."""
    model = net()
    reducer = small(model)
    part.exchange(reducer)
    x, y = data()
    if part.weight:
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
    else:
        (model(x) * math.nan).sum().backward()
    return grads(model)


def flags(part: Part) -> Any:
    model = net()
    reducer = small(model, flags=3)
    x, y = data()
    found = []
    for step in range(2):
        part.exchange(reducer, (1.0, part.rank + 10.0 * step))
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        found.append(list(reducer.flags))
    return found


def kept_by_the_script(part: Part) -> Any:
    """Gradients that a script holds on to do not change under its hands."""
    model = net()
    reducer = small(model)
    held, first = [], None
    for step in range(3):
        part.exchange(reducer)
        x, y = data(step)
        model.zero_grad()
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        if step == 0:
            kinds = (lambda g: g, lambda g: g.view(-1), lambda g: g.numpy())
            held = [kinds[i % 3](p.grad) for i, p in enumerate(model.parameters())]
            first = grads(model)
    return first, [np.array(one).reshape(-1) for one in held]


def sparse(part: Part) -> Any:
    table = nn.Embedding(5, 3, sparse=True)
    reducer = Reducer(table.parameters())
    part.exchange(reducer)
    try:
        table(torch.tensor([1, 2])).sum().backward()
    except UsageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    "script",
    [
        one_pass,
        one_bucket,
        training_new_gradients,
        training_kept_gradients,
        several_passes,
        branches,
        freezing,
        tied,
        laid_out,
        reentrant,
        micro_batches_afresh,
        micro_batches_on_top,
    ],
    ids=lambda script: script.__name__,
)
def test_the_gradient_is_that_of_the_whole_batch(world: World, script: Script) -> None:
    same(world, script)


@pytest.mark.parametrize("script", [one_pass, weightless_nan], ids=lambda script: script.__name__)
def test_an_empty_slice_contributes_zeros(world: World, script: Script) -> None:
    same(world, script, EMPTY)


def test_micro_batches_of_one_worker() -> None:
    close(alone(micro_batches_alone), alone(micro_batches_afresh), 1e-12)


def test_what_nobody_used_is_not_touched(world: World) -> None:
    for large in (LARGE, 1):
        assert world.everywhere(untouched, large=large) == [(True, True)] * 3


def test_several_types_in_one_model(world: World) -> None:
    here, fine, coarse = alone(several_types)
    for there, fine_there, coarse_there in world.everywhere(several_types):
        assert there == here
        close(fine_there, fine, 1e-2)
        close(coarse_there, coarse, 1e-1)


def test_values_that_are_not_finite_pass_through(world: World) -> None:
    assert all(alone(not_finite))
    for finite in world.everywhere(not_finite):
        assert not any(finite)


def test_flags_are_added_up(world: World) -> None:
    assert world.everywhere(flags) == [[[3.0, 3.0, 0.0], [3.0, 33.0, 0.0]]] * 3
    assert alone(flags) == [[1.0, 0.0, 0.0], [1.0, 10.0, 0.0]]


def test_gradients_that_a_script_keeps_stay_as_they_were(world: World) -> None:
    for first, held in world.everywhere(kept_by_the_script) + world.everywhere(kept_by_the_script, large=20):
        for one, other in zip(first, held, strict=True):
            assert (one.reshape(-1) == other).all()


def bucket_addresses(part: Part) -> list[bool]:
    model = net()
    reducer = small(model)
    x, y = data()
    seen = []
    for _ in range(3):
        model.zero_grad()
        part.exchange(reducer)
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        seen.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
    return [seen[0] == other for other in seen[1:]]


def test_buffers_are_used_again_when_nobody_holds_them(world: World) -> None:
    for large in (LARGE, 20):
        assert world.everywhere(bucket_addresses, large=large) == [[True, True]] * 3


def test_sparse_gradients_are_refused(world: World) -> None:
    for text in world.everywhere(sparse):
        assert "sparse=False" in text
    # The sum was never begun, and the next exchange would have broken the group: form it anew.
    world.crew.call(join, 2, world.addresses)


def test_alone_there_are_no_hooks() -> None:
    model = net()
    reducer = small(model)
    reducer.exchange(None)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# Failure.


def lose(kept: SimpleNamespace, rank: int, told: Any = None) -> Any:
    """Backward passes until a peer is gone; then the script goes on as if nothing had happened."""
    model = net()
    kept.model, kept.reducer = model, small(model)
    x, y = data()
    part = Part(kept.group, rank, SLICES)
    for _ in range(100_000):
        part.exchange(kept.reducer)
        model.zero_grad()
        F.mse_loss(model(part.of(x)), part.of(y)).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True))
        if kept.reducer.failed is not None:
            F.mse_loss(model(part.of(x)), part.of(y)).backward()
            return norm, bool(kept.reducer.failed.cause), all(p.grad is not None for p in model.parameters())
    return "never"


def again(kept: SimpleNamespace, rank: int) -> Any:
    x, y = data()
    part = Part(kept.group, rank, [(0, 7), (7, 12)])
    part.exchange(kept.reducer)
    kept.model.zero_grad()
    F.mse_loss(kept.model(part.of(x)), part.of(y)).backward()
    assert kept.reducer.failed is None
    return grads(kept.model)


def test_a_lost_peer_does_not_raise_and_the_next_group_works() -> None:
    with Crew(3) as crew:
        addresses = crew.call(host)
        crew.call(join, 1, addresses)
        crew.start(lose)
        crew[1].kill()
        for rank in (0, 2):
            assert crew[rank].result() == (0.0, True, True)
        crew.call(join, 2, [addresses[0], addresses[2]], ranks=[0, 2])
        for answer in crew.call(again, ranks=[0, 2]):
            close(answer, alone(one_pass), 1e-12)


def interrupted(kept: SimpleNamespace, rank: int) -> str:
    """One member's backward pass raises half-way: the other is released when that one goes on."""
    model = net()
    kept.model, kept.reducer = model, small(model)
    x, y = data()
    part = Part(kept.group, rank, [(0, 7), (7, 12)])
    part.exchange(kept.reducer)
    loss = F.mse_loss(model(part.of(x)), part.of(y))
    if rank == 0:

        def out_of_memory(_: torch.Tensor) -> None:
            raise MemoryError("no room")

        handle = model[0].weight.register_hook(out_of_memory)
        with pytest.raises(MemoryError):
            loss.backward()
        handle.remove()
        kept.reducer.exchange(None)
        return "went on"
    loss.backward()
    return "released" if kept.reducer.failed else "summed"


def test_an_interrupted_backward_pass_releases_the_others() -> None:
    with Crew(2) as crew:
        addresses = crew.call(host)
        crew.call(join, 1, addresses)
        assert crew.call(interrupted) == ["went on", "released"]
        crew.call(join, 2, addresses)
        for answer in crew.call(again):
            close(answer, alone(one_pass), 1e-12)
