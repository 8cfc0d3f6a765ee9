"""The ledger: which samples were really fed to the model, on disk, and the audit that adds it up.

Each worker process appends to a file of its own, and writes down what it feeds *before* its gradient can count,
never what it thinks it should feed. A line is one `write` to a file opened for appending, so after `kill -9` all
lines but the last are whole. Nothing is synced: the ledger survives the process, not the machine.

    ledger 1 <worker>                                        first line
    fed <loop> <step> <generation> <samples>                 before the slice's gradient is contributed
    applied <loop> <step> <generation>                       the optimizer ran
    restored <loop> <step> <generation>                      a checkpoint was restored; <loop> <step> come next

<samples> is `start-stop` for a run of neighbours, otherwise base64 of little-endian integers after their width; each
line ends with its checksum. With accumulated gradients every batch is a step of its own here.

Which generation counts? A step counts in the highest one in which anybody applied it: had an earlier result survived,
no later generation would have done the step again. A restore in generation r voids everything from its cursor on that
generations below r did. What was fed in other generations had no effect on the weights that are left.
"""

from __future__ import annotations

import base64
import binascii
import operator
import os
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from stretto.runtime.order import AnyLoop, Drawn, Loop, Order, Turns

SUFFIX = ".ledger"
_FIRST = "ledger 1 "
_WIDTHS = ((1 << 16, "u2", "H"), (1 << 32, "u4", "I"), (1 << 63, "i8", "Q"))
"""Up to where a width serves, its name in the file, its code in `struct`."""
_SHOWN = 8
_MOST_WAITING = 64 << 20

Place = tuple[int, int]
"""Loop and step."""
Samples = NDArray[np.int64]


class LedgerError(Exception):
    """A ledger that cannot be written or read; names the file and, where there is one, the line."""


class AuditError(AssertionError):
    """The ledger does not add up."""


class Ledger:
    """The file of one worker process. `path` must not exist: put the incarnation into its name."""

    def __init__(self, path: str | os.PathLike[str], worker: str) -> None:
        self.path = Path(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(self.path, flags, 0o644)
        except FileExistsError:
            raise LedgerError(f"{self.path} exists: each process needs a ledger of its own") from None
        self._write(_FIRST + quote(worker, safe=""))

    def fed(self, loop: int, step: int, generation: int, indices: Sequence[int] | NDArray[np.integer]) -> None:
        """These samples go through the model now. Call it before their gradient is contributed; nothing for none."""
        if len(indices):
            self._write(f"fed {loop} {step} {generation} {_encode(indices)}")

    def applied(self, loop: int, step: int, generation: int) -> None:
        """The optimizer ran for this step."""
        self._write(f"applied {loop} {step} {generation}")

    def restored(self, loop: int, step: int, generation: int) -> None:
        """A checkpoint was restored in this generation; this loop and step are the first to be done again."""
        self._write(f"restored {loop} {step} {generation}")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, text: str) -> None:
        body = text.encode()
        line = b"%s %08x\n" % (body, zlib.crc32(body))
        if self._file < 0:
            raise LedgerError(f"{self.path} is closed")
        self._put(line)

    def _put(self, line: bytes) -> None:
        if os.write(self._file, line) != len(line):
            self.close()  # another line behind a torn one would hide both
            raise LedgerError(f"{self.path}: a line could not be written whole; is the disk full?")


class PatientLedger(Ledger):
    """One that does not end whoever writes it when the disk is full: lines wait, and are written in order when there is
    room. What waits when its process ends is lost."""

    def __init__(self, path: str | os.PathLike[str], worker: str) -> None:
        self._waiting = b""
        super().__init__(path, worker)

    def close(self) -> None:
        if self._file >= 0:
            self._write_waiting()
        super().close()

    def _put(self, line: bytes) -> None:
        self._waiting += line
        self._write_waiting()
        if len(self._waiting) > _MOST_WAITING:
            self.close()
            raise LedgerError(f"{self.path}: nothing could be written for too long; is the disk full?")

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError:
            return


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that does not add up.

    missing    samples of the step's batch that nobody fed
    doubled    samples that were fed more often than the step's batch has them
    foreign    samples that are not in the step's batch
    undone     a step that nobody applied
    beyond     a step that the loop does not have
    lost       a step whose result a later generation did not build on
    reapplied  a step that one process applied twice
    epoch      samples that a whole epoch did not have exactly once, or as often as its sampler gave them
    """

    kind: str
    loop: int
    step: int
    generation: int = 0
    indices: tuple[int, ...] = ()
    workers: tuple[str, ...] = ()
    """Who fed these samples; for missing ones: who fed the rest."""

    def __str__(self) -> str:
        text = f"{self.kind}: loop {self.loop} step {self.step} generation {self.generation}"
        if self.indices:
            shown = ", ".join(map(str, self.indices[:_SHOWN])) + (", …" if len(self.indices) > _SHOWN else "")
            text += f": {len(self.indices)} samples ({shown})"
        return text + (f" by {', '.join(self.workers)}" if self.workers else "")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the ledgers of a job say."""

    faults: tuple[Fault, ...]
    steps: int
    """Steps that count."""
    samples: int
    """Samples fed in them."""
    discarded: int
    """Samples fed in vain: of steps that were done again."""
    torn: tuple[str, ...] = ()
    """Files whose last line is torn: their process was killed while it wrote."""

    @property
    def ok(self) -> bool:
        return not self.faults

    def check(self) -> None:
        """Raises `AuditError` with the first faults unless everything adds up."""
        if self.faults:
            rest = len(self.faults) - _SHOWN
            lines = [str(fault) for fault in self.faults[:_SHOWN]] + ([f"and {rest} more"] if rest > 0 else [])
            raise AuditError("the ledger does not add up:\n  " + "\n  ".join(lines))


