"""Clients that take their time, and too many of them: they are hung up on, and others are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from fastapi import FastAPI, Request, Response, WebSocket
from msgspec.structs import replace
from starlette.responses import StreamingResponse
from websockets.asyncio.client import connect

from stretto.api import bounds, problems
from stretto.api.bounds import Limits
from stretto.api.serving import HttpServer, bind

PATIENCE_S = 30.0
GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
LONG = Limits(header_s=600, part_s=600, body_s=600, write_s=600)


class Peer(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def says(self, words: bytes) -> None:
        self.writer.write(words)
        await self.writer.drain()

    async def hears(self) -> bytes:
        """One answer's head and body, or nothing when it was hung up on."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await self.reader.readexactly(length)

    async def is_gone(self) -> bool:
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True


class World(NamedTuple):
    port: int
    release: asyncio.Event

    @asynccontextmanager
    async def peer(self, says: bytes = b"") -> AsyncIterator[Peer]:
        made = Peer(*await asyncio.open_connection("127.0.0.1", self.port))
        try:
            await made.says(says)
            yield made
        finally:
            made.writer.transport.abort()


def application(release: asyncio.Event) -> FastAPI:
    app = FastAPI()
    problems.install(app)
    app.state.parts = SimpleNamespace(stop=release.set)

    @app.get("/hello")
    async def hello() -> Response:
        return Response("hello")

    @app.get("/wait")
    async def wait() -> Response:
        await release.wait()
        return Response("waited")

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.get("/stream")
    async def stream(request: Request) -> Response:
        bounds.begin_stream(request.scope)

        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            await release.wait()

        return StreamingResponse(parts(), headers={"content-length": "5"})

    @app.get("/flood")
    async def flood() -> Response:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 2**16
                    await asyncio.sleep(0)
            finally:
                release.set()

        return StreamingResponse(parts())

    @app.websocket("/socket")
    async def socket(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("begun")
        await websocket.receive()

    return app


def play(limits: Limits, story: Callable[[World], Awaitable[None]]) -> None:
    async def played() -> None:
        release = asyncio.Event()
        with bind("127.0.0.1", 0) as listening:
            server = HttpServer(application(release), listening, limits)
            await server.start()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await story(World(listening.getsockname()[1], release))
            finally:
                await server.stop()

    asyncio.run(played())


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (Limits(header_s=0.2), b""),
        (Limits(header_s=0.2), b"GET /hello HTTP/1.1\r\n"),
        (Limits(header_s=0.2), GET + b"GET /hello HTTP/1.1\r\nHos"),
        (Limits(part_s=0.2), POST + b"half"),
        (Limits(body_s=0.2), POST + b"half"),
        (Limits(write_s=0.2), b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n"),
    ],
    ids=["nothing", "half a head", "half a second head", "half a body", "a slow body", "does not read"],
)
def test_who_takes_too_long_is_hung_up_on(limits: Limits, said: bytes) -> None:
    async def story(world: World) -> None:
        async with world.peer(said) as slow:
            if b"flood" in said:
                await world.release.wait()
                return
            if said.startswith(GET):
                assert (await slow.hears()).endswith(b"hello")
            heard = await slow.hears()
            assert heard.startswith(b"HTTP/1.1 408") == bool(said)
            assert await slow.is_gone()

    play(limits, story)


def test_a_body_that_trickles_has_an_end() -> None:
    async def story(world: World) -> None:
        async with world.peer(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n") as slow:
            hearing = asyncio.create_task(slow.hears())
            while not hearing.done():
                slow.writer.write(b"x")
                await asyncio.sleep(0.01)
            assert hearing.result().startswith(b"HTTP/1.1 408")

    play(Limits(body_s=0.5), story)


def test_who_is_quick_enough_is_answered_though_it_lasts() -> None:
    """Neither a long answer nor a pause between two requests counts as slow."""

    async def story(world: World) -> None:
        async with world.peer(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n") as patient, world.peer(GET) as idle:
            assert (await idle.hears()).endswith(b"hello")
            async with world.peer() as slow:
                assert await slow.is_gone()
            world.release.set()
            assert (await patient.hears()).endswith(b"waited")
            await idle.says(POST + b"0123456789")
            assert (await idle.hears()).endswith(b"0123456789")

    play(Limits(header_s=0.2, part_s=0.2, body_s=0.2), story)


def test_half_open_requests_lock_nobody_out() -> None:
    async def story(world: World) -> None:
        half = [await asyncio.open_connection("127.0.0.1", world.port) for _ in range(12)]
        for _, writer in half:
            writer.write(b"GET /hello HTTP/1.1\r\n")
        for _ in range(20):
            async with world.peer(GET) as honest:
                assert (await honest.hears()).endswith(b"hello")
        for _, writer in half:
            writer.transport.abort()

    play(replace(LONG, connections=8), story)


def test_when_all_are_being_answered_one_more_is_told_so() -> None:
    async def story(world: World) -> None:
        wait = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
        async with world.peer(wait) as one, world.peer(wait) as two:
            while True:
                async with world.peer(GET) as more:
                    heard = await more.hears()
                if heard.startswith(b"HTTP/1.1 503"):
                    break
            assert b"retry-after" in heard
            world.release.set()
            assert (await one.hears()).endswith(b"waited")
            assert (await two.hears()).endswith(b"waited")
        while not heard.endswith(b"hello"):
            async with world.peer(GET) as more:
                heard = await more.hears()

    play(replace(LONG, connections=2), story)


def test_streams_are_counted_apart() -> None:
    async def story(world: World) -> None:
        stream = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
        url = f"ws://127.0.0.1:{world.port}/socket"
        async with world.peer(stream) as one, connect(url) as two:
            assert (await one.hears()).endswith(b"begun")
            assert await two.recv() == "begun"
            async with world.peer(GET) as honest:
                assert (await honest.hears()).endswith(b"hello")
            async with world.peer(stream) as more:
                assert (await more.hears()).startswith(b"HTTP/1.1 503")
        while True:
            # Their places are free once the server has seen that they are gone.
            async with world.peer(stream) as more:
                if (await more.hears()).startswith(b"HTTP/1.1 200"):
                    return

    play(replace(LONG, connections=1, streams=2), story)


def test_one_address_does_not_take_all_places() -> None:
    """On this machine everybody has the same one, therefore only others are counted by it."""
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        assert bounds.counted_as(host) == ""
    for host in ("10.1.2.3", "::ffff:10.1.2.3"):
        assert bounds.counted_as(host) == "10.1.2.3"
