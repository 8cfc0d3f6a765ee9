"""What happens to a controller when objects come, change and go at the worst moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from memory_api import NAMESPACE, PATIENCE_S, Request, Stage, play, until

from stretto.kubernetes import controller as controllers
from stretto.kubernetes import keeping, pods, worker_secrets
from stretto.kubernetes.controller import Anew, Controller
from stretto.kubernetes.kinds import ELASTIC_JOBS, PODS, SECRETS
from stretto.kubernetes.problems import ApiError, Invalid, Refused
from stretto.server import loop
from stretto.server.drivers.elastic import ElasticDriver


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (controllers, "_AGAIN_S", 0.02),
        (controllers, "_REVISIT_S", 0.05),
        (controllers, "_LONGEST_ADOPTION_S", 0.5),
        (keeping, "_AGAIN_S", 0.02),
        (worker_secrets, "_AGAIN_S", 0.02),
        (keeping, "_LONGEST_AGAIN_S", 0.02),
        (keeping, "_PATIENCE_S", 0.02),
    ):
        monkeypatch.setattr(module, name, value)


def refusing(verb: str, kind: str, name: str, error: ApiError) -> Callable[[Request], Awaitable[None]]:
    async def refuse(request: Request) -> None:
        if request[:3] == (verb, kind, name):
            raise error

    return refuse


def numbers(controller: Controller) -> dict[str, int]:
    return {active.job.name.partition("/")[2]: active.number for active in controller.book}


def test_a_job_runs_and_ends() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", 2, level="restart")
            for pod in await stage.has("a", 2):
                stage.api.ended(pod)
            await stage.reaches("a", phase="Succeeded")

    play(story)


def test_an_object_that_goes_while_it_is_taken_in_is_forgotten() -> None:
    async def story(stage: Stage) -> None:
        async def delete(request: Request) -> None:
            if request[:3] == ("patch", "elasticjobs", "a") and "number" in request.body.get("status", {}):
                stage.api.before.clear()
                stage.api.remove(ELASTIC_JOBS, "a")
                await asyncio.sleep(0.05)

        stage.node()
        stage.api.before.append(delete)
        async with stage.controller() as controller:
            stage.job("a")
            await until(lambda: not stage.api.before)
            await until(lambda: not controller._taking_in)
            stage.job("b")
            await stage.has("b", 1)
            await until(lambda: [active.job.name for active in controller.book] == [f"{NAMESPACE}/b"])
            assert stage.api.names(PODS, "a-") == []

    play(story)


def test_an_object_that_goes_while_it_is_adopted_is_forgotten() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            for name in ("a", "b"):
                stage.job(name, level="restart")
                await stage.has(name, 1)

        async def delete(request: Request) -> None:
            if request[:3] == ("patch", "elasticjobs", "b"):
                stage.api.before.clear()
                stage.api.remove(ELASTIC_JOBS, "a")
                for pod in stage.api.names(PODS, "a-"):
                    stage.api.remove(PODS, pod)
                await asyncio.sleep(0.05)

        stage.api.before.append(delete)
        async with stage.controller() as controller:
            await until(lambda: list(numbers(controller)) == ["b"])
            stage.job("c")
            await stage.has("c", 1)
            assert stage.api.names(PODS, "a-") == []

    play(story)


def test_one_that_has_another_ones_name_is_taken_in_when_that_has_gone() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller() as controller:
            stage.job("a", level="restart")
            (old,) = await stage.has("a", 1)
            stage.api.remove(ELASTIC_JOBS, "a")
            stage.job("a", level="restart")
            await until(lambda: numbers(controller) == {"a": 2})
            await until(lambda: stage.api.names(PODS, "a-") not in ([], [old]))

    play(story)


def test_pods_of_an_object_that_had_the_name_before_are_not_adopted() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", level="restart")
            (old,) = await stage.has("a", 1)
        stage.api.remove(ELASTIC_JOBS, "a")
        stage.api.change(PODS, old, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        stage.job("a", level="restart")
        async with stage.controller():
            await until(lambda: len(stage.api.names(PODS, "a-")) == 2)
            (new,) = set(stage.api.names(PODS, "a-")) - {old}
            await until(lambda: stage.api.objects["pods", NAMESPACE, new]["spec"].get("nodeName"))
            stage.api.ended(new)
            await stage.reaches("a", phase="Succeeded")

    play(story)


def test_a_secret_of_an_object_that_had_the_name_before_is_waited_for() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        name = pods.secret_name("a")
        async with stage.controller():
            stage.job("a", 1, 2)
            await stage.has("a", 2)
            before = stage.api.objects["secrets", NAMESPACE, name]["data"]
        stage.api.remove(ELASTIC_JOBS, "a")
        for pod in stage.api.names(PODS):
            stage.api.remove(PODS, pod)
        stage.job("a", 1, 2)
        async with stage.controller():
            asked = len(stage.api.asked)
            await until(lambda: ("get", "secrets", name, None) in stage.api.asked[asked + 1 :])
            assert stage.api.names(PODS) == []
            stage.api.remove(SECRETS, name)
            await stage.has("a", 2)
            assert stage.api.objects["secrets", NAMESPACE, name]["data"] != before

    play(story)


# Objects that cannot be adopted.


async def ends_anew(stage: Stage, mend: Callable[[], object]) -> None:
    """A controller puts one aside, leaves its pods alone, and begins again when it is mended."""
    async with stage.starting() as (controller, running):
        await until(controller.ready.is_set, running)
        assert list(controller.register.aside) == [(NAMESPACE, "bad")]
        stage.job("new")
        await stage.has("new", 1)
        assert len(stage.api.names(PODS, "bad-")) == 1
        mend()
        await asyncio.wait([running], timeout=PATIENCE_S)
        group = running.exception()
        assert isinstance(group, ExceptionGroup)
        assert group.subgroup(Anew) is not None
    async with stage.controller() as second:
        assert set(numbers(second)) == {"bad", "good", "new"}
        assert len(stage.api.names(PODS, "bad-")) == 1


async def two_run(stage: Stage, **spec: Any) -> None:
    stage.node()
    async with stage.controller():
        for name in ("bad", "good"):
            stage.job(name, **{"level": "elastic", **spec})
            await stage.has(name, 1)


def test_a_secret_without_a_token_concerns_its_job_alone() -> None:
    async def story(stage: Stage) -> None:
        await two_run(stage)
        name = pods.secret_name("bad")
        data = dict(stage.api.objects["secrets", NAMESPACE, name]["data"])
        stage.api.change(SECRETS, name, {"data": {pods.SECRET_KEY: None}})
        await ends_anew(stage, lambda: stage.api.change(SECRETS, name, {"data": data}))

    play(story)


def test_a_status_that_cannot_be_written_concerns_its_job_alone() -> None:
    async def story(stage: Stage) -> None:
        await two_run(stage)
        later = Invalid("a rule of later", status=422, reason="Invalid")
        stage.api.before.append(refusing("patch", "elasticjobs", "bad", later))
        await ends_anew(stage, stage.api.before.clear)

    play(story)


def test_a_job_that_was_made_invalid_while_nobody_led_keeps_its_pods() -> None:
    async def story(stage: Stage) -> None:
        def sized(low: int, high: int) -> object:
            return stage.api.change(ELASTIC_JOBS, "bad", {"spec": {"workers": {"min": low, "max": high}}})

        await two_run(stage)
        sized(5, 2)
        await ends_anew(stage, lambda: sized(1, 1))

    play(story)


def test_one_that_is_invalid_while_it_runs_says_so() -> None:
    async def story(stage: Stage) -> None:
        def invalid() -> str:
            told = {one["type"]: one["status"] for one in stage.api.status("a")["conditions"]}
            return str(told["Invalid"])

        stage.node()
        async with stage.controller():
            stage.job("a", 1, 2)
            await stage.has("a", 2)
            stage.api.change(ELASTIC_JOBS, "a", {"spec": {"workers": {"min": 5, "max": 2}}})
            await until(lambda: invalid() == "True")
            stage.api.change(ELASTIC_JOBS, "a", {"spec": {"workers": {"min": 1, "max": 1}}})
            await until(lambda: invalid() == "False")

    play(story)


def test_the_level_of_a_job_that_was_scaled_to_one_size_stays() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", 1, 4)
            await stage.has("a", 4)
            stage.api.change(ELASTIC_JOBS, "a", {"spec": {"workers": {"max": 1}}})
            await stage.has("a", 1)
        async with stage.controller() as controller:
            (active,) = controller.book
            assert (active.job.level, active.request.level) == ("elastic", "elastic")
            assert active.job.secret

    play(story)


def test_one_status_that_cannot_be_written_holds_nobody_else_up() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("stuck", level="restart")
            (pod,) = await stage.has("stuck", 1)
            no = Refused("no", status=403, reason="Forbidden")
            stage.api.before.append(refusing("patch", "elasticjobs", "stuck", no))
            stage.api.ended(pod)
            stage.job("other", level="restart")
            (pod,) = await stage.has("other", 1)
            stage.api.ended(pod)
            await stage.reaches("other", phase="Succeeded")
            stage.api.before.clear()
            await stage.reaches("stuck", phase="Succeeded")

    play(story)


def test_a_job_that_has_ended_is_not_asked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller() as controller:
            stage.job("a", level="restart")
            (pod,) = await stage.has("a", 1)
            monkeypatch.setattr(controller.cluster.jobs, "_apply", lambda event: None)
            stage.api.ended(pod)
            await stage.reaches("a", phase="Succeeded")
            before = len(stage.api.asked)
            await asyncio.sleep(10 * controllers._AGAIN_S)
            assert len(stage.api.asked) - before <= 10 * 4, "the watch is behind, and asking does not help"

    play(story)


def test_a_group_that_lost_a_member_while_nobody_led_begins_again() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", 3, level="restart")
            before = await stage.has("a", 3)
            await stage.reaches("a", workers=3)
        stage.api.remove(PODS, before[1])
        async with stage.controller():
            await until(lambda: not set(stage.api.names(PODS, "a-")) & set(before))
            await stage.has("a", 3)
            assert stage.api.status("a")["failures"] == 0

    play(story)


def test_an_end_that_is_in_the_status_is_not_told_twice() -> None:
    """The controller died before it had marked the pod."""

    async def story(stage: Stage) -> None:
        async def refuse(request: Request) -> None:
            if request[:2] == ("patch", "pods"):
                raise Refused("no", status=403, reason="Forbidden")

        stage.node()
        async with stage.controller():
            stage.job("a", level="restart", retries=5)
            (first,) = await stage.has("a", 1)
            stage.api.before.append(refuse)
            stage.api.change(PODS, first, {"status": {"phase": "Failed", "reason": "NodeLost"}})
            await stage.reaches("a", failures=1)
            await until(lambda: len(stage.api.names(PODS, "a-")) == 2)
            await stage.reaches("a", workers=1)
        stage.api.before.clear()
        async with stage.controller() as controller:
            (active,) = controller.book
            assert (active.job.failures, [worker.name for worker in active.job.workers]) == (1, ["w1"])
            assert stage.api.status("a")["failures"] == 1

    play(story)


def test_an_elastic_job_that_cannot_grow_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_BACK_OFF_S", 0.01)
    monkeypatch.setattr(
        ElasticDriver,
        "joined",
        property(lambda self: frozenset(one.name for one in self.active.job.workers if one.pid)),
    )

    async def story(stage: Stage) -> None:
        async def refuse(request: Request) -> None:
            if request[:2] == ("create", "pods") and len(stage.api.names(PODS)) >= 2:
                raise Refused("exceeded quota", status=403, reason="Forbidden")

        stage.node()
        stage.api.before.append(refuse)
        async with stage.controller():
            stage.job("a", 1, 8, retries=1)
            told = await stage.reaches("a", failures=4)
            assert told["phase"] == "Running"
            assert len(stage.api.names(PODS, "a-")) == 2

    play(story)


def test_what_takes_several_workers_at_once_is_one_fault() -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", 1, 8, retries=1)
            before = await stage.has("a", 8)
            for pod in before:
                stage.api.change(PODS, pod, {"status": {"phase": "Failed", "reason": "NodeLost"}})
            await stage.reaches("a", failures=1)
            await until(lambda: len(set(stage.api.names(PODS, "a-")) - set(before)) == 8)
            assert stage.api.status("a")["phase"] in ("Pending", "Running")

    play(story)


@pytest.mark.parametrize("reason", ["Terminated", "NodeShutdown", "Preempting"])
def test_who_is_sent_away_by_its_node_is_not_at_fault(reason: str) -> None:
    async def story(stage: Stage) -> None:
        stage.node()
        async with stage.controller():
            stage.job("a", level="restart", retries=0)
            (first,) = await stage.has("a", 1)
            stage.api.change(PODS, first, {"status": {"phase": "Failed", "reason": reason}})
            await until(lambda: len(stage.api.names(PODS, "a-")) == 2)
            assert stage.api.status("a")["failures"] == 0

    play(story)
