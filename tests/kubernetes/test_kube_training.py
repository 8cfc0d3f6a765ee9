"""Elastic training in real pods on a real kubelet: grown, hurt, shrunk, and every sample counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from controllers import Jobs, controlled, install, until

from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.images import USER, WORKER
from stretto.testing.kubernetes.node import RealNode

pytestmark = pytest.mark.cluster

SCRIPT = """
import os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

torch.manual_seed(0)
x = torch.randn(64, 4, dtype=torch.float64)
data = TensorDataset(x, x.sum(1, keepdim=True))
job = stretto.join()
model = job.model(torch.nn.Linear(4, 1).double())
opt = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.batches(data, size=16, epochs=int(os.environ["EPOCHS"]), seed=1):
    loss = ((model(batch.x) - batch.y) ** 2).mean()
    opt.zero_grad(); loss.backward(); opt.step()
    job.report(loss=loss)
    time.sleep(0 if os.path.exists("/work/hurry") else 0.05)
if job.rank == 0:
    print("result", model.weight.sum().item(), job.step, flush=True)
"""


class Training:
    """A job that trains, with a folder of this machine as its volume."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "train.py").write_text(SCRIPT)

    def submit(self, name: str, low: int, high: int, epochs: int, **more: Any) -> None:
        container = {
            "name": "worker",
            "imagePullPolicy": "Never",
            "volumeMounts": [{"name": "work", "mountPath": "/work"}],
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": USER, "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            },
        }  # fmt: skip
        pod = {
            "containers": [container],
            "volumes": [
                {"name": "work", "hostPath": {"path": str(self.folder)}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})  # type: ignore[attr-defined]
        self.jobs.create(
            name, workers={"min": low, "max": high}, image=WORKER, command=["python3", "/work/train.py"],
            env={"EPOCHS": str(epochs), "OMP_NUM_THREADS": "1"}, resources={"gpu": 0, "cpu": "100m", "memory": "700Mi"},
            checkpoint={"dir": "/work", "every": 2}, template={"spec": pod}, **more,
        )  # fmt: skip

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def check(self, name: str, epochs: int) -> None:
        (own,) = self.folder.glob(f"{self.jobs.namespace}-{name}-*")
        audit(ledger_files(own / "ledger"), {0: Loop(samples=64, size=16, epochs=epochs, seed=1)}).check()


def running(jobs: Jobs, name: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in jobs.pods(name) if pod["status"].get("phase") == "Running"]


def test_a_job_grows_loses_a_pod_shrinks_and_counts_every_sample_once(
    real_control_plane: ControlPlane, real_node: RealNode, real_namespace: str, tmp_path: Path
) -> None:
    jobs = Jobs(real_control_plane, real_namespace)
    training = Training(jobs, tmp_path / "work")
    account = install(real_control_plane)
    with controlled(account, tmp_path, real_node.address):
        training.submit("train", 1, 2, 150)
        jobs.reaches("train", lambda s: s.get("ready") == 2 and s.get("step", 0) > 5, "two members that train")
        jobs.kubectl("scale", "elasticjob/train", "--replicas=3")
        before = jobs.reaches("train", lambda s: s.get("ready") == 3, "a third member")
        first = running(jobs, "train")[0]
        jobs.kubectl("delete", "pod", first, "--grace-period=0", "--force")
        jobs.reaches("train", lambda s: s.get("ready") == 3 and first not in running(jobs, "train"), "another third")
        jobs.kubectl("scale", "elasticjob/train", "--replicas=1")
        after = jobs.reaches("train", lambda s: s.get("ready") == 1 and s["size"] == "1/1..1", "one member")
        assert after["resizes"] > before["resizes"]
        training.hurry()
        done = jobs.ended("train")
        assert (done["step"], done["totalSteps"]) == (600, 600)
        assert done["restarts"] == 0, "it never stopped"
        training.check("train", 150)
        last = until(
            lambda: [pod for pod in jobs.pods("train", alive=False) if "result" in _log(jobs, pod)], "a result"
        )
        assert json.loads(_log(jobs, last[0]).split()[2]) == 600
        jobs.delete("train")
        until(lambda: not jobs.pods("train", alive=False), "its pods go with it")


def _log(jobs: Jobs, pod: dict[str, Any]) -> str:
    return jobs.kubectl("logs", pod["metadata"]["name"])
