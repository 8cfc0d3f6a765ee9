"""What we read of Kubernetes objects: the fields we use and no others, small enough to hold a whole cluster.

Decoded by msgspec straight from the server's bytes; unknown fields are passed over, absent ones have defaults.
Never write these back whole: what we did not read would be lost. Change objects with patches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from stretto.kubernetes import quantities

CPU = "cpu"
MEMORY = "memory"
POD_COUNT = "pods"
GPU = "nvidia.com/gpu"
_IN_MIB = ("memory", "ephemeral-storage", "hugepages-")

Amounts = dict[str, int]
"""Resources by name: `cpu` in millicores, memory, storage and huge pages in MiB, everything else as a number."""


class _Read(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """Every struct here. What is read from text has no cycles: the collector need not look at a whole cluster."""


class OwnerReference(_Read, frozen=True):
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Meta(_Read, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()
    finalizers: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name

    @property
    def is_leaving(self) -> bool:
        """Deletion was asked for; the object is there until grace period and finalizers are through."""
        return self.deletion_timestamp is not None


class ListMeta(_Read, frozen=True):
    resource_version: str = ""
    # Python has the word `continue` for itself.
    more: str = msgspec.field(default="", name="continue")
    remaining_item_count: int | None = None


class Toleration(_Read, frozen=True):
    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class Requirement(_Read, frozen=True):
    key: str
    operator: str
    values: tuple[str, ...] = ()


class NodeSelectorTerm(_Read, frozen=True):
    match_expressions: tuple[Requirement, ...] = ()
    match_fields: tuple[Requirement, ...] = ()


class _NodeSelector(_Read, frozen=True):
    node_selector_terms: tuple[NodeSelectorTerm, ...] = ()


class _NodeAffinity(_Read, frozen=True):
    required: _NodeSelector | None = msgspec.field(default=None, name="requiredDuringSchedulingIgnoredDuringExecution")


class Affinity(_Read, frozen=True):
    node_affinity: _NodeAffinity | None = None
    pod_affinity: dict[str, Any] | None = None
    pod_anti_affinity: dict[str, Any] | None = None


class _Resources(_Read, frozen=True):
    requests: dict[str, str] = {}


class _Port(_Read, frozen=True):
    host_port: int = 0


class Container(_Read, frozen=True):
    name: str = ""
    resources: _Resources = _Resources()
    restart_policy: str = ""
    ports: tuple[_Port, ...] = ()


class _ClaimName(_Read, frozen=True):
    claim_name: str = ""


class Volume(_Read, frozen=True):
    name: str = ""
    persistent_volume_claim: _ClaimName | None = None
    ephemeral: dict[str, Any] | None = None


class _Gate(_Read, frozen=True):
    name: str = ""


class PodSpec(_Read, frozen=True):
    node_name: str = ""
    scheduler_name: str = ""
    priority: int = 0
    preemption_policy: str = ""
    node_selector: dict[str, str] = {}
    affinity: Affinity | None = None
    tolerations: tuple[Toleration, ...] = ()
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] = ()
    resources: _Resources | None = None
    """For the pod as a whole (newer Kubernetes): takes the place of the containers' sum."""
    overhead: dict[str, str] = {}
    volumes: tuple[Volume, ...] = ()
    resource_claims: tuple[dict[str, Any], ...] = ()
    scheduling_gates: tuple[_Gate, ...] = ()
    termination_grace_period_seconds: int | None = None

    @property
    def requests(self) -> Amounts:
        """What the pod takes of its node, as kube-scheduler counts it.

        Init containers run one after the other, each beside the sidecars (init containers that are always restarted)
        started before it; the pod needs the larger of that and of everything that runs in the end.
        """
        running = _total(container.resources.requests for container in self.containers)
        sidecars: Amounts = {}
        most: Amounts = {}
        for container in self.init_containers:
            own = amounts(container.resources.requests, up=True)
            if container.restart_policy == "Always":
                sidecars = _sum(sidecars, own)
                own = sidecars
            else:
                own = _sum(own, sidecars)
            most = _larger(most, own)
        needs = _larger(_sum(running, sidecars), most)
        if self.resources is not None:
            needs |= amounts(self.resources.requests, up=True)
        return _sum(needs, amounts(self.overhead, up=True)) if self.overhead else needs


