"""Nodes that are only played: real Node objects, and an agent that answers for their kubelets.

The API server, the schedulers and the controllers are real and cannot tell the difference; no container runs. A pod
that is bound to one of these nodes is admitted or refused as a kubelet would, becomes Running with an address, ends
when it is told to, and goes when it is deleted. One agent plays a thousand nodes with ten thousand pods: it watches,
and never polls.

    async with FakeNodes(kubeconfig, [FakeNode(name=f"n{i}", gpus=8) for i in range(1000)]) as nodes:
        await nodes.fail("n17")

As a program of its own it plays equal nodes until it is told to end (SIGTERM), prints `ready` when they are there, and
removes them at the end:

    python -m stretto.testing.kubernetes.fake_nodes --kubeconfig FILE --nodes 1000 --cpu 64 --memory 256Gi --gpus 8

A pod with the annotation `fake.stretto.dev/run-s: "12"` ends by itself with code 0 after so long.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from stretto.testing.kubernetes.fake_objects import (
    EVENT,
    POD,
    POD_LIST,
    FakeNode,
    FakePod,
    SeenPod,
    containers,
    fake_pod,
    lease_object,
    node_object,
    now,
    now_precise,
    ready_condition,
    running,
    terminated,
)
from stretto.testing.kubernetes.kube_http import MERGE_PATCH, Access, ApiError, KubeHttp
from stretto.testing.kubernetes.quantities import amounts

_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_UNREACHABLE = "node.kubernetes.io/unreachable"
_BOUND_PODS = "/api/v1/pods?fieldSelector=spec.nodeName!%3D"
_RETRY_S = 0.5


class FakeNodes:
    """An async context manager: the nodes are there and ready inside, and gone afterwards.

    `on_start` and `on_stop` are told of pods that have become Running and that are to stop; `stop_s` is how long a pod
    takes to stop. `heartbeat_s` must be well below the controller manager's grace (`ControlPlane.node_grace_s`).
    """

    def __init__(
        self,
        kubeconfig: Path,
        nodes: Iterable[FakeNode],
        *,
        heartbeat_s: float = 10.0,
        stop_s: float = 0.0,
        on_start: Callable[[FakePod], None] | None = None,
        on_stop: Callable[[FakePod], None] | None = None,
        connections: int = 16,
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.pods: dict[str, FakePod] = {}
        """By uid."""
        self.failed: set[str] = set()
        self.heartbeat_s, self.stop_s = heartbeat_s, stop_s
        self._on_start, self._on_stop = on_start, on_stop
        self._http = KubeHttp(Access.of(kubeconfig), connections)
        self._capacity = {node.name: amounts(node.resources()) for node in self.nodes.values()}
        self._on: dict[str, dict[str, FakePod]] = {name: {} for name in self.nodes}
        self._addresses = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._endings: dict[str, asyncio.TimerHandle] = {}
        self._changed = asyncio.Condition()
        self._reporting: dict[str, asyncio.Lock] = {}
        self._error: BaseException | None = None

    async def __aenter__(self) -> FakeNodes:
        try:
            await asyncio.gather(*(self._create(node) for node in self.nodes.values()))
            self._spawn(self._watch())
            self._spawn(self._beat())
        except BaseException:
            await self._cancel()
            await self._http.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cancel()
        leaving = [*map(self._delete, self.pods.values()), *map(self._delete_node, self.nodes)]
        await asyncio.gather(*leaving, return_exceptions=True)
        await self._http.close()
        if self._error is not None and error is None:
            raise self._error

    async def _cancel(self) -> None:
        for timer in self._endings.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # What a test does to them.

    def pod(self, namespace: str, name: str) -> FakePod | None:
        return next((pod for pod in self.pods.values() if (pod.namespace, pod.name) == (namespace, name)), None)

    async def wait(self, condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
        """Until it holds; asked again whenever a pod has changed."""
        async with asyncio.timeout(deadline_s), self._changed:
            await self._changed.wait_for(lambda: self._error is not None or condition())
        if self._error is not None:
            raise self._error

    async def finish(self, pod: FakePod, code: int) -> None:
        """Its containers end with this code; they are started again if its restart policy says so."""
        if pod.state != "running":
            return
        ended = terminated(pod, code)
        if pod.restart_policy == "Always" or (pod.restart_policy == "OnFailure" and code):
            pod.restarts += 1
            await self._report(pod, running(pod, last=ended))
            return
        pod.state = "ended"
        phase = "Failed" if code else "Succeeded"
        await self._report(pod, {"phase": phase, **containers(pod, ended, ready=False)})

    async def fail(self, name: str) -> None:
        """It falls silent: its pods stay as they look, and nobody ends them.

        What the controller manager would write when its grace is over is written at once.
        """
        self.failed.add(name)
        taints = [*self.nodes[name].taints, *({"key": _UNREACHABLE, "effect": e} for e in ("NoSchedule", "NoExecute"))]
        await self._patch_node(name, {"spec": {"taints": taints}})
        await self._patch_node(name, {"status": {"conditions": [ready_condition("Unknown")]}}, "/status")

    async def recover(self, name: str) -> None:
        """It is back, with the pods that it had."""
        self.failed.discard(name)
        await self._renew(name)
        await self._patch_node(name, {"status": {"conditions": [ready_condition("True")]}}, "/status")
        await self._patch_node(name, {"spec": {"taints": list(self.nodes[name].taints)}})
        await self._relist()

    async def add(self, node: FakeNode) -> None:
        self.nodes[node.name] = node
        self._capacity[node.name] = amounts(node.resources())
        self._on[node.name] = {}
        await self._create(node)

    async def remove(self, name: str) -> None:
        """The machine is gone for good, and its Node object with it; its pods are left to the garbage collector."""
        del self.nodes[name], self._capacity[name]
        for uid in list(self._on.pop(name)):
            self._forget(uid)
        await self._delete_node(name)

    # Nodes.

    async def _create(self, node: FakeNode) -> None:
        await self._unless_gone(self._http.request("POST", _LEASES, lease_object(node)))
        await self._unless_gone(self._http.request("POST", "/api/v1/nodes", node_object(node)))
        # Admission has tainted it as not ready; the controller manager would take that away in its own time.
        await self._patch_node(node.name, {"spec": {"taints": list(node.taints)}})

    async def _delete_node(self, name: str) -> None:
        for path in (f"/api/v1/nodes/{name}", f"{_LEASES}/{name}"):
            await self._unless_gone(self._http.request("DELETE", path))

    async def _patch_node(self, name: str, patch: Mapping[str, Any], part: str = "") -> None:
        await self._http.request("PATCH", f"/api/v1/nodes/{name}{part}", patch, MERGE_PATCH)

    async def _beat(self) -> None:
        """Every node in its turn, spread over the interval."""
        while True:
            names = [name for name in self.nodes if name not in self.failed]
            for name in names:
                self._spawn(self._renew(name))
                await asyncio.sleep(self.heartbeat_s / len(names))
            if not names:
                await asyncio.sleep(self.heartbeat_s)

    async def _renew(self, name: str) -> None:
        patch = {"spec": {"renewTime": now_precise()}}
        with contextlib.suppress(OSError, ApiError):
            await self._http.request("PATCH", f"{_LEASES}/{name}", patch, MERGE_PATCH)

    # Pods.

    async def _watch(self) -> None:
        """List, watch from there, and begin again when the watch is over or too old."""
        while True:
            with contextlib.suppress(OSError, ApiError):
                version = await self._relist()
                path = f"{_BOUND_PODS}&watch=1&allowWatchBookmarks=true&resourceVersion={version}"
                async with self._http.lines(path) as lines:
                    async for line in lines:
                        event = EVENT.decode(line)
                        if event.type == "ERROR":
                            break
                        if event.type != "BOOKMARK":
                            self._see(POD.decode(event.object), gone=event.type == "DELETED")
                            await self._tell()
            await asyncio.sleep(_RETRY_S)

    async def _relist(self) -> str:
        listed = POD_LIST.decode(await self._http.request("GET", _BOUND_PODS))
        there = {pod.metadata.uid for pod in listed.items}
        for uid in [uid for uid in self.pods if uid not in there]:
            self._forget(uid)
        for pod in listed.items:
            self._see(pod, gone=False)
        await self._tell()
        return listed.metadata.resourceVersion

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _see(self, seen: SeenPod, *, gone: bool) -> None:
        """One step of the kubelet: whatever the pod needs next. Asked again with the same pod, it does nothing."""
        node = seen.spec.nodeName
        if node not in self.nodes:
            return
        if gone:
            self._forget(seen.metadata.uid)
            return
        pod = self.pods.get(seen.metadata.uid)
        if pod is None:
            pod = self.pods[seen.metadata.uid] = self._on[node][seen.metadata.uid] = fake_pod(seen)
            if pod.state == "running":
                self._end_later(pod)
        if node in self.failed:
            return
        if seen.metadata.deletionTimestamp is not None:
            if not pod.stopping:
                pod.stopping = True
                self._spawn(self._stop(pod))
        elif pod.state == "new":
            self._admit(pod)

    def _admit(self, pod: FakePod) -> None:
        capacity = self._capacity[pod.node]
        others = [other for other in self._on[pod.node].values() if other.state == "running"]
        for resource, requested in pod.requests.items():
            used = sum(other.requests.get(resource, 0) for other in others)
            if requested and used + requested > capacity.get(resource, 0):
                pod.state = "ended"
                what = f"requested: {requested}, used: {used}, capacity: {capacity.get(resource, 0)}"
                message = f"Pod Node didn't have enough resource: {resource}, {what}"
                refused = {"phase": "Failed", "reason": f"OutOf{resource}", "message": message, "startTime": now()}
                self._spawn(self._report(pod, refused))
                return
        pod.state, pod.started = "running", now()
        self._addresses += 1
        pod.address = self._address(self._addresses)
        self._spawn(self._start(pod))

    def _address(self, number: int) -> str:
        """Of the pod that is started as the so-manieth."""
        return f"10.{128 + (number >> 16) % 96}.{number >> 8 & 255}.{number & 255}"

    async def _start(self, pod: FakePod) -> None:
        await self._report(pod, running(pod))
        if self._on_start is not None:
            self._on_start(pod)
        self._end_later(pod)

    def _end_later(self, pod: FakePod) -> None:
        if pod.run_s is not None:
            later = asyncio.get_running_loop().call_later
            self._endings[pod.uid] = later(pod.run_s, lambda: self._spawn(self.finish(pod, 0)))

    async def _stop(self, pod: FakePod) -> None:
        if pod.state == "running":
            if self._on_stop is not None:
                self._on_stop(pod)
            await asyncio.sleep(self.stop_s)
        if pod.node in self.failed:
            pod.stopping = False
        else:
            await self._persist(self._delete, pod)

    async def _delete(self, pod: FakePod) -> None:
        at_once = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod.uid}}
        await self._unless_gone(self._http.request("DELETE", _path(pod), at_once))

    async def _report(self, pod: FakePod, status: Mapping[str, Any]) -> None:
        """Only to this very pod, not to a later one of the same name; one report after the other."""
        patch = {"metadata": {"uid": pod.uid}, "status": status}

        async def write(pod: FakePod) -> None:
            await self._unless_gone(self._http.request("PATCH", f"{_path(pod)}/status", patch, MERGE_PATCH))

        async with self._reporting.setdefault(pod.uid, asyncio.Lock()):
            await self._persist(write, pod)
        await self._tell()

    async def _persist(self, write: Callable[[FakePod], Coroutine[Any, Any, None]], pod: FakePod) -> None:
        """As kubelets do: again, for as long as the API server is away."""
        while True:
            try:
                return await write(pod)
            except ApiError as error:
                if error.status < 500 and error.status != 429:
                    raise
            except OSError:
                pass
            await asyncio.sleep(_RETRY_S)

    async def _unless_gone(self, request: Coroutine[Any, Any, bytes]) -> None:
        try:
            await request
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _forget(self, uid: str) -> None:
        if (pod := self.pods.pop(uid, None)) is not None:
            self._on.get(pod.node, {}).pop(uid, None)
        self._reporting.pop(uid, None)
        if (timer := self._endings.pop(uid, None)) is not None:
            timer.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """None of them may fail; the first that does is shown to whoever waits, or at the end."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = error


def _path(pod: FakePod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def main() -> None:
    parser = argparse.ArgumentParser(description="play the kubelets of equal nodes")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--prefix", default="n")
    parser.add_argument("--cpu", default="64")
    parser.add_argument("--memory", default="256Gi")
    parser.add_argument("--pods", default="250")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--heartbeat-s", type=float, default=10.0)
    parser.add_argument("--stop-s", type=float, default=0.0)
    asyncio.run(_play(parser.parse_args()))


async def _play(options: argparse.Namespace) -> None:
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, over.set)
    nodes = [
        FakeNode(
            name=f"{options.prefix}{number}", cpu=options.cpu, memory=options.memory, pods=options.pods,
            gpus=options.gpus,
        )
        for number in range(options.nodes)
    ]  # fmt: skip
    async with FakeNodes(options.kubeconfig, nodes, heartbeat_s=options.heartbeat_s, stop_s=options.stop_s):
        print("ready", flush=True)
        await over.wait()


if __name__ == "__main__":
    main()
