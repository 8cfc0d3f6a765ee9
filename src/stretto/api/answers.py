"""What goes out: the shapes of docs/api.md, made of the control plane's values.

Nothing else leaves the server, so what must not leave it, a job's secret and its environment, has no field here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from fastapi import Response

from stretto.api.problems import Problem
from stretto.core.estimate import curve as curves
from stretto.core.estimate.curve import Curve
from stretto.jobs import events as e
from stretto.jobs.model import Job, Level, Phase, Wish
from stretto.server.book import Active
from stretto.server.classes import Class, ClassSummary
from stretto.server.expected import Expected
from stretto.server.lengths import Source
from stretto.server.plane import Foreseen, Plane, PolicyInfo, Why
from stretto.store import Role, Token

Item = TypeVar("Item")
Told: TypeAlias = Callable[[float], float]
"""What people's clocks call a moment of the server's."""
_encoder = msgspec.json.Encoder()


class WorkerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    node: str
    devices: tuple[int, ...]
    pid: int
    leaving: str
    launched_s: float
    joined: bool


class StuckAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that makes no steps and holds its job up."""

    worker: str
    text: str
    stack: tuple[str, ...]
    """The innermost frames, the innermost last."""


class SpeedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was timed of a job at one size."""

    pool: str
    workers: int
    rate: float
    spread: float
    steps: int


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    number: int
    name: str
    user: str
    phase: Phase
    wish: Wish
    level: Level
    queue: str
    priority: int
    labels: dict[str, str]
    message: str
    exit_code: int | None
    submitted_s: float
    started_s: float | None
    ended_s: float | None
    waited_s: float
    ran_s: float
    device_s: float
    workers: list[WorkerAnswer]
    target: int
    min_workers: int
    max_workers: int
    reason: str
    text: str
    steps: int
    total_steps: int | None
    rate: float
    rate_timed: bool
    speeds: list[SpeedAnswer]
    stuck: list[StuckAnswer]
    eta_s: float | None
    expected: Expected | None
    metrics: dict[str, float | None]
    starts: int
    resizes: int
    preemptions: int
    migrations: int
    paused_s: float
    keeps: bool
    lost_s: float
    lost: dict[str, float]
    failures: int
    spec: dict[str, Any]
    withheld: bool = False
    """It is somebody else's: what only they may read is left out."""


class SubmittedAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="submitted"):
    job: JobAnswer


EventBody: TypeAlias = (
    SubmittedAnswer | e.Wished | e.Scaled | e.Moved | e.Launched | e.Running | e.Leaving | e.Exited | e.Resized
    | e.Retried | e.Kept | e.Interrupted | e.Progressed | e.Stuck | e.Warned | e.Migrated | e.Ended | e.Noted
)  # fmt: skip


