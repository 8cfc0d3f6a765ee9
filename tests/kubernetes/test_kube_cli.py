"""`stretto … --on kubernetes` and its client against a real API server, with the real controller."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from controllers import install, until
from played import Played, played

from stretto.cli import main
from stretto.errors import Conflict, NotFound, SpecError, Unavailable, UsageError
from stretto.kubernetes import access
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import Kind
from stretto.kubernetes.sdk import AsyncKubernetesClient, KubernetesClient
from stretto.kubernetes.sdk.calls import told_of
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import PRETENDING, ControllerProcess, controlled, forget
from stretto.testing.kubernetes.fake_objects import FakeNode
from stretto.testing.kubernetes.images import USER, WORKER
from stretto.testing.kubernetes.node import RealNode
from stretto.testing.kubernetes.processes import free_port

pytestmark = pytest.mark.cluster

RESOURCES = {"gpu": 1, "cpu": 1, "memory": "1Gi"}
FILE = {
    "name": "train",
    "run": "train",
    "image": "none",
    "elastic": {"min": 1, "max": 3, "explore": False},
    "resources": RESOURCES,
}


class Line:
    """The command line, on one cluster, in one namespace."""

    def __init__(self, capsys: pytest.CaptureFixture[str], namespace: str) -> None:
        self._capsys, self.namespace = capsys, namespace

    def __call__(self, verb: str, *words: str, code: int = 0) -> str:
        found = main([verb, "--on", "kubernetes", "--namespace", self.namespace, *words])
        out, err = self._capsys.readouterr()
        assert found == code, err
        if code:
            assert err.count("error: ") == 1
            return err
        return out

    def json(self, verb: str, *words: str) -> Any:
        return json.loads(self(verb, *words, "--json"), parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def account(control_plane: ControlPlane) -> Path:
    return install(control_plane)


@pytest.fixture
def stretto(
    account: Path, control_plane: ControlPlane, namespace: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Line:  # fmt: skip
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    monkeypatch.delenv("STRETTO_ON", raising=False)
    return Line(capsys, namespace)


@pytest.fixture
def sdk(account: Path, control_plane: ControlPlane, namespace: str) -> Iterator[KubernetesClient]:
    with KubernetesClient(kubeconfig=control_plane.kubeconfig, namespace=namespace) as made:
        yield made


@pytest.fixture
def nodes(control_plane: ControlPlane) -> Iterator[Played]:
    with played(control_plane.kubeconfig, [FakeNode(name="n0", cpu="8", memory="32Gi", gpus=2)]) as running:
        yield running


@pytest.fixture
def controller(
    control_plane: ControlPlane, account: Path, nodes: Played, tmp_path: Path
) -> Iterator[ControllerProcess]:
    forget(control_plane)
    with controlled(account, tmp_path, options=PRETENDING) as running:
        yield running


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(FILE))
    return str(path)


def test_a_job_from_submission_to_end(
    stretto: Line, file: str, controller: ControllerProcess, nodes: Played, sdk: KubernetesClient
) -> None:
    where = stretto.namespace
    assert stretto("submit", file) == f"job {where}/train submitted\n"
    nodes.has(where, "train", 2)
    until(lambda: sdk.job("train").phase == "running")
    assert [worker["node"] for worker in sdk.job("train").workers] == ["n0", "n0"]
    table = stretto("ps").splitlines()
    assert table[0].split() == ["NAMESPACE", "NAME", "PHASE", "WORKERS", "STEPS", "AGE", "NOTE"]
    assert table[1].split()[:4] == [where, "train", "running", "2/1..3"]
    assert f"{where}/train" in stretto("show", "train")
    assert stretto.json("why", "train")["facts"]["max_workers"] == 3
    assert stretto("why", f"{where}/train").startswith(f"job {where}/train ")
    assert stretto("scale", "train", "1") == f"job {where}/train may have 1 workers now\n"
    nodes.has(where, "train", 1)
    assert stretto("scale", "train", "1..2") == f"job {where}/train may have 1..2 workers now\n"
    nodes.has(where, "train", 2)
    assert stretto.json("suspend", "train")["wish"] == "suspend"
    until(lambda: sdk.job("train").phase == "suspended")
    assert stretto.json("resume", "train")["wish"] == "run"
    nodes.has(where, "train", 2)
    nodes.finish(where, "train")
    done = sdk.wait("train", timeout_s=60)
    assert (done.phase, done.succeeded) == ("succeeded", True)
    assert stretto.json("ps") == []
    assert [job["id"] for job in stretto.json("ps", "--all", "--name", "tr*")] == [f"{where}/train"]
    assert "has succeeded" in stretto("cancel", "train", code=6)
    told = until(lambda: [event for event in sdk.events("train") if event.kind == "ended"])
    assert told[0]["event"]["reason"] == "Succeeded"
    assert stretto("events", "train").splitlines()[-1].endswith(told[0]["text"])
    followed = [json.loads(line) for line in stretto("events", "train", "-f", "--json").splitlines()]
    assert followed[-1]["event"]["kind"] == "ended"


def test_cancelling_deletes_the_object(
    stretto: Line, file: str, controller: ControllerProcess, nodes: Played, sdk: KubernetesClient
) -> None:
    where = stretto.namespace
    number = stretto("submit", "-q", file).strip()
    assert number == f"{where}/train"
    nodes.has(where, "train", 2)
    assert stretto("cancel", number) == f"job {where}/train is being cancelled: its object is deleted\n"
    until(lambda: not list(sdk.jobs()))
    until(lambda: not nodes.running(where, "train"))
    assert "did you mean" not in stretto("show", "train", code=5)


def test_waiting_ends_with_the_object(account: Path, control_plane: ControlPlane, namespace: str) -> None:
    async def both() -> str:
        async with AsyncKubernetesClient(kubeconfig=control_plane.kubeconfig, namespace=namespace) as made:
            job = await made.submit(FILE)
            waiting = asyncio.create_task(made.wait("train", timeout_s=60))
            await made.follow(job, tick_s=0.01).__anext__()
            assert (await made.cancel(job)).wish == "cancel"
            assert [piece async for piece in made.follow(job)] == []
            assert (await made.wait(job)).phase == "cancelled", "it was there, and is gone"
            return (await waiting).phase

    assert asyncio.run(both()) == "cancelled"


def test_an_object_that_the_controller_refuses(
    stretto: Line, controller: ControllerProcess, sdk: KubernetesClient, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {nodeName: n0, containers: [{name: worker, image: none}]}\n")
    job = tmp_path / "job.yaml"
    job.write_text("name: placed\nrun: train\n")
    err = stretto("submit", str(job), "--template", str(template), "--wait", code=2)
    assert "spec.template.spec.nodeName" in err
    assert stretto("ps").splitlines()[1].split()[1:3] == ["placed", "invalid"]
    with pytest.raises(SpecError, match="was refused"):
        sdk.wait("placed", timeout_s=60)


def test_lists_know_names_labels_namespaces_and_order(stretto: Line, sdk: KubernetesClient) -> None:
    for i in range(3):
        sdk.submit({**FILE, "labels": {"team": "ab"[i % 2]}}, name=f"j{i}", suspend=i == 2)
    assert {job.name for job in sdk.jobs()} == {"j0", "j1", "j2"}
    assert {job.name for job in sdk.jobs(labels={"team": "a"})} == {"j0", "j2"}
    assert [job.name for job in sdk.jobs(phase="suspended")] == ["j2"]
    assert [job.name for job in sdk.jobs(name="*1", user=sdk.namespace)] == ["j1"]
    assert len(list(sdk.jobs(limit=2))) == 2
    times = [job.submitted_s for job in sdk.jobs(order="oldest")]
    assert times == sorted(times)
    assert {job.name for job in sdk.jobs(namespace="*") if job.user == sdk.namespace} == {"j0", "j1", "j2"}
    assert {"j0", "j1"} <= {job["name"] for job in stretto.json("ps", "-A")}
    assert "did you mean 'j1'?" in stretto("show", "j11", code=5)
    assert "no controller has looked at it yet" in stretto("why", "j0")
    assert [event for event in sdk.events() if event["job"].startswith(sdk.namespace)] == []


def test_the_same_name_twice(stretto: Line, file: str, sdk: KubernetesClient) -> None:
    stretto("submit", file)
    err = stretto("submit", file, code=6)
    assert f"there is a job {stretto.namespace}/train already" in err
    assert "kubectl delete elasticjob train" in err
    assert sdk.submit(FILE, name="again").labels == {"stretto.dev/class": "train"}
    same = sdk.submit(FILE, name="once", key="k")
    assert sdk.submit(FILE, name="once", key="k").uid == same.uid
    with pytest.raises(Conflict):
        sdk.submit(FILE, name="once")


def test_what_the_api_server_refuses(
    stretto: Line, file: str, sdk: KubernetesClient, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    stretto("submit", file)
    with pytest.raises(UsageError, match=r"spec\.workers\.max") as caught:
        sdk.scale("train", max=10**6)
    assert "kubectl explain" in caught.value.hint
    assert "spec.workers.max" in stretto("scale", "train", "1..1000000", code=2)
    with pytest.raises(NotFound, match="nowhere"):
        sdk.submit(FILE, namespace="nowhere")
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig_as("stranger")))
    for words in (["submit", file], ["ps"], ["show", "train"], ["cancel", "train"], ["events"]):
        err = stretto(*words, code=7)
        assert "forbidden" in err
        assert "can-i" in err


def test_a_cluster_without_stretto(control_plane: ControlPlane) -> None:
    """Nobody's objects: the real server's answer for an address that it does not know."""
    nobodys = Kind("nobody.stretto.dev", "v1", "elasticjobs", dict)

    async def ask() -> None:
        async with Api(access.find("", control_plane.kubeconfig)) as api:
            with told_of("x"):
                await api.list(nobodys, "default")

    with pytest.raises(Unavailable, match="not installed") as caught:
        asyncio.run(ask())
    assert caught.value.hint == "kubectl apply -k deploy/kubernetes/base"


def test_no_such_context_and_nobody_there(
    stretto: Line, control_plane: ControlPlane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    known = json.loads(control_plane.kubeconfig.read_text())
    assert main(["ps", "--on", "kubernetes:nowhere"]) == 2
    err = capsys.readouterr().err
    assert "no context 'nowhere'" in err
    assert known["contexts"][0]["name"] in err
    known["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{free_port()}"
    (tmp_path / "away").write_text(json.dumps(known))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "away"))
    err = stretto("ps", code=8)
    assert "cannot reach https://127.0.0.1" in err
    assert "hint: is the cluster up?" in err


def test_interrupting_a_run_deletes_its_object(
    controller: ControllerProcess, control_plane: ControlPlane, nodes: Played, sdk: KubernetesClient
) -> None:
    """Its pods have no logs to read, which keeps nobody from leaving."""
    command = [sys.executable, "-m", "stretto.cli", "run", "--on", "kubernetes", "--namespace", sdk.namespace]
    command += ["--name", "ran", "--image", "none", "--cpu", "1", "--", "train"]
    environment = {**os.environ, "KUBECONFIG": str(control_plane.kubeconfig)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        nodes.has(sdk.namespace, "ran", 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (130, ""), err
    assert f"job {sdk.namespace}/ran submitted" in err
    assert "was cancelled: its object was deleted" in err
    until(lambda: not list(sdk.jobs()))


SCRIPT = """
import os, sys, time
print("begins", flush=True)
while not os.path.exists("/shelf/go"):
    time.sleep(0.1)
