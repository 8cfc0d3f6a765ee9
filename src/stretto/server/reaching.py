"""Which addresses the server may be sent to by a job file: the public ones, and those that an admin has named.

A job's `notify` is an address of its submitter's choice, and the server stands where they may not: beside services that
trust this machine or its network, and beside the metadata of a cloud. What counts is the address that is connected to:
a name is looked up here, once, and that answer is used. Ways to write one address inside another are seen through.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable
from typing import TypeAlias

from stretto.errors import Denied, UsageError

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Reach:
    def __init__(self, allowed: Iterable[str] = ()) -> None:
        """`allowed`: networks and addresses beside the public ones."""
        self._allowed = tuple(map(_network, allowed))

    async def find(self, host: str, port: int) -> str:
        """The address behind a name, or `Denied`; `OSError` when there is none."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for *_, place in found:
            address = ipaddress.ip_address(str(place[0]).partition("%")[0])
            if self.allows(address):
                return str(address)
        raise Denied(
            f"{host} is an address of this machine or of a private network",
            hint="give a public one; `stretto up --notify-to NETWORK` allows others",
        )

    def allows(self, address: Address) -> bool:
        """Of an address that holds another one, both."""
        inner = _inner(address)
        if any(each.version == network.version and each in network for network in self._allowed for each in inner):
            return True
        return all(each.is_global and not each.is_multicast and not _is_local(each) for each in inner)


def _inner(address: Address) -> list[Address]:
    """It, and the one that a translator on the way makes of it."""
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    teredo = address.teredo or ()
    found = [one for one in (address.sixtofour, *teredo) if one is not None]
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return [address, *found]


def _is_local(address: Address) -> bool:
    return isinstance(address, ipaddress.IPv6Address) and address.is_site_local


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text.strip(), strict=False)
    except ValueError:
        raise UsageError(f"{text!r} is no network", hint="write 10.1.0.0/16, or an address such as 10.1.2.3") from None
