"""A job of somebody who minds their own business: it trains a small model, and has things that nobody else may see.

Its canaries are in its environment, its log, a checkpoint and a file of its own. At the end it writes down what it came
to: the same numbers as anywhere else, whatever went on around it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stretto.torch as stretto

STEPS, STEP_S = int(os.environ["STEPS"]), float(os.environ["STEP_S"])
SEED = int(os.environ["SEED"])


class Secret:
    """Something of the state that is not for others: it goes into every checkpoint."""

    def state_dict(self) -> dict[str, str]:
        return {"secret": os.environ["CANARY_CHECKPOINT"]}

    def load_state_dict(self, state: dict[str, str]) -> None:
        assert state == self.state_dict()


def main() -> None:
    torch.manual_seed(SEED)
    job = stretto.join()
    model = job.model(nn.Linear(6, 3).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    job.keep("secret", Secret())
    x = torch.randn(240, 6, dtype=torch.float64)
    y = x[:, :3] * 2 - x[:, 3:]
    print(os.environ["CANARY_LOG"], flush=True)
    for batch in job.batches(TensorDataset(x, y), size=24, epochs=STEPS // 10, seed=SEED):
        optimizer.zero_grad()
        (model(batch.x) - batch.y).square().mean().backward()
        optimizer.step()
        time.sleep(STEP_S)
    if job.leader:
        values = [round(value, 9) for parameter in model.parameters() for value in parameter.flatten().tolist()]
        found = hashlib.sha256(json.dumps(values).encode()).hexdigest()
        result = Path(os.environ["RESULTS"], f"{SEED}.json")
        result.write_text(json.dumps({"steps": job.step, "weights": found, "canary": os.environ["CANARY_RESULT"]}))


if __name__ == "__main__":
    main()
