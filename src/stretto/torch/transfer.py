"""State on its way from members that hold it to members that do not.

Over a connection of its own: Gloo's cannot be waited for without breaking the group. Both ends prove first that they
belong to the job and to this generation (`runtime/door.py`); who cannot is no receiver, and holds up none. Then come a
description, the small tensors in one run, the large ones from where they lie, and one byte: whether what was sent is
still what the sender holds. The sender may train on meanwhile (`Sending` has a thread of its
own): parameters and what the optimizers keep do not change before its next step is applied, which therefore waits for
the end of the transfer; everything else is copied before. A script that changes its parameters by hand before that step
spoils the transfer: the receiver throws away what it got, and this sender does not train on during a transfer again.

What is received is staged: the receiver keeps what it had until everything is there. Its buffers can be made ready
before (`Staging.prepare`): fresh memory is as slow to get as the state itself.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.runtime.door import Admitted, Door
from stretto.runtime.handshake import ANSWER_BYTES, Greeting, Secret
from stretto.torch import background
from stretto.torch.groups import Group, GroupBroken
from stretto.torch.state import Holder

_SMALL_BYTES = 64 * 2**10
_CHUNK_BYTES = 32 * 2**20
_ALIGNMENT = 16
_LENGTHS = struct.Struct("<QQ")
"""Of the description and of the small tensors."""
_ROLE = "state"
_LONGEST_HEAD = 1 << 32
_AT_A_TIME = 1 << 20
"""So much memory is made for what is said to come, until it has."""


class Shape(NamedTuple):
    """What a receiver must know of a tensor."""

    size: tuple[int, ...]
    dtype: str

    @classmethod
    def read(cls, size: Any, dtype: Any) -> Shape:
        """From what somebody else has said; raises `TypeError`, `ValueError` or `AttributeError`."""
        if not isinstance(getattr(torch, dtype), torch.dtype):
            raise TypeError(f"{dtype!r} is no type of tensors")
        if not all(type(length) is int and length >= 0 for length in size):
            raise ValueError(f"{size!r} is no size of a tensor")
        return cls(tuple(size), dtype)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=getattr(torch, self.dtype), device=device)


def shapes(tensors: Iterable[Tensor]) -> list[Shape]:
    return [Shape(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]


class Counter:
    """Where a member that holds state hands it out, in one generation: known to the others by its card."""

    def __init__(self, group: Group, host: str) -> None:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        self._group = group
        self._listener = group.attach(socket.create_server((host, 0), family=family))
        self._door = Door(self._listener, Secret(group.secret), _ROLE, group.generation)
        self._admitted: deque[Admitted] = deque()
        self.card = (host, int(self._listener.getsockname()[1]))

    def close(self) -> None:
        self._door.close()
        for one in self._admitted:
            one.connection.close()
        self._listener.close()

    def accept(self) -> socket.socket:
        """The next of the receivers: those who have proved to be members. Ends with `OSError` when the group does."""
        waiting = select.poll()
        waiting.register(self._door, select.POLLIN)
        while not self._admitted:
            due_s = self._door.due_s()
            waiting.poll(None if due_s is None else 1000 * due_s)
            self._admitted.extend(self._door.come())
        connection = self._admitted.popleft().connection
        connection.settimeout(None)
        return self._group.attach(connection)


class Sending:
    """A state on its way to some members."""

    def __init__(
        self,
        group: Group,
        counter: Counter,
        receivers: int,
        skeleton: str,
        tensors: list[Tensor],
        keep: set[int] | None,
    ) -> None:
        """`keep` are the addresses of tensors that will not change until the end; others are copied now, if given."""
        self._group, self._counter, self._receivers, self._skeleton = group, counter, receivers, skeleton
        self._tensors = [tensor.detach() for tensor in tensors]
        if keep is not None:
            self._tensors = [t if t.data_ptr() in keep else t.clone() for t in self._tensors]
        self._before = marks(self._tensors) if keep is not None else None
        self.spoiled = False
        """The script changed what was being sent."""
        self._failure: Exception | None = None
        self._side = _side_stream(self._tensors)
        self._thread = background.start(f"stretto-state-{group.generation}", self._run)

    def wait(self) -> None:
        """Until it has arrived; raises `GroupBroken` if it has not."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(torch.no_grad())
                if self._side is not None:
                    stack.enter_context(torch.cuda.stream(self._side))
                connections = [stack.enter_context(self._counter.accept()) for _ in range(self._receivers)]
                self._send(connections)
            except Exception as error:
                self._failure = self._group.failure(error)
            finally:
                self._counter.close()
                self._tensors = []

    def _send(self, connections: list[socket.socket]) -> None:
        head = json.dumps({"skeleton": self._skeleton, "tensors": shapes(self._tensors)}).encode()
        small = _pack([t for t in self._tensors if t.nbytes < _SMALL_BYTES])
        _to_all(connections, _LENGTHS.pack(len(head), small.numel()) + head)
        _to_all(connections, _view(small))
        for piece in _pieces(self._tensors):
            _to_all(connections, _view(_landed(piece) if piece.is_cuda else piece))
        self.spoiled = self._before is not None and self._before != marks(self._tensors)
        _to_all(connections, bytes([not self.spoiled]))
        if self.spoiled:
            raise GroupBroken("the script changed its parameters before step() while they were sent to a newcomer")


