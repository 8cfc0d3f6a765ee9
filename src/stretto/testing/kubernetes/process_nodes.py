"""Played nodes whose pods are real processes of this machine.

What `FakeNodes` only claims is done here: the command of a pod's container is started with the pod's variables and an
address of its own on the loopback, its exit code is the container's, and a pod that is deleted is asked to end
(SIGTERM), killed when its grace is over, and goes when its process has. There are no images, volumes or limits: a
command finds this machine's files.

    async with ProcessNodes(kubeconfig, [FakeNode(name="n0", cpu="4")], folder) as nodes:
        await nodes.fail("n0")  # power loss: everything on it is killed, and nobody says so
        await nodes.recover("n0")  # it has been started again, and knows nothing of what it ran
        await nodes.cut_off("n0")  # nothing moves and nobody hears of it; until it recovers, with all that it had

No process outlives the agent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import Process, launch
from stretto.errors import UsageError
from stretto.testing.kubernetes.fake_nodes import FakeNodes
from stretto.testing.kubernetes.fake_objects import (
    FakeNode,
    FakePod,
    SeenPod,
    containers,
    now,
    ready_condition,
    running,
)
from stretto.testing.kubernetes.kube_http import ApiError

FORCED_S = 2
"""The grace of a process whose pod object is gone."""
_SIGNALLED = 128
_REBOOTED = {"exitCode": 255, "reason": "Unknown"}
"""What a node says of containers that ran when it went down."""
_CANNOT_START = {"exitCode": 128, "reason": "StartError"}


class _Run(msgspec.Struct):
    """The process of a pod."""

    process: Process
    node: str
    changed: asyncio.Event
    """Something that whoever waits for its end should know: it is that, or has less time."""
    code: int | None = None
    """As a container's: 128 and the signal, if one ended it."""
    kill_s: float | None = None
    """When it is killed, on the event loop's clock."""


