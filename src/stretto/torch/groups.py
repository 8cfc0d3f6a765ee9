"""The workers of one generation, connected: collectives that can be abandoned at any moment.

Every worker hosts a rendezvous `Store`; a generation meets at the one of its leader, under a prefix of its own, so the
same stores serve one generation after another. A `Group` is built for one generation and thrown away with it: forming
one takes milliseconds, and may run in a background thread while the main thread trains in another group (connecting
releases the interpreter lock).

A dead peer closes its sockets and every collective with it fails at once. One behind a broken link says nothing: the
kernel gives a connection up after `LINK_S` without an acknowledgement; and before a group is formed each member knocks
at all the others, so that it is known who cannot reach whom. A frozen one says nothing either, but its kernel does, and
Gloo then neither gives up nor lets go. `Group.abort` ends that from any thread by shutting the group's sockets down. It
finds them by their addresses: each member listens on a port of its own per group, and all members publish theirs in the
store before they connect, so that a socket of this group has one of those addresses at one of its ends, and no other
socket of the process has. What it looks at and shuts down is a duplicate of the descriptor, so that a number that was
closed and given to somebody else in the meantime cannot be hit.

Whatever the framework raises comes out as `GroupBroken`. The buffers of a collective that did not end well may still be
written to for a while: nobody may use them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from stretto.errors import StrettoError
from stretto.torch import background
from stretto.torch.rendezvous import Store, Visitor, unreachable

__all__ = ["Group", "GroupBroken", "Pending", "Store", "connect"]

COLLECTIVE_TIMEOUT_S = 24 * 3600.0
"""Collectives are ended by `abort`, on word from the coordinator; this is for when nobody is left to say so."""

LINK_S = 5.0
"""A link on which nothing is acknowledged for so long is broken; STRETTO_LINK_S says otherwise."""

_LOOK_UP = datetime.timedelta(milliseconds=50)
"""Gloo may lose the news that a connection has ended (it then waits for a send that nobody will finish): who waits
looks up this often whether the group is still whole."""

_LOOKS = 20
"""And at every so many of these, whether the others wait in the same."""

_DOOR_S = 1.0
"""Who waits for the others at the place where all connect once more looks up this often, too."""

CLOSING_S = 0.2

_opening = threading.Lock()
"""Held while a listening socket appears that is known by being new."""


class GroupBroken(StrettoError):
    """The group cannot be used any more, or could not be formed."""

    code = "group-broken"

    def __init__(self, cause: str, *, missing: tuple[int, ...] = ()) -> None:
        super().__init__(cause)
        self.cause = cause
        self.missing = missing
        """Ranks that were never heard of, where that is known."""


class OutOfStep(StrettoError):
    """Members wait for each other in collectives that do not belong together: their scripts do different things."""

    code = "out-of-step"

    def __init__(self, doing: str) -> None:
        super().__init__(
            f"the workers wait for each other in different exchanges (here: a {doing})",
            hint="let all workers do the same, whatever their samples are, and call backward() equally often: to put a "
            "batch through the model in parts, give batches() per_worker=, or add the losses up first",
        )


class Pending:
    """A collective under way. Its tensors belong to it until `wait` has returned."""

    __slots__ = ("_group", "_look_up", "_over", "_work")

    def __init__(self, group: Group, work: Any, look_up: Callable[[], None], over: Callable[[], None]) -> None:
        """Whoever waits for long calls `look_up` now and then; what it raises ends the wait. `over` is called at a good
        end."""
        self._group = group
        self._work = work
        self._look_up = look_up
        self._over = over

    def wait(self) -> None:
        """Return when the result is there (on a GPU: when the current stream will have it), or raise `GroupBroken`."""
        self._group.waits = True
        try:
            self._await()
        finally:
            self._group.waits = False

    def _await(self) -> None:
        work, self._work = self._work, None
        alarmed = False
        while True:
            completed = work.is_completed()
            try:
                work.wait(_LOOK_UP)
                self._over()
                return
            except Exception as error:
                if completed:
                    raise self._group.failure(error) from None
            if self._group.broken is not None:
                raise self._group.broken
            self._look_up()
            missed = not self._group.whole()
            if missed and alarmed and not work.is_completed():
                raise self._group.failure(GroupBroken("a peer has closed its connection"))
            # Not at once: a peer may leave after the collective, whose end may just not have been noticed here.
            alarmed = missed


class _OnStream:
    """Work of NCCL, which need not be waited for on this side."""

    __slots__ = ("_work",)

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return True

    def wait(self, _: datetime.timedelta) -> None:
        self._work.wait()


class Group:
    """The members of one generation: `connect` first, `close` last, `abort` at any time and from any thread."""

    def __init__(
        self,
        generation: int,
        rank: int,
        addresses: Sequence[str],
        device: torch.device | str = "cpu",
        secret: str = "",
    ) -> None:
        """`secret`: the job's, by which the members know each other."""
        self.generation = generation
        self.secret = secret
        self.rank = rank
        self.size = len(addresses)
        self.addresses = tuple(addresses)
        """Of the members' stores, by rank; the group itself listens on the same hosts."""
        self.device = torch.device(device)
        self.backend = "gloo"
        """What carries tensors of this device: `nccl` where every member has a GPU of its own."""
        self.broken: GroupBroken | None = None
        self.waits = False
        """Whether this member waits for the others. Of any thread."""
        self._waited = self._exchanged = 0
        """Collectives of this member that are over, here and beside: all members have the same in the same order."""
        self._said = ""
        self._doing = ""
        """The collective that was begun last, in words that are equal on all members."""
        self._looks = 0
        self._gloo: Any = None
        self._beside: Any = None
        self._nccl: Any = None
        self._device: Any = None
        self._listening: tuple[str, int] | None = None
        self._peers: frozenset[tuple[str, int]] = frozenset()
        self._visitor: Visitor | None = None
        self._side_visitor: Visitor | None = None
        self.link_s = float(os.environ.get("STRETTO_LINK_S", LINK_S))
        self._attached: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._news = threading.Event()
        """Connected, or broken."""
        self._attempted = threading.Event()
        self._forgotten = False

    def connect(self, timeout_s: float) -> None:
        """Meet the others. Raises `GroupBroken` when not all of them came in time, or after `abort`."""
        if self.size == 1:
            return
        deadline = time.monotonic() + timeout_s
        # A thread of its own, because nothing wakes it while it knocks at a host that does not answer.
        name = f"stretto-connect-{self.generation}"
        background.start(name, self._attempt, deadline)
        # The waits of the attempt end at the deadline, with a better cause: they go first.
        if not self._news.wait(timeout_s + 0.1):
            self.failure(GroupBroken(f"generation {self.generation} could not be formed in time"))
        if self.broken is None:
            return
        for _ in range(20):
            # Again and again: it may be about to open the next connection.
            if self._attempted.wait(0.005):
                break
            self._shut_down()
        self.close()
        raise self.broken

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Add up over the members, in place."""
        return self._start("sum", tensor, lambda group: group.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        """Take over the root's tensor, in place."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._start("broadcast", tensor, lambda group: group.broadcast([tensor], options))

    def all_gather(self, tensor: torch.Tensor) -> tuple[Pending, list[torch.Tensor]]:
        """Every member's tensor, by rank; all of one shape and type. The list is filled when the wait is over."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        if self.size == 1:
            found[0].copy_(tensor)
        return self._start("gather", tensor, lambda group: group.allgather([found], [tensor])), found

    def all_gather_bytes(self, given: bytes) -> list[bytes]:
        """Every member's bytes, by rank; they may differ in length. For small things."""
        lengths = self.all_gather_now(torch.tensor([len(given)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(given)] = torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else 0
        found = self.all_gather_now(padded) if longest else [padded] * self.size
        return [row[: int(length)].numpy().tobytes() for row, length in zip(found, lengths, strict=True)]

    def all_gather_now(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        pending, found = self.all_gather(tensor)
        pending.wait()
        return found

    def attach(self, connection: socket.socket) -> socket.socket:
        """Let a socket end with this group: `abort` shuts it down, whoever waits in it; a link may be silent for
        `link_s` as in the group itself."""
        _watch_link(connection, self.link_s)
        self._attached.add(connection)
        if self.broken is not None:
            self._shut_down()
        return connection

    def abort(self, cause: str = "aborted") -> None:
        """Let go of the peers: who hangs in a collective of this group, or in `connect`, gets `GroupBroken` at once."""
        if self._forgotten:
            return
        if self.broken is None:
            self.broken = GroupBroken(cause)
        self._news.set()
        self._shut_down()
        if self._nccl is not None:
            with contextlib.suppress(Exception):
                self._nccl.abort()

    def close(self) -> None:
        """Give everything back. Collectives under way are abandoned."""
        if self._forgotten:
            return
        self.abort("closed")
        held = [self._gloo, self._nccl, self._beside]
        self._gloo = self._nccl = self._beside = None
        if any(held) and sys.is_finalizing():
            # No thread can be started any more: they are left to the end of the process.
            for one in held:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
        elif any(held):
            # What Gloo will never finish would hold up whoever takes it apart: not the caller.
            background.start(f"stretto-close-{self.generation}", held.clear).join(CLOSING_S)
        for visitor in (self._visitor, self._side_visitor):
            if visitor is not None:
                visitor.close()

    def forget(self) -> None:
        """In a forked child: neither the sockets nor the threads behind this are the child's."""
        self._forgotten = True
        self.broken = self.broken or GroupBroken("this is a fork of a worker")
        for one in (self._gloo, self._nccl, self._beside):
            # Never taken apart: its threads are not there to be waited for.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))

    def retire(self) -> None:
        """As `close`, without waiting for it."""
        background.start(f"stretto-retire-{self.generation}", self.close)

    def __del__(self) -> None:
        self.close()

    def whole(self) -> bool:
        """Whether the connections to all peers are open at both ends."""
        found = [_open(one) for one, local, remote in _connections() if self._owns(local, remote)]
        return len(found) >= self.size - 1 and all(found)

    def failure(self, error: BaseException) -> GroupBroken:
        """The one error of this group, whatever was raised first. It lets go of the others too: some of them may wait
        for what this member would have passed on, and would not notice who is gone."""
        if self.broken is None:
            self.broken = error if isinstance(error, GroupBroken) else GroupBroken(_one_line(error))
            self.abort()
        return self.broken

    # Beside the sums of gradients: what scripts exchange has connections of its own.

    def open_beside(self, timeout_s: float) -> tuple[int, ...]:
        """Connect once more; called by all members at the same place of their script. Ranks that do not come, since
        they wait in a sum instead: then nothing is opened."""
        if self._beside is not None or self.size == 1:
            return ()
        try:
            if self._side_visitor is None:
                self._side_visitor = Visitor(self.addresses[0], self.generation, "beside/", self.secret)
                if self.broken is not None:
                    # What came before there was a visitor could not stop it.
                    raise self.broken
                self._side_visitor.open(time.monotonic() + timeout_s)
            visitor = self._side_visitor
            # Peers may take long to get here; `abort` ends this.
            visitor.deadline = time.monotonic() + COLLECTIVE_TIMEOUT_S
            visitor.put({f"door/{self.rank}": "here"})
            doors, waits = [f"door/{rank}" for rank in range(self.size)], [f"waits/{rank}" for rank in self._others()]
            while None in visitor.look_unless(doors, dict.fromkeys(waits, self._place), self._look_whole, _DOOR_S):
                if missing := self.elsewhere():
                    return missing
            deadline = visitor.deadline = time.monotonic() + timeout_s
        except Exception as error:
            raise self.failure(error) from None
        opened = threading.Event()

        def connect() -> None:
            try:
                self._beside = self._new_gloo(visitor, deadline)
                self._watch_links()
            except Exception as error:
                self.failure(error)
            opened.set()
            if self.broken is not None:
                self.close()

        background.start(f"stretto-beside-{self.generation}", connect)
        while not opened.wait(_LOOK_UP.total_seconds()) and self.broken is None:
            pass
        if self.broken is not None:
            raise self.broken
        return ()

    def _look_whole(self) -> None:
        """Raise if there is nobody to wait for any more: a broken link says nothing here."""
        if self.broken is not None:
            raise self.broken
        if not self.whole():
            raise GroupBroken("a peer has closed its connection")

    def elsewhere(self) -> tuple[int, ...]:
        """Ranks that are as far as this one, and wait in a sum: what it waits for beside that they will never do."""
        if self._side_visitor is None:
            return ()
        others = self._others()
        try:
            self._side_visitor.deadline = time.monotonic() + self.link_s
            said = self._side_visitor.peek([f"waits/{rank}" for rank in others])
        except OSError as error:
            raise self.failure(error) from None
        return tuple(rank for rank, where in zip(others, said, strict=True) if where == self._place)

    def gather_beside(self, tensor: torch.Tensor, look_up: Callable[[], None]) -> list[torch.Tensor]:
        """Every member's tensor, by rank, over the connections of `open_beside`."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        self._on_beside(lambda gloo: gloo.allgather([found], [tensor]), look_up)
        return found

    def reduce_beside(self, tensor: torch.Tensor, look_up: Callable[[], None]) -> None:
        """Add up over the members, in place."""
        self._on_beside(lambda gloo: gloo.allreduce([tensor]), look_up)

    def _on_beside(self, start: Callable[[Any], Any], look_up: Callable[[], None]) -> None:
        if self.broken is not None:
            raise self.broken
        try:
            work = start(self._beside)
        except Exception as error:
            raise self.failure(error) from None
        Pending(self, work, look_up, self._exchange_over).wait()

    @property
    def _place(self) -> str:
        return f"{self._waited} {self._exchanged}"

    def _wait_over(self) -> None:
        self._waited += 1

    def _exchange_over(self) -> None:
        self._exchanged += 1

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _say_waiting(self) -> None:
        """Told once: that this member waits in a sum, in case somebody waits for it elsewhere; and now and then looked
        at: whether the others wait in the same. Where a script does more on some members than on others, what does not
        belong together would never end."""
        if self._visitor is None:
            return
        self._visitor.deadline = time.monotonic() + self.link_s
        try:
            if self._place != self._said:
                self._said, self._looks = self._place, 0
                doing = f"{self._place} {self._doing}"
                self._visitor.put({f"waits/{self.rank}": self._place, f"doing/{self.rank}": doing})
            self._looks += 1
            if self._looks % _LOOKS:
                return
            said = self._visitor.peek([f"doing/{rank}" for rank in self._others()])
            here = f"{self._place} "
            if any(other and other.startswith(here) and other != here + self._doing for other in said):
                raise OutOfStep(self._doing)
        except OSError:
            self._visit_again(self._visitor)

    def _visit_again(self, late: Visitor) -> None:
        """A connection on which an answer was too late cannot be used any more."""
        self._visitor, self._said = None, ""
        late.close()
        if self.broken is None:
            visitor = Visitor(self.addresses[0], self.generation, secret=self.secret)
            with contextlib.suppress(OSError):
                visitor.open(time.monotonic() + self.link_s)
                self._visitor = visitor

    def _start(self, kind: str, tensor: torch.Tensor, start: Callable[[Any], Any]) -> Pending:
        if self.broken is not None:
            raise self.broken
        if self.size == 1:
            return Pending(self, _Done(), self._say_waiting, self._wait_over)
        self._doing = f"{kind} of {tensor.numel()} {tensor.dtype}"
        group = self._nccl if self._nccl is not None and tensor.is_cuda else self._gloo
        if group is None:
            raise self.failure(GroupBroken("not connected"))
        try:
            work = start(group)
            shown = work if group is self._gloo else _OnStream(work)
            return Pending(self, shown, self._say_waiting, self._wait_over)
        except Exception as error:
            raise self.failure(error) from None

    def _attempt(self, deadline: float) -> None:
        try:
            self._connect(deadline)
        except Exception as error:
            self.failure(error)
        self._attempted.set()
        self._news.set()
        if self.broken is not None:
            # Nobody may wait for this any more.
            self.close()

    def _connect(self, deadline: float) -> None:
        self._knock(deadline)
        self._visitor = visitor = Visitor(self.addresses[0], self.generation, secret=self.secret)
        visitor.open(deadline)
        self._device, self._listening = _open_device(self.addresses[self.rank].rpartition(":")[0])
        cards = self._meet(visitor, _Card(*self._listening, _gpu(self.device)))
        self._peers = frozenset((card.host, card.port) for rank, card in enumerate(cards) if rank != self.rank)
        self._gloo = self._new_gloo(visitor, deadline)
        self._watch_links()
        gpus = [card.gpu for card in cards]
        if all(gpus) and len(set(gpus)) == self.size and dist.is_nccl_available():
            self._open_nccl()

    def _new_gloo(self, visitor: Visitor, deadline: float) -> Any:
        gloo: Any = dist.ProcessGroupGloo
        options: Any = gloo._Options()
        options._devices = [self._device]
        options._threads = 2
        options._timeout = _delta(max(0.001, deadline - time.monotonic()))
        found = gloo(visitor, self.rank, self.size, options)
        found.set_timeout(_delta(COLLECTIVE_TIMEOUT_S))
        return found

    def _knock(self, deadline: float) -> None:
        """See whether every peer can be reached, at its store."""
        within_s = min(self.link_s, deadline - time.monotonic())
        silent = unreachable([address for rank, address in enumerate(self.addresses) if rank != self.rank], within_s)
        if self.broken is not None:
            raise self.broken
        if silent:
            raise GroupBroken(
                f"generation {self.generation} could not be formed: no way to {', '.join(silent)}",
                missing=tuple(rank for rank, address in enumerate(self.addresses) if address in silent),
            )

    def _watch_links(self) -> None:
        for found, local, remote in _connections():
            if self._owns(local, remote):
                _watch_link(found, self.link_s)

    def _meet(self, visitor: Visitor, own: _Card) -> list[_Card]:
        """Show the own card and read everybody's, one after the other: so it is known whose is missing."""
        cards = []
        for rank, address in enumerate(self.addresses):
            try:
                if not rank:
                    # At the leader's store, which has to prove itself first.
                    visitor.put({f"member/{self.rank}": json.dumps(own)})
                cards.append(_Card(*json.loads(visitor.look([f"member/{rank}"])[0])))
            except TimeoutError:
                raise GroupBroken(
                    f"generation {self.generation} could not be formed: no word from rank {rank} ({address})",
                    missing=(rank,),
                ) from None
        return cards

    def _open_nccl(self) -> None:
        """Only where every member has a GPU of its own: NCCL refuses two members on one."""
        # Its watchdog would otherwise end the process when a peer is lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        torch.cuda.set_device(self.device)
        host = self.addresses[0].rpartition(":")[0]
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        port = int(self.all_gather_bytes(str(own.port if own else 0).encode())[0])
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = _delta(COLLECTIVE_TIMEOUT_S)
        store = own or TCPStore(host, port, is_master=False, wait_for_workers=False)
        self._nccl = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        self.backend = "nccl"

    def _shut_down(self) -> None:
        for visitor in (self._visitor, self._side_visitor):
            if visitor is not None:
                visitor.stop()
        for found in list(self._attached):
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
        for found, local, remote in _connections():
            if self._owns(local, remote):
                with contextlib.suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)

    def _owns(self, local: tuple[str, int], remote: tuple[str, int]) -> bool:
        return local == self._listening or remote in self._peers


class _Done:
    """The work of a group of one."""

    def is_completed(self) -> bool:
        return True

    def wait(self, _: datetime.timedelta) -> bool:
        return True


class _Card(NamedTuple):
    """What a member shows the others before they connect: where it listens, and which GPU it drives, if any."""

    host: str
    port: int
    gpu: str


def connect(
    generation: int,
    rank: int,
    addresses: Sequence[str],
    *,
    timeout_s: float,
    device: torch.device | str = "cpu",
    secret: str = "",
) -> Group:
    """A connected group of the members whose stores have these addresses; the first is the leader's."""
    group = Group(generation, rank, addresses, device, secret)
    group.connect(timeout_s)
    return group


def _connections() -> Iterator[tuple[socket.socket, tuple[str, int], tuple[str, int]]]:
    """The connected ones, with the addresses of both ends."""
    for found in _sockets():
        with contextlib.suppress(OSError):
            yield found, _plain(found.getsockname()), _plain(found.getpeername())


def _watch_link(connection: socket.socket, link_s: float) -> None:
    """Both are needed: what was sent must be acknowledged, and where nothing is sent the kernel asks."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(link_s * 1000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(link_s / 3)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(link_s / 3)))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of all TCP sockets of this process, each closed when the next is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found


def _open(connection: socket.socket) -> bool:
    """Whether the other end may still say something."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _plain(address: tuple[Any, ...]) -> tuple[str, int]:
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _open_device(host: str) -> tuple[Any, tuple[str, int]]:
    """A Gloo device of its own for one group, and where it listens."""
    with _opening:
        while True:
            before = _listeners()
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            new = {address for inode, address in _listeners().items() if inode not in before}
            # Another thread of this process may have begun to listen at the same moment: nobody can tell them apart.
            if len(new) == 1:
                return device, new.pop()


def _listeners() -> dict[int, tuple[str, int]]:
    return {
        os.fstat(found.fileno()).st_ino: _plain(found.getsockname())
        for found in _sockets()
        if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
