"""Decisions of a live system, written down whole and played again.

`stretto up --record FILE` keeps, for every decision, what the cycle was given (snapshot, memory, policy, settings) and
what came of it (workers, places, reasons, wake time); one line of JSON each, after a header that says which versions
decided. `replay` gives the same arguments to the cycle again and compares the outcomes byte for byte.

What a site knows beyond snapshots (`cycle.Fit`) is part of the record as its answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

import stretto
from stretto.core import codec, cycle
from stretto.core.codec import CodecError
from stretto.core.cycle import CycleState, Fit, Outcome, Settings
from stretto.core.policy import Policy
from stretto.core.snapshot import IntArray, Snapshot
from stretto.errors import TraceError, UsageError
from stretto.sim import files
from stretto.sim.record import DAMAGED, MAKE_ONE, Difference, Replay, table

_log = logging.getLogger("stretto.server")

_BLOCK = 2**16


class LiveHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Who decided: the same versions on the same kind of processor decide the same."""

    live: bool = True
    stretto: str
    python: str
    numpy: str
    machine: str
    cpu: str = ""
    """The processor's name: another one may round sums and powers otherwise in the last place."""


class Recorder:
    """Decides as the cycle does, and writes it down. Called from one thread at a time."""

    def __init__(self, path: Path) -> None:
        """Raises `UsageError` where nothing can be written: better now than when decisions are missed."""
        self._lock = threading.Lock()
        self._trouble = ""
        """Why the last decision that was not recorded was not."""
        check(path)
        try:
            self._file = _begun(path)
        except OSError as error:
            raise _cannot(path, error.strerror or str(error), "give another file with --record") from None

    def decide(
        self, view: Snapshot, policy: Policy, state: CycleState, settings: Settings, fit: Fit | None = None
    ) -> Outcome:
        answers: list[IntArray] = []
        outcome = cycle.decide(view, policy, state, settings, _Heard(fit, answers) if fit is not None else None)
        try:
            self._write({
                "policy": policy.name, "options": msgspec.to_builtins(policy.options),
                "settings": codec.plain(settings), "view": codec.plain(view), "state": codec.plain(state),
                "fits": codec.plain(answers), "outcome": codec.plain(outcome),
            })  # fmt: skip
        except (CodecError, OSError, ValueError) as error:
            # A decision counts for more than its record.
            if str(error) != self._trouble:
                _log.warning("a decision could not be recorded: %s", error)
            self._trouble = str(error)
        return outcome

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Any) -> None:
        with self._lock:
            _write(self._file, line)


def check(path: Path) -> None:
    """Raises `UsageError` where decisions could not be recorded; leaves everything as it was."""
    if path.suffix == ".gz":
        # A server that is killed would leave a file that nobody can read to its end.
        text = f"decisions are not compressed while they are recorded: {path}"
        raise UsageError(text, hint="leave out .gz, and compress the file when the server has ended")
    if not path.parent.is_dir():
        raise _cannot(path, f"there is no folder {path.parent}", "make it, or give another file with --record")
    if path.is_dir():
        raise _cannot(path, "it is a folder", "give a file with --record")
    elsewhere = "give another file with --record, or change who may write there"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise _cannot(path, "it may not be written", elsewhere)
    try:
        _try_to_open(path)
    except OSError as error:
        raise _cannot(path, error.strerror or str(error), elsewhere) from None


def _try_to_open(path: Path) -> None:
    """Some say that they may be written, and cannot be, of those in /proc for instance."""
    if path.is_file():
        path.open("ab").close()
    elif not os.path.lexists(path):
        path.open("xb").close()
        path.unlink()


def _cannot(path: Path, why: str, hint: str) -> UsageError:
    return UsageError(f"decisions cannot be recorded in {path}: {why}", hint=hint)


def _begun(path: Path) -> IO[str]:
    """The file, with a header."""
    _cut_off_half_a_line(path)
    is_new = not path.exists() or not path.stat().st_size
    file = path.open("a", encoding="utf-8")
    try:
        if is_new:
            _write(file, msgspec.to_builtins(header()))
    except OSError:
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def _write(file: IO[str], line: Any) -> None:
    file.write(json.dumps(line, separators=(",", ":")) + "\n")
    file.flush()


