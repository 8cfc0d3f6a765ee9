"""1,000 nodes with 8 GPUs each and 500 elastic jobs that want all of them: how fast the controller creates and binds.

The control plane is a real one (etcd, API server, controller manager, kube-scheduler of Kubernetes 1.20.2); the nodes
are played by an agent that watches, admits pods and reports them Running. Everything shares the cores of one machine,
and the API server takes most of them: what is compared is what schedulers leave of it. Only one of the two schedulers
runs at a time. The agent plays in all phases, so that both pay for the reports of kubelets.

1. *Single submissions*: from sending the ElasticJob to the binding of its pods, as a watch shows it; on the cluster
   without jobs (all 16 pods), and on the full one (the first pod: another job has to give up a GPU before).
2. *All at once*: 500 jobs of 1..16 workers; the controller decides, creates 8,000 pods and binds them.
3. *Binding alone*: the same 8,000 pods, made anew without a node while no controller runs, are adopted by a controller
   that starts, as after a crash in between, and bound to the nodes that were decided on.
4. *kube-scheduler*: pods of the same specification, made in advance while it is stopped; it decides and binds, its
   `--kube-api-qps` raised. It also writes an event per pod, which cannot be turned off.

Rates are pods divided by the time from the first binding to the last one (in 2 also from the first submission).

    python benchmarks/kubernetes_scale.py [--nodes 1000] [--jobs 500] [--singles 60] [--rounds 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from _measure import cpu_s, machine
from _verdict import report
from stretto.kubernetes.access import from_kubeconfig
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import ELASTIC_JOBS, PODS, Kind
from stretto.kubernetes.model import Meta
from stretto.kubernetes.problems import ObjectNotFound
from stretto.kubernetes.watching import Watched
from stretto.testing.kubernetes.building import VERSION
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import PRETENDING, ControllerProcess, controlled, install
from stretto.testing.kubernetes.guard import Guard

T = TypeVar("T")
BASE = Path(__file__).parents[1] / "deploy" / "kubernetes" / "base"
NAMESPACE = "scale"
GPUS_PER_NODE, WORKERS = 8, 16
MOST_MB, MOST_PASS_S = 500.0, 0.25
SAMPLE_S = 0.1
ALONE = "no other jobs"
DEADLINE_S = 240.0
LEASE_S = 15.0
CLIENT_FLAGS = ("--kube-api-qps=5000", "--kube-api-burst=5000")


# The programs.


def memory_mb(pid: int, field: str = "VmRSS") -> float:
    """In MB (10^6 bytes); `VmHWM` is the most it ever was."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise KeyError(field)