class Condition(_Read, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class Terminated(_Read, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class Waiting(_Read, frozen=True):
    reason: str = ""
    message: str = ""


class Running(_Read, frozen=True):
    started_at: datetime | None = None


class ContainerState(_Read, frozen=True):
    waiting: Waiting | None = None
    running: Running | None = None
    terminated: Terminated | None = None


class ContainerStatus(_Read, frozen=True):
    name: str = ""
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()
    ready: bool = False
    restart_count: int = 0


class PodStatus(_Read, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    nominated_node_name: str = ""
    conditions: tuple[Condition, ...] = ()
    container_statuses: tuple[ContainerStatus, ...] = ()
    init_container_statuses: tuple[ContainerStatus, ...] = ()
    start_time: datetime | None = None


class Pod(_Read, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def requests(self) -> Amounts:
        return self.spec.requests

    @property
    def is_terminal(self) -> bool:
        """It has ended and will not run again; it holds nothing of its node."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def is_bound(self) -> bool:
        return bool(self.spec.node_name)

    @property
    def is_running(self) -> bool:
        return self.status.phase == "Running" and not self.metadata.is_leaving

    def condition(self, kind: str) -> Condition | None:
        return _condition(self.status.conditions, kind)


class Taint(_Read, frozen=True):
    key: str
    value: str = ""
    effect: str = ""


class NodeSpec(_Read, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] = ()


class NodeStatus(_Read, frozen=True):
    allocatable: dict[str, str] = {}
    capacity: dict[str, str] = {}
    conditions: tuple[Condition, ...] = ()


class Node(_Read, frozen=True):
    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def labels(self) -> dict[str, str]:
        return self.metadata.labels

    @property
    def is_ready(self) -> bool:
        ready = _condition(self.status.conditions, "Ready")
        return ready is not None and ready.status == "True"

    @property
    def allocatable(self) -> Amounts:
        """What pods may use, rounded down; the capacity where the node says nothing else."""
        return amounts(self.status.allocatable or self.status.capacity, up=False)


class Thing(_Read, frozen=True):
    """Any object of which we look at little."""

    metadata: Meta
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


class ElasticJob(_Read, frozen=True):
    metadata: Meta
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


class LeaseSpec(_Read, frozen=True):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: datetime | None = None
    renew_time: datetime | None = None
    lease_transitions: int | None = None


class Lease(_Read, frozen=True):
    metadata: Meta
    spec: LeaseSpec = LeaseSpec()


def amounts(given: Mapping[str, str], *, up: bool) -> Amounts:
    """Resource quantities as whole numbers: `up` for requests, down for what there is."""
    return {name: _amount(name, text, up) for name, text in given.items()}


@functools.lru_cache(10_000)
def _amount(name: str, text: str, up: bool) -> int:
    if name == CPU:
        return quantities.milli(text, up=up)
    if name.startswith(_IN_MIB):
        return quantities.mib(text, up=up)
    return quantities.count(text, up=up)


def _total(requests: Iterable[Mapping[str, str]]) -> Amounts:
    total: Amounts = {}
    for one in requests:
        for name, text in one.items():
            total[name] = total.get(name, 0) + _amount(name, text, True)
    return total


def _sum(left: Amounts, right: Amounts) -> Amounts:
    return {name: left.get(name, 0) + right.get(name, 0) for name in left | right} if right else left


def _larger(left: Amounts, right: Amounts) -> Amounts:
    return {name: max(left.get(name, 0), right.get(name, 0)) for name in left | right} if right else left


def _condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((condition for condition in conditions if condition.type == kind), None)
