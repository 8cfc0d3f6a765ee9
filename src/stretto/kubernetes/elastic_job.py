"""An ElasticJob, as JSON has it, and the job file that says the same.

`job_file` is how the controller reads an object: the one job model checks it, and every problem is told at once, with
the field as the object has it (`spec.workers.min`). `worker_template` is the pod that its workers are made from.
`stretto.kubernetes.writing` goes the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from stretto.core.snapshot import GPU
from stretto.kubernetes import pod_template, reading
from stretto.kubernetes.fields import CLASS_LABEL, GPU_RESOURCE, Findings, metadata
from stretto.kubernetes.pod_template import pod_requests
from stretto.kubernetes.writing import elastic_job
from stretto.spec.model import JobFile, Resources
from stretto.spec.units import MOST_CPU_MILLI, MOST_GPUS, MOST_MIB

__all__ = ["Read", "elastic_job", "job_class", "job_file", "pod_requests", "read", "worker_template"]


class Read(NamedTuple):
    """An object that was understood."""

    file: JobFile
    """With the resources of a whole worker pod."""
    template: dict[str, Any]
    """The pod of a worker, complete but for what the controller adds to each."""
    requests: dict[str, int]
    """What one takes of its node; see `pod_requests`."""


def job_file(obj: Mapping[str, Any], gpu_resource: str = GPU_RESOURCE) -> JobFile:
    """The job file that says what the object says, or `SpecError`."""
    return read(obj, gpu_resource).file


def worker_template(obj: Mapping[str, Any], gpu_resource: str = GPU_RESOURCE) -> dict[str, Any]:
    """The pod of a worker, with everything the spec says filled in, or `SpecError`."""
    return read(obj, gpu_resource).template


def read(obj: Mapping[str, Any], gpu_resource: str = GPU_RESOURCE) -> Read:
    """Job file and template, which come from one reading; or `SpecError`."""
    findings = Findings.about(obj)
    spec = reading.read_spec(obj, findings)
    command = reading.read_command(spec, findings)
    template = pod_template.opened(spec, findings)
    file = reading.read_file(obj, spec, command, findings)
    findings.check()
    assert file is not None
    if not file.is_service:
        pod_template.refuse_placing(template, findings)
    pod_template.fill_image(template, file, findings)
    own = pod_template.own_command(template)
    pod_template.fill(template, file, _with_port(command, file), gpu_resource, findings)
    requests = pod_template.totals(template, findings)
    resources = _resources(file, requests, gpu_resource, findings)
    findings.check()
    image = pod_template.Trainer(template["spec"]).container["image"]
    complete = file.model_copy(update={"resources": resources, "image": image, "run": command or own})
    return Read(complete, template, requests)


def job_class(obj: Mapping[str, Any]) -> str:
    """Jobs of one class share their estimates: by label, by the name they were generated from, or by name."""
    about = metadata(obj)
    labels = about.get("labels") or {}
    return labels.get(CLASS_LABEL) or (about.get("generateName") or "").rstrip("-.") or str(about.get("name", ""))


def _with_port(command: reading.Command | None, file: JobFile) -> reading.Command | None:
    """Every replica listens on the same port here: each has an address of its own."""
    if command is None or file.service is None:
        return command
    port = str(file.service.port)
    if isinstance(command, str):
        return command.replace("{port}", port)
    return tuple(word.replace("{port}", port) for word in command)


def _resources(file: JobFile, requests: Mapping[str, int], gpu_resource: str, findings: Findings) -> Resources:
    """What a whole worker pod takes, where the spec speaks of one container."""
    cpu, memory, gpus = (requests.get(name, 0) for name in ("cpu", "memory", gpu_resource))
    limits = (("cpu", cpu, MOST_CPU_MILLI), ("memory", memory, MOST_MIB), (gpu_resource, gpus, MOST_GPUS))
    for name, amount, most in limits:
        if amount > most:
            findings.add("spec.template.spec", f"asks for more {name} than any node has")
            return file.resources
    if not gpus and (file.resources.gpu_type or file.resources.gpu_memory):
        field = "gpuType" if file.resources.gpu_type else "gpuMemory"
        findings.add(f"spec.resources.{field}", "means nothing without a GPU; ask for one, or leave it out")
        return file.resources
    if file.resources.disk:
        text = "is not counted on Kubernetes; limit ephemeral-storage in the template"
        findings.add("spec.resources.disk", text)
        return file.resources
    update = {"gpu": gpus * GPU, "cpu": cpu or None, "memory": memory or None}
    return file.resources.model_copy(update=update)
