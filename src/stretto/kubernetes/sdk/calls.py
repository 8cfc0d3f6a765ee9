"""What a client asks of the API server, and what its answers mean: no I/O here.

Which object a job file becomes, which object a name means, what is changed in one, and how an error of the API server
is told to somebody who thinks of jobs.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from stretto.client.calls import Ref, Source, job_file
from stretto.client.documents import ENDED, Job
from stretto.errors import Conflict, NotFound, SpecError, Unavailable, UsageError
from stretto.kubernetes import problems
from stretto.kubernetes.elastic_job import elastic_job
from stretto.kubernetes.fields import GROUP
from stretto.kubernetes.model import ElasticJob
from stretto.kubernetes.sdk import documents
from stretto.spec import load

KEY_NOTE = f"{GROUP}/submission"
"""On an object: which submission made it, so that one whose answer was lost can be told from somebody else's."""
INSTALL = "kubectl apply -k deploy/kubernetes/base"
ANYWHERE = "*"
"""For a namespace: all of them."""

_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_NO_IMAGE = "say `image:` in the job file, or give it with the submission: --image, image="


class Names(NamedTuple):
    """Which object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def names(ref: Ref, namespace: str) -> Names:
    """NAME is one in that namespace; NAMESPACE/NAME, or a job, says it all."""
    told = ref.id if isinstance(ref, Job) else str(ref)
    first, slash, rest = told.partition("/")
    found = Names(first, rest) if slash else Names(namespace, told)
    if not all(_NAME.fullmatch(part) for part in found):
        raise UsageError(
            f"{told!r} is not a job", hint="give its name, or NAMESPACE/NAME; `stretto ps --on kubernetes` lists them"
        )
    return found


def elastic_job_of(
    source: Source,
    *,
    name: str | None = None,
    image: str | None = None,
    namespace: str | None = None,
    env: Mapping[str, str] | None = None,
    template: Mapping[str, Any] | None = None,
    suspend: bool = False,
) -> dict[str, Any]:
    """The object that a job file becomes; see `options.Making`."""
    file = load(job_file(source))
    if env:
        file = file.model_copy(update={"env": {**env, **file.env}})
    if name is None and file.name is None:
        name = f"job-{secrets.token_hex(4)}"
    try:
        return elastic_job(file, name, namespace, image=image, template=template, suspend=suspend)
    except SpecError as error:
        if any(problem.field == "image" for problem in error.problems):
            raise SpecError(error.message, hint=_NO_IMAGE, problems=error.problems) from None
        raise


def marked(made: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {**made, "metadata": {**made["metadata"], "annotations": {KEY_NOTE: key}}}


def is_of(found: ElasticJob, key: str) -> bool:
    return found.metadata.annotations.get(KEY_NOTE) == key


def suspension(found: ElasticJob, suspend: bool) -> dict[str, Any]:
    """A merge patch."""
    _must_go_on(found)
    return {"spec": {"suspend": suspend}}


def scaling(found: ElasticJob, low: int | None, high: int | None) -> dict[str, Any]:
    """A merge patch. What the object's schema cannot say is said here, as a server does."""
    _must_go_on(found)
    before_low, before_high = documents.sizes(found.spec)
    if documents.level(found) == "rigid":
        raise Conflict(
            f"job {_id(found)} is rigid: it has {before_high} workers or none",
            hint="give it an elastic section, and level restart if its script cannot resize by itself",
        )
    new_high = before_high if high is None else high
    new_low = low if low is not None else min(before_low, new_high) if high is not None else before_low
    if not 1 <= new_low <= new_high:
        raise UsageError(f"{new_low}..{new_high} workers cannot be", hint="1 <= min <= max must hold")
    size: dict[str, Any] = {"min": new_low, "max": new_high}
    if found.spec.get("service"):
        return {"spec": {"service": {"replicas": size}}}
    requested = (found.spec.get("workers") or {}).get("requested")
    if requested is not None and not new_low <= requested <= new_high:
        size["requested"] = None
    # With one size it would be taken for a rigid one, which it was not made as.
    return {"spec": {"workers": size, "level": documents.level(found)}}


