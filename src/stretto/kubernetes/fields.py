"""The words of an ElasticJob: its kind, its labels, and which field of the job file each of its fields is.

Fields have the names of the job file in camel case, except where Kubernetes has another custom: the name and the
labels are metadata, the sizes are one section `workers`, and a command that is a list is called `command`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from stretto.errors import Problem, SpecError

GROUP = "stretto.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ElasticJob"
SINGULAR, PLURAL, SHORT = "elasticjob", "elasticjobs", "ej"

CLASS_LABEL = f"{GROUP}/class"
"""The class of a job whose name is not its class."""
SERVICE_LABEL = f"{GROUP}/service"
"""On everything of a service. Not the label of worker pods: what has this one is kube-scheduler's."""
MANAGED_BY = {"app.kubernetes.io/managed-by": "stretto"}
SCHEDULER = "stretto"
GPU_RESOURCE = "nvidia.com/gpu"
TRAINS = "worker"
"""The container of this name is the one that trains; the first if there is none."""

AS_IN_JOB_FILE = (
    "queue", "priority", "setup", "workdir", "env", "image", "level", "preemptible", "resources", "service", "deadline",
    "expect",
    "after", "stop", "retries", "checkpoint", "consistency", "hyperparameters",
)  # fmt: skip
"""Fields of the spec that mean what they mean in a job file."""
NOT_ON_KUBERNETES = {
    "roles": "fixed roles do not run on Kubernetes; make them a job or a Deployment of their own",
    "notify": "nobody is told from Kubernetes; watch the object instead: kubectl get elasticjob --watch",
}
SECTIONS = frozenset({"workers", "resources", "service", "replicas", "target", "stop", "checkpoint"})
"""Fields that hold fields of ours, whose names are translated; other objects hold names of the user's."""

_HUMP = re.compile(r"[A-Z]")
_LOW_LINE = re.compile(r"_([a-z])")
_HINT = "`kubectl explain elasticjob.spec` describes every field"


def camel(name: str) -> str:
    return _LOW_LINE.sub(lambda match: match[1].upper(), name)


def snake(name: str) -> str:
    return _HUMP.sub(lambda match: "_" + match[0].lower(), name)


def without_nulls(value: Any) -> Any:
    """A copy in which fields that are null are absent, as Kubernetes takes them."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def metadata(obj: Mapping[str, Any]) -> Mapping[str, Any]:
    found = obj.get("metadata")
    return found if isinstance(found, Mapping) else {}


class Findings:
    """What is wrong with an object, field by field; told all at once."""

    def __init__(self, of: str, hint: str = _HINT) -> None:
        self._of = of
        self._hint = hint
        self._problems: list[Problem] = []

    @classmethod
    def about(cls, obj: Mapping[str, Any]) -> Findings:
        name = metadata(obj).get("name")
        return cls(f"{SINGULAR} {name}" if isinstance(name, str) and name else SINGULAR)

    def add(self, field: str, text: str) -> None:
        """The first word on a field, or on one inside it, is kept: later ones are mostly consequences."""
        if not any(f"{problem.field}.".startswith(f"{field}.") for problem in self._problems):
            self._problems.append(Problem(0, field, text))

    def check(self) -> None:
        """Raise, if there is anything."""
        if not self._problems:
            return
        lines = [f"{problem.field}: {problem.text}" for problem in self._problems]
        told = f"{self._of}: {lines[0]}"
        if len(lines) > 1:
            told = "\n  ".join([f"{self._of}: {len(lines)} problems", *lines])
        raise SpecError(told, hint=self._hint, problems=tuple(self._problems))
