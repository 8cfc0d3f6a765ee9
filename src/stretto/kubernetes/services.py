"""A service on Kubernetes: a Deployment, a Service and, where the number of replicas may vary, an autoscaler.

kube-scheduler places its pods; Stretto only gives way to them. Every replica listens on `service.port` of its own
address: the port is in the variable PORT, and stands for `{port}` in the command, as on one machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stretto.kubernetes import quantities
from stretto.kubernetes.elastic_job import read
from stretto.kubernetes.fields import (
    API_VERSION,
    GPU_RESOURCE,
    KIND,
    MANAGED_BY,
    SCHEDULER,
    SERVICE_LABEL,
    Findings,
    metadata,
)
from stretto.kubernetes.pod_template import Trainer
from stretto.spec.model import Service

REQUESTS_METRIC = "http_requests_per_second"
"""Of every pod, from a metrics adapter of the cluster."""


def service_objects(
    obj: Mapping[str, Any], version_has_hpa_v2: bool, gpu_resource: str = GPU_RESOURCE
) -> list[dict[str, Any]]:
    """What should exist for this ElasticJob, or `SpecError`; an autoscaler that is not among it should not exist.

    The Deployment says how many replicas only where no autoscaler does, so that the two do not fight.
    """
    file, template, requests = read(obj, gpu_resource)
    service = file.service
    if service is None:
        raise ValueError("not a service")
    _as_replica(template, obj, service)
    is_suspended = bool(obj["spec"].get("suspend", False))
    is_scaled = service.replicas.min < service.replicas.max and not is_suspended
    replicas = None if is_scaled else 0 if is_suspended else service.replicas.min
    made = [_deployment(obj, template, replicas), _service(obj, service)]
    if is_scaled:
        made.append(_autoscaler(obj, service, _metric(service, template, requests), version_has_hpa_v2))
    return made


def selector(obj: Mapping[str, Any]) -> dict[str, str]:
    """The labels that its pods have and others have not."""
    return {SERVICE_LABEL: str(metadata(obj)["name"])}


def _as_replica(template: dict[str, Any], obj: Mapping[str, Any], service: Service) -> None:
    """What a replica has beyond a worker."""
    pod = template["spec"]
    findings = Findings.about(obj)
    if pod.get("restartPolicy", "Always") != "Always":
        findings.add("spec.template.spec.restartPolicy", "a service is always started again; leave it out")
    if pod.get("schedulerName") == SCHEDULER:
        findings.add("spec.template.spec.schedulerName", "Stretto places workers, not services; leave it out")
    trainer = Trainer(pod)
    variables = trainer.container.setdefault("env", [])
    port = {"name": "PORT", "value": str(service.port)}
    found = next((variable for variable in variables if variable.get("name") == "PORT"), port)
    if found != port:
        findings.add("spec.env.PORT", f"is set to service.port, {service.port}; leave it out")
    findings.check()
    if found is port:
        variables.insert(0, port)
    ports = trainer.container.setdefault("ports", [])
    if all(one.get("containerPort") != service.port for one in ports):
        ports.append({"containerPort": service.port, "protocol": "TCP"})
    trainer.container.setdefault("readinessProbe", _probe(service))
    template["metadata"]["labels"] = {**template["metadata"].get("labels", {}), **MANAGED_BY, **selector(obj)}


def _probe(service: Service) -> dict[str, Any]:
    """It can serve when `health` says so; without one, when it listens."""
    if service.health is None:
        return {"tcpSocket": {"port": service.port}, "periodSeconds": 2}
    return {"httpGet": {"path": service.health, "port": service.port}, "periodSeconds": 2}


def _object(obj: Mapping[str, Any], api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Named like the job, and gone with it."""
    about = metadata(obj)
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": about["name"],
        "uid": about.get("uid", ""),
        "controller": True,
        "blockOwnerDeletion": True,
    }
    own = {
        "name": about["name"],
        "namespace": about.get("namespace", "default"),
        "labels": {**MANAGED_BY, **selector(obj)},
        "ownerReferences": [owner],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": own, "spec": spec}


def _deployment(obj: Mapping[str, Any], template: dict[str, Any], replicas: int | None) -> dict[str, Any]:
    spec: dict[str, Any] = {"selector": {"matchLabels": selector(obj)}, "template": template}
    return _object(obj, "apps/v1", "Deployment", spec if replicas is None else {"replicas": replicas, **spec})


def _service(obj: Mapping[str, Any], service: Service) -> dict[str, Any]:
    port = {"name": "http", "port": service.port, "targetPort": service.port, "protocol": "TCP"}
    return _object(obj, "v1", "Service", {"selector": selector(obj), "ports": [port]})


def _autoscaler(
    obj: Mapping[str, Any], service: Service, metric: dict[str, Any], version_has_hpa_v2: bool
) -> dict[str, Any]:
    """Both versions of the API have these fields; servers have the one up to 1.25 and the other from 1.23 on."""
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": metadata(obj)["name"]},
        "minReplicas": service.replicas.min,
        "maxReplicas": service.replicas.max,
        "metrics": [metric],
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": math.ceil(service.hold)}},
    }
    version = "v2" if version_has_hpa_v2 else "v2beta2"
    return _object(obj, f"autoscaling/{version}", "HorizontalPodAutoscaler", spec)


def _metric(service: Service, template: Mapping[str, Any], requests: Mapping[str, int]) -> dict[str, Any]:
    """The load that a replica should carry. Percent of CPU are of what it asks for, or of one core.

    Kubernetes counts in percent only where every container asks for CPU.
    """
    wanted = service.target
    if wanted.requests is not None:
        target = _mean(wanted.requests * 1000)
        return {"type": "Pods", "pods": {"metric": {"name": REQUESTS_METRIC}, "target": target}}
    percent = wanted.cpu or 0.0
    containers = template["spec"]["containers"]
    if all("cpu" in container.get("resources", {}).get("requests", {}) for container in containers):
        target = {"type": "Utilization", "averageUtilization": max(1, round(percent))}
    else:
        target = _mean(percent / 100 * requests.get("cpu", 1000))
    return {"type": "Resource", "resource": {"name": "cpu", "target": target}}


def _mean(milli: float) -> dict[str, Any]:
    return {"type": "AverageValue", "averageValue": quantities.milli_text(max(1, round(milli)))}
