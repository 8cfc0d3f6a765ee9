"""The test bed itself: the control plane is real, played nodes are taken for real ones, and nothing is left behind."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stretto.errors import Unavailable
from stretto.testing.kubernetes.background_nodes import BackgroundNodes
from stretto.testing.kubernetes.building import binaries
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.fake_nodes import FakeNodes
from stretto.testing.kubernetes.fake_objects import GPU, POD, RUN_S, FakeNode, fake_pod
from stretto.testing.kubernetes.guard import cgroup_folders
from stretto.testing.kubernetes.images import BUSYBOX, USER, WORKER
from stretto.testing.kubernetes.node import RealNode
from stretto.testing.kubernetes.processes import run, wait_until
from stretto.testing.kubernetes.quantities import amount

cluster = pytest.mark.cluster


def pod(name: str, namespace: str, *, image: str = "none", command: tuple[str, ...] = (), **spec: Any) -> str:
    container = {
        "name": "main",
        "image": image,
        "resources": {"limits": spec.pop("limits", {})},
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "readOnlyRootFilesystem": True},
    }
    if command:
        container["command"] = list(command)
    annotations = spec.pop("annotations", {})
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "annotations": annotations},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], **spec},
    }
    return json.dumps(made)


def create(control_plane: ControlPlane, text: str) -> None:
    control_plane.kubectl("create", "-f", "-", text=text)


def show(control_plane: ControlPlane, namespace: str, name: str, path: str) -> str:
    return control_plane.kubectl("get", "pod", name, "--namespace", namespace, "--output", f"jsonpath={{{path}}}")


def wait_phase(control_plane: ControlPlane, namespace: str, name: str, phase: str) -> None:
    wait_until(lambda: show(control_plane, namespace, name, ".status.phase") == phase, f"pod {name} is {phase}")


# What needs no cluster.


@pytest.mark.parametrize(
    ("resource", "text", "wanted"),
    [
        ("cpu", "2", 2000),
        ("cpu", "500m", 500),
        ("cpu", "0.1", 100),
        ("cpu", "100u", 1),
        ("memory", "256Gi", 256 << 30),
        ("memory", "1500M", 1_500_000_000),
        ("memory", "128974848", 128974848),
        ("memory", "1.5Ki", 1536),
        (GPU, "8", 8),
    ],
)
def test_quantities(resource: str, text: str, wanted: int) -> None:
    assert amount(resource, text) == wanted


def test_a_pod_requests_what_its_containers_or_the_largest_first_one_need() -> None:
    def container(**requests: str) -> dict[str, Any]:
        return {"name": "c", "resources": {"requests": requests}}

    seen = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": {RUN_S: "1.5"}},
        "spec": {
            "containers": [container(cpu="1", memory="1Ki"), container(cpu="500m")],
            "initContainers": [container(cpu="1"), container(memory="4Ki")],
            "overhead": {"cpu": "10m"},
        },
        "status": {},
    }
    found = fake_pod(POD.decode(json.dumps(seen)))
    assert found.requests == {"pods": 1, "cpu": 1510, "memory": 4096}
    assert found.run_s == 1.5


def test_a_guard_undoes_everything_when_its_process_is_killed(tmp_path: Path) -> None:
    script = """
        import pathlib, subprocess, sys, time
        from stretto.testing.kubernetes.guard import Guard
        folder = pathlib.Path(sys.argv[1])
        guard = Guard()
        (folder / "kept" / "deep").mkdir(parents=True)
        guard.folder(folder / "kept")
        guard.command("touch", str(folder / "undone"))
        stubborn = subprocess.Popen(["sh", "-c", "trap '' TERM; echo started; while :; do sleep 1; done"], stdout=-1)
        stubborn.stdout.readline()
        guard.process(stubborn.pid, 0.1)
        print(stubborn.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        stubborn = int(owner.stdout.readline())
        owner.kill()
    wait_until(lambda: not alive(stubborn), "the guarded process is gone")
    wait_until(lambda: not (tmp_path / "kept").exists(), "the guarded folder is gone")
    assert (tmp_path / "undone").exists()


def alive(pid: int) -> bool:
    """A zombie is not: it waits for somebody else to ask for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# The control plane.


@cluster
def test_the_api_server_knows_its_users(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.kubectl("create", "serviceaccount", "reader", "--namespace", namespace)
    control_plane.kubectl(
        "create", "rolebinding", "reader", "--clusterrole=view", f"--serviceaccount={namespace}:reader",
        "--namespace", namespace,
    )  # fmt: skip
    token = control_plane.token("reader", namespace)
    users = {
        "by token": control_plane.kubeconfig_for(token, f"reader-{namespace}"),
        "by certificate": control_plane.kubeconfig_as("someone", ["some-group"]),
    }

    def may(who: str, *words: str) -> bool:
        command = [str(control_plane.bin / "kubectl"), f"--kubeconfig={users[who]}", "--namespace", namespace]
        return subprocess.run([*command, "auth", "can-i", *words], capture_output=True, check=False).returncode == 0

    assert may("by token", "list", "pods")
    assert not may("by token", "create", "pods")
    assert not may("by certificate", "list", "pods")


@cluster
def test_kubectl_complains_aloud(control_plane: ControlPlane) -> None:
    with pytest.raises(Unavailable, match=r"namespaces \"nowhere\" not found"):
        control_plane.kubectl("get", "namespace", "nowhere")


@cluster
def test_the_api_server_can_be_away(control_plane: ControlPlane, namespace: str) -> None:
    """It comes back at the same address with everything it knew; played nodes bear it."""
    with BackgroundNodes(control_plane.kubeconfig, [FakeNode(name="away-0", labels={"test": namespace})]) as nodes:
        create(control_plane, pod("before", namespace, nodeSelector={"test": namespace}))
        nodes.wait(lambda agent: running(agent, namespace) == {"before"})
        with control_plane.without_api_server(), pytest.raises(Unavailable):
            control_plane.kubectl("get", "nodes", "--request-timeout=2s")
        create(control_plane, pod("after", namespace, nodeSelector={"test": namespace}))
        nodes.wait(lambda agent: running(agent, namespace) == {"before", "after"})


# Played nodes.


def running(nodes: FakeNodes, namespace: str) -> set[str]:
    return {pod.name for pod in nodes.pods.values() if pod.namespace == namespace and pod.state == "running"}


@cluster
def test_the_scheduler_fills_played_nodes(control_plane: ControlPlane, namespace: str) -> None:
    """Pods run where they fit, those that do not fit wait, and room that is released is used."""
    described = [FakeNode(name=f"fill-{n}", cpu="4", gpus=2, labels={"test": namespace}) for n in range(2)]
    with BackgroundNodes(control_plane.kubeconfig, described) as nodes:
        names = {f"p{number}" for number in range(5)}
        for name in names:
            limits = {"cpu": "1", GPU: "1"}
            create(control_plane, pod(name, namespace, limits=limits, nodeSelector={"test": namespace}))
        nodes.wait(lambda agent: len(running(agent, namespace)) == 4)
        first = nodes.ask(lambda agent: running(agent, namespace))
        (waiting,) = names - first
        assert show(control_plane, namespace, waiting, ".status.phase") == "Pending"

        victim = min(first)
        wait_phase(control_plane, namespace, victim, "Running")
        assert re.fullmatch(r"10\.\d+\.\d+\.\d+", show(control_plane, namespace, victim, ".status.podIP"))
        control_plane.kubectl("delete", "pod", victim, "--namespace", namespace)
        nodes.wait(lambda agent: waiting in running(agent, namespace))


@cluster
def test_a_played_node_refuses_what_does_not_fit(control_plane: ControlPlane, namespace: str) -> None:
    with BackgroundNodes(control_plane.kubeconfig, [FakeNode(name="full-0", cpu="2", gpus=1)]) as nodes:
        create(control_plane, pod("first", namespace, nodeName="full-0", limits={"cpu": "1500m"}))
        nodes.wait(lambda agent: running(agent, namespace) == {"first"})
        create(control_plane, pod("cpu", namespace, nodeName="full-0", limits={"cpu": "600m"}))
        create(control_plane, pod("gpu", namespace, nodeName="full-0", limits={GPU: "2"}))
        create(control_plane, pod("fits", namespace, nodeName="full-0", limits={"cpu": "500m", GPU: "1"}))
        for name in ("cpu", "gpu"):
            wait_phase(control_plane, namespace, name, "Failed")
        nodes.wait(lambda agent: running(agent, namespace) == {"first", "fits"})
        assert show(control_plane, namespace, "cpu", ".status.reason") == "OutOfcpu"
        assert show(control_plane, namespace, "cpu", ".status.message") == (
            "Pod Node didn't have enough resource: cpu, requested: 600, used: 1500, capacity: 2000"
        )
        assert show(control_plane, namespace, "gpu", ".status.reason") == f"OutOf{GPU}"


@cluster
def test_pods_on_played_nodes_end(control_plane: ControlPlane, namespace: str) -> None:
    """By themselves, with the code they are given, or again and again."""

    async def finish(agent: FakeNodes, name: str, code: int) -> None:
        found = agent.pod(namespace, name)
        assert found is not None
        await agent.finish(found, code)

    with BackgroundNodes(control_plane.kubeconfig, [FakeNode(name="end-0")]) as nodes:
        create(control_plane, pod("short", namespace, nodeName="end-0", annotations={RUN_S: "0.1"}))
        create(control_plane, pod("bad", namespace, nodeName="end-0"))
        create(control_plane, pod("again", namespace, nodeName="end-0", restartPolicy="Always"))
        nodes.wait(lambda agent: {"bad", "again"} <= running(agent, namespace))
        nodes.do(lambda agent: finish(agent, "bad", 3))
        nodes.do(lambda agent: finish(agent, "again", 3))
        nodes.wait(lambda agent: running(agent, namespace) == {"again"})
        for name, phase in (("short", "Succeeded"), ("bad", "Failed"), ("again", "Running")):
            wait_phase(control_plane, namespace, name, phase)
        status = ".status.containerStatuses[0]"
        assert show(control_plane, namespace, "bad", f"{status}.state.terminated.exitCode") == "3"
        assert show(control_plane, namespace, "again", f"{status}.restartCount") == "1"


READY = 'jsonpath={.status.conditions[?(@.type=="Ready")].status}'


@cluster
def test_a_played_node_is_lost_and_comes_back(control_plane: ControlPlane, namespace: str) -> None:
    """A lost node ends no pods and gets none; back again, it does what was asked of it meanwhile."""
    with BackgroundNodes(control_plane.kubeconfig, [FakeNode(name="lost-0", labels={"test": namespace})]) as nodes:
        create(control_plane, pod("old", namespace, nodeSelector={"test": namespace}))
        nodes.wait(lambda agent: running(agent, namespace) == {"old"})
        nodes.do(lambda agent: agent.fail("lost-0"))
        assert control_plane.kubectl("get", "node", "lost-0", "--output", READY) == "Unknown"
        control_plane.kubectl("delete", "pod", "old", "--namespace", namespace, "--wait=false")
        create(control_plane, pod("new", namespace, nodeSelector={"test": namespace}))
        why = '.status.conditions[?(@.type=="PodScheduled")].reason'
        wait_until(lambda: show(control_plane, namespace, "new", why) == "Unschedulable", "a lost node is left alone")
        assert nodes.ask(lambda agent: running(agent, namespace)) == {"old"}

        nodes.do(lambda agent: agent.recover("lost-0"))
        nodes.wait(lambda agent: running(agent, namespace) == {"new"})
        assert control_plane.kubectl("get", "node", "lost-0", "--output", READY) == "True"

        nodes.do(lambda agent: agent.remove("lost-0"))
        assert control_plane.kubectl("get", "node", "lost-0", "--ignore-not-found") == ""


@cluster
def test_a_silent_node_is_noticed_by_the_controllers(tmp_path: Path) -> None:
    """Nobody says so: its heartbeats stop. Those of the other one go on, and it stays ready."""
    described = [FakeNode(name=name) for name in ("steady", "silent")]
    with (
        ControlPlane(tmp_path, scheduler=False, node_grace_s=4.0) as control_plane,
        BackgroundNodes(control_plane.kubeconfig, described, heartbeat_s=0.5) as nodes,
    ):
        nodes.ask(lambda agent: agent.failed.add("silent"))

        def ready(name: str) -> str:
            return control_plane.kubectl("get", "node", name, "--output", READY)

        wait_until(lambda: ready("silent") == "Unknown", "the silent node is lost")
        assert ready("steady") == "True"


@cluster
def test_played_nodes_as_a_program(control_plane: ControlPlane, namespace: str) -> None:
    command = [
        sys.executable, "-m", "stretto.testing.kubernetes.fake_nodes", "--kubeconfig", str(control_plane.kubeconfig),
        "--nodes", "3", "--prefix", "apart-", "--cpu", "2", "--gpus", "4",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            create(control_plane, pod("p", namespace, nodeName="apart-2", limits={GPU: "4"}))
            wait_phase(control_plane, namespace, "p", "Running")
        finally:
            program.terminate()
    assert program.returncode == 0
    assert "apart-" not in control_plane.kubectl("get", "nodes")


@cluster
def test_without_controllers_pods_still_run(tmp_path: Path) -> None:
    """What the scheduling tests need least: no controller manager, no scheduler, pods are bound by hand."""
    with (
        ControlPlane(tmp_path, controller_manager=False, scheduler=False) as control_plane,
        BackgroundNodes(control_plane.kubeconfig, [FakeNode(name="n")]) as nodes,
    ):
        assert set(control_plane.programs) == {"etcd", "kube-apiserver"}
        create(control_plane, pod("p", "default", nodeName="n"))
        nodes.wait(lambda agent: running(agent, "default") == {"p"})


@cluster
def test_a_wrong_flag_shows_the_log(tmp_path: Path) -> None:
    with (
        pytest.raises(Unavailable, match=r"(?s)kube-apiserver ended.*unknown flag: --no-such-flag"),
        ControlPlane(tmp_path, api_server_flags=["--no-such-flag"]),
    ):
        pytest.fail("it cannot have started")
    assert processes_with(str(tmp_path)) == []


# Real nodes.


@cluster
def test_a_worker_in_a_real_pod(real_node: RealNode, real_namespace: str) -> None:
    """As nobody, on a read-only file system: torch computes, the API server is where every pod looks for it."""
    script = """
        import os, ssl, urllib.request, torch, stretto.torch
        print("sum", int(torch.arange(5).sum()), "user", os.getuid())
        place = "/var/run/secrets/kubernetes.io/serviceaccount"
        url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}/readyz"
        request = urllib.request.Request(url, headers={"Authorization": "Bearer " + open(place + "/token").read()})
        context = ssl.create_default_context(cafile=place + "/ca.crt")
        print("api", urllib.request.urlopen(request, context=context).read().decode())
        try:
            open("/usr/local/written", "w")
        except OSError as error:
            print("refused", error.strerror)
    """
    control_plane = real_node.control_plane
    command = ("python", "-c", textwrap.dedent(script))
    create(control_plane, pod("worker", real_namespace, image=WORKER, command=command))
    wait_phase(control_plane, real_namespace, "worker", "Succeeded")
    said = control_plane.kubectl("logs", "worker", "--namespace", real_namespace)
    assert said.splitlines() == [f"sum 10 user {USER}", "api ok", "refused Read-only file system"]


@cluster
def test_pods_of_two_nodes_and_the_machine_reach_each_other(
    real_node: RealNode, second_node: RealNode, real_namespace: str
) -> None:
    control_plane = real_node.control_plane
    serve = ("sh", "-c", "exec httpd -f -p 8080 -h /etc")
    for name, node in (("one", real_node), ("two", second_node)):
        create(control_plane, pod(name, real_namespace, image=BUSYBOX, command=serve, nodeName=node.name))
    for name in ("one", "two"):
        wait_phase(control_plane, real_namespace, name, "Running")
    addresses = {name: show(control_plane, real_namespace, name, ".status.podIP") for name in ("one", "two")}

    def fetch(pod: str, address: str, port: int = 8080) -> str:
        words = ("exec", pod, "--namespace", real_namespace, "--")
        return control_plane.kubectl(*words, "wget", "-qO-", f"http://{address}:{port}/passwd")

    assert "worker" in fetch("one", addresses["two"])
    assert "worker" in fetch("two", addresses["one"])
    assert "worker" in run("curl", "-sf", "--max-time", "5", f"http://{addresses['two']}:8080/passwd")
    with served(real_node.address) as port:
        for name in ("one", "two"):
            assert fetch(name, real_node.address, port) == "the machine"


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the machine")

    def log_message(self, format: str, *arguments: object) -> None:
        """Not among the tests' output."""


