"""The pods of workers: how one is made, and what its state means.

A pod is the record of its launch: label and annotations say which launch of which job it is and where it should go, so
that a controller that starts anew needs nothing else. What a launch left behind is told once; then the pod is marked
as *told*, and stays as long as its job's history is kept, for its log.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import msgspec

from stretto.backends.protocol import Exit
from stretto.jobs.model import Seat, Worker
from stretto.kubernetes.fields import API_VERSION, GROUP, KIND, MANAGED_BY, SCHEDULER, TRAINS
from stretto.kubernetes.model import ContainerStatus, Pod, Terminated
from stretto.kubernetes.pod_template import Trainer

JOB_LABEL = f"{GROUP}/job"
WORKER_LABEL = f"{GROUP}/worker"
LAUNCH_LABEL = f"{GROUP}/launch"
TOLD_LABEL = f"{GROUP}/told"
_MARKS = {JOB_LABEL, WORKER_LABEL, LAUNCH_LABEL}
NODE_NOTE = f"{GROUP}/node"
MEMBER_NOTE = f"{GROUP}/member"
PRIORITY_CLASS = "stretto-worker"
DEFAULT_SCHEDULER = "default-scheduler"
SECRET_KEY = "token"
MEETING = "MASTER_ADDR"
"""The variable with the address at which a group meets; empty for the member whose address that is."""

FOLDER = "/var/run/stretto"
"""Where a worker keeps what need not outlive it, if no checkpoint folder is named."""

_STARTING_ANEW = frozenset({"ErrImagePull", "ImagePullBackOff", "CreateContainerConfigError", "RegistryUnavailable"})
_HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull", "ImageInspectError"})
_REFUSED = ("OutOf", "UnexpectedAdmissionError", "NodeAffinity", "NodePorts", "Unexpected", "Topology")
_MACHINE = frozenset({"Evicted", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "Preempting", "NodeAffinity"})
_SENT_AWAY = frozenset({"NodeShutdown", "Shutdown", "Terminated", "Preempting"})
"""What kubelets say of pods that had to make room, or whose machine was shut down in good order."""
_UNWITNESSED = frozenset({"Unknown", "ContainerStatusUnknown"})
"""What runtimes and kubelets say of a container that ended while they were not there: its machine was started anew."""
_CANNOT_RUN = frozenset({"ContainerCannotRun", "StartError", "CreateContainerError", "RunContainerError"})


def secret_name(job: str) -> str:
    return f"{job}-stretto"


class Blueprint(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker pod is made from."""

    namespace: str
    job: str
    uid: str
    """Of the ElasticJob."""
    launch: str
    worker: str
    node: str
    member: int
    template: Mapping[str, Any]
    env: Mapping[str, str]
    secret: bool
    """Whether it gets the job's secret."""
    pinned: bool
    """kube-scheduler binds it, to that node and no other."""


def pod_name(job: str, launch: str) -> str:
    """Launches are unique for ever: `12.w3.5fc2e0a1` is `train-w3-5fc2e0a1`."""
    _, worker, mark = launch.split(".")
    return f"{job[: 253 - len(worker) - len(mark) - 2]}-{worker}-{mark}"


def worker_pod(plan: Blueprint) -> dict[str, Any]:
    template = copy.deepcopy(dict(plan.template))
    meta, spec = template.get("metadata") or {}, template["spec"]
    marks = {JOB_LABEL: plan.job, WORKER_LABEL: plan.worker, LAUNCH_LABEL: plan.launch}
    notes = {NODE_NOTE: plan.node, MEMBER_NOTE: str(plan.member)}
    owner = {
        "apiVersion": API_VERSION, "kind": KIND, "name": plan.job, "uid": plan.uid,
        "controller": True, "blockOwnerDeletion": False,
    }  # fmt: skip
    spec["restartPolicy"] = "Never"
    spec["schedulerName"] = SCHEDULER
    spec.setdefault("priorityClassName", PRIORITY_CLASS)
    spec.setdefault("automountServiceAccountToken", False)
    trainer = Trainer(spec).container
    for container in (trainer, *spec.get("initContainers", ())):
        container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    trainer["env"] = [*_environment(plan), *trainer.get("env", ())]
    if not any(mount.get("mountPath") == FOLDER for mount in trainer.get("volumeMounts", ())):
        spec.setdefault("volumes", []).append({"name": "stretto", "emptyDir": {}})
        trainer.setdefault("volumeMounts", []).append({"name": "stretto", "mountPath": FOLDER})
    if plan.pinned:
        spec["schedulerName"] = DEFAULT_SCHEDULER
        _pin(spec, plan.node)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": pod_name(plan.job, plan.launch),
            "namespace": plan.namespace,
            "labels": {**meta.get("labels", {}), **MANAGED_BY, **marks},
            "annotations": {**meta.get("annotations", {}), **notes},
            "ownerReferences": [owner],
        },
        "spec": spec,
    }


