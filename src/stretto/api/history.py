"""Events: as a list, and as a stream that goes on.

A stream reads from the store up to the present and then listens. It listens from the first moment on, and knows which
sequence number comes next: what it heard too early is skipped, what it did not hear is read, so that nothing is missing
and nothing comes twice. It ends with the server, and within seconds when its listener's token is revoked or expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Header, Query, Request, Response
from starlette.responses import StreamingResponse

from stretto.api import answers, bounds
from stretto.api.auth import Caller
from stretto.api.describing import answers as documented
from stretto.api.describing import text_answer
from stretto.api.jobs import LARGEST
from stretto.api.parts import Parts, Server, Viewer
from stretto.jobs.events import Recorded

_PAGE = 500
_HEARTBEAT_S = 15.0
_LOOK_S = 1.0
"""So often a listener must still be somebody who may listen."""
_MOST_KEPT = 1024

router = APIRouter(tags=["events"])

Sequence_ = Annotated[int | None, Query(ge=0, le=LARGEST)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Order = Annotated[Literal["oldest", "newest"], Query()]


@router.get("/v1/events", responses=documented("EventList"))
async def list_events(
    server: Server,
    caller: Viewer,
    after: Sequence_ = None,
    before: Sequence_ = None,
    limit: Limit = 100,
    order: Order = "oldest",
) -> Response:
    """What happened, to any job or to the server."""
    return await _page(server, caller, None, after, before, limit, order)


@router.get("/v1/jobs/{job}/events", responses=documented("EventList"))
async def list_job_events(
    server: Server,
    caller: Viewer,
    job: str,
    after: Sequence_ = None,
    before: Sequence_ = None,
    limit: Limit = 100,
    order: Order = "oldest",
) -> Response:
    """What happened to one job."""
    number = (await server.plane.job(job)).number
    return await _page(server, caller, number, after, before, limit, order)


@router.get("/v1/events/stream", responses=text_answer("text/event-stream", "Server-sent events, live."))
async def stream_events(
    request: Request,
    server: Server,
    caller: Viewer,
    after: Sequence_ = None,
    job: Annotated[str | None, Query(description="Only this one's.")] = None,
    last_event_id: Annotated[str | None, Header(description="Go on behind this one.")] = None,
) -> Response:
    """Events as they happen; `Last-Event-ID` or `after` goes on without a gap."""
    number = None if job is None else (await server.plane.job(job)).number
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdecimal() and len(last_event_id) < 19:
        after = int(last_event_id)
    if after is None:
        # Before the reply begins: what happens once the caller has seen its head is in the stream.
        after = await _newest(server)
    bounds.begin_stream(request.scope, caller.user)
    return StreamingResponse(
        Stream(server, caller, number, after).messages(),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _page(
    server: Parts, caller: Caller, job: int | None, after: int | None, before: int | None, limit: int, order: str
) -> Response:
    read = partial(server.plane.store.events, job=job, after=after or 0, before=before)
    found = await asyncio.to_thread(read, limit=limit + 1, newest_first=order == "newest")
    own = await server.seeing.own(caller, found)
    told = [answers.event(recorded, server.plane.told) for recorded in found[:limit]]
    items = [server.seeing.event(caller, own, one) for one in told]
    return answers.json(answers.List(items, str(items[-1].seq) if len(found) > limit else None))


async def _newest(server: Parts) -> int:
    found = await asyncio.to_thread(server.plane.store.events, limit=1, newest_first=True)
    return found[0].seq if found else 0


class Stream:
    """One listener."""

    def __init__(self, server: Parts, caller: Caller, job: int | None, after: int) -> None:
        self._server, self._caller, self._job, self._last = server, caller, job, after

    async def messages(self) -> AsyncIterator[bytes]:
        watch = self._server.plane.watch()
        try:
            yield b"retry: 1000\n\n"
            async for chunk in self._read(None):
                yield chunk
            silent_s = 0.0
            while await self._goes_on():
                try:
                    async with asyncio.timeout(_LOOK_S):
                        heard = await watch.some()
                except TimeoutError:
                    silent_s += _LOOK_S
                    if silent_s >= _HEARTBEAT_S:
                        silent_s = 0.0
                        yield b": still here\n\n"
                    continue
                silent_s = 0.0
                if not heard:
                    return
                async for chunk in self._tell(heard):
                    yield chunk
        finally:
            watch.close()

    async def _goes_on(self) -> bool:
        return not self._server.stopping.is_set() and await self._server.auth.still(self._caller)

    async def _tell(self, heard: list[Recorded]) -> AsyncIterator[bytes]:
        """What was heard and is new; with what is missing before it."""
        chunk: list[bytes] = []
        own = await self._server.seeing.own(self._caller, heard)
        for recorded in heard:
            if recorded.seq <= self._last:
                continue
            if recorded.seq > self._last + 1:
                if chunk:
                    yield b"".join(chunk)
                    chunk = []
                async for missing in self._read(recorded.seq):
                    yield missing
            self._last = recorded.seq
            if self._job is None or recorded.job == self._job:
                chunk.append(self._message(recorded, own))
        if chunk:
            yield b"".join(chunk)

    async def _read(self, before: int | None) -> AsyncIterator[bytes]:
        """All that the store has behind the last one, page by page."""
        while await self._goes_on():
            read = partial(self._server.plane.store.events, job=self._job, after=self._last, before=before)
            found = await asyncio.to_thread(read, limit=_PAGE)
            if found:
                self._last = found[-1].seq
                own = await self._server.seeing.own(self._caller, found)
                yield b"".join(self._message(recorded, own) for recorded in found)
            if len(found) < _PAGE:
                return

    def _message(self, recorded: Recorded, own: frozenset[int]) -> bytes:
        return _message(recorded, self._server, self._caller, own)


_kept: dict[tuple[int, bool], tuple[Recorded, bytes]] = {}


def _message(recorded: Recorded, server: Parts, caller: Caller, own: frozenset[int]) -> bytes:
    """Made once for all listeners that may read the same of it, as they hear it at about the same time."""
    key = recorded.seq, server.seeing.everything(caller) or recorded.job in own
    known = _kept.get(key)
    if known is not None and known[0] is recorded:
        return known[1]
    data = msgspec.json.encode(server.seeing.event(caller, own, answers.event(recorded, server.plane.told)))
    kind = type(recorded.event).__name__.lower()
    made = b"id: %d\nevent: %s\ndata: %s\n\n" % (recorded.seq, kind.encode(), data)
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[key] = recorded, made
    return made
