"""A real node on this machine: containerd, runc and a kubelet, with pods on a network of their own.

    with PodNetwork() as network, ControlPlane(folder) as cluster:
        with RealNode(cluster, "a", network, images=[worker()]) as node:
            ...  # pods run here; `node.address` is this machine as they see it

A node lives in its own process and mount namespaces. Its first process is containerd; when that is killed, the kernel
ends everything on the node at once, as when a machine loses power, and its mounts vanish with it. Folders that kubelet
and containerd would use at fixed places (/run, /var/lib, /var/log) are the node's own there, and so are the kernel
settings that kubelet insists on: nothing of the machine changes. Several nodes, of one control plane or of several, can
run at once. What lies outside (cgroups, one folder below /tmp, the address on the bridge) is removed by a guard.

It needs root and Debian's programs from `building`. The cgroups of the machine may be of version 1 (or mixed).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from stretto.errors import Unavailable
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.guard import CGROUPS, Guard
from stretto.testing.kubernetes.images import PAUSE, Image, busybox, pause
from stretto.testing.kubernetes.pod_network import PodNetwork, need_root
from stretto.testing.kubernetes.processes import Program, wait_until

START_S = 120.0
#: kubelet wants these values and would set them; on the node they read so already.
KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
}  # fmt: skip
OWN_FOLDERS = ("/run", "/var/lib", "/var/log")


class RealNode:
    """A context manager: the node is Ready inside, and nothing of it is left afterwards."""

    def __init__(
        self,
        control_plane: ControlPlane,
        name: str,
        network: PodNetwork,
        *,
        images: Sequence[Image] = (),
        labels: dict[str, str] | None = None,
    ) -> None:
        self.control_plane, self.name, self.network = control_plane, name, network
        self.labels = labels or {}
        self._images = [pause(), busybox(), *images]
        self.cgroup = f"stretto-node-{secrets.token_hex(4)}"
        self._programs: list[Program] = []

    @property
    def address(self) -> str:
        """This machine, as the pods see it."""
        return self.network.address

    def __enter__(self) -> RealNode:
        need_root("a real node")
        self._guard = Guard()
        self.folder = Path(tempfile.mkdtemp(prefix="stretto-node-", dir="/tmp"))
        self._guard.folder(self.folder)
        try:
            self._seat = self.network.seat()
            self._guard.command("ip", "address", "delete", f"{self._seat.address}/32", "dev", self.network.bridge)
            self._make_cgroup()
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(Unavailable, subprocess.TimeoutExpired):
            self._forget_pods()
        self._guard.close()
        for program in self._programs:
            program.process.wait()

    # Using it.

    def load(self, image: Image) -> None:
        """Make an image known: pods that name it need no registry."""
        command = [str(self._bin / "ctr"), "--address", self._socket, "--namespace", "k8s.io", "images", "import", "-"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as importing:
            assert importing.stdin is not None
            assert importing.stderr is not None
            with contextlib.suppress(BrokenPipeError):
                image.archive(importing.stdin)
            # What could not be written is flushed once more at the close, which fails likewise.
            with contextlib.suppress(BrokenPipeError):
                importing.stdin.close()
            said = importing.stderr.read().decode(errors="replace")
        if importing.returncode:
            raise Unavailable(f"image {image.name} could not be imported: {said}")

    # Hurting it.

    def lose(self) -> None:
        """The machine loses power: every process on it ends at once, and nobody is told."""
        os.kill(self._first, signal.SIGKILL)
        for program in (self.containerd, self.kubelet):
            program.process.wait()

    def start(self) -> None:
        """Start it, or start it again after `lose`; its images are still there."""
        self._bin = self.control_plane.bin
        self._configure()
        self._start_containerd()
        for image in self._images:
            self.load(image)
        self._images.clear()
        self.start_kubelet()
        running = [self.containerd, self.kubelet]
        wait_until(self.ready, f"node {self.name} is ready", deadline_s=START_S, programs=running)

    def stop_kubelet(self) -> None:
        """Pods run on, nobody answers for them."""
        os.kill(self._kubelet_itself, signal.SIGKILL)
        self.kubelet.process.wait()

    def start_kubelet(self) -> None:
        labels = ",".join(f"{key}={value}" for key, value in self.labels.items())
        identity = self.control_plane.kubeconfig_as(f"system:node:{self.name}", ["system:nodes"])
        self.kubelet = self._program(
            f"kubelet-{self.name}",
            [
                "nsenter", f"--target={self._first}", "--mount", "--pid", str(self._bin / "kubelet"),
                f"--config={self.folder / 'kubelet.json'}", f"--kubeconfig={identity}",
                f"--hostname-override={self.name}", f"--node-ip={self._seat.address}",
                f"--root-dir={self.folder / 'kubelet'}", f"--cert-dir={self.folder / 'kubelet-pki'}",
                "--container-runtime=remote", f"--container-runtime-endpoint=unix://{self._socket}",
                f"--node-labels={labels}", "--logtostderr=true",
            ],
        )  # fmt: skip
        self._kubelet_itself = self._inner(self.kubelet)

    def ready(self) -> bool:
        found = self.control_plane.kubectl(
            "get", "node", self.name, "--ignore-not-found",
            "--output", 'jsonpath={.status.conditions[?(@.type=="Ready")].status} {.spec.taints[*].key}',
        )  # fmt: skip
        return found.strip() == "True"

    # How it is made.

    def _make_cgroup(self) -> None:
        """Below which all pods of the node are: one folder per controller, or one for all."""
        self._guard.cgroup(self.cgroup)
        roots = [CGROUPS] if (CGROUPS / "cgroup.controllers").exists() else list(CGROUPS.iterdir())
        for root in roots:
            (root / self.cgroup).mkdir()
            for setting in ("cpuset.cpus", "cpuset.mems"):
                if (root / setting).exists():
                    (root / self.cgroup / setting).write_text((root / setting).read_text())

    def _configure(self) -> None:
        self._socket = str(self.folder / "c.sock")
        for forgotten in ("containerd-state", "own/run"):
            shutil.rmtree(self.folder / forgotten, ignore_errors=True)
        for folder in ("cni", "flex", "ipam", *(f"own{path}" for path in OWN_FOLDERS)):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        settings = self.folder / "kernel"
        for name, value in KERNEL_SETTINGS.items():
            (settings / name).parent.mkdir(parents=True, exist_ok=True)
            (settings / name).write_text(f"{value}\n")
        (self.folder / "containerd.toml").write_text(self._containerd_settings())
        (self.folder / "cni" / "10-pods.conflist").write_text(json.dumps(self._network_settings()))
        # It is read as YAML unless it begins with a brace, and then as JSON.
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet_settings()))

    def _start_containerd(self) -> None:
        """The node's first process: mounts what is its own, and becomes containerd."""
        mounts = [f"mount --bind {self.folder}/own{path} {path}" for path in OWN_FOLDERS]
        mounts += [f"mount --bind {self.folder}/kernel/{name} /proc/sys/{name}" for name in KERNEL_SETTINGS]
        start = f"exec {self._bin}/containerd --config {self.folder}/containerd.toml"
        self.containerd = self._program(
            f"containerd-{self.name}",
            [
                "unshare", "--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "--mount-proc",
                "/bin/sh", "-ec", "\n".join([*mounts, start]),
            ],
        )  # fmt: skip
        self._first = self._inner(self.containerd)
        wait_until(self._answers, "containerd answers", deadline_s=START_S, programs=[self.containerd])

    def _answers(self) -> bool:
        command = [str(self._bin / "ctr"), "--address", self._socket, "--connect-timeout=1s", "plugins", "list"]
        done = subprocess.run(command, capture_output=True, check=False)
        return done.returncode == 0

    def _program(self, name: str, command: list[str]) -> Program:
        environment = {"PATH": f"{self._bin}:/usr/sbin:/usr/bin:/sbin:/bin", "AWS_EC2_METADATA_DISABLED": "true"}
        program = Program(name, command, self.control_plane.folder / f"{name}.log", self._guard, environment)
        self._programs.append(program)
        return program

    def _inner(self, program: Program) -> int:
        """What `unshare` or `nsenter` runs inside, and waits for: to be ended first, so that they see it to its end."""
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children")
        wait_until(lambda: children.read_text() != "", f"{program.name} starts", programs=[program])
        inner = int(children.read_text().split()[0])
        self._guard.process(inner, 0.0)
        return inner

    def _containerd_settings(self) -> str:
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        return f"""version = 2
root = "{self.folder}/containerd"
state = "{self.folder}/containerd-state"
[grpc]
address = "{self._socket}"
[plugins."io.containerd.internal.v1.opt"]
path = "{self.folder}/opt"
[{cri}]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
disable_hugetlb_controller = true
netns_mounts_under_state_dir = true
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[{cri}.containerd.runtimes.runc.options]
BinaryName = "{self._bin}/runc"
[{cri}.cni]
bin_dir = "{self._bin}"
conf_dir = "{self.folder}/cni"
"""

    def _network_settings(self) -> dict[str, object]:
        reach = {
            "subnet": str(self.network.block), "rangeStart": self._seat.first_pod, "rangeEnd": self._seat.last_pod,
            "gateway": self.network.address,
        }  # fmt: skip
        addresses = {
            "type": "host-local", "dataDir": str(self.folder / "ipam"), "ranges": [[reach]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }  # fmt: skip
        bridge = {"type": "bridge", "bridge": self.network.bridge, "ipam": addresses}
        return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}

    def _kubelet_settings(self) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self._seat.address,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            "resolvConf": "",
            "evictionHard": {},
            "imageGCHighThresholdPercent": 100,
            "imageMinimumGCAge": "24h",
            "nodeStatusUpdateFrequency": "2s",
            "nodeStatusReportFrequency": "10s",
            "volumePluginDir": str(self.folder / "flex"),
        }

    def _forget_pods(self) -> None:
        """Take the node and its pods out of the API, for those who use the control plane afterwards."""
        shown = 'jsonpath={range .items[*]}{.metadata.namespace} {.metadata.name}{"\\n"}{end}'
        here = ("--all-namespaces", f"--field-selector=spec.nodeName={self.name}", "--output", shown)
        at_once = ("--force", "--grace-period=0", "--ignore-not-found", "--wait=false")
        for line in self.control_plane.kubectl("get", "pods", *here, timeout_s=20).splitlines():
            namespace, name = line.split()
            self.control_plane.kubectl("delete", "pod", name, "--namespace", namespace, *at_once, timeout_s=20)
        self.control_plane.kubectl("delete", "node", self.name, "--ignore-not-found", "--wait=false", timeout_s=20)
