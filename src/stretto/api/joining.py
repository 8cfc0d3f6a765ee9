"""Where workers meet their coordinator: a WebSocket of ours, as `stretto.control.coordination` wants it.

No token is asked for: a worker proves that it knows its job's secret, which nobody else has, before anything else that
it says is read (`stretto.control.admission`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from stretto.api.parts import parts_of
from stretto.api.websockets import connection_of

router = APIRouter()

_LAST_WORD_S = 2.0


@router.websocket("/v1/jobs/{job}/join")
async def join(websocket: WebSocket, job: str) -> None:
    await websocket.accept()
    socket = WorkerSocket(websocket)
    try:
        await parts_of(websocket).plane.join(job, socket)
    except ConnectionError:
        return
    finally:
        await socket.finish()


class WorkerSocket:
    """`stretto.control.coordination.Socket`. What is closed raises `ConnectionError`, or ends the iteration."""

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket, self._connection = websocket, connection_of(websocket.scope)

    def widen(self, most_bytes: int) -> None:
        """From now on messages may be so long."""
        if self._connection is not None:
            self._connection.widen(most_bytes)

    async def finish(self) -> None:
        """Hang up; whoever does not read what it is told has had its time."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self.close()
        except (ConnectionError, TimeoutError):
            if self._connection is not None:
                self._connection.hang_up()

    async def __aiter__(self) -> AsyncIterator[str | bytes]:
        while self._websocket.client_state is not WebSocketState.DISCONNECTED:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            text: str | bytes | None = message.get("text")
            yield message["bytes"] if text is None else text

    async def send(self, message: str) -> None:
        self._check()
        try:
            await self._websocket.send_text(message)
        except (WebSocketDisconnect, RuntimeError, OSError) as error:
            raise ConnectionError("the worker has hung up") from error

    async def close(self, code: int = 1000, reason: str = "") -> None:
        if self._websocket.application_state is not WebSocketState.CONNECTED:
            return
        try:
            await self._websocket.close(code, reason)
        except (WebSocketDisconnect, RuntimeError, OSError) as error:
            raise ConnectionError("the worker has hung up") from error

    def _check(self) -> None:
        states = self._websocket.client_state, self._websocket.application_state
        if WebSocketState.DISCONNECTED in states:
            raise ConnectionError("the connection is closed")
