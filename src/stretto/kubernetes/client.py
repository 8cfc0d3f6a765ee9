"""The Kubernetes API, as thin as it can be: verbs on kinds, answers decoded into structs, errors as in `problems`.

What is repeated, a few times and with growing pauses: whatever the server certainly did not act on (429, no
connection), and reads, merge patches, applies and deletions of a known uid, which do the same when done twice.
A create, a binding or a replace whose answer was lost is reported as `Unreachable`; the caller looks what became of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from stretto.kubernetes import problems
from stretto.kubernetes.access import Access
from stretto.kubernetes.connection import Answer, Place, Pool, Stream
from stretto.kubernetes.kinds import PODS, Kind
from stretto.kubernetes.model import ListMeta

T = TypeVar("T")

REQUEST_TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0
TRIES = 4
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
LONGEST_LINE_BYTES = 64 << 20
"""Far above what etcd can hold in one object."""

Body = bytes | Mapping[str, Any] | Sequence[Mapping[str, Any]] | msgspec.Struct
"""Of a request; the sequence is for JSON patches."""
How = Literal["merge", "strategic", "json", "apply"]
_CONTENT_TYPES: dict[How, str] = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class Listing(msgspec.Struct, Generic[T], frozen=True):
    """All objects as of one moment of the cluster."""

    items: list[T]
    resource_version: str


class Event(NamedTuple, Generic[T]):
    """One line of a watch. A BOOKMARK has no object: it only tells how far the stream has come."""

    type: str
    object: T | None
    resource_version: str


class Version(msgspec.Struct, rename="camel", frozen=True):
    git_version: str = ""
    major: str = ""
    minor: str = ""

    @property
    def release(self) -> tuple[int, int]:
        """(1, 20); vendors write `20+`."""
        return int(self.major or 0), int("".join(filter(str.isdigit, self.minor)) or 0)


class Api:
    """One API server, as one user. Make it inside a running event loop; `async with` or `close()` ends it."""

    def __init__(
        self,
        access: Access,
        *,
        connections: int = 64,
        timeout_s: float = REQUEST_TIMEOUT_S,
        user_agent: str = "stretto",
        rng: random.Random | None = None,
    ) -> None:
        self.namespace = access.namespace
        self._access = access
        self._timeout_s = timeout_s
        self._rng = rng or random.Random()
        place = Place(access.server, access.tls, access.server_name, access.proxy)
        self._pool = Pool(place, limit=connections, connect_timeout_s=CONNECT_TIMEOUT_S)
        server = urlsplit(access.server)
        self._prefix = server.path.rstrip("/")
        self._fixed_headers = f"Host: {server.netloc}\r\nUser-Agent: {user_agent}\r\nAccept: application/json\r\n"

    async def __aenter__(self) -> Api:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.close()

    async def get(self, kind: Kind[T], name: str, namespace: str = "") -> T:
        answer = await self._ask("GET", kind.address(name, namespace), repeats=True)
        return _decoded(kind.one, answer)

    async def list(
        self, kind: Kind[T], namespace: str = "", *, labels: str = "", fields: str = "", page: int = 500
    ) -> Listing[T]:
        """All objects, read in pages. `Gone` when it took so long that the later pages are not kept any more."""
        items: list[T] = []
        more = ""
        while True:
            query = _query(labelSelector=labels, fieldSelector=fields, limit=page or None)
            if more:
                query += f"&{urlencode({'continue': more})}"
            answer = await self._ask("GET", kind.path(namespace) + query, repeats=True)
            part = _decoded(kind.many, answer)
            items += part.items or ()
            more = part.metadata.more
            if not more:
                return Listing(items, part.metadata.resource_version)

    async def create(self, kind: Kind[T], body: Body, namespace: str = "") -> T:
        answer = await self._ask("POST", kind.path(namespace), body)
        return _decoded(kind.one, answer)

    async def patch(
        self,
        kind: Kind[T],
        name: str,
        body: Body,
        namespace: str = "",
        *,
        how: How = "merge",
        sub: str = "",
        manager: str = "",
        force: bool = False,
    ) -> T:
        """Change what the body names. With `metadata.resourceVersion` in it: only if nobody else changed the object
        (`ObjectConflict`). `how="apply"` needs a manager; `force` takes fields over from other managers."""
        query = _query(fieldManager=manager, force="true" if force else "")
        repeats = how in ("merge", "strategic", "apply") and not _is_conditional(body)
        answer = await self._ask(
            "PATCH", kind.address(name, namespace, sub) + query, body, _CONTENT_TYPES[how], repeats
        )
        return _decoded(kind.one, answer)

    async def replace(self, kind: Kind[T], name: str, body: Body, namespace: str = "", *, sub: str = "") -> T:
        """Write an object whole. With its `metadata.resourceVersion`: only if nobody else changed it."""
        answer = await self._ask("PUT", kind.address(name, namespace, sub), body)
        return _decoded(kind.one, answer)

    async def delete(
        self,
        kind: Kind[Any],
        name: str,
        namespace: str = "",
        *,
        grace_s: int | None = None,
        uid: str = "",
        resource_version: str = "",
        propagation: Literal["", "Foreground", "Background", "Orphan"] = "",
    ) -> None:
        """Ask for deletion. With `uid` (or `resource_version`): only of that very object (`ObjectConflict`)."""
        options: dict[str, Any] = {}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation:
            options["propagationPolicy"] = propagation
        sure = {name: value for name, value in (("uid", uid), ("resourceVersion", resource_version)) if value}
        if sure:
            options["preconditions"] = sure
        await self._ask("DELETE", kind.address(name, namespace), options, repeats=bool(uid))

    async def bind(self, namespace: str, pod: str, node: str, uid: str = "") -> None:
        """Put a pending pod on a node, as a scheduler does. `ObjectConflict` when it is on one already."""
        meta = {"name": pod, "uid": uid} if uid else {"name": pod}
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": meta,
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        await self._ask("POST", PODS.address(pod, namespace, "binding"), body)

    async def watch(
        self,
        kind: Kind[T],
        namespace: str = "",
        *,
        resource_version: str = "",
        labels: str = "",
        fields: str = "",
        timeout_s: int = 300,
        quiet_s: float = 150.0,
    ) -> AsyncGenerator[Event[T], None]:
        """Changes after `resource_version`, until the server ends the stream after `timeout_s`.

        Raises `Gone` when that version is too old, and `Unreachable` when the stream breaks, holds something that is
        no event, or is quiet for longer than `quiet_s` (the server sends a bookmark every minute or so).
        """
        query = _query(
            watch="true", allowWatchBookmarks="true", resourceVersion=resource_version, labelSelector=labels,
            fieldSelector=fields, timeoutSeconds=timeout_s,
        )  # fmt: skip
        async with aclosing(self._stream(kind.path(namespace) + query, quiet_s)) as pieces:
            async for line in _lines(pieces):
                yield _event(kind, line)

    async def log(
        self,
        namespace: str,
        pod: str,
        container: str = "",
        *,
        follow: bool = False,
        tail: int | None = None,
        since_time: str = "",
        previous: bool = False,
    ) -> AsyncGenerator[bytes, None]:
        """What a container printed, in pieces of any size; with `follow`, until it ends."""
        query = _query(
            container=container, follow="true" if follow else "", tailLines=tail, sinceTime=since_time,
            previous="true" if previous else "",
        )  # fmt: skip
        quiet_s = 4 * 3600.0 if follow else self._timeout_s
        async with aclosing(self._stream(PODS.address(pod, namespace, "log") + query, quiet_s)) as pieces:
            async for piece in pieces:
                yield piece

    async def serves(self, kind: Kind[Any]) -> bool:
        """Whether this server knows the kind in this version; better than guessing from its release."""
        try:
            known = _decoded(_RESOURCES, await self._ask("GET", kind.root, repeats=True))
        except problems.ObjectNotFound:
            return False
        return any(resource.name == kind.plural for resource in known.resources)

    async def server_version(self) -> Version:
        return _decoded(_VERSION, await self._ask("GET", "/version", repeats=True))

    async def _ask(
        self,
        method: str,
        target: str,
        body: Body | None = None,
        content_type: str = "application/json",
        repeats: bool = False,
    ) -> bytes:
        """The body of a good answer. `repeats`: doing it twice does no harm."""
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        what = f"{method} {target.partition('?')[0]}"
        for attempt in range(1, TRIES + 1):
            pause_s = self._rng.uniform(0.5, 1.0) * FIRST_PAUSE_S * 2.0**attempt
            try:
                answer = await self._authorized(method, target, data, content_type)
            except (OSError, TimeoutError) as error:
                if attempt == TRIES or not (repeats or problems.never_sent(error)):
                    raise problems.unreachable(what, error, self._access.server) from error
            else:
                if answer.status < 300:
                    return answer.body
                if attempt == TRIES or not (answer.status == 429 or (repeats and answer.status >= 500)):
                    raise problems.of_answer(what, answer.status, answer.body)
                pause_s = max(pause_s, answer.retry_after_s or 0.0)
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise AssertionError("the last attempt returns or raises")

    async def _authorized(self, method: str, target: str, data: bytes, content_type: str) -> Answer:
        """One request; another one when the server refused credentials that can be renewed."""
        answer = await self._pool.exchange(await self._request(method, target, data, content_type), self._timeout_s)
        if answer.status == 401 and await self._access.credentials.renew():
            answer = await self._pool.exchange(await self._request(method, target, data, content_type), self._timeout_s)
        return answer

    async def _request(self, method: str, target: str, data: bytes = b"", content_type: str = "") -> bytes:
        authorization = await self._access.credentials.header()
        head = f"{method} {self._prefix}{target} HTTP/1.1\r\n{self._fixed_headers}"
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        if data or method != "GET":
            head += f"Content-Type: {content_type}\r\nContent-Length: {len(data)}\r\n"
        return head.encode() + b"\r\n" + data

    async def _stream(self, target: str, quiet_s: float) -> AsyncGenerator[bytes, None]:
        """The pieces of a long answer."""
        what = f"GET {target.partition('?')[0]}"
        try:
            async with self._pool.stream(await self._request("GET", target), self._timeout_s) as stream:
                if stream.status != 401 or not await self._access.credentials.renew():
                    async for piece in self._good(what, stream, quiet_s):
                        yield piece
                    return
            async with self._pool.stream(await self._request("GET", target), self._timeout_s) as stream:
                async for piece in self._good(what, stream, quiet_s):
                    yield piece
        except (OSError, TimeoutError) as error:
            raise problems.unreachable(what, error, self._access.server) from error

    async def _good(self, what: str, stream: Stream, quiet_s: float) -> AsyncIterator[bytes]:
        if stream.status >= 300:
            body = b"".join([piece async for piece in stream.pieces(self._timeout_s)])
            raise problems.of_answer(what, stream.status, body)
        async for piece in stream.pieces(quiet_s):
            yield piece


class _Resource(msgspec.Struct):
    name: str = ""


class _Resources(msgspec.Struct):
    resources: list[_Resource] = []


class _Line(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    metadata: ListMeta = ListMeta()


_LINE = msgspec.json.Decoder(_Line)
_VERSIONED = msgspec.json.Decoder(_Versioned)
_RESOURCES = msgspec.json.Decoder(_Resources)
_VERSION = msgspec.json.Decoder(Version)


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise problems.Unreadable(
            f"the answer cannot be read: {error}", hint="is this a Kubernetes API server?"
        ) from error


def _query(**parameters: str | int | None) -> str:
    given = {name: value for name, value in parameters.items() if value not in ("", None)}
    return f"?{urlencode(given)}" if given else ""


def _is_conditional(body: Body) -> bool:
    """Done twice, a conditional write would find its own first try and call it a conflict."""
    if not isinstance(body, Mapping):
        return True
    return bool((body.get("metadata") or {}).get("resourceVersion"))


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Whole lines; a part at the end, which the server had no time to finish, is dropped."""
    rest: list[bytes] = []
    waiting = 0
    async for piece in pieces:
        first, newline, after = piece.partition(b"\n")
        if not newline:
            rest.append(piece)
            waiting += len(piece)
            if waiting > LONGEST_LINE_BYTES:
                raise problems.Unreadable("the watch sent a line that never ends")
            continue
        yield b"".join((*rest, first))
        *whole, last = after.split(b"\n")
        for line in whole:
            yield line
        rest, waiting = [last], len(last)


def _event(kind: Kind[T], line: bytes) -> Event[T]:
    try:
        head = _LINE.decode(line)
        if head.type == "ERROR":
            raise problems.of_watch(f"watch of {kind.plural}", head.object)
        version = _VERSIONED.decode(head.object).metadata.resource_version
        if head.type == "BOOKMARK":
            return Event(head.type, None, version)
        return Event(head.type, kind.one.decode(head.object), version)
    except msgspec.DecodeError as error:
        raise problems.Unreadable(f"the watch of {kind.plural} sent a line that is no event: {error}") from error
