"""Nodes and pods as the API server knows them: what the agent of played nodes reads of them, and what it writes."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from stretto.testing.kubernetes.quantities import amounts

RUN_S = "fake.stretto.dev/run-s"
GPU = "nvidia.com/gpu"


class FakeNode(msgspec.Struct, frozen=True, kw_only=True):
    """What a node is to look like."""

    name: str
    cpu: str = "64"
    memory: str = "256Gi"
    pods: str = "250"
    gpus: int = 0
    labels: dict[str, str] = {}
    taints: tuple[dict[str, str], ...] = ()

    def resources(self) -> dict[str, str]:
        gpus = {GPU: str(self.gpus)} if self.gpus else {}
        return {"cpu": self.cpu, "memory": self.memory, "pods": self.pods, **gpus}


class FakePod(msgspec.Struct, kw_only=True):
    """A pod on a played node."""

    namespace: str
    name: str
    uid: str
    node: str
    requests: dict[str, int]
    environment: dict[str, str]
    """Of the first container; only what is given as plain text."""
    containers: list[str]
    images: dict[str, str]
    restart_policy: str
    run_s: float | None
    address: str = ""
    state: str = "new"
    """`new`, `running`, `ended`."""
    stopping: bool = False
    """It is being deleted, and goes soon."""
    started: str = ""
    restarts: int = 0


class _Metadata(msgspec.Struct):
    name: str
    namespace: str
    uid: str
    deletionTimestamp: str | None = None
    deletionGracePeriodSeconds: int | None = None
    annotations: dict[str, str] = {}


class _Variable(msgspec.Struct):
    name: str
    value: str = ""


class _Resources(msgspec.Struct):
    requests: dict[str, str] = {}


class _Container(msgspec.Struct):
    name: str
    image: str = ""
    env: list[_Variable] = []
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _Spec(msgspec.Struct):
    containers: list[_Container]
    nodeName: str = ""
    initContainers: list[_Container] = []
    overhead: dict[str, str] = {}
    restartPolicy: str = "Always"


class _Status(msgspec.Struct):
    phase: str = "Pending"
    podIP: str = ""
    startTime: str = ""


class SeenPod(msgspec.Struct):
    """What is decoded of a pod."""

    metadata: _Metadata
    spec: _Spec
    status: _Status


class _ListMetadata(msgspec.Struct):
    resourceVersion: str


class _PodList(msgspec.Struct):
    metadata: _ListMetadata
    items: list[SeenPod]


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


POD = msgspec.json.Decoder(SeenPod)
POD_LIST = msgspec.json.Decoder(_PodList)
EVENT = msgspec.json.Decoder(_Event)


_STATES = {"Running": "running", "Succeeded": "ended", "Failed": "ended"}


def fake_pod(seen: SeenPod) -> FakePod:
    """As it stands: another agent may have played it before."""
    first = seen.spec.containers[0]
    run_s = seen.metadata.annotations.get(RUN_S)
    return FakePod(
        namespace=seen.metadata.namespace,
        name=seen.metadata.name,
        uid=seen.metadata.uid,
        node=seen.spec.nodeName,
        requests=_requests(seen.spec),
        environment={variable.name: variable.value for variable in first.env},
        containers=[container.name for container in seen.spec.containers],
        images={container.name: container.image for container in seen.spec.containers},
        restart_policy=seen.spec.restartPolicy,
        run_s=float(run_s) if run_s is not None else None,
        address=seen.status.podIP,
        state=_STATES.get(seen.status.phase, "new"),
        started=seen.status.startTime,
    )


def _requests(spec: _Spec) -> dict[str, int]:
    """All containers together, or the largest that runs before them; and the place that the pod itself takes."""
    total = {"pods": 1}
    for container in spec.containers:
        for resource, wanted in amounts(container.resources.requests).items():
            total[resource] = total.get(resource, 0) + wanted
    for container in spec.initContainers:
        for resource, wanted in amounts(container.resources.requests).items():
            total[resource] = max(total.get(resource, 0), wanted)
    for resource, wanted in amounts(spec.overhead).items():
        total[resource] = total.get(resource, 0) + wanted
    return total


# What is written.

_NODE_INFO = dict.fromkeys(
    (
        "machineID", "systemUUID", "bootID", "kernelVersion", "osImage", "containerRuntimeVersion", "kubeletVersion",
        "kubeProxyVersion",
    ),
    "fake",
) | {"operatingSystem": "linux", "architecture": "amd64"}  # fmt: skip


def node_object(node: FakeNode) -> dict[str, Any]:
    resources = node.resources()
    labels = {"kubernetes.io/hostname": node.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": labels | node.labels},
        "status": {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [ready_condition("True")],
            "addresses": [{"type": "Hostname", "address": node.name}],
            "nodeInfo": _NODE_INFO,
        },
    }


def lease_object(node: FakeNode) -> dict[str, Any]:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": node.name},
        "spec": {"holderIdentity": node.name, "leaseDurationSeconds": 40, "renewTime": now_precise()},
    }


def terminated(pod: FakePod, code: int) -> dict[str, Any]:
    reason = "Error" if code else "Completed"
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": pod.started, "finishedAt": now()}}


def running(pod: FakePod, last: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return {
        "phase": "Running",
        "startTime": pod.started,
        "hostIP": "127.0.0.1",
        "podIP": pod.address,
        "podIPs": [{"ip": pod.address}],
        **containers(pod, {"running": {"startedAt": now()}}, ready=True, last=last),
    }


def containers(
    pod: FakePod, state: Mapping[str, Any], *, ready: bool, last: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    kinds = {"Initialized": True, "Ready": ready, "ContainersReady": ready, "PodScheduled": True}
    at = now()
    conditions = [{"type": kind, "status": str(holds), "lastTransitionTime": at} for kind, holds in kinds.items()]
    statuses = [
        {
            "name": name, "image": pod.images[name], "imageID": f"fake://{pod.images[name]}",
            "containerID": f"fake://{pod.uid}/{name}/{pod.restarts}", "restartCount": pod.restarts,
            "ready": ready, "started": ready, "state": state, "lastState": last or {},
        }
        for name in pod.containers
    ]  # fmt: skip
    return {"conditions": conditions, "containerStatuses": statuses}


def ready_condition(status: str) -> dict[str, str]:
    reasons = {"True": ("KubeletReady", "kubelet is posting ready status")}
    reason, message = reasons.get(status, ("NodeStatusUnknown", "Kubelet stopped posting node status."))
    return {
        "type": "Ready", "status": status, "reason": reason, "message": message,
        "lastHeartbeatTime": now(), "lastTransitionTime": now(),
    }  # fmt: skip


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_precise() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
