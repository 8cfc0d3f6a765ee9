"""The network of the pods: one bridge on this machine, on which every node of a test bed hangs its pods.

All pods, all nodes and the machine itself are neighbours on one wire, so everybody reaches everybody and nothing of the
machine's routing or forwarding is changed. The addresses of a network are one block of 10.244.0.0/16:

    .0.1          the machine, as pods see it (`address`)
    .0.10 …       the nodes (kubelets listen there)
    .1.0/24 …     the pods of the first node, of the second, …
    .15.0/24      Services; the first of them is the API server's when it is asked to serve pods

There is no kube-proxy: of all Services only `kubernetes` can be reached, because the API server listens at its address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple

from stretto.errors import Unavailable
from stretto.testing.kubernetes.guard import Guard
from stretto.testing.kubernetes.processes import run

RANGE = ipaddress.ip_network("10.244.0.0/16")
BLOCK_BITS = 20
NODES = 14
_LOCKED = "/sys/class/net"


class Seat(NamedTuple):
    """What one node has of the network."""

    address: str
    """Of the node itself."""
    first_pod: str
    last_pod: str


class PodNetwork:
    """A bridge with a block of addresses that nobody else on the machine uses."""

    def __init__(self) -> None:
        need_root("a network for pods")
        self.bridge = f"st{secrets.token_hex(5)}"
        self._guard = Guard()
        self._seats = 0
        try:
            with _alone():
                self.block = _free_block()
                run("ip", "link", "add", self.bridge, "type", "bridge")
                self._guard.command("ip", "link", "delete", self.bridge)
                for address in (f"{self.address}/{BLOCK_BITS}", f"{self.api_address}/32"):
                    run("ip", "address", "add", address, "dev", self.bridge)
                run("ip", "link", "set", self.bridge, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PodNetwork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._guard.close()

    @property
    def address(self) -> str:
        """The machine's, as pods see it."""
        return self._at(0, 1)

    @property
    def services(self) -> str:
        return f"{self._at(15, 0)}/24"

    @property
    def api_address(self) -> str:
        """Of the Service `kubernetes`: the first of the range."""
        return self._at(15, 1)

    def seat(self) -> Seat:
        """For one more node."""
        if self._seats == NODES:
            raise Unavailable(f"a pod network has room for {NODES} nodes")
        self._seats += 1
        seat = Seat(self._at(0, 9 + self._seats), self._at(self._seats, 1), self._at(self._seats, 254))
        run("ip", "address", "add", f"{seat.address}/32", "dev", self.bridge)
        return seat

    def _at(self, third: int, fourth: int) -> str:
        return str(self.block.network_address + 256 * third + fourth)


def need_root(what: str) -> None:
    if os.geteuid() != 0:
        raise Unavailable(f"{what} can only be made by root")
    if shutil.which("ip") is None:
        raise Unavailable(f"{what} is made with the program `ip`, not found here", hint="apt-get install iproute2")


@contextmanager
def _alone() -> Iterator[None]:
    """Two test runs must not find the same block free: the machine's list of links is the lock."""
    lock = os.open(_LOCKED, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _free_block() -> ipaddress.IPv4Network:
    links = json.loads(run("ip", "-json", "-4", "address", "show"))
    taken = [ipaddress.ip_address(address["local"]) for link in links for address in link["addr_info"]]
    for block in RANGE.subnets(new_prefix=BLOCK_BITS):
        if isinstance(block, ipaddress.IPv4Network) and not any(address in block for address in taken):
            return block
    raise Unavailable(f"every block of {RANGE} is in use on this machine")
