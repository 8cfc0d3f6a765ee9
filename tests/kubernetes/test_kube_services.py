"""Services as objects of Kubernetes: what is made, what it says, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import SpecError
from stretto.kubernetes.services import selector, service_objects


def service(name: str = "web", template: Any = None, env: Any = None, **section: Any) -> dict[str, Any]:
    spec = {
        "image": "serve:1",
        "run": "python serve.py --port {port}",
        "resources": {"gpu": 0, "cpu": "500m"},
        "service": {"port": 8000, "replicas": {"min": 2, "max": 6}, **section},
        "template": template,
        "env": env,
    }
    return {"metadata": {"name": name, "namespace": "lab", "uid": "u-1"}, "spec": spec}


def made(obj: dict[str, Any], version_has_hpa_v2: bool = True) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in service_objects(obj, version_has_hpa_v2)}


def container(obj: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made(obj)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    return found


def metric(obj: dict[str, Any]) -> dict[str, Any]:
    (found,) = made(obj)["HorizontalPodAutoscaler"]["spec"]["metrics"]
    return dict(found)


def refused(obj: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        service_objects(obj, True)
    return {problem.field: problem.text for problem in caught.value.problems}


def test_everything_is_the_jobs_own() -> None:
    for one in service_objects(service(), True):
        about = one["metadata"]
        assert (about["name"], about["namespace"]) == ("web", "lab")
        assert about["labels"] == {"app.kubernetes.io/managed-by": "stretto", "stretto.dev/service": "web"}
        assert about["ownerReferences"] == [
            {
                "apiVersion": "stretto.dev/v1alpha1",
                "kind": "ElasticJob",
                "name": "web",
                "uid": "u-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]


def test_one_selector_finds_the_pods_for_all() -> None:
    objects = made(service())
    chosen = selector(service())
    assert objects["Deployment"]["spec"]["selector"] == {"matchLabels": chosen}
    assert objects["Service"]["spec"]["selector"] == chosen
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert chosen.items() <= labels.items()
    assert not {"stretto.dev/job", "stretto.dev/worker"} & labels.keys()


def test_kube_scheduler_places_it() -> None:
    pod = made(service())["Deployment"]["spec"]["template"]["spec"]
    assert "schedulerName" not in pod
    assert "priorityClassName" not in pod
    named = service(template={"spec": {"priorityClassName": "urgent", "containers": []}})
    assert made(named)["Deployment"]["spec"]["template"]["spec"]["priorityClassName"] == "urgent"


def test_a_replica() -> None:
    replica = container(service(health="/ok"))
    assert replica["command"] == ["python", "serve.py", "--port", "8000"]
    assert replica["env"] == [{"name": "PORT", "value": "8000"}]
    assert replica["ports"] == [{"containerPort": 8000, "protocol": "TCP"}]
    assert replica["readinessProbe"]["httpGet"] == {"path": "/ok", "port": 8000}


def test_without_health_it_need_only_listen() -> None:
    assert container(service())["readinessProbe"]["tcpSocket"] == {"port": 8000}


def test_what_the_template_has_is_kept() -> None:
    own = {"name": "main", "readinessProbe": {"exec": {}}, "ports": [{"containerPort": 8000, "name": "web"}]}
    labelled = {"metadata": {"labels": {"team": "a"}}, "spec": {"containers": [own]}}
    replica = container(service(template=labelled, env={"A": "1"}))
    assert replica["readinessProbe"] == {"exec": {}}
    assert replica["ports"] == [{"containerPort": 8000, "name": "web"}]
    assert [variable["name"] for variable in replica["env"]] == ["PORT", "A"]
    template = made(service(template=labelled))["Deployment"]["spec"]["template"]
    assert template["metadata"]["labels"]["team"] == "a"


def test_the_service_is_at_its_port() -> None:
    assert made(service())["Service"]["spec"]["ports"] == [
        {"name": "http", "port": 8000, "targetPort": 8000, "protocol": "TCP"}
    ]


def test_the_autoscaler_says_how_many() -> None:
    objects = made(service(hold="1500ms"))
    assert "replicas" not in objects["Deployment"]["spec"]
    scaler = objects["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 6)
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}
    assert scaler["behavior"] == {"scaleDown": {"stabilizationWindowSeconds": 2}}


@pytest.mark.parametrize(("has_v2", "version"), [(True, "autoscaling/v2"), (False, "autoscaling/v2beta2")])
def test_the_version_that_the_server_has(has_v2: bool, version: str) -> None:
    assert made(service(), has_v2)["HorizontalPodAutoscaler"]["apiVersion"] == version


def test_one_number_of_replicas_needs_no_autoscaler() -> None:
    objects = made(service(replicas={"min": 3, "max": 3}))
    assert "HorizontalPodAutoscaler" not in objects
    assert objects["Deployment"]["spec"]["replicas"] == 3


def test_suspended_it_has_no_replicas() -> None:
    obj = service()
    obj["spec"]["suspend"] = True
    assert made(obj).keys() == {"Deployment", "Service"}
    assert made(obj)["Deployment"]["spec"]["replicas"] == 0


def test_requests_per_second() -> None:
    for wanted, text in ((40, "40"), (0.5, "500m"), (1e-9, "1m")):
        assert metric(service(target={"requests": wanted})) == {
            "type": "Pods",
            "pods": {
                "metric": {"name": "http_requests_per_second"},
                "target": {"type": "AverageValue", "averageValue": text},
            },
        }


def test_percent_of_cpu_are_of_what_it_asks_for_or_of_a_core() -> None:
    obj = service(target={"cpu": 70})
    percent = {"type": "Utilization", "averageUtilization": 70}
    assert metric(obj) == {"type": "Resource", "resource": {"name": "cpu", "target": percent}}
    obj["spec"]["template"] = {"spec": {"containers": [{"name": "worker"}, {"name": "log", "image": "l"}]}}
    assert metric(obj)["resource"]["target"] == {"type": "AverageValue", "averageValue": "350m"}
    del obj["spec"]["template"], obj["spec"]["resources"]["cpu"]
    assert metric(obj)["resource"]["target"] == {"type": "AverageValue", "averageValue": "700m"}


@pytest.mark.parametrize(
    ("obj", "field"),
    [
        (service(env={"PORT": "9"}), "spec.env.PORT"),
        (service(template={"spec": {"restartPolicy": "Never"}}), "spec.template.spec.restartPolicy"),
        (service(template={"spec": {"schedulerName": "stretto"}}), "spec.template.spec.schedulerName"),
        (service(template={"spec": {"containers": [{"ports": 3}]}}), "spec.template.spec.containers[0].ports"),
        (service(template={"spec": {"containers": [{"env": [3]}]}}), "spec.template.spec.containers[0].env[0]"),
        (service(port=0), "spec.service.port"),
        (service(health="ok"), "spec.service.health"),
        (service(name="1web"), "metadata.name"),
    ],
)
def test_refused(obj: dict[str, Any], field: str) -> None:
    assert list(refused(obj)) == [field]


def test_a_training_job_is_none() -> None:
    obj = service()
    del obj["spec"]["service"]
    with pytest.raises(ValueError, match="not a service"):
        service_objects(obj, True)
