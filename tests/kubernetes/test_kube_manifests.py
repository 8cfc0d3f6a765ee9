"""What is installed: as kubectl renders it, complete, with the least rights, and not as root."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import stretto
from stretto.kubernetes import manifests
from stretto.kubernetes.schema import crd
from stretto.testing.kubernetes.building import binaries

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "kubernetes"


@cache
def rendered(folder: str) -> dict[tuple[str, str], dict[str, Any]]:
    made = subprocess.run(
        [str(binaries() / "kubectl"), "kustomize", str(DEPLOY / folder)],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(made.stdout)}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = rendered("base")["Deployment", "stretto-controller"]["spec"]["template"]["spec"]
    return spec


def test_the_generated_files_are_up_to_date() -> None:
    for path, text in manifests.generated().items():
        assert (DEPLOY / path).read_text(encoding="utf-8") == text, "run the command at the top of the file"


def test_writing_them(tmp_path: Path) -> None:
    manifests.main(["--write", str(tmp_path)])
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.yaml")} == manifests.generated().keys()
    assert yaml.safe_load((tmp_path / "base/crd.yaml").read_text(encoding="utf-8")) == crd(False)
    assert "&id" not in (tmp_path / "base/crd.yaml").read_text(encoding="utf-8")


def test_what_is_installed() -> None:
    assert set(rendered("base")) == {
        ("Namespace", "stretto-system"),
        ("CustomResourceDefinition", "elasticjobs.stretto.dev"),
        ("PriorityClass", "stretto-worker"),
        ("ServiceAccount", "stretto-controller"),
        ("ClusterRole", "stretto-controller"),
        ("ClusterRoleBinding", "stretto-controller"),
        ("Role", "stretto-controller"),
        ("RoleBinding", "stretto-controller"),
        ("ClusterRole", "stretto-elasticjobs-edit"),
        ("ClusterRole", "stretto-elasticjobs-view"),
        ("Deployment", "stretto-controller"),
        ("Service", "stretto-controller"),
        ("NetworkPolicy", "stretto-controller"),
    }


def test_every_file_is_used() -> None:
    listed = yaml.safe_load((DEPLOY / "base/kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(path.name for path in (DEPLOY / "base").iterdir())


def test_the_overlay_adds_the_rules_and_nothing_else() -> None:
    base, cel = dict(rendered("base")), dict(rendered("cel"))
    key = ("CustomResourceDefinition", "elasticjobs.stretto.dev")
    assert base.pop(key) == crd(False)
    assert cel.pop(key) == crd(True)
    assert base == cel


def test_workers_preempt_nobody() -> None:
    found = rendered("base")["PriorityClass", "stretto-worker"]
    assert (found["value"], found["preemptionPolicy"], found.get("globalDefault", False)) == (0, "Never", False)


def test_the_controller_is_nobody() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsUser"] == 65532
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod()["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["volumeMounts"] == [{"name": "tmp", "mountPath": "/tmp"}]
    assert pod()["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert container["resources"].keys() == {"requests", "limits"}


def test_the_controller_is_asked_how_it_is() -> None:
    (container,) = pod()["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http", "scheme": "HTTPS"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": "HTTPS"}
    assert container["ports"] == [{"name": "http", "containerPort": 8080, "protocol": "TCP"}]
    assert rendered("base")["Deployment", "stretto-controller"]["spec"]["replicas"] == 2


def test_workers_are_sent_to_the_service() -> None:
    (container,) = pod()["containers"]
    about = rendered("base")["Service", "stretto-controller"]
    (port,) = about["spec"]["ports"]
    address = f"{about['metadata']['name']}.{about['metadata']['namespace']}.svc:{port['port']}"
    assert container["args"] == ["controller", "--tls", f"--url=wss://{address}"]


def test_image_and_version() -> None:
    (container,) = pod()["containers"]
    assert container["image"] == f"stretto-controller:{stretto.__version__}"


def rights(kind: str) -> dict[tuple[str, str], set[str]]:
    """(group, resource) to verbs."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in rendered("base")[kind, "stretto-controller"]["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return found


def test_the_controller_has_the_rights_it_needs_and_no_more() -> None:
    watch = {"get", "list", "watch"}
    change = watch | {"create", "patch", "delete"}
    assert rights("ClusterRole") == {
        ("stretto.dev", "elasticjobs"): watch | {"patch"},
        ("stretto.dev", "elasticjobs/status"): {"get", "patch", "update"},
        ("stretto.dev", "elasticjobs/finalizers"): {"update"},
        ("", "pods"): change,
        ("", "pods/binding"): {"create"},
        ("", "nodes"): watch,
        ("", "secrets"): {"get", "create"},
        ("", "events"): {"create", "patch"},
        ("events.k8s.io", "events"): {"create", "patch"},
        ("", "persistentvolumeclaims"): {"get"},
        ("storage.k8s.io", "storageclasses"): {"get"},
        ("scheduling.k8s.io", "priorityclasses"): {"get"},
        ("", "services"): change,
        ("apps", "deployments"): change,
        ("autoscaling", "horizontalpodautoscalers"): change,
    }
    own = {"get", "create", "patch"}
    assert rights("Role") == {("coordination.k8s.io", "leases"): own, ("", "configmaps"): own}


@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
def test_no_right_is_a_wildcard(kind: str) -> None:
    for (group, resource), verbs in rights(kind).items():
        assert "*" not in (group, resource, *verbs)


@pytest.mark.parametrize("kind", ["ClusterRoleBinding", "RoleBinding"])
def test_the_rights_are_the_controllers_alone(kind: str) -> None:
    found = rendered("base")[kind, "stretto-controller"]
    account = {"kind": "ServiceAccount", "name": "stretto-controller", "namespace": "stretto-system"}
    assert found["subjects"] == [account]
    assert pod()["serviceAccountName"] == account["name"]


def test_everything_selects_the_same_pods() -> None:
    labels = rendered("base")["Deployment", "stretto-controller"]["spec"]["template"]["metadata"]["labels"]
    chosen = [
        rendered("base")["Deployment", "stretto-controller"]["spec"]["selector"]["matchLabels"],
        rendered("base")["Service", "stretto-controller"]["spec"]["selector"],
        rendered("base")["NetworkPolicy", "stretto-controller"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in chosen)


def test_workers_of_any_namespace_reach_the_controller() -> None:
    policy = rendered("base")["NetworkPolicy", "stretto-controller"]["spec"]
    (allowed,) = policy["ingress"]
    assert allowed["ports"] == [{"port": 8080, "protocol": "TCP"}]
    assert allowed["from"][0] == {
        "namespaceSelector": {},
        "podSelector": {"matchExpressions": [{"key": "stretto.dev/worker", "operator": "Exists"}]},
    }
    assert policy["policyTypes"] == ["Ingress", "Egress"]


@pytest.mark.parametrize("name", ["controller", "worker"])
def test_images_do_not_run_as_root(name: str) -> None:
    text = (ROOT / "deploy" / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8")
    assert "Not built in this project's tests" in text
    assert "\nUSER 65532:65532\n" in text