def _cut_off_half_a_line(path: Path) -> None:
    """What a server leaves that is killed while it writes."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = kept = file.seek(0, os.SEEK_END)
        while kept:
            file.seek(max(0, kept - _BLOCK))
            block = file.read(min(_BLOCK, kept))
            kept = kept - len(block) + block.rfind(b"\n") + 1
            if b"\n" in block:
                break
        if kept < end:
            file.truncate(kept)


class _Heard:
    """A fit whose answers are noted."""

    def __init__(self, fit: Fit, answers: list[IntArray]) -> None:
        self._fit, self._answers = fit, answers

    def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
        fitted = self._fit(view, placed, pool)
        self._answers.append(fitted)
        return fitted

    def after(self, view: Snapshot, placed: IntArray) -> _Heard:
        return _Heard(self._fit.after(view, placed), self._answers)


class _Said:
    """A fit that answers as it was noted, in order."""

    def __init__(self, answers: Sequence[IntArray]) -> None:
        self._left = iter(answers)

    def __call__(self, view: Snapshot, placed: IntArray, pool: IntArray) -> IntArray:
        return next(self._left, placed)

    def after(self, view: Snapshot, placed: IntArray) -> _Said:
        return self


def of_this_kind(path: Path) -> bool:
    """Whether the same versions on the same kind of processor decided as would now."""
    return _header(path) == header()


def is_live(path: Path) -> bool:
    """Whether a record is of a live system."""
    first = next(files.lines(path, "record", MAKE_ONE), "")
    return '"live"' in first[:200]


def _header(path: Path) -> LiveHeader:
    try:
        return msgspec.convert(table(path, 1, next(files.lines(path, "record", MAKE_ONE))), LiveHeader)
    except msgspec.ValidationError as error:
        raise TraceError(f"{str(path)!r} is not a record: line 1: {error}", hint=MAKE_ONE) from None


def replay(path: Path, policies: dict[tuple[str, str], Policy], trusted: Collection[str] = ()) -> Replay:
    """Decide again, with the policies of the record by name and options (`names`)."""
    count = 0
    for number, line in _decisions(path):
        view, state, settings, fits = _arguments(path, number, line, trusted)
        try:
            now = codec.plain(decide_again(view, policies[key_of(line)], state, settings, fits))
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            # A policy's own mistakes come as PolicyError.
            what = f"it cannot be decided again: {error}"
            raise TraceError(f"record {path.name!r}, line {number}: {what}", hint=DAMAGED) from None
        what = _difference(line["outcome"], now)
        if what:
            return Replay(count, Difference(number, view.now_s, what))
        count += 1
    return Replay(count, None)


def _arguments(path: Path, number: int, line: dict[str, Any], trusted: Collection[str]) -> tuple[Any, ...]:
    """What the cycle was given."""
    kinds = {"view": Snapshot, "state": CycleState, "settings": Settings, "fits": list}
    found = []
    for name, kind in kinds.items():
        try:
            found.append(codec.rich(line.get(name), trusted))
        except CodecError as error:
            raise TraceError(f"record {path.name!r}, line {number}: {name}: {error}", hint=DAMAGED) from None
        if not isinstance(found[-1], kind):
            raise TraceError(f"record {path.name!r}, line {number}: {name} is missing", hint=DAMAGED)
    return tuple(found)


def decide_again(
    view: Snapshot, policy: Policy, state: CycleState, settings: Settings, fits: Sequence[IntArray]
) -> Outcome:
    """With what the site answered then."""
    return cycle.decide(view, policy, state, settings, _Said(fits) if fits else None)


def names(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The policies that decided, each with its options."""
    found = {key_of(line): (line["policy"], line["options"]) for _, line in _decisions(path)}
    return list(found.values())


def key_of(line: dict[str, Any]) -> tuple[str, str]:
    return str(line["policy"]), json.dumps(line["options"], sort_keys=True)


def _difference(kept: dict[str, Any], now: dict[str, Any]) -> str:
    """What is not equal to the byte."""
    before, after = kept["fields"], now["fields"]
    for name in after:
        if json.dumps(before.get(name)) != json.dumps(after[name]):
            return f"another {name}"
    return ""


def _decisions(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    _header(path)
    for number, text in enumerate(files.lines(path, "record", MAKE_ONE), 1):
        if number == 1:
            continue
        line = table(path, number, text)
        outcome = line.get("outcome")
        fields = outcome.get("fields") if isinstance(outcome, dict) else None
        parts = (line.get("policy"), str), (line.get("options"), dict), (fields, dict)
        if not all(isinstance(value, kind) for value, kind in parts):
            raise TraceError(f"record {path.name!r}, line {number}: it is not a decision", hint=DAMAGED)
        yield number, line


def header() -> LiveHeader:
    """Of what is recorded here and now."""
    return LiveHeader(
        stretto=stretto.__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        machine=platform.machine(),
        cpu=_processor(),
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