def ledger_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The ledgers in a folder."""
    return sorted(Path(folder).glob("*" + SUFFIX))


def audit(
    files: Iterable[str | os.PathLike[str]], loops: Mapping[int, AnyLoop], *, stopped: Mapping[int, int] | None = None
) -> Audit:
    """Adds up the ledgers of a job: each step's samples exactly once, each epoch's samples exactly once; where a
    sampler decided (`Drawn`), as often as it gave them. Of loops without samples (`Turns`), each place of a step once.

    `loops` are all loops the job had; `stopped` says for those that ended early after how many steps.
    """
    book = _Book()
    for path in files:
        book.read(Path(path))
    book.void()
    faults: list[Fault] = []
    counted = samples = 0
    for number, loop in sorted(loops.items()):
        loop.has(sys.maxsize)  # a sampler's epochs are all drawn then, and their lengths known
        steps = (stopped or {}).get(number, loop.total_steps)
        done, fed, found = _audit_loop(book, number, loop, steps)
        counted, samples = counted + done, samples + fed
        faults += found
    faults += _beyond(book, loops)
    faults += _lost(book)
    faults += book.reapplied()
    discarded = sum(len(part) for parts in book.fed.values() for _, part in parts) + book.voided - samples
    return Audit(faults=tuple(faults), steps=counted, samples=samples, discarded=discarded, torn=tuple(book.torn))


@dataclass
class _Book:
    """All lines of all files, sorted by what they speak of."""

    fed: dict[tuple[Place, int], list[tuple[str, Samples]]] = field(default_factory=lambda: defaultdict(list))
    applied: list[tuple[Place, int, str]] = field(default_factory=list)
    """Place, generation and file, in the order of the file."""
    restored: list[tuple[Place, int]] = field(default_factory=list)
    counting: dict[Place, int] = field(default_factory=dict)
    workers: dict[str, str] = field(default_factory=dict)
    torn: list[str] = field(default_factory=list)
    voided: int = 0

    def read(self, path: Path) -> None:
        name = str(path)
        if name in self.workers:
            raise LedgerError(f"{name} is named twice")
        self.workers[name] = path.name
        for number, body in self._lines(path):
            try:
                self._take(name, body)
            except (ValueError, IndexError) as error:
                raise LedgerError(f"{name}:{number}: not a line of a ledger: {error}") from None

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        whole, _, rest = path.read_bytes().rpartition(b"\n")
        if rest:
            self.torn.append(str(path))
        for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
            body, _, checksum = line.rpartition(b" ")
            if b"%08x" % zlib.crc32(body) != checksum:
                raise LedgerError(f"{path}:{number}: the checksum does not match: {line[:60]!r}")
            if (number == 1) != body.startswith(_FIRST.encode()):
                raise LedgerError(f"{path}:{number}: the line {_FIRST!r} must be the first, and only that")
            yield number, body.decode()

    def _take(self, name: str, body: str) -> None:
        if body.startswith(_FIRST):
            self.workers[name] = unquote(body.removeprefix(_FIRST))
            return
        kind, *rest = body.split(" ")
        place, generation = (int(rest[0]), int(rest[1])), int(rest[2])
        if kind == "fed":
            self.fed[place, generation].append((self.workers[name], _decode(rest[3])))
        elif kind == "applied":
            self.applied.append((place, generation, name))
        elif kind == "restored":
            self.restored.append((place, generation))
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def void(self) -> None:
        """Takes out what restores made void, and finds the generation that counts for each step."""
        for key in [key for key in self.fed if self._is_void(*key)]:
            self.voided += sum(len(part) for _, part in self.fed.pop(key))
        self.applied = [line for line in self.applied if not self._is_void(line[0], line[1])]
        for place, generation, _ in self.applied:
            self.counting[place] = max(generation, self.counting.get(place, generation))

    def _is_void(self, place: Place, generation: int) -> bool:
        return any(generation < restored and place >= cursor for cursor, restored in self.restored)

    def reapplied(self) -> Iterator[Fault]:
        """A process only goes forward: the state it has includes every step it applied."""
        last: dict[str, Place] = {}
        for place, generation, name in self.applied:
            if name in last and place <= last[name]:
                worker = (self.workers[name],)
                yield Fault(kind="reapplied", loop=place[0], step=place[1], generation=generation, workers=worker)
            last[name] = max(place, last.get(name, place))


def _audit_loop(book: _Book, number: int, loop: AnyLoop, steps: int) -> tuple[int, int, list[Fault]]:
    order, faults = Order(loop) if not isinstance(loop, Turns) else None, []
    counted = samples = 0
    seen: list[Samples] = []
    for step in range(steps):
        generation = book.counting.get((number, step))
        if generation is None:
            faults.append(Fault(kind="undone", loop=number, step=step))
        else:
            parts = book.fed.get(((number, step), generation), [])
            batch = order.indices(step) if order is not None else _places(parts)
            faults += _audit_step(number, step, generation, parts, batch)
            counted += 1
            seen += [part for _, part in parts]
        if not isinstance(loop, Turns) and (not loop.has(step + 1) or loop.epoch(step + 1) != loop.epoch(step)):
            faults += _audit_epoch(number, step, loop, seen)
            samples += sum(map(len, seen))
            seen = []
    return counted, samples + sum(map(len, seen)), faults


def _places(parts: list[tuple[str, Samples]]) -> Samples:
    """Those of a step: how many there were, nobody knows but those who had them."""
    fed = _join([part for _, part in parts])
    return np.arange(fed.max() + 1 if len(fed) else 1, dtype=np.int64)


def _audit_step(
    loop: int, step: int, generation: int, parts: list[tuple[str, Samples]], batch: Samples
) -> Iterator[Fault]:
    fed = _join([part for _, part in parts])
    known, positions = np.unique(np.concatenate([batch, fed]), return_inverse=True)
    wanted = np.bincount(positions[: len(batch)], minlength=len(known))
    times = np.bincount(positions[len(batch) :], minlength=len(known))
    for kind, wrong in (
        ("missing", known[times < wanted]),
        ("doubled", known[(times > np.maximum(wanted, 1))]),
        ("foreign", known[(times > 0) & (wanted == 0)]),
    ):
        if len(wrong):
            who = [worker for worker, part in parts if kind == "missing" or np.isin(part, wrong).any()]
            yield Fault(
                kind=kind,
                loop=loop,
                step=step,
                generation=generation,
                indices=tuple(wrong.tolist()),
                workers=tuple(dict.fromkeys(who)),
            )


def _audit_epoch(number: int, step: int, loop: Loop | Drawn, seen: list[Samples]) -> Iterator[Fault]:
    """Does not ask the order what an epoch is, so that a wrong order is found too; or only what the sampler gave."""
    fed = _join(seen)
    times = np.bincount(fed[fed < loop.samples], minlength=loop.samples)
    if isinstance(loop, Drawn):
        wrong = np.flatnonzero(times != np.bincount(loop.order(loop.epoch(step)), minlength=loop.samples))
    else:
        wrong = np.flatnonzero(times > 1 if loop.drop_last else times != 1)
    outside = fed[fed >= loop.samples]
    if len(wrong) or len(outside):
        yield Fault(kind="epoch", loop=number, step=step, indices=(*wrong.tolist(), *outside.tolist()))


def _beyond(book: _Book, loops: Mapping[int, AnyLoop]) -> Iterator[Fault]:
    for (number, step), generation in sorted(book.counting.items()):
        if number not in loops or not loops[number].has(step):
            yield Fault(kind="beyond", loop=number, step=step, generation=generation)


def _lost(book: _Book) -> Iterator[Fault]:
    """Who applies a step in generation g has the state after the step before, so that one counts in g or below."""
    highest = 0
    for (number, step), generation in sorted(book.counting.items()):
        if generation < highest:
            yield Fault(kind="lost", loop=number, step=step, generation=generation)
        highest = max(highest, generation)


def _join(parts: list[Samples]) -> Samples:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def _encode(indices: Sequence[int] | NDArray[np.integer]) -> str:
    # Done for every slice, most of them short: an array of numpy would take longer to make than all of this.
    plain = indices.tolist() if isinstance(indices, np.ndarray) else indices
    try:
        low, high, count = min(plain), max(plain), len(plain)
        if high - low == count - 1 and low >= 0 and all(map(operator.eq, plain, range(low, high + 1))):
            return f"{low}-{high + 1}"
        width, code = next((width, code) for bound, width, code in _WIDTHS if high < bound)
        packed = struct.pack(f"<{count}{code}", *plain)
    except (TypeError, struct.error, StopIteration):
        raise LedgerError("samples must be a flat list of integers from 0") from None
    return f"{width}:{binascii.b2a_base64(packed, newline=False).decode()}"


def _decode(text: str) -> Samples:
    width, found, packed = text.partition(":")
    if found:
        if width not in {known for _, known, _ in _WIDTHS}:
            raise ValueError(f"unknown width {width!r}")
        return np.frombuffer(base64.b64decode(packed, validate=True), dtype="<" + width).astype(np.int64)
    start, _, stop = text.partition("-")
    return np.arange(int(start), int(stop), dtype=np.int64)