def _environment(plan: Blueprint) -> list[dict[str, Any]]:
    """Ours come first: what the template says of the same name holds."""
    own = {"fieldRef": {"fieldPath": "status.podIP"}}
    given: list[dict[str, Any]] = [
        {"name": name, "valueFrom": own} if name == MEETING and not value else {"name": name, "value": value}
        for name, value in sorted(plan.env.items())
    ]
    given.append({"name": "STRETTO_HOST", "valueFrom": own})
    if plan.secret:
        reference = {"name": secret_name(plan.job), "key": SECRET_KEY}
        given.append({"name": "STRETTO_TOKEN", "valueFrom": {"secretKeyRef": reference}})
    return given


def _pin(spec: dict[str, Any], node: str) -> None:
    """To one node, besides whatever the template asks for."""
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchFields": [*term.get("matchFields", ()), here]} for term in terms
    ]  # fmt: skip


# What is read.


def is_worker(pod: Pod) -> bool:
    """Whoever has only some of our labels got them elsewhere."""
    return pod.metadata.labels.keys() >= _MARKS


def launch_of(pod: Pod) -> str:
    return pod.metadata.labels.get(LAUNCH_LABEL, "")


def worker_of(pod: Pod) -> Worker:
    """As the book knows it."""
    meta = pod.metadata
    created, member = meta.creation_timestamp, meta.annotations.get(MEMBER_NOTE, "")
    return Worker(
        name=meta.labels[WORKER_LABEL],
        launch=launch_of(pod),
        seat=Seat(meta.annotations.get(NODE_NOTE) or pod.spec.node_name),
        launched_s=created.timestamp() if created is not None else 0.0,
        member=int(member) if member.isdecimal() else 0,
        pid=1 if pod.is_running else 0,
        leaving="its pod is being deleted" if meta.is_leaving else "",
    )


def is_told(pod: Pod) -> bool:
    return TOLD_LABEL in pod.metadata.labels


def exit_of(pod: Pod, at_s: float) -> Exit | None:
    """How a launch has ended; None while it has not. Its object may still be there, and other containers go on."""
    ended = _trained(pod)
    if not pod.is_terminal and (ended is None or not _has_company(pod)):
        return None
    status = pod.status
    launch, asked = launch_of(pod), pod.metadata.is_leaving or status.reason in _SENT_AWAY
    text = _said(status.reason, status.message)
    if is_refused(pod):
        # Two schedulers met on one node: it never ran, and nobody is to blame.
        return Exit(launch=launch, how="lost", text=text, at_s=at_s, asked=True)
    witnessed = ended is not None and ended.reason not in _UNWITNESSED
    if status.reason not in _MACHINE and not witnessed and (before := _failed_before(pod)) is not None:
        return _never_ran(before, launch, asked, at_s)
    if status.reason in _MACHINE or ended is None:
        how = "signalled" if asked else "lost"
        return Exit(launch=launch, how=how, status=15, text=text, at_s=at_s, asked=asked)  # type: ignore[arg-type]
    return _ended(ended, launch, asked, at_s)


def is_refused(pod: Pod) -> bool:
    """Kubelet did not take it."""
    return pod.status.phase == "Failed" and pod.status.reason.startswith(_REFUSED)


