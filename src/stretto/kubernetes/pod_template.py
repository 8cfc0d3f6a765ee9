"""The pod of one worker: the template of the object, with what it leaves open filled in from the job's own fields.

What both say must agree; where the template is silent, image, command, variables, folder, resources and grace period
come from the job. A container that trains and states any resources states them all; one that states none gets what
the job file's model says, one GPU if nothing else.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import msgspec

from stretto.core.snapshot import GPU
from stretto.errors import SpecError
from stretto.kubernetes import quantities
from stretto.kubernetes.command_line import container_command, literally, set_up_first
from stretto.kubernetes.fields import SCHEDULER, TRAINS, Findings, without_nulls
from stretto.kubernetes.model import PodSpec
from stretto.spec.model import JobFile

_TEMPLATE = "spec.template"
_POD = f"{_TEMPLATE}.spec"
_AT = re.compile(r"(?P<text>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_WHERE_OF_REQUESTS = ("containers", "initContainers")


class Trainer:
    """The container of a template that trains, and where it is."""

    def __init__(self, pod: MutableMapping[str, Any]) -> None:
        containers = pod["containers"]
        names = [container.get("name") for container in containers]
        index = names.index(TRAINS) if TRAINS in names else 0
        self.container: dict[str, Any] = containers[index]
        self.field = f"{_POD}.containers[{index}]"


def pod_requests(pod_spec: Mapping[str, Any]) -> dict[str, int]:
    """What a pod takes of its node as Kubernetes counts it: the sum of its containers, or what its init containers
    need if that is more, and its overhead. CPU in milli, memory in MiB, other resources as `stretto.kubernetes.model`
    has them; nothing that is 0."""
    pod = without_nulls(pod_spec)
    findings = Findings("pod", hint="")
    _normalise(pod, findings)
    findings.check()
    return {name: amount for name, amount in _read(pod).requests.items() if amount}


def opened(spec: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """A copy of the template that has a pod with a container that trains, its quantities as texts.

    What has the wrong shape is told, and left out of the copy.
    """
    template = _section(without_nulls(spec), "template", _TEMPLATE, findings)
    template["metadata"] = _section(template, "metadata", f"{_TEMPLATE}.metadata", findings)
    for name in ("labels", "annotations"):
        if name in template["metadata"]:
            template["metadata"][name] = _texts(template["metadata"], name, f"{_TEMPLATE}.metadata", findings)
    pod = template["spec"] = _section(template, "spec", _POD, findings)
    for name in _WHERE_OF_REQUESTS:
        pod[name] = list(_objects(pod.get(name, []), f"{_POD}.{name}", findings))
    pod["containers"] = pod["containers"] or [{}]
    Trainer(pod).container.setdefault("name", TRAINS)
    for name in _WHERE_OF_REQUESTS:
        for index, container in enumerate(pod[name]):
            _mounts(container, f"{_POD}.{name}[{index}]", findings)
    if not pod["initContainers"]:
        del pod["initContainers"]
    _normalise(pod, findings, f"{_POD}.")
    return template


def fill_image(template: dict[str, Any], file: JobFile, findings: Findings) -> None:
    """The image comes first: where there is no command it stands for one."""
    trainer = Trainer(template["spec"])
    if file.image is not None:
        _agree(trainer, "image", file.image, "spec.image", findings)
    elif not isinstance(trainer.container.get("image"), str) or not trainer.container["image"]:
        findings.add("spec.image", f"is missing; give it, or {trainer.field}.image")


def fill(
    template: dict[str, Any],
    file: JobFile,
    command: str | tuple[str, ...] | None,
    gpu_resource: str,
    findings: Findings,
) -> None:
    """Fill in what else an opened template leaves open, or tell what contradicts it. No `command`: its own."""
    trainer = Trainer(template["spec"])
    _command(trainer, file, command, findings)
    _environment(trainer, file, findings)
    if file.workdir != ".":
        _agree(trainer, "workingDir", file.workdir, "spec.workdir", findings)
    _resources(trainer, file, gpu_resource, findings)
    template["spec"].setdefault("terminationGracePeriodSeconds", math.ceil(file.stop.grace))


def totals(template: Mapping[str, Any], findings: Findings) -> dict[str, int]:
    """What a pod of this template takes; empty if that cannot be said, which is told."""
    try:
        return pod_requests(template["spec"])
    except SpecError as error:
        for problem in error.problems:
            findings.add(f"{_POD}.{problem.field}", problem.text)
    return {}


def refuse_placing(template: Mapping[str, Any], findings: Findings) -> None:
    """Fields of a worker's pod that are Stretto's business."""
    pod = template["spec"]
    if pod.get("schedulerName", SCHEDULER) != SCHEDULER:
        findings.add(f"{_POD}.schedulerName", "workers are placed by Stretto; leave it out")
    if pod.get("restartPolicy", "Never") != "Never":
        findings.add(f"{_POD}.restartPolicy", "Stretto itself starts workers again; leave it out, see retries")
    if pod.get("nodeName"):
        findings.add(f"{_POD}.nodeName", "workers are placed by Stretto; use nodeSelector or affinity")


def own_command(template: Mapping[str, Any]) -> tuple[str, ...]:
    """What the container that trains runs: its command and arguments; its image where that has the command."""
    container = Trainer(template["spec"]).container
    command, arguments = (_words(container.get(name)) for name in ("command", "args"))
    return (*(command or (str(container.get("image")),)), *arguments)


def _section(holder: Mapping[str, Any], name: str, field: str, findings: Findings) -> dict[str, Any]:
    found = holder.get(name, {})
    if isinstance(found, dict):
        return found
    findings.add(field, f"{found!r} is not an object")
    return {}


def _texts(holder: Mapping[str, Any], name: str, field: str, findings: Findings) -> dict[str, str]:
    found = _section(holder, name, f"{field}.{name}", findings)
    for key, text in found.items():
        if not isinstance(text, str):
            findings.add(f"{field}.{name}[{key}]", f"{text!r} is not text; put it in quotes")
    return {key: text for key, text in found.items() if isinstance(text, str)}


def _objects(found: Any, field: str, findings: Findings) -> Iterator[dict[str, Any]]:
    if not isinstance(found, list):
        findings.add(field, f"{found!r} is not a list")
        return
    for index, item in enumerate(found):
        if isinstance(item, dict):
            yield item
        else:
            findings.add(f"{field}[{index}]", f"{item!r} is not an object")


def _mounts(container: dict[str, Any], field: str, findings: Findings) -> None:
    if "volumeMounts" in container:
        container["volumeMounts"] = list(_objects(container["volumeMounts"], f"{field}.volumeMounts", findings))


def _normalise(pod: dict[str, Any], findings: Findings, prefix: str = "") -> None:
    """Requests as texts everywhere; where there are only limits they are the requests, as the API server has it."""
    asked: set[str] = set()
    for name in _WHERE_OF_REQUESTS:
        for index, container in enumerate(_objects(pod.get(name, []), f"{prefix}{name}", findings)):
            asked |= _normalise_resources(container, f"{prefix}{name}[{index}].", set(), findings)
    _normalise_resources(pod, prefix, asked, findings)
    if "overhead" in pod:
        pod["overhead"] = _quantities(pod, "overhead", prefix, findings)


def _normalise_resources(holder: dict[str, Any], prefix: str, asked: set[str], findings: Findings) -> set[str]:
    """Of a container, or of the pod as a whole, whose limits count only for what no container has `asked` for."""
    if "resources" not in holder:
        return set()
    resources = _section(holder, "resources", f"{prefix}resources", findings)
    field = f"{prefix}resources."
    limits, requests = (_quantities(resources, name, field, findings) for name in ("limits", "requests"))
    for name in limits.keys() & requests.keys():
        if quantities.nanos(requests[name]) > quantities.nanos(limits[name]):
            findings.add(f"{field}requests[{name}]", f"{requests[name]} is above the limit {limits[name]}")
    requests = {**{name: text for name, text in limits.items() if name not in asked}, **requests}
    holder["resources"] = {**resources, "limits": limits, "requests": requests}
    return set(requests)


def _quantities(holder: Mapping[str, Any], name: str, prefix: str, findings: Findings) -> dict[str, str]:
    """Resources by name, as texts; what is none is told."""
    good = {}
    for resource, value in _section(holder, name, f"{prefix}{name}", findings).items():
        try:
            (quantities.whole if _is_device(resource) else quantities.nanos)(value)
            good[resource] = str(value)
        except ValueError as error:
            findings.add(f"{prefix}{name}[{resource}]", str(error))
    return good


def _read(pod: Mapping[str, Any]) -> PodSpec:
    try:
        return msgspec.convert(pod, PodSpec)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))
        findings = Findings("pod", hint="")
        path, text = (match["path"].lstrip("."), match["text"]) if match else ("", str(error))
        findings.add(path, text.replace("`", ""))
        findings.check()
        raise


def _agree(trainer: Trainer, name: str, value: Any, field: str, findings: Findings) -> None:
    """Put it there, unless it is there already; then it must be the same."""
    found = trainer.container.setdefault(name, value)
    if found != value:
        findings.add(field, f"is {value!r}, but {trainer.field}.{name} is {found!r}; keep one of them")


def _command(trainer: Trainer, file: JobFile, command: str | tuple[str, ...] | None, findings: Findings) -> None:
    container = trainer.container
    setup = shlex.join(file.setup) if isinstance(file.setup, tuple) else file.setup
    for name in ("command", "args"):
        if not _is_texts(container.get(name, [])):
            findings.add(f"{trainer.field}.{name}", f"{container[name]!r} is not a list of texts")
        elif command is not None and container.get(name):
            field = "spec.run" if isinstance(command, str) else "spec.command"
            findings.add(field, f"is given, and {trainer.field}.{name} as well; keep one of them")
    if command is not None:
        container["command"] = container_command(command, setup)
    elif setup is not None and container.get("command"):
        container["command"] = set_up_first(setup, container["command"])
    elif setup is not None:
        findings.add("spec.setup", "needs a command to come before: give run or command, the image's own is not known")


def _environment(trainer: Trainer, file: JobFile, findings: Findings) -> None:
    """The job's variables first, so that those of the template can refer to them."""
    theirs = list(_objects(trainer.container.get("env", []), f"{trainer.field}.env", findings))
    taken = {str(variable.get("name")): variable.get("value") for variable in theirs}
    ours = []
    for name, text in file.env.items():
        if name not in taken:
            ours.append({"name": name, "value": literally(text)})
        elif taken[name] != literally(text):
            findings.add(f"spec.env.{name}", f"{trainer.field}.env gives {name} another value; keep one of them")
    if ours or theirs:
        trainer.container["env"] = ours + theirs