def metrics(controller: ControllerProcess) -> dict[str, float]:
    """Those without labels."""
    with urllib.request.urlopen(f"http://{controller.address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.split() for line in lines if line and line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in pairs}


@contextmanager
def playing(control_plane: ControlPlane, nodes: int) -> Iterator[int]:
    """The nodes, in a process of their own; its id."""
    command = [sys.executable, "-m", "stretto.testing.kubernetes.fake_nodes"]
    command += ["--kubeconfig", str(control_plane.kubeconfig), "--nodes", str(nodes), "--gpus", str(GPUS_PER_NODE)]
    command += ["--cpu", "64", "--memory", "256Gi", "--heartbeat-s", "60"]
    with (control_plane.folder / "nodes.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    guard = Guard()
    # The control plane goes as well: nobody needs them to be removed one by one.
    guard.process(process.pid, 0.0)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            sys.exit(f"the nodes did not come up:\n{(control_plane.folder / 'nodes.log').read_text()[-3000:]}")
        yield process.pid
    finally:
        guard.close()
        process.wait()
        process.stdout.close()


# What is seen.


class _Spec(msgspec.Struct, rename="camel", frozen=True):
    node_name: str = ""


class _Status(msgspec.Struct, frozen=True):
    phase: str = ""


class SeenPod(msgspec.Struct, frozen=True):
    """As little of a pod as must be known: the observer needs a core, too."""

    metadata: Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()


SEEN_PODS = Kind("", "v1", "pods", SeenPod)


class Bindings:
    """When pods were first seen, and when they were first seen to have a node."""

    def __init__(self, api: Api) -> None:
        self._watched = Watched(api, SEEN_PODS, NAMESPACE)
        self._watched.on_change(self._see)
        self.created_s: dict[str, float] = {}
        self.bound_s: dict[str, float] = {}
        self.of_job: dict[str, list[float]] = {}
        """The bindings of its pods, by the label of the job."""
        self.goes_on: Callable[[], bool] = lambda: True
        """Whether what is waited for can still come about."""
        self._changed = asyncio.Event()

    async def run(self) -> None:
        await self._watched.run()

    async def synced(self) -> None:
        await self._watched.synced.wait()

    def clear(self) -> None:
        self.created_s.clear()
        self.bound_s.clear()
        self.of_job.clear()

    @property
    def present(self) -> list[SeenPod]:
        return list(self._watched.items.values())

    async def until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            if not self.goes_on():
                sys.exit(f"{what} did not come about: the controller has ended")
            if time.monotonic() > end_s:
                sys.exit(f"{what} did not come about within {DEADLINE_S:g} s")

    def _see(self, old: SeenPod | None, new: SeenPod | None) -> None:
        self._changed.set()
        if new is None:
            return
        now_s, name = time.monotonic(), new.metadata.name
        self.created_s.setdefault(name, now_s)
        if new.spec.node_name and name not in self.bound_s:
            self.bound_s[name] = now_s
            self.of_job.setdefault(new.metadata.labels.get("stretto.dev/job", ""), []).append(now_s)


class Decisions:
    """How long the controller's decisions took, by phase, one value each as far as they were seen."""

    def __init__(self) -> None:
        self.phase = ""
        self.times_s: dict[str, list[float]] = {}
        self.made = 0.0

    async def follow(self, controller: ControllerProcess) -> None:
        last: float | None = None
        while True:
            seen = await asyncio.to_thread(metrics, controller)
            now = seen.get("stretto_decisions_total")
            if now is not None and last is not None and now != last:
                self.times_s.setdefault(self.phase, []).append(seen["stretto_decision_seconds"])
                self.made += now - last
            last = now
            await asyncio.sleep(SAMPLE_S)


class Usage:
    """CPU seconds of every program over a phase."""

    def __init__(self, **pids: int) -> None:
        self._pids = pids
        self._before = {name: cpu_s(pid) for name, pid in pids.items()}
        self._began_s = time.monotonic()

    def told(self) -> float:
        """Say it; the sum."""
        took_s = time.monotonic() - self._began_s
        used = {name: cpu_s(pid) - self._before[name] for name, pid in self._pids.items()}
        each = ", ".join(f"{name} {value:.1f} s" for name, value in used.items())
        print(f"   CPU over {took_s:.1f} s: {each}", flush=True)
        return sum(used.values())


# What is done.


def elastic_job(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "stretto.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "image": "none",
            "run": "train",
            "level": "elastic",
            "workers": {"min": 1, "max": WORKERS, "explore": False},
            "resources": {"gpu": 1, "cpu": 1, "memory": "1Gi"},
        },
    }


async def together(work: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*work)


async def single(api: Api, seen: Bindings, name: str, pods: int) -> tuple[float, float]:
    """From the submission of a job to the binding of its first pod, and of so many."""
    began_s = time.monotonic()
    await api.create(ELASTIC_JOBS, elastic_job(name), NAMESPACE)
    await seen.until(lambda: len(seen.of_job.get(name, ())) >= pods, f"{pods} pods of {name}")
    times = seen.of_job[name]
    return times[0] - began_s, times[pods - 1] - began_s


async def singles(api: Api, seen: Bindings, prefix: str, count: int, pods: int) -> list[tuple[float, float]]:
    """One after the other; each is deleted, and its pods are gone, before the next."""
    times = []
    for number in range(count):
        name = f"{prefix}-{number}"
        times.append(await single(api, seen, name, pods))
        await api.delete(ELASTIC_JOBS, name, NAMESPACE)
        await seen.until(
            lambda name=name: all(pod.metadata.labels.get("stretto.dev/job") != name for pod in seen.present),  # type: ignore[misc]
            f"the end of {name}",
        )
    return times


async def remove_pods(api: Api, seen: Bindings) -> None:
    async def remove(name: str) -> None:
        with contextlib.suppress(ObjectNotFound):
            await api.delete(PODS, name, NAMESPACE, grace_s=0)

    # The watch may be behind: the last ones were made a moment ago.
    while there := (await api.list(SEEN_PODS, NAMESPACE)).items:
        await together(remove(pod.metadata.name) for pod in there)
    await seen.until(lambda: not seen.present, "the end of all pods")
    seen.clear()


async def make_pods(api: Api, seen: Bindings, bodies: Sequence[Mapping[str, Any]]) -> float:
    """How long that took."""
    began_s = time.monotonic()
    await together(api.create(PODS, body, NAMESPACE) for body in bodies)
    await seen.until(lambda: len(seen.created_s) >= len(bodies), "all pods")
    took_s = time.monotonic() - began_s
    print(f"{len(bodies)} pods made in advance in {took_s:.1f} s", flush=True)
    return took_s


class Span(msgspec.Struct, frozen=True):
    """Bindings of one phase."""

    pods: int
    began_s: float
    first_s: float
    last_s: float
    cpu_s: float = 0.0
    """Of all programs together."""
    made_s: float = 0.0
    """What it took to make the pods before."""

    @property
    def rate(self) -> float:
        return self.pods / (self.last_s - self.first_s)

    @property
    def rate_with_start(self) -> float:
        return self.pods / (self.last_s - self.began_s)

    @property
    def rate_with_making(self) -> float:
        return self.pods / (self.last_s - self.first_s + self.made_s)

    def told(self, name: str) -> None:
        print(
            f"{name:44} {self.rate:7.1f} pods/s from the first binding to the last ({self.last_s - self.first_s:.1f} s)"
            f"; {self.rate_with_start:.1f} from the start ({self.last_s - self.began_s:.1f} s)",
            flush=True,
        )


async def span(seen: Bindings, pods: int, began_s: float) -> Span:
    await seen.until(lambda: len(seen.bound_s) >= pods, f"{pods} bindings")
    times = sorted(seen.bound_s.values())
    return Span(pods, began_s, times[0], times[pods - 1])


def without_node(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod as it was before it was bound, to be made again."""
    meta = {key: pod["metadata"][key] for key in ("name", "namespace", "labels", "annotations", "ownerReferences")}
    spec = {key: value for key, value in pod["spec"].items() if key != "nodeName"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def for_kube_scheduler(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The same pod for the other scheduler; nobody owns it, as its job is gone."""
    meta = {key: value for key, value in pod["metadata"].items() if key != "ownerReferences"}
    return {**pod, "metadata": meta, "spec": {**pod["spec"], "schedulerName": "default-scheduler"}}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--nodes", type=int, default=1000)
    options.add_argument("--jobs", type=int, default=500)
    options.add_argument("--singles", type=int, default=60)
    options.add_argument("--rounds", type=int, default=2, help="of binding alone, one after kube-scheduler")
    given = options.parse_args()
    print(
        f"{machine()}\n"
        f"peer: kube-scheduler {VERSION} ({', '.join(CLIENT_FLAGS)}) on the same control plane\n"
        f"{given.nodes} played nodes with {GPUS_PER_NODE} GPUs, 64 cores, 256 Gi; {given.jobs} jobs of 1..{WORKERS} "
        f"workers with 1 GPU; everything on this one machine",
        flush=True,
    )
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(
            Path(folder), node_grace_s=300.0, scheduler_flags=CLIENT_FLAGS, controller_manager_flags=CLIENT_FLAGS
        )
        with plane, playing(plane, given.nodes) as nodes_pid:
            account = install(plane, BASE)
            plane.create_namespace(NAMESPACE)
            plane.stop("kube-scheduler")
            print(f"control plane and nodes are there after {time.monotonic() - began_s:.1f} s", flush=True)
            asyncio.run(measure(plane, account, nodes_pid, given))
    print(f"the whole benchmark took {time.monotonic() - began_s:.0f} s")


@asynccontextmanager
async def observing(plane: ControlPlane) -> AsyncIterator[tuple[Api, Bindings]]:
    async with Api(from_kubeconfig([plane.kubeconfig])) as api:
        seen = Bindings(api)
        watching = asyncio.create_task(seen.run())
        await seen.synced()
        try:
            yield api, seen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def measure(plane: ControlPlane, account: Path, nodes_pid: int, given: argparse.Namespace) -> None:
    pods = min(given.jobs * WORKERS, given.nodes * GPUS_PER_NODE)
    decisions = Decisions()
    async with observing(plane) as (api, seen):
        with controlled(account, plane.folder, lease_s=LEASE_S, options=PRETENDING) as controller:
            seen.goes_on = lambda: not controller.has_failed
            following = asyncio.create_task(decisions.follow(controller))
            usage = _usage(plane, nodes_pid, controller=controller.pid)
            decisions.phase = ALONE
            idle = await singles(api, seen, "idle", given.singles, WORKERS)
            submission("idle", "without other jobs, all 16 pods", [last for _, last in idle])
            told("   of these the first pod", [first for first, _ in idle])
            usage.told()
            decisions.phase = "while all jobs come and pods are made"
            whole, bodies = await burst(plane, api, seen, controller, nodes_pid, given.jobs, pods)
            decisions.phase = "on the full cluster"
            full = await singles(api, seen, "late", given.singles, 1)
            submission("full", "on the full cluster, the first pod", [first for first, _ in full])
            following.cancel()
            passes(decisions)
            memory(controller)
        alone, peer = [], []
        for number in range(given.rounds):
            alone.append(await binding_alone(plane, api, seen, account, nodes_pid, bodies))
            if number == given.rounds - 1:
                await together(
                    api.delete(ELASTIC_JOBS, job.metadata.name, NAMESPACE)
                    for job in (await api.list(ELASTIC_JOBS, NAMESPACE)).items
                )
            peer.append(await kube_scheduler(plane, api, seen, nodes_pid, bodies))
    rates(whole, alone, peer)
    complain(plane.folder / "controller.log")


def _usage(plane: ControlPlane, nodes_pid: int, **more: int) -> Usage:
    names = {"kube-apiserver": "API server", "etcd": "etcd", "kube-scheduler": "kube-scheduler"}
    there = {names[name]: program.pid for name, program in plane.programs.items() if name in names}
    return Usage(**there, **more, nodes=nodes_pid)


async def burst(
    plane: ControlPlane, api: Api, seen: Bindings, controller: ControllerProcess, nodes_pid: int, jobs: int, pods: int
) -> tuple[Span, list[dict[str, Any]]]:
    """All jobs at once; and their pods, as they were made."""
    seen.clear()
    usage = _usage(plane, nodes_pid, controller=controller.pid)
    began_s = time.monotonic()
    await together(api.create(ELASTIC_JOBS, elastic_job(f"job-{number}"), NAMESPACE) for number in range(jobs))
    print(f"{jobs} jobs submitted in {time.monotonic() - began_s:.1f} s", flush=True)
    whole = await span(seen, pods, began_s)
    whole.told("controller: decide, create, bind")
    whole = msgspec.structs.replace(whole, cpu_s=usage.told())
    await seen.until(lambda: sum(pod.status.phase == "Running" for pod in seen.present) >= pods, "all pods are running")
    print(f"all are Running {time.monotonic() - began_s:.1f} s after the first submission", flush=True)
    raw: Kind[dict[str, Any]] = Kind("", "v1", "pods", dict)
    listed = await api.list(raw, NAMESPACE)
    return whole, [without_node(pod) for pod in listed.items]


async def binding_alone(
    plane: ControlPlane, api: Api, seen: Bindings, account: Path, nodes_pid: int, bodies: Sequence[Any]
) -> Span:
    await remove_pods(api, seen)
    made_s = await make_pods(api, seen, bodies)
    with controlled(account, plane.folder, lease_s=LEASE_S, options=PRETENDING) as controller:
        usage = _usage(plane, nodes_pid, controller=controller.pid)
        done = await span(seen, len(bodies), time.monotonic())
        done.told("controller: bind alone")
        return msgspec.structs.replace(done, cpu_s=usage.told(), made_s=made_s)


async def kube_scheduler(
    plane: ControlPlane, api: Api, seen: Bindings, nodes_pid: int, bodies: Sequence[Mapping[str, Any]]
) -> Span:
    await remove_pods(api, seen)
    made_s = await make_pods(api, seen, [for_kube_scheduler(body) for body in bodies])
    began_s = time.monotonic()
    plane.start("kube-scheduler")
    usage = _usage(plane, nodes_pid)
    done = await span(seen, len(bodies), began_s)
    done.told("kube-scheduler: decide, bind")
    done = msgspec.structs.replace(done, cpu_s=usage.told(), made_s=made_s)
    plane.stop("kube-scheduler")
    return done


# What is said.


def submission(name: str, what: str, times: Sequence[float]) -> None:
    told(f"submission to binding, {what}", times)
    report(
        f"kubernetes_scale_submit_{name}",
        ours=round(statistics.median(times) * 1e3, 1),
        peer=None,
        ratio=None,
        unit=f"ms, median from submission to binding, {what}",
        goal="none: shown",
        ok=None,
        p99=round(p99(times) * 1e3, 1),
        most=round(max(times) * 1e3, 1),
        count=len(times),
    )


def passes(decisions: Decisions) -> None:
    for phase, some in decisions.times_s.items():
        told(f"a full pass, {phase}", some)
    # Those without other jobs are easy: they would only flatter the rest.
    times = [time_s for phase, some in decisions.times_s.items() for time_s in some if phase != ALONE]
    report(
        "kubernetes_scale_pass",
        ours=round(p99(times) * 1e3, 1),
        peer=None,
        ratio=None,
        unit="ms, p99 of a scheduling pass, wall clock, while all jobs come and pods are made and on the full cluster",
        goal=f"below {MOST_PASS_S * 1e3:g}",
        ok=p99(times) < MOST_PASS_S,
        median=round(statistics.median(times) * 1e3, 1),
        most=round(max(times) * 1e3, 1),
        seen=len(times),
        made=int(decisions.made),
    )


def memory(controller: ControllerProcess) -> None:
    now_mb, most_mb = memory_mb(controller.pid), memory_mb(controller.pid, "VmHWM")
    print(f"memory of the controller: {now_mb:.0f} MB now, {most_mb:.0f} MB at most")
    report(
        "kubernetes_scale_memory",
        ours=round(most_mb, 1),
        peer=None,
        ratio=None,
        unit="MB resident in the controller at most",
        goal=f"below {MOST_MB:g}",
        ok=most_mb < MOST_MB,
    )


def rates(whole: Span, alone: Sequence[Span], peer: Sequence[Span]) -> None:
    """Of several rounds the medians."""
    theirs = statistics.median(span.rate for span in peer)
    bound = statistics.median(span.rate for span in alone)
    report(
        "kubernetes_scale_bind",
        ours=round(bound, 1),
        peer=round(theirs, 1),
        ratio=round(bound / theirs, 2),
        unit=f"bindings per second of the same {whole.pods} pods, made in advance",
        goal="ratio >= 1.0",
        ok=bound >= theirs,
        rounds=[[round(a.rate, 1), round(b.rate, 1)] for a, b in zip(alone, peer, strict=True)],
        cpu_ms_per_pod=[_cpu_ms(alone), _cpu_ms(peer)],
    )
    made = statistics.median(span.rate_with_making for span in peer)
    report(
        "kubernetes_scale_create_and_bind",
        ours=round(whole.rate_with_start, 1),
        peer=round(made, 1),
        ratio=round(whole.rate_with_start / made, 2),
        unit=f"pods per second from nothing to bound, {whole.pods} pods: ours from the submission of the jobs, the "
        "peer's made by a client without delay (that time counts) and then bound by kube-scheduler",
        goal="none: shown beside each other",
        ok=None,
        first_to_last_binding=[round(whole.rate, 1), round(theirs, 1)],
        ratio_to_binding_only=round(whole.rate / theirs, 2),
        cpu_ms_per_pod_with_and_without_creation=[_cpu_ms([whole]), _cpu_ms(peer)],
        machine=machine(),
    )


def _cpu_ms(spans: Sequence[Span]) -> float:
    return round(statistics.median(span.cpu_s / span.pods for span in spans) * 1e3, 2)


def complain(log: Path) -> None:
    """Whatever the controller said that it should not have had to say."""
    lines = [line for line in log.read_text().splitlines() if "Traceback" in line or "ERROR" in line]
    print(f"errors in the controller's log: {len(lines)}")
    for line in lines[:5]:
        print(f"   {line}")


def told(name: str, times: Sequence[float]) -> None:
    print(
        f"{name:60} median {statistics.median(times) * 1e3:7.1f} ms, p99 {p99(times) * 1e3:7.1f} ms, "
        f"most {max(times) * 1e3:.1f} ms of {len(times)}",
        flush=True,
    )


def p99(times: Sequence[float]) -> float:
    return sorted(times)[-(-99 * len(times) // 100) - 1]


if __name__ == "__main__":
    main()
