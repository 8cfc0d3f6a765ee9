"""Elastic jobs beside plain Kubernetes Jobs on the same control plane: two published cases.

40 played nodes have 240 CPUs and 80 GPUs (6 and 2 each); a trainer takes 1 CPU. Work is counted in trainer-seconds of
Running pods, and a job whose work is done has all its pods end with code 0. Time is scaled down by a factor: 24,000
trainer-seconds become 24,000 / factor, and pods start and stop no faster for it, which costs the elastic side more than
the rigid one.

*Two jobs*: A asks for 100 trainers and can use 50..500; when a quarter of its work is done comes B, which asks for 200
and can use 50..200; both have the same work.
*Serving*: a Deployment of 80 pods runs, job A comes, and the Deployment is scaled 80 → 100 → 150 → 80. Its pods have no
priority, so kube-scheduler preempts nobody for them. How long a pod waits is not scaled: it is Stretto's way of giving
way (a trainer takes half a second to stop) and kube-scheduler's own pause (1 s, then 2 s, 4 s …) before it looks again
at a pod that did not fit; what waits for another job's end does become shorter.

Plain Kubernetes runs batch/v1 Jobs whose parallelism is what they ask for, under kube-scheduler, without the
controller: all pods that fit run. The controller manager's and kube-scheduler's limits on requests are raised, so that
neither waits for them. Every half second the cluster is looked at: requests of pods on nodes / 240 CPUs, pods that run
and pods that wait for a node, per job.

    python benchmarks/kubernetes_autoscale.py [--factor 4] [--figure benchmarks/results/kubernetes_autoscale.png]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from _measure import machine
from _verdict import report
from kubernetes_scale import BASE, CLIENT_FLAGS, LEASE_S, SEEN_PODS, SeenPod
from stretto.kubernetes.access import from_kubeconfig
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import DEPLOYMENTS, ELASTIC_JOBS, Kind
from stretto.kubernetes.watching import Watched
from stretto.testing.kubernetes.building import VERSION
from stretto.testing.kubernetes.control_plane import ControlPlane
from stretto.testing.kubernetes.controller_process import PRETENDING, controlled, forget, install
from stretto.testing.kubernetes.fake_nodes import FakeNodes
from stretto.testing.kubernetes.fake_objects import FakeNode, FakePod

Arm = Literal["stretto", "plain"]
NAMES: dict[Arm, str] = {"stretto": "Stretto", "plain": "plain Kubernetes"}
NODES, CPUS_PER_NODE, GPUS_PER_NODE = 40, 6, 2
CPUS = NODES * CPUS_PER_NODE
WORK_S = 24_000.0
"""Trainer-seconds of every job, before scaling."""
QUARTER = 0.25
STOP_S = 0.5
"""How long a pod takes to stop."""
SAMPLE_S = 0.5
WEB = "web"
WEB_REPLICAS = (80, 100, 150, 80)
WEB_STEP_S = 40.0
"""Before scaling."""
DEADLINE_S = 300.0
BATCH_JOBS: Kind[dict[str, Any]] = Kind("batch", "v1", "jobs", dict)
_BARS = " ▁▂▃▄▅▆▇█"


class Ask(msgspec.Struct, frozen=True):
    """What a job asks for, and what it could use."""

    name: str
    asked: int
    least: int
    most: int


A, B = Ask("a", 100, 50, 500), Ask("b", 200, 50, 200)


# What is counted.


class Ledger:
    """Trainer-seconds of one job: the integral of its Running pods."""

    def __init__(self, work_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.work_s, self._clock = work_s, clock
        self.submitted_s = clock()
        self.first_s: float | None = None
        """When its first pod ran."""
        self.ended_s: float | None = None
        self.running = 0
        self._done_s, self._at_s = 0.0, self.submitted_s

    @property
    def done_s(self) -> float:
        return self._done_s + self.running * (self._clock() - self._at_s)

    def change(self, pods: int) -> None:
        self._done_s, self._at_s = self.done_s, self._clock()
        if self.first_s is None and pods > 0:
            self.first_s = self._at_s
        self.running += pods

    def end(self) -> None:
        self.ended_s = self._clock()


class Sample(msgspec.Struct, frozen=True):
    at_s: float
    utilisation: float
    running: dict[str, int]
    pending: dict[str, int]


class Wait(msgspec.Struct):
    """One pod of the Deployment: how long until it ran, or until it was given up."""

    created_s: float
    ran_s: float | None = None
    gone_s: float | None = None

    def waited_s(self, now_s: float) -> float:
        return next(t for t in (self.ran_s, self.gone_s, now_s) if t is not None) - self.created_s


class Stage:
    """One run of one case: the jobs, their pods, and what is seen of them."""

    def __init__(self, api: Api, namespace: str, factor: float) -> None:
        self.api, self.namespace, self.factor = api, namespace, factor
        self.agent: FakeNodes
        self.began_s = time.monotonic()
        self.ledgers: dict[str, Ledger] = {}
        self.samples: list[Sample] = []
        self.created: Counter[str] = Counter()
        self.killed: Counter[str] = Counter()
        self.web: dict[str, Wait] = {}
        self._ran: set[str] = set()
        self._finishing: set[asyncio.Task[None]] = set()
        self.watched = Watched(api, SEEN_PODS, namespace)
        self.watched.on_change(self._see)

    def begin(self) -> None:
        """From now on it counts."""
        self.began_s = time.monotonic()
        self.samples.clear()
        self.web.clear()

    # Told by the agent.

    def started(self, pod: FakePod) -> None:
        if pod.namespace != self.namespace:
            return
        self._ran.add(pod.uid)
        ledger = self.ledgers.get(job_of(pod.name))
        if ledger is not None:
            ledger.change(+1)
            if ledger.ended_s is not None:
                self._finish([pod])
        elif pod.name in self.web:
            self.web[pod.name].ran_s = time.monotonic()

    def stopped(self, pod: FakePod) -> None:
        """Before its work was done, if it was a trainer."""
        ledger = self.ledgers.get(job_of(pod.name))
        if pod.namespace == self.namespace and ledger is not None and pod.uid in self._ran:
            self._ran.discard(pod.uid)
            ledger.change(-1)
            self.killed[job_of(pod.name)] += 1

    # Seen by everybody.

    def _see(self, old: SeenPod | None, new: SeenPod | None) -> None:
        now_s = time.monotonic()
        if old is None and new is not None:
            name = job_of(new.metadata.name)
            self.created[name] += 1
            if name == WEB:
                self.web[new.metadata.name] = Wait(now_s)
        pod = new or old
        assert pod is not None
        if pod.metadata.name in self.web and (new is None or new.metadata.is_leaving):
            wait = self.web[pod.metadata.name]
            wait.gone_s = wait.gone_s or now_s

    # What happens.

    async def submit(self, arm: Arm, ask: Ask) -> Ledger:
        ledger = self.ledgers[ask.name] = Ledger(WORK_S / self.factor)
        if arm == "stretto":
            await self.api.create(ELASTIC_JOBS, elastic_job(ask), self.namespace)
        else:
            await self.api.create(BATCH_JOBS, batch_job(ask), self.namespace)
        return ledger

    async def until_work(self, ledger: Ledger, share: float) -> None:
        """Until so much of its work is done."""
        async with asyncio.timeout(DEADLINE_S):
            while (missing_s := share * ledger.work_s - ledger.done_s) > 0:
                await asyncio.sleep(min(missing_s / ledger.running, 0.05) if ledger.running else 0.05)

    async def run_to_end(self, name: str) -> None:
        ledger = self.ledgers[name]
        await self.until_work(ledger, 1.0)
        ledger.end()
        pods = [pod for pod in self.agent.pods.values() if pod.namespace == self.namespace and job_of(pod.name) == name]
        self._finish(pods)

    def _finish(self, pods: Sequence[FakePod]) -> None:
        """Its trainers are through: they end by themselves."""
        for pod in pods:
            if pod.uid in self._ran and not pod.stopping:
                self._ran.discard(pod.uid)
                self.ledgers[job_of(pod.name)].change(-1)
                task = asyncio.create_task(self.agent.finish(pod, 0))
                self._finishing.add(task)
                task.add_done_callback(self._finishing.discard)

    # What is recorded.

    def look(self) -> Sample:
        running: Counter[str] = Counter()
        pending: Counter[str] = Counter()
        for pod in self.watched.items.values():
            if pod.status.phase in ("Succeeded", "Failed"):
                continue
            (running if pod.spec.node_name else pending)[job_of(pod.metadata.name)] += 1
        return Sample(time.monotonic() - self.began_s, sum(running.values()) / CPUS, dict(running), dict(pending))

    async def sample(self, show: Callable[[Stage], None]) -> None:
        while True:
            self.samples.append(self.look())
            show(self)
            await asyncio.sleep(SAMPLE_S)


def job_of(pod: str) -> str:
    """Pods of all kinds begin with the name of what made them."""
    return pod.partition("-")[0]


# The objects.


def elastic_job(ask: Ask) -> dict[str, Any]:
    return {
        "apiVersion": "stretto.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": ask.name},
        "spec": {
            "image": "none",
            "run": "train",
            "level": "elastic",
            "workers": {"min": ask.least, "max": ask.most, "requested": ask.asked, "explore": False},
            "resources": {"gpu": 0, "cpu": 1},
        },
    }


def batch_job(ask: Ask) -> dict[str, Any]:
    template = {"spec": {"restartPolicy": "Never", "containers": [container()]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": ask.name},
        "spec": {"parallelism": ask.asked, "backoffLimit": 0, "template": template},
    }


def deployment(replicas: int) -> dict[str, Any]:
    labels = {"app": WEB}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": WEB},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container()]}},
        },
    }


def container() -> dict[str, Any]:
    return {"name": "main", "image": "none", "resources": {"requests": {"cpu": "1"}}}


# The cases.


async def two_jobs(stage: Stage, arm: Arm) -> None:
    first = await stage.submit(arm, A)
    ends = asyncio.create_task(stage.run_to_end(A.name))
    await stage.until_work(first, QUARTER)
    await stage.submit(arm, B)
    await asyncio.gather(ends, stage.run_to_end(B.name))


async def serving(stage: Stage, arm: Arm) -> None:
    step_s = WEB_STEP_S / stage.factor
    await stage.api.create(DEPLOYMENTS, deployment(WEB_REPLICAS[0]), stage.namespace)
    await stage.agent.wait(lambda: sum(wait.ran_s is not None for wait in stage.web.values()) == WEB_REPLICAS[0])
    # What it had before is not what the case is about.
    stage.begin()
    await stage.submit(arm, A)
    ends = asyncio.create_task(stage.run_to_end(A.name))
    for replicas in WEB_REPLICAS[1:]:
        await asyncio.sleep(step_s)
        await stage.api.patch(DEPLOYMENTS, WEB, {"spec": {"replicas": replicas}}, stage.namespace)
    await ends


CASES: dict[str, Callable[[Stage, Arm], Coroutine[Any, Any, None]]] = {"two jobs": two_jobs, "serving": serving}


class Outcome(msgspec.Struct, frozen=True):
    case: str
    arm: Arm
    samples: list[Sample]
    jobs: dict[str, dict[str, float]]
    """Per job: waiting, running and completion in seconds, pods made and pods killed before the end, resizes."""
    web_waits_s: list[float]
    web_never: int
    """Pods of the Deployment that never ran."""
    utilisation: float
    pending: float
    """Pods that waited for a node, on average."""
    makespan_s: float

    @property
    def completion_s(self) -> float:
        return statistics.fmean(job["completion_s"] for job in self.jobs.values())


async def run(
    plane: ControlPlane, account: Path, case: str, arm: Arm, factor: float, show: Callable[[Stage], None]
) -> Outcome:
    namespace = f"{arm}-{case.replace(' ', '-')}"
    await asyncio.to_thread(plane.create_namespace, namespace)
    nodes = [
        FakeNode(name=f"n{number}", cpu=str(CPUS_PER_NODE), memory="24Gi", gpus=GPUS_PER_NODE)
        for number in range(NODES)
    ]
    async with Api(from_kubeconfig([plane.kubeconfig])) as api:
        stage = Stage(api, namespace, factor)
        agent = FakeNodes(
            plane.kubeconfig, nodes, stop_s=STOP_S, on_start=stage.started, on_stop=stage.stopped
        )  # fmt: skip
        async with agent as stage.agent, beside(stage.watched.run()):
            await stage.watched.synced.wait()
            forget(plane)
            with (
                controlled(account, plane.folder, lease_s=LEASE_S, options=PRETENDING)
                if arm == "stretto"
                else nullcontext()
            ):
                if arm == "stretto":
                    await leads(api)
                stage.begin()
                async with beside(stage.sample(show)):
                    await CASES[case](stage, arm)
                outcome = await summed_up(stage, case, arm)
                await clear(stage, arm)
    return outcome


async def leads(api: Api) -> None:
    """Until the controller works: what it needs to start is not part of any case."""
    leases: Kind[dict[str, Any]] = Kind("coordination.k8s.io", "v1", "leases", dict)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await api.list(leases, "stretto-system")
            if any(lease["spec"].get("holderIdentity") for lease in found.items):
                return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While the rest goes on; what it raises is raised here."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        done = (await asyncio.gather(task, return_exceptions=True))[0]
    if isinstance(done, Exception):
        raise done


async def summed_up(stage: Stage, case: str, arm: Arm) -> Outcome:
    now_s = time.monotonic()
    jobs: dict[str, dict[str, float]] = {}
    for name, ledger in stage.ledgers.items():
        assert ledger.first_s is not None
        assert ledger.ended_s is not None
        waiting_s, completion_s = ledger.first_s - ledger.submitted_s, ledger.ended_s - ledger.submitted_s
        resizes = 0
        if arm == "stretto":
            found = await stage.api.get(ELASTIC_JOBS, name, stage.namespace)
            resizes = int(found.status.get("resizes") or 0)
        jobs[name] = {
            "waiting_s": waiting_s, "running_s": completion_s - waiting_s, "completion_s": completion_s,
            "created": stage.created[name], "killed": stage.killed[name], "resizes": resizes,
        }  # fmt: skip
    samples = stage.samples
    return Outcome(
        case=case,
        arm=arm,
        samples=samples,
        jobs=jobs,
        web_waits_s=[wait.waited_s(now_s) for wait in stage.web.values()],
        web_never=sum(wait.ran_s is None for wait in stage.web.values()),
        utilisation=statistics.fmean(sample.utilisation for sample in samples),
        pending=statistics.fmean(sum(sample.pending.values()) for sample in samples),
        makespan_s=max(ledger.ended_s or 0.0 for ledger in stage.ledgers.values()) - stage.began_s,
    )


async def clear(stage: Stage, arm: Arm) -> None:
    kind: Kind[Any] = ELASTIC_JOBS if arm == "stretto" else BATCH_JOBS
    for name in stage.ledgers:
        await stage.api.delete(kind, name, stage.namespace, propagation="Background")
    if stage.web:
        await stage.api.delete(DEPLOYMENTS, WEB, stage.namespace, propagation="Background")
    async with asyncio.timeout(DEADLINE_S):
        while stage.watched.items:
            await asyncio.sleep(0.1)


# What is shown.


@contextmanager
def watching_live(title: str) -> Any:
    """The series as they grow, where there is a terminal."""
    console = Console()
    if not console.is_terminal:
        yield lambda stage: None
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield lambda stage: live.update(series(title, stage))


def series(title: str, stage: Stage) -> Table:
    table = Table(title=f"{title}: {stage.samples[-1].at_s:.0f} s", title_justify="left", box=None)
    table.add_column("")
    table.add_column("now", justify="right")
    table.add_column(f"over time, {SAMPLE_S:g} s each")
    latest = stage.samples[-90:]
    used = [sample.utilisation for sample in latest]
    table.add_row("utilisation", f"{used[-1]:.0%}", bars(used, 1.0), style="bold")
    names = sorted({name for sample in latest for name in (*sample.running, *sample.pending)})
    for name in names:
        running = [sample.running.get(name, 0) for sample in latest]
        pending = [sample.pending.get(name, 0) for sample in latest]
        table.add_row(f"{name} running", str(running[-1]), bars(running, CPUS))
        table.add_row(f"{name} pending", str(pending[-1]), bars(pending, CPUS), style="red" if pending[-1] else "dim")
    return table


def bars(values: Sequence[float], most: float) -> str:
    top = len(_BARS) - 1
    return "".join(_BARS[min(top, max(round(value / most * top), int(value > 0)))] for value in values)


def tell(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        print(
            f"{outcome.case}, {NAMES[outcome.arm]}: {outcome.makespan_s:.1f} s in all, "
            f"utilisation {outcome.utilisation:.1%}, {outcome.pending:.1f} pods pending on average"
        )
        for name, job in outcome.jobs.items():
            print(
                f"   job {name}: waited {job['waiting_s']:.2f} s, ran {job['running_s']:.1f} s, "
                f"done after {job['completion_s']:.1f} s; {job['resizes']:.0f} resizes, "
                f"{job['created']:.0f} pods made, {job['killed']:.0f} of them ended early"
            )
        if waits := outcome.web_waits_s:
            print(
                f"   {len(waits)} pods of the Deployment: waited {statistics.fmean(waits):.2f} s on average, "
                f"{max(waits):.2f} s at most; {outcome.web_never} never ran"
            )


def compare(outcomes: Sequence[Outcome], factor: float) -> None:
    for case in CASES:
        ours = next(outcome for outcome in outcomes if (outcome.case, outcome.arm) == (case, "stretto"))
        peer = next(outcome for outcome in outcomes if (outcome.case, outcome.arm) == (case, "plain"))
        name = f"kubernetes_autoscale_{case.replace(' ', '_')}"
        completion = f"s from submission to the end of the work, time scaled down by {factor:g}"
        line(f"{name}_utilisation", ours.utilisation, peer.utilisation, "share of all CPUs, on average", least=1.0)
        for job in ours.jobs:
            parts: dict[str, Any] = {
                part: [round(ours.jobs[job][f"{part}_s"], 2), round(peer.jobs[job][f"{part}_s"], 2)]
                for part in ("waiting", "running")
            }
            line(f"{name}_{job}", ours.jobs[job]["completion_s"], peer.jobs[job]["completion_s"], completion, **parts)
        line(f"{name}_completion", ours.completion_s, peer.completion_s, f"{completion}, mean of the jobs", most=1.0)
        line(f"{name}_pending", ours.pending, peer.pending, "pods that waited for a node, on average over time")
        if ours.web_waits_s:
            line(
                f"{name}_waits", statistics.fmean(ours.web_waits_s), statistics.fmean(peer.web_waits_s),
                "s that an added pod of the Deployment waited until it ran or was given up, on average",
                longest=[round(max(ours.web_waits_s), 2), round(max(peer.web_waits_s), 2)],
                never_ran=[ours.web_never, peer.web_never],
            )  # fmt: skip
        line(f"{name}_makespan", ours.makespan_s, peer.makespan_s, "s until all work was done", most=1.0)


def line(
    name: str, ours: float, peer: float, unit: str, *, most: float | None = None, least: float | None = None,
    **more: object,
) -> None:  # fmt: skip
    """With a goal where the ratio has a bound."""
    ratio = ours / peer if peer else None
    goal, ok = "none: shown beside each other", None
    if ratio is not None and most is not None:
        goal, ok = f"ratio <= {most:g}", ratio <= most
    elif ratio is not None and least is not None:
        goal, ok = f"ratio >= {least:g}", ratio >= least
    report(
        name,
        ours=round(ours, 3),
        peer=round(peer, 3),
        ratio=None if ratio is None else round(ratio, 3),
        unit=unit,
        goal=goal,
        ok=ok,
        **more,
    )


def draw(outcomes: Sequence[Outcome], file: Path, factor: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {A.name: "#4477aa", B.name: "#ee8866", WEB: "#88aa55"}
    labels = {A.name: "job A", B.name: "job B", WEB: "Deployment"}
    rows: list[Arm] = ["stretto", "plain"]
    end_s = {case: max(o.samples[-1].at_s for o in outcomes if o.case == case) for case in CASES}
    figure, axes = pyplot.subplots(3, len(CASES), figsize=(13, 9), sharex="col", constrained_layout=True)
    for column, case in enumerate(CASES):
        for row, arm in enumerate(rows):
            outcome = next(o for o in outcomes if (o.case, o.arm) == (case, arm))
            ax = axes[row][column]
            at_s = [sample.at_s for sample in outcome.samples]
            names = [name for name in (WEB, A.name, B.name) if any(name in s.running for s in outcome.samples)]
            ax.stackplot(
                at_s, [[s.running.get(name, 0) for s in outcome.samples] for name in names], step="post",
                labels=[f"{labels[name]}: on nodes" for name in names], colors=[colours[name] for name in names],
            )  # fmt: skip
            waiting = [sum(s.pending.values()) for s in outcome.samples]
            ax.plot(at_s, waiting, color="#cc3344", linewidth=1.8, drawstyle="steps-post", label="pending, all")
            ax.axhline(CPUS, color="black", linewidth=0.8, linestyle=":")
            ax.set(title=f"{case}: {NAMES[arm]}", ylabel="pods (1 CPU each)", ylim=(0, CPUS * 1.3))
            ax.legend(loc="upper center", ncols=4, fontsize=9, framealpha=0.9)
            axes[2][column].plot(
                at_s, [100 * s.utilisation for s in outcome.samples], drawstyle="steps-post", linewidth=1.8,
                color="#222222" if arm == "stretto" else "#999999",
                label=f"{NAMES[arm]}: {outcome.utilisation:.0%} on average",
            )  # fmt: skip
        last = axes[2][column]
        last.set(title=f"{case}: utilisation", ylabel="% of 240 CPUs requested", ylim=(0, 130), xlim=(0, end_s[case]))
        last.set_xlabel(f"seconds (time scaled down by {factor:g})")
        last.legend(loc="upper center", ncols=2, fontsize=9, framealpha=0.9)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--factor", type=float, default=4.0, help="time is scaled down by")
    figure = Path(os.path.relpath(__file__)).parent / "results" / "kubernetes_autoscale.png"
    options.add_argument("--figure", type=Path, default=figure)
    given = options.parse_args()
    print(
        f"{machine()}\n"
        f"peer: batch/v1 Jobs and kube-scheduler {VERSION} ({', '.join(CLIENT_FLAGS)}) on the same control plane\n"
        f"{NODES} played nodes with {CPUS_PER_NODE} CPUs and {GPUS_PER_NODE} GPUs; 1 CPU per trainer; "
        f"{WORK_S:,.0f} trainer-seconds per job and all times scaled down by {given.factor:g}; "
        f"a pod takes {STOP_S:g} s to stop",
        flush=True,
    )
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder), scheduler_flags=CLIENT_FLAGS, controller_manager_flags=CLIENT_FLAGS)
        with plane:
            account = install(plane, BASE)
            for case in CASES:
                for arm in NAMES:
                    with watching_live(f"{case}, {NAMES[arm]}") as show:
                        outcomes.append(asyncio.run(run(plane, account, case, arm, given.factor, show)))
                    tell(outcomes[-1:])
    compare(outcomes, given.factor)
    draw(outcomes, given.figure, given.factor)
    print(f"figure: {given.figure}")


if __name__ == "__main__":
    main()
