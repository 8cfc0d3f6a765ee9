"""Jobs: in, out, and changes of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from stretto.api import answers, bodies
from stretto.api.auth import Caller, check_owner
from stretto.api.describing import SUBMIT, may_take, takes
from stretto.api.describing import answers as documented
from stretto.api.health import not_ready
from stretto.api.parts import Parts, Server, User, Viewer, parts_of
from stretto.errors import UsageError
from stretto.jobs.model import Context, Job, Level, Phase
from stretto.spec import JobFile
from stretto.store import Query as JobQuery
from stretto.store import Taken

_ACTIVE: tuple[Phase, ...] = ("queued", "running", "suspended")
_LONGEST_KEY = 255
_MOST_LABELS = 16
_LONGEST_ASKED = 1000
LARGEST = 2**63 - 1
"""What a database takes as a number."""

router = APIRouter(tags=["jobs"])


class Plain(APIRoute):
    """For the one endpoint that must be quick: it takes the request as it is, and checks everything itself."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint


async def submit(request: Request) -> Response:
    """Submit a job, durably: a job file as JSON or YAML."""
    parts = parts_of(request)
    caller = await parts.auth.caller(request, "user")
    body = await bodies.raw(request)
    file, context = await bodies.submission(request, body)
    if request.scope["query_string"] and _flag(request, "dry_run"):
        return await _preview(parts, file, context, caller)
    if trouble := parts.trouble():
        raise not_ready(trouble)
    key = _key(request)
    digest = hashlib.sha256(body).hexdigest() if key else ""
    try:
        job = await parts.plane.submit(file, context, caller.user, key=key, digest=digest, account=caller.account)
    except Taken:
        if not key:
            raise
        # Twice at the same time: now the other one is there.
        job = await parts.plane.submit(file, context, caller.user, key=key, digest=digest, account=caller.account)
    return answers.json(answers.job(parts.plane, job), 201, {"Location": f"/v1/jobs/{job.id}"})


def submission_route() -> Plain:
    return Plain(
        "/v1/jobs",
        submit,
        methods=["POST"],
        status_code=201,
        response_model=None,
        response_class=Response,
        tags=["jobs"],
        openapi_extra=SUBMIT,
        responses={
            **documented("Job", 201, "It was accepted, and survives anything from now on."),
            200: documented("Preview", 200, "A dry run.")[200],
        },
    )


@router.get("/v1/jobs", responses=documented("JobList"))
async def list_jobs(
    server: Server,
    caller: Viewer,
    phase: Annotated[
        list[Literal["queued", "running", "suspended", "succeeded", "failed", "cancelled", "active"]] | None,
        Query(description="`active`: all that have not ended."),
    ] = None,
    name: Annotated[str | None, Query(description="`*` is any text, `?` any one character.")] = None,
    user: Annotated[str | None, Query()] = None,
    queue: Annotated[str | None, Query()] = None,
    level: Annotated[Level | None, Query()] = None,
    label: Annotated[list[str] | None, Query(description="`key=value`; all of them.")] = None,
    order: Annotated[Literal["newest", "oldest"], Query()] = "newest",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(description="`next` of the page before.")] = None,
) -> Response:
    """Jobs, a page at a time."""
    query = JobQuery(
        phases=_phases(phase or []),
        name=_text(name, "name"),
        user=_text(user, "user"),
        queue=_text(queue, "queue"),
        level=level,
        labels=_labels(label or []),
        oldest_first=order == "oldest",
        after=None if cursor is None else number(cursor, "cursor"),
        limit=limit,
    )
    page = await server.plane.jobs(query)
    expected = server.plane.expected(job.number for job in page.items)
    seen = page.items
    if query.labels:
        # What they are is theirs to know.
        seen = [job for job in seen if server.seeing.owns(caller, job.user)]
    items = [server.seeing.job(caller, answers.job(server.plane, job, expected)) for job in seen]
    return answers.json(answers.List(items, None if page.next is None else str(page.next)))


@router.get("/v1/jobs/{job}", responses=documented("Job"))
async def show_job(server: Server, caller: Viewer, job: str) -> Response:
    """One job, by number or by name (the latest)."""
    return answers.json(server.seeing.job(caller, answers.job(server.plane, await server.plane.job(job))))


@router.post("/v1/jobs/{job}/cancel", status_code=202, responses=documented("Job", 202))
async def cancel_job(server: Server, caller: User, job: str) -> Response:
    """End it."""
    return await _wish(server, caller, job, "cancel")


@router.post(
    "/v1/jobs/{job}/suspend", status_code=202, responses=documented("Job", 202), openapi_extra=may_take("Suspend")
)  # fmt: skip
async def suspend_job(request: Request, server: Server, caller: User, job: str) -> Response:
    """Take its workers away until it is resumed."""
    asked = await bodies.read_if_any(request, bodies.Suspend)
    return await _wish(server, caller, job, "suspend", force=asked.force)


