"""For whom a request was meant, and from where it came: `Host` and `Origin`.

A page of somebody else's that a browser shows can ask a server on the same machine or network: by a name of its own
that it lets point there (DNS rebinding), or openly. Therefore a request is answered only under a name that this server
has, and nothing is changed, and no WebSocket opened, on behalf of another page. Addresses written as numbers are no
names: nobody can let them point elsewhere.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from stretto.api import problems
from stretto.api.problems import Misdirected
from stretto.errors import Denied, UsageError

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_READING = {"GET", "HEAD", "OPTIONS"}


class Hosts(msgspec.Struct, frozen=True):
    """The names of a server that listens at an address: those it was given, its own, and every number of this machine's
    that reaches it."""

    listens: str
    """An address; 0.0.0.0 or :: is any."""
    allowed: frozenset[str] = frozenset()

    def knows(self, host: str) -> bool:
        """Of a `Host` header, with or without a port: whoever forwards ports has another one."""
        if not _HOST.fullmatch(host):
            return False
        name = host[1 : host.index("]")] if host.startswith("[") else host.partition(":")[0]
        name = name.lower().rstrip(".")
        if name in self.allowed:
            return True
        listens = ipaddress.ip_address(self.listens)
        try:
            asked = ipaddress.ip_address(name)
        except ValueError:
            own = name == "localhost" or name.endswith(".localhost")
            return own if listens.is_loopback else own or name in _names()
        return asked == listens or listens.is_unspecified or (asked.is_loopback and listens.is_loopback)


class Checked:
    """The application behind that check."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        error = self._wrong(scope, Headers(scope=scope))
        if error is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await problems.response(error)(scope, receive, send)
        else:
            await WebSocket(scope, receive, send).send_denial_response(problems.response(error))

    def _wrong(self, scope: Scope, headers: Headers) -> Misdirected | Denied | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts.knows(hosts[0]):
            return Misdirected(
                f"this server is not called {', '.join(hosts) or 'nothing'!r}",
                hint="use its address; `--allow-host NAME` at its start makes a name known to it",
            )
        origin = headers.get("origin")
        harmless = scope["type"] == "http" and scope["method"] in _READING
        if origin is None or harmless or _same(origin, hosts[0]):
            return None
        return Denied(f"a page of {origin} may not do that", hint="only pages of this server's own may")


def names(given: Iterable[str]) -> frozenset[str]:
    """Names that were allowed, checked."""
    found = frozenset(name.strip().lower().rstrip(".") for name in given)
    for name in found:
        if not _HOST.fullmatch(name) or ":" in name:
            raise UsageError(f"{name!r} is not the name of a host", hint="give it without scheme, port and path")
    return found


def _same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _names() -> frozenset[str]:
    """What this machine calls itself. Nobody is asked, who might answer late."""
    own = socket.gethostname().lower()
    return frozenset({own, own.partition(".")[0]})