def _resources(trainer: Trainer, file: JobFile, gpu_resource: str, findings: Findings) -> None:
    resources = trainer.container.setdefault("resources", {})
    requests, limits = resources.setdefault("requests", {}), resources.setdefault("limits", {})
    asked = _asked(file, gpu_resource, by_default=not requests)
    for name, text in asked.items():
        found = requests.setdefault(name, text)
        if quantities.nanos(found) != quantities.nanos(text):
            field = "gpu" if name == gpu_resource else name
            stated = f"{trainer.field}.resources states {found}"
            findings.add(f"spec.resources.{field}", f"is {text}, but {stated}; keep one of them")
    if "memory" in asked:
        limits.setdefault("memory", requests["memory"])
    for name in [name for name in requests if _is_device(name)]:
        if quantities.nanos(limits.setdefault(name, requests[name])) != quantities.nanos(requests[name]):
            findings.add(f"{trainer.field}.resources.limits[{name}]", "is not what is requested; a device has no burst")
    for name in ("requests", "limits"):
        resources[name] = {resource: text for resource, text in resources[name].items() if quantities.nanos(text)}
        if not resources[name]:
            del resources[name]


def _asked(file: JobFile, gpu_resource: str, by_default: bool) -> dict[str, str]:
    """What the job's own fields ask for."""
    of = file.resources
    asked = {}
    if of.cpu:
        asked["cpu"] = quantities.milli_text(of.cpu)
    if of.memory:
        asked["memory"] = quantities.mib_text(of.memory)
    if of.gpu is not None or by_default:
        asked[gpu_resource] = str(-(-of.width_milli // GPU))
    return asked


def _is_device(resource: str) -> bool:
    """Resources with a domain are counted in whole things."""
    return "/" in resource


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _words(value: Any) -> tuple[str, ...]:
    return tuple(value) if _is_texts(value) else ()
