"""The cache of one kind: whatever the connection suffers, no change is missed and none is told twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from scripted_api import Asked, Reply, Script, ScriptedApi, refusal

from stretto.kubernetes import access, client, problems, watching
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import PODS
from stretto.kubernetes.model import Pod
from stretto.kubernetes.watching import Watched
from stretto.testing.kubernetes.control_plane import ControlPlane

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (client, watching):
        monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
        monkeypatch.setattr(module, "LONGEST_PAUSE_S", 0.01)


class Follower:
    """Holds what it was told to hold, and fails when what it is told does not go on from there."""

    def __init__(self, watched: Watched[Pod]) -> None:
        self.held: dict[tuple[str, str], Pod] = {}
        self.told: list[tuple[str, str, str]] = []
        self._changed = asyncio.Event()
        self._watched = watched
        watched.on_change(self.change)

    def change(self, old: Pod | None, new: Pod | None) -> None:
        assert (old or new) is not None
        item = new or old
        assert item is not None
        key = item.metadata.key
        assert self.held.get(key) is old, "told of a change from something else than was told before"
        assert self._watched.items.get(key) is new, "told before the cache has it"
        if old is not None and new is not None:
            assert old.metadata.resource_version != new.metadata.resource_version, "told twice"
            assert old.metadata.uid == new.metadata.uid
        if new is None:
            del self.held[key]
        else:
            self.held[key] = new
        what = "deleted" if new is None else "added" if old is None else "modified"
        self.told.append((what, key[1], item.metadata.resource_version if new else ""))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def following(api: Api, namespace: str = "", **options: Any) -> AsyncIterator[tuple[Watched[Pod], Follower]]:
    watched = Watched(api, PODS, namespace, rng=random.Random(1), **options)
    follower = Follower(watched)
    task = asyncio.create_task(watched.run())
    try:
        done = asyncio.create_task(watched.synced.wait())
        await asyncio.wait({done, task}, return_when=asyncio.FIRST_COMPLETED)
        done.cancel()
        yield watched, follower
        assert not task.done() or task.exception() is None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def scripted(script: Script, **options: Any) -> AsyncIterator[tuple[Watched[Pod], Follower]]:
    async with (
        asyncio.timeout(PATIENCE_S),
        ScriptedApi(script).serving() as where,
        Api(where) as api,
        following(api, **options) as both,
    ):
        yield both


Fault = Callable[["Cluster", Reply], Awaitable[bool]]
"""Does harm to a stream; whether the stream goes on."""


class Cluster:
    """A pods resource with a history, served with faults."""

    def __init__(self, seed: int, faults: list[Fault]) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.version = 10
        self.pods: dict[str, dict[str, Any]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.oldest = 10
        """Versions before this one are not kept."""
        self.watches = 0
        self.watching = 0
        self._listed: dict[int, list[dict[str, Any]]] = {}
        self._happened = asyncio.Event()

    def act(self) -> None:
        """Something happens to a pod."""
        self._change(f"p{self.rng.randrange(6)}")

    def finish(self) -> None:
        """A last change that no other can undo: who knows of it has heard everything."""
        self._change("last")

    def _change(self, name: str) -> None:
        self.version += 1
        uid = self.pods[name]["metadata"]["uid"] if name in self.pods else f"u{self.version}"
        pod = {"metadata": {"name": name, "namespace": "x", "uid": uid, "resourceVersion": str(self.version)}}
        if name not in self.pods:
            kind = "ADDED"
        elif self.rng.random() < 0.4:
            kind = "DELETED"
        else:
            kind = "MODIFIED"
        if kind == "DELETED":
            del self.pods[name]
        else:
            self.pods[name] = pod
        self.history.append((self.version, kind, pod))
        self._happened.set()

    def forget_history(self) -> None:
        self.oldest = self.version

    async def script(self, asked: Asked, reply: Reply) -> None:
        if "watch" in asked.query:
            self.watches += 1
            self.watching += 1
            try:
                assert self.watching == 1, "two watches at once"
                await self._watch(int(asked.query["resourceVersion"]), reply)
            finally:
                self.watching -= 1
            return
        self._page(asked, reply)

    def _page(self, asked: Asked, reply: Reply) -> None:
        """All pages of a list show the same moment."""
        if "continue" in asked.query:
            version, start = map(int, asked.query["continue"].split("-"))
        else:
            version, start = self.version, 0
            self._listed[version] = [self.pods[name] for name in sorted(self.pods)]
        limit = int(asked.query.get("limit", 1000))
        items = self._listed[version]
        more = f"{version}-{start + limit}" if start + limit < len(items) else ""
        meta = {"resourceVersion": str(version), "continue": more}
        reply.json({"metadata": meta, "items": items[start : start + limit]})

    async def _watch(self, since: int, reply: Reply) -> None:
        if since < self.oldest and self.rng.random() < 0.5:
            reply.json(refusal(410, "Expired"), 410)
            return
        reply.begin()
        if since < self.oldest:
            reply.line("ERROR", refusal(410, "Expired"))
            reply.end()
            return
        while True:
            for version, kind, pod in [entry for entry in self.history if entry[0] > since]:
                if self.faults and self.rng.random() < 0.2 and not await self.rng.choice(self.faults)(self, reply):
                    return
                text = json.dumps({"type": kind, "object": pod}).encode() + b"\n"
                cut = self.rng.randrange(len(text))
                reply.piece(text[:cut])
                await reply.sent()
                reply.piece(text[cut:])
                since = version
            await reply.sent()
            self._happened.clear()
            if since == self.version:
                await self._happened.wait()


async def normal_end(_: Cluster, reply: Reply) -> bool:
    reply.end()
    return False


async def bookmark(_: Cluster, reply: Reply) -> bool:
    # Says no more than what was sent already: the version of the list it goes with.
    reply.line("BOOKMARK", {"kind": "Pod", "metadata": {}})
    return True


async def drop(_: Cluster, reply: Reply) -> bool:
    await reply.sent()
    reply.cut()
    return False


async def half_a_line(_: Cluster, reply: Reply) -> bool:
    reply.piece(b'{"type": "ADDED", "object": {"metadata": {"name": "p1", "names')
    reply.end()
    return False


async def half_a_line_and_drop(_: Cluster, reply: Reply) -> bool:
    reply.piece(b'{"type": "ADDED", "object": {"metadata": {"name": "p1", "names')
    await reply.sent()
    reply.cut()
    return False


async def garbage(_: Cluster, reply: Reply) -> bool:
    reply.piece(b"<html>proxy error</html>\n")
    return False


async def broken_chunk(_: Cluster, reply: Reply) -> bool:
    reply.raw(b"zz\r\nnot a chunk\r\n")
    return False


async def too_old(cluster: Cluster, reply: Reply) -> bool:
    cluster.forget_history()
    reply.line("ERROR", refusal(410, "Gone", "too old resource version"))
    reply.end()
    return False


async def server_error(_: Cluster, reply: Reply) -> bool:
    reply.line("ERROR", refusal(500, "InternalError", "etcdserver: no leader"))
    return False


async def silence(_: Cluster, reply: Reply) -> bool:
    await reply.sent()
    await asyncio.sleep(0.3)
    reply.cut()
    return False


MENDABLE: list[Fault] = [
    normal_end,
    bookmark,
    drop,
    half_a_line,
    half_a_line_and_drop,
    broken_chunk,
    server_error,
    silence,
]
FORGETFUL: list[Fault] = [*MENDABLE, garbage, too_old]


def run_through(seed: int, faults: list[Fault], changes: int = 80) -> tuple[Cluster, Follower]:
    async def run() -> tuple[Cluster, Follower]:
        cluster = Cluster(seed, faults)
        for _ in range(5):
            cluster.act()
        async with scripted(cluster.script, page=2, quiet_s=0.1) as (watched, follower):
            follower.told.clear()
            for _ in range(changes):
                cluster.act()
                await asyncio.sleep(cluster.rng.choice((0, 0, 0.002)))
            cluster.finish()
            await follower.until(lambda: ("x", "last") in watched.items)
            assert versions(watched) == versions_of(cluster)
        return cluster, follower

    return asyncio.run(run())


def versions(watched: Watched[Pod]) -> dict[str, str]:
    return {item.metadata.name: item.metadata.resource_version for item in watched.items.values()}


def versions_of(cluster: Cluster) -> dict[str, str]:
    return {name: pod["metadata"]["resourceVersion"] for name, pod in cluster.pods.items()}


@pytest.mark.parametrize("seed", range(12))
def test_every_single_change_is_told_while_the_server_keeps_the_history(seed: int) -> None:
    cluster, follower = run_through(seed, MENDABLE)
    expected = [
        (kind.lower(), pod["metadata"]["name"], "" if kind == "DELETED" else str(version))
        for version, kind, pod in cluster.history[5:]
    ]
    assert follower.told == expected
    assert cluster.watches > 1


@pytest.mark.parametrize("seed", range(12))
def test_the_difference_is_told_when_it_does_not(seed: int) -> None:
    """Follower checks each step: what is told always goes on from what was told before."""
    cluster, follower = run_through(seed, FORGETFUL)
    assert {pod.metadata.name for pod in follower.held.values()} == set(cluster.pods)


def test_missed_deletions_and_namesakes_are_told_after_a_relist() -> None:
    async def run() -> None:
        cluster = Cluster(0, [])

        def put(name: str, uid: str) -> None:
            cluster.version += 1
            meta = {"name": name, "namespace": "x", "uid": uid, "resourceVersion": str(cluster.version)}
            cluster.pods[name] = {"metadata": meta}

        for name in ("stays", "goes", "again"):
            put(name, f"{name}-1")
        back = asyncio.Event()

        async def script(asked: Asked, reply: Reply) -> None:
            if "watch" in asked.query:
                await back.wait()
            await cluster.script(asked, reply)

        async with scripted(script) as (_, follower):
            before = len(follower.told)
            del cluster.pods["goes"]
            put("again", "again-2")
            put("new", "new-1")
            cluster.forget_history()
            back.set()
            await follower.until(lambda: len(follower.told) >= before + 4)
            assert sorted(follower.told[before:]) == [
                ("added", "again", "14"),
                ("added", "new", "15"),
                ("deleted", "again", ""),
                ("deleted", "goes", ""),
            ]

    asyncio.run(run())


def test_pages_that_went_stale_are_read_at_once() -> None:
    async def run() -> None:
        cluster = Cluster(3, [])
        for _ in range(30):
            cluster.act()
        assert len(cluster.pods) > 2

        async def script(asked: Asked, reply: Reply) -> None:
            if "continue" in asked.query:
                reply.json(refusal(410, "Expired", "The provided continue parameter is too old"), 410)
            else:
                await cluster.script(asked, reply)

        async with scripted(script, page=2) as (watched, _):
            assert versions(watched) == versions_of(cluster)

    asyncio.run(run())


def test_a_resync_finds_what_the_watch_did_not_tell() -> None:
    async def run() -> None:
        cluster = Cluster(0, [])
        cluster.act()
        lists = 0

        async def script(asked: Asked, reply: Reply) -> None:
            nonlocal lists
            if "watch" in asked.query:
                # Deaf: it ends without a word.
                reply.begin()
                reply.end()
            else:
                lists += 1
                await cluster.script(asked, reply)

        async with scripted(script, resync_s=0.01) as (watched, follower):
            cluster.act()
            cluster.act()
            await follower.until(lambda: versions(watched) == versions_of(cluster))
            assert lists > 1

    asyncio.run(run())


def test_a_cache_says_how_old_its_news_are() -> None:
    async def run() -> None:
        cluster = Cluster(0, [])
        cluster.act()
        now_s = 100.0
        async with scripted(cluster.script, clock=lambda: now_s) as (watched, follower):
            now_s = 170.0
            assert watched.stale_s() == 70.0
            cluster.act()
            told = len(follower.told)
            await follower.until(lambda: len(follower.told) > told)
            assert watched.stale_s() == 0.0
            with pytest.raises(RuntimeError, match="watched already"):
                await watched.run()

    asyncio.run(run())


def test_a_callback_that_fails_ends_the_watch_rather_than_lose_changes() -> None:
    async def run() -> None:
        cluster = Cluster(0, [])
        cluster.act()

        def fail(_: Pod | None, __: Pod | None) -> None:
            raise LookupError("a defect")

        async with asyncio.timeout(PATIENCE_S), ScriptedApi(cluster.script).serving() as where, Api(where) as api:
            watched = Watched(api, PODS)
            watched.on_change(fail)
            with pytest.raises(LookupError, match="a defect"):
                await watched.run()

    asyncio.run(run())


def a_pod(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"schedulerName": "nobody", "containers": [{"name": "c", "image": "x"}]},
    }


@pytest.mark.cluster
def test_on_a_real_server_the_cache_follows_everything(control_plane: ControlPlane, namespace: str) -> None:
    """Many pods at once, in pages, with a server that goes away, forgets its history and comes back."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S), Api(access.find(path=control_plane.kubeconfig)) as api:
            await asyncio.gather(*(api.create(PODS, a_pod(f"early-{i}"), namespace) for i in range(20)))
            async with following(api, namespace, page=7) as (watched, follower):
                assert len(watched.items) == 20
                await asyncio.gather(*(api.create(PODS, a_pod(f"late-{i}"), namespace) for i in range(100)))
                changes = {"metadata": {"labels": {"seen": "yes"}}}
                await asyncio.gather(*(api.patch(PODS, f"late-{i}", changes, namespace) for i in range(100)))
                await asyncio.gather(*(api.delete(PODS, f"late-{i}", namespace, grace_s=0) for i in range(50)))
                await follower.until(lambda: len(watched.items) == 70 and _labelled(watched) == 50)
                told = [what for what, _, _ in follower.told]
                assert (told.count("added"), told.count("deleted")) == (120, 50)
                # A server may mark a pod as leaving before it removes it.
                assert told.count("modified") in (100, 150)

                await asyncio.to_thread(control_plane.stop_api_server)
                await asyncio.to_thread(control_plane.start_api_server)
                with pytest.raises(problems.Gone):
                    _ = [event async for event in api.watch(PODS, namespace, resource_version="1")]
                await api.delete(PODS, "early-0", namespace, grace_s=0)
                await api.create(PODS, a_pod("last"), namespace)
                await follower.until(lambda: (namespace, "last") in watched.items)
                assert versions(watched) == {
                    pod.metadata.name: pod.metadata.resource_version for pod in (await api.list(PODS, namespace)).items
                }
                since = [what for what, _, _ in follower.told[len(told) :] if what != "modified"]
                assert since == ["deleted", "added"]

    asyncio.run(run())


@pytest.mark.cluster
def test_on_a_real_server_selectors_narrow_what_is_watched(control_plane: ControlPlane, namespace: str) -> None:
    """A pod that no longer matches is gone, as far as this cache is concerned."""

    async def run() -> None:
        async with (
            asyncio.timeout(PATIENCE_S),
            Api(access.find(path=control_plane.kubeconfig)) as api,
            following(api, namespace, labels="mine=yes") as (watched, follower),
        ):
            await api.create(PODS, a_pod("p"), namespace)
            await api.patch(PODS, "p", {"metadata": {"labels": {"mine": "yes"}}}, namespace)
            await follower.until(lambda: len(watched.items) == 1)
            await api.patch(PODS, "p", {"metadata": {"labels": {"mine": "no"}}}, namespace)
            await follower.until(lambda: not watched.items)
            assert [what for what, _, _ in follower.told] == ["added", "deleted"]

    asyncio.run(run())


def _labelled(watched: Watched[Pod]) -> int:
    return sum(pod.metadata.labels.get("seen") == "yes" for pod in watched.items.values())
