"""The client of a cluster without one: what objects look like as documents, what is asked, and a rude API server."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_api import Asked, Reply, ScriptedApi, refusal

from stretto.api.answers import EventAnswer, JobAnswer, SpeedAnswer, WorkerAnswer
from stretto.client.documents import Job, Piece
from stretto.errors import Conflict, Denied, NotFound, SpecError, StrettoError, Unavailable, UsageError
from stretto.kubernetes import client
from stretto.kubernetes.model import ElasticJob, Pod
from stretto.kubernetes.sdk import (
    AsyncKubernetesClient,
    KubernetesClient,
    calls,
    changes,
    documents,
    elastic_job_of,
    logs,
)

PATIENCE_S = 60.0
FILE = {"name": "train", "run": "python train.py", "image": "train:1", "elastic": {"min": 2, "max": 4}}
STATUS = {
    "phase": "Pending", "reason": "NoRoom", "message": "needs 2 GPUs, 1 is free", "waitingFor": "no-room",
    "number": 7, "workers": 0, "step": 120, "totalSteps": 500, "startTime": "2026-01-01T00:00:10Z",
    "accounts": {"level": "elastic", "waited_s": 4.5, "starts": 2, "message": "was preempted"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(changes, "_PAUSE_S", 0.01)
    monkeypatch.setattr(logs, "_AGAIN_S", 0.01)


def raw_job(
    status: dict[str, Any] | None = None, *, uid: str = "u1", name: str = "train", **spec: Any
) -> dict[str, Any]:
    workers = {"image": "train:1", "run": "python train.py", "workers": {"min": 2, "max": 4}}
    meta = {"name": name, "namespace": "vision", "uid": uid, "resourceVersion": "5", "labels": {"team": "a"}}
    meta["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return {"metadata": meta, "spec": {**workers, **spec}, "status": status or {}}


def raw_pod(worker: str, phase: str = "Running", *, owner: str = "u1", **status: Any) -> dict[str, Any]:
    marks = {"job": "train", "worker": worker, "launch": f"7.{worker}.abc"}
    return {
        "metadata": {
            "name": f"train-{worker}-abc", "namespace": "vision", "uid": f"pod-{worker}", "resourceVersion": "6",
            "labels": {f"stretto.dev/{key}": text for key, text in marks.items()},
            "ownerReferences": [{"kind": "ElasticJob", "name": "train", "uid": owner, "controller": True}],
        },
        "spec": {"nodeName": "n1", "containers": [{"name": "side"}, {"name": "worker"}]},
        "status": {"phase": phase, **status},
    }  # fmt: skip


def as_job(raw: dict[str, Any]) -> ElasticJob:
    return msgspec.convert(raw, ElasticJob)


def as_pods(*raw: dict[str, Any]) -> list[Pod]:
    return [msgspec.convert(one, Pod) for one in raw]


# Documents.


def test_a_job_has_every_field_that_a_server_gives() -> None:
    shown = documents.job(as_job(raw_job(STATUS)), as_pods(raw_pod("w0")))
    assert set(JobAnswer.__struct_fields__) <= set(shown)
    assert set(WorkerAnswer.__struct_fields__) <= set(shown.workers[0])
    assert (shown.id, shown.name, shown.number, shown.phase, shown.wish) == (
        "vision/train",
        "train",
        7,
        "queued",
        "run",
    )
    assert (shown.min_workers, shown.max_workers, shown.steps, shown.total_steps) == (2, 4, 120, 500)
    assert (shown.reason, shown["text"], shown.message) == ("no-room", "needs 2 GPUs, 1 is free", "was preempted")
    assert (shown.submitted_s, shown.started_s, shown.ended_s) == (1767225600.0, 1767225610.0, None)
    assert (shown.waited_s, shown["starts"], shown.level, shown["priority"]) == (4.5, 2, "elastic", 50)
    assert shown.spec["run"] == "python train.py"
    assert not shown.ended
    assert json.loads(json.dumps(shown)) == shown


def test_speeds_are_told_as_a_server_tells_them() -> None:
    curve = {"workers": [1, 2], "count": [8.0, 24.0], "mean": [-1.0, -2.0], "squares": [0.0, 0.24]}

    def speeds(kept: Any) -> list[dict[str, Any]]:
        return documents.job(as_job(raw_job({**STATUS, "accounts": {"speeds": kept}}))).speeds

    first, second = speeds({"a100": curve})
    assert set(SpeedAnswer.__struct_fields__) == set(first)
    assert (second["pool"], second["workers"], second["steps"]) == ("a100", 2, 24)
    assert (second["rate"], second["spread"]) == pytest.approx((math.exp(2.0), 0.1 * math.exp(2.0)))
    for foreign in ({"a100": {**curve, "count": [1]}}, {"a100": "x"}, "x", None):
        assert speeds(foreign) == []


@pytest.mark.parametrize(
    ("status", "more", "phase"),
    [
        ({}, {}, "queued"),
        ({}, {"suspend": True}, "suspended"),
        ({"phase": "Running"}, {}, "running"),
        ({"phase": "Succeeded"}, {}, "succeeded"),
        ({"phase": "Invalid", "message": "spec.x: is wrong"}, {}, "invalid"),
    ],
)
def test_phases(status: dict[str, Any], more: dict[str, Any], phase: str) -> None:
    assert documents.job(as_job(raw_job(status, **more))).phase == phase


def test_variables_are_not_shown_and_an_invalid_object_is() -> None:
    assert "env" not in documents.job(as_job(raw_job(env={"KEY": "secret"}))).spec
    broken = documents.job(as_job(raw_job({"phase": "Invalid", "message": "no"}, workers={"min": 9, "max": 2})))
    assert (broken.phase, broken.message, broken.min_workers) == ("invalid", "no", 9)


def test_pods_of_an_earlier_object_of_that_name_are_somebody_elses() -> None:
    found = as_job(raw_job(STATUS))
    own = documents.pods_of(found, as_pods(raw_pod("w10"), raw_pod("w9"), raw_pod("w2", owner="u0")))
    assert [documents.worker_name(pod) for pod in own] == ["w9", "w10"]


def test_why_names_what_keeps_a_pod_from_starting() -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}
    stuck = raw_pod("w0", "Pending", containerStatuses=[{"name": "worker", "state": waiting}])
    told = documents.why(as_job(raw_job(STATUS)), as_pods(stuck))
    assert told.text == "needs 2 GPUs, 1 is free"
    assert told.facts["w0"] == "ErrImagePull: no such image"
    assert (told.facts["min_workers"], told.facts["waiting_for"]) == (2, "no-room")


def test_an_event_has_every_field_that_a_server_gives() -> None:
    raw = {
        "metadata": {"name": "e", "resourceVersion": "41"}, "reason": "Succeeded", "message": "has succeeded",
        "type": "Normal", "involvedObject": {"name": "train", "namespace": "vision", "uid": "u1"},
        "lastTimestamp": "2026-01-01T00:00:00Z", "eventTime": None,
    }  # fmt: skip
    told = documents.event(msgspec.convert(raw, documents.CoreEvent))
    assert set(EventAnswer.__struct_fields__) <= set(told)
    assert (told.seq, told.at_s, told.kind) == (41, 1767225600.0, "ended")
    assert (told["job"], told["text"]) == ("vision/train", "Succeeded: has succeeded")


# What is asked.


@pytest.mark.parametrize(
    ("ref", "wanted"),
    [
        ("train", ("vision", "train")),
        ("other/train.2", ("other", "train.2")),
        (Job(id="other/train"), ("other", "train")),
        (12, ("vision", "12")),
    ],
)
def test_names(ref: str | int | Job, wanted: tuple[str, str]) -> None:
    assert calls.names(ref, "vision") == wanted


@pytest.mark.parametrize("ref", ["", "a/b/c", "/a", "a/", "..", "A", "a?x=1", "a b"])
def test_what_is_no_name_is_never_asked_for(ref: str) -> None:
    with pytest.raises(UsageError, match="is not a job"):
        calls.names(ref, "vision")


def test_a_job_file_becomes_an_object() -> None:
    made = elastic_job_of(FILE, image="ignored:1", env={"A": "1"}, namespace="vision")
    assert made["spec"]["image"] == "train:1"
    assert (made["spec"]["env"], made["metadata"]) == ({"A": "1"}, {"name": "train", "namespace": "vision"})
    unnamed = elastic_job_of("run: python train.py\n", image="train:1")
    assert unnamed["metadata"]["name"].startswith("job-")
    assert unnamed["spec"]["image"] == "train:1"
    with pytest.raises(SpecError, match="image: is missing") as caught:
        elastic_job_of("name: a\nrun: x\n")
    assert "--image" in caught.value.hint


def test_scaling() -> None:
    def scaled(low: int | None, high: int | None, **spec: Any) -> dict[str, Any]:
        return dict(calls.scaling(as_job(raw_job(**spec)), low, high)["spec"])

    assert scaled(None, 8) == {"workers": {"min": 2, "max": 8}, "level": "elastic"}
    assert scaled(None, 1)["workers"] == {"min": 1, "max": 1}
    assert scaled(3, 3)["level"] == "elastic", "one size alone would be taken for a rigid job"
    requested = {"min": 2, "max": 4, "requested": 2}
    assert scaled(3, 4, workers=requested)["workers"]["requested"] is None
    assert scaled(1, 4, workers=requested)["workers"] == {"min": 1, "max": 4}
    assert scaled(1, 5, service={"port": 80, "replicas": {"min": 1, "max": 2}}) == {
        "service": {"replicas": {"min": 1, "max": 5}}
    }
    with pytest.raises(UsageError, match=r"9\.\.4"):
        scaled(9, None)
    with pytest.raises(Conflict, match="rigid"):
        scaled(1, 2, workers={"min": 2, "max": 2})
    with pytest.raises(Conflict, match="has succeeded"):
        calls.scaling(as_job(raw_job({"phase": "Succeeded"})), 1, 2)


# A scripted server.


Script = Callable[[Asked, Reply], Awaitable[None]]
JOBS = "/apis/stretto.dev/v1alpha1/namespaces/vision/elasticjobs"
PODS = "/api/v1/namespaces/vision/pods"


@asynccontextmanager
async def connected(script: Script, folder: Path) -> AsyncIterator[tuple[AsyncKubernetesClient, ScriptedApi]]:
    api = ScriptedApi(script)
    async with (
        asyncio.timeout(PATIENCE_S),
        api.serving() as where,
        AsyncKubernetesClient(kubeconfig=kubeconfig(folder, where.server)) as made,
    ):
        yield made, api


def kubeconfig(folder: Path, server: str) -> Path:
    content = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "vision"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    (folder / "config").write_text(json.dumps(content))
    return folder / "config"


def listing(*items: dict[str, Any], version: str = "9") -> dict[str, Any]:
    return {"metadata": {"resourceVersion": version}, "items": list(items)}


def play(script: Script, folder: Path, story: Callable[[AsyncKubernetesClient, ScriptedApi], Awaitable[None]]) -> None:
    async def run() -> None:
        async with connected(script, folder) as (made, api):
            await story(made, api)

    asyncio.run(run())


def refusing(code: int, reason: str, message: str) -> Script:
    async def script(_: Asked, reply: Reply) -> None:
        reply.json(refusal(code, reason, message), code)

    return script


async def unknown_address(_: Asked, reply: Reply) -> None:
    reply.whole(b"404 page not found\n", 404)


@pytest.mark.parametrize(
    ("script", "kind", "said", "hint"),
    [
        (unknown_address, Unavailable, "not installed", "kubectl apply -k deploy/kubernetes/base"),
        (refusing(404, "NotFound", 'elasticjobs.stretto.dev "x" not found'), NotFound, "no job 'x'", "stretto ps"),
        (refusing(403, "Forbidden", "user u cannot get"), Denied, "user u cannot get", "can-i"),
        (refusing(401, "Unauthorized", "no"), Denied, "does not know us", "renew"),
        (refusing(422, "Invalid", "spec.workers.max: is wrong"), UsageError, "spec.workers.max", "explain"),
        (refusing(500, "InternalError", "broken"), Unavailable, "broken", "cluster-info"),
    ],
)
def test_errors_are_told_to_people(
    tmp_path: Path, script: Script, kind: type[StrettoError], said: str, hint: str
) -> None:
    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        with pytest.raises(kind) as caught:
            await made.job("x")
        assert said in caught.value.message
        assert hint in caught.value.hint
        assert caught.value.exit_code == kind.exit_code

    play(script, tmp_path, story)


@pytest.mark.parametrize("ours", [True, False])
def test_a_submission_whose_answer_was_lost_is_made_once(tmp_path: Path, ours: bool) -> None:
    bodies: list[dict[str, Any]] = []

    async def script(asked: Asked, reply: Reply) -> None:
        if asked.method == "POST":
            bodies.append(json.loads(asked.body))
            if len(bodies) == 1:
                reply.cut()
            else:
                reply.json(refusal(409, "AlreadyExists", "is there"), 409)
        else:
            notes = bodies[0]["metadata"]["annotations"] if ours else {calls.KEY_NOTE: "another"}
            found = raw_job()
            reply.json({**found, "metadata": {**found["metadata"], "annotations": notes}})

    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        if ours:
            assert (await made.submit(FILE)).id == "vision/train"
        else:
            with pytest.raises(Conflict, match="there is a job vision/train already") as caught:
                await made.submit(FILE)
            assert "kubectl delete elasticjob train -n vision" in caught.value.hint
        assert [body["metadata"]["name"] for body in bodies] == ["train", "train"]

    play(script, tmp_path, story)


def test_waiting_survives_a_broken_watch_and_sees_the_end(tmp_path: Path) -> None:
    watches = 0

    async def script(asked: Asked, reply: Reply) -> None:
        nonlocal watches
        if "watch" not in asked.query:
            found = raw_job({"phase": "Running"})
            reply.json(found if asked.path.endswith("/train") else listing(found))
            return
        watches += 1
        if watches == 1:
            reply.cut()
            return
        reply.begin()
        if watches == 2:
            reply.line("ERROR", refusal(410, "Expired", "too old"))
        else:
            reply.line("MODIFIED", raw_job({"phase": "Failed", "message": "exit 3", "accounts": {"exit_code": 3}}))
        await reply.sent()
        reply.end()

    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        job = await made.wait("train")
        assert (job.phase, job.message, job.exit_code, job.ended) == ("failed", "exit 3", 3, True)
        assert [one.query.get("fieldSelector") for one in api.asked[1:]] == ["metadata.name=train"] * 5

    play(script, tmp_path, story)


@pytest.mark.parametrize("now", ["gone", "another", "invalid"])
def test_waiting_for_a_job_that_will_never_end(tmp_path: Path, now: str) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        if asked.path.endswith("/train"):
            reply.json(raw_job({"phase": "Running"}))
        elif now == "gone":
            reply.json(listing())
        elif now == "another":
            reply.json(listing(raw_job({"phase": "Running"}, uid="u2")))
        else:
            reply.json(listing(raw_job({"phase": "Invalid", "message": "spec.template: is wrong"})))

    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        if now == "invalid":
            with pytest.raises(SpecError, match=r"refused: spec\.template: is wrong"):
                await made.wait("train")
        else:
            job = await made.wait("train")
            assert (job.phase, job.message) == ("cancelled", "its object was deleted")

    play(script, tmp_path, story)


def test_waiting_takes_no_longer_than_asked(tmp_path: Path) -> None:
    async def script(asked: Asked, reply: Reply) -> None:
        found = raw_job({"phase": "Running"})
        if "watch" in asked.query:
            reply.begin()
            await reply.sent()
            await asyncio.Event().wait()
        reply.json(found if asked.path.endswith("/train") else listing(found))

    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        with pytest.raises(TimeoutError):
            await made.wait("train", timeout_s=0.2)

    play(script, tmp_path, story)


class Logged:
    """Two workers: w0 whose log breaks once in the middle of a character, w1 that starts later. Then the job ends."""

    def __init__(self) -> None:
        self.first = "one\ntwö\n".encode()
        self.broken = False
        self.over = asyncio.Event()
        self.read: set[str] = set()

    async def __call__(self, asked: Asked, reply: Reply) -> None:
        if asked.path.endswith("/log"):
            await self._log(asked, reply)
        elif asked.path == f"{JOBS}/train":
            reply.json(raw_job({"phase": "Running"}))
        elif "watch" not in asked.query:
            w1 = raw_pod("w1", "Succeeded" if self.over.is_set() else "Pending")
            pods = listing(raw_pod("w0", "Succeeded" if self.over.is_set() else "Running"), w1)
            reply.json(pods if asked.path == PODS else listing(raw_job({"phase": "Running"})))
        else:
            await self._watch(asked.path == PODS, reply)

    async def _watch(self, pods: bool, reply: Reply) -> None:
        reply.begin()
        if pods:
            reply.line("MODIFIED", raw_pod("w1"))
        await reply.sent()
        await self.over.wait()
        if pods:
            reply.line("MODIFIED", raw_pod("w0", "Succeeded"))
            reply.line("MODIFIED", raw_pod("w1", "Succeeded"))
        else:
            reply.line("MODIFIED", raw_job({"phase": "Succeeded"}))
        await reply.sent()
        await asyncio.Event().wait()

    async def _log(self, asked: Asked, reply: Reply) -> None:
        assert asked.query["container"] == "worker"
        worker = "w0" if "-w0-" in asked.path else "w1"
        reply.begin()
        if worker == "w0" and not self.broken and "follow" in asked.query:
            self.broken = True
            reply.piece(self.first[:7])
            await reply.sent()
            reply.hang_up()
            return
        reply.piece(self.first if worker == "w0" else b"other\n")
        reply.end()
        await reply.sent()
        self.read.add(worker)
        if self.read == {"w0", "w1"}:
            self.over.set()


def test_following_logs_loses_and_repeats_nothing(tmp_path: Path) -> None:
    async def run() -> dict[str, str]:
        async with connected(Logged(), tmp_path) as (made, _):
            texts = {"w0": "", "w1": ""}
            async for worker, text in made.follow("train"):
                texts[worker] += text
            return texts

    assert asyncio.run(run()) == {"w0": "one\ntwö\n", "w1": "other\n"}


def test_following_the_last_lines_of_one_worker_with_ticks(tmp_path: Path) -> None:
    async def run() -> list[Piece]:
        logged = Logged()
        logged.read.add("w1")
        async with connected(logged, tmp_path) as (made, _):
            return [piece async for piece in made.follow("train", worker="w0", tail=1, tick_s=0.001) if piece.text]

    assert "".join(text for _, text in asyncio.run(run())) == "twö\n"


def test_logs_of_several_workers_are_named(tmp_path: Path) -> None:
    async def story(made: AsyncKubernetesClient, api: ScriptedApi) -> None:
        assert await made.logs("train") == "==> w0 <==\none\ntwö\n==> w1 <==\nother\n"
        assert await made.logs("train", worker="w1", tail=5) == "other\n"
        assert api.asked[-1].query == {"container": "worker", "tailLines": "5"}
        with pytest.raises(NotFound, match="no worker 'w7'") as caught:
            await made.logs("train", worker="w7")
        assert caught.value.hint == "known: w0, w1"

    async def run() -> None:
        async with connected(Logged(), tmp_path) as (made, api):
            await story(made, api)

    asyncio.run(run())


# The synchronous client.


def served(script: Callable[[], Script], folder: Path, use: Callable[[Path], None]) -> None:
    """Use a client in a thread, beside the loop that the scripted server runs on."""

    async def run() -> None:
        api = ScriptedApi(script())
        async with asyncio.timeout(PATIENCE_S), api.serving() as where:
            await asyncio.to_thread(use, kubeconfig(folder, where.server))

    asyncio.run(run())


def test_the_synchronous_client_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def use(config: Path) -> None:
        with KubernetesClient(kubeconfig=config) as made:
            assert made.namespace == "vision"
            pieces = made.follow("train")
            assert next(pieces).text
            rest = made.follow("train")  # Never begun.
            assert made.job("train").phase == "running"
            pieces.close()
            abandoned = made.follow("train")
            assert next(abandoned).text
        del rest, abandoned
        assert {thread.name for thread in set(threading.enumerate()) - before} <= {"asyncio_0"}

    served(Logged, tmp_path, use)


def test_the_synchronous_client_works_where_a_loop_runs(tmp_path: Path) -> None:
    def use(config: Path) -> None:
        async def inside() -> str:
            with KubernetesClient(kubeconfig=config) as made:
                return made.job("train").id

        assert asyncio.run(inside()) == "vision/train"

    served(Logged, tmp_path, use)


def test_both_clients_have_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(KubernetesClient) == public(AsyncKubernetesClient)
