"""A job file as an ElasticJob: what `stretto submit --on kubernetes` creates.

What means nothing on Kubernetes is refused in the words of the job file, all of it at once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from stretto.core.snapshot import GPU
from stretto.kubernetes.fields import (
    API_VERSION,
    AS_IN_JOB_FILE,
    CLASS_LABEL,
    GROUP,
    KIND,
    NOT_ON_KUBERNETES,
    SECTIONS,
    Findings,
    camel,
    without_nulls,
)
from stretto.spec.model import JobFile

_HINT = "leave it out for Kubernetes, or give the job to a server of its own: stretto up"
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_LONGEST_NAME = 63
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_ANY_HOST = ("127.0.0.1", "0.0.0.0", "::", "::1")
_DURATIONS = frozenset({"expect", "deadline", "every", "grace", "hold"})


def elastic_job(
    file: JobFile,
    name: str | None = None,
    namespace: str | None = None,
    *,
    image: str | None = None,
    template: Mapping[str, Any] | None = None,
    suspend: bool = False,
) -> dict[str, Any]:
    """The object that says what the job file says.

    Its name is `name`, or the file's; under another name it stays of the file's class. `image` is used where the file
    names none. `template` is a pod template to build on: volumes, tolerations, another container.
    """
    findings = Findings(f"job {name or file.name or ''}".strip(), hint=_HINT)
    called = _name(file, name, findings)
    _refuse(file, findings)
    image = file.image or image
    if image is None and template is None:
        findings.add("image", "is missing; on Kubernetes every worker is a container, so name its image")
    findings.check()
    spec = {
        **_written(file),
        "image": image,
        "workers": _sizes(file),
        "level": _level(file),
        "suspend": suspend or None,
        "template": dict(template) if template is not None else None,
    }
    spec["command" if isinstance(file.run, tuple) else "run"] = file.run
    labels = dict(file.labels)
    if file.name is not None and file.name != called:
        labels[CLASS_LABEL] = file.name
    about = {"name": called, "namespace": namespace, "labels": labels or None}
    made: dict[str, Any] = without_nulls(
        {"apiVersion": API_VERSION, "kind": KIND, "metadata": about, "spec": dict(sorted(spec.items()))}
    )
    return made


def seconds_text(seconds: float) -> str:
    """A length of time with its unit, to the billionth: 90.0 is `90s`."""
    text = f"{max(seconds, 1e-9):.9f}".rstrip("0").rstrip(".")
    return f"{text}s"


def _name(file: JobFile, name: str | None, findings: Findings) -> str:
    called = name or file.name
    if called is None:
        findings.add("name", "is missing; an object on Kubernetes has one")
    elif len(called) > _LONGEST_NAME or not _NAME.fullmatch(called) or called.isdecimal():
        findings.add(
            "name", f"{called!r} is not a name on Kubernetes; use up to 63 lower-case letters, digits, '-' and '.'"
        )
    return called or ""


def _refuse(file: JobFile, findings: Findings) -> None:
    """What an object cannot say."""
    for field, why in NOT_ON_KUBERNETES.items():
        if getattr(file, field):
            findings.add(field, why)
    if file.workdir != "." and not file.workdir.startswith("/"):
        findings.add(
            "workdir", f"{file.workdir!r} is a folder of this machine; name one of the image, from its root, or none"
        )
    _refuse_shares(file, findings)
    for key, text in file.labels.items():
        if key.startswith(f"{GROUP}/"):
            findings.add(f"labels.{key}", f"labels of {GROUP} are Stretto's own")
        elif not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(text):
            findings.add(
                f"labels.{key}",
                "is not a label on Kubernetes; use up to 63 letters, digits, '-', '_' and '.' in key and value",
            )
    if file.service is not None:
        if file.service.host not in _ANY_HOST:
            findings.add("service.host", "a service on Kubernetes has an address of the cluster; leave it out")
        if file.service.replicas.step != 1:
            findings.add("service.replicas.step", "an autoscaler goes in steps of one; leave it out")


def _refuse_shares(file: JobFile, findings: Findings) -> None:
    of = file.resources
    if of.disk:
        findings.add("resources.disk", "is not counted on Kubernetes; limit ephemeral-storage in the pod template")
    why = "a share of a GPU, which Kubernetes does not give; ask for a whole number of what the device plugin offers"
    if of.width_milli % GPU:
        findings.add("resources.gpu", f"{of.width_milli / GPU} is {why}")
    elif of.gpu is None and of.gpu_memory:
        findings.add("resources.gpu_memory", f"without gpu is {why}")


def _written(file: JobFile) -> dict[str, Any]:
    """The fields that both have, without those that have their default."""
    dumped = file.model_dump(mode="json", include=set(AS_IN_JOB_FILE), exclude_defaults=True, exclude_none=True)
    written = {camel(field): _section(field, value) for field, value in dumped.items()}
    written["resources"] = {**written.get("resources", {}), "gpu": file.resources.width_milli // GPU}
    if "setup" in written and not isinstance(file.setup, str):
        written["setup"] = shlex.join(file.setup or ())
    written.get("service", {}).pop("host", None)
    return written


def _section(field: str, value: Any, inside: str = "") -> Any:
    if isinstance(value, dict) and field in SECTIONS:
        return {camel(name): _section(name, item, field) for name, item in value.items()}
    if (field in _DURATIONS or (inside == "stop" and field == "after")) and not isinstance(value, str):
        return seconds_text(value)
    return value


def _sizes(file: JobFile) -> dict[str, Any] | None:
    if file.service is not None:
        return None
    if file.elastic is None:
        return {"min": file.workers or 1, "max": file.workers or 1}
    sizes = file.elastic.model_dump(mode="json", exclude_defaults=True) | {"min": file.elastic.min}
    return {**sizes, "requested": file.workers}


def _level(file: JobFile) -> str | None:
    """Said where the object would be taken for something else: one size is rigid there."""
    if file.level is None and file.elastic is not None and file.elastic.min == file.elastic.max:
        return "elastic"
    return file.level
