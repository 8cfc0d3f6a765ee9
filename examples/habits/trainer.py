"""A trainer of one's own, with callbacks that are called by its count of steps."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import stretto.torch as stretto

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float64) / 16, torch.tensor(digits.target)

torch.manual_seed(0)
job = stretto.join()
model = job.model(torch.nn.Linear(64, 10).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def train_step(batch: stretto.Batch) -> torch.Tensor:
    loss = F.cross_entropy(model(batch.x), batch.y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.detach()


class Trainer:
    def __init__(self, batches: Iterator[stretto.Batch], callbacks: list[Callable[[int], None]]) -> None:
        self.batches, self.callbacks, self.global_step = batches, callbacks, 0

    def fit(self) -> None:
        while job.attempt(train_step, self.batches) is not None:
            self.global_step = job.step
            for callback in self.callbacks:
                callback(self.global_step)


def tell(step: int) -> None:
    if step % 20 == 0 and job.leader:
        right = (model(x).argmax(1) == y).sum()
        print(f"step {step}: {right} of {len(y)} are right")


Trainer(job.batches(TensorDataset(x, y), size=128, epochs=4, per_worker=32), [tell]).fit()