def must_not_have_ended(found: ElasticJob) -> None:
    phase = documents.phase(found)
    if phase in ENDED:
        how = "been cancelled" if phase == "cancelled" else phase
        about = Names(found.metadata.namespace, found.metadata.name)
        raise Conflict(
            f"job {about} has {how}", hint=f"kubectl delete elasticjob {_words(about)} removes it with its logs"
        )


@dataclass(frozen=True)
class Wanted:
    """Which jobs of a list; see `options.Filters`."""

    phase: str | Iterable[str] = ()
    name: str | None = None
    user: str | None = None
    queue: str | None = None
    level: str | None = None
    labels: Mapping[str, str] | None = None
    order: str = "newest"
    limit: int | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.order not in ("newest", "oldest"):
            raise UsageError(f"there is no order {self.order!r}", hint="newest or oldest")

    @property
    def selector(self) -> str:
        """What the API server can choose by itself."""
        return ",".join(f"{key}={value}" for key, value in (self.labels or {}).items())

    def among(self, jobs: Iterable[Job]) -> list[Job]:
        phases = {self.phase} if isinstance(self.phase, str) else set(self.phase)
        if "active" in phases:
            phases |= set(documents.ACTIVE)
        fit = [job for job in jobs if (not phases or job.phase in phases) and self._fits(job)]
        fit.sort(key=lambda job: (job.submitted_s, job.number, job.id), reverse=self.order == "newest")
        return fit[: self.limit]

    def _fits(self, job: Job) -> bool:
        exact = ((self.user, job.user), (self.queue, job["queue"]), (self.level, job.level))
        return (self.name is None or fnmatchcase(job.name, self.name)) and all(
            asked is None or asked == told for asked, told in exact
        )


@contextmanager
def told_of(about: str | Names | None = None) -> Iterator[None]:
    """Errors of the API server, in the words of jobs. `about`: which one is asked for; as it was written, if known."""
    try:
        yield
    except problems.ObjectNotFound as error:
        raise _not_found(error, about) from None
    except problems.AlreadyExists as error:
        raise _with_hint(
            error, f"there is a job {about} already",
            f"submit it under another name, or remove that one: kubectl delete elasticjob {_words(about)}",
        ) from None  # fmt: skip
    except problems.Refused as error:
        raise _with_hint(
            error, error.message, error.hint or "`kubectl auth can-i --list` says what you may do there"
        ) from None
    except problems.Invalid as error:
        raise _with_hint(
            error, error.message, error.hint or "`kubectl explain elasticjob.spec` describes every field"
        ) from None
    except problems.Unreachable as error:
        raise _with_hint(
            error, error.message, error.hint or "is the cluster up? `kubectl cluster-info` asks it, too"
        ) from None


def _not_found(error: problems.ObjectNotFound, about: str | Names | None) -> NotFound | Unavailable:
    if error.reason != "NotFound" or "could not find the requested resource" in error.message:
        # The address itself is unknown to the server: there are no ElasticJobs at all.
        return Unavailable("Stretto is not installed in this cluster: it has no ElasticJobs", hint=INSTALL)
    if error.message.startswith("namespaces "):
        return NotFound(error.message, hint="`kubectl create namespace` makes one")
    if about is None:
        return error
    return NotFound(f"there is no job {str(about)!r}", hint="`stretto ps --on kubernetes --all` lists them")


def _with_hint(error: problems.ApiError, message: str, hint: str) -> problems.ApiError:
    told = type(error)(message, hint=hint, status=error.status, reason=error.reason)
    if isinstance(error, problems.Invalid) and isinstance(told, problems.Invalid):
        told.causes = error.causes
    return told


def _must_go_on(found: ElasticJob) -> None:
    must_not_have_ended(found)
    if found.metadata.is_leaving:
        raise Conflict(f"job {_id(found)} is being cancelled", hint="submit it again instead")


def _id(found: ElasticJob) -> str:
    return str(Names(found.metadata.namespace, found.metadata.name))


def _words(about: str | Names | None) -> str:
    return f"{about.name} -n {about.namespace}" if isinstance(about, Names) else "NAME"
