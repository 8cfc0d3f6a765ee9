"""The API server over plain HTTP/1.1: what a thousand played nodes need, at a fraction of a general client's cost.

Requests share a few connections; a watch has one of its own. Bodies come and go as bytes: the caller decodes what it
needs of them. It is not the controller's own client on purpose: who plays the nodes and counts what became of the jobs
must not share its mistakes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import msgspec
import yaml

from stretto.errors import StrettoError

MERGE_PATCH = "application/merge-patch+json"
_BLOCK_BYTES = 1 << 16


class ApiError(StrettoError):
    """The API server refused; `status` is the HTTP status."""

    code = "kubernetes-api"
    exit_code = 8

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Access(NamedTuple):
    """Where the API server is, and who asks."""

    host: str
    port: int
    context: ssl.SSLContext
    authorization: str

    @classmethod
    def of(cls, kubeconfig: Path) -> Access:
        """The current context of a kubeconfig, whose user has a token or a certificate."""
        content = yaml.safe_load(kubeconfig.read_text())
        chosen = _named(content["contexts"], content["current-context"])["context"]
        cluster = _named(content["clusters"], chosen["cluster"])["cluster"]
        user = _named(content["users"], chosen["user"])["user"]
        context = ssl.create_default_context(cafile=cluster.get("certificate-authority"))
        if data := cluster.get("certificate-authority-data"):
            context.load_verify_locations(cadata=base64.b64decode(data).decode())
        if certificate := user.get("client-certificate"):
            context.load_cert_chain(certificate, user["client-key"])
        url = urlsplit(cluster["server"])
        token = user.get("token")
        return cls(url.hostname or "", url.port or 443, context, f"Bearer {token}" if token else "")


class KubeHttp:
    """Requests to one API server; at most so many at once."""

    def __init__(self, access: Access, connections: int = 16) -> None:
        self._access = access
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._turn = asyncio.Semaphore(connections)

    async def close(self) -> None:
        for connection in list(self._open):
            await self._drop(connection)

    async def request(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> bytes:
        """The body of the answer; an answer of 400 or more is an `ApiError`, a broken connection an `OSError`."""
        encoded = msgspec.json.encode(body) if body is not None else b""
        async with self._turn:
            status, answer = await self._ask(method, path, encoded, kind)
        if status >= 400:
            raise ApiError(status, f"{method} {path}: {status} {answer[:500].decode(errors='replace')}")
        return answer

    @asynccontextmanager
    async def lines(self, path: str) -> AsyncIterator[AsyncIterator[bytes]]:
        """A watch: its events, one line each, until the server ends it."""
        connection = await self._connect()
        try:
            status = await connection.ask("GET", path, b"", "")
            if status >= 400:
                raise ApiError(status, f"GET {path}: {status}")
            yield _lines(connection.blocks())
        finally:
            await self._drop(connection)

    async def _ask(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        while True:
            fresh = not self._idle
            used = await self._connect() if fresh else self._idle.pop()
            try:
                status = await used.ask(method, path, body, kind)
                answer = b"".join([block async for block in used.blocks()])
            except BaseException as error:
                await self._drop(used)
                if fresh or not isinstance(error, OSError):
                    raise
                continue  # The server may have ended a connection that nobody used.
            if used.over:
                await self._drop(used)
            else:
                self._idle.append(used)
            return status, answer

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(
            self._access.host, self._access.port, ssl=self._access.context, limit=1 << 20
        )
        connection = _Connection(reader, writer, self._access)
        self._open.add(connection)
        return connection

    async def _drop(self, connection: _Connection) -> None:
        self._open.discard(connection)
        await connection.close()


class _Connection:
    """One request at a time; httptools calls back the methods whose names begin with `on_`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, access: Access) -> None:
        self._reader, self._writer = reader, writer
        self._fixed = f"Host: {access.host}:{access.port}\r\nAccept: application/json\r\n"
        if access.authorization:
            self._fixed += f"Authorization: {access.authorization}\r\n"
        self.over = False
        """The server takes no further request on it."""

    async def ask(self, method: str, path: str, body: bytes, kind: str) -> int:
        self._headed = self._complete = False
        self._blocks: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        length = f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{self._fixed}{length}\r\n".encode() + body)
        while not self._headed:
            await self._feed()
        return int(self._parser.get_status_code())

    async def blocks(self) -> AsyncIterator[bytes]:
        while True:
            while self._blocks:
                yield self._blocks.pop(0)
            if self._complete:
                return
            await self._feed()

    async def _feed(self) -> None:
        data = await self._reader.read(_BLOCK_BYTES)
        if not data:
            raise ConnectionResetError("the API server closed the connection")
        self._parser.feed_data(data)

    def on_headers_complete(self) -> None:
        self._headed = True

    def on_body(self, block: bytes) -> None:
        self._blocks.append(block)

    def on_message_complete(self) -> None:
        self._complete = True
        self.over = not self._parser.should_keep_alive()

    async def close(self) -> None:
        """At once: nobody waits for the server's good-bye."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def _lines(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for block in blocks:
        *whole, rest = (rest + block).split(b"\n")
        for line in whole:
            yield line


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)
