"""A server on this machine by its Unix socket (`unix:/PATH`): there the kernel tells it who asks, and no token is
needed."""

from __future__ import annotations

import http.client
import os
import socket

_SCHEME = "unix:"
URL = "http://localhost"
"""What is spoken there, and with whom."""


def address(url: str) -> str:
    """Such an address, as it is kept; empty for any other."""
    path = url.removeprefix(_SCHEME)
    if path == url or not path or not path.isprintable():
        return ""
    return _SCHEME + os.path.abspath(f"/{path.lstrip('/')}" if path.startswith("/") else path)


def path_in(url: str) -> str:
    """Of the socket; empty for addresses of other kinds."""
    return url.removeprefix(_SCHEME) if url.startswith(_SCHEME) else ""


class Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(self.timeout)
            self.sock.connect(self._path)
        except BaseException:
            self.close()
            raise
