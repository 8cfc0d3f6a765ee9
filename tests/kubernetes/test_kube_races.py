"""What happens to a controller when objects come, change and go at the worst moment."""

from __future__ import annotations

import asyncio

from memory_api import NAMESPACE, Request, Stage, play, until

from stretto.kubernetes.kinds import ELASTIC_JOBS, PODS


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
