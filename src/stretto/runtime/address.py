"""The address of a network interface, for workers that should talk over another one than usual."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915


class NoAddress(Exception):
    """There is no such interface, or it has no IPv4 address."""


def of_interface(name: str) -> str:
    """Its IPv4 address."""
    known = ", ".join(sorted(each for _, each in socket.if_nameindex()))
    if name not in known.split(", "):
        raise NoAddress(f"there is no network interface {name!r} here; there are {known}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            raise NoAddress(f"the network interface {name!r} has no IPv4 address") from None
    return socket.inet_ntoa(answer[20:24])
