"""What is put back when a batch must be done again, piece by piece."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stretto.torch.state import Holder
from stretto.torch.undo import CannotRepeat, Habits, Undo


def parts(habits: Habits) -> tuple[nn.Linear, torch.optim.Optimizer, Undo]:
    holder, model = Holder(), nn.Linear(3, 2)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    holder.models.append(model)
    holder.optimizers.append(optimizer)
    undo = Undo(holder, habits)
    undo.enter()
    undo.late.learn(1)
    return model, optimizer, undo


def step(model: nn.Linear, optimizer: torch.optim.Optimizer, undo: Undo) -> None:
    model(torch.ones(1, 3)).sum().backward()
    undo.before_step((0, 0, 0, 0))
    optimizer.step()


def known(*, goes_on: bool) -> Habits:
    habits = Habits()
    habits.by_hand, habits.goes_on = False, goes_on
    return habits


def test_a_step_before_the_lost_one_is_taken_back() -> None:
    model, optimizer, undo = parts(known(goes_on=True))
    before = model.weight.detach().clone()
    undo.begin((0, 0, 0, 0), alone=False)
    step(model, optimizer, undo)
    undo.hold()
    undo.take_back()
    assert torch.equal(model.weight, before)
    assert not optimizer.state


def test_a_second_pass_that_nobody_expected_cannot_be_repeated() -> None:
    model, optimizer, undo = parts(known(goes_on=False))
    undo.begin((0, 0, 0, 0), alone=False)
    step(model, optimizer, undo)
    undo.hold()
    with pytest.raises(CannotRepeat, match="a backward pass followed a step"):
        undo.take_back()


def test_what_changes_after_the_loss_is_put_back() -> None:
    model, _, undo = parts(known(goes_on=False))
    before = model.weight.detach().clone()
    undo.begin((0, 0, 0, 0), alone=False)
    undo.hold()
    model.weight.data.mul_(0.9)
    undo.take_back()
    assert torch.equal(model.weight, before)


def test_what_optimizers_keep_has_the_type_that_it_had() -> None:
    model, optimizer, undo = parts(known(goes_on=True))
    model.double()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    product = optimizer.state[model.weight]["mu_product"].clone()
    undo.holder.put(*undo.holder.take((0, 0, 0, 0)))
    found = optimizer.state[model.weight]["mu_product"]
    assert (found.dtype, found) == (torch.float32, product)
