"""What a script does in the moments between its steps, while workers are lost in them. CASE says which; every worker
that comes to the end writes what it has."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto
from stretto.torch.groups import GroupBroken
from stretto.torch.job import Job
from stretto.torch.reducer import Reducer
from stretto.torch.world import World

folder, me = Path(os.environ["STRETTO_FOLDER"]), os.environ.get("STRETTO_WORKER", "alone")
torch.manual_seed(0)
job = stretto.join(**json.loads(os.environ.get("JOIN", "{}")))
x = torch.randn(64, 4, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True))


class Kept:
    """Anything that belongs to the job."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def net(*layers: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = job.model(nn.Sequential(*layers).double())
    return model, job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(batch.x), batch.y).backward()
    optimizer.step()


def tell(**found: Any) -> None:
    (folder / f"{me}.found").write_text(json.dumps({"rank": job.rank, "steps": job.step, **found}))


def lose_the_sum(step: int) -> None:
    """The leader does not see that the sum of this step is complete; the others do."""
    wait = Reducer._wait

    def losing(self: Reducer) -> None:
        wait(self)
        if job.rank == 0 and job.size == 2 and job.cursor.step == step and self.failed is None:
            Reducer._wait = wait  # type: ignore[method-assign]
            # The other one has it by then.
            while not (folder / "applied").exists():
                time.sleep(0.01)
            assert self._group is not None
            self.fail(self._group.failure(GroupBroken("this member did not see the sum complete")))

    Reducer._wait = losing  # type: ignore[method-assign]


def applied_by_others(step: int) -> None:
    if job.rank == 1 and job.cursor.step == step:
        (folder / "applied").touch()


def deeds() -> None:
    """What follows a step is done once by each worker, and leaves one trace in the state."""
    lose_the_sum(9)
    model, optimizer = net(nn.Linear(4, 1))
    count, own, by_leader = job.keep("count", Kept(), local=True), [], folder / "by leader"
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
        step = batch.step
        applied_by_others(9)
        job.once_per_step(lambda step=step: (count.values.append(step), own.append(step)))
        job.once_by_leader(lambda step=step: by_leader.open("a").write(f"{step} "))
        if job.every(10):
            job.save(folder / f"saved {job.step + 1}")
    tell(count=count.values, own=own)


def deeds_of_a_break() -> None:
    """As the script leaves its loop."""
    lose_the_sum(9)
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
        applied_by_others(9)
        if batch.step == 9:
            job.save(folder / "saved")
            job.once_by_leader((folder / "by leader").open("a").write, "9 ")
            break
    tell()


def stopping() -> None:
    """The only worker is sent away in the step in which it asks to stop."""
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
        if batch.step == 10:
            job.stop()
            if me == "w0":
                os.kill(os.getpid(), signal.SIGTERM)
    tell()


