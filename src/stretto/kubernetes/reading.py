"""What the fields of an ElasticJob's spec say, as a job file; every problem is told in the words of the object.

The job file's own model does the checking. Here are only the translation of names, and the rules whose sentence in the
model speaks of fields that an object does not have.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from stretto.core.snapshot import GPU
from stretto.errors import SpecError
from stretto.kubernetes.fields import AS_IN_JOB_FILE, GROUP, SECTIONS, Findings, camel, metadata, snake, without_nulls
from stretto.kubernetes.schema import spec_schema
from stretto.kubernetes.structural import Schema
from stretto.spec import load
from stretto.spec.model import JobFile
from stretto.spec.units import gpu_milli, seconds

Command = str | tuple[str, ...]
_ALONE = {"min": 1, "max": 1}
_MOST_LABELS, _LONGEST_LABEL_KEY = 64, 63
_LONGEST_HOLD_S = 3600
"""What a HorizontalPodAutoscaler can look back."""
_SERVICE_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAMES_IN_TEXT = re.compile(r"\bgpu_(memory|type)\b")


def read_spec(obj: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """The spec without nulls and without what nobody knows, which is told."""
    for field, right in (("kind", "ElasticJob"), ("apiVersion", f"{GROUP}/")):
        if not str(obj.get(field, right)).startswith(right):
            findings.add(field, f"{obj[field]!r} is not ours")
    spec = without_nulls(obj.get("spec"))
    if not isinstance(spec, dict):
        findings.add("spec", "is missing; it says what to run" if spec is None else f"{spec!r} is not an object")
        return {}
    return _known(spec, spec_schema(), "spec", findings)


def read_command(spec: Mapping[str, Any], findings: Findings) -> Command | None:
    """The command that the spec itself gives."""
    run, command = spec.get("run"), spec.get("command")
    if run is not None and command is not None:
        findings.add("spec.command", "is given, and run as well; keep one of them")
    if run is not None:
        if isinstance(run, str) and run.strip():
            return run
        findings.add("spec.run", f"{run!r} is not a line for the shell; a program with its arguments goes to command")
    elif command is not None:
        if isinstance(command, list) and command and all(isinstance(word, str) for word in command):
            return tuple(command)
        findings.add("spec.command", f"{command!r} is not a list of texts: the program, then its arguments")
    return None


def read_file(
    obj: Mapping[str, Any], spec: Mapping[str, Any], command: Command | None, findings: Findings
) -> JobFile | None:
    """The job file with the fields of the spec; none if the model refuses it, which is told."""
    _own_rules(obj, spec, findings)
    values = {field: _translated(camel(field), spec[camel(field)]) for field in AS_IN_JOB_FILE if camel(field) in spec}
    values |= {"name": metadata(obj).get("name"), "labels": _labels(obj), "run": command or "-"}
    values |= _sizes(spec)
    try:
        return _fixed(load({field: value for field, value in values.items() if value is not None}))
    except SpecError as error:
        for problem in error.problems:
            text = _NAMES_IN_TEXT.sub(lambda match: camel(match[0]), problem.text)
            findings.add(_object_field(problem.field, spec), text)
    return None


def _known(value: dict[str, Any], schema: Schema, field: str, findings: Findings) -> dict[str, Any]:
    """Without the fields that the schema does not have; the API server prunes them, others must be told."""
    properties = schema.get("properties")
    if properties is None or schema.get("x-kubernetes-preserve-unknown-fields"):
        return value
    known = {}
    for name, item in value.items():
        if name not in properties:
            close = difflib.get_close_matches(camel(name), properties, n=1)
            guess = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(properties))}"
            findings.add(f"{field}.{name}", f"unknown field; {guess}")
        else:
            is_section = isinstance(item, dict)
            known[name] = _known(item, properties[name], f"{field}.{name}", findings) if is_section else item
    return known


def _translated(name: str, value: Any) -> Any:
    """With the names of the job file in sections of ours; other objects hold names of the user's."""
    if name not in SECTIONS or not isinstance(value, dict):
        return value
    return {snake(inner): _translated(inner, item) for inner, item in value.items()}


