"""Faults of every kind under real training on a cluster: nothing is lost, and the proof would notice if it were.

`benchmarks/kubernetes_chaos.py` is the long version. The nodes whose pods are processes are tested here as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from controllers import BASE

from stretto.runtime.ledger import SUFFIX, Ledger, ledger_files
from stretto.runtime.order import Loop, Order
from stretto.testing.kubernetes.chaos import play
from stretto.testing.kubernetes.chaos_jobs import BATCH, SAMPLES, SEED, ChaosJob, History, Workplace, group_value
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.fake_objects import FakeNode, FakePod
from stretto.testing.kubernetes.process_nodes import ProcessNodes
from stretto.testing.kubernetes.wire import Wire

DEADLINE_S = 60.0


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An asynchronous test, in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@pytest.mark.cluster
def test_nothing_is_lost(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    told: list[str] = []
    tally = asyncio.run(play(5, 5, control_plane, BASE, tmp_path, namespace=namespace, say=told.append))
    assert tally.jobs, told
    assert tally.faults.total() + tally.missed.total() == 5


# The proof itself.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, list[float]]:
    place = Workplace(tmp_path_factory.mktemp("work"))
    return place, place.alone(2)


def job(name: str, kind: Any = "elastic", length: int = 2) -> ChaosJob:
    return ChaosJob(name=name, kind=kind, low=1, high=1, length=length, priority=50)


def copied(place: Workplace, name: str) -> Path:
    """A job with the result of the undisturbed one and a ledger that is right; its folder."""
    own = place.folder / "state" / name
    (own / "ledger").mkdir(parents=True)
    order = Order(Loop(samples=SAMPLES, size=BATCH, epochs=2, seed=SEED))
    with Ledger(own / "ledger" / f"w0{SUFFIX}", "w0") as ledger:
        for step in range(order.loop.total_steps):
            ledger.fed(0, step, 1, order.indices(step))
            ledger.applied(0, step, 1)
    place.result(name).write_bytes((place.folder / "alone-2" / "result").read_bytes())
    return own


def test_what_is_right_passes(trained: tuple[Workplace, list[float]]) -> None:
    place, weights = trained
    place.check(job("right"), weights, copied(place, "right"))


@pytest.mark.parametrize(("times", "why"), [(0, "missing"), (2, "doubled")])
def test_a_lost_or_doubled_sample_is_noticed(trained: tuple[Workplace, list[float]], times: int, why: str) -> None:
    place, weights = trained
    own = copied(place, why)
    (ledger,) = ledger_files(own / "ledger")
    lines = ledger.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if line.startswith("fed 0 3 "))
    ledger.write_text("".join([*lines[:at], *[lines[at]] * times, *lines[at + 1 :]]))
    with pytest.raises(AssertionError, match=f"{why}: loop 0 step 3"):
        place.check(job(why), weights, own)


def test_other_weights_and_a_missing_result_are_noticed(trained: tuple[Workplace, list[float]]) -> None:
    place, weights = trained
    own = copied(place, "other")
    with pytest.raises(AssertionError, match="the weights differ"):
        place.check(job("other"), [weights[0] + 1e-6, *weights[1:]], own)
    place.result("other").unlink()
    with pytest.raises(AssertionError, match="has no result"):
        place.check(job("other"), weights, own)


def test_a_group_that_left_out_a_step_is_noticed(tmp_path: Path) -> None:
    place = Workplace(tmp_path)
    place.result("g").write_text(json.dumps({"value": group_value(10), "steps": 10}))
    place.check(job("g", "rigid", 10), [], None)
    place.result("g").write_text(json.dumps({"value": group_value(9), "steps": 10}))
    with pytest.raises(AssertionError, match="g: "):
        place.check(job("g", "rigid", 10), [], None)


def history(*statuses: tuple[str, str]) -> History:
    told = History()
    for phase, completed in statuses:
        status = {"phase": phase} | ({"completionTime": completed} if completed else {})
        told.see({"metadata": {"name": "a"}, "status": status})
    return told


def test_one_good_end_passes() -> None:
    told = history(("Pending", ""), ("Running", ""), ("Pending", ""), ("Running", ""), ("Succeeded", "1"))
    told.see({"metadata": {"name": "a"}, "status": {"phase": "Succeeded", "completionTime": "1"}})
    told.check("a")


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ([("Running", "")], "has not ended"),
        ([("Running", ""), ("Succeeded", "1"), ("Running", ""), ("Succeeded", "1")], "has ended 2 times"),
        ([("Running", ""), ("Succeeded", "1"), ("Running", "")], "has gone on after its end"),
        ([("Running", ""), ("Succeeded", "1"), ("Succeeded", "2")], "has ended at"),
        ([("Running", ""), ("Failed", "1")], "has not ended well"),
    ],
)
def test_a_job_that_ends_twice_or_badly_is_noticed(statuses: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        history(*statuses).check("a")


# A wire that can be pulled.


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@runs
async def test_a_wire_carries_until_it_is_pulled() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        await closed(writer)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Wire(lambda: [port]) as wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        wire.cut()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.read(1)
        wire.mend()
        assert await reader.readexactly(3) == b"two"
        wire.drop()
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(DEADLINE_S):
                await reader.readexactly(1)
        await closed(writer)


@runs
async def test_a_wire_goes_to_whoever_answers_and_passes_on_the_last_words() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x" * 100_000)
        await closed(writer)

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, Wire(lambda: [1, port]) as wire:
        for _ in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", wire.port)
            async with asyncio.timeout(DEADLINE_S):
                assert len(await reader.read()) == 100_000
            await closed(writer)


# Nodes whose pods are processes.


class Bench:
    """Pods on such nodes, each a shell script."""

    def __init__(self, control_plane: ControlPlane, namespace: str, nodes: ProcessNodes, folder: Path) -> None:
        self.control_plane, self.namespace, self.nodes, self.folder = control_plane, namespace, nodes, folder

    async def run(self, name: str, script: str, **spec: Any) -> FakePod:
        own = {"fieldRef": {"fieldPath": "status.podIP"}}
        env = [{"name": "FOLDER", "value": str(self.folder)}, {"name": "ADDRESS", "valueFrom": own}]
        container = {"name": "c", "image": "none", "command": ["sh", "-c", script], "env": env}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], "restartPolicy": "Never", "nodeName": "real", **spec},
        }
        await self.kubectl("create", "-f", "-", text=json.dumps(body))
        await self.nodes.wait(lambda: self._started(name))
        pod = self.nodes.pod(self.namespace, name)
        assert pod is not None
        return pod

    def _started(self, name: str) -> bool:
        pod = self.nodes.pod(self.namespace, name)
        return pod is not None and (pod.state == "ended" or self.nodes.process(pod) is not None)

    async def kubectl(self, *words: str, text: str | None = None) -> str:
        return await asyncio.to_thread(self.control_plane.kubectl, *words, "--namespace", self.namespace, text=text)

    async def ended(self, name: str) -> dict[str, Any]:
        """How its container has, as everybody can read it."""
        found: dict[str, Any] = {}

        async def look() -> bool:
            status = json.loads(await self.kubectl("get", "pod", name, "--output", "json"))["status"]
            found.update(status["containerStatuses"][0]["state"] if "containerStatuses" in status else {})
            return "terminated" in found

        await until(look)
        return dict(found["terminated"])

    async def gone(self, name: str) -> None:
        async def look() -> bool:
            return not await self.kubectl("get", "pod", name, "--ignore-not-found")

        await until(look)

    async def wrote(self, name: str) -> str:
        path = self.folder / name

        async def look() -> bool:
            return path.exists() and path.read_text().endswith("\n")

        await until(look)
        return path.read_text().strip()


async def until(look: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await look():
            await asyncio.sleep(0.05)


@asynccontextmanager
async def bench(control_plane: ControlPlane, namespace: str, folder: Path) -> AsyncIterator[Bench]:
    nodes = ProcessNodes(control_plane.kubeconfig, [FakeNode(name="real", cpu="4")], folder / "pods")
    async with nodes:
        yield Bench(control_plane, namespace, nodes, folder)
        left = nodes.alive()
    assert not [pid for pid in left if os.path.exists(f"/proc/{pid}")], "no process outlives its agent"


@pytest.mark.cluster
@runs
async def test_a_pod_is_a_process(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    async with bench(control_plane, namespace, tmp_path) as on:
        pod = await on.run("a", 'echo "$ADDRESS" > "$FOLDER/address"; exit 3')
        assert await on.wrote("address") == pod.address
        assert pod.address.startswith("127.")
        assert (await on.ended("a"))["exitCode"] == 3
        assert on.nodes.process(pod) is None
        killed = await on.run("b", "exec sleep 3600")
        assert on.nodes.kill(killed)
        assert (await on.ended("b"))["exitCode"] == 137
        await on.run("none", "", containers=[{"name": "c", "image": "none", "command": ["/no/such/program"]}])
        assert (await on.ended("none"))["reason"] == "StartError"


@pytest.mark.cluster
@runs
async def test_a_deleted_pod_is_asked_then_killed(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> None:
    async with bench(control_plane, namespace, tmp_path) as on:
        polite = 'trap "echo bye > $FOLDER/bye; exit 0" TERM; echo up > $FOLDER/polite; while :; do sleep 0.05; done'
        await on.run("polite", polite)
        await on.wrote("polite")
        await on.kubectl("delete", "pod", "polite", "--wait=false")
        assert await on.wrote("bye") == "bye"
        await on.gone("polite")
        deaf = await on.run("deaf", 'trap "" TERM; echo up > $FOLDER/deaf; while :; do sleep 0.05; done')
        await on.wrote("deaf")
        pid = on.nodes.process(deaf)
        await on.kubectl("delete", "pod", "deaf", "--wait=false", "--grace-period=3600")
        await on.kubectl("delete", "pod", "deaf", "--wait=false", "--grace-period=1")
        await on.gone("deaf")
        assert pid is not None
        assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.cluster
@runs
async def test_power_loss_says_nothing_until_the_node_is_back(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with bench(control_plane, namespace, tmp_path) as on:
        pod = await on.run("a", "exec sleep 3600")
        pid = on.nodes.process(pod)
        await on.nodes.fail("real")
        assert not os.path.exists(f"/proc/{pid}")
        state = json.loads(await on.kubectl("get", "pod", "a", "--output", "json"))["status"]
        assert state["phase"] == "Running"
        await on.nodes.recover("real")
        told = await on.ended("a")
        assert (told["exitCode"], told["reason"]) == (255, "Unknown")


@pytest.mark.cluster
@runs
async def test_a_node_that_is_cut_off_comes_back_with_what_it_had(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    async with bench(control_plane, namespace, tmp_path) as on:
        stays = await on.run("stays", "exec sleep 3600")
        await on.run("leaves", "exec sleep 3600")
        orphan = await on.run("orphan", "exec sleep 3600")
        pid = on.nodes.process(orphan)
        await on.nodes.cut_off("real")
        assert _state(on.nodes.process(stays)) == "T"
        await on.kubectl("delete", "pod", "leaves", "--wait=false")
        await on.kubectl("delete", "pod", "orphan", "--force", "--grace-period=0")
        assert os.path.exists(f"/proc/{pid}"), "nobody there has been told"
        await on.nodes.recover("real")
        await on.gone("leaves")
        await until(lambda: _is_gone(pid))
        assert _state(on.nodes.process(stays)) in ("S", "R")


async def _is_gone(pid: int | None) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def _state(pid: int | None) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
