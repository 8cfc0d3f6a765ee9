"""Decisions as they are taken, written down: to explain one job, to keep a run, and to play it again.

`watched` wraps a policy so that a callback sees every snapshot with its decision. A record is a file of JSON
lines: a header that says which run it is, then one line per decision with the snapshot's digest. `replay` runs the
simulator again and compares line by line. A record that carries whole snapshots (from a live system, which
nobody can run again) is replayed by asking the policy about each of them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
import numpy as np

import stretto
from stretto.core import reasons
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy
from stretto.core.reasons import Reason
from stretto.core.snapshot import GPU, History, Nodes, Snapshot
from stretto.errors import TraceError
from stretto.sim import engine, files, runner
from stretto.sim.runner import Case, Outcome
from stretto.sim.world import Change

Watcher = Callable[[Snapshot, Decision], None]


MAKE_ONE = "make one with `stretto sim run … --record FILE` or `stretto up --record FILE`"
DAMAGED = "the file is damaged, or the recording was ended while it wrote: leave out the last line"


class _Watched(Policy, frozen=True, kw_only=True):
    watcher: Watcher

    def decide(self, view: Snapshot, memory: Memory) -> Decision:
        decision = super().decide(view, memory)
        self.watcher(view, decision)
        return decision


def watched(policy: Policy, watcher: Watcher) -> Policy:
    """The same policy; the watcher sees what it decides. It is asked at every event, never run incrementally."""
    values = {name: getattr(policy, name) for name in policy.__struct_fields__}
    return _Watched(**{**values, "rule": None}, watcher=watcher)


# Why: jobs' reasons over time.


class Cause(msgspec.Struct, frozen=True):
    """From this moment on the job had so many workers, and this is why."""

    at_s: float
    workers: int
    reason: int
    first: float
    second: float
    nodes: tuple[int, ...] = ()
    """Workers on each node; empty where GPUs are only counted."""

    @property
    def sentence(self) -> str:
        return reasons.explain(self.reason, self.first, self.second)


def why(case: Case, jobs: Sequence[int], progress: engine.Progress | None = None) -> tuple[list[list[Cause]], Outcome]:
    """For each of the jobs (by number) every change of its workers, of their places or of the reason for them."""
    said: list[list[tuple[Cause, float]]] = [[] for _ in jobs]

    def watch(view: Snapshot, decision: Decision) -> None:
        for found, number in zip(said, jobs, strict=True):
            j = int(np.searchsorted(view.job, number))
            if j < len(view) and view.job[j] == number:
                found.append(_said(view, decision, j))

    outcome = runner.run(_with_watcher(case.recorded(), watch), progress)
    changes: list[list[Change]] = [[] for _ in case.trace.ids]
    for change in outcome.result.changes:
        changes[change.job].append(change)
    return [_happened(found, changes[job]) for found, job in zip(said, jobs, strict=True)], outcome


def _said(view: Snapshot, decision: Decision, j: int) -> tuple[Cause, float]:
    """The decision on one job, and the GPUs that it left to that job."""
    first, second = decision.detail[j].tolist()
    others = int((decision.workers * view.width).sum() - decision.workers[j] * view.width[j])
    cause = Cause(view.now_s, int(decision.workers[j]), int(decision.reason[j]), first, second)
    return cause, (view.total_milli - others) / GPU


def _happened(said: list[tuple[Cause, float]], changes: list[Change]) -> list[Cause]:
    """What was decided, corrected by what came of it: workers may find no place, and nodes may be lost."""
    causes = [
        Cause(change.at_s, change.workers, change.reason, change.first, change.second, change.nodes)
        for change in changes
        if change.reason == Reason.NODE_LOST
    ]
    done = 0
    for cause, free in said:
        while done < len(changes) and changes[done].at_s <= cause.at_s:
            done += 1
        now = changes[done - 1] if done else None
        workers, nodes = (now.workers, now.nodes) if now else (0, ())
        if workers == cause.workers:
            causes.append(msgspec.structs.replace(cause, nodes=nodes))
        else:
            reason, first, second = reasons.fragmented(cause.workers, workers, free)
            causes.append(Cause(cause.at_s, workers, int(reason), first, second, nodes))
    causes.sort(key=lambda cause: cause.at_s)
    return [each for each, last in zip(causes, [None, *causes], strict=False) if last is None or _news(each, last)]


def _news(cause: Cause, last: Cause) -> bool:
    return (cause.workers, cause.reason, cause.nodes) != (last.workers, last.reason, last.nodes)


# Keeping a run.


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Which run a record is of: enough to run it again."""

    stretto: str
    trace: str
    format: str
    cluster: str
    policy: str
    settings: dict[str, str]
    views: bool = False
    """Whether every line carries its whole snapshot."""


