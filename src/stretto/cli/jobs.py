"""Verbs about jobs that are there: look at them, change them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from stretto.cli import show, words
from stretto.cli.guessing import guessing
from stretto.cli.options import HERE, SOMEWHERE, Connection, JobRef, JobRefs, Json, Place
from stretto.errors import StrettoError, UsageError
from stretto.visible import in_line

if TYPE_CHECKING:
    from stretto.client import Client, Job

_MOST_SHOWN = 200
Phase = Literal["queued", "running", "suspended", "succeeded", "failed", "cancelled"]
Level = Literal["elastic", "restart", "rigid", "service"]
Force = Annotated[bool, Parameter(name="--force", negative=(), help="Though it would lose more than a minute of work.")]


def ps(
    *,
    all: Annotated[bool, Parameter(name=["--all", "-a"], negative=(), help="Also those that have ended.")] = False,
    phase: Annotated[list[Phase], Parameter(negative=(), help="Only those; may be repeated.")] = [],  # noqa: B006
    name: Annotated[str | None, Parameter(help="With * and ? for anything.")] = None,
    user: str | None = None,
    queue: str | None = None,
    level: Annotated[Level | None, Parameter(help="Only those.")] = None,
    label: Annotated[list[str], Parameter(negative=(), help="key=value; may be repeated.")] = [],  # noqa: B006
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="At most so many, the newest.")] = _MOST_SHOWN,
    all_namespaces: Annotated[
        bool, Parameter(name=["--all-namespaces", "-A"], negative=(), help="On Kubernetes: not of one namespace only.")
    ] = False,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> None:
    """List jobs: by default those that have not ended, the newest first."""
    if limit < 1:
        raise UsageError(f"a list of {limit} jobs cannot be shown", hint="give a number above 0")
    phases: list[str] = [*phase] or ([] if all else ["active"])
    with (place.everywhere() if all_namespaces else place).client() as client:
        found = client.jobs(
            phase=phases, name=name, user=user, queue=queue, level=level, labels=words.pairs(label), limit=limit
        )
        jobs = list(found)
    if json:
        show.as_json(jobs)
        return
    if not jobs:
        show.note("no jobs" + ("" if all or phase else " that have not ended; --all lists the others too"))
        return
    now_s = show.now_s()
    if place.cluster is None:
        headings = ["JOB", "NAME", "PHASE", "WORKERS", "STEPS", "STEPS/S", "ETA", "AGE", "USER", "NOTE"]
        show.columns(headings, [_row(job, now_s) for job in jobs], right=["JOB", "STEPS/S", "ETA", "AGE"])
    else:
        headings = ["NAMESPACE", "NAME", "PHASE", "WORKERS", "STEPS", "AGE", "NOTE"]
        show.columns(headings, [_row_on_kubernetes(job, now_s) for job in jobs], right=["AGE"])
    if len(jobs) == limit:
        show.note(f"the newest {limit}; --limit shows more")


def show_(job: JobRef, /, *, json: Json = False, place: Place = SOMEWHERE) -> None:
    """Show one job: what it asked for, what it has, how far it is."""
    with place.client() as client, guessing(client, job):
        found = client.job(job)
    if json:
        show.as_json(found)
    else:
        _print_job(found, show.now_s())


def cancel(*jobs: JobRefs, json: Json = False, place: Place = SOMEWHERE) -> int:
    """Cancel jobs: their workers are asked to end, then made to. On Kubernetes this deletes the object."""
    said = "is being cancelled" if place.cluster is None else "is being cancelled: its object is deleted"
    return _each(jobs, json, place, lambda client, ref: client.cancel(ref), said)


def suspend(*jobs: JobRefs, force: Force = False, json: Json = False, place: Place = SOMEWHERE) -> int:
    """Suspend jobs: they give up their workers and wait for `stretto resume`."""
    return _each(jobs, json, place, lambda client, ref: client.suspend(ref, force=force), "is being suspended")


def resume(*jobs: JobRefs, json: Json = False, place: Place = SOMEWHERE) -> int:
    """Let suspended jobs go on."""
    return _each(jobs, json, place, lambda client, ref: client.resume(ref), "goes on as soon as there is room")


def scale(
    job: JobRef,
    workers: Annotated[str, Parameter(help="4, or a range such as 1..4.")],
    /,
    *,
    force: Force = False,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> None:
    """Change between how many workers a job may run."""
    low, high = words.parse_sizes(workers)
    with place.client() as client, guessing(client, job):
        changed = client.scale(job, low, high, force=force)
    _told(changed, json, f"may have {words.limits(low, high)} workers now")


def migrate(
    job: JobRef,
    /,
    *,
    to: Annotated[str, Parameter(help="The node's name; `stretto nodes` lists them.")],
    force: Force = False,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """Move a job to another node."""
    with connection.client() as client, guessing(client, job):
        changed = client.migrate(job, to, force=force)
    _told(changed, json, f"moves to {to}")


def why(job: JobRef, /, *, json: Json = False, place: Place = SOMEWHERE) -> None:
    """Say why a job has the workers it has, or why it waits and for what."""
    with place.client() as client, guessing(client, job):
        found = client.why(job)
    if json:
        show.as_json(found)
        return
    facts = dict(found.facts)
    allowed = words.limits(facts.pop("min_workers"), facts.pop("max_workers"))
    target = f", on its way to {found.target}" if found.target != found.workers else ""
    name = f"{found.job} ({found.name})" if place.cluster is None else found.job
    print(in_line(f"job {name} {found.text or found.phase}"))
    told = [("workers", f"{found.workers}/{allowed}{target}"), ("policy", found.policy)]
    told += [
        (name.removesuffix("_s"), words.span(value) if name.endswith("_s") else str(value))
        for name, value in facts.items()
    ]
    show.listing([(name, value) for name, value in told if value not in ("", "None")])


def called(job: Mapping[str, Any]) -> str:
    """`12 (mnist)` on a server, `vision/mnist` on Kubernetes, where that says it all."""
    return str(job["id"]) if "namespace" in job else f"{job['id']} ({job['name']})"


def _row(job: Job, now_s: float) -> list[str]:
    age_s = now_s - job.submitted_s
    note = job.message if job.ended else (job.get("text") or job.message)
    if job.get("lost_s"):
        note = f"lost {words.span(job.lost_s)} of work; {note}".rstrip("; ")
    return [
        job.id, job.name, words.phase(job), words.size(job), words.progress(job), words.rate(job),
        words.span(job.eta_s), words.span(age_s), job.user, words.one_line(note),
    ]  # fmt: skip


def _row_on_kubernetes(job: Job, now_s: float) -> list[str]:
    _, name, phase, workers, steps, _, _, age, namespace, note = _row(job, now_s)
    return [namespace, name, phase, workers, steps, age, note]


def _print_job(job: Job, now_s: float) -> None:
    run = job.spec.get("run", "")
    told = [
        ("job", called(job)),
        ("phase", words.phase(job)),
        ("why", job.get("text") or ""),
        ("message", job.message),
        ("exit code", "" if job.exit_code is None else str(job.exit_code)),
        ("run", run if isinstance(run, str) else " ".join(run)),
        ("user, queue", f"{job.user}, {job['queue']}" if "namespace" not in job else ""),
        ("queue", job["queue"] if "namespace" in job else ""),
        ("level, priority", f"{job.level}, {job['priority']}"),
        ("labels", ", ".join(f"{key}={value}" for key, value in (job.get("labels") or {}).items())),
        ("workers", f"{words.size(job)} (target {job.target})" if not job.ended else words.size(job)),
        ("asks for", _asked(job)),
        ("steps", words.progress(job) + (f", {words.rate(job)} a second" if job.get("rate") else "")),
        ("metrics", ", ".join(f"{name} {value:g}" for name, value in _known(job.get("metrics")).items())),
        ("eta", "" if job.eta_s is None else f"in {words.span(job.eta_s)}"),
        ("expected", _expected(job.get("expected"))),
        ("submitted", words.ago(job.submitted_s, now_s)),
        ("started", words.ago(job.started_s, now_s)),
        ("ended", "" if job.ended_s is None else words.ago(job.ended_s, now_s)),
        ("waited, ran", f"{words.span(job.waited_s)}, {words.span(job.ran_s)}"),
        ("device time", words.span(job["device_s"])),
        ("history", _history(job)),
        ("lost", words.lost(job)),
    ]
    show.listing([(name, value) for name, value in told if value])
    _print_speeds(job.get("speeds") or [])
    _print_stuck(job.get("stuck") or [])
    if job.workers:
        print()
        if "namespace" in job:
            show.columns(["WORKER", "NODE", "POD", "AGE", "STATE"], [_pod(one, now_s) for one in job.workers])
            return
        show.columns(["WORKER", "NODE", "DEVICES", "PID", "AGE", "STATE"], [_worker(one, now_s) for one in job.workers])


def _asked(job: Job) -> str:
    """Where it may have other sizes: what policies give it that resize nobody."""
    low, high, told = job["min_workers"], job["max_workers"], job.spec.get("workers")
    if low == high or job.level == "service":
        return ""
    if isinstance(told, dict):  # an object of Kubernetes
        told = told.get("requested") or told.get("max")
    return f"{min(max(told or (job.spec.get('elastic') or {}).get('max', high), low), high)} workers"


def _print_speeds(speeds: list[dict[str, Any]]) -> None:
    """The sizes that were timed."""
    if not speeds:
        return
    print()
    show.columns(["SIZE", "STEPS/S", "SPREAD", "TIMED"], [_speed(one) for one in speeds], right=["STEPS/S", "SPREAD"])


def _print_stuck(stuck: list[dict[str, Any]]) -> None:
    """The stacks of workers that hang."""
    for one in stuck:
        print()
        print(in_line(one["text"]))
        for frame in one["stack"]:
            print(f"    {in_line(frame)}")


def _speed(speed: dict[str, Any]) -> list[str]:
    several = f"{speed['workers']} workers" if speed["workers"] > 1 else "1 worker"
    return [
        f"{several} ({speed['pool']})", f"{speed['rate']:.3g}", f"±{speed['spread']:.2g}", f"{speed['steps']} steps",
    ]  # fmt: skip


def _expected(told: dict[str, Any] | None) -> str:
    return told["text"].removeprefix("expected ") if told else ""


def _worker(worker: dict[str, Any], now_s: float) -> list[str]:
    leaving = worker.get("leaving")
    state = f"leaving: {leaving}" if leaving else "joined" if worker.get("joined") else "started"
    devices = ",".join(map(str, worker["devices"])) or "-"
    age = words.span(now_s - worker["launched_s"])
    return [worker["name"], worker["node"], devices, str(worker["pid"] or "-"), age, state]


def _pod(worker: dict[str, Any], now_s: float) -> list[str]:
    state = "leaving" if worker["leaving"] else worker["state"]
    return [
        worker["name"], worker["node"] or "-", worker["pod"], words.span(now_s - worker["launched_s"]),
        words.one_line(state),
    ]  # fmt: skip


def _history(job: Job) -> str:
    counted = ("starts", "resizes", "preemptions", "migrations", "failures")
    return ", ".join(f"{name} {job[name]}" for name in counted if job.get(name))


def _known(metrics: dict[str, float | None] | None) -> dict[str, float]:
    return {name: value for name, value in (metrics or {}).items() if value is not None}


def _each(refs: tuple[str, ...], json: bool, place: Place, do: Callable[[Client, str], Job], said: str) -> int:
    """Do it to every job; those that fail do not keep it from the others. The first failure's exit code."""
    if not refs:
        raise UsageError("no job was given", hint="give numbers or names; `stretto ps` lists them")
    code = 0
    with place.client() as client:
        for ref in refs:
            try:
                with guessing(client, ref):
                    _told(do(client, ref), json, said)
            except StrettoError as error:
                if len(refs) == 1:
                    raise
                print(f"error: {error}", file=sys.stderr)
                code = code or error.exit_code
    return code


def _told(job: Job, json: bool, said: str) -> None:
    if json:
        show.as_json(job)
    else:
        print(f"job {called(job)} {said}")