class Staging:
    """Where a received state lies until it is complete."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ready: defaultdict[Shape, list[Tensor]] = defaultdict(list)

    def prepare(self, wanted: Iterable[Shape]) -> None:
        """Have memory for these, and have touched it."""
        missing = list(wanted)
        for shape, kept in self._ready.items():
            for _ in kept:
                if shape in missing:
                    missing.remove(shape)
        for shape in missing:
            self._ready[shape].append(shape.empty(self.device).zero_())

    def take(self, shape: Shape) -> Tensor:
        """One that is ready, or another."""
        kept = self._ready.get(shape)
        return kept.pop() if kept else shape.empty(self.device)

    def clear(self) -> None:
        self._ready.clear()


def receive(group: Group, counter: tuple[str, int], staging: Staging) -> tuple[str, list[Tensor]]:
    """The skeleton and the tensors that are handed out at this counter; raises `GroupBroken`."""
    try:
        with group.attach(socket.create_connection(counter, group.link_s)) as connection:
            connection.settimeout(None)
            greeting = Greeting(Secret(group.secret), _ROLE, group.generation)
            connection.sendall(greeting.said)
            connection.sendall(greeting.prove(_read(connection, ANSWER_BYTES)))
            return _receive(connection, staging)
    except (OSError, Garbled) as error:
        raise group.failure(error) from None


class Garbled(Exception):
    """What arrives is no state."""


def _receive(connection: socket.socket, staging: Staging) -> tuple[str, list[Tensor]]:
    head_bytes, small_bytes = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    if head_bytes > _LONGEST_HEAD:
        raise Garbled(f"a description of {head_bytes} bytes")
    skeleton, tensors = _described(_read(connection, head_bytes), staging)
    smalls = [tensor for tensor in tensors if tensor.nbytes < _SMALL_BYTES]
    if small_bytes != sum(map(_padded, smalls)):
        raise Garbled("the small tensors are not as they are described")
    small = torch.empty(small_bytes, dtype=torch.uint8)
    _read_into(connection, small)
    _unpack(small, smalls)
    for piece in _pieces(tensors):
        if piece.is_cuda:
            landing = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
            _read_into(connection, landing)
            piece.copy_(landing, non_blocking=True)
        else:
            _read_into(connection, piece)
    if _read(connection, 1) != b"\1":
        raise ConnectionError("the sender's script changed its parameters while they were sent")
    return skeleton, tensors


def _described(head: bytes, staging: Staging) -> tuple[str, list[Tensor]]:
    """The skeleton, and tensors to be filled. Whoever describes them has the job's secret; yet a mistake of theirs must
    not look like one of the script's."""
    try:
        told: dict[str, Any] = json.loads(head)
        skeleton = told["skeleton"]
        if not isinstance(skeleton, str):
            raise TypeError("the skeleton is text")
        return skeleton, [staging.take(Shape.read(size, dtype)) for size, dtype in told["tensors"]]
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, MemoryError) as error:
        raise Garbled(f"no description of a state: {type(error).__name__}: {error}") from None


