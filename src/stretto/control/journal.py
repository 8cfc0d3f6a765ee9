"""What must survive the coordinator: one JSON object a line, on disk before anything is said that depends on it.

Only what workers cannot tell again is written: generations, which of them was formed, who is out, what was wanted,
finished loops, the reference fingerprint and the job's end. Times are not: `replay` starts every clock anew, and gives
everybody the restart's grace to come back.

A journal is either a file that grows (`FileJournal`), or a place that holds all of it at once: then `kept` gives the
records that still matter.
"""

from __future__ import annotations

import json
import logging
import os
from asyncio import Future, TimerHandle, get_running_loop
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from stretto.control.roster import Generation, Settings, State, Worker

Record: TypeAlias = Mapping[str, Any]

_log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_LATEST_OUT = 64
"""Who is out and has surely ended is remembered for a while, should it turn up all the same."""


class Journal(Protocol):
    def read(self) -> list[Record]:
        """Everything that was ever kept, or what still matters of it."""

    def write(self, records: Sequence[Record], state: State) -> Future[None] | None:
        """Keep these records, of which `state` is the result. None: they are; otherwise they are when the future is
        done, and nothing that depends on them may be said before. An error means that nobody may be told any more."""

    def close(self) -> None: ...


def generation_record(state: State, gen: Generation) -> Record:
    """With everything needed to know its members again."""
    concerned = [state.workers[key] for key in (*gen.members, *gen.leavers)]
    return {
        "kind": "generation",
        "number": gen.number,
        "members": list(gen.members),
        "leavers": list(gen.leavers),
        "planned": gen.planned,
        "attempt": gen.attempt,
        "workers": [
            {
                "name": w.name,
                "incarnation": w.incarnation,
                "address": w.address,
                "order": w.order,
                "holds_state": w.holds_state,
            }
            for w in concerned
        ],
    }


def out_record(worker: Worker) -> Record:
    return {
        "kind": "out",
        "name": worker.name,
        "incarnation": worker.incarnation,
        "address": worker.address,
        "order": worker.order,
        "reason": worker.out,
        "ended": worker.ended,
        "finished": worker.finished,
    }


def want_record(state: State) -> Record:
    return {
        "kind": "want",
        "size": state.want,
        "leaving": sorted(state.leaving),
        "unexpected": sorted(state.unexpected),
    }


def kept(state: State) -> list[Record]:
    """Few records that give the same as all there ever were, in so far as it still matters."""
    concerned = {key for gen in state.open for key in (*gen.members, *gen.leavers)}
    out = sorted((w for w in state.workers.values() if w.out), key=lambda w: w.order)
    latest = {w.incarnation for w in out[-_LATEST_OUT:]}
    records: list[Record] = [{"kind": "number", "number": state.number, "joined": state.joined}, want_record(state)]
    records += [generation_record(state, gen) for gen in state.open]
    records += [
        {"kind": "formed", "number": gen.number, "applied": gen.start, "by": _who_formed(state, gen)}
        for gen in state.open
        if gen.taken_s is not None
    ]
    records += [out_record(w) for w in out if not w.ended or w.incarnation in concerned | latest]
    if state.loops_done:
        records.append({"kind": "loops", "done": state.loops_done, "applied": state.loops_applied})
    if state.fingerprint_of:
        records.append({"kind": "fingerprint", "fingerprint": dict(state.fingerprint), "worker": state.fingerprint_of})
    if state.failed:
        records.append({"kind": "failed", "reason": state.failed})
    if state.done:
        records.append({"kind": "done"})
    return records


def _who_formed(state: State, gen: Generation) -> str:
    return next((key for key in gen.members if key in gen.formed or state.workers[key].holds_state), gen.members[0])


def replay(records: Iterable[Record], settings: Settings, now_s: float = 0.0) -> State:
    """The state of a coordinator that starts now: nobody is connected, nobody is lost yet."""
    state = State(settings=settings, want=settings.want)
    for record in records:
        state = _apply(state, record, now_s)
    return state


