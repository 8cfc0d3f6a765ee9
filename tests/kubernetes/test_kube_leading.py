"""Leader election: never two at once, whatever the clocks say and whoever stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from scripted_api import Asked, Reply, ScriptedApi, refusal

from stretto.errors import UsageError
from stretto.kubernetes import access, client
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import LEASES
from stretto.kubernetes.leading import Leading
from stretto.testing.kubernetes.control_plane import ControlPlane

PATIENCE_S = 60.0
QUICK = {"duration_s": 2.0, "renew_deadline_s": 1.8, "retry_s": 0.05}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)


class Leases:
    """One lease, with conditional writes; it can be out of reach for everybody or for some."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.version = 0
        self.is_away = False
        self.loses_answers = False
        self.holders: list[str] = []
        """Everyone who got it, in turn."""

    async def script(self, asked: Asked, reply: Reply) -> None:
        if self.is_away:
            reply.cut()
        elif asked.method == "POST" and self.lease is not None:
            reply.json(refusal(409, "AlreadyExists"), 409)
        elif asked.method == "POST":
            self.write(json.loads(asked.body))
            reply.json(self.lease, 201)
        elif self.lease is None:
            reply.json(refusal(404, "NotFound"), 404)
        elif asked.method == "GET":
            reply.json(self.lease)
        else:
            self.patch(json.loads(asked.body), reply)

    def patch(self, body: dict[str, Any], reply: Reply) -> None:
        assert self.lease is not None
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            reply.json(refusal(409, "Conflict", "the object has been modified"), 409)
            return
        self.write({**self.lease, "spec": {**self.lease["spec"], **body["spec"]}})
        if "acquireTime" in body["spec"]:
            self.holders.append(body["spec"]["holderIdentity"])
        if self.loses_answers:
            reply.cut()
        else:
            reply.json(self.lease)

    def write(self, lease: dict[str, Any]) -> None:
        self.version += 1
        self.lease = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(self.version)}}

    @property
    def spec(self) -> dict[str, Any]:
        assert self.lease is not None
        return dict(self.lease["spec"])


@asynccontextmanager
async def candidate(where: access.Access, name: str, **options: Any) -> AsyncIterator[Leading]:
    """On a connection of its own, as another process would be."""
    async with Api(where) as api:
        leading = Leading(api, name, namespace="x", **{**QUICK, **options})
        try:
            yield leading
        finally:
            await leading.close()


def play(story: Callable[[Leases, access.Access], Awaitable[None]]) -> None:
    async def run() -> None:
        leases = Leases()
        async with asyncio.timeout(PATIENCE_S), ScriptedApi(leases.script).serving() as where:
            await story(leases, where)

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_the_first_one_leads_and_keeps_the_lease() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a") as a, candidate(where, "b") as b:
            assert await a.acquire() == 1
            assert a.is_leader
            waiting = asyncio.create_task(b.acquire())
            version = leases.version
            # Longer than the lease lasts.
            await until(lambda: leases.version > version + 50)
            assert a.is_leader
            assert not waiting.done()
            assert leases.holders == ["a"]
            assert b.holder == "a"
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    play(story)


def test_closing_gives_the_lease_back_at_once() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "b", duration_s=1000.0) as b:
            async with candidate(where, "a", duration_s=1000.0) as a:
                await a.acquire()
                waiting = asyncio.create_task(b.acquire())
                await until(lambda: b.holder == "a")
            assert not a.is_leader
            assert a.lost.is_set()
            assert leases.spec["holderIdentity"] is None
            assert await waiting == 2
            assert leases.holders == ["a", "b"]

    play(story)


def test_a_leader_that_stops_renewing_is_over_before_the_next_one_begins() -> None:
    """The process lives but the API server is out of its reach: it must stop by itself, in time."""

    async def story(leases: Leases, where: access.Access) -> None:
        cut_off = Leases()
        cut_off.is_away = True

        async def partitioned(asked: Asked, reply: Reply) -> None:
            await (cut_off if is_cut else leases).script(asked, reply)

        is_cut = False
        ended: list[str] = []
        async with (
            ScriptedApi(partitioned).serving() as theirs,
            candidate(where, "b") as b,
            candidate(theirs, "a", on_lost=lambda: ended.append("a")) as a,
        ):
            await a.acquire()
            waiting = asyncio.create_task(b.acquire())
            is_cut = True
            await a.lost.wait()
            assert ended == ["a"]
            assert not waiting.done()
            assert await waiting == 2
            assert not a.is_leader
            assert b.is_leader

    play(story)


def test_a_process_that_was_held_up_knows_that_it_no_longer_leads() -> None:
    """Suspended, or in a long computation: nobody could tell it, its own clock does."""

    async def story(_: Leases, where: access.Access) -> None:
        now_s = 0.0
        async with candidate(where, "a", clock=lambda: now_s) as a:
            await a.acquire()
            assert a.is_leader
            now_s = 1.9
            assert not a.is_leader

    play(story)


