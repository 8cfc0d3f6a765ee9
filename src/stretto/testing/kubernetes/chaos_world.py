"""The world of a chaos run: the cluster, its nodes and controllers, and how to look at all of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import msgspec

from stretto.errors import StrettoError
from stretto.testing.kubernetes.chaos_jobs import History, Workplace
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.fake_objects import FakePod
from stretto.testing.kubernetes.kept_controllers import Controllers
from stretto.testing.kubernetes.kube_http import Access, ApiError, KubeHttp
from stretto.testing.kubernetes.process_nodes import ProcessNodes
from stretto.testing.kubernetes.wire import Wire

DEADLINE_S = 300.0
GUEST = "guest"
"""How the names of other people's pods begin."""
LOOK_S = 0.1
_TAIL = 40


class World:
    """Everything that there is, and how to look at it."""

    def __init__(
        self, control_plane: ControlPlane, namespace: str, nodes: ProcessNodes, wire: Wire, controllers: Controllers,
        place: Workplace,
    ) -> None:  # fmt: skip
        self.control_plane, self.namespace, self.nodes = control_plane, namespace, nodes
        self.wire, self.controllers, self.place = wire, controllers, place
        self.history = History()
        self._http = KubeHttp(Access.of(control_plane.kubeconfig))
        self.objects = f"/apis/stretto.dev/v1alpha1/namespaces/{namespace}/elasticjobs"

    async def close(self) -> None:
        await self._http.close()

    async def kubectl(self, *words: str, text: str | None = None) -> str:
        return await asyncio.to_thread(self.control_plane.kubectl, *words, "--namespace", self.namespace, text=text)

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Again, for as long as the API server is away."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            try:
                return msgspec.json.decode(await self._http.request(method, path, body))
            except ApiError as error:
                if error.status == 409 and method == "POST":
                    return None  # An answer was lost.
                if error.status < 500 and error.status != 429:
                    raise
            except OSError:
                pass
            assert time.monotonic() < end_s, f"{method} {path}: the API server is away for good"
            await asyncio.sleep(LOOK_S)

    async def watch(self) -> None:
        """Every version of every job, for the history."""
        version = ""
        while True:
            with contextlib.suppress(OSError, ApiError):
                if not version:
                    listed = await self.ask("GET", self.objects)
                    for job in listed["items"]:
                        self.history.see(job)
                    version = listed["metadata"]["resourceVersion"]
                async with self._http.lines(f"{self.objects}?watch=1&resourceVersion={version}") as lines:
                    async for line in lines:
                        event = msgspec.json.decode(line)
                        if event["type"] == "ERROR":
                            version = ""
                            break
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "DELETED":
                            self.history.see(event["object"])
            await asyncio.sleep(LOOK_S)

    def workers(self) -> list[FakePod]:
        """Whose process runs, on nodes that are there."""
        found = [
            pod
            for pod in self.nodes.pods.values()
            if pod.namespace == self.namespace
            and not pod.name.startswith(GUEST)
            and pod.node not in self.nodes.failed
            and self.nodes.process(pod) is not None
        ]
        return sorted(found, key=lambda pod: pod.name)

    def healthy(self) -> list[str]:
        return sorted(name for name in self.nodes.nodes if name not in self.nodes.failed)

    async def told(self) -> str:
        """What is known at this moment, for whoever has to find out."""
        parts = []
        with contextlib.suppress(StrettoError):
            parts.append(await self.kubectl("get", "elasticjobs,pods,nodes", "--output", "wide"))
            for name, status in self.history.latest.items():
                if status.get("phase") != "Succeeded":
                    parts.append(f"-- {name}: {json.dumps(status)[:3000]}")
        for name, text in self.controllers.logs().items():
            parts.append("\n".join([f"-- the end of {name}:", *text.splitlines()[-_TAIL:]]))
        parts.append(f"logs of pods: {self.nodes.folder}")
        return "\n".join(parts)
