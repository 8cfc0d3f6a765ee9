"""The controller on a real API server, with played nodes: jobs come, run, are resized, give way and end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controllers import Jobs, install, until
from played import Played, played

from stretto.errors import StrettoError
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import PRETENDING, ControllerProcess, controlled, forget
from stretto.testing.kubernetes.fake_objects import FakeNode

pytestmark = pytest.mark.cluster

GPUS = {"gpu": 1, "cpu": 1, "memory": "1Gi"}
CORES = {"gpu": 0, "cpu": 1, "memory": "1Gi"}


@pytest.fixture(scope="module")
def account(control_plane: ControlPlane) -> Path:
    return install(control_plane)


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[Played]:
    wanted = [FakeNode(name=f"n{i}", cpu="8", memory="32Gi", gpus=4) for i in range(2)]
    with played(control_plane.kubeconfig, wanted) as running:
        yield running


@pytest.fixture
def controller(
    control_plane: ControlPlane, account: Path, nodes: Played, tmp_path: Path
) -> Iterator[ControllerProcess]:
    forget(control_plane)
    with controlled(account, tmp_path, options=PRETENDING) as running:
        yield running
    assert "Traceback" not in (tmp_path / "controller.log").read_text()


@pytest.fixture
def jobs(control_plane: ControlPlane, namespace: str) -> Jobs:
    return Jobs(control_plane, namespace)


def plain(jobs: Jobs, name: str, low: int, high: int | None = None, **more: Any) -> None:
    """A job whose pods only pretend; its script never joins."""
    spec = {
        "workers": {"min": low, "max": high or low, "explore": False},
        "image": "none",
        "run": "train",
        "resources": GPUS,
        **more,
    }
    jobs.create(name, **spec)


def test_a_job_takes_what_is_free_and_ends(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 1, 20)
    nodes.has(jobs.namespace, "a", 8)
    status = jobs.reaches("a", lambda s: s.get("size") == "8/1..20")
    assert status["phase"] == "Running"
    assert status["observedGeneration"] == 1
    pod = jobs.pods("a")[0]
    assert pod["spec"]["schedulerName"] == "stretto"
    assert pod["spec"]["preemptionPolicy"] == "Never"
    assert pod["metadata"]["ownerReferences"][0]["kind"] == "ElasticJob"
    nodes.finish(jobs.namespace, "a")
    done = jobs.ended("a")
    assert done["completionTime"]
    assert {c["type"]: c["status"] for c in done["conditions"]}["Complete"] == "True"


def test_kubectl_feels_native(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 1, 3)
    nodes.has(jobs.namespace, "a", 3)
    jobs.reaches("a", lambda s: s.get("workers") == 3)
    table = jobs.kubectl("get", "ej").splitlines()
    assert table[0].split() == ["NAME", "PHASE", "WORKERS", "STEP", "WAITING-FOR", "AGE"]
    assert table[1].split()[:3] == ["a", "Running", "3/1..3"]
    jobs.kubectl("scale", "elasticjob/a", "--replicas=2")
    nodes.has(jobs.namespace, "a", 2)
    jobs.reaches("a", lambda s: s.get("size") == "2/1..2")
    told = jobs.kubectl("describe", "elasticjob", "a")
    assert "0 → 3 workers" in told
    jobs.kubectl("delete", "elasticjob", "a", "--timeout=30s")
    until(lambda: not jobs.pods("a", alive=False), "its pods go")


def test_two_jobs_share_and_the_rest_grows_when_one_ends(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 8)
    nodes.has(jobs.namespace, "a", 8)
    plain(jobs, "b", 2, 8)
    until(lambda: len(nodes.running(jobs.namespace, "b")) >= 2, "room for b")
    assert len(nodes.running(jobs.namespace, "a")) + len(nodes.running(jobs.namespace, "b")) <= 8
    jobs.delete("b")
    nodes.has(jobs.namespace, "a", 8)
    assert jobs.status("a")["preemptions"] == 0


def test_gpu_and_cpu_jobs_live_side_by_side(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "wide", 1, 8)
    plain(jobs, "cores", 1, 50, resources=CORES)
    nodes.has(jobs.namespace, "wide", 8)
    nodes.has(jobs.namespace, "cores", 8)


def test_suspended_and_resumed(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 2, 2, level="elastic", suspend=True)
    assert jobs.reaches("a", lambda s: s.get("phase") == "Suspended")["workers"] == 0
    jobs.patch("a", suspend=False)
    nodes.has(jobs.namespace, "a", 2)
    jobs.patch("a", suspend=True)
    until(lambda: not jobs.pods("a"), "its pods go")
    jobs.reaches("a", lambda s: s.get("phase") == "Suspended")
    jobs.patch("a", suspend=False)
    nodes.has(jobs.namespace, "a", 2)


# Others first.


def deployment(jobs: Jobs, name: str, replicas: int, cpu: str = "1", **spec: Any) -> None:
    pod = {"containers": [{"name": "c", "image": "none", "resources": {"requests": {"cpu": cpu}}}], **spec}
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }
    jobs.kubectl("create", "-f", "-", text=json.dumps(body))


def ready(jobs: Jobs, name: str, replicas: int) -> None:
    def look() -> bool:
        found = json.loads(jobs.kubectl("get", "deployment", name, "--output", "json"))["status"]
        return int(found.get("readyReplicas", 0)) == replicas

    until(look, f"{replicas} ready replicas of {name}")


def test_it_gives_way_to_pods_that_wait_and_takes_back(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 100, resources=CORES)
    nodes.has(jobs.namespace, "a", 16)
    deployment(jobs, "web", 5)
    ready(jobs, "web", 5)
    nodes.has(jobs.namespace, "a", 11)
    assert jobs.status("a")["phase"] == "Running"
    jobs.kubectl("scale", "deployment/web", "--replicas=2")
    nodes.has(jobs.namespace, "a", 14)
    jobs.kubectl("delete", "deployment", "web")
    nodes.has(jobs.namespace, "a", 16)


def test_pods_that_may_preempt_take_their_place_themselves(
    controller: ControllerProcess, nodes: Played, jobs: Jobs, control_plane: ControlPlane
) -> None:
    urgent = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": "urgent"},
        "value": 1000,
    }
    control_plane.kubectl("apply", "-f", "-", text=json.dumps(urgent))
    plain(jobs, "a", 1, 100, resources=CORES)
    nodes.has(jobs.namespace, "a", 16)
    deployment(jobs, "web", 3, cpu="2", priorityClassName="urgent")
    ready(jobs, "web", 3)
    nodes.has(jobs.namespace, "a", 10)


def test_it_leaves_alone_what_waits_for_something_else(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 100, resources=CORES)
    nodes.has(jobs.namespace, "a", 16)
    deployment(jobs, "nowhere", 3, nodeSelector={"not": "there"})
    deployment(jobs, "giant", 1, cpu="100")
    until(lambda: _unschedulable(jobs) == 4, "four pods that cannot run")
    plain(jobs, "b", 1, 1, resources=CORES)
    nodes.has(jobs.namespace, "b", 1)
    nodes.has(jobs.namespace, "a", 15)


def _unschedulable(jobs: Jobs) -> int:
    found = json.loads(jobs.kubectl("get", "pods", "--output", "json"))["items"]
    return sum(
        condition.get("reason") == "Unschedulable" for pod in found for condition in pod["status"].get("conditions", ())
    )


def test_cordons_taints_and_selectors_are_respected(
    controller: ControllerProcess, nodes: Played, jobs: Jobs, control_plane: ControlPlane
) -> None:
    nodes.nodes.do(
        lambda agent: agent.add(FakeNode(name="ssd", cpu="8", memory="32Gi", gpus=4, labels={"disk": "ssd"}))
    )
    tainted = ({"key": "only", "value": "us", "effect": "NoSchedule"},)
    nodes.nodes.do(lambda agent: agent.add(FakeNode(name="ours", cpu="8", memory="32Gi", gpus=4, taints=tainted)))
    control_plane.kubectl("cordon", "n0")
    plain(jobs, "picky", 4, template={"spec": {"nodeSelector": {"disk": "ssd"}}})
    assert {pod.node for pod in nodes.has(jobs.namespace, "picky", 4)} == {"ssd"}
    tolerant = {"spec": {"tolerations": [{"key": "only", "operator": "Exists"}]}}
    plain(jobs, "tolerant", 1, 20, template=tolerant)
    pods = nodes.has(jobs.namespace, "tolerant", 8)
    assert {pod.node for pod in pods} == {"n1", "ours"}
    control_plane.kubectl("uncordon", "n0")
    nodes.has(jobs.namespace, "tolerant", 12)


def test_a_lost_node_is_survived(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 1, 8)
    nodes.has(jobs.namespace, "a", 8)
    nodes.nodes.do(lambda agent: agent.remove("n1"))
    nodes.has(jobs.namespace, "a", 4)
    jobs.reaches("a", lambda s: s.get("size") == "4/1..8")
    assert jobs.status("a")["phase"] == "Running"
    nodes.nodes.do(lambda agent: agent.add(FakeNode(name="n2", cpu="8", memory="32Gi", gpus=4)))
    nodes.has(jobs.namespace, "a", 8)


def test_a_pod_that_kubelet_refuses_is_nobodys_fault(
    controller: ControllerProcess, nodes: Played, jobs: Jobs, control_plane: ControlPlane
) -> None:
    """Another scheduler binds pods to a node that we have filled: kubelet turns away whoever comes last."""
    plain(jobs, "a", 1, 100, resources=CORES)
    nodes.has(jobs.namespace, "a", 16)
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "rude"},
        "spec": {
            "nodeName": "n0",
            "containers": [{"name": "c", "image": "none", "resources": {"requests": {"cpu": "2"}}}],
        },
    }
    jobs.kubectl("create", "-f", "-", text=json.dumps(body))
    until(lambda: "OutOfcpu" in jobs.kubectl("get", "pod", "rude", "--output", "json"), "kubelet refuses it")
    until(lambda: len(nodes.running(jobs.namespace, "a")) <= 14, "ours leave for it")
    assert jobs.status("a")["failures"] == 0


# Bad input.


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"workers": {"min": 0, "max": 3}}, "spec.workers.min"),
        ({"workers": {"min": 1, "max": "many"}}, "spec.workers.max"),
        ({"level": "fluid"}, "spec.level"),
        ({"resources": {"gpu": -1}}, "spec.resources.gpu"),
        ({"priority": 1000}, "spec.priority"),
    ],
)
def test_the_schema_names_the_field(account: Path, jobs: Jobs, spec: dict[str, Any], field: str) -> None:
    with pytest.raises(StrettoError, match=field.replace(".", r"\.")):
        jobs.create("bad", **{"image": "none", "run": "x", **spec})


def test_what_a_schema_cannot_say_is_a_condition(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "bad", 5, 2)
    status = jobs.reaches("bad", lambda s: s.get("phase") == "Invalid")
    assert "spec.workers" in status["message"]
    assert status["conditions"][0]["type"] == "Invalid"
    assert status["conditions"][0]["status"] == "True"
    jobs.patch("bad", workers={"min": 1, "max": 2})
    nodes.has(jobs.namespace, "bad", 2)
    assert jobs.reaches("bad", lambda s: s.get("phase") == "Running")


def test_what_fits_no_node_says_so(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "giant", 1, 1, resources={"gpu": 16})
    status = jobs.reaches("giant", lambda s: s.get("reason") == "FitsNoNode")
    assert "16 GPU" in status["message"]
    plain(jobs, "nowhere", 1, 1, template={"spec": {"nodeSelector": {"not": "there"}}})
    status = jobs.reaches("nowhere", lambda s: s.get("reason") == "FitsNoNode")
    assert "did not match the node selector" in status["message"]


def test_a_script_that_fails_is_told_once(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 2)
    nodes.has(jobs.namespace, "a", 2)
    nodes.finish(jobs.namespace, "a", 3)
    status = jobs.ended("a", "Failed")
    assert "exit code 3" in status["message"]
    assert status["accounts"]["launches"] == 2, "it is not tried again"


def test_an_object_deleted_while_its_pods_start_leaves_nothing(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    for name in ("a", "b", "c"):
        plain(jobs, name, 1, 8)
        jobs.delete(name)
    plain(jobs, "last", 8)
    nodes.has(jobs.namespace, "last", 8)
    for name in ("a", "b", "c"):
        until(lambda name=name: not jobs.pods(name, alive=False), f"the pods of {name} go")  # type: ignore[misc]


def test_an_object_made_anew_under_its_name_is_another_job(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 2)
    nodes.has(jobs.namespace, "a", 2)
    first = jobs.status("a")["number"]
    jobs.kubectl("delete", "elasticjob", "a", "--timeout=30s")
    plain(jobs, "a", 3)
    nodes.has(jobs.namespace, "a", 3)
    assert jobs.reaches("a", lambda s: s.get("workers") == 3)["number"] != first


# The controller itself.


def test_a_killed_controller_is_followed_by_one_that_touches_nothing(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 6)
    before = {pod.uid for pod in nodes.has(jobs.namespace, "a", 6)}
    jobs.reaches("a", lambda s: s.get("workers") == 6)
    controller.kill()
    plain(jobs, "b", 2)
    controller.start()
    nodes.has(jobs.namespace, "b", 2)
    assert {pod.uid for pod in nodes.running(jobs.namespace, "a")} == before
    controller.kill()
    nodes.finish(jobs.namespace, "a")
    controller.start()
    jobs.ended("a")
    assert jobs.status("a")["restarts"] == 0


def test_of_two_controllers_one_works(
    controller: ControllerProcess, account: Path, nodes: Played, jobs: Jobs, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    with controlled(account, tmp_path / "second", options=PRETENDING) as second:
        plain(jobs, "a", 1, 8)
        nodes.has(jobs.namespace, "a", 8)
        controller.kill()
        plain(jobs, "b", 2)
        until(lambda: len(nodes.running(jobs.namespace, "b")) >= 2, "the second takes over")
        assert not second.has_failed
        controller.start()


def test_the_api_server_may_be_away(
    controller: ControllerProcess, nodes: Played, jobs: Jobs, control_plane: ControlPlane
) -> None:
    plain(jobs, "a", 1, 4)
    before = {pod.uid for pod in nodes.has(jobs.namespace, "a", 4)}
    with control_plane.without_api_server():
        # A leader that cannot renew its lease ends, as it must; its pod would be started anew.
        assert controller.ends() != 0
    controller.start()
    plain(jobs, "b", 2)
    nodes.has(jobs.namespace, "b", 2)
    assert {pod.uid for pod in nodes.running(jobs.namespace, "a")} == before


# Services.


def test_a_service_is_the_clusters_own_and_training_gives_way(
    controller: ControllerProcess, nodes: Played, jobs: Jobs
) -> None:
    plain(jobs, "a", 1, 100, resources=CORES)
    nodes.has(jobs.namespace, "a", 16)
    service = {"port": 8000, "replicas": {"min": 3, "max": 6}, "target": {"cpu": 70}}
    jobs.create("web", image="none", run="serve", service=service, resources=CORES)
    ready(jobs, "web", 1)
    scaler = json.loads(jobs.kubectl("get", "hpa", "web", "--output", "json"))
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (3, 6)
    assert jobs.kubectl("get", "service", "web", "--output", "jsonpath={.spec.ports[0].port}") == "8000"
    jobs.reaches("web", lambda s: s.get("phase") == "Running" and s.get("ready", 0) >= 1)
    until(lambda: len(nodes.running(jobs.namespace, "a")) < 16, "training gives way")
    jobs.patch("web", service={"replicas": {"min": 2, "max": 2}})
    ready(jobs, "web", 2)
    until(lambda: "web" not in jobs.kubectl("get", "hpa"), "no autoscaler for a fixed size")
    jobs.patch("web", suspend=True)
    jobs.reaches("web", lambda s: s.get("phase") == "Suspended" and s.get("workers") == 0)
    jobs.kubectl("delete", "elasticjob", "web", "--timeout=30s")
    until(
        lambda: not jobs.kubectl("get", "deployment,service", "--selector", "stretto.dev/service=web"), "all of it goes"
    )
    nodes.has(jobs.namespace, "a", 16)


def test_what_was_changed_while_nobody_led_is_done(controller: ControllerProcess, nodes: Played, jobs: Jobs) -> None:
    plain(jobs, "a", 1, 2)
    plain(jobs, "b", 1, 2, suspend=True)
    nodes.has(jobs.namespace, "a", 2)
    jobs.reaches("b", lambda s: s.get("phase") == "Suspended")
    controller.kill()
    jobs.kubectl("scale", "elasticjob/a", "--replicas=4")
    jobs.patch("b", suspend=False)
    controller.start()
    nodes.has(jobs.namespace, "a", 4)
    nodes.has(jobs.namespace, "b", 2)


def test_what_was_learned_of_jobs_outlives_the_controller(
    controller: ControllerProcess, nodes: Played, jobs: Jobs, control_plane: ControlPlane
) -> None:
    def run_one(name: str) -> list[float]:
        plain(jobs, name, 1, labels={"stretto.dev/class": "bert"})
        nodes.has(jobs.namespace, name, 1)
        nodes.finish(jobs.namespace, name)
        jobs.ended(name)
        assert controller.stop() == 0
        words = ("get", "configmap", "stretto-learned", "--namespace", "stretto-system", "--output", "json")
        kept = json.loads(control_plane.kubectl(*words))["data"]
        entries = [json.loads(text) for key, text in kept.items() if key != "memory"]
        (own,) = [entry for entry in entries if entry["klass"] == f"{jobs.namespace}/bert"]
        return list(own["known"]["ended"])

    assert len(run_one("a")) == 1
    controller.start()
    assert len(run_one("b")) == 2
