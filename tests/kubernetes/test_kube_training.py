"""Elastic training in real pods on a real kubelet: grown, hurt, shrunk, and every sample counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from controllers import BASE, Jobs, install, until

from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import controlled
from stretto.testing.kubernetes.images import CONTROLLER, USER, WORKER
from stretto.testing.kubernetes.images import controller as controller_image
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
    time.sleep(0 if os.path.exists("/shelf/hurry") else 0.05)
if job.rank == 0:
    print("result", model.weight.sum().item(), job.step, flush=True)
"""


PLAIN = """
import os, signal, time
import torch
import torch.distributed as dist

told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
step = int(open("/shelf/step").read()) if os.path.exists("/shelf/step") else 0
if rank == 0:
    with open("/shelf/said", "a") as file:
        print(f"begins at step {step} with {size} ranks", file=file)
while step < 500:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    step += 1
    time.sleep(0 if os.path.exists("/shelf/hurry") else 0.05)
    stop = torch.tensor(len(told))
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    if stop.item() or step % 100 == 0:
        if rank == 0:
            with open("/shelf/step.new", "w") as file:
                file.write(str(step))
            os.replace("/shelf/step.new", "/shelf/step")
    if stop.item():
        break
dist.barrier()
"""


class Training:
    """A job that trains, with a folder of this machine as its volume."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        folder.mkdir()
        folder.chmod(0o777)
        (folder / "train.py").write_text(SCRIPT)

    def submit(self, name: str, low: int, high: int, epochs: int, cpu: str = "100m", **more: Any) -> None:
        container = {
            "name": "worker",
            "imagePullPolicy": "Never",
            "volumeMounts": [{"name": "shelf", "mountPath": "/shelf"}],
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": USER, "readOnlyRootFilesystem": True,
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            },
        }  # fmt: skip
        pod = {
            "containers": [container],
            "volumes": [
                {"name": "shelf", "hostPath": {"path": str(self.folder)}},
                {"name": "tmp", "emptyDir": {}},
            ],
        }
        container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})  # type: ignore[attr-defined]
        self.jobs.create(
            name, workers={"min": low, "max": high, "explore": False}, image=WORKER,
            command=["python3", "/shelf/train.py"],
            env={"EPOCHS": str(epochs), "OMP_NUM_THREADS": "1"}, resources={"gpu": 0, "cpu": cpu, "memory": "700Mi"},
            checkpoint={"dir": "/shelf", "every": 2}, template={"spec": pod}, **more,
        )  # fmt: skip

    def said(self) -> str:
        """What plain scripts write down."""
        return (self.folder / "said").read_text() if (self.folder / "said").exists() else ""

    def hurry(self) -> None:
        (self.folder / "hurry").touch()

    def check(self, name: str, epochs: int) -> None:
        (own,) = self.folder.glob(f"{self.jobs.namespace}-{name}-*")
        audit(ledger_files(own / "ledger"), {0: Loop(samples=64, size=16, epochs=epochs, seed=1)}).check()

    def plain(self, name: str, command: list[str], **more: Any) -> None:
        """A job of the same image that does something else."""
        pod = {"containers": [{"name": "worker", "imagePullPolicy": "Never"}]}
        resources = {"gpu": 0, "cpu": "50m", "memory": "64Mi"}
        spec = {"image": WORKER, "command": command, "resources": resources, "template": {"spec": pod}, **more}
        self.jobs.create(name, **spec)


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


def test_two_nodes_a_killed_controller_a_drained_pod_and_a_lost_machine(
    real_control_plane: ControlPlane, real_node: RealNode, second_node: RealNode, real_namespace: str, tmp_path: Path
) -> None:
    """Each worker fills a node of its own: they talk from machine to machine."""
    jobs = Jobs(real_control_plane, real_namespace)
    training = Training(jobs, tmp_path / "work")
    account = install(real_control_plane)
    with controlled(account, tmp_path, real_node.address) as controller:
        training.submit("train", 1, 2, 250, cpu="1100m")
        jobs.reaches("train", lambda s: s.get("ready") == 2 and s.get("step", 0) > 5, "two members that train")
        assert len({pod["spec"]["nodeName"] for pod in jobs.pods("train")}) == 2
        controller.kill()
        controller.start()
        later = jobs.reaches("train", lambda s: s.get("ready") == 2 and (s.get("coordinator") or {}).get("term", 0) > 1)
        assert later["restarts"] == 0
        first = running(jobs, "train")[0]
        jobs.kubectl("delete", "pod", first, "--wait=false")
        jobs.reaches("train", lambda s: s.get("ready") == 2 and first not in running(jobs, "train"), "a replacement")
        assert jobs.status("train")["failures"] == 0, "to be asked to leave is no fault"
        second_node.lose()
        try:
            jobs.reaches("train", lambda s: s.get("ready") == 1, "the other goes on alone")
            training.hurry()
            assert jobs.reaches("train", lambda s: s.get("step") == 1000)["restarts"] == 0
        finally:
            second_node.start()
        jobs.ended("train")
        training.check("train", 250)


def test_a_plain_script_is_resized_by_restart(
    real_control_plane: ControlPlane, real_node: RealNode, real_namespace: str, tmp_path: Path
) -> None:
    jobs = Jobs(real_control_plane, real_namespace)
    training = Training(jobs, tmp_path / "work")
    (training.folder / "train.py").write_text(PLAIN)
    account = install(real_control_plane)
    with controlled(account, tmp_path, real_node.address):
        training.submit("plain", 1, 2, 0, level="restart")
        until(lambda: "2 ranks" in training.said(), "two ranks that train")
        jobs.kubectl("scale", "elasticjob/plain", "--replicas=1")
        until(lambda: "1 ranks" in training.said(), "one rank that goes on")
        training.hurry()
        jobs.ended("plain")
        begun = [int(line.split()[3]) for line in training.said().splitlines()]
        assert begun[0] == 0
        assert begun[-1] > 0, "it went on where it had been stopped"


def test_templates_that_cannot_run_end_in_a_clear_condition(
    real_control_plane: ControlPlane, real_node: RealNode, real_namespace: str, tmp_path: Path
) -> None:
    jobs = Jobs(real_control_plane, real_namespace)
    training = Training(jobs, tmp_path / "work")
    account = install(real_control_plane)
    with controlled(account, tmp_path, real_node.address):
        training.plain("no-image", ["true"], image="local.test/not-there:1")
        training.plain("no-program", ["/not/there"])
        training.plain("fails", ["sh", "-c", "echo something went wrong >&2; exit 3"])
        training.plain("too-large", ["python3", "-c", "b'x' * 2**30"])
        training.plain("ends", ["true"], level="elastic", workers={"min": 1, "max": 2, "explore": False})
        assert "ErrImageNeverPull" in jobs.ended("no-image", "Failed")["message"]
        assert "/not/there" in jobs.ended("no-program", "Failed")["message"]
        told = jobs.ended("fails", "Failed")
        assert "exit code 3" in told["message"]
        assert "something went wrong" in told["message"]
        assert "out of memory" in jobs.reaches("too-large", lambda s: bool(s.get("failures")))["message"]
        jobs.ended("ends")
        assert len(jobs.pods("fails", alive=False)) == 1, "it was not tried again and again"


OVERLAY = """
bases: [{base}]
images: [{{name: stretto-controller, newName: {name}, newTag: "{tag}"}}]
patchesJson6902:
  - {{target: {{group: apps, version: v1, kind: Deployment, name: stretto-controller}}, path: patch.yaml}}
