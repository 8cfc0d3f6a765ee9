"""Launches that the API server does not let happen as planned, and what is left of those that have ended."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from memory_api import NAMESPACE, Object, Request, Stage, play, until

from stretto.backends.protocol import Exit, News
from stretto.errors import SpecError
from stretto.kubernetes import backend, elastic_job, pods
from stretto.kubernetes.controller import Controller
from stretto.kubernetes.fields import GPU_RESOURCE
from stretto.kubernetes.kinds import NODES, PODS
from stretto.kubernetes.model import Pod
from stretto.kubernetes.problems import ApiError, Invalid, ObjectConflict, ObjectNotFound, Refused, Unreachable

QUOTA = ObjectConflict('Operation cannot be fulfilled on resourcequotas "q"', status=409, reason="Conflict")
STAMP = "2026-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_AGAIN_S", "_LONGEST_AGAIN_S", "_SWEEP_S"):
        monkeypatch.setattr(backend, name, 0.01)


def fail(stage: Stage, verb: str, error: Exception, times: int = 1_000_000) -> list[Request]:
    """So often the answer to such a request about a pod is an error; gives back the list of those."""
    failed: list[Request] = []

    async def refuse(request: Request) -> None:
        if request[:2] == (verb, "pods") and len(failed) < times:
            failed.append(request)
            raise error

    stage.api.before.append(refuse)
    return failed


def of(stage: Stage, pod: str) -> Object:
    return stage.api.objects["pods", NAMESPACE, pod]


def has_label(stage: Stage, pod: str, label: str) -> bool:
    return label in of(stage, pod)["metadata"]["labels"]


def asked(stage: Stage, pod: str) -> list[str]:
    return [request.verb for request in stage.api.asked if request[1:3] == ("pods", pod)]


def launches(controller: Controller) -> list[str]:
    return [worker.launch for active in controller.book for worker in active.job.workers]


def test_a_new_job_costs_four_requests_until_its_first_pod_is_made() -> None:
    """Signed, its secret looked for and made, written down: each of them makes it wait; events do not."""

    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.api.asked.clear()
            stage.job("a", 1, 2)
            await stage.has("a", 2)
            asked = [request[:2] for request in stage.api.asked if request.kind != "events"]
            assert asked[: asked.index(("create", "pods"))] == [
                ("patch", "elasticjobs"), ("get", "secrets"), ("create", "secrets"), ("patch", "elasticjobs"),
            ]  # fmt: skip

    play(story)


def overhear(controller: Controller) -> list[Exit]:
    """The ends that the backend tells the loop of."""
    heard: list[Exit] = []
    tell = controller.backend._tell

    def hear(news: News) -> None:
        if isinstance(news, Exit):
            heard.append(news)
        tell(news)

    controller.backend._tell = hear
    return heard


def late(stage: Stage, job: str, name: str, **labels: str) -> None:
    """A living pod that no controller here has made."""
    marks = {pods.JOB_LABEL: job, **labels}
    spec = {"nodeName": "n1", "containers": [{"name": "worker"}]}
    stage.api.put(PODS, {"metadata": {"name": name, "labels": marks}, "spec": spec, "status": {"phase": "Running"}})


# Launches that fail.


def test_a_conflict_over_a_quota_is_tried_again() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        fail(stage, "create", QUOTA, times=3)
        async with stage.controller():
            stage.job("a", level="rigid")
            (pod,) = await stage.has("a", 1)
            stage.api.ended(pod)
            assert (await stage.reaches("a", phase="Succeeded"))["failures"] == 0

    play(story)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (QUOTA, "resourcequotas"),
        (ApiError("the request is too large", status=413), "too large"),
        (Refused("exceeded quota", status=403), "exceeded quota"),
        (AttributeError("no such thing"), "no such thing"),
    ],
)
def test_whatever_is_answered_a_launch_ends(error: Exception, said: str) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        fail(stage, "create", error)
        async with stage.controller() as controller:
            stage.job("a", level="rigid", retries=0)
            assert said in (await stage.reaches("a", phase="Failed"))["message"]
            assert not controller.backend._live

    play(story)


def test_a_pod_whose_answer_was_lost_is_found_though_it_cannot_be_read_at_once() -> None:
    async def story(stage: Stage) -> None:
        async def lose(request: Request) -> None:
            if request[:2] == ("create", "pods"):
                stage.api.before.remove(lose)
                stage.api.put(PODS, request.body)
                raise Unreachable("the answer is lost")

        stage.node()
        stage.api.before.append(lose)
        unread = fail(stage, "get", Unreachable("away"), times=2)
        async with stage.controller():
            stage.job("a", level="rigid")
            (pod,) = await stage.has("a", 1)
            assert len(unread) == 2
            assert asked(stage, pod)[:5] == ["create", "create", "get", "get", "get"]
            assert asked(stage, pod)[5] == "bind"

    play(story)


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("containers[0].volumeMounts", {"containers": [{"name": "worker", "volumeMounts": {"name": "v"}}]}),
        ("containers[0].volumeMounts[0]", {"containers": [{"name": "worker", "volumeMounts": ["v"]}]}),
        ("initContainers[0].volumeMounts", {"initContainers": [{"name": "i", "volumeMounts": "v"}]}),
        ("volumes", {"volumes": {"name": "v"}}),
    ],
)
def test_mounts_of_the_wrong_shape_are_no_job(field: str, spec: Object) -> None:
    body = {
        "metadata": {"name": "a"},
        "spec": {"image": "i", "run": "x", "workers": {"min": 1, "max": 1}, "template": {"spec": spec}},
    }
    with pytest.raises(SpecError) as told:
        elastic_job.read(body, GPU_RESOURCE)
    assert [problem.field for problem in told.value.problems] == [f"spec.template.spec.{field}"]


# Groups.


@pytest.mark.parametrize(
    ("error", "said"),
    [(Invalid("no such volume", status=422), "no such volume"), (Refused("over quota"), "over quota")],
)
def test_a_group_whose_first_pod_is_refused_ends_for_that_reason(error: Exception, said: str) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        tried = fail(stage, "create", error)
        async with stage.controller() as controller:
            stage.job("g", 3, level="rigid", retries=0)
            told = await stage.reaches("g", phase="Failed")
            assert said in told["message"]
            assert told["failures"] == 0
            assert len(tried) == 1, "nobody but the first is tried"
            assert not controller.backend._live

    play(story)


def test_a_group_whose_first_member_fails_before_it_has_an_address_fails_for_its_reason() -> None:
    async def story(stage: Stage) -> None:
        async def fail_at_once(request: Request) -> None:
            if request[:2] == ("bind", "pods"):
                stage.api.ended(request.name, 3)
                raise ObjectConflict("it is bound")

        stage.node()
        stage.api.before.append(fail_at_once)
        async with stage.controller() as controller:
            news = overhear(controller)
            stage.job("g", 2, level="rigid", retries=3)
            told = await stage.reaches("g", phase="Failed")
            assert "exit code 3" in told["message"]
            assert told["failures"] == 0
            assert [(exit.how, exit.asked) for exit in news] == [("exited", False), ("lost", True)]

    play(story)


# What is told once.


def test_the_pod_of_a_lost_node_is_not_adopted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        async def linger(request: Request) -> None:
            if request[:2] == ("delete", "pods"):
                stage.api.change(PODS, request.name, {"metadata": {"deletionTimestamp": STAMP}})
                raise ObjectNotFound("as far as we are concerned")

        monkeypatch.setattr(backend, "_LEASE_S", 0.0)
        stage.node("n1", cpu="2")
        stage.api.before.append(linger)
        async with stage.controller():
            stage.job("g", 1, level="restart")
            (old,) = await stage.has("g", 1)
            stage.node("n2", cpu="2")
            stage.api.change(NODES, "n1", {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}})
            (new,) = set(await stage.has("g", 2)) - {old}
            await until(lambda: has_label(stage, old, pods.TOLD_LABEL))
        async with stage.controller() as controller:
            assert launches(controller) == [of(stage, new)["metadata"]["labels"][pods.LAUNCH_LABEL]]

    play(story)


def test_an_end_is_marked_as_told_as_soon_as_that_can_be_done() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        failed = fail(stage, "patch", Unreachable("away"), times=5)
        async with stage.controller():
            stage.job("g", level="restart")
            (old,) = await stage.has("g", 1)
            stage.api.ended(old, 137)
            await until(lambda: has_label(stage, old, pods.TOLD_LABEL))
            assert len(failed) == 5
            (new,) = set(await stage.has("g", 2)) - {old}
        async with stage.controller() as controller:
            assert launches(controller) == [of(stage, new)["metadata"]["labels"][pods.LAUNCH_LABEL]]

    play(story)


# Several containers.


def shown(phase: str, reason: str = "", leaving: bool = False, disrupted: bool = False, **states: Any) -> Pod:
    """A pod with these containers; `prep` and `proxy` are init containers, `proxy` one that goes on."""
    meta: Object = {"name": "a-w3-0a1b2c3d", "labels": {pods.LAUNCH_LABEL: "7.w3.0a1b2c3d"}}
    if leaving:
        meta |= {"deletionTimestamp": STAMP, "deletionGracePeriodSeconds": 30}
    told: Object = {"phase": phase, "reason": reason, "containerStatuses": [], "initContainerStatuses": []}
    if disrupted:
        told["conditions"] = [{"type": "DisruptionTarget", "status": "True"}]
    for name, state in states.items():
        where = "initContainerStatuses" if name in ("prep", "proxy") else "containerStatuses"
        told[where].append({"name": name, "state": state})
    before = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "prep"}]
    spec = {"containers": [{"name": "worker"}, {"name": "logs"}], "initContainers": before}
    return msgspec.convert({"metadata": meta, "spec": spec, "status": told}, Pod, strict=False)


DONE, RUNS = {"terminated": {"exitCode": 0}}, {"running": {}}
NEVER = {"waiting": {"reason": "PodInitializing"}}
NO_BUCKET = {"terminated": {"exitCode": 2, "reason": "Error", "message": "no such bucket\n"}}
UNSEEN = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}


@pytest.mark.parametrize(
    ("seen", "how"),
    [
        (shown("Running", worker=DONE, logs=RUNS), "exited"),
        (shown("Running", worker=RUNS, logs=DONE), None),
        (shown("Running", worker=DONE), None),
        (shown("Running", leaving=True, worker=DONE, logs=RUNS), None),
        (shown("Running", disrupted=True, worker=DONE, logs=RUNS), None),
        (shown("Failed", prep=NO_BUCKET, worker=NEVER), "exited"),
        (shown("Failed", prep=NO_BUCKET, worker=UNSEEN), "exited"),
        (shown("Failed", reason="Evicted", prep=NO_BUCKET, worker=NEVER), "lost"),
        (shown("Failed", proxy=UNSEEN, prep=DONE, worker=NEVER), "lost"),
        (shown("Failed", proxy=UNSEEN, prep=DONE, worker=DONE), "exited"),
    ],
)
def test_which_container_says_how_a_launch_has_ended(seen: Pod, how: str | None) -> None:
    told = pods.exit_of(seen, 1.0)
    assert (told.how if told is not None else None) == how


def test_a_job_ends_with_its_workers_whatever_runs_beside_them() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        beside = {"spec": {"containers": [{"name": "worker"}, {"name": "logs", "image": "l"}]}}
        async with stage.controller():
            stage.job("a", template=beside)
            (pod,) = await stage.has("a", 1)
            statuses = [{"name": "worker", "state": DONE}, {"name": "logs", "state": RUNS}]
            stage.api.change(PODS, pod, {"status": {"containerStatuses": statuses}})
            await stage.reaches("a", phase="Succeeded")
            await until(lambda: not stage.api.names(PODS, "a-"))
            assert asked(stage, pod)[-2:] == ["patch", "delete"], "what it was must be written down first"

    play(story)


def test_an_init_container_that_fails_says_so() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a")
            (pod,) = await stage.has("a", 1)
            first, then = [{"name": "prep", "state": NO_BUCKET}], [{"name": "worker", "state": NEVER}]
            told = {"phase": "Failed", "initContainerStatuses": first, "containerStatuses": then}
            stage.api.change(PODS, pod, {"status": told})
            ended = await stage.reaches("a", phase="Failed")
            assert ended["message"] == "w0 ended with exit code 2: its init container prep failed: no such bucket"
            assert ended["failures"] == 0

    play(story)


# Pods that nobody knows.


def test_a_pod_that_a_former_leader_still_makes_is_removed() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller() as controller:
            stage.job("a")
            (own,) = await stage.has("a", 1)
            controller.register.aside[NAMESPACE, "b"] = None
            late(stage, "b", "b-w0-y", **{pods.WORKER_LABEL: "w0", pods.LAUNCH_LABEL: "9.w0.y"})
            late(stage, "a", "a-w9-x", **{pods.WORKER_LABEL: "w9", pods.LAUNCH_LABEL: "1.w9.x"})
            await until(lambda: "a-w9-x" not in stage.api.names(PODS))
            assert stage.api.names(PODS) == [own, "b-w0-y"], "of a job that was put aside nobody can say"

    play(story)


def test_an_end_that_cannot_be_written_down_yet_keeps_its_pod() -> None:
    async def story(stage: Stage) -> None:
        async def refuse(request: Request) -> None:
            if request[:2] == ("patch", "elasticjobs"):
                raise Unreachable("away")

        stage.node()
        async with stage.controller() as controller:
            stage.job("a", template={"spec": {"containers": [{"name": "worker"}, {"name": "logs", "image": "l"}]}})
            (pod,) = await stage.has("a", 1)
            await stage.reaches("a", phase="Running")
            stage.api.before.append(refuse)
            statuses = [{"name": "worker", "state": DONE}, {"name": "logs", "state": RUNS}]
            stage.api.change(PODS, pod, {"status": {"containerStatuses": statuses}})
            await until(lambda: not controller.backend._live)
            late(stage, "a", "a-w9-x", **{pods.WORKER_LABEL: "w9", pods.LAUNCH_LABEL: "1.w9.x"})
            await until(lambda: "a-w9-x" not in stage.api.names(PODS))
            assert stage.api.names(PODS) == [pod]

    play(story)


def test_a_pod_with_some_of_our_labels_is_none_of_ours() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a")
            (own,) = await stage.has("a", 1)
        late(stage, "a", "copy", **{pods.LAUNCH_LABEL: "1.w0.x"})
        async with stage.controller() as controller:
            assert launches(controller) == [of(stage, own)["metadata"]["labels"][pods.LAUNCH_LABEL]]
            assert stage.api.names(PODS) == [own, "copy"]

    play(story)


def test_a_pod_is_deleted_by_one_request_at_a_time() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        failed = fail(stage, "delete", Unreachable("away"), times=10)
        async with stage.controller() as controller:
            stage.job("a", level="restart")
            (pod,) = await stage.has("a", 1)
            (launch,) = controller.backend._live
            before = len(controller.backend._tasks)
            controller.backend.terminate(launch)
            for _ in range(5):
                controller.backend.kill(launch)
            assert len(controller.backend._tasks) == before + 1
            await until(lambda: pod not in stage.api.names(PODS))
            assert len(failed) == 10
            assert asked(stage, pod).count("delete") == 11
            last = [request.body for request in stage.api.asked if request[:3] == ("delete", "pods", pod)][-1]
            assert last == {"grace_s": 1}, "who is in a hurry wins"

    play(story)
