"""Logs over HTTP, and followed over a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from stretto.api import answers, bounds, logs, problems
from stretto.api.auth import Caller
from stretto.api.describing import ERRORS, text_answer
from stretto.api.jobs import LARGEST, number
from stretto.api.parts import Parts, Server, Viewer, parts_of
from stretto.errors import NotFound, StrettoError, UsageError
from stretto.jobs.model import Job
from stretto.server.drivers.service import HELPERS

_LIMIT = 2**20
_LARGEST_LIMIT = 16 * 2**20
_FARTHEST = LARGEST - _LARGEST_LIMIT
"""Beyond it an operating system cannot read."""
_MOST_LINES = 100_000
_LOOK_S = 0.05
_ASK_S = 1.0
_STALLED_S = 30.0
FIRST_MESSAGE = "stretto.token"
"""The subprotocol of those whose first message is their token."""
_FIRST_MESSAGE_S = 5.0
_CHUNK = 2**16
_LONGEST_CHARACTER = 4


class LogPage(msgspec.Struct, frozen=True):
    """A part of what all workers, or one of them, have written."""

    text: str
    next: str | None
    """Where the rest begins; null: there is none."""


_SCHEMA = msgspec.json.schema(LogPage)["$defs"]["LogPage"]
_PAGE = {"description": "A part of the log.", "content": {"application/json": {"schema": _SCHEMA}}}

router = APIRouter(tags=["logs"])


@router.get("/v1/jobs/{job}/logs", responses=text_answer("text/plain", "What its workers have written."))
async def read_logs(
    server: Server,
    caller: Viewer,
    job: str,
    worker: Annotated[str | None, Query(description="All of them, if not given.")] = None,
    tail: Annotated[int | None, Query(ge=0, le=_MOST_LINES, description="The last so many lines.")] = None,
    offset: Annotated[int | None, Query(ge=0, le=_FARTHEST, description="From this byte on; of one worker.")] = None,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_LIMIT, description="Bytes.")] = _LIMIT,
) -> Response:
    """Logs as text."""
    if offset is not None and worker is None:
        raise UsageError("offset: it is an offset of one worker's log", hint="say which worker")
    if offset is not None and tail is not None:
        raise UsageError("offset and tail exclude each other", hint="leave out one of the two")
    found = await server.plane.job(job)
    server.seeing.check(caller, found)
    folder = _folder(server, found)
    if worker is not None:
        text = await asyncio.to_thread(_read, folder, worker, tail, offset, limit, found.ended)
        headers = {"Log-Offset": str(text.offset), "Log-Next": str(text.next)}
        return Response(text.text.encode(), 200, headers, "text/plain")
    return Response(await asyncio.to_thread(_read_all, folder, tail, limit), media_type="text/plain")


@router.get("/v1/jobs/{job}/logs/pages", responses={200: _PAGE, **ERRORS})
async def page_logs(
    server: Server,
    caller: Viewer,
    job: str,
    worker: Annotated[str | None, Query(description="All of them, if not given.")] = None,
    tail: Annotated[int | None, Query(ge=0, le=_MOST_LINES, description="The last so many lines of each.")] = None,
    cursor: Annotated[str | None, Query(description="`next` of the page before.")] = None,
    limit: Annotated[int, Query(ge=_LONGEST_CHARACTER, le=_LARGEST_LIMIT, description="Bytes.")] = _LIMIT,
) -> Response:
    """The whole log, page by page: what the pages say, one after the other, is all there is."""
    found = await server.plane.job(job)
    server.seeing.check(caller, found)
    folder = _folder(server, found)
    return answers.json(await asyncio.to_thread(_page, folder, worker, tail, cursor, limit))


@router.websocket("/v1/jobs/{job}/logs/follow")
async def follow_logs(socket: WebSocket, job: str) -> None:
    """`{"worker", "offset", "text"}` again and again, at last `{"end": phase}`."""
    server = parts_of(socket)
    try:
        caller = await _caller(server, socket)
        found = await server.plane.job(job)
        server.seeing.check(caller, found)
        worker, tail = socket.query_params.get("worker"), socket.query_params.get("tail")
        lines = None if tail is None else min(number(tail, "tail"), _MOST_LINES)
        if worker is not None:
            await asyncio.to_thread(_is_a_name, _folder(server, found), worker)
        bounds.begin_stream(socket.scope, caller.user)
        follower = Follower(server, caller, found, worker, lines)
    except (WebSocketDisconnect, TimeoutError):
        return
    except StrettoError as error:
        await _refuse(socket, error)
        return
    if socket.application_state is WebSocketState.CONNECTING:
        await socket.accept()
    await follower.run(socket)


async def _caller(server: Parts, socket: WebSocket) -> Caller:
    """By the header; or, as browsers cannot set one, by a first message `{"token": …}` of whoever asks for the
    subprotocol that says so."""
    if FIRST_MESSAGE not in socket.scope["subprotocols"]:
        return await server.auth.caller(socket, "viewer")
    await socket.accept(FIRST_MESSAGE)
    try:
        async with asyncio.timeout(_FIRST_MESSAGE_S):
            said = msgspec.json.decode(await socket.receive_text(), type=_First)
    except (TimeoutError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        raise problems.Unauthenticated("the first message is not a token", hint='send {"token": "…"} first') from None
    return await server.auth.caller_with(said.token, "viewer")


class _First(msgspec.Struct):
    token: str


async def _refuse(socket: WebSocket, error: StrettoError) -> None:
    if socket.application_state is WebSocketState.CONNECTING:
        await socket.send_denial_response(problems.response(error))
        return
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        # A reason is 123 bytes at most.
        await socket.close(4000 + problems.status_of(error), error.message.encode()[:120].decode(errors="ignore"))


class Follower:
    """One listener of one job's logs."""

    def __init__(self, server: Parts, caller: Caller, job: Job, worker: str | None, tail: int | None) -> None:
        self._server, self._caller, self._job, self._tail = server, caller, job, tail
        self._asked_s = time.monotonic()
        self._revoked = False
        self._folder = _folder(server, job)
        self._only = worker
        self._open: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._first = True

    async def run(self, socket: WebSocket) -> None:
        leaving = asyncio.create_task(_gone(socket))
        try:
            with contextlib.suppress(WebSocketDisconnect, TimeoutError):
                await self._follow(socket, leaving)
        finally:
            leaving.cancel()
            for fd in self._open.values():
                os.close(fd)
            if socket.application_state is WebSocketState.CONNECTED and not leaving.done():
                with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                    async with asyncio.timeout(_STALLED_S):
                        await socket.close(*self._why())

    def _why(self) -> tuple[int, str]:
        if self._revoked:
            return 1008, "the token is not valid any more"
        return (1001, "") if self._server.stopping.is_set() else (1000, "")

    async def _goes_on(self) -> bool:
        """Once a second the token is looked at again."""
        if self._server.stopping.is_set():
            return False
        if time.monotonic() - self._asked_s >= _ASK_S:
            self._asked_s = time.monotonic()
            self._revoked = not await self._server.auth.still(self._caller)
        return not self._revoked

    async def _follow(self, socket: WebSocket, leaving: asyncio.Task[None]) -> None:
        while not leaving.done() and await self._goes_on():
            # Asked before reading: what was written before the end is read after it.
            ended = self._server.plane.book.active(self._job.number) is None
            told = False
            if ended or await asyncio.to_thread(self._find):
                told = await self._tell(socket, ended)
            if ended and not told:
                job = await self._server.plane.job(self._job.id)
                if job.ended:
                    await socket.send_text(msgspec.json.encode({"end": job.phase}).decode())
                    return
            if not told:
                await asyncio.wait([leaving], timeout=_LOOK_S)

    def _find(self) -> bool:
        """Open new logs; whether there is anything to read. In a thread."""
        names = self._folder.workers() if self._only is None else [self._only]
        for name in names:
            if name not in self._open:
                with contextlib.suppress(StrettoError):
                    fd = self._open[name] = self._folder.open(name)
                    early = self._first and self._tail is not None
                    self._next[name] = logs.tail_offset(fd, self._tail or 0) if early else 0
        self._first = False
        return any(os.fstat(fd).st_size != self._next[name] for name, fd in self._open.items())

    async def _tell(self, socket: WebSocket, final: bool) -> bool:
        """One chunk of everybody; whether there was any."""
        if final:
            await asyncio.to_thread(self._find)
        told = False
        for name, fd in self._open.items():
            if os.fstat(fd).st_size < self._next[name]:
                # A file system without holes: it was begun anew.
                self._next[name] = 0
            text = await asyncio.to_thread(logs.read, fd, self._next[name], _CHUNK, final=final)
            self._next[name] = text.next
            if text.text:
                told = True
                message = {"worker": name, "offset": text.offset, "text": text.text}
                # Who does not read for so long is not there.
                async with asyncio.timeout(_STALLED_S):
                    await socket.send_text(msgspec.json.encode(message).decode())
        return told


