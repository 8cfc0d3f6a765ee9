"""A controller for tests: the real process, with exactly the rights that the manifests give it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from stretto.testing.kubernetes.control_plane import ControlPlane

T = TypeVar("T")
DEADLINE_S = 90.0
BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"


def until(look: Callable[[], T], what: str = "it", deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until there is something."""
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end_s, f"{what} did not come about in time"
        time.sleep(0.05)
    return found


def install(control_plane: ControlPlane) -> Path:
    """Apply the manifests; the kubeconfig of the controller's account. Its pods are not wanted here."""
    control_plane.kubectl("apply", "-k", str(BASE))
    control_plane.kubectl("scale", "deployment/stretto-controller", "--replicas=0", "--namespace", "stretto-system")
    control_plane.kubectl("wait", "--for=condition=Established", "crd/elasticjobs.stretto.dev", "--timeout=30s")
    token = control_plane.token("stretto-controller", "stretto-system")
    return control_plane.kubeconfig_for(token, "stretto-controller")


class ControllerProcess:
    def __init__(self, kubeconfig: Path, folder: Path, host: str = "127.0.0.1", *options: str) -> None:
        self.kubeconfig, self.folder, self.host, self.options = kubeconfig, folder, host, options
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "controller.log"

    def start(self) -> None:
        """On the port that it had before: workers look for it there."""
        command = [sys.executable, "-m", "stretto.cli", "controller", "--json", "--kubeconfig", str(self.kubeconfig)]
        command += ["--host", self.host, "--port", str(self.port), "--lease", "3", *self.options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        self.port = int(json.loads(line)["address"].rpartition(":")[2])

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self._reap()

    def ends(self, within_s: float = DEADLINE_S) -> int:
        """By itself; its exit code."""
        assert self.process is not None
        self.process.wait(within_s)
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        code = self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        self.process = None
        return code


@contextmanager
def controlled(kubeconfig: Path, folder: Path, host: str = "127.0.0.1", *options: str) -> Iterator[ControllerProcess]:
    controller = ControllerProcess(kubeconfig, folder, host, *options)
    controller.start()
    try:
        yield controller
    finally:
        if controller.process is not None:
            controller.stop()


class Jobs:
    """ElasticJobs of one namespace, through kubectl."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.control_plane, self.namespace = control_plane, namespace

    def kubectl(self, *words: str, text: str | None = None) -> str:
        return self.control_plane.kubectl(*words, "--namespace", self.namespace, text=text)

    def create(self, name: str, **spec: Any) -> None:
        body = {
            "apiVersion": "stretto.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": self.namespace},
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
