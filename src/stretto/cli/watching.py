"""Verbs that read what happened, and what happens: logs and events."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto import visible
from stretto.cli import show, words
from stretto.cli.following import Lines
from stretto.cli.guessing import guessing
from stretto.cli.options import SOMEWHERE, JobRef, Json, Place
from stretto.errors import UsageError

if TYPE_CHECKING:
    from stretto.client import Client, Event, Job, Piece

Follow = Annotated[bool, Parameter(name=["--follow", "-f"], negative=(), help="Go on as it happens.")]


def logs(
    job: JobRef,
    /,
    *,
    follow: Follow = False,
    worker: Annotated[str | None, Parameter(name=["--worker", "-w"], help="Only this one: w0, w1, …")] = None,
    tail: Annotated[int | None, Parameter(name=["--tail", "-n"], help="Only the last so many lines.")] = None,
    raw: Annotated[
        bool, Parameter(negative=(), help="As it was written, with all that a terminal obeys; usually only colours.")
    ] = False,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> None:
    """Print the log of a job's workers."""
    if tail is not None and tail < 0:
        raise UsageError(f"{tail} lines cannot be shown", hint="give a number from 0 on")
    with place.client() as client, guessing(client, job):
        found = client.job(job)
        if follow:
            pieces = client.follow(found, worker=worker, tail=tail)
            _follow(pieces, found.max_workers > 1 and worker is None, json, raw)
            return
        texts: Iterable[str] = (
            client.log_pages(found, worker=worker, tail=tail)
            if place.cluster is None
            else [client.logs(found, worker=worker, tail=tail)]
        )
        if json:
            show.as_json({"job": found.id, "worker": worker, "text": "".join(texts)})
        else:
            visible.behind(sys.stdout).writelines(texts if raw else _coloured(texts))


def events(
    job: Annotated[str | None, Parameter(help="Its number or name; everything if not given.")] = None,
    /,
    *,
    follow: Follow = False,
    after: Annotated[int | None, Parameter(help="Only those after this number.")] = None,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="The last so many.")] = 50,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> None:
    """Print what happened, to one job or to all, the oldest first."""
    if not 1 <= limit <= 1000:
        raise UsageError(f"{limit} events cannot be shown at once", hint="give 1..1000")
    with place.client() as client, guessing(client, job or ""):
        ref = None if job is None else client.job(job)
        if after is None:
            found = client.events(ref, limit=limit, order="newest")[::-1]
        else:
            found = client.events(ref, after=after, limit=limit)
        if not follow:
            if json:
                show.as_json(found)
            else:
                _print_events(found)
            return
        for event in _going_on(found, client, ref, after):
            _event(event, json)
            if ref is not None and event.kind == "ended":
                return


def _going_on(found: list[Event], client: Client, ref: Job | None, after: int | None) -> Iterator[Event]:
    yield from found
    yield from client.watch(ref, after=found[-1].seq if found else after)


def _follow(pieces: Iterable[Piece], prefixed: bool, json: bool, raw: bool) -> None:
    if json:
        for piece in pieces:
            show.as_json({"worker": piece.worker, "text": piece.text})
            sys.stdout.flush()
        return
    texts = _lines(pieces, prefixed)
    for text in texts if raw else _coloured(texts):
        visible.behind(sys.stdout).write(text)
        sys.stdout.flush()


def _lines(pieces: Iterable[Piece], prefixed: bool) -> Iterator[str]:
    lines = Lines(prefixed)
    for piece in pieces:
        yield lines.add(piece.worker, piece.text)
    yield lines.rest()


def _coloured(texts: Iterable[str]) -> Iterator[str]:
    shown = visible.Coloured()
    for text in texts:
        yield shown.add(text)
    yield shown.rest()


def _print_events(found: list[Event]) -> None:
    now_s = show.now_s()
    rows = [
        [
            str(each.seq),
            words.ago(each.at_s, now_s),
            "-" if each.job is None else str(each.job),
            _what(each),
        ]
        for each in found
    ]
    show.columns(["EVENT", "WHEN", "JOB", "WHAT"], rows, right=["EVENT", "WHEN", "JOB"])


def _event(event: Event, json: bool) -> None:
    if json:
        show.as_json(event)
    else:
        when = time.strftime("%H:%M:%S", time.localtime(event.at_s))
        print(f"{when}  {'-' if event.job is None else event.job:>5}  {_what(event)}")
    sys.stdout.flush()


def _what(event: Event) -> str:
    """Kubernetes says it in words of its own."""
    return words.one_line(event["text"]) if "text" in event else words.event(event.event)