def test_clocks_of_other_machines_do_not_matter() -> None:
    """a writes times of last year, b of next year: b still waits for as long as a renews."""

    async def story(leases: Leases, where: access.Access) -> None:
        past, future = (datetime.now(UTC) + timedelta(days=days) for days in (-365, 365))
        async with candidate(where, "a", now=lambda: past) as a, candidate(where, "b", now=lambda: future) as b:
            await a.acquire()
            waiting = asyncio.create_task(b.acquire())
            version = leases.version
            await until(lambda: leases.version > version + 50)
            assert leases.holders == ["a"]
            await a.close()
            await waiting
            assert leases.spec["renewTime"].startswith(str(future.year))

    play(story)


def test_whoever_writes_the_lease_first_has_it() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with (
            candidate(where, "a") as a,
            candidate(where, "b") as b,
            candidate(where, "c") as c,
        ):
            tasks = [asyncio.create_task(one.acquire()) for one in (a, b, c)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert [one.is_leader for one in (a, b, c)].count(True) == 1
            assert len(leases.holders) == 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    play(story)


def test_a_write_by_somebody_who_is_no_candidate_changes_nothing() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a") as a:
            await a.acquire()
            assert leases.lease is not None
            leases.write({**leases.lease, "metadata": {**leases.lease["metadata"], "labels": {"x": "y"}}})
            version = leases.version
            await until(lambda: leases.version > version + 5)
            assert a.is_leader

    play(story)


def test_a_lease_that_another_one_has_taken_is_lost_at_once() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a", duration_s=1000.0, renew_deadline_s=900.0) as a:
            await a.acquire()
            assert leases.lease is not None
            leases.write({**leases.lease, "spec": {**leases.spec, "holderIdentity": "z", "leaseTransitions": 2}})
            await a.lost.wait()
            assert not a.is_leader
            await a.close()
            assert leases.spec["holderIdentity"] == "z"

    play(story)


def test_a_lease_that_somebody_deleted_is_lost() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a", duration_s=1000.0, renew_deadline_s=900.0) as a:
            await a.acquire()
            leases.lease = None
            await a.lost.wait()

    play(story)


def test_writes_whose_answers_were_lost_are_recognised() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a") as a:
            await a.acquire()
            leases.loses_answers = True
            version = leases.version
            await until(lambda: leases.version > version + 2)
            leases.loses_answers = False
            version = leases.version
            await until(lambda: leases.version > version + 2)
            assert a.is_leader
            assert leases.holders == ["a"]

    play(story)


def test_an_api_server_that_is_away_for_a_moment_costs_nothing() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        async with candidate(where, "a", duration_s=20.0, renew_deadline_s=15.0) as a:
            leases.is_away = True
            waiting = asyncio.create_task(a.acquire())
            await asyncio.sleep(0)
            leases.is_away = False
            assert await waiting == 1
            leases.is_away = True
            before = a._until_s
            await asyncio.sleep(3 * QUICK["retry_s"])
            leases.is_away = False
            await until(lambda: a._until_s > before)
            assert a.is_leader
            assert not a.lost.is_set()

    play(story)


def test_every_turn_has_a_larger_number() -> None:
    async def story(leases: Leases, where: access.Access) -> None:
        terms = []
        async with candidate(where, "a") as a, candidate(where, "b") as b:
            for one in (a, a, b, a):
                terms.append(await one.acquire())
                with pytest.raises(RuntimeError, match="we lead already"):
                    await one.acquire()
                await one.close()
        assert terms == [1, 2, 3, 4]
        assert leases.spec["leaseTransitions"] == 4

    play(story)


def test_times_that_would_let_two_lead_are_refused() -> None:
    async def story(_: Leases, where: access.Access) -> None:
        async with Api(where) as api:
            for times in ((1.0, 1.0, 0.1), (1.0, 0.5, 0.5), (1.0, 0.5, 0.0)):
                with pytest.raises(UsageError, match="retry < renew deadline < duration"):
                    Leading(api, "a", namespace="x", duration_s=times[0], renew_deadline_s=times[1], retry_s=times[2])

    play(story)


@pytest.mark.cluster
def test_on_a_real_server_the_lease_passes_on(control_plane: ControlPlane, namespace: str) -> None:
    """One gives it back, the next one is cut off without a word, the third waits for the lease to end."""

    async def run() -> None:
        where = access.find(path=control_plane.kubeconfig)
        async with asyncio.timeout(PATIENCE_S), Api(where) as api, Api(where) as other:
            times: dict[str, Any] = {"duration_s": 3.0, "renew_deadline_s": 2.0, "retry_s": 0.2}
            a, b, c = (
                Leading(one, name, namespace=namespace, **times) for one, name in ((api, "a"), (other, "b"), (api, "c"))
            )
            assert await a.acquire() == 1
            lease = await api.get(LEASES, "stretto-controller", namespace)
            assert (lease.spec.holder_identity, lease.spec.lease_duration_seconds) == ("a", 3)
            await a.close()
            assert not (await api.get(LEASES, "stretto-controller", namespace)).spec.holder_identity
            assert await b.acquire() == 2
            await asyncio.sleep(0)
            assert b._renewing is not None
            b._renewing.cancel()
            await b.lost.wait()
            assert await c.acquire() == 3
            assert (await api.get(LEASES, "stretto-controller", namespace)).spec.lease_transitions == 3
            await c.close()

    asyncio.run(run())