def kept(case: Case, header: Header, file: TextIO) -> Case:
    """The case to run; every decision is written to the file meanwhile."""
    file.write(json.dumps(msgspec.to_builtins(header)) + "\n")

    def watch(view: Snapshot, decision: Decision) -> None:
        file.write(json.dumps(line_of(view, decision, whole=header.views)) + "\n")

    return _with_watcher(case, watch)


def _with_watcher(case: Case, watcher: Watcher) -> Case:
    return msgspec.structs.replace(case, policy=watched(case.policy, watcher))


def line_of(view: Snapshot, decision: Decision, *, whole: bool = False) -> dict[str, Any]:
    """One decision, as it is written down."""
    line: dict[str, Any] = {
        "at_s": view.now_s,
        "digest": digest(view),
        "job": view.job.tolist(),
        "workers": decision.workers.tolist(),
        "pool": np.where(decision.workers > 0, decision.pool, -1).tolist(),
        "reason": [reasons.name(code) for code in decision.reason.tolist()],
        "rejected": [] if decision.rejected is None else view.job[decision.rejected].tolist(),
        "wake_s": decision.wake_s if decision.wake_s < math.inf else None,
    }
    if whole:
        line["view"] = _flat(view)
    return line


def digest(view: Snapshot) -> str:
    """The same for equal snapshots, on every machine; practically never for different ones."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _columns(view):
        digest.update(name.encode())
        if isinstance(value, np.ndarray):
            digest.update(f"{value.dtype.str}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


# Playing it again.


class Difference(msgspec.Struct, frozen=True):
    """The first place where a replay left the record."""

    line: int
    at_s: float
    what: str


class Replay(msgspec.Struct, frozen=True):
    decisions: int
    difference: Difference | None


def read_header(path: Path) -> Header:
    """The first line of a record."""
    for _, header in _lines(path):
        return msgspec.convert(header, Header)
    raise TraceError(f"record {path.name!r} is empty", hint=MAKE_ONE)


def replay(path: Path, case: Case, progress: engine.Progress | None = None) -> Replay:
    """Compare the record with what the policy decides now; stops at the first difference."""
    fresh = _asked_again(path, case.policy) if read_header(path).views else _run_again(case, progress)
    count = 0
    for number, kept in _decisions(path):
        now = next(fresh, None)
        what = "the replay ended early" if now is None else _difference(kept, now)
        if what:
            return Replay(count, Difference(number, float(kept["at_s"]), what))
        count += 1
    extra = next(fresh, None)
    if extra is not None:
        return Replay(count, Difference(count + 2, float(extra["at_s"]), "the record ended early"))
    return Replay(count, None)


def case_of(header: Header, trace: Path | None = None) -> Case:
    """The run that a header describes; the trace may have moved."""
    path = trace or Path(header.trace)
    return runner.prepare(path, header.format, header.cluster, header.policy, header.settings)


def header_of(trace: Path, format: str, cluster: str, policy: str, settings: Mapping[str, str]) -> Header:
    return Header(
        stretto=stretto.__version__,
        trace=str(trace),
        format=format,
        cluster=cluster,
        policy=policy,
        settings=dict(settings),
    )


def _difference(kept: dict[str, Any], now: dict[str, Any]) -> str:
    for key in ("at_s", "job", "digest", "workers", "pool", "reason", "rejected", "wake_s"):
        if kept.get(key) != now[key]:
            what = "snapshot" if key == "digest" else key
            detail = "" if key == "digest" else _where(kept, now, key)
            return f"another {what}{detail}"
    return ""


def _where(kept: dict[str, Any], now: dict[str, Any], key: str) -> str:
    before, after = kept.get(key), now[key]
    if key in ("workers", "pool", "reason") and isinstance(before, list) and len(before) == len(after):
        i = next(i for i in range(len(after)) if before[i] != after[i])
        return f" for job number {now['job'][i]}: {before[i]} was recorded, {after[i]} is decided now"
    return f": {before} was recorded, {after} now" if not isinstance(before, list) else ""


def _run_again(case: Case, progress: engine.Progress | None) -> Iterator[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    again = _with_watcher(case, lambda view, decision: lines.append(line_of(view, decision)))
    engine.simulate(again.trace, again.pools, again.nodes, again.policy, again.settings, progress)
    yield from lines


def _asked_again(path: Path, policy: Policy) -> Iterator[dict[str, Any]]:
    memory: Memory = None
    for number, line in _decisions(path):
        try:
            view = _unflat(line["view"])
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"record {path.name!r}, line {number}: no whole snapshot ({error})") from None
        decision = policy.decide(view, memory)
        memory = decision.memory
        yield line_of(view, decision)


def _decisions(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        if number > 1:
            if not isinstance(line.get("at_s"), int | float):
                raise TraceError(f"record {path.name!r}, line {number}: it is not a decision", hint=DAMAGED)
            yield number, line


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and tables; the first is the header."""
    for number, text in enumerate(files.lines(path, "record", MAKE_ONE), 1):
        line = table(path, number, text)
        if number == 1:
            _check_header(path, line)
        yield number, line


