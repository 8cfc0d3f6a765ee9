"""Waiting for what a controller does, as kubectl shows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from stretto.testing.kubernetes import controller_process
from stretto.testing.kubernetes.control_plane import ControlPlane

T = TypeVar("T")
DEADLINE_S = 90.0
BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"


def until(look: Callable[[], T | None], what: str = "it", deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until there is something."""
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end_s, f"{what} did not come about in time"
        time.sleep(0.05)
    return found


def install(control_plane: ControlPlane) -> Path:
    return controller_process.install(control_plane, BASE)


class Jobs:
    """ElasticJobs of one namespace, through kubectl."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.control_plane, self.namespace = control_plane, namespace

    def kubectl(self, *words: str, text: str | None = None) -> str:
        return self.control_plane.kubectl(*words, "--namespace", self.namespace, text=text)

    def create(self, name: str, *, labels: dict[str, str] | None = None, **spec: Any) -> None:
        body = {
            "apiVersion": "stretto.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels or {}},
            "spec": spec,
        }
        self.kubectl("create", "-f", "-", text=json.dumps(body))

    def get(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.kubectl("get", "elasticjob", name, "--output", "json"))
        return found

    def status(self, name: str) -> dict[str, Any]:
        return dict(self.get(name).get("status") or {})

    def patch(self, name: str, **spec: Any) -> None:
        self.kubectl("patch", "elasticjob", name, "--type", "merge", "--patch", json.dumps({"spec": spec}))

    def delete(self, name: str) -> None:
        self.kubectl("delete", "elasticjob", name, "--wait=false")

    def pods(self, name: str, *, alive: bool = True) -> list[dict[str, Any]]:
        text = self.kubectl("get", "pods", "--selector", f"stretto.dev/job={name}", "--output", "json")
        found = json.loads(text)["items"]
        if not alive:
            return list(found)
        return [pod for pod in found if pod["status"].get("phase") not in ("Succeeded", "Failed")]

    def reaches(self, name: str, condition: Callable[[dict[str, Any]], bool], what: str = "") -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status(name)
            return status if condition(status) else None

        try:
            return until(look, what or f"what is awaited of {name}")
        except AssertionError as error:
            raise AssertionError(f"{error}: {json.dumps(self.status(name))[:2000]}") from None

    def ended(self, name: str, phase: str = "Succeeded") -> dict[str, Any]:
        status = self.reaches(
            name, lambda s: s.get("phase") in ("Succeeded", "Failed", "Invalid"), f"the end of {name}"
        )
        assert status["phase"] == phase, status
        return status