@contextlib.contextmanager
def served(address: str) -> Iterator[int]:
    """The port of a page at that address of the machine."""
    with http.server.HTTPServer((address, 0), _Page) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_port
        server.shutdown()


@cluster
def test_a_real_node_loses_power(second_node: RealNode, real_namespace: str) -> None:
    """Every process on it is gone at once; started again, it runs pods as before."""
    control_plane = second_node.control_plane
    sleep = ("sleep", "1000")
    create(control_plane, pod("a", real_namespace, image=BUSYBOX, command=sleep, nodeName=second_node.name))
    wait_phase(control_plane, real_namespace, "a", "Running")
    assert cgroup_processes(second_node.cgroup)
    second_node.lose()
    wait_until(lambda: not cgroup_processes(second_node.cgroup), "no process of the node is left")
    second_node.start()
    create(control_plane, pod("b", real_namespace, image=BUSYBOX, command=sleep, nodeName=second_node.name))
    wait_phase(control_plane, real_namespace, "b", "Running")


@cluster
def test_pods_outlive_their_kubelet(second_node: RealNode, real_namespace: str) -> None:
    control_plane = second_node.control_plane

    def start(name: str) -> None:
        command = ("sleep", "1000")
        create(control_plane, pod(name, real_namespace, image=BUSYBOX, command=command, nodeName=second_node.name))

    start("a")
    wait_phase(control_plane, real_namespace, "a", "Running")
    container = show(control_plane, real_namespace, "a", ".status.containerStatuses[0].containerID")
    second_node.stop_kubelet()
    start("b")
    second_node.start_kubelet()
    wait_phase(control_plane, real_namespace, "b", "Running")
    assert control_plane.kubectl("exec", "a", "--namespace", real_namespace, "--", "cat", "/proc/1/comm") == "sleep\n"
    assert show(control_plane, real_namespace, "a", ".status.containerStatuses[0].containerID") == container


