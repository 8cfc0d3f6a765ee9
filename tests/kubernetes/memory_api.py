"""The API server's part that a controller sees, in memory: for moments that a real one does not offer twice.

Objects have versions, uids and generations, writes are conditional, watches tell every change. There is no kubelet, no
garbage collector and no scheduler: tests do their work, and `before` may fail or delay any request.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from stretto.kubernetes import status
from stretto.kubernetes.client import Api, Event, Listing
from stretto.kubernetes.controller import Controller, Options
from stretto.kubernetes.kinds import ELASTIC_JOBS, NODES, PODS, Kind
from stretto.kubernetes.problems import AlreadyExists, ObjectConflict, ObjectNotFound

Object = dict[str, Any]
NAMESPACE = "team"
PATIENCE_S = 30.0


class Request(NamedTuple):
    verb: str
    kind: str
    """Its plural."""
    name: str
    body: Any = None


class MemoryApi:
    """What `stretto.kubernetes.client.Api` offers, as far as a controller uses it."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        """By plural, namespace and name."""
        self.asked: list[Request] = []
        self.before: list[Callable[[Request], Awaitable[None]]] = []
        """Called with every request before it is carried out; what they raise is its answer."""
        self._versions = itertools.count(100)
        self._watches: list[tuple[str, asyncio.Queue[tuple[str, Object]]]] = []

    # What tests do.

    def put(self, kind: Kind[Any], body: Mapping[str, Any], namespace: str = NAMESPACE) -> Object:
        made = copy.deepcopy(dict(body))
        meta = made.setdefault("metadata", {})
        key = self._key(kind, meta["name"], namespace)
        if key in self.objects:
            raise AlreadyExists(f"{kind.plural} {meta['name']} already exists", status=409, reason="AlreadyExists")
        for name, text in made.pop("stringData", {}).items():
            made.setdefault("data", {})[name] = base64.b64encode(text.encode()).decode()
        meta.update(uid=str(uuid.uuid4()), generation=1, creationTimestamp=status.stamp(time.time()))  # noqa: TID251
        if kind.namespaced:
            meta["namespace"] = namespace
        self.objects[key] = made
        self._tell(kind, "ADDED", made)
        return made

    def change(self, kind: Kind[Any], name: str, body: Mapping[str, Any], namespace: str = NAMESPACE) -> Object:
        """A merge patch."""
        found = self.objects[self._key(kind, name, namespace)]
        before = copy.deepcopy(found)
        _merge(found, body)
        if found != before:
            if found.get("spec") != before.get("spec"):
                found["metadata"]["generation"] += 1
            self._tell(kind, "MODIFIED", found)
        return found

    def remove(self, kind: Kind[Any], name: str, namespace: str = NAMESPACE) -> None:
        self._tell(kind, "DELETED", self.objects.pop(self._key(kind, name, namespace)))

    def names(self, kind: Kind[Any], start: str = "") -> list[str]:
        return sorted(name for plural, _, name in self.objects if plural == kind.plural and name.startswith(start))

    def status(self, name: str) -> Object:
        found: Object = self.objects["elasticjobs", NAMESPACE, name].get("status") or {}
        return found

    def ended(self, pod: str, exit_code: int = 0) -> None:
        """As kubelet tells it."""
        state = {"name": "worker", "state": {"terminated": {"exitCode": exit_code, "reason": "Completed"}}}
        phase = "Failed" if exit_code else "Succeeded"
        self.change(PODS, pod, {"status": {"phase": phase, "containerStatuses": [state]}})

    # What a controller asks.

    async def get(self, kind: Kind[Any], name: str, namespace: str = "") -> Any:
        await self._ask("get", kind, name)
        return self._shown(kind, self._found(kind, name, namespace))

    async def list(self, kind: Kind[Any], namespace: str = "", **_: Any) -> Listing[Any]:
        await self._ask("list", kind, "")
        items = [one for (plural, where, _), one in self.objects.items() if plural == kind.plural]
        shown = [one for one in items if not namespace or one["metadata"]["namespace"] == namespace]
        return Listing([self._shown(kind, one) for one in shown], str(next(self._versions)))

    async def create(self, kind: Kind[Any], body: Mapping[str, Any], namespace: str = "") -> Any:
        await self._ask("create", kind, body["metadata"]["name"], body)
        return self._shown(kind, self.put(kind, body, namespace))

    async def patch(
        self, kind: Kind[Any], name: str, body: Mapping[str, Any], namespace: str = "", *, how: str = "merge",
        **_: Any,
    ) -> Any:  # fmt: skip
        await self._ask("patch", kind, name, body)
        if how == "apply" and self._key(kind, name, namespace) not in self.objects:
            return self._shown(kind, self.put(kind, body, namespace))
        found, wanted = self._found(kind, name, namespace), copy.deepcopy(dict(body))
        version = (wanted.get("metadata") or {}).pop("resourceVersion", None)
        if version and version != found["metadata"]["resourceVersion"]:
            raise ObjectConflict(f"{kind.plural} {name} has been modified", status=409, reason="Conflict")
        return self._shown(kind, self.change(kind, name, wanted, namespace))

    async def delete(self, kind: Kind[Any], name: str, namespace: str = "", *, uid: str = "", **options: Any) -> None:
        await self._ask("delete", kind, name, options)
        if uid and self._found(kind, name, namespace)["metadata"]["uid"] != uid:
            raise ObjectConflict("another object has this name", status=409, reason="Conflict")
        self.remove(kind, name, namespace)

    async def bind(self, namespace: str, pod: str, node: str, uid: str = "") -> None:
        await self._ask("bind", PODS, pod, node)
        self._found(PODS, pod, namespace)
        running = {"phase": "Running", "podIP": "10.0.0.1"}
        self.change(PODS, pod, {"spec": {"nodeName": node}, "status": running}, namespace)

    async def serves(self, kind: Kind[Any]) -> bool:
        return True

    async def watch(self, kind: Kind[Any], namespace: str = "", **_: Any) -> AsyncGenerator[Event[Any], None]:
        told: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        self._watches.append((kind.plural, told))
        while True:
            what, item = await told.get()
            yield Event(what, self._shown(kind, item), item["metadata"]["resourceVersion"])  # type: ignore[arg-type]

    # How it is done.

    async def _ask(self, verb: str, kind: Kind[Any], name: str, body: Any = None) -> None:
        request = Request(verb, kind.plural, name, body)
        self.asked.append(request)
        await asyncio.sleep(0.001)
        for each in self.before:
            await each(request)

    def _found(self, kind: Kind[Any], name: str, namespace: str) -> Object:
        try:
            return self.objects[self._key(kind, name, namespace)]
        except KeyError:
            raise ObjectNotFound(f'{kind.plural} "{name}" not found', status=404, reason="NotFound") from None

    def _tell(self, kind: Kind[Any], what: str, item: Object) -> None:
        item["metadata"]["resourceVersion"] = str(next(self._versions))
        for plural, told in self._watches:
            if plural == kind.plural:
                told.put_nowait((what, copy.deepcopy(item)))

    def _key(self, kind: Kind[Any], name: str, namespace: str) -> tuple[str, str, str]:
        return kind.plural, namespace if kind.namespaced else "", name

    def _shown(self, kind: Kind[Any], item: Object) -> Any:
        return kind.one.decode(msgspec.json.encode(item))


def _merge(into: Object, changes: Mapping[str, Any]) -> None:
    for name, value in changes.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


class Stage:
    """A cluster in memory, and controllers one after the other."""

    def __init__(self) -> None:
        self.api = MemoryApi()
        self.ahead_s = 0.0
        """The controllers' clock is so much ahead."""
        self._term = 0

    def node(self, name: str = "n1", cpu: str = "8", **resources: str) -> None:
        allocatable = {"cpu": cpu, "memory": "64Gi", "pods": "110", **resources}
        ready = [{"type": "Ready", "status": "True"}]
        told = {"allocatable": allocatable, "conditions": ready}
        self.api.put(NODES, {"metadata": {"name": name, "labels": {}}, "spec": {}, "status": told})

    def job(self, name: str, low: int = 1, high: int | None = None, **spec: Any) -> None:
        workers = {"min": low, "max": high or low, "explore": False}
        usual = {"image": "i", "run": "python x.py", "resources": {"gpu": 0, "cpu": "1"}, "workers": workers}
        self.api.put(ELASTIC_JOBS, {"metadata": {"name": name}, "spec": {**usual, **spec}})

    @asynccontextmanager
    async def controller(self, **options: Any) -> AsyncIterator[Controller]:
        """One that leads, from when it has adopted what there is; it must not end by itself."""
        async with self.starting(**options) as (controller, running):
            await until(controller.ready.is_set, running)
            yield controller
            assert not running.done(), running.exception()

    @asynccontextmanager
    async def starting(self, **options: Any) -> AsyncIterator[tuple[Controller, asyncio.Task[None]]]:
        self._term += 1
        api: Any = self.api
        assert set(dir(api)) & set(dir(Api))
        controller = Controller(
            api,
            self._term,
            "me",
            Options(**{"url": "ws://x", "settings": {"stops_lose_work": True}, **options}),
            self._clock,
        )
        running = asyncio.create_task(controller.run())
        try:
            yield controller, running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _clock(self) -> float:
        return time.time() + self.ahead_s  # noqa: TID251

    async def has(self, name: str, pods: int) -> list[str]:
        """So many pods of the job, all on nodes."""

        def look() -> list[str]:
            found = self.api.names(PODS, f"{name}-")
            placed = [pod for pod in found if self.api.objects["pods", NAMESPACE, pod]["spec"].get("nodeName")]
            return placed if len(found) == len(placed) == pods else []

        await until(lambda: pods == 0 or look())
        return look()

    async def reaches(self, name: str, **fields: Any) -> Object:
        """The status once it has these fields."""

        def look() -> bool:
            told = self.api.status(name)
            return all(told.get(field) == value for field, value in fields.items())

        try:
            await until(look)
        except AssertionError:
            raise AssertionError(f"{name} never was {fields}: {self.api.status(name)}") from None
        return self.api.status(name)


async def until(look: Callable[[], object], running: asyncio.Task[None] | None = None) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not look():
        assert running is None or not running.done(), running.exception()
        assert time.monotonic() < end_s, "it did not come about in time"
        await asyncio.sleep(0.01)


def play(story: Callable[[Stage], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(4 * PATIENCE_S):
            await story(Stage())

    asyncio.run(bounded())