def kept_until_step(holder: Holder) -> set[int]:
    """Where the tensors lie that only the step of an optimizer changes."""
    stable: list[Tensor] = [parameter.detach() for parameter in holder.parameters()]
    for optimizer in holder.optimizers:
        for state in optimizer.state.values():
            stable += [value for value in state.values() if isinstance(value, Tensor)]
    return {tensor.data_ptr() for tensor in stable if tensor.numel()}


def expected_shapes(holder: Holder) -> list[Shape]:
    """Of a state that would be sent now. May be asked from another thread than that which trains: a hint."""
    tensors: dict[int, Tensor] = {}
    for model in holder.models:
        for tensor in [*model.parameters(), *model.buffers()]:
            tensors.setdefault(tensor.data_ptr(), tensor)
    for optimizer in holder.optimizers:
        for state in list(optimizer.state.values()):
            for value in list(state.values()):
                if isinstance(value, Tensor):
                    tensors.setdefault(value.data_ptr(), value)
    return shapes(tensor for tensor in tensors.values() if tensor.nbytes >= _SMALL_BYTES)


def _to_all(connections: list[socket.socket], data: bytes | memoryview) -> None:
    for connection in connections:
        connection.sendall(data)


def _read(connection: socket.socket, length: int) -> bytes:
    """Memory is made as it arrives, not as it is promised."""
    read = bytearray()
    while len(read) < length:
        part = bytearray(min(_AT_A_TIME, length - len(read)))
        _fill(connection, memoryview(part))
        read += part
    return bytes(read)


def _read_into(connection: socket.socket, tensor: Tensor) -> None:
    _fill(connection, _view(tensor))


def _fill(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        got = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if not got:
            raise ConnectionError("the sender of the state has closed its connection")
        view = view[got:]


def _view(run: Tensor) -> memoryview:
    """The memory of a run of bytes."""
    return memoryview(run.numpy())  # type: ignore[arg-type]


def _pieces(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Bytes of the large tensors, in runs of a bounded size; of a copy where a tensor does not lie in one run."""
    for tensor in tensors:
        if tensor.nbytes >= _SMALL_BYTES:
            flat = tensor.contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _CHUNK_BYTES):
                yield flat[start : start + _CHUNK_BYTES]


def _pack(tensors: list[Tensor]) -> Tensor:
    """Small tensors as one run of bytes in main memory, each at a multiple of the alignment."""
    run = torch.zeros(sum(map(_padded, tensors)), dtype=torch.uint8)
    for window, tensor in zip(_windows(run, tensors), tensors, strict=True):
        window.copy_(tensor)
    return run


def _unpack(run: Tensor, tensors: list[Tensor]) -> None:
    for window, tensor in zip(_windows(run, tensors), tensors, strict=True):
        tensor.copy_(window)


def _windows(run: Tensor, like: list[Tensor]) -> list[Tensor]:
    found, offset = [], 0
    for tensor in like:
        found.append(run[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        offset += _padded(tensor)
    return found


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def marks(tensors: Sequence[Tensor]) -> tuple[list[int], bytes]:
    """By which a change is noticed: how often each was written to, and (`.data` is not counted) some of its values."""
    runs = []
    for tensor in tensors:
        tensor = tensor.detach()
        if tensor.numel() and _is_dense(tensor):
            apart = max(1, tensor.numel() // 8)
            window = torch.as_strided(tensor, (min(8, tensor.numel()),), (apart,), tensor.storage_offset())
            runs.append(window.clone().view(torch.uint8))
    by_device = defaultdict(list)
    for run in runs:
        by_device[run.device].append(run)
    values = b"".join(bytes(torch.cat(some).cpu().numpy()) for some in by_device.values())
    return [tensor._version for tensor in tensors], values


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _side_stream(tensors: list[Tensor]) -> torch.cuda.Stream | None:
    """One beside that of the training, which has everything up to now in view."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    return side


def _landed(piece: Tensor) -> Tensor:
    landing = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True)
    landing.copy_(piece, non_blocking=True)
    torch.cuda.current_stream(piece.device).synchronize()
    return landing