print("ends", flush=True)
sys.exit(int(os.environ["CODE"]))
"""


ECHO = "import os; print(os.environ['A'])"


def test_logs_of_real_pods(
    real_control_plane: ControlPlane, real_node: RealNode, real_namespace: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    account = install(real_control_plane)
    folder = tmp_path / "work"
    folder.mkdir()
    container = {
        "name": "worker", "imagePullPolicy": "Never", "volumeMounts": [{"name": "shelf", "mountPath": "/shelf"}],
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER},
    }  # fmt: skip
    template = {"spec": {"containers": [container], "volumes": [{"name": "shelf", "hostPath": {"path": str(folder)}}]}}
    file = {
        "name": "says", "run": ["python3", "-c", SCRIPT], "image": WORKER, "workers": 2, "retries": 0,
        "resources": {"gpu": 0, "cpu": "100m", "memory": "100Mi"},
    }  # fmt: skip
    config = real_control_plane.kubeconfig
    with controlled(account, tmp_path), KubernetesClient(kubeconfig=config, namespace=real_namespace) as sdk:
        job = sdk.submit(file, template=template, env={"CODE": "0"})
        following = sdk.follow(job, tick_s=0.1)
        texts: dict[str, str] = {}
        for worker, text in following:
            texts[worker] = texts.get(worker, "") + text
            if [one for one in texts.values() if one == "begins\n"] == ["begins\n"] * 2:
                (folder / "go").touch()
        texts.pop("", None)
        assert texts == {"w0": "begins\nends\n", "w1": "begins\nends\n"}
        assert sdk.wait(job, timeout_s=60).succeeded
        failed = sdk.run({**file, "workers": 1}, name="fails", template=template, env={"CODE": "7"}, timeout_s=60)
        assert (failed.phase, failed.exit_code) == ("failed", 7)
        assert sdk.logs(job) == "==> w0 <==\nbegins\nends\n==> w1 <==\nbegins\nends\n"
        monkeypatch.setenv("KUBECONFIG", str(config))
        stretto = Line(capsys, real_namespace)
        assert stretto("logs", "says", "--worker", "w1", "--tail", "1") == "ends\n"
        lines = stretto("logs", "says", "-f").splitlines()
        assert sorted(lines) == ["w0 | begins", "w0 | ends", "w1 | begins", "w1 | ends"]
        resources = ("--gpu", "0", "--cpu", "0.1", "--memory", "100Mi")
        assert stretto("run", "--image", WORKER, *resources, "--env", "A=b", "--", "python3", "-c", ECHO) == "b\n"
