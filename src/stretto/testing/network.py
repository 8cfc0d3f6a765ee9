"""Machines of their own for the processes of a job: network namespaces around a bridge, whose links can be cut.

Every name is a place with an address of its own; it is made when it is first asked for. What is cut is silent, as on a
real network: packets vanish, nobody gets an error, connections only hang.

    with Network() as network, Harness(folder, command, workers=3, network=network) as job:
        job.wait_members(3)
        network.cut("w1")  # from everybody
        network.cut_between("w0", "w2")
        network.heal()

The namespaces have no names: they are descriptors of this process, and the kernel takes them down with the last of
these and the last process inside, however this process ends. It needs root, or CAP_SYS_ADMIN and CAP_NET_ADMIN.

As a program it runs another one in such a place, also as a fork of a warm interpreter:

    python -m stretto.testing.network /proc/PID/fd/N (SCRIPT | -m MODULE) [ARGUMENT …]
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import TracebackType

_NEW_NETWORK = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
_TOOLS = ("ip", "tc", "nsenter")
_NOWHERE = "02:00:00:00:ff:ff"
"""The hardware address of nobody."""


class NetworkUnavailable(Exception):
    """No network can be made here; says why."""


class Network:
    """Places that can talk to each other until somebody cuts them off."""

    def __init__(self, lanes: int = 1) -> None:
        """`lanes`: how many links every place has, eth0, eth1 and so on, each to a bridge of its own."""
        missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
        if missing:
            raise NetworkUnavailable(f"network namespaces are made with {', '.join(missing)}, not found here")
        self._places: dict[str, _Place] = {}
        self._cut: set[str] = set()
        self._blocked: set[tuple[str, str]] = set()
        self._bridge = _namespace()
        self._lanes = range(lanes)
        for lane in self._lanes:
            self._ip(self._bridge, f"link add bridge{lane} type bridge", f"link set bridge{lane} up")

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take everything down; processes inside keep their place until they end, but are alone there."""
        for namespace in (self._bridge, *(place.namespace for place in self._places.values())):
            os.close(namespace)
        self._places.clear()

    def host(self, name: str) -> str:
        """The address of a place."""
        return self._place(name).host

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """A command of the Python interpreter, to be run in that place."""
        python, *rest = command
        return [python, "-m", "stretto.testing.network", _path(self._place(name).namespace), *rest]

    # What can go wrong with it.

    def cut(self, name: str) -> None:
        """Nothing gets into that place or out of it."""
        place = self._place(name)
        self._ip(self._bridge, *(f"link set {place.port(lane)} nomaster" for lane in self._lanes))
        self._cut.add(name)

    def cut_between(self, one: str, other: str) -> None:
        """These two cannot talk to each other over eth0, but to everybody else."""
        self.cut_towards(one, other)
        self.cut_towards(other, one)

    def cut_towards(self, source: str, target: str) -> None:
        """What `source` sends to `target` over eth0 is lost; what comes back arrives."""
        self._ip(self._place(source).namespace, f"neigh replace {self.host(target)} lladdr {_NOWHERE} dev eth0")
        self._blocked.add((source, target))

    def slow(self, name: str, kbit_s: int) -> None:
        """So little gets into that place over eth0, and out of it as little."""
        place = self._place(name)
        for namespace, device in ((self._bridge, place.port(0)), (place.namespace, "eth0")):
            limit = f"rate {kbit_s}kbit burst 2000 latency 2s"
            self._run(namespace, ["tc", *f"qdisc replace dev {device} root tbf {limit}".split()])

    def heal(self) -> None:
        """Everybody can talk to everybody again; what was slow stays slow."""
        for name in self._cut:
            place = self._place(name)
            self._ip(self._bridge, *(f"link set {place.port(lane)} master bridge{lane}" for lane in self._lanes))
        for source, target in self._blocked:
            self._ip(self._place(source).namespace, f"neigh del {self.host(target)} dev eth0")
        self._cut.clear()
        self._blocked.clear()

    # How it is made.

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            self._places[name] = place = _Place(len(self._places) + 1)
            self._ip(place.namespace, "link set lo up")
            for lane in self._lanes:
                self._link(place, lane)
        return self._places[name]

    def _link(self, place: _Place, lane: int) -> None:
        port, device = place.port(lane), f"eth{lane}"
        self._ip(
            self._bridge,
            f"link add {port} type veth peer name {device} netns {_path(place.namespace)}",
            f"link set {port} master bridge{lane} up",
        )
        self._ip(place.namespace, f"address add {place.address(lane)}/24 dev {device}", f"link set {device} up")

    def _ip(self, namespace: int, *commands: str) -> None:
        self._run(namespace, ["ip", "-batch", "-"], "\n".join(commands))

    def _run(self, namespace: int, command: Sequence[str], text: str = "") -> None:
        entered = ["nsenter", f"--net={_path(namespace)}", *command]
        done = subprocess.run(entered, input=text, text=True, capture_output=True, timeout=10)
        if done.returncode:
            raise NetworkUnavailable(f"{' '.join(command)} {text!r}: {done.stderr.strip()}")


class _Place:
    """One namespace with a link to each bridge."""

    def __init__(self, number: int) -> None:
        self.namespace = _namespace()
        self._number = number

    def port(self, lane: int) -> str:
        """The bridge's end of the link."""
        return f"port{lane}-{self._number}"

    def address(self, lane: int) -> str:
        return f"10.77.{lane}.{self._number}"

    @property
    def host(self) -> str:
        return self.address(0)


def _namespace() -> int:
    """A new namespace, as a descriptor that keeps it. Made by a thread, because whoever makes one is in it then."""
    found: list[int] = []

    def make() -> None:
        if _libc.unshare(_NEW_NETWORK) == 0:
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
        else:
            found.append(-ctypes.get_errno())

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if found[0] < 0:
        raise NetworkUnavailable(f"a network namespace cannot be made: {os.strerror(-found[0])} (it needs root)")
    return found[0]


def _path(namespace: int) -> str:
    return f"/proc/{os.getpid()}/fd/{namespace}"


def main(arguments: Sequence[str]) -> None:
    """Go to a place, and be the program there."""
    path, program, *rest = arguments
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if _libc.setns(namespace, _NEW_NETWORK):
        sys.exit(f"{path}: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)
    if program == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(program))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
