"""The cluster as we see it: nodes, everybody's pods and our jobs, watched, and what follows from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from stretto.backends import protocol
from stretto.kubernetes import capacity, pods, quantities
from stretto.kubernetes.client import Api
from stretto.kubernetes.fitting import Fitting
from stretto.kubernetes.kinds import ELASTIC_JOBS, NODES, PODS
from stretto.kubernetes.model import Amounts, ElasticJob, Node, Pod
from stretto.kubernetes.watching import Watched

CPU_POOL = "cpu"
GPU_POOL = "gpu"
_TYPE_LABELS = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "gpu.nvidia.com/class",
    "amd.com/gpu.product-name",
)
_MEMORY_LABEL = "nvidia.com/gpu.memory"

OnWorker = Callable[[Pod | None, Pod | None], None]


class Cluster:
    """Make it, `run` it, wait for `synced`. Everything is called in one event loop."""

    def __init__(self, api: Api, gpu_resource: str, clock: Callable[[], float]) -> None:
        self.gpu_resource = gpu_resource
        self._clock = clock
        self.jobs: Watched[ElasticJob] = Watched(api, ELASTIC_JOBS)
        self._nodes: Watched[Node] = Watched(api, NODES)
        self._pods: Watched[Pod] = Watched(api, PODS)
        self.worker_pods: dict[str, Pod] = {}
        """Pods of our workers, by launch."""
        self.held: dict[str, Amounts] = {}
        """What those of them hold that have not ended, by launch. Those of one size share it."""
        self._sizes: dict[tuple[tuple[str, int], ...], Amounts] = {}
        self._by_job: dict[tuple[str, str], dict[str, Pod]] = {}
        self._largest: dict[tuple[str, str], Amounts] = {}
        self._usage = capacity.Usage(pods.is_worker)
        self._away: dict[str, float] = {}
        """Nodes that are not ready, and since when we know."""
        self._fitting: Fitting | None = None
        self._types: tuple[str, ...] | None = None
        self._room: capacity.Room | None = None
        self._choices: dict[str, str] = {}
        self._worker_listeners: list[OnWorker] = []
        self.changed: Callable[[], None] = lambda: None
        """Called when there may be more or less room for us."""
        self._pods.on_change(self._pod)
        self._nodes.on_change(self._node)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for watched in (self._nodes, self._pods, self.jobs):
                group.create_task(watched.run())

    async def synced(self) -> None:
        for watched in (self._nodes, self._pods, self.jobs):
            await watched.synced.wait()

    def stale_s(self) -> float:
        """For how long some of it may be wrong."""
        return max(watched.stale_s() for watched in (self._nodes, self._pods, self.jobs))

    def on_worker(self, listener: OnWorker) -> None:
        """Tell of every change to a pod of ours."""
        self._worker_listeners.append(listener)

    # What is known.

    def pods_of(self, namespace: str, job: str) -> list[Pod]:
        return list(self._by_job.get((namespace, job), {}).values())

    def largest(self, namespace: str, job: str) -> Amounts:
        """What the largest pod of a job holds now; of each resource."""
        known = self._largest.get((namespace, job))
        if known is None:
            known = {}
            for launch in self._by_job.get((namespace, job), ()):
                known = capacity.larger(known, self.held.get(launch, {}))
            self._largest[namespace, job] = known
        return known

    def nodes(self) -> Iterable[Node]:
        return self._nodes.items.values()

    def node(self, name: str) -> Node | None:
        return self._nodes.items.get(("", name))

    @property
    def pod_count(self) -> int:
        return len(self._pods.items)

    def away_s(self, node: str, now_s: float) -> float | None:
        """For how long a node has been away, as far as we have seen; None: it is there."""
        if self.node(node) is None:
            self._away.setdefault(node, now_s)
        since_s = self._away.get(node)
        return None if since_s is None else now_s - since_s

    def fitting(self) -> Fitting:
        if self._fitting is None:
            ready = sorted((node for node in self.nodes() if node.is_ready), key=lambda node: node.name)
            self._fitting, self._types = Fitting(ready), None
        return self._fitting

    def room(self, *, anew: bool = True) -> capacity.Room:
        """What our workers may have. Not anew: nothing of ours that changed since matters."""
        if self._room is None or anew:
            now = datetime.fromtimestamp(self._clock(), UTC)
            self._room = capacity.room(self.fitting(), self._usage, now=now, before=self._choices)
            self._choices = self._room.choices
        return self._room

    def _type(self, node: Node, there: Amounts) -> str:
        """The type of its devices."""
        if not there.get(self.gpu_resource, 0):
            return CPU_POOL
        return next((node.labels[label] for label in _TYPE_LABELS if label in node.labels), GPU_POOL)

    def types(self) -> tuple[str, ...]:
        """The types of all nodes, in the order of `fitting`."""
        fitting = self.fitting()
        if self._types is None:
            self._types = tuple(map(self._type, fitting.nodes, fitting.allocatable))
        return self._types

    def pools(self) -> tuple[str, ...]:
        return (*sorted(set(self.types()) - {CPU_POOL}), CPU_POOL)

    def protocol_nodes(self) -> tuple[protocol.Node, ...]:
        fitting = self.fitting()
        return tuple(
            protocol.Node(
                name=node.name,
                pool=kind,
                devices=there.get(self.gpu_resource, 0),
                cpu_milli=there.get("cpu", 0),
                memory_mib=there.get("memory", 0),
                gpu_memory_mib=gpu_memory_mib(node),
            )
            for node, there, kind in zip(fitting.nodes, fitting.allocatable, self.types(), strict=True)
        )

    # What changes.

    def _pod(self, old: Pod | None, new: Pod | None) -> None:
        self._usage.change(old, new)
        pod = new or old
        assert pod is not None
        if not pods.is_worker(pod):
            if old is None or new is None or _matters(old) != _matters(new):
                self._room = None
                self.changed()
            return
        launch = pods.launch_of(pod)
        job = job_of(pod)
        siblings = self._by_job.setdefault(job, {})
        self._largest.pop(job, None)
        if new is None:
            self.worker_pods.pop(launch, None)
            siblings.pop(launch, None)
        else:
            self.worker_pods[launch] = siblings[launch] = new
        if new is None or new.is_terminal:
            self.held.pop(launch, None)
        else:
            held = capacity.holds(new)
            self.held[launch] = self._sizes.setdefault(tuple(sorted(held.items())), held)
        for listener in self._worker_listeners:
            listener(old, new)

    def _node(self, old: Node | None, new: Node | None) -> None:
        name = (new or old).name  # type: ignore[union-attr]
        if new is not None and new.is_ready:
            self._away.pop(name, None)
        else:
            self._away.setdefault(name, self._clock())
        if old is None or new is None or _offers(old) != _offers(new):
            self._fitting = self._room = None
            self.changed()


def job_of(worker: Pod) -> tuple[str, str]:
    """The ElasticJob that a worker belongs to, by namespace and name."""
    return worker.metadata.namespace, worker.metadata.labels.get(pods.JOB_LABEL, "")


def gpu_memory_mib(node: Node) -> int:
    text = node.labels.get(_MEMORY_LABEL, "")
    return min(int(text), quantities.MOST_COUNTED) if text.isdecimal() else 0


def _matters(pod: Pod) -> tuple[object, ...]:
    """What of a foreign pod has to do with room."""
    return (
        pod.spec.node_name, pod.is_terminal, pod.metadata.is_leaving, pod.status.nominated_node_name,
        pod.status.reason, pod.status.conditions if not pod.spec.node_name else (),
    )  # fmt: skip


def _offers(node: Node) -> tuple[object, ...]:
    return node.labels, node.spec, node.status.allocatable, node.is_ready