def hard_ones_first() -> None:
    """A sampler whose next order depends on the losses of this epoch: it is drawn when the next epoch begins."""

    class Hard:
        def __init__(self) -> None:
            self.losses, self.draws = torch.zeros(64, dtype=torch.float64), []

        def __iter__(self) -> Iterator[int]:
            return iter(self.losses.argsort(descending=True, stable=True).tolist())

        def state_dict(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.losses = state["losses"].clone()

    model, optimizer = net(nn.Linear(4, 1))
    hard = job.keep("hard", Hard())
    for batch in job.batches(data, size=8, epochs=3, sampler=hard):
        each = (model(batch.x) - batch.y).square().flatten()
        pairs = job.all_gather(torch.stack([torch.tensor(batch.indices, dtype=torch.float64), each.detach()], 1))
        hard.losses[pairs[:, 0].long()] = pairs[:, 1]
        optimizer.zero_grad()
        each.mean().backward()
        optimizer.step()
    tell(weights=model[0].weight.tolist())


def statistics() -> None:
    """The leader dies as it tells the others what its norms have gathered."""
    model, optimizer = net(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    judged = job.keep("judged", Kept())
    share, where = Job._share_statistics, [-1]

    def dying(self: Job, world: World, loop: int) -> None:
        if me == "w0" and where[0] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        share(self, world, loop)

    for batch in job.steps(1000):
        (model(x[:8] + batch.step).sum() * 0).backward()
        optimizer.step()
        if job.size == 3:
            job.stop()
        time.sleep(0.01)
    Job._share_statistics = dying  # type: ignore[method-assign]
    for epoch in job.epochs(4):
        where[0] = epoch
        model.train()
        for batch in job.batches(data, size=24, seed=epoch):
            train(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            judged.values.append(F.mse_loss(model(x), data.tensors[1]).item())
    tell(judged=judged.values)


def saving_where_nothing_is() -> None:
    """What goes wrong as a script leaves its loop is no less wrong."""
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
        if batch.step == 5:
            job.save("/nonexistent/best.safetensors")
            break
    tell()


def held_by_a_variable() -> None:
    """A script that has left its loop is not in it any more, whoever holds the loop."""
    model, optimizer = net(nn.Linear(4, 1))
    loop = job.batches(data, size=8, epochs=5)
    for batch in loop:
        train(model, optimizer, batch)
        if batch.step == 5:
            break
    job.save(folder / "saved")
    total = job.all_reduce(1.0)
    net(nn.Linear(1, 1))
    tell(length=len(loop), total=total, there=job.rank != 0 or (folder / "saved").exists())


def drawing() -> None:
    """Functions that draw random numbers, of the leader and of all, in a loop and between loops."""
    model, optimizer = net(nn.Linear(4, 1))
    bodies = []
    for batch in job.batches(data, size=8, epochs=2):
        chosen = job.broadcast(lambda: random.randrange(1 << 30))
        again = job.broadcast(lambda: random.randrange(1 << 30))
        bodies.append([chosen, again, random.randrange(1 << 30), int(np.random.randint(1 << 30))])
        train(model, optimizer, batch)
        job.once_by_leader(lambda: torch.rand(3))
    orders = [job.broadcast(lambda: torch.randperm(10).tolist()) for _ in range(2)]
    drawn = torch.randperm(10).tolist()
    total = job.all_reduce(lambda: float(torch.rand(())), "max")
    tell(bodies=bodies, orders=orders, drawn=drawn, total=total, last=torch.rand(3).tolist())


def filled_in_any_order() -> None:
    """Kept dicts are alike whatever came into them first."""
    model, optimizer = net(nn.Linear(4, 1))
    kept = job.keep("kept", Kept())
    for batch in job.batches(data, size=8, epochs=2):
        train(model, optimizer, batch)
        names = ["one", "two"] if job.rank == 0 else ["two", "one"]
        kept.values = [dict.fromkeys(names, batch.step)]
    tell()


def exchanging_in_a_thread() -> None:
    """Others than the loop's thread exchange nothing."""
    import threading

    model, optimizer = net(nn.Linear(4, 1))
    failed: list[Exception] = []

    def evaluate() -> None:
        try:
            job.all_reduce(1.0)
        except Exception as error:
            failed.append(error)

    for batch in job.batches(data, size=8, epochs=1):
        train(model, optimizer, batch)
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
    tell()


def few_samples() -> None:
    """More workers than a step has samples, or virtual ranks."""
    model, optimizer = net(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with_three, most = 0, int(os.environ.get("STOP", "0"))
    for batch in job.batches(data, size=2, epochs=1000):
        train(model, optimizer, batch)
        with_three += job.size == 3
        # A stop takes effect one step later.
        if with_three == 20 or job.step + 2 == most:
            job.stop()
        time.sleep(0 if most else 0.01)
    tell(weights=[parameter.tolist() for parameter in model.parameters()], with_three=with_three)


def a_look_first() -> None:
    """At one batch, for shapes; then the real loop."""
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8):
        shape = list(batch.x.shape[1:])
        break
    for batch in job.batches(data, size=8, epochs=60):
        train(model, optimizer, batch)
        if job.size == 2:
            job.stop()
        time.sleep(0.01)
    tell(shape=shape, weights=model[0].weight.tolist())


def leaving_at_first_sight() -> None:
    """By what a newcomer, with no weights yet, sees in its first batch."""
    model, optimizer = net(nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(7.0 if me == "w1" else 0.1)
    for batch in job.batches(data, size=8, epochs=60):
        if model[0].weight.abs().max() > 6:
            break
        train(model, optimizer, batch)
        time.sleep(0.01)
    tell()


def a_thread_that_waits() -> None:
    """For what comes after the loop, to which a worker that is sent away does not come."""
    import threading

    model, optimizer = net(nn.Linear(4, 1))
    over = threading.Event()
    threading.Thread(target=over.wait).start()
    for batch in job.batches(data, size=8, epochs=40):
        train(model, optimizer, batch)
        time.sleep(0.02)
    over.set()
    tell()


class Failing(torch.autograd.Function):
    """A backward pass that fails, when it is told to."""

    fails = False

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if Failing.fails:
            raise MemoryError("no room for this gradient")
        return gradients[0]


def a_failed_backward(**how: Any) -> None:
    """The script skips what does not fit into memory."""
    first, _ = net(nn.Linear(4, 4))
    second, _ = net(nn.Linear(4, 1))
    optimizer = job.optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05))
    for batch in job.batches(data, size=8, epochs=5, **how):
        Failing.fails = batch.step == 11 and me in ("alone", "w0") and not (how and batch.last)
        optimizer.zero_grad()
        try:
            F.mse_loss(second(Failing.apply(first(batch.x))), batch.y).backward()
        except MemoryError:
            continue
        optimizer.step()
    tell()


def a_failed_backward_in_passes() -> None:
    a_failed_backward(per_worker=4)


def without_elements() -> None:
    """A parameter of no size, as empty heads have."""
    model, optimizer = net(nn.Linear(4, 1), nn.ParameterList([nn.Parameter(torch.zeros(0))]))
    for batch in job.batches(data, size=8, epochs=20):
        optimizer.zero_grad(set_to_none=False)
        (F.mse_loss(model[0](batch.x), batch.y) + model[1][0].sum()).backward()
        optimizer.step()
        time.sleep(0.02)
    tell()


def trained_in_a_thread() -> None:
    """What comes after the loop is for those who trained to its end."""
    model, optimizer = net(nn.Linear(4, 1))

    def go() -> None:
        for batch in job.batches(data, size=8, epochs=20):
            train(model, optimizer, batch)
            time.sleep(0.02)

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    tell(leader=job.leader)


def cleaned_up() -> None:
    """In any case: also where this worker leaves."""
    model, optimizer = net(nn.Linear(4, 1))
    try:
        for batch in job.batches(data, size=8, epochs=20):
            train(model, optimizer, batch)
            time.sleep(0.02)
    finally:
        tell(leader=job.leader)


def failing_at_first_sight() -> None:
    """What goes wrong in the first batch of a worker that comes later."""
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=200):
        if me == "w2":
            raise MemoryError("no room for the model")
        train(model, optimizer, batch)
        time.sleep(0.02)


def a_hook_of_its_own() -> None:
    """That tells nobody."""
    sys.excepthook = lambda *_: None
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
        if batch.step == 20:
            raise ValueError("the data is odd")


def a_count_of_a_head() -> None:
    """Among many parameters only the last depends on a count of the script's own, from the first step on."""
    model, optimizer = net(*[nn.Linear(4, 4) for _ in range(60)], nn.Linear(4, 1))
    for frozen in list(model.parameters())[:80]:
        frozen.requires_grad_(False)
    count = 0
    for batch in job.batches(data, size=8, epochs=200):
        count += 1  # noqa: SIM113
        optimizer.zero_grad()
        head = model[-1]
        hidden = model[:-1](batch.x)
        (F.mse_loss(head(hidden), batch.y) + 0.1 * count * head.weight.square().sum()).backward()
        optimizer.step()
        time.sleep(0.02)


def ending_without_a_word() -> None:
    """After its loop, as scripts do whose threads would not end."""
    model, optimizer = net(nn.Linear(4, 1))
    for batch in job.batches(data, size=8, epochs=5):
        train(model, optimizer, batch)
    tell()
    os._exit(0)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        deeds,
        deeds_of_a_break,
        stopping,
        hard_ones_first,
        statistics,
        saving_where_nothing_is,
        held_by_a_variable,
        drawing,
        filled_in_any_order,
        exchanging_in_a_thread,
        few_samples,
        a_look_first,
        leaving_at_first_sight,
        a_thread_that_waits,
        a_failed_backward,
        a_failed_backward_in_passes,
        without_elements,
        trained_in_a_thread,
        cleaned_up,
        failing_at_first_sight,
        a_hook_of_its_own,
        a_count_of_a_head,
        ending_without_a_word,
    )
}
CASES[os.environ["CASE"]]()