def _is_a_name(folder: logs.LogFolder, worker: str) -> None:
    """The log itself may come later."""
    with contextlib.suppress(NotFound):
        os.close(folder.open(worker))


async def _gone(socket: WebSocket) -> None:
    """Until the listener hangs up; whatever it says is not for us."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


def _folder(server: Parts, job: Job) -> logs.LogFolder:
    """Of the workers that it ever had, whatever else it has put there."""

    def known(name: str) -> bool:
        active = server.plane.book.active(job.number)
        launches = (job if active is None else active.job).launches
        return name in HELPERS or (name[0] == "w" and name[1:].isdecimal() and int(name[1:]) < launches)

    return logs.LogFolder(server.plane.folder, server.plane.logs(job), known)


def _read(
    folder: logs.LogFolder, worker: str, tail: int | None, offset: int | None, limit: int, ended: bool
) -> logs.Text:
    fd = folder.open(worker)
    try:
        if offset is None:
            offset = logs.end_offset(fd, limit)
            if tail is not None:
                offset = max(offset, logs.tail_offset(fd, tail))
        return logs.read(fd, offset, limit, final=ended)
    finally:
        os.close(fd)


def _read_all(folder: logs.LogFolder, tail: int | None, limit: int) -> bytes:
    """All workers one after the other; together no more than the limit."""
    names = folder.workers()
    parts: list[str] = []
    for name in names:
        with contextlib.suppress(NotFound):
            text = _read(folder, name, tail, None, max(1, limit // len(names)), True).text
            parts.append(f"==> {name} <==\n{text}" if len(names) > 1 else text)
    return "\n".join(parts).encode()


def _page(folder: logs.LogFolder, worker: str | None, tail: int | None, cursor: str | None, limit: int) -> LogPage:
    """One worker after the other, from where the page before ended, as far as the limit goes."""
    names = folder.workers() if worker is None else [worker]
    begun, rest = _position(cursor, names)
    parts: list[str] = []
    for name in names[names.index(begun) :] if begun else names:
        try:
            text, end = _part(folder, name, tail, rest if name == begun else None, max(limit, _LONGEST_CHARACTER))
        except NotFound:
            if worker is not None:
                raise
            continue
        if name != begun and len(names) > 1:
            parts.append(f"==> {name} <==\n" if name == names[0] else f"\n==> {name} <==\n")
        parts.append(text.text)
        if text.next < end:
            return LogPage("".join(parts), f"{name}:{text.next}:{end}")
        limit -= text.next - text.offset
    return LogPage("".join(parts), None)


def _part(
    folder: logs.LogFolder, worker: str, tail: int | None, rest: tuple[int, int] | None, limit: int
) -> tuple[logs.Text, int]:
    """And where it ended when its first part was read: who writes faster than it is read would be read for ever."""
    fd = folder.open(worker)
    try:
        size = os.fstat(fd).st_size
        offset, end = rest or (0 if tail is None else logs.tail_offset(fd, tail), size)
        return logs.read(fd, offset, limit, final=True), min(end, size)
    finally:
        os.close(fd)


def _position(cursor: str | None, names: list[str]) -> tuple[str, tuple[int, int]]:
    """Whose log is read in part, from which byte on, and where it ends."""
    if cursor is None:
        return "", (0, 0)
    name, _, rest = cursor.partition(":")
    offset, _, end = rest.partition(":")
    if name not in names:
        raise UsageError(f"cursor: {cursor!r} is not one of ours", hint="use what an earlier answer said")
    return name, (min(number(offset, "cursor"), _FARTHEST), number(end, "cursor"))
