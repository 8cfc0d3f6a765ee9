"""What the world does to jobs on a cluster: a seeded schedule of faults under a stream of real training jobs.

`play(seed, rounds, control_plane, manifests, folder)` runs the real controller, with the rights that its manifests give
it, on a real API server; nodes are played, their pods are real processes. In every round something is done to the
controller, the API server, the pods, the nodes or the jobs; what a node or a guest does not get over by itself is
mended some rounds later. Afterwards every job must have ended once and well, with an exact ledger and the result of an
undisturbed run; there may be no pod without its job, no process, nothing that is stuck in deletion, and no traceback
of ours in the controller's log. What is not so is an `AssertionError` that says which and how, with the latest that is
known.

The seed says which jobs come and what is done to whom; how far they are by then is the machine's affair.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto.backends.local.forkserver import ForkServer
from stretto.testing.kubernetes.chaos_jobs import EPOCHS, ChaosJob, Workplace, drawn
from stretto.testing.kubernetes.chaos_proof import Proof
from stretto.testing.kubernetes.chaos_world import GUEST, LOOK_S, World
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import install
from stretto.testing.kubernetes.fake_objects import FakeNode, FakePod
from stretto.testing.kubernetes.kept_controllers import Controllers, through
from stretto.testing.kubernetes.process_nodes import ProcessNodes
from stretto.testing.kubernetes.wire import Wire

_NODES, _CORES = 5, "2"


class Tally(msgspec.Struct):
    """What was done, and to whom."""

    faults: Counter[str] = msgspec.field(default_factory=Counter)
    missed: Counter[str] = msgspec.field(default_factory=Counter)
    """Faults for which there was nobody at that moment."""
    jobs: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """By name: resizes, restarts and the like."""
    controllers_ended: int = 0
    """So many controllers ended by themselves, because they could not keep their lease."""
    foreign_tracebacks: int = 0
    """In their logs, of libraries alone."""


async def play(
    seed: int,
    rounds: int,
    control_plane: ControlPlane,
    manifests: Path,
    folder: Path,
    *,
    namespace: str = "chaos",
    kinds: tuple[str, ...] = (),
    say: Callable[[str], None] = print,
) -> Tally:
    """Rounds of faults, and the proof that nothing was lost. `kinds`: only these."""
    folder.mkdir(parents=True, exist_ok=True)
    account = await asyncio.to_thread(install, control_plane, manifests)
    place = Workplace(folder / "work")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ForkServer(env=environment, preload=("torch", "stretto.torch")) as warm:
        await asyncio.to_thread(warm.wait_ready)
        expected = {epochs: await asyncio.to_thread(place.alone, epochs, warm) for epochs in EPOCHS}
        nodes = ProcessNodes(
            control_plane.kubeconfig, [FakeNode(name=f"{namespace}-{i}", cpu=_CORES) for i in range(_NODES)],
            folder / "pods", environment=environment, warm=warm,
        )  # fmt: skip
        async with (
            nodes,
            Wire(lambda: [control_plane.port]) as wire,
            Controllers(through(wire, account), folder) as controllers,
        ):
            world = World(control_plane, namespace, nodes, wire, controllers, place)
            try:
                tally = await _Chaos(world, seed, say).run(rounds, kinds, expected)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{await world.told()}") from None
    return tally


def schedule(seed: int, rounds: int, kinds: Sequence[str]) -> list[str]:
    """What is done in each round: every kind in its turn, the turns in another order each time."""
    chance = random.Random(seed)
    turns = [chance.sample(kinds, len(kinds)) for _ in range(-(-rounds // len(kinds)))]
    return [kind for turn in turns for kind in turn][:rounds]


class _Mending(msgspec.Struct):
    """What is put right from a round and a moment on."""

    round: int
    at_s: float
    what: str
    mend: Callable[[], Awaitable[None]]


class _Chaos:
    def __init__(self, world: World, seed: int, say: Callable[[str], None]) -> None:
        self._world, self._seed, self._say = world, seed, say
        self._chance = random.Random(seed)
        self._later: list[_Mending] = []
        self._round = 0
        self._counter = 0
        self._jobs: list[ChaosJob] = []
        self.tally = Tally()
        self._faults: dict[str, Callable[[], Coroutine[Any, Any, bool]]] = {
            "controller killed": self._kill_controller,
            "controller restarted": self._restart_controller,
            "controller killed twice": self._kill_controller_twice,
            "two controllers": self._two_controllers,
            "watches dropped": self._drop_watches,
            "API server silent": self._silence,
            "API server restarted": self._restart_api_server,
            "pod killed": self._kill_pods,
            "pod deleted": self._delete_pods,
            "pod removed by force": self._remove_pod,
            "node lost": self._lose_node,
            "node rebooted": self._reboot_node,
            "node replaced": self._replace_node,
            "node frozen": self._freeze_node,
            "node cut off": self._cut_off_node,
            "node drained": self._drain_node,
            "guests": self._guests,
            "scaled": self._scale,
            "suspended": self._suspend,
        }

    async def run(self, rounds: int, kinds: tuple[str, ...], expected: dict[int, list[float]]) -> Tally:
        world = self._world
        world.controllers.start()
        watching = asyncio.create_task(world.watch())
        submitting = asyncio.create_task(self._submit())
        try:
            for number, kind in enumerate(schedule(self._seed, rounds, kinds or tuple(self._faults)), 1):
                await self._one_round(number, kind, submitting)
            submitting.cancel()
            await asyncio.gather(submitting, return_exceptions=True)
            await self._mend(everything=True)
            proof = Proof(world, self._jobs)
            self.tally.jobs = await proof.check_jobs(expected)
            await proof.check_nothing_is_left()
            self.tally.foreign_tracebacks = proof.check_logs()
        finally:
            for task in (watching, submitting):
                task.cancel()
            await asyncio.gather(watching, submitting, return_exceptions=True)
            await world.close()
        self.tally.controllers_ended = world.controllers.ended
        return self.tally

    async def _one_round(self, number: int, kind: str, submitting: asyncio.Task[None]) -> None:
        self._round = number
        # Whoever is there to be struck must not change what the next rounds do.
        self._chance = random.Random(f"{self._seed} {self._round}")
        await self._mend()
        await asyncio.sleep(self._chance.uniform(0.5, 4.0))
        struck = await self._faults[kind]()
        (self.tally.faults if struck else self.tally.missed)[kind] += 1
        if submitting.done():
            submitting.result()
        ended = sum(self._world.history.ended(job.name) for job in self._jobs)
        running = len(self._world.workers())
        what = kind if struck else f"{kind}, but there was nobody"
        self._say(f"round {self._round}: {what}; {len(self._jobs)} jobs, {ended} ended, {running} workers")

    async def _mend(self, *, everything: bool = False) -> None:
        due = [entry for entry in self._later if everything or self._is_due(entry)]
        self._later = [entry for entry in self._later if entry not in due]
        for entry in due:
            await asyncio.sleep(entry.at_s - time.monotonic())
            self._say(f"  {entry.what}")
            await entry.mend()

    def _is_due(self, entry: _Mending) -> bool:
        return entry.round <= self._round and entry.at_s <= time.monotonic()

    def _mend_later(self, rounds: int, what: str, mend: Callable[[], Awaitable[None]], after_s: float = 0.0) -> None:
        self._later.append(_Mending(self._round + rounds, time.monotonic() + after_s, what, mend))

    async def _submit(self) -> None:
        """Two to four are alive at a time."""
        chance = random.Random(self._seed + 1)
        world = self._world
        while True:
            alive = chance.randint(2, 4)
            while sum(not world.history.ended(job.name) for job in self._jobs) >= alive:
                await asyncio.sleep(LOOK_S)
            job = drawn(chance, len(self._jobs))
            self._jobs.append(job)
            await world.ask("POST", world.objects, world.place.body(job, world.namespace))
            await asyncio.sleep(chance.uniform(0.2, 2.0))

    # The controller and the API server.

    async def _kill_controller(self) -> bool:
        self._world.controllers.kill()
        await asyncio.sleep(self._chance.uniform(0.0, 3.0))
        self._world.controllers.start()
        return True

    async def _kill_controller_twice(self) -> bool:
        """The second time while it starts, or adopts."""
        self._world.controllers.kill()
        self._world.controllers.start()
        await asyncio.sleep(self._chance.uniform(1.0, 8.0))
        return await self._kill_controller()

    async def _restart_controller(self) -> bool:
        await self._world.controllers.stop()
        self._world.controllers.start()
        return True

    async def _two_controllers(self) -> bool:
        if any(entry.what == "one controller again" for entry in self._later):
            return False
        controllers = self._world.controllers
        controllers.start(1)
        first_goes = self._chance.random() < 0.5

        async def one_again() -> None:
            controllers.kill(1 - first_goes)
            await asyncio.sleep(self._chance.uniform(0.0, 8.0))
            if first_goes:
                controllers.start(0)
                await controllers.stop(1)

        self._mend_later(self._chance.randint(1, 3), "one controller again", one_again)
        return True

    async def _drop_watches(self) -> bool:
        for _ in range(self._chance.randint(1, 4)):
            self._world.wire.drop()
            await asyncio.sleep(self._chance.uniform(0.0, 1.0))
        return True

    async def _silence(self) -> bool:
        self._world.wire.cut()
        await asyncio.sleep(self._chance.uniform(0.5, 8.0))
        if self._chance.random() < 0.5:
            self._world.wire.drop()
        self._world.wire.mend()
        return True

    async def _restart_api_server(self) -> bool:
        self._world.control_plane.stop_api_server()
        await asyncio.sleep(self._chance.uniform(0.0, 5.0))
        await asyncio.to_thread(self._world.control_plane.start_api_server)
        return True

    # Pods.

    def _some(self, most: int) -> list[FakePod]:
        workers = self._world.workers()
        return self._chance.sample(workers, min(len(workers), self._chance.randint(1, most)))

    async def _kill_pods(self) -> bool:
        killed = [self._world.nodes.kill(pod) for pod in self._some(3)]
        return any(killed)

    async def _delete_pods(self) -> bool:
        return await self._delete(self._some(3))

    async def _remove_pod(self) -> bool:
        return await self._delete(self._some(1), "--force", "--grace-period=0")

    async def _delete(self, pods: list[FakePod], *how: str) -> bool:
        if pods:
            names = [pod.name for pod in pods]
            await self._world.kubectl("delete", "pod", "--wait=false", "--ignore-not-found", *how, *names)
        return bool(pods)

    # Nodes.

    def _node(self) -> str | None:
        """One that may be hurt: two are always left."""
        healthy = self._world.healthy()
        return self._chance.choice(healthy) if len(healthy) > 2 else None

    async def _lose_node(self) -> bool:
        if (name := self._node()) is None:
            return False
        await self._world.nodes.fail(name)
        self._mend_later(self._chance.randint(1, 5), f"{name} is started again", lambda: self._recover(name))
        return True

    async def _reboot_node(self) -> bool:
        if (name := self._node()) is None:
            return False
        await self._world.nodes.reboot(name)
        return True

    async def _replace_node(self) -> bool:
        if (name := self._node()) is None:
            return False
        await self._world.nodes.remove(name)
        self._counter += 1
        fresh = FakeNode(name=f"{self._world.namespace}-new-{self._counter}", cpu=_CORES)
        self._mend_later(
            self._chance.randint(1, 3), f"{fresh.name} replaces {name}", lambda: self._world.nodes.add(fresh)
        )
        return True

    async def _freeze_node(self) -> bool:
        if (name := self._node()) is None:
            return False
        await self._world.nodes.cut_off(name)
        rounds = self._chance.randint(0, 2)
        if rounds:
            self._mend_later(rounds, f"{name} thaws", lambda: self._recover(name))
        else:
            await asyncio.sleep(self._chance.uniform(0.2, 7.0))
            await self._recover(name)
        return True

    async def _cut_off_node(self) -> bool:
        """For longer than the lease of its workers: others have taken their places when it comes back."""
        if (name := self._node()) is None:
            return False
        await self._world.nodes.cut_off(name)
        self._mend_later(0, f"{name} is back", lambda: self._recover(name), self._chance.uniform(70.0, 90.0))
        return True

    async def _recover(self, name: str) -> None:
        await self._world.nodes.recover(name)

    async def _drain_node(self) -> bool:
        if (name := self._node()) is None:
            return False
        how = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
        await self._world.kubectl("drain", name, *how)
        self._mend_later(self._chance.randint(1, 3), f"{name} is free again", lambda: self._uncordon(name))
        return True

    async def _uncordon(self, name: str) -> None:
        if name in self._world.nodes.nodes:
            await self._world.kubectl("uncordon", name)

    # Others, and the users.

    async def _guests(self) -> bool:
        """Pods of somebody else, for which room must be made."""
        self._counter += 1
        name = f"{GUEST}-{self._counter}"
        container = {"name": "c", "image": "none", "command": ["sleep", "3600"]}
        container |= {"resources": {"requests": {"cpu": "1"}}}  # type: ignore[dict-item]
        pod = {"containers": [container], "terminationGracePeriodSeconds": 1}
        spec = {
            "replicas": self._chance.randint(2, 5),
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        }
        body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}
        await self._world.kubectl("create", "-f", "-", text=json.dumps(body))
        self._mend_later(self._chance.randint(1, 4), f"{name} leaves", lambda: self._leave(name))
        return True

    async def _leave(self, name: str) -> None:
        await self._world.kubectl("delete", "deployment", name, "--wait=false")

    def _alive(self, *kinds: str) -> list[ChaosJob]:
        history = self._world.history
        return [
            job
            for job in self._jobs
            if job.kind in kinds and history.phases.get(job.name) and not history.ended(job.name)
        ]

    async def _scale(self) -> bool:
        jobs = self._alive("elastic", "restart")
        if not jobs:
            return False
        job = self._chance.choice(jobs)
        size = self._chance.randint(job.low, 4)
        await self._world.kubectl("scale", f"elasticjob/{job.name}", f"--replicas={size}")
        return True

    async def _suspend(self) -> bool:
        jobs = self._alive("elastic", "restart")
        if not jobs:
            return False
        name = self._chance.choice(jobs).name
        await self._set_suspended(name, True)
        self._mend_later(self._chance.randint(1, 2), f"{name} is resumed", lambda: self._set_suspended(name, False))
        return True

    async def _set_suspended(self, name: str, value: bool) -> None:
        patch = json.dumps({"spec": {"suspend": value}})
        await self._world.kubectl("patch", "elasticjob", name, "--type", "merge", "--patch", patch)
