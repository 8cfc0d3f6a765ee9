"""Worker pods: how they are made, and what their ends mean. No cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stretto.kubernetes import pods
from stretto.kubernetes.model import Pod

LABELS = {pods.JOB_LABEL: "a", pods.WORKER_LABEL: "w3", pods.LAUNCH_LABEL: "7.w3.0a1b2c3d"}


def pod(phase: str = "Running", reason: str = "", leaving: int | None = None, **state: Any) -> Pod:
    meta: dict[str, Any] = {"name": "a-w3-0a1b2c3d", "namespace": "n", "uid": "u", "labels": LABELS}
    if leaving is not None:
        meta |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": leaving}
    status: dict[str, Any] = {"phase": phase, "reason": reason}
    if state:
        status["containerStatuses"] = [{"name": "worker", "state": state}]
    body = {"metadata": meta, "spec": {"containers": [{"name": "worker"}]}, "status": status}
    return msgspec.convert(body, Pod, strict=False)


def blueprint(**changes: Any) -> pods.Blueprint:
    given = {
        "namespace": "n", "job": "a", "uid": "u", "launch": "7.w3.0a1b2c3d", "worker": "w3", "node": "n1", "member": 2,
        "template": {"spec": {"containers": [{"name": "worker", "env": [{"name": "X", "value": "1"}]}]}},
        "env": {"STRETTO_WORKER": "w3"}, "secret": True, "pinned": False,
    }  # fmt: skip
    return pods.Blueprint(**{**given, **changes})


def test_a_pod_is_the_record_of_its_launch() -> None:
    made = pods.worker_pod(blueprint())
    assert made["metadata"]["name"] == "a-w3-0a1b2c3d"
    seen = pods.worker_of(msgspec.convert(made, Pod, strict=False))
    assert (seen.name, seen.launch, seen.seat.node, seen.member) == ("w3", "7.w3.0a1b2c3d", "n1", 2)
    variables = {one["name"]: one for one in made["spec"]["containers"][0]["env"]}
    assert variables["X"]["value"] == "1"
    assert variables["STRETTO_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "a-stretto", "key": "token"}
    assert variables["STRETTO_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_the_template_is_not_changed_by_what_is_made_from_it() -> None:
    plan = blueprint()
    before = msgspec.json.encode(plan.template)
    pods.worker_pod(plan)
    pods.worker_pod(blueprint(template=plan.template, pinned=True))
    assert msgspec.json.encode(plan.template) == before


def test_who_is_pinned_goes_to_its_node_and_meets_its_own_terms_too() -> None:
    mine = {"key": "disk", "operator": "In", "values": ["ssd"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [mine]}]}
    spec = {
        "containers": [{"name": "worker"}],
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}},
    }
    made = pods.worker_pod(blueprint(template={"spec": spec}, pinned=True))["spec"]
    (term,) = made["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [mine]
    assert term["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]
    assert made["schedulerName"] == "default-scheduler"


def test_the_first_of_a_group_meets_at_its_own_address() -> None:
    first = pods.worker_pod(blueprint(env={"MASTER_ADDR": "", "RANK": "0"}))["spec"]["containers"][0]["env"]
    other = pods.worker_pod(blueprint(env={"MASTER_ADDR": "10.0.0.1", "RANK": "1"}))["spec"]["containers"][0]["env"]
    assert {one["name"]: one for one in first}["MASTER_ADDR"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert {one["name"]: one for one in other}["MASTER_ADDR"]["value"] == "10.0.0.1"


def test_a_name_of_any_length_gives_a_name_of_a_pod() -> None:
    assert len(pods.pod_name("x" * 253, "7.w3.0a1b2c3d")) == 253


ENDS = [
    (pod("Succeeded", terminated={"exitCode": 0}), ("exited", 0, False)),
    (pod("Failed", terminated={"exitCode": 3}), ("exited", 3, False)),
    (pod("Failed", terminated={"exitCode": 137}), ("signalled", 9, False)),
    (pod("Failed", terminated={"exitCode": 143}, leaving=30), ("signalled", 15, True)),
    (pod("Failed", terminated={"exitCode": 137, "reason": "OOMKilled"}), ("signalled", 9, False)),
    (pod("Failed", terminated={"exitCode": 128, "reason": "StartError"}), ("refused", 0, False)),
    (pod("Failed", "OutOfcpu"), ("lost", 0, True)),
    (pod("Failed", "OutOfnvidia.com/gpu"), ("lost", 0, True)),
    (pod("Failed", "UnexpectedAdmissionError"), ("lost", 0, True)),
    (pod("Failed", "Evicted"), ("lost", 15, False)),
    (pod("Failed", "Evicted", leaving=0), ("signalled", 15, True)),
]


@pytest.mark.parametrize(("seen", "wanted"), ENDS)
def test_ends(seen: Pod, wanted: tuple[str, int, bool]) -> None:
    told = pods.exit_of(seen, 1.0)
    assert told is not None
    assert (told.how, told.status, told.asked) == wanted


def test_what_runs_has_not_ended() -> None:
    assert pods.exit_of(pod(running={}), 1.0) is None


def test_an_object_that_vanishes() -> None:
    assert pods.gone(pod(running={}), False, 1.0).how == "lost"
    told = pods.gone(pod(running={}, leaving=30), True, 1.0)
    assert (told.how, told.asked) == ("signalled", True)
    ended = pods.gone(pod(terminated={"exitCode": 0}, leaving=30), True, 1.0)
    assert (ended.how, ended.status) == ("exited", 0)
    assert not pods.is_asked_to_end(pod(leaving=0)), "by force: nobody has waited for its processes"


def test_what_may_mend_itself_is_given_time() -> None:
    pulling = pod("Pending", waiting={"reason": "ImagePullBackOff", "message": "not found"})
    assert not pods.trouble(pulling, patient=True)
    assert pods.trouble(pulling, patient=False) == "ImagePullBackOff: not found"
    assert pods.trouble(pod("Pending", waiting={"reason": "InvalidImageName"}), patient=True) == "InvalidImageName"
    assert not pods.trouble(pod("Pending", waiting={"reason": "ContainerCreating"}), patient=False)
