"""Who reads what.

Everybody with a token sees that a job is there: number, name, user, phase, sizes, reasons, devices and times. What it
is and says (its job file, message, logs, metrics, results and the texts of its events) is for its owner and for admins.
`stretto up --open` lets everybody read everything.

`RULES` says of each endpoint which of these it is; a test walks all routes and compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from stretto.api.answers import EventAnswer, JobAnswer, SubmittedAnswer
from stretto.api.auth import Caller
from stretto.errors import Denied
from stretto.jobs import events as e
from stretto.jobs.model import Job
from stretto.server.plane import Plane, Why

Rule: TypeAlias = Literal["anybody", "all", "cut", "own", "admin", "worker"]
"""`anybody`: no token. `all`: of nobody in particular, or what everybody may see. `cut`: of others' jobs only what
everybody may see. `own`: of one's own jobs only. `admin`. `worker`: by the job's secret."""

RULES: Mapping[tuple[str, str], Rule] = {
    ("POST", "/v1/jobs"): "own",
    ("GET", "/v1/jobs"): "cut",
    ("GET", "/v1/jobs/{job}"): "cut",
    ("POST", "/v1/jobs/{job}/cancel"): "own",
    ("POST", "/v1/jobs/{job}/suspend"): "own",
    ("POST", "/v1/jobs/{job}/resume"): "own",
    ("POST", "/v1/jobs/{job}/scale"): "own",
    ("POST", "/v1/jobs/{job}/migrate"): "own",
    ("GET", "/v1/jobs/{job}/why"): "cut",
    ("GET", "/v1/jobs/{job}/events"): "cut",
    ("GET", "/v1/events"): "cut",
    ("GET", "/v1/events/stream"): "cut",
    ("GET", "/v1/jobs/{job}/logs"): "own",
    ("GET", "/v1/jobs/{job}/logs/pages"): "own",
    ("WS", "/v1/jobs/{job}/logs/follow"): "own",
    ("WS", "/v1/jobs/{job}/join"): "worker",
    ("GET", "/v1/nodes"): "all",
    ("POST", "/v1/nodes/{node}/drain"): "admin",
    ("POST", "/v1/nodes/{node}/undrain"): "admin",
    ("GET", "/v1/policy"): "all",
    ("PUT", "/v1/policy"): "admin",
    ("GET", "/v1/forecast"): "all",
    ("GET", "/v1/classes"): "own",
    ("GET", "/v1/classes/{name:path}"): "own",
    ("DELETE", "/v1/classes/{name:path}"): "admin",
    ("GET", "/v1/cluster"): "all",
    ("GET", "/v1/tokens"): "admin",
    ("POST", "/v1/tokens"): "admin",
    ("DELETE", "/v1/tokens/{token}"): "admin",
    ("GET", "/metrics"): "all",
    ("GET", "/healthz"): "anybody",
    ("GET", "/readyz"): "anybody",
    ("GET", "/v1/openapi.json"): "anybody",
    ("GET", "/docs"): "anybody",
    ("GET", "/docs/oauth2-redirect"): "anybody",
}

_OF_A_JOB: Mapping[str, Any] = {
    "labels": {}, "message": "", "exit_code": None, "steps": 0, "total_steps": None, "rate": 0.0, "rate_timed": False,
    "speeds": [], "stuck": [], "metrics": {}, "lost": {}, "spec": {},
}  # fmt: skip

_OF_AN_EVENT: Mapping[type[Any], Mapping[str, Any]] = {
    e.Wished: {"why": ""},
    e.Scaled: {},
    e.Moved: {"why": ""},
    e.Launched: {},
    e.Running: {"why": ""},
    e.Leaving: {"why": "", "taken": None},
    e.Exited: {"status": 0, "text": ""},
    e.Resized: {"text": ""},
    e.Retried: {"text": ""},
    e.Kept: {"how": ""},
    e.Interrupted: {"text": ""},
    e.Progressed: {"steps": 0, "total_steps": None, "metrics": {}},
    e.Stuck: {"text": "", "stack": ()},
    e.Warned: {"text": ""},
    e.Migrated: {},
    e.Ended: {"message": "", "exit_code": None},
    e.Noted: {"data": {}},
}
"""What is left out of each kind for others."""

_TELLING = ("back-off", "trouble")
"""Reasons whose sentence goes on with what the job said."""
_MOST_KNOWN = 100_000


class Seeing:
    """One server's answer to who reads what."""

    def __init__(self, plane: Plane, *, opened: bool) -> None:
        self._plane, self._open = plane, opened
        self._users: dict[int, str] = {}
        """Whose jobs are, by number: that never changes."""

    def everything(self, caller: Caller) -> bool:
        return self._open or caller.role == "admin"

    def owns(self, caller: Caller, user: str) -> bool:
        return self.everything(caller) or caller.user == user

    def check(self, caller: Caller, job: Job) -> None:
        """Raises `Denied` where it is about what only the owner may read."""
        if not self.owns(caller, job.user):
            raise Denied(f"job {job.id} belongs to {job.user}", hint="ask them, or an admin")

    def job(self, caller: Caller, answer: JobAnswer) -> JobAnswer:
        return answer if self.owns(caller, answer.user) else _cut_job(answer)

    def why(self, caller: Caller, job: Job, answer: Why) -> Why:
        if self.owns(caller, job.user):
            return answer
        text = answer.text.partition(":")[0] if answer.reason in _TELLING else answer.text
        return msgspec.structs.replace(answer, text=text.replace(f": {job.message}", "") if job.message else text)

    async def own(self, caller: Caller, recorded: Iterable[e.Recorded]) -> frozenset[int]:
        """The numbers of the jobs in these events of which everything may be told. Of jobs that are gone: nothing."""
        if self.everything(caller):
            return frozenset(one.job for one in recorded if one.job is not None)
        numbers = {one.job for one in recorded if one.job is not None}
        for one in recorded:
            if isinstance(one.event, e.Submitted):
                self._note(one.event.job)
        for number in numbers - self._users.keys():
            if (active := self._plane.book.active(number)) is not None:
                self._note(active.job)
        if unknown := numbers - self._users.keys():
            for job in await asyncio.to_thread(self._look_up, sorted(unknown)):
                self._note(job)
        return frozenset(number for number in numbers if self._users.get(number) == caller.user)

    async def classes(self, caller: Caller) -> list[str]:
        """Of which something was learned that the caller may read: a class's name may be a whole command."""
        known = self._plane.classes()
        if self.everything(caller):
            return known
        own = await self._plane.classes_with_jobs(frozenset(known), caller.user)
        return [one for one in known if one in own]

    def event(self, caller: Caller, own: frozenset[int], answer: EventAnswer) -> EventAnswer:
        """`own`: as asked before."""
        if self.everything(caller) or answer.job in own:
            return answer
        if isinstance(answer.event, SubmittedAnswer):
            return msgspec.structs.replace(answer, event=SubmittedAnswer(job=_cut_job(answer.event.job)))
        hidden = _OF_AN_EVENT[type(answer.event)]
        return msgspec.structs.replace(answer, event=msgspec.structs.replace(answer.event, **hidden))

    def _note(self, job: Job) -> None:
        if len(self._users) >= _MOST_KNOWN:
            self._users.clear()
        self._users[job.number] = job.user

    def _look_up(self, numbers: Iterable[int]) -> list[Job]:
        found = (self._plane.store.job(number) for number in numbers)
        return [job for job in found if job is not None]


def _cut_job(answer: JobAnswer) -> JobAnswer:
    text = answer.text.partition(":")[0] if answer.reason in _TELLING else answer.text
    return msgspec.structs.replace(answer, **_OF_A_JOB, text=text, withheld=True)