def _apply(state: State, record: Record, now_s: float) -> State:
    kind = record["kind"]
    if kind == "number":
        return replace(state, number=record["number"], joined=record["joined"])
    if kind == "generation":
        return _announced(state, record, now_s)
    if kind == "formed":
        return _formed(state, record, now_s)
    if kind == "out":
        return _out(state, record, now_s)
    if kind == "want":
        return replace(
            state,
            want=record["size"],
            leaving=state.leaving | set(record["leaving"]),
            unexpected=frozenset(record["unexpected"]),
        )
    if kind == "loops":
        return replace(state, loops_done=record["done"], loops_applied=record.get("applied", 0))
    if kind == "fingerprint":
        return replace(state, fingerprint=record["fingerprint"], fingerprint_of=record["worker"])
    if kind == "failed":
        return replace(state, failed=record["reason"])
    if kind == "done":
        return replace(state, done=True)
    raise ValueError(f"the journal has a record of unknown kind {kind!r}; it was written by a newer version")


def _announced(state: State, record: Record, now_s: float) -> State:
    for known in record["workers"]:
        before = state.workers.get(known["incarnation"])
        worker = before or Worker(**known, heard_s=now_s, away_s=now_s + state.settings.restart_grace_s, ready=True)
        worker = replace(worker, holds_state=worker.holds_state or known["holds_state"])
        state = replace(state.with_worker(worker), joined=max(state.joined, worker.order))
    gen = Generation(
        number=record["number"],
        members=tuple(record["members"]),
        leavers=tuple(record["leavers"]),
        planned=record["planned"],
        attempt=record["attempt"],
        announced_s=now_s,
    )
    return replace(state, open=(*state.open, gen), number=gen.number)


def _formed(state: State, record: Record, now_s: float) -> State:
    number = record["number"]
    state = replace(state, open=tuple(g for g in state.open if g.number >= number))
    gen = replace(state.open[0], taken_s=now_s, start=record["applied"])
    for key in gen.members:
        state = state.with_worker(replace(state.workers[key], applied=record["applied"], member_of=number))
    first = state.workers[record["by"]]
    return state.with_worker(replace(first, holds_state=True)).with_generation(gen)


def _out(state: State, record: Record, now_s: float) -> State:
    known = {name: record[name] for name in ("name", "incarnation", "address", "order")}
    before = state.workers.get(record["incarnation"]) or Worker(**known, heard_s=now_s)
    gone = replace(before, out=record["reason"], ended=record["ended"], finished=record["finished"])
    return state.with_worker(gone)


def read(path: Path) -> list[Record]:
    """All whole lines. A torn last line was never announced: it is cut off, so that the next one starts clean."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    whole, end, torn = text.rpartition(b"\n")
    if torn:
        with path.open("r+b") as file:
            file.truncate(len(whole) + len(end))
            os.fsync(file.fileno())
    return [_line(path, number, line) for number, line in enumerate(whole.splitlines(), 1)]


def _line(path: Path, number: int, line: bytes) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}:{number}: damaged journal line ({error}); restore the file or start the job anew"
        ) from None
    if not isinstance(record, dict) or "kind" not in record:
        raise ValueError(f"{path}:{number}: not a journal record")
    return record


class FileJournal:
    """A file that grows. `write` returns when the records are on disk; where there is no room for them, or the disk
    fails, they are written again and again until they are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        new = not path.exists()
        self._file = path.open("ab", buffering=0)
        self._size: int | None = None
        """Of what was written whole."""
        self._torn = False
        """Whether there may be more behind that."""
        self._again: TimerHandle | None = None
        if new:
            _sync_folder(path.parent)

    def read(self) -> list[Record]:
        return read(self._path)

    def write(self, records: Sequence[Record], state: State | None = None) -> Future[None] | None:
        data = b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in records)
        try:
            self._append(data)
        except OSError as error:
            _log.warning("%s: %s; it is tried again until it can be written", self._path, error.strerror)
            written = get_running_loop().create_future()
            self._write_later(data, written)
            return written
        return None

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._file.close()

    def _append(self, data: bytes) -> None:
        """All of it, or nothing: a torn line would be taken for damage once there is another behind it."""
        file, rest = self._file.fileno(), memoryview(data)
        if self._size is None:
            self._size = os.fstat(file).st_size
        if self._torn:
            os.ftruncate(file, self._size)
        self._torn = True
        while rest:
            rest = rest[os.write(file, rest) :]
        os.fsync(file)
        self._torn = False
        self._size += len(data)

    def _write_later(self, data: bytes, written: Future[None]) -> None:
        def again() -> None:
            try:
                self._append(data)
            except OSError:
                self._write_later(data, written)
            else:
                self._again = None
                if not written.done():
                    written.set_result(None)

        self._again = get_running_loop().call_later(_AGAIN_S, again)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
