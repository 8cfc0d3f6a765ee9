"""uvicorn's WebSockets with bounds of ours: nobody who has proved nothing can make the server work, or keep, much.

Messages are short until the application says otherwise (`widen`); little is read at a time, so that one connection full
of small frames does not keep the others waiting; whoever sends pings and reads no answers, or cuts a message into
endless pieces, is hung up on; and what is no text costs a closed connection, not a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from stretto.runtime import bounds

EXTENSION = "stretto.websocket"
"""In the scope: the connection itself."""
_READ_BYTES = 2**12
_MOST_UNREAD_BYTES = 2**17
_MOST_PIECES = 64
_CLOSE_S = 2.0
"""So long it is waited for the other end's word that it has understood that we hang up."""
_TOO_LONG, _NOT_TEXT = 1009, 1007


class BoundedWebSocket(WebSocketsSansIOProtocol):
    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.close_timeout = _CLOSE_S
        if hasattr(transport, "max_size"):
            transport.max_size = _READ_BYTES

    def widen(self, most_bytes: int) -> None:
        """Messages may be so long from now on."""
        bounds.widen(self.conn, most_bytes)

    def hang_up(self) -> None:
        """At once, whatever the other end has not read yet."""
        self.transport.abort()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            extensions: Any = self.scope["extensions"]
            extensions[EXTENSION] = self

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES:
            self.hang_up()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MOST_PIECES:
            self._fail(_TOO_LONG)
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._fail(_NOT_TEXT)
                return
        super().send_receive_event_to_app()

    def _fail(self, code: int) -> None:
        self.frames = []
        if not self.close_sent:
            self.conn.send_close(code)
            self.handle_parser_exception()


def connection_of(scope: Mapping[str, Any]) -> BoundedWebSocket | None:
    """What an application was called for; None under another server than ours."""
    found: BoundedWebSocket | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found
