"""Elastic training for PyTorch.

import stretto.torch as stretto

job = stretto.join()                       # outside Stretto: a world of one, same script
model = job.model(Net())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for batch in job.batches(dataset, size=256, epochs=10, seed=0, per_worker=64):
    loss = F.cross_entropy(model(batch.x), batch.y)
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
"""

from stretto.torch.chance import begin_script
from stretto.torch.checks import TrainingError
from stretto.torch.data import Batch, Turn
from stretto.torch.job import Job
from stretto.torch.joining import join

begin_script()

__all__ = ["Batch", "Job", "TrainingError", "Turn", "join"]
