"""Jobs and what happens to them, for tests of the store."""

from __future__ import annotations

import random
from typing import Any

from stretto.jobs import events as e
from stretto.jobs.lifecycle import apply
from stretto.jobs.model import Context, Job, Seat
from stretto.store import Entry


def job(number: int, **changes: Any) -> Job:
    labels, queue = changes.pop("labels", {}), changes.pop("queue", "default")
    given: dict[str, Any] = {
        "name": f"train-{number}",
        "user": "ada",
        "submitted_s": 100.0 + number,
        "changed_s": 100.0 + number,
        "spec": {"run": "python train.py", "queue": queue, "labels": labels},
        "context": Context(cwd="/home/ada"),
        "level": "elastic",
    }
    return Job(number=number, **{**given, **changes})


def submission(of: Job, key: str = "", digest: str = "") -> Entry:
    return Entry(of.submitted_s, e.Submitted(job=of, key=key, digest=digest), of)


def entry(before: Job, event: e.Event, at_s: float) -> Entry:
    return Entry(at_s, event, apply(before, event, at_s))


def follow(before: Job, *events: e.Event, at_s: float = 1000.0) -> list[Entry]:
    """One after the other, a second apart."""
    entries: list[Entry] = []
    for event in events:
        entries.append(entry(before, event, at_s))
        before, at_s = after(entries), at_s + 1
    return entries


def after(entries: list[Entry]) -> Job:
    last = entries[-1].job
    assert last is not None
    return last


def life(first: Job, seed: int, ends: bool = True) -> list[Entry]:
    """A whole history: anything may happen in it."""
    rng = random.Random(seed)
    entries = [submission(first)]
    for step in range(rng.randrange(12)):
        entries.append(entry(after(entries), _something(rng, after(entries), step), 1000.0 + step + rng.random()))
    if ends:
        phase = rng.choice(("succeeded", "failed", "cancelled"))
        entries.append(entry(after(entries), e.Ended(phase=phase, exit_code=rng.choice((None, 0, 1))), 2000.0))
    return entries


def _something(rng: random.Random, now: Job, step: int) -> e.Event:
    worker, launch = f"w{rng.randrange(3)}", f"l{rng.randrange(3)}"
    return rng.choice(
        (
            e.Wished(wish=rng.choice(("run", "suspend")), by="ada", why="it was «asked» for\n"),
            e.Scaled(min_workers=1, max_workers=1 + rng.randrange(4), by="ada"),
            e.Launched(worker=worker, launch=launch, seat=Seat("n1", (step,))),
            e.Running(worker=worker, launch=launch, pid=step),
            e.Leaving(worker=worker, why="shrink"),
            e.Exited(worker=worker, launch=launch, how="exited"),
            e.Retried(not_before_s=1e6 / 3, text="lost"),
            e.Progressed(steps=now.steps + step, metrics={"loss": rng.random(), "whole": step}),
            e.Kept(how="its script has joined", start_s=0.1 + 0.2),
            e.Interrupted(cause="node", lost_s=12.5, text="n1 lost", by=("b", "c")),
            e.Migrated(node="n2", paused_s=0.1 + 0.2),
        )
    )
