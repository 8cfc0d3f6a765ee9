"""What is counted: everything that a worker takes, as its pod has it, whatever others write; and services that fail."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from memory_api import NAMESPACE, Request, Stage, play, until

from stretto.kubernetes import keeping, quantities, service_keeping
from stretto.kubernetes.capacity import Usage, room
from stretto.kubernetes.fitting import Fitting
from stretto.kubernetes.kinds import DEPLOYMENTS, ELASTIC_JOBS, NODES, PODS
from stretto.kubernetes.model import Node, Pod
from stretto.kubernetes.problems import ApiError, Invalid, Refused, Unreachable

FOO = "example.com/foo"


# Services.


def put_service(stage: Stage, name: str, **spec: Any) -> None:
    section = {"port": 8000, "replicas": {"min": 1, "max": 2}, "target": {"cpu": 50}}
    usual = {"image": "i", "run": "serve", "resources": {"gpu": 0}, "service": section}
    stage.api.put(ELASTIC_JOBS, {"metadata": {"name": name}, "spec": {**usual, **spec}})


def invalid_condition(told: dict[str, Any]) -> tuple[str, str]:
    found = next(one for one in told["conditions"] if one["type"] == "Invalid")
    return found["status"], found["message"]


@pytest.mark.parametrize(
    ("wrong", "right", "field"),
    [
        ({"env": {"PORT": "80"}}, {"env": None}, "spec.env.PORT"),
        ({"template": {"spec": {"restartPolicy": "Never"}}}, {"template": None}, "spec.template.spec.restartPolicy"),
    ],
)
def test_a_service_that_contradicts_itself_concerns_nobody_else(
    wrong: dict[str, Any], right: dict[str, Any], field: str
) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        put_service(stage, "bad", **wrong)
        for _ in range(2):
            async with stage.controller():
                told = await stage.reaches("bad", phase="Invalid", reason="Refused", observedGeneration=1)
                assert field in told["message"]
                assert invalid_condition(told) == ("True", told["message"])
        async with stage.controller():
            put_service(stage, "good")
            await stage.reaches("good", phase="Pending", reason="Service")
            stage.job("a")
            await stage.has("a", 1)
            assert stage.api.names(DEPLOYMENTS) == ["good"]
            stage.api.change(ELASTIC_JOBS, "bad", {"spec": right})
            told = await stage.reaches("bad", phase="Pending", reason="Service", observedGeneration=2)
            assert invalid_condition(told)[0] == "False"
            assert stage.api.names(DEPLOYMENTS) == ["bad", "good"]

    play(story)


@pytest.mark.parametrize("kind", ["deployments", "services", "horizontalpodautoscalers"])
@pytest.mark.parametrize("error", [Invalid("spec.selector: is immutable", status=422), Refused("no right", status=403)])
def test_what_the_server_refuses_of_a_service_is_told_until_it_does_not(
    kind: str, error: ApiError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: Request) -> None:
        if request[:2] == ("patch", kind):
            raise error

    async def story(stage: Stage) -> None:
        stage.node()
        stage.api.before.append(refuse)
        async with stage.controller():
            put_service(stage, "web")
            told = await stage.reaches("web", phase="Pending", reason="Refused")
            assert error.message in told["message"]
            stage.api.before.clear()
            told = await stage.reaches("web", phase="Pending", reason="Service")
            assert error.message not in str(told)

    monkeypatch.setattr(service_keeping, "_LOOK_S", 0.02)
    play(story)


def test_a_server_that_is_away_says_nothing_about_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        failed = 0

        async def fail(request: Request) -> None:
            nonlocal failed
            if request[:2] == ("patch", "deployments"):
                failed += 1
                raise Unreachable("no answer in time")

        stage.api.before.append(fail)
        async with stage.controller():
            put_service(stage, "web")
            await until(lambda: failed > 3)
            assert "phase" not in stage.api.status("web")
            stage.api.before.clear()
            await stage.reaches("web", reason="Service")

    monkeypatch.setattr(service_keeping, "_LOOK_S", 0.02)
    play(story)


def test_a_change_that_is_refused_stays_told_while_the_earlier_version_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        async with stage.controller():
            put_service(stage, "web")
            await stage.reaches("web", reason="Service")
            stage.api.change(ELASTIC_JOBS, "web", {"spec": {"service": {"port": 0}}})
            await stage.reaches("web", phase="Invalid", observedGeneration=2)
            seen = len(stage.api.asked)
            await until(lambda: sum(one.kind == "deployments" for one in stage.api.asked[seen:]) > 10)
            written = [one.body["status"] for one in stage.api.asked[seen:] if one[:2] == ("patch", "elasticjobs")]
            assert all(told["phase"] == "Invalid" for told in written)

    monkeypatch.setattr(service_keeping, "_LOOK_S", 0.02)
    monkeypatch.setattr(keeping, "_PATIENCE_S", 0.001)
    play(story)


# What others write.


@pytest.mark.parametrize("cpu", ["10e15", "9223372036854775807", "-4", "lots"])
def test_no_foreign_pod_stops_everybody(cpu: str) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        silly = {"containers": [{"name": "c", "resources": {"requests": {"cpu": cpu, FOO: cpu}}}]}
        stage.api.put(PODS, {"metadata": {"name": "before"}, "spec": silly, "status": {"phase": "Pending"}})
        async with stage.controller():
            stage.api.put(PODS, {"metadata": {"name": "while"}, "spec": silly, "status": {"phase": "Pending"}})
            stage.job("a", 1, 2)
            await stage.has("a", 2)

    play(story)


def test_sums_of_absurd_amounts_stay_whole() -> None:
    most = "9223372036854775807"
    ready = [{"type": "Ready", "status": "True"}]

    def node(name: str, **there: str) -> Node:
        return msgspec.convert(
            {"metadata": {"name": name}, "status": {"allocatable": there, "conditions": ready}}, Node
        )

    def pod(i: int, **status: Any) -> Pod:
        asks = [{"resources": {"requests": {"cpu": most, "memory": most, FOO: most}}}]
        return msgspec.convert(
            {"metadata": {"name": f"p{i}", "uid": f"p{i}"}, "spec": {"containers": asks}, "status": status}, Pod
        )

    usage = Usage(lambda pod: False)
    for i in range(3000):
        usage.change(None, pod(i, nominatedNodeName="huge"))
    nodes = [node("bad", cpu="-1", memory="1Gi"), node("huge", cpu=most, memory=most, pods=most), node("n", cpu="8")]
    found = room(Fitting(nodes), usage, now=datetime.now(UTC))
    assert found.cpu_milli.tolist() == [0, 0, 8000]
    assert found.free[1, :2].max() < -1000 * quantities.MOST_COUNTED


def test_a_node_with_absurd_amounts_is_a_node_like_others() -> None:
    async def story(stage: Stage) -> None:
        huge = "9223372036854775807"
        for name in ("n1", "n2"):
            stage.node(name, cpu=huge, memory=huge, pods=huge, **{"nvidia.com/gpu": huge})
            stage.api.change(NODES, name, {"metadata": {"labels": {"nvidia.com/gpu.memory": "9" * 40}}})
        async with stage.controller():
            stage.job("a", 1, 4)
            stage.job("b", 1, 4, resources={"gpu": 1})
            await stage.has("a", 4)
            await stage.has("b", 4)

    play(story)


# Resources that no policy sees.


def asking(cpu: str = "1", **more: str) -> dict[str, Any]:
    names = {"foo": FOO, "storage": "ephemeral-storage", "pages": "hugepages-2Mi"}
    requests = {"cpu": cpu} | {names[name]: amount for name, amount in more.items()}
    limits = {name: amount for name, amount in requests.items() if name not in ("cpu", "ephemeral-storage")}
    container = {"name": "worker", "resources": {"requests": requests, "limits": limits}}
    return {"resources": {"gpu": 0}, "template": {"spec": {"containers": [container]}}}


def on_nodes(stage: Stage, name: str) -> list[str]:
    return sorted(stage.api.objects["pods", NAMESPACE, pod]["spec"]["nodeName"] for pod in stage.api.names(PODS, name))


@pytest.mark.parametrize("more", [{"foo": "1"}, {"storage": "100Gi"}, {"pages": "4Mi", "cpu": "1"}])
def test_who_asks_for_what_no_node_has_holds_nothing(more: dict[str, str]) -> None:
    async def story(stage: Stage) -> None:
        stage.node(**{"ephemeral-storage": "150Gi", "hugepages-2Mi": "2Mi"})
        async with stage.controller():
            stage.job("a", 4, 8, **asking(**more))
            await stage.reaches("a", phase="Pending", reason="FitsNoNode")
            stage.job("b", 1, 8)
            await stage.has("b", 8)
            assert stage.api.names(PODS, "a-") == []

    play(story)


def test_a_job_goes_where_the_resource_is_and_has_no_more_of_it() -> None:
    async def story(stage: Stage) -> None:
        stage.node("n1")
        stage.node("n2", **{FOO: "2"})
        async with stage.controller():
            stage.job("a", 1, 8, **asking(foo="1"))
            await stage.has("a", 2)
            assert on_nodes(stage, "a-") == ["n2", "n2"]
            stage.job("b", 8, 14)
            await stage.has("b", 14)

    play(story)


def test_a_job_is_spread_as_the_resource_is() -> None:
    async def story(stage: Stage) -> None:
        for name, foo in (("n1", "1"), ("n2", "2"), ("n3", "1")):
            stage.node(name, **{FOO: foo})
        async with stage.controller():
            stage.job("a", 4, level="restart", **asking(foo="1"))
            await stage.has("a", 4)
            assert on_nodes(stage, "a-") == ["n1", "n2", "n2", "n3"]

    play(story)


def test_two_that_share_a_resource_do_not_wait_for_each_other() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="64", **{FOO: "6"})
        async with stage.controller():
            for name in ("a", "b"):
                stage.job(name, 4, 6, **asking(foo="1"))
            stage.job("c", 10, 60)
            await stage.has("a", 6)
            told = await stage.reaches("b", phase="Pending", reason="NoRoom")
            assert FOO in told["message"]
            await stage.has("c", 58)
            stage.api.remove(ELASTIC_JOBS, "a")
            await stage.has("b", 6)

    play(story)


def test_who_has_all_of_a_resource_leaves_others_their_minimum() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="64", **{FOO: "8"})
        async with stage.controller():
            stage.job("a", 1, 8, **asking(foo="1"))
            await stage.has("a", 8)
            stage.job("b", 2, 8, **asking(foo="1"))
            await stage.has("b", 2)
            await stage.has("a", 6)

    play(story)


def test_what_jobs_with_gpus_have_of_a_resource_is_not_there_for_those_without() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="64", **{FOO: "4", "nvidia.com/gpu": "8"})
        async with stage.controller() as controller:
            stage.job("a", 3, **{**asking(foo="1"), "resources": {"gpu": 1}})
            await stage.has("a", 3)
            stage.job("b", 1, 4, **asking(foo="1"))
            await stage.has("b", 1)
            assert [len(active.target) for active in controller.book] == [3, 1]

    play(story)


# Workers as large as their pods.


def test_a_smaller_template_frees_nothing_that_running_workers_hold() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="8")
        async with stage.controller() as controller:
            stage.job("a", 1, 8, resources={"gpu": 0, "cpu": "4"})
            await stage.has("a", 2)
            stage.api.change(ELASTIC_JOBS, "a", {"spec": {"resources": {"cpu": "1"}}})
            stage.job("b", 1)
            await stage.has("b", 1)
            assert await stage.has("a", 1)
            assert [len(active.target) for active in controller.book] == [1, 1]

    play(story)


def enlarge(stage: Stage, cpu: str) -> None:
    async def admit(request: Request) -> None:
        if request[:2] == ("create", "pods"):
            request.body["spec"]["containers"][0]["resources"]["requests"]["cpu"] = cpu

    stage.api.before.append(admit)


def test_workers_to_come_are_as_large_as_those_that_came() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="8")
        enlarge(stage, "3")
        async with stage.controller():
            stage.job("a", 1, level="elastic")
            await stage.has("a", 1)
            stage.api.change(ELASTIC_JOBS, "a", {"spec": {"workers": {"max": 8}}})
            await stage.has("a", 2)
            stage.api.before.clear()
            stage.job("b", 2)
            await stage.has("b", 2)
            assert len(stage.api.names(PODS, "a-")) == 2

    play(story)


def test_a_job_whose_pods_turn_out_too_large_is_not_tried_again_and_again() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="8")
        enlarge(stage, "4")
        async with stage.controller():
            stage.job("a", 3)
            told = await stage.reaches("a", phase="Pending", reason="FitsNoNode")
            assert "3 workers of 4 cores" in told["message"]
            await until(lambda: not stage.api.names(PODS, "a-"))
            stage.api.before.clear()
            stage.job("b", 1, 8)
            await stage.has("b", 8)
            made = [one for one in stage.api.asked if one[:2] == ("create", "pods") and one.name.startswith("a-")]
            assert 1 <= len(made) <= 3, "one shows how large they are; the others may be on their way by then"
            assert stage.api.names(PODS, "a-") == []

    play(story)


def test_the_policy_is_told_when_a_pod_turns_out_larger() -> None:
    async def story(stage: Stage) -> None:
        stage.node(cpu="8")
        enlarge(stage, "4")
        async with stage.controller() as controller:
            stage.job("a", 1, 8)
            await until(lambda: [len(active.target) for active in controller.book] == [2])
            await stage.has("a", 2)

    play(story)