@router.post("/v1/jobs/{job}/resume", status_code=202, responses=documented("Job", 202))
async def resume_job(server: Server, caller: User, job: str) -> Response:
    """Let it go on."""
    return await _wish(server, caller, job, "run")


@router.post(
    "/v1/jobs/{job}/scale", status_code=202, responses=documented("Job", 202), openapi_extra=takes("Scale")
)  # fmt: skip
async def scale_job(request: Request, server: Server, caller: User, job: str) -> Response:
    """Change between how many workers it may run."""
    asked = await bodies.read(request, bodies.Scale)
    if asked.min is None and asked.max is None:
        raise UsageError("neither min nor max is given", hint='send {"min": 1, "max": 4}, or one of them')
    found = await _own(server, caller, job)
    changed = await server.plane.scale(found.id, asked.min, asked.max, caller.user, force=asked.force)
    return answers.json(answers.job(server.plane, changed), 202)


@router.post(
    "/v1/jobs/{job}/migrate", status_code=202, responses=documented("Job", 202), openapi_extra=takes("Migrate")
)  # fmt: skip
async def migrate_job(request: Request, server: Server, caller: User, job: str) -> Response:
    """Move it to a node."""
    asked = await bodies.read(request, bodies.Migrate)
    found = await _own(server, caller, job)
    changed = await server.plane.migrate(found.id, asked.to, caller.user, force=asked.force)
    return answers.json(answers.job(server.plane, changed), 202)


@router.get("/v1/jobs/{job}/why", responses=documented("Why"))
async def explain_job(server: Server, caller: Viewer, job: str) -> Response:
    """Why it has the workers it has."""
    found = await server.plane.job(job)
    return answers.json(server.seeing.why(caller, found, await server.plane.why(found.id)))


async def _preview(parts: Parts, file: JobFile, context: Context, caller: Caller) -> Response:
    job = parts.plane.preview(file, context, caller.user)
    now_s = parts.plane.clock()
    foreseen = answers.foreseen(parts.plane, await parts.plane.foresee(file, context, caller.user), now_s)
    forecast = msgspec.structs.replace(foreseen, job=job.number, name=job.name)
    return answers.json(answers.PreviewAnswer(job=answers.job(parts.plane, job), forecast=forecast))


async def _wish(server: Parts, caller: Caller, ref: str, wish: str, *, force: bool = False) -> Response:
    job = await _own(server, caller, ref)
    changed = await server.plane.wish(job.id, wish, caller.user, force=force)
    return answers.json(answers.job(server.plane, changed), 202)


async def _own(server: Parts, caller: Caller, ref: str) -> Job:
    job = await server.plane.job(ref)
    check_owner(caller, job)
    return job


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > _LONGEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(
            "Idempotency-Key: it is too long, or has other characters than visible ASCII",
            hint=f"use up to {_LONGEST_KEY} letters and digits",
        )
    return key


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false").lower()
    if given not in ("true", "false", "1", "0", ""):
        raise UsageError(f"{name}: {given!r} is neither true nor false", hint="leave it out, or write true")
    return given in ("true", "1", "")


def _phases(asked: Sequence[str]) -> tuple[Phase, ...]:
    found: list[Any] = []
    for phase in asked:
        found += _ACTIVE if phase == "active" else (phase,)
    return tuple(dict.fromkeys(found))


def _labels(asked: list[str]) -> dict[str, str]:
    if len(asked) > _MOST_LABELS:
        # Each is one more table for the database to go through, and it knows a limit.
        raise UsageError(f"label: {len(asked)} are asked for", hint=f"ask for {_MOST_LABELS} at most")
    found: dict[str, str] = {}
    for pair in asked:
        key, equals, value = bodies.plain(pair, "label").partition("=")
        if not equals or not key:
            raise UsageError(f"label: {pair!r} is not key=value", hint="write label=team=vision")
        if found.setdefault(key, value) != value:
            raise UsageError(f"label: {key!r} is asked for with two values", hint="a job has one; leave out the other")
    return found


def _text(value: str | None, what: str) -> str | None:
    if value is not None and len(value) > _LONGEST_ASKED:
        raise UsageError(f"{what}: {len(value)} characters are more than any has", hint=f"{_LONGEST_ASKED} at most")
    return None if value is None else bodies.plain(value, what)


def number(text: str, what: str) -> int:
    """Text that must be a number which a database knows."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 19 or int(text) > LARGEST:
        raise UsageError(f"{what}: {text!r} is not one of ours", hint="use what an earlier answer said")
    return int(text)
