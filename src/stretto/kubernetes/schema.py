"""The CustomResourceDefinition of ElasticJob, generated from the job file's own model.

The spec is the job file as a structural schema, with the few differences that Kubernetes makes written down here; the
defaults are the job file's and are applied by the API server. What a schema cannot say (min ≤ max, what goes with a
service) is said by rules in CEL, which servers have from 1.25 on; older ones refuse a definition with rules, so the
definition comes without and with. The controller checks everything once more, whatever the server could.

The rules cannot look into `template`, because its fields are not part of our schema.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

from stretto.kubernetes.fields import AS_IN_JOB_FILE, GROUP, KIND, PLURAL, SHORT, SINGULAR, VERSION, camel
from stretto.kubernetes.status_schema import status_schema
from stretto.kubernetes.structural import ANYTHING, Schema, structural
from stretto.spec.model import MOST_WORKERS, JobFile
from stretto.spec.units import MOST_GPUS

_NAME_PATTERN = "^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$"
_DURATION_UNITS = "(ms|s|m|h|d)"
_DURATION_WORDS = "A length of time such as 90s, 5m or 1h30m; a number is in seconds."
_TEXTS: Schema = {"type": "array", "items": {"type": "string"}}

_OURS: dict[str, Schema] = {
    "run": {"type": "string", "minLength": 1, "description": "What every worker runs: a line for /bin/sh."},
    "command": {
        **_TEXTS,
        "minItems": 1,
        "description": "What every worker runs: a program and its arguments. Give run or command, or neither "
        "if the container of the template has a command, or its image.",
    },
    "suspend": {"type": "boolean", "default": False, "description": "While true it has no workers."},
    "template": {
        **ANYTHING,
        "description": "The pod of every worker. The container that trains is the one named worker, or the first. "
        "image, run, env, workdir and resources fill in what it leaves open.",
        "properties": {"metadata": ANYTHING, "spec": ANYTHING},
    },
}
_DIFFERENT: dict[str, Schema] = {
    "queue": {"pattern": _NAME_PATTERN, "description": "The queue it waits in."},
    "image": {"description": "The image of the container that trains."},
    "setup": {
        "type": "string",
        "minLength": 1,
        "description": "A line for /bin/sh that every worker runs before its command.",
    },
    "workdir": {"pattern": "^/", "description": "Where the command runs, from the root; as in the image if not given."},
    "env": {"additionalProperties": {"type": "string"}, "description": "Variables of the container that trains."},
    "level": {
        "description": "Resizes in process, by restart, or never. elastic when workers.min is below workers.max, "
        "otherwise rigid."
    },
    "deadline": {"description": "Should be done so long after its creation."},
    "after": {"description": "Starts once the ElasticJobs of these names in its namespace have ended."},
    "consistency": {"description": "bitwise: the same weights, bit for bit, on any number of workers."},
    "resources": {
        "description": "What the container that trains asks for, where the template does not say it. "
        "A container that says nothing gets one GPU."
    },
    "resources.gpu": {
        "type": "integer",
        "minimum": 0,
        "maximum": MOST_GPUS,
        "description": "GPUs, whole ones, as the device plugin of the nodes offers them. 0: none.",
    },
    "resources.cpu": {"minimum": 1, "description": 'CPU cores: 2, 500m, or "0.5" in quotes.'},
    "resources.memory": {"description": "Memory with its unit: 512Mi, 4Gi. It is the limit, too."},
    "resources.disk": {"description": "Not counted on Kubernetes: limit ephemeral-storage in the template."},
    "service": {"description": "For a job that serves requests: it becomes a Deployment, a Service and an autoscaler."},
    "service.port": {"description": "Where its replicas listen, and clients reach it."},
    "service.replicas.min": {"description": "The fewest replicas."},
    "service.replicas.max": {"description": "The most replicas."},
    "service.health": {"pattern": "^/", "maxLength": 255},
}
"""What is said otherwise than in the job file, by path."""


def crd(cel: bool) -> dict[str, Any]:
    """The definition; with CEL rules for servers that know them."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _object_schema(cel)},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.max",
                "statusReplicasPath": ".status.workers",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Phase", "string", ".status.phase"),
            _column("Workers", "string", ".status.size"),
            _column("Step", "integer", ".status.step"),
            _column("Waiting-For", "string", ".status.waitingFor"),
            _column("Age", "date", ".metadata.creationTimestamp"),
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}", "labels": {"app.kubernetes.io/part-of": "stretto"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def spec_schema() -> Schema:
    """The structural schema of `spec`."""
    return copy.deepcopy(_spec_schema())


def cel_patch() -> list[dict[str, Any]]:
    """The rules as a JSON patch of the definition without them."""
    root = "/spec/versions/0/schema/openAPIV3Schema/properties/spec"
    return [
        {
            "op": "add",
            "path": "/".join([root, *(f"properties/{part}" for part in path), "x-kubernetes-validations"]),
            "value": rules,
        }
        for path, rules in _rules()
    ]


def _column(name: str, kind: str, path: str) -> dict[str, str]:
    return {"name": name, "type": kind, "jsonPath": path}