def _ended(ended: Terminated, launch: str, asked: bool, at_s: float) -> Exit:
    text = ended.message.strip()
    if ended.reason in _CANNOT_RUN:
        return Exit(launch=launch, how="refused", text=_said(ended.reason, text), at_s=at_s)
    if ended.reason in _UNWITNESSED:
        told = _said(ended.reason, text or "it ended with its machine")
        return Exit(launch=launch, how="signalled", status=9, text=told, at_s=at_s, asked=asked)
    if ended.reason == "OOMKilled":
        told = "out of memory (its container's limit, or its node)"
        return Exit(launch=launch, how="signalled", status=9, text=told, at_s=at_s, asked=asked)
    code, number = ended.exit_code, ended.signal
    if not number and code > 128 and (code - 128 in (9, 15) or asked):
        # Runtimes report a death by signal as the shell does.
        number = code - 128
    if number:
        return Exit(launch=launch, how="signalled", status=number, text=text, at_s=at_s, asked=asked)
    return Exit(launch=launch, how="exited", status=code, text=text, at_s=at_s, asked=asked)


def _has_company(pod: Pod) -> bool:
    """Other containers of it would keep it for ever. While somebody ends all of them, who that is comes out last."""
    disrupted = pod.condition("DisruptionTarget")
    if pod.metadata.is_leaving or (disrupted is not None and disrupted.status == "True"):
        return False
    return any(status.state.terminated is None for status in pod.status.container_statuses)


def _failed_before(pod: Pod) -> ContainerStatus | None:
    """The init container that failed, for which the one that trains was never started."""
    beside = {container.name for container in pod.spec.init_containers if container.restart_policy == "Always"}
    for status in pod.status.init_container_statuses:
        ended = status.state.terminated
        if status.name not in beside and ended is not None and (ended.exit_code or ended.signal):
            return status
    return None


def _never_ran(failed: ContainerStatus, launch: str, asked: bool, at_s: float) -> Exit:
    assert failed.state.terminated is not None
    told = _ended(failed.state.terminated, launch, asked, at_s)
    return msgspec.structs.replace(told, text=_said(f"its init container {failed.name} failed", told.text))


def is_asked_to_end(pod: Pod) -> bool:
    """Somebody deletes it and leaves it time: its object goes when its processes have. (By force, it goes at once.)"""
    return pod.metadata.is_leaving and pod.metadata.deletion_grace_period_seconds != 0


def gone(pod: Pod, asked: bool, at_s: float) -> Exit:
    """Its object has vanished: what is known of the end. `asked`: it was once as in `is_asked_to_end`."""
    ended = _trained(pod)
    if pod.is_terminal or ended is not None:
        told = exit_of(pod, at_s) if pod.is_terminal else None
        if told is not None:
            return told
        assert ended is not None
        return _ended(ended, launch_of(pod), True, at_s)
    if asked:
        return Exit(
            launch=launch_of(pod), how="signalled", status=15, text="its pod was deleted", at_s=at_s, asked=True
        )
    return Exit(launch=launch_of(pod), how="lost", text="its pod was removed by force", at_s=at_s)


def trouble(pod: Pod, patient: bool) -> str:
    """Why a pod will never start; empty while it may. Whoever is patient waits for what may mend itself."""
    waits = [
        status.state.waiting
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
        if status.state.waiting is not None
    ]
    for waiting in waits:
        if waiting.reason in _HOPELESS or waiting.reason in _CANNOT_RUN:
            return _said(waiting.reason, waiting.message)
        if waiting.reason in _STARTING_ANEW and not patient:
            return _said(waiting.reason, waiting.message)
    return ""


def is_in_trouble(pod: Pod) -> bool:
    """Whether it would have to be looked at again later."""
    return any(
        status.state.waiting is not None and status.state.waiting.reason in _STARTING_ANEW
        for status in (*pod.status.init_container_statuses, *pod.status.container_statuses)
    )


def _trained(pod: Pod) -> Terminated | None:
    """How the container that trains has ended."""
    statuses = pod.status.container_statuses
    chosen: ContainerStatus | None = next((status for status in statuses if status.name == TRAINS), None)
    if chosen is None:
        first = pod.spec.containers[0].name if pod.spec.containers else ""
        chosen = next((status for status in statuses if status.name == first), None)
    return chosen.state.terminated if chosen is not None else None


def _said(reason: str, message: str) -> str:
    parts = [part for part in (reason, message.strip()) if part]
    return ": ".join(parts)


def grace_s(pod: Pod) -> int:
    given = pod.spec.termination_grace_period_seconds
    return 30 if given is None else math.ceil(given)