def table(path: Path, number: int, text: str) -> dict[str, Any]:
    """A line of a record."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if isinstance(line, dict):
        return line
    if number == 1:
        raise TraceError(f"{str(path)!r} is not a record: line 1 is not its header", hint=MAKE_ONE)
    what = "it ends in the middle" if not text.endswith("\n") else "it is not a decision"
    raise TraceError(f"record {path.name!r}, line {number}: {what}", hint=DAMAGED)


def _check_header(path: Path, line: dict[str, Any]) -> None:
    try:
        msgspec.convert(line, Header)
    except msgspec.ValidationError as error:
        by = f", written by stretto {line['stretto']}," if isinstance(line.get("stretto"), str) else ""
        hint = f"{MAKE_ONE}; this is stretto {stretto.__version__}"
        raise TraceError(f"{str(path)!r}{by} is not a record: line 1: {error}", hint=hint) from None


def _columns(view: Snapshot) -> Iterator[tuple[str, Any]]:
    """All fields, the nested structs flattened; `rates` and `nodes` belong to the digest too."""
    for name in view.__struct_fields__:
        value = getattr(view, name)
        if isinstance(value, msgspec.Struct):
            for inner in value.__struct_fields__:
                yield f"{name}.{inner}", getattr(value, inner)
        else:
            yield name, value


def _flat(view: Snapshot) -> dict[str, Any]:
    return {name: _plain(value) for name, value in _columns(view)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "shape": value.shape, "data": value.ravel().tolist()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _rich(value: Any) -> Any:
    if isinstance(value, dict):
        return np.array(value["data"], value["dtype"]).reshape(value["shape"])
    return tuple(_rich(item) for item in value) if isinstance(value, list) else value


def _unflat(columns: dict[str, Any]) -> Snapshot:
    nested: dict[str, dict[str, Any]] = {"nodes": {}, "history": {}}
    values: dict[str, Any] = {}
    for name, value in columns.items():
        outer, dot, inner = name.partition(".")
        (nested[outer] if dot else values)[inner or outer] = _rich(value)
    return Snapshot(**values, nodes=Nodes(**nested["nodes"]), history=History(**nested["history"]))