def _object_schema(cel: bool) -> Schema:
    spec = spec_schema()
    for path, rules in _rules() if cel else ():
        _field(spec, path)["x-kubernetes-validations"] = rules
    return {
        "type": "object",
        "description": "A training job that runs on anything between a smallest and a largest number of workers, "
        "or a service.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status_schema(),
        },
    }


@cache
def _spec_schema() -> Schema:
    of_file = structural(JobFile.model_json_schema())["properties"]
    fields = {name: of_file[name] for name in map(camel, AS_IN_JOB_FILE)}
    fields["workers"] = _workers(of_file["elastic"])
    for field in (fields["setup"], fields["resources"]["properties"]["gpu"]):
        field.clear()
    del fields["workdir"]["default"]
    fields["env"].pop("x-kubernetes-preserve-unknown-fields")
    service = fields["service"]["properties"]
    del service["host"], service["replicas"]["properties"]["step"], service["replicas"]["default"]["step"]
    fields |= copy.deepcopy(_OURS)
    spec: Schema = {"type": "object", "description": "What is asked for.", "properties": dict(sorted(fields.items()))}
    for path, said in _DIFFERENT.items():
        _field(spec, path.split(".")).update(copy.deepcopy(said))
    _explain_durations(spec)
    return spec


def _workers(elastic: Schema) -> Schema:
    """The sizes, which a job file has in two fields. The API server's scale subresource needs them to be there."""
    sizes = copy.deepcopy(elastic)
    sizes["properties"]["max"]["description"] = "The most workers it can use. `kubectl scale` writes this."
    sizes["properties"]["requested"] = {
        "type": "integer",
        "minimum": 1,
        "maximum": MOST_WORKERS,
        "description": "How many it asks for, where a policy distinguishes that; max if not given, and at most that.",
    }
    return {**sizes, "default": {"min": 1, "max": 1}}


def _field(schema: Schema, path: list[str] | tuple[str, ...]) -> Schema:
    for part in path:
        schema = schema["properties"][part]
    return schema


def _explain_durations(schema: Schema) -> None:
    if _DURATION_UNITS in schema.get("pattern", "") and "x-kubernetes-int-or-string" in schema:
        words = schema.get("description", "")
        schema["description"] = (
            _DURATION_WORDS if words.startswith("A length of time") else f"{words} {_DURATION_WORDS}"
        )
        schema["minimum"] = 1
    for field in schema.get("properties", {}).values():
        _explain_durations(field)


def _rule(rule: str, message: str) -> dict[str, str]:
    return {"rule": rule, "message": message}


def _rules() -> Iterator[tuple[tuple[str, ...], list[dict[str, str]]]]:
    """Where, and which. The fields that have defaults are there when the rules are asked."""
    yield (
        ("workers",),
        [
            _rule("self.min <= self.max", "min is above max; exchange them"),
            _rule("!has(self.requested) || self.requested >= self.min", "requested is below min"),
        ],
    )
    yield (
        ("resources",),
        [
            _rule(
                "!has(self.gpu) || self.gpu > 0 || (!has(self.gpuMemory) && !has(self.gpuType))",
                "gpu is 0, so gpuMemory and gpuType mean nothing; leave them out or ask for a GPU",
            ),
            _rule(
                "!has(self.gpuMemory) || has(self.gpu)",
                "gpuMemory without gpu is a share of a GPU, which Kubernetes does not give; say how many GPUs as well",
            ),
        ],
    )
    yield ("service", "replicas"), [_rule("self.min <= self.max", "min is above max; exchange them")]
    yield (
        ("service", "target"),
        [_rule("has(self.requests) != has(self.cpu)", "give exactly one target: requests or cpu")],
    )
    yield (), [*_spec_rules()]


def _spec_rules() -> Iterator[dict[str, str]]:
    yield _rule("!has(self.run) || !has(self.command)", "run and command are both given; keep one")
    yield _rule("has(self.image) || has(self.template)", "image is missing; give it, or a template")
    yield _rule(
        "!has(self.service) || !has(self.workers) || (self.workers.min == 1 && self.workers.max == 1)",
        "workers does not go with a service; use service.replicas",
    )
    for field in ("level", "deadline", "expect"):
        yield _rule(f"!has(self.service) || !has(self.{field})", f"{field} does not go with a service; leave it out")
    yield _rule(
        "!has(self.level) || self.level != 'rigid' || !has(self.workers) || self.workers.min == self.workers.max",
        "level is rigid, but workers gives a range; make min and max the same, or choose another level",
    )
    yield _rule(
        "!has(self.level) || self.level != 'restart' || !has(self.consistency) || self.consistency != 'bitwise'",
        "consistency bitwise needs level elastic or rigid",
    )
    yield _rule("has(self.service) == has(oldSelf.service)", "a job does not become a service, nor a service a job")
    for field in ("command", "consistency", "env", "image", "level", "run", "setup", "workdir"):
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || self.{field} == oldSelf.{field})"
        if field == "level":
            # To say which one it is that was left open is no change; the controller tells if it is another.
            same = f"!has(oldSelf.level) || ({same})"
        yield _rule(
            f"has(self.service) || (has(oldSelf.suspend) && oldSelf.suspend) || ({same})",
            f"{field} can be changed only while suspend is true",
        )
