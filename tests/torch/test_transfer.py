"""A state from one process to others, while its owner trains on: it arrives as it was, or not at all."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import chaos
import pytest
import torch
from torch import nn
from torch_crew import Crew

from stretto.testing import Harness
from stretto.torch.groups import GroupBroken, Store, connect
from stretto.torch.state import Holder
from stretto.torch.transfer import Counter, Sending, Shape, Staging, expected_shapes, kept_until_step, receive

CPU = torch.device("cpu")


def open_store(kept: SimpleNamespace, _: int) -> str:
    kept.store = Store()
    return kept.store.address


def meet(kept: SimpleNamespace, rank: int, addresses: list[str]) -> None:
    kept.group = connect(1, rank, addresses, timeout_s=30.0)
    torch.manual_seed(rank)
    kept.holder = Holder()
    net = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64 * 36, 64)).double()
    # Not laid out as it travels, and used twice.
    net[0].to(memory_format=torch.channels_last)
    net.add_module("tied", nn.Linear(64, 64, bias=False).double())
    net.add_module("again", net[4])
    kept.holder.models.append(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    kept.holder.optimizers.append(optimizer)
    if rank == 0:
        for _ in range(2):
            backward(net)
            optimizer.step()


def backward(net: nn.Module) -> None:
    net(torch.randn(4, 3, 8, 8, dtype=torch.float64)).square().mean().backward()


def values(holder: Holder) -> list[list[float]]:
    return [tensor.detach().double().reshape(-1).tolist() for tensor in holder.take((0, 0, 0))[1]]


def open_counter(kept: SimpleNamespace, rank: int) -> None:
    kept.counter = Counter(kept.group, "127.0.0.1")
    kept.address = json.loads(kept.group.all_gather_bytes(json.dumps(kept.counter.card).encode())[0])


def begin(kept: SimpleNamespace, _: int, change: Callable[[nn.Module], None] | None) -> Any:
    """Everything as it was at the start; meanwhile the body runs."""
    holder: Holder = kept.holder
    before = values(holder)
    kept.sending = Sending(kept.group, kept.counter, 2, *holder.take((0, 2, 2)), kept_until_step(holder))
    backward(holder.models[0])
    if change is not None:
        change(holder.models[0])
    return before


def end(kept: SimpleNamespace, _: int) -> bool:
    with contextlib.suppress(GroupBroken):
        kept.sending.wait()
    return bool(kept.sending.spoiled)


def abort(kept: SimpleNamespace, _: int) -> None:
    kept.group.abort("another generation was announced")


def take(kept: SimpleNamespace, _: int) -> Any:
    staging = Staging(CPU)
    # One size that will come, one that will not.
    staging.prepare([*expected_shapes(kept.holder)[:1], Shape((3,), "float32")])
    cursor = kept.holder.put(*receive(kept.group, kept.address, staging))
    return cursor, values(kept.holder)


@pytest.fixture
def crew() -> Any:
    with Crew(3) as made:
        addresses = made.call(open_store)
        made.call(meet, addresses)
        made.call(open_counter)
        yield made


def double(net: nn.Module) -> None:
    with torch.no_grad():
        net[3].weight.mul_(2.0)  # type: ignore[index, operator, union-attr]


def double_unnoticed(net: nn.Module) -> None:
    net[3].weight.data.mul_(2.0)  # type: ignore[index, operator, union-attr]


def test_it_arrives_as_it_was_though_the_body_runs_meanwhile(crew: Crew) -> None:
    before = crew[0].call(begin, 0, None)
    for cursor, found in crew.call(take, ranks=(1, 2)):
        assert cursor == [0, 2, 2]
        assert found == before
    assert not crew[0].call(end, 0)


@pytest.mark.parametrize("change", [double, double_unnoticed])
def test_a_script_that_changes_parameters_spoils_it(crew: Crew, change: Callable[[nn.Module], None]) -> None:
    crew[0].call(begin, 0, change)
    for worker in crew.start(take, ranks=(1, 2)):
        with pytest.raises(GroupBroken):
            worker.result()
    assert crew[0].call(end, 0)


def test_receivers_do_not_wait_for_a_dead_sender(crew: Crew) -> None:
    crew[0].kill()
    for worker in crew.start(take, ranks=(1, 2)):
        with pytest.raises(GroupBroken):
            worker.result()


def test_a_sender_does_not_wait_for_dead_receivers(crew: Crew) -> None:
    crew[0].call(begin, 0, None)
    crew[1].kill()
    crew[0].call(abort, 0)
    assert not crew[0].call(end, 0)


@pytest.mark.parametrize("touch", ["counted", "not counted"])
def test_scripts_that_change_parameters_by_hand(tmp_path: Path, touch: str) -> None:
    """The first batch has shown it: nobody trains on while a newcomer gets its state, and a lost batch is undone."""
    script = Path(__file__).parent / "scripts" / "touching.py"
    case: dict[str, Any] = {**chaos.CASE, "touch": touch}
    right = chaos.reference(tmp_path / "alone", case, script)
    with (
        chaos.warm_server() as warm,
        Harness(
            tmp_path / "job",
            [sys.executable, str(script)],
            workers=2,
            min_workers=2,
            environment={"CASE": json.dumps(case), "OMP_NUM_THREADS": "1"},
            options=chaos.OPTIONS,
            warm=warm,
        ) as harness,
    ):
        harness.wait_members(2)
        harness.want(4)
        harness.wait_members(4)
        harness.worker(harness.members()[1]).kill()
        harness.wait_members(3)
        assert harness.wait_over()["event"] == "done", harness.describe()
        chaos.check(harness, case, right)
        announced = [event["planned"] for event in harness.events if event["event"] == "announced"]
        assert announced.count(False) == 2, "the first, and after the kill: nobody had to try again"
        finished = [worker for worker in harness.workers if worker.status == 0]
        assert len(finished) == 3
