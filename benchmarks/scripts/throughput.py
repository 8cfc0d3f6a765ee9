"""A worker of `ddp_throughput.py`: the loop of a user under Stretto, and beside it the same loop of a user of DDP.

Both train the same model on the same data in turns, a block of steps at a time; all workers do as many. Between them
runs a third, the reducer alone on one ready batch: what is left of the difference without reading, ledger, rollback
and membership. What a step of each cost in every round is written as JSON to a file named after the worker.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import stretto.torch as stretto
from stretto.torch.groups import Group, Store, connect
from stretto.torch.reducer import Reducer

EPOCHS = 1_000_000
"""More than will be needed: the loop is stopped."""
WARM = 10
DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))

Step = Callable[[], None]


def small() -> tuple[nn.Module, TensorDataset, int]:
    """A few milliseconds a step: a small convolutional net on images of 8 x 8."""
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for _ in range(6):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 10))
    return model, TensorDataset(torch.randn(4096, 1, 8, 8), torch.randint(10, (4096,))), 32


def large() -> tuple[nn.Module, TensorDataset, int]:
    """25 million parameters in six layers."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(2048, 10))
    return model, TensorDataset(torch.randn(2048, 2048), torch.randint(10, (2048,))), 64


MODELS = {"small": small, "large": large}
"""A model, its data, and the size of a global batch."""


def main() -> None:
    torch.set_num_threads(1)
    name, rounds, block_s = os.environ["MODEL"], int(os.environ["ROUNDS"]), float(os.environ["BLOCK_S"])
    folder, worker = Path(os.environ["STRETTO_FOLDER"]), os.environ["STRETTO_WORKER"]
    members = int(os.environ["MEMBERS"])
    # Where there is a GPU for everybody: as far as NCCL goes, which refuses two workers on one.
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" and members == 1 else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder / 'ddp'}", rank=int(worker.removeprefix("w")), world_size=members
    )
    store = Store()
    addresses: list[str] = [""] * members
    dist.all_gather_object(addresses, store.address)
    group = connect(1, dist.get_rank(), addresses, timeout_s=60)
    job = stretto.join(DEVICE)
    loop = our_loop(job, name)
    sides: dict[str, Step] = {
        "ours": lambda: next(loop),
        "ddp": beside(job, peer_step(name, members)),
        "reducer": beside(job, reducer_step(name, group)),
    }
    count = min(calibrate(step, block_s) for step in sides.values())
    costs = [measure(sides, count, backwards=number % 2 == 1) for number in range(rounds)]
    (folder / f"{worker}.json").write_text(json.dumps({"steps": count, "rounds": costs}))
    job.stop()
    for _ in loop:
        pass
    dist.destroy_process_group()
    group.close()
    store.close()


def beside(job: stretto.Job, step: Step) -> Step:
    """Peers train while our loop waits in its body, where the job lets no optimizer step that it does not know."""

    def act() -> None:
        job.gate.stepping = True
        try:
            step()
        finally:
            job.gate.stepping = False

    return act


def our_loop(job: stretto.Job, name: str) -> Iterator[None]:
    """As in the documentation; a step is one turn."""
    torch.manual_seed(0)
    bare, data, size = MODELS[name]()
    model = job.model(bare)
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in job.batches(data, size=size, epochs=EPOCHS):
        loss = cross_entropy(model(batch.x.to(DEVICE)), batch.y.to(DEVICE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.report(loss=loss)
        yield


def peer_step(name: str, members: int) -> Step:
    """As in the tutorial of the framework, less what is not its doing: nothing is logged, saved or kept."""
    torch.manual_seed(0)
    bare, data, size = MODELS[name]()
    # At its best: buffers are not sent round, as ours are not, and gradients need not be copied back.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = DistributedDataParallel(bare.to(DEVICE), broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=size // members, sampler=sampler)

    def loop() -> Iterator[None]:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss = cross_entropy(model(x.to(DEVICE)), y.to(DEVICE))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield

    running = loop()
    return lambda: next(running)


def reducer_step(name: str, group: Group) -> Step:
    torch.manual_seed(0)
    model, data, size = MODELS[name]()
    model.to(DEVICE)
    x, y = (part.to(DEVICE) for part in data[: size // group.size])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reducer = Reducer(model.parameters())

    def step() -> None:
        reducer.exchange(group, 1 / group.size, (1.0,))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        if reducer.failed:
            raise reducer.failed
        optimizer.step()
        if reducer.flags[0] != group.size:
            raise AssertionError("not everybody took part")

    return step


def calibrate(step: Step, block_s: float) -> int:
    """How many steps a block takes; everybody must do as many, so the slowest decides."""
    timed(step, WARM)
    took = torch.tensor([timed(step, WARM)[0]])
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(3, round(block_s / float(took)))


def measure(sides: dict[str, Step], count: int, *, backwards: bool) -> dict[str, tuple[float, float]]:
    """One block of each; every other round the other way round, so that nobody always comes after the same one."""
    names = list(sides)
    costs = {name: timed(sides[name], count) for name in (reversed(names) if backwards else names)}
    return {name: costs[name] for name in names}


def timed(step: Step, count: int) -> tuple[float, float]:
    """Seconds and CPU seconds of this process, for a step."""
    dist.barrier()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count, (time.process_time() - begin_cpu) / count


if __name__ == "__main__":
    main()
