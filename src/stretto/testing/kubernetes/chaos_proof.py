"""The proof at the end of a chaos run: nothing was lost, nothing was done twice, nothing is left."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from stretto.testing.kubernetes.chaos_jobs import ChaosJob
from stretto.testing.kubernetes.chaos_world import DEADLINE_S, LOOK_S, World

_WORKER = "stretto.dev/job"
_COUNTED = ("launches", "resizes", "restarts", "preemptions", "failures", "step")
_TRACEBACK = re.compile(r"^.*\n?Traceback \(most recent call last\):\n(?:[ \t].*\n)+.*", re.MULTILINE)
_OURS = f"{os.sep}stretto{os.sep}"


class Proof:
    """What is not as it must be is an `AssertionError`."""

    def __init__(self, world: World, jobs: Sequence[ChaosJob]) -> None:
        self._world, self._jobs = world, jobs

    async def check_jobs(self, expected: dict[int, list[float]]) -> dict[str, dict[str, int]]:
        """Every job has ended once and well, with its ledger and result; what its status counts.

        `expected`: the weights of undisturbed runs, by their epochs.
        """
        world = self._world
        for job in self._jobs:
            await _until(lambda job=job: self._has_ended(job), f"{job.name} ends")  # type: ignore[misc]
        await _until(self._no_pod_lives, "no pod of a job that has ended lives")
        objects = {item["metadata"]["name"]: item for item in (await world.ask("GET", world.objects))["items"]}
        counted = {}
        for job in self._jobs:
            assert job.name in objects, f"{job.name} is lost"
            found = objects[job.name]
            world.history.see(found)
            world.history.check(job.name)
            own = f"{world.namespace}-{job.name}-{found['metadata']['uid'][:8]}"
            world.place.check(job, expected.get(job.length, []), world.place.folder / "state" / own)
            status = found["status"]
            counted[job.name] = {what: status["accounts"].get(what, status.get(what, 0)) for what in _COUNTED}
        await self._check_owners({found["metadata"]["uid"] for found in objects.values()})
        return counted

    async def check_nothing_is_left(self) -> None:
        """Once the jobs are deleted."""
        await self._world.kubectl("delete", "elasticjobs", "--all", "--wait=false")
        await _until(self._nothing_is_left, "everything of ours is gone")
        await _until(self._no_process_is_left, "no process is left")

    def check_logs(self) -> int:
        """No traceback in a controller's log goes through our code; the number of others.

        Event loops complain of connections that were reset while nobody waited for them any more.
        """
        others = 0
        for name, text in self._world.controllers.logs().items():
            for found in _TRACEBACK.findall(text):
                assert _OURS not in found, f"{name} has a traceback:\n{found}"
                others += 1
        return others

    async def _has_ended(self, job: ChaosJob) -> bool:
        return self._world.history.ended(job.name)

    async def _no_pod_lives(self) -> bool:
        pods = await self._pods()
        return all(pod["status"].get("phase") in ("Succeeded", "Failed") for pod in pods) and not self._world.workers()

    async def _check_owners(self, jobs: set[str]) -> None:
        for pod in await self._pods():
            owners = {owner["uid"] for owner in pod["metadata"].get("ownerReferences", ())}
            assert owners & jobs, f"pod {pod['metadata']['name']} has no job"

    async def _nothing_is_left(self) -> bool:
        world = self._world
        secrets = f"/api/v1/namespaces/{world.namespace}/secrets?labelSelector=stretto.dev/secret"
        left = [*(await world.ask("GET", world.objects))["items"], *(await self._pods())]
        return not left and not (await world.ask("GET", secrets))["items"]

    async def _no_process_is_left(self) -> bool:
        return not self._world.nodes.alive()

    async def _pods(self) -> list[dict[str, Any]]:
        path = f"/api/v1/namespaces/{self._world.namespace}/pods?labelSelector={_WORKER}"
        found: list[dict[str, Any]] = (await self._world.ask("GET", path))["items"]
        return found


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end_s, f"after {DEADLINE_S:g} s still not: {what}"
        await asyncio.sleep(LOOK_S)
