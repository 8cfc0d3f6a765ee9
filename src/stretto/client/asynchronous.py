"""The asynchronous client, over httpx2: the methods of `Client`, as coroutines and asynchronous iterators."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from stretto import pins
from stretto.client import calls, finding, near
from stretto.client.calls import Call, Ref, Source
from stretto.client.documents import Class, Cluster, Event, Forecast, Job, Node, Piece, Policy, Preview, Token, Why
from stretto.client.options import Filters, Submission, Taken
from stretto.client.problems import closed_early, error_of, lost, unreachable
from stretto.client.streams import RESTART_S, SILENCE_S, Feed, Log, Patience, is_last
from stretto.errors import MissingExtra, Unavailable

try:
    import httpx2
except ModuleNotFoundError:
    raise MissingExtra(
        "the asynchronous client needs httpx2, which is not installed", hint="pip install httpx2; or use Client"
    ) from None

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

T = TypeVar("T")


class AsyncClient:
    """`Client` for asynchronous programs; see there."""

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        data: str | Path | None = None,
        timeout_s: float = 30.0,
        patience_s: float = 0.0,
    ) -> None:
        self.server, self._token = finding.find(server, token, data=data)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._near = near.path_in(self.server)
        self._url = near.URL if self._near else self.server
        self._tls = pins.context(finding.pin(server, data=data)) if self.server.startswith("https:") else None
        self._http = httpx2.AsyncClient(
            headers=self._headers(),
            timeout=timeout_s,
            trust_env=False,
            transport=httpx2.AsyncHTTPTransport(verify=self._tls or pins.nobody(), uds=self._near or None),
        )

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, source: Source, **how: Unpack[Submission]) -> Job:
        return await self._do(calls.submit(source, **how))

    async def dry_run(self, source: Source, **how: Unpack[Taken]) -> Preview:
        return await self._do(calls.dry_run(source, **how))

    async def run(self, source: Source, *, timeout_s: float | None = None, **how: Unpack[Submission]) -> Job:
        return await self.wait(await self.submit(source, **how), timeout_s=timeout_s)

    async def wait(self, ref: Ref, *, timeout_s: float | None = None, patience_s: float = RESTART_S) -> Job:
        job = await self.job(ref)
        async with asyncio.timeout(timeout_s), aclosing(self._listen(job, Feed(), Patience(patience_s))) as listening:
            while not job.ended:
                event = await anext(listening)
                if event is None or is_last(event, job):
                    job = await self._do(calls.job(job), patience_s)
        return job

    async def job(self, ref: Ref) -> Job:
        return await self._do(calls.job(ref))

    async def jobs(self, **filters: Unpack[Filters]) -> AsyncIterator[Job]:
        pages = calls.Pages(**filters)
        while (call := pages.next_call()) is not None:
            for job in pages.took(await self._do(call)):
                yield job

    async def cancel(self, ref: Ref) -> Job:
        return await self._do(calls.wish(ref, "cancel"))

    async def suspend(self, ref: Ref, *, force: bool = False) -> Job:
        """`force`: though it would lose more than a minute of work."""
        return await self._do(calls.wish(ref, "suspend", force=force))

    async def resume(self, ref: Ref) -> Job:
        return await self._do(calls.wish(ref, "resume"))

    async def scale(self, ref: Ref, min: int | None = None, max: int | None = None, *, force: bool = False) -> Job:
        return await self._do(calls.scale(ref, min, max, force=force))

    async def migrate(self, ref: Ref, to: str, *, force: bool = False) -> Job:
        return await self._do(calls.migrate(ref, to, force=force))

    async def why(self, ref: Ref) -> Why:
        return await self._do(calls.why(ref))

    async def events(
        self, ref: Ref | None = None, *, after: int | None = None, limit: int = 200, order: str | None = None
    ) -> list[Event]:
        return (await self._do(calls.events(ref, after=after, limit=limit, order=order))).items

    async def watch(
        self, ref: Ref | None = None, *, after: int | None = None, patience_s: float = RESTART_S
    ) -> AsyncIterator[Event]:
        if after is None:
            after = next((event.seq for event in await self.events(limit=1, order="newest")), 0)
        async with aclosing(self._listen(ref, Feed(after), Patience(patience_s))) as listening:
            async for event in listening:
                if event is not None:
                    yield event

    async def logs(
        self,
        ref: Ref,
        *,
        worker: str | None = None,
        tail: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> str:
        return await self._do(calls.logs(ref, worker, tail, offset, limit))

    async def log_pages(self, ref: Ref, *, worker: str | None = None, tail: int | None = None) -> AsyncIterator[str]:
        cursor: str | None = None
        while True:
            page = await self._do(calls.log_page(ref, worker, tail, cursor))
            yield page.text
            if (cursor := page.next) is None:
                return

    async def follow(
        self,
        ref: Ref,
        *,
        worker: str | None = None,
        tail: int | None = None,
        tick_s: float | None = None,
        patience_s: float = RESTART_S,
    ) -> AsyncIterator[Piece]:
        job, log, patience = await self.job(ref), Log(), Patience(patience_s)
        while not log.ended:
            call = calls.follow(job.number, worker, None if log.begun else tail)
            try:
                async with self._socket(call) as socket:
                    patience.worked()
                    while not log.ended:
                        piece = await _received(socket, log, tick_s)
                        if piece is not None or tick_s is not None:
                            yield piece or Piece("", "")
            except Unavailable as error:
                log.broken()
                await asyncio.sleep(patience.failed(error))
                if tick_s is not None:
                    yield Piece("", "")

    async def nodes(self) -> list[Node]:
        return await self._do(calls.nodes())

    async def drain(self, node: str, *, within_s: float | None = None) -> Node:
        """Leave a node: its workers move, and no new one comes. Jobs that would lose their work stay until they end, or
        so long; 0: not at all."""
        return await self._do(calls.drain(node, "drain", within_s))

    async def undrain(self, node: str) -> Node:
        return await self._do(calls.drain(node, "undrain"))

    async def policy(self) -> Policy:
        return await self._do(calls.policy())

    async def set_policy(
        self, name: str, options: Mapping[str, Any] | None = None, *, placement: str | None = None
    ) -> Policy:
        return await self._do(calls.set_policy(name, options or {}, placement))

    async def forecast(self) -> Forecast:
        return await self._do(calls.forecast())

    async def classes(self, name: str | None = None) -> list[Class]:
        found: list[Class] = []
        cursor: str | None = None
        while True:
            page = await self._do(calls.classes(name, cursor=cursor))
            found += page.items
            if (cursor := page.next) is None:
                return found

    async def job_class(self, name: str) -> Class:
        return await self._do(calls.job_class(name))

    async def forget_class(self, name: str) -> None:
        return await self._do(calls.forget_class(name))

    async def cluster(self) -> Cluster:
        return await self._do(calls.cluster())

    async def tokens(self) -> list[Token]:
        return await self._do(calls.tokens())

    async def create_token(
        self,
        user: str,
        role: str = "user",
        *,
        expires_s: float | None = None,
        account: str | None = None,
        shared: bool = False,
    ) -> Token:
        return await self._do(calls.create_token(user, role, expires_s, account, shared))

    async def revoke_token(self, id: str) -> None:
        return await self._do(calls.revoke_token(id))

    async def _do(self, call: Call[T], patience_s: float | None = None) -> T:
        patience = Patience(self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                return call.read(await self._once(call))
            except Unavailable as error:
                if not call.safe:
                    raise
                await asyncio.sleep(patience.failed(error))

    async def _once(self, call: Call[Any]) -> bytes:
        try:
            answer = await self._http.request(
                call.method, self._url + call.target, content=call.body, headers=dict(call.headers)
            )
        except httpx2.TransportError as error:
            raise lost(self.server, error) from None
        if answer.status_code >= 300:
            raise error_of(answer.status_code, answer.content)
        return answer.content

    async def _listen(self, ref: Ref | None, feed: Feed, patience: Patience) -> AsyncGenerator[Event | None, None]:
        """Events; None whenever a connection was made."""
        while True:
            call = calls.stream(ref, feed.last)
            url, headers = self._url + call.target, dict(call.headers)
            try:
                async with self._http.stream("GET", url, headers=headers, timeout=SILENCE_S) as answer:
                    if answer.status_code >= 300:
                        raise error_of(answer.status_code, await answer.aread())
                    patience.worked()
                    yield None
                    async for line in answer.aiter_lines():
                        event = feed.line(line)
                        if event is not None:
                            yield event
                raise unreachable(self.server, "it closed the stream of events")
            except (httpx2.TransportError, Unavailable) as error:
                feed.broken()
                await asyncio.sleep(patience.failed(_passing(self.server, error)))

    @asynccontextmanager
    async def _socket(self, call: Call[Any]) -> AsyncIterator[ClientConnection]:
        from websockets.asyncio.client import connect, unix_connect
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        url = "ws" + self._url.removeprefix("http") + call.target
        try:
            socket = await (partial(unix_connect, self._near) if self._near else connect)(
                url, additional_headers=self._headers(), open_timeout=self._timeout_s, close_timeout=1,
                compression=None, proxy=None, ssl=self._tls,
            )  # fmt: skip
        except InvalidStatus as refused:
            raise error_of(refused.response.status_code, refused.response.body or b"") from None
        except (OSError, InvalidHandshake, EOFError) as error:
            raise lost(self.server, error) from None
        async with socket:
            yield socket

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


def _passing(server: str, error: Exception) -> Unavailable:
    """What may be over a little later; raises what will not."""
    trouble = error if isinstance(error, Unavailable) else lost(server, error)
    if not isinstance(trouble, Unavailable):
        raise trouble from None
    return trouble


async def _received(socket: ClientConnection, log: Log, tick_s: float | None) -> Piece | None:
    from websockets.exceptions import ConnectionClosed

    try:
        async with asyncio.timeout(tick_s):
            return log.message(await socket.recv())
    except TimeoutError:
        return None
    except ConnectionClosed as closed:
        raise closed_early(closed.rcvd) from None