def _sizes(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The two fields that a job file has for them. What was asked for follows a maximum that was scaled down."""
    if "service" in spec:
        return {}
    workers = spec.get("workers", _ALONE)
    if not isinstance(workers, dict):
        return {"elastic": workers}
    requested, most = workers.get("requested"), workers.get("max", 0)
    if requested is not None and _is_number(requested) and _is_number(most):
        requested = min(requested, most)
    return {"elastic": {name: value for name, value in workers.items() if name != "requested"}, "workers": requested}


def _fixed(file: JobFile) -> JobFile:
    """One size is no range, unless the job could have another one after scaling."""
    sizes = file.elastic
    if sizes is None or sizes.min != sizes.max or file.level in ("elastic", "restart"):
        return file
    return file.model_copy(update={"elastic": None, "workers": sizes.min})


def _labels(obj: Mapping[str, Any]) -> dict[str, str]:
    """The labels that a job file can have, too; kubectl finds a job by the others as well."""
    found = metadata(obj).get("labels")
    if not isinstance(found, Mapping):
        return {}
    fit = (key for key in found if len(key) <= _LONGEST_LABEL_KEY and not key.startswith(f"{GROUP}/"))
    return {key: found[key] for key, _ in zip(fit, range(_MOST_LABELS), strict=False)}


def _own_rules(obj: Mapping[str, Any], spec: Mapping[str, Any], findings: Findings) -> None:
    _name_rules(obj, findings)
    if not isinstance(spec.get("suspend", False), bool):
        findings.add("spec.suspend", f"{spec['suspend']!r} is not true or false")
    workdir = spec.get("workdir")
    if isinstance(workdir, str) and not workdir.startswith("/"):
        findings.add("spec.workdir", f"{workdir!r} does not begin at the root; give a folder of the image")
    resources, workers = spec.get("resources"), spec.get("workers")
    if isinstance(resources, dict):
        _device_rules(resources, findings)
    if "service" in spec:
        _service_rules(obj, spec, findings)
    elif isinstance(workers, dict):
        _size_rules(spec, workers, findings)


def _name_rules(obj: Mapping[str, Any], findings: Findings) -> None:
    if not metadata(obj).get("name"):
        findings.add("metadata.name", "is missing")


def _device_rules(resources: Mapping[str, Any], findings: Findings) -> None:
    given = resources.get("gpu")
    if given is None:
        if "gpuMemory" in resources:
            findings.add(
                "spec.resources.gpuMemory",
                "without gpu is a share of a GPU, which Kubernetes does not give; say how many GPUs as well",
            )
        return
    try:
        share = gpu_milli(given) % GPU
    except ValueError:
        return  # The model says it.
    if share:
        findings.add(
            "spec.resources.gpu",
            f"{given!r} is a share of a GPU, which Kubernetes does not give; "
            "ask for a whole number of what the device plugin of the nodes offers",
        )


def _service_rules(obj: Mapping[str, Any], spec: Mapping[str, Any], findings: Findings) -> None:
    workers = spec.get("workers", _ALONE)
    if not isinstance(workers, dict) or any(value != 1 for value in workers.values()):
        findings.add("spec.workers", "does not go with a service; use spec.service.replicas")
    service = spec["service"]
    if isinstance(service, dict):
        try:
            hold_s = seconds(service.get("hold", 0.1))
        except ValueError:
            hold_s = 0.0  # The model says it.
        if hold_s > _LONGEST_HOLD_S:
            findings.add("spec.service.hold", f"{service['hold']!r} is too long; an autoscaler looks back 1h at most")
    name = metadata(obj).get("name")
    if isinstance(name, str) and name and not _SERVICE_NAME.fullmatch(name):
        findings.add(
            "metadata.name", f"{name!r} cannot name a service; use lower-case letters, digits and '-', a letter first"
        )


def _size_rules(spec: Mapping[str, Any], workers: Mapping[str, Any], findings: Findings) -> None:
    least, most, requested = workers.get("min", 1), workers.get("max"), workers.get("requested")
    if _is_number(least) and _is_number(requested) and requested < least:
        findings.add("spec.workers.requested", f"{requested} is below min {least}")
    if _is_number(least) and _is_number(most):
        if least > most:
            findings.add("spec.workers.min", f"{least} is above max {most}; exchange them")
        elif least < most and spec.get("level") == "rigid":
            findings.add(
                "spec.level", f"is rigid, but workers go from {least} to {most}; make them one, or choose another level"
            )


def _object_field(field: str, spec: Mapping[str, Any]) -> str:
    """Where the object has this field of the job file."""
    first, *rest = field.split(".")
    if first in ("name", "labels"):
        return f"metadata.{field}"
    if first == "run":
        return "spec.command" if "command" in spec else "spec.run"
    if first == "workers":
        return "spec.workers.requested" if "service" not in spec else "spec.workers"
    names = {"elastic": "workers"}.get(first, camel(first))
    return ".".join(
        ["spec", names, *(camel(part) if first in SECTIONS or first == "elastic" else part for part in rest)]
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