def cgroup_processes(name: str) -> list[str]:
    return [
        pid for root in cgroup_folders(name) for file in root.rglob("cgroup.procs") for pid in file.read_text().split()
    ]


@cluster
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["closed", "killed"])
def test_nothing_is_left(tmp_path: Path, number: signal.Signals, can_run_kubernetes: None) -> None:
    """Whether a test bed is closed or its process is killed: processes, links, mounts, cgroups, folders, settings."""
    script = """
        import json, pathlib, signal, sys
        from stretto.testing.kubernetes.control_plane import ControlPlane
        from stretto.testing.kubernetes.node import RealNode
        from stretto.testing.kubernetes.pod_network import PodNetwork
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        with PodNetwork() as network, ControlPlane(pathlib.Path(sys.argv[1])) as control_plane:
            with RealNode(control_plane, "n", network) as node:
                folders = {"folder": str(node.folder), "data": str(control_plane.data)}
                print(json.dumps({"bridge": network.bridge, "cgroup": node.cgroup, **folders}), flush=True)
                signal.pause()
    """
    before, kernel = entries(), settings()
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            made = json.loads(owner.stdout.readline())
            kubectl = (str(binaries() / "kubectl"), f"--kubeconfig={tmp_path / 'admin.kubeconfig'}")
            run(*kubectl, "create", "-f", "-", text=pod("p", "default", image=BUSYBOX, command=("sleep", "1000")))
            wait_until(lambda: len(cgroup_processes(made["cgroup"])) >= 2, "the pod runs")
            assert processes_with(made["folder"])
        finally:
            owner.send_signal(number)
    gone: dict[str, Callable[[], bool]] = {
        "processes": lambda: not processes_with(made["folder"]) and not processes_with(str(tmp_path)),
        "cgroups": lambda: cgroup_folders(made["cgroup"]) == [],
        "link": lambda: not Path("/sys/class/net", made["bridge"]).exists(),
        "folders": lambda: not Path(made["folder"]).exists() and not Path(made["data"]).exists(),
        "entries": lambda: entries() <= before,
    }
    for what, condition in gone.items():
        wait_until(condition, f"nothing is left: {what}")
    assert settings() == kernel


def processes_with(text: str) -> list[int]:
    """Whose command line names it; not this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid() and alive(int(folder.name)):
            try:
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


SETTINGS = (
    "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward",
)  # fmt: skip
FOLDERS = ("/var/lib", "/var/log", "/run", "/run/netns", "/etc", "/opt")


def settings() -> dict[str, str]:
    """Those that kubelets and network plugins are known to change."""
    return {name: Path("/proc/sys", name).read_text() for name in SETTINGS}


def entries() -> set[str]:
    """What they are known to leave in the machine's folders, and mounts."""
    known = re.compile("kubelet|containerd|cni|pods|containers|stretto-node-")
    files = {str(file) for folder in FOLDERS if Path(folder).exists() for file in Path(folder).iterdir()}
    mounts = {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return {path for path in files | mounts if known.search(path)}