class ProcessNodes(FakeNodes):
    """Logs are in `folder`, a file for each pod. `warm`: Python programs are forks of it, where they can be."""

    def __init__(
        self,
        kubeconfig: Path,
        nodes: Iterable[FakeNode],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        warm: ForkServer | None = None,
        heartbeat_s: float = 10.0,
    ) -> None:
        super().__init__(kubeconfig, nodes, heartbeat_s=heartbeat_s)
        self.folder, self._warm = folder, warm
        folder.mkdir(parents=True, exist_ok=True)
        given = os.environ if environment is None else environment
        self._environment = {name: value for name, value in given.items() if not name.startswith("STRETTO_")}
        self._runs: dict[str, _Run] = {}
        """By the uid of their pods."""
        self._rebooted: set[str] = set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
        finally:
            for run in self._runs.values():
                self._release(run)
                run.process.close()
            self._runs.clear()

    # What a test does to them.

    def process(self, pod: FakePod) -> int | None:
        """The process id of a pod, while it runs."""
        run = self._runs.get(pod.uid)
        return run.process.pid if run is not None and run.code is None else None

    def alive(self) -> list[int]:
        """The ids of all processes."""
        return [run.process.pid for run in self._runs.values() if run.code is None]

    def log(self, pod: FakePod) -> Path:
        return self.folder / f"{pod.namespace}.{pod.name}.log"

    def kill(self, pod: FakePod) -> bool:
        """By SIGKILL, as the kernel does it when memory is short; False if it does not run."""
        if self.process(pod) is None or pod.node in self.failed:
            return False
        self._runs[pod.uid].process.kill()
        return True

    async def fail(self, name: str) -> None:
        """Power loss: its processes are gone in the same instant, and nobody tells of it."""
        self.failed.add(name)
        self._rebooted.add(name)
        await self._kill_all(name)
        await super().fail(name)

    async def cut_off(self, name: str) -> None:
        """Its processes stand still, and nothing is heard of it or told to it."""
        self.failed.add(name)
        for run in self._on_node(name):
            run.process.signal(signal.SIGSTOP)
            run.changed.set()
        await super().fail(name)

    async def reboot(self, name: str) -> None:
        """So fast that nobody misses it: it is only known from what has become of its pods."""
        self.failed.add(name)
        await self._kill_all(name)
        await self._tell_of_reboot(name)
        self.failed.discard(name)
        await self._relist()

    async def recover(self, name: str) -> None:
        if name in self._rebooted:
            await self._tell_of_reboot(name)
            self._rebooted.discard(name)
        for run in self._on_node(name):
            run.process.signal(signal.SIGCONT)
        await super().recover(name)
        for uid, run in list(self._runs.items()):
            if run.node == name and run.code is None and uid not in self.pods:
                self._spawn(self._end(run, FORCED_S))

    async def remove(self, name: str) -> None:
        self.failed.add(name)
        await self._kill_all(name)
        await super().remove(name)
        self.failed.discard(name)
        self._rebooted.discard(name)

    async def _kill_all(self, name: str) -> None:
        for run in self._on_node(name):
            run.process.kill()
        for run in list(self._on_node(name)):
            while run.code is None:
                run.changed.clear()
                await run.changed.wait()

    def _on_node(self, name: str) -> Iterator[_Run]:
        return (run for run in self._runs.values() if run.node == name and run.code is None)

    async def _tell_of_reboot(self, name: str) -> None:
        for uid, pod in list(self._on[name].items()):
            if pod.state == "running" and uid in self._runs:
                pod.state = "ended"
                await self._report(pod, _failed(pod, _REBOOTED))
            elif pod.state == "running":
                pod.state = "new"  # It was bound, and had not been started.

    async def _renew(self, name: str) -> None:
        """Also what a kubelet does: whoever took its node for lost is put right."""
        await super()._renew(name)
        with contextlib.suppress(OSError, ApiError):
            node = msgspec.json.decode(await self._http.request("GET", f"/api/v1/nodes/{name}"))
            told = {condition["type"]: condition["status"] for condition in node["status"]["conditions"]}
            if told["Ready"] != "True" and name not in self.failed:
                await self._patch_node(name, {"status": {"conditions": [ready_condition("True")]}}, "/status")

    # What becomes of pods.

    def _address(self, number: int) -> str:
        return f"127.{64 + (number >> 16) % 64}.{number >> 8 & 255}.{number & 255}"

    async def _start(self, pod: FakePod) -> None:
        try:
            container = (await self._described(pod))["spec"]["containers"][0]
            variables = await self._variables(pod, container)
            if self._may_start(pod):
                self._launch(pod, container, variables)
                await self._report(pod, running(pod))
        except UsageError as error:
            pod.state = "ended"
            await self._report(pod, _failed(pod, {**_CANNOT_START, "message": error.message}))
        except ApiError as error:
            # It, or the secret of its job, is gone meanwhile.
            if error.status != 404:
                raise

    def _may_start(self, pod: FakePod) -> bool:
        if pod.node in self.failed:
            pod.state = "new"
            return False
        return pod.uid in self.pods and not pod.stopping

    def _launch(self, pod: FakePod, container: Mapping[str, Any], variables: Mapping[str, str]) -> None:
        command = [*container.get("command", ()), *container.get("args", ())]
        cwd = container.get("workingDir") or self.folder
        env = {**self._environment, **variables}
        process = launch(command, env=env, cwd=cwd, log=self.log(pod), warm=self._warm)
        run = self._runs[pod.uid] = _Run(process, pod.node, asyncio.Event())
        asyncio.get_running_loop().add_reader(process.fileno(), self._process_ended, pod, run)

    def _process_ended(self, pod: FakePod, run: _Run) -> None:
        self._release(run)
        status = run.process.wait()
        run.code = status if status >= 0 else _SIGNALLED - status
        run.changed.set()
        if pod.node not in self.failed and not pod.stopping:
            self._spawn(self.finish(pod, run.code))

    def _release(self, run: _Run) -> None:
        if run.process.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(run.process.fileno())

    def _see(self, seen: SeenPod, *, gone: bool) -> None:
        """Whoever deletes a pod once more gives it less time."""
        run, grace_s = self._runs.get(seen.metadata.uid), seen.metadata.deletionGracePeriodSeconds
        if run is not None and grace_s is not None and run.node not in self.failed:
            self._hurry(run, grace_s)
        super()._see(seen, gone=gone)

    def _hurry(self, run: _Run, grace_s: float) -> None:
        due_s = asyncio.get_running_loop().time() + grace_s
        if run.kill_s is None or due_s < run.kill_s:
            run.kill_s = due_s
            run.changed.set()

    async def _stop(self, pod: FakePod) -> None:
        run = self._runs.get(pod.uid)
        if run is not None:
            await self._end(run, FORCED_S)
        if pod.node in self.failed:
            pod.stopping = False
            return
        if run is not None and run.code is not None:
            await self.finish(pod, run.code)
        await self._persist(self._delete, pod)

    async def _end(self, run: _Run, otherwise_s: float) -> None:
        """Ask it to end, and see to it. A node that fails meanwhile does not come to that."""
        if run.kill_s is None:
            self._hurry(run, otherwise_s)
        run.process.terminate()
        while run.code is None and run.node not in self.failed:
            run.changed.clear()
            assert run.kill_s is not None
            left_s = run.kill_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                run.process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await run.changed.wait()

    def _forget(self, uid: str) -> None:
        super()._forget(uid)
        run = self._runs.get(uid)
        if run is None or run.node in self.failed:
            return
        if run.code is None:
            self._spawn(self._end(run, FORCED_S))
        else:
            del self._runs[uid]

    # What the API server says of them.

    async def _described(self, pod: FakePod) -> dict[str, Any]:
        return await self._read(f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", pod)

    async def _variables(self, pod: FakePod, container: Mapping[str, Any]) -> dict[str, str]:
        return {entry["name"]: await self._value(pod, entry) for entry in container.get("env", ())}

    async def _value(self, pod: FakePod, entry: Mapping[str, Any]) -> str:
        match entry.get("valueFrom"):
            case None:
                return str(entry.get("value", ""))
            case {"fieldRef": {"fieldPath": "status.podIP"}}:
                return pod.address
            case {"secretKeyRef": {"name": name, "key": key}}:
                found = await self._read(f"/api/v1/namespaces/{pod.namespace}/secrets/{name}", pod)
                return base64.b64decode(found["data"][key]).decode()
            case other:
                raise UsageError(f"{entry['name']} comes from where played nodes do not look: {other}")

    async def _read(self, path: str, pod: FakePod) -> dict[str, Any]:
        answers: list[bytes] = []

        async def read(pod: FakePod) -> None:
            answers.append(await self._http.request("GET", path))

        await self._persist(read, pod)
        found: dict[str, Any] = msgspec.json.decode(answers[-1])
        return found


def _failed(pod: FakePod, how: Mapping[str, Any]) -> dict[str, Any]:
    ended = {"terminated": {**how, "startedAt": pod.started, "finishedAt": now()}}
    return {"phase": "Failed", **containers(pod, ended, ready=False)}
