"""The controller as a process, with exactly the rights that the manifests give it."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stretto.errors import Unavailable
from stretto.kubernetes.learned import NAME as LEARNED
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.guard import Guard

ACCOUNT, NAMESPACE = "stretto-controller", "stretto-system"
DEADLINE_S = 90.0
PRETENDING = ("--set", "stops_lose_work=true")
"""For pods that only pretend to train: they never join, and would be taken for programs that lose their work."""


def install(control_plane: ControlPlane, manifests: Path) -> Path:
    """Apply the manifests; the kubeconfig of the controller's account. The pods of its Deployment are not wanted."""
    control_plane.kubectl("apply", "-k", str(manifests))
    control_plane.kubectl("scale", f"deployment/{ACCOUNT}", "--replicas=0", "--namespace", NAMESPACE)
    control_plane.kubectl("wait", "--for=condition=Established", "crd/elasticjobs.stretto.dev", "--timeout=30s")
    return control_plane.kubeconfig_for(control_plane.token(ACCOUNT, NAMESPACE), ACCOUNT)


def forget(control_plane: ControlPlane) -> None:
    """What was learned of earlier jobs."""
    control_plane.kubectl("delete", "configmap", LEARNED, "--namespace", NAMESPACE, "--ignore-not-found")


def command_line(kubeconfig: Path, host: str, port: int, lease_s: float) -> list[str]:
    """With TLS wherever others than this machine reach it."""
    command = [sys.executable, "-m", "stretto.cli", "controller", "--kubeconfig", str(kubeconfig)]
    command += ["--host", host, "--port", str(port), "--lease", f"{lease_s:g}"]
    return command if ipaddress.ip_address(host).is_loopback else [*command, "--tls"]


class ControllerProcess:
    """Can be started again when it has ended; then on the same port, where workers look for it."""

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        host: str = "127.0.0.1",
        *,
        lease_s: float = 3.0,
        options: Sequence[str] = (),
    ) -> None:
        self._options = tuple(options)
        self.log = folder / "controller.log"
        self.address = ""
        self._kubeconfig, self._host, self._lease_s = kubeconfig, host, lease_s
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def has_failed(self) -> bool:
        """Whether it ended without being asked to."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Returns when it says that it listens."""
        command = command_line(self._kubeconfig, self._host, self._port, self._lease_s)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *self._options, "--json"], stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._guard = Guard()
        self._guard.process(self.pid, DEADLINE_S)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the controller did not start:\n{self.log.read_text()[-3000:]}")
        self.address = json.loads(line)["address"]
        self._port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self._running.kill()
        self.ends()

    def stop(self) -> int:
        """It gives its lease back, so that the next one need not wait for it."""
        self._running.terminate()
        return self.ends()

    def ends(self) -> int:
        """Wait for it; its exit code."""
        process = self._running
        assert process.stdout is not None
        code = process.wait(DEADLINE_S)
        process.stdout.close()
        self._guard.close()
        self._process = None
        return code

    def close(self) -> None:
        if self._process is not None:
            self.stop()

    @property
    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise RuntimeError("the controller has not been started")
        return self._process


@contextmanager
def controlled(
    kubeconfig: Path, folder: Path, host: str = "127.0.0.1", *, lease_s: float = 3.0, options: Sequence[str] = ()
) -> Iterator[ControllerProcess]:  # fmt: skip
    controller = ControllerProcess(kubeconfig, folder, host, lease_s=lease_s, options=options)
    try:
        controller.start()
        yield controller
    finally:
        controller.close()