class EventAnswer(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    at_s: float
    job: int | None
    event: EventBody


class UserAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A worker on a node."""

    job: int
    name: str
    user: str
    worker: str
    devices: tuple[int, ...]
    width_milli: int


class NodeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    pool: str
    devices: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int
    host: str
    drained: bool
    leaves_s: float | None
    """When those must have left who may still stay on a drained node; None: when they end."""
    waits_for: list[str]
    """Names of the jobs that are still on a drained node."""
    used: float
    workers: list[UserAnswer]


class ForecastItem(msgspec.Struct, frozen=True, kw_only=True):
    job: int
    name: str
    phase: Phase
    workers: int
    start_s: float | None
    end_s: float | None
    expected_from: Source | None
    """What its length was taken from; null for services."""
    start_guessed: bool
    end_guessed: bool
    """It hangs on a length that nobody knows."""
    text: str
    """Why nobody knows, where that is so."""


class ForecastAnswer(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    policy: str
    items: list[ForecastItem]
    text: str


class PreviewAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Of a submission that was not made."""

    job: JobAnswer
    forecast: ForecastItem


class Point(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    used: float
    devices: int
    running: int
    queued: int


class ClusterAnswer(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    version: str
    policy: str
    devices: int
    used: float
    nodes: int
    drained: int
    jobs: dict[Phase, int]
    decisions: int
    decision_s: float
    trouble: str
    series: list[Point]


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    user: str
    role: Role
    created_s: float
    expires_s: float | None
    last_used_s: float | None
    account: str | None
    """Whose processes its jobs are; null: the server's own."""


class NewTokenAnswer(TokenAnswer, frozen=True, kw_only=True):
    secret: str


class HealthAnswer(msgspec.Struct, frozen=True, kw_only=True):
    status: str
    version: str
    troubled: int = 0
    """Jobs that something keeps from going on, and nobody else; their events say what."""


class List(msgspec.Struct, Generic[Item], frozen=True):
    items: list[Item]
    next: str | None = None


SHAPES: dict[str, Any] = {
    "Job": JobAnswer,
    "JobList": List[JobAnswer],
    "Preview": PreviewAnswer,
    "Event": EventAnswer,
    "EventList": List[EventAnswer],
    "Why": Why,
    "NodeList": List[NodeAnswer],
    "Node": NodeAnswer,
    "Policy": PolicyInfo,
    "Forecast": ForecastAnswer,
    "Class": Class,
    "ClassList": List[ClassSummary],
    "Cluster": ClusterAnswer,
    "TokenList": List[TokenAnswer],
    "NewToken": NewTokenAnswer,
    "Health": HealthAnswer,
    "Problem": Problem,
}
"""Name in the OpenAPI document → what is encoded."""


def json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, "application/json")


def job(plane: Plane, job: Job, expected: Mapping[int, Expected] | None = None) -> JobAnswer:
    """With what the control plane knows of it beyond its events. `expected`: by number, where it was asked already."""
    active = plane.book.active(job.number)
    if active is None or job.ended:
        return _job(job, plane.told)
    driver = plane.loop.drivers.get(job.number)
    joined = driver.joined if driver is not None and job.workers else frozenset[str]()
    told = (plane.expected([job.number]) if expected is None else expected).get(job.number)
    speeds = _speeds(plane.loop.estimates.measured(job.number))
    return _job(job, plane.told, active, joined, plane.eta(job.number, told), speeds, told)


def _stuck(active: Active) -> list[StuckAnswer]:
    return [StuckAnswer(worker=one.worker, text=one.text, stack=one.stack) for one in active.progress.stuck]


def _speeds(measured: Mapping[str, Curve]) -> list[SpeedAnswer]:
    return [
        SpeedAnswer(pool=pool, workers=size.workers, rate=size.rate, spread=size.spread, steps=round(size.steps))
        for pool, curve in sorted(measured.items())
        for size in curves.measured(curve)
    ]


def _job(
    job: Job,
    told: Told,
    active: Active | None = None,
    joined: frozenset[str] = frozenset(),
    eta_s: float | None = None,
    speeds: Sequence[SpeedAnswer] = (),
    expected: Expected | None = None,
) -> JobAnswer:
    reason, text = (active.reason.name, active.reason.text) if active else (str(job.phase), "")
    return JobAnswer(
        id=job.id,
        number=job.number,
        name=job.name,
        user=job.user,
        phase=job.phase,
        wish=job.wish,
        level=job.level,
        queue=job.spec.get("queue", "default"),
        priority=_priority(job),
        labels=job.spec.get("labels", {}),
        message=job.message,
        exit_code=job.exit_code,
        submitted_s=told(job.submitted_s),
        started_s=None if job.started_s is None else told(job.started_s),
        ended_s=None if job.ended_s is None else told(job.ended_s),
        waited_s=job.waited_s,
        ran_s=job.ran_s,
        device_s=job.device_s,
        workers=[
            WorkerAnswer(
                name=worker.name,
                node=worker.seat.node,
                devices=worker.seat.devices,
                pid=worker.pid,
                leaving=worker.leaving,
                launched_s=told(worker.launched_s),
                joined=worker.name in joined,
            )
            for worker in job.workers
        ],
        target=len(active.target) if active else 0,
        min_workers=job.min_workers,
        max_workers=job.max_workers,
        reason=reason,
        text=text,
        steps=job.steps,
        total_steps=job.total_steps,
        rate=active.progress.rate if active and job.workers else 0.0,
        rate_timed=bool(active and job.workers and active.progress.window),
        speeds=list(speeds),
        stuck=_stuck(active) if active and job.workers else [],
        eta_s=eta_s,
        expected=expected,
        metrics=dict(job.metrics),
        starts=job.starts,
        resizes=job.resizes,
        preemptions=job.preemptions,
        migrations=job.migrations,
        paused_s=job.paused_s,
        keeps=job.keeps,
        lost_s=job.lost_s,
        lost=job.lost,
        failures=job.failures,
        spec=_shown(job.spec),
    )


def event(recorded: e.Recorded, told: Told) -> EventAnswer:
    shown: EventBody
    match recorded.event:
        case e.Submitted(job=job):
            shown = SubmittedAnswer(job=_job(job, told))
        case e.Retried(not_before_s=not_before_s) as retried:
            shown = msgspec.structs.replace(retried, not_before_s=told(not_before_s))
        case e.Running(began_s=began_s) as running if began_s:
            shown = msgspec.structs.replace(running, began_s=told(began_s))
        case body:
            shown = body
    return EventAnswer(seq=recorded.seq, at_s=told(recorded.at_s), job=recorded.job, event=shown)


def foreseen(plane: Plane, one: Foreseen, now_s: float) -> ForecastItem:
    """With times since 1970. Who is not in the book was not submitted."""
    active = plane.book.active(one.job)
    now_s = plane.told(now_s)
    start_s = None if one.start_s is None else now_s + one.start_s
    if active and active.job.workers:
        began_s = active.job.started_s
        start_s = None if began_s is None else plane.told(began_s)
    return ForecastItem(
        job=one.job,
        name=one.name,
        phase=active.job.phase if active else "queued",
        workers=len(active.target) if active else 0,
        start_s=start_s,
        end_s=None if one.end_s is None else now_s + one.end_s,
        expected_from=one.expected_from,
        start_guessed=one.start_guessed,
        end_guessed=one.end_guessed,
        text=one.text,
    )


def nodes(plane: Plane) -> list[NodeAnswer]:
    drained, workers = plane.loop.rules.drained, _workers_by_node(plane)
    return [
        NodeAnswer(
            name=node.name,
            pool=node.pool,
            devices=node.devices,
            cpu_milli=node.cpu_milli,
            memory_mib=node.memory_mib,
            gpu_memory_mib=node.gpu_memory_mib,
            host=node.host,
            drained=node.name in drained,
            leaves_s=_finite(plane.told(drained.get(node.name, math.inf))),
            waits_for=sorted({one.name for one in workers.get(node.name, ())}) if node.name in drained else [],
            used=sum(worker.width_milli for worker in workers.get(node.name, ())) / 1000,
            workers=workers.get(node.name, []),
        )
        for node in plane.backend.nodes()
    ]


def token(token: Token) -> TokenAnswer:
    return TokenAnswer(**_token_fields(token))


def new_token(token: Token, secret: str) -> NewTokenAnswer:
    return NewTokenAnswer(**_token_fields(token), secret=secret)


def _token_fields(token: Token) -> dict[str, Any]:
    return {name: getattr(token, name) for name in TokenAnswer.__struct_fields__}


def _workers_by_node(plane: Plane) -> dict[str, list[UserAnswer]]:
    found: dict[str, list[UserAnswer]] = {}
    for active in plane.book:
        job = active.job
        for worker in job.workers:
            found.setdefault(worker.seat.node, []).append(
                UserAnswer(
                    job=job.number,
                    name=job.name,
                    user=job.user,
                    worker=worker.name,
                    devices=worker.seat.devices,
                    width_milli=job.width_milli,
                )
            )
    return found


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _priority(job: Job) -> int:
    given = job.spec.get("priority")
    return (80 if job.level == "service" else 50) if given is None else int(given)


def _shown(spec: dict[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in spec.items() if field != "env"} if "env" in spec else spec