"""
PATCH = """
- {op: replace, path: /spec/template/spec/containers/0/args, value: [controller, --tls, "--url=wss://$(POD_IP):8080"]}
- op: add
  path: /spec/template/spec/containers/0/env
  value: [{name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}]
- {op: add, path: /spec/template/spec/nodeSelector, value: {kubernetes.io/hostname: NODE}}
"""


def test_the_manifests_bring_up_a_controller_that_works(
    real_control_plane: ControlPlane, real_node: RealNode, real_namespace: str, tmp_path: Path
) -> None:
    """In pods, as nobody in particular, on a read-only file system, with its own rights. Here is no name service and no
    kube-proxy: workers are told the address of the pod instead of the Service's name."""
    jobs = Jobs(real_control_plane, real_namespace)
    training = Training(jobs, tmp_path / "work")
    real_node.load(controller_image())
    name, _, tag = CONTROLLER.rpartition(":")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    base = os.path.relpath(BASE, overlay.resolve())
    (overlay / "kustomization.yaml").write_text(OVERLAY.format(base=base, name=name, tag=tag))
    # Only this node has the image.
    (overlay / "patch.yaml").write_text(PATCH.replace("NODE", real_node.name))
    real_control_plane.kubectl("apply", "-k", str(overlay))
    try:
        real_control_plane.kubectl(
            "rollout", "status", "deployment/stretto-controller", "--namespace", "stretto-system", "--timeout=90s"
        )
        training.submit("train", 1, 2, 30)
        jobs.reaches("train", lambda s: s.get("ready") == 2, "two members")
        training.hurry()
        jobs.ended("train")
        training.check("train", 30)
    finally:
        real_control_plane.kubectl("delete", "deployment", "stretto-controller", "--namespace", "stretto-system")
