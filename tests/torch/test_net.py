"""One bit that differs, in whatever two replicas must hold alike, is found and named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import chaos
import pytest
import torch
from torch import nn

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness
from stretto.torch.net import checksum, named
from stretto.torch.state import Holder


class Counting(nn.Module):
    """With buffers that are saved and not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(100, 60), nn.BatchNorm1d(60), nn.Linear(60, 3))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def trained() -> Holder:
    torch.manual_seed(3)
    holder = Holder()
    model = Counting()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model.body(torch.randn(4, 100)).sum().backward()
    optimizer.step()
    scheduler.step()
    holder.models, holder.optimizers, holder.helpers = [model], [optimizer], lambda: [scheduler, scaler]
    return holder


def flip(tensor: torch.Tensor) -> None:
    """The lowest bit of its last byte but three."""
    tensor.detach().reshape(-1).view(torch.uint8)[-4] ^= 1


def moment(holder: Holder, key: str) -> torch.Tensor:
    (optimizer,) = holder.optimizers
    found: torch.Tensor = optimizer.state[holder.models[0].body[0].weight][key]
    return found


def rate(holder: Holder) -> None:
    holder.optimizers[0].param_groups[0]["lr"] *= 1 + 2**-52


def schedule(holder: Holder) -> None:
    holder.helpers()[0].last_epoch += 1  # type: ignore[attr-defined]


def scale(holder: Holder) -> None:
    holder.helpers()[1].load_state_dict({**holder.helpers()[1].state_dict(), "scale": 8.0 + 2**-20})


CHANGES: dict[str, Callable[[Holder], None]] = {
    "body.0.weight": lambda holder: flip(holder.models[0].body[0].weight),
    "body.2.bias": lambda holder: flip(holder.models[0].body[2].bias),
    "seen": lambda holder: flip(holder.models[0].seen),
    "exp_avg of body.0.weight in Adam": lambda holder: flip(moment(holder, "exp_avg")),
    "step of body.0.weight in Adam": lambda holder: flip(moment(holder, "step")),
    "the options of group 0 of Adam": rate,
    "StepLR": schedule,
    "GradScaler": scale,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_bit_that_differs_is_found_and_named(name: str) -> None:
    one, other = trained(), trained()
    before = list(named(one, {}, bitwise=False))
    assert checksum(before) == checksum(list(named(other, {}, bitwise=False)))
    CHANGES[name](other)
    after = list(named(other, {}, bitwise=False))
    assert checksum(before) != checksum(after)
    different = {n for (n, a), (_, b) in zip(before, after, strict=True) if checksum([(n, a)]) != checksum([(n, b)])}
    assert different == {name}


def test_words_that_change_places_are_found() -> None:
    tensor = torch.arange(5000, dtype=torch.int64)
    moved = tensor.clone()
    moved[[7, 2100]] = moved[[2100, 7]]
    assert checksum([("x", tensor)]) != checksum([("x", moved)])


def signs(tensor: torch.Tensor) -> None:
    tensor[3, 5] *= -1
    tensor[8, 700] *= -1


def rows(tensor: torch.Tensor) -> None:
    tensor[[7, 41]] = tensor[[41, 7]]


@pytest.mark.parametrize("width", [1023, 1024])
@pytest.mark.parametrize("change", [torch.Tensor.neg_, signs, rows, lambda tensor: tensor[10:20].neg_()])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_what_changes_highest_bits_or_whole_rows_is_found(
    kind: torch.dtype, change: Callable[[torch.Tensor], object], width: int
) -> None:
    """Of numbers that are added up modulo a power of two an even number of signs would not be seen."""
    tensor = torch.randn(66, width, generator=torch.Generator().manual_seed(1)).to(kind)
    changed = tensor.clone()
    change(changed)
    assert not torch.equal(tensor, changed)
    assert checksum([("x", tensor)]) != checksum([("x", changed)])


@pytest.mark.parametrize("length", [1, 1022, 1023, 4095, 4096, 40_000])
def test_every_bit_of_some_words_is_found(length: int) -> None:
    tensor = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = checksum([("x", tensor)])
    for place in {0, length // 3, length // 2, length - 1}:
        for bit in range(64):
            tensor.view(torch.int64)[place] ^= 1 << bit if bit < 63 else -(1 << 63)
            assert checksum([("x", tensor)]) != before
            tensor.view(torch.int64)[place] ^= 1 << bit if bit < 63 else -(1 << 63)
    assert checksum([("x", tensor)]) == before


def test_statistics_of_a_worker_are_its_own_but_in_bitwise_mode() -> None:
    holder = trained()
    names = [name for name, _ in named(holder, {}, bitwise=False)]
    assert not [name for name in names if "running" in name or "scratch" in name]
    assert "body.1.running_mean" in [name for name, _ in named(holder, {}, bitwise=True)]
    assert "seen" not in [name for name, _ in named(holder, {0: ["se*"]}, bitwise=False)]


KINDS = {
    "parameter": "0.weight",
    "moment": "exp_avg of 0.weight in Adam",
    "counter": "step of 0.weight in Adam",
    "learning rate": "the options of group 0 of Adam",
    "buffer": "seen",
    "scheduler": "StepLR",
}
SCRIPT = Path(__file__).parent / "scripts" / "flipping.py"


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_that_one_worker_has_otherwise_ends_the_job(tmp_path: Path, warm: ForkServer, kind: str) -> None:
    """On real workers, in the last step: a loop does not end without a comparison."""
    environment = {"CASE": json.dumps({"kind": kind}), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    with Harness(
        tmp_path, command, workers=2, min_workers=2, environment=environment, options=chaos.OPTIONS, warm=warm
    ) as harness:
        end = harness.wait_over()
    assert end["event"] == "failed"
    told = str(end["reason"]).partition("the workers train different models: ")[2].partition(" came to differ")[0]
    assert told == KINDS[kind]
