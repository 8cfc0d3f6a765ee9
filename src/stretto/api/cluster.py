"""Nodes, the policy, the forecast, and how it all stands."""

from __future__ import annotations

import math

from fastapi import APIRouter, Request, Response

import stretto
from stretto.api import answers, bodies
from stretto.api.describing import answers as documented
from stretto.api.describing import may_take, takes
from stretto.api.parts import Admin, Parts, Server, Viewer

router = APIRouter(tags=["cluster"])


@router.get("/v1/nodes", responses=documented("NodeList"))
async def list_nodes(server: Server, caller: Viewer) -> Response:
    """Nodes with their devices, and what is used by whom."""
    return answers.json(answers.List(answers.nodes(server.plane)))


@router.post("/v1/nodes/{node}/drain", responses=documented("Node"), openapi_extra=may_take("Drain"))
async def drain_node(request: Request, server: Server, caller: Admin, node: str) -> Response:
    """Leave a node. Jobs that would lose their work may end there, or stay for a while."""
    asked = await bodies.read_if_any(request, bodies.Drain)
    within_s = math.inf if asked.within_s is None else asked.within_s
    await server.plane.drain(node, True, caller.user, within_s=within_s)
    return _node(server, node)


@router.post("/v1/nodes/{node}/undrain", responses=documented("Node"))
async def undrain_node(server: Server, caller: Admin, node: str) -> Response:
    """Take a node into use again."""
    await server.plane.drain(node, False, caller.user)
    return _node(server, node)


@router.get("/v1/policy", responses=documented("Policy"))
async def show_policy(server: Server, caller: Viewer) -> Response:
    """The policy that decides."""
    return answers.json(server.plane.policy())


@router.put("/v1/policy", responses=documented("Policy"), openapi_extra=takes("SetPolicy"))
async def set_policy(request: Request, server: Server, caller: Admin) -> Response:
    """Let another policy decide from now on."""
    asked = await bodies.read(request, bodies.SetPolicy)
    bodies.plain(asked.name, "name")
    return answers.json(await server.plane.set_policy(asked.name, asked.options, asked.placement, caller.user))


@router.get("/v1/forecast", responses=documented("Forecast"))
async def forecast(server: Server, caller: Viewer) -> Response:
    """When queued jobs will start, and running ones end."""
    plane, now_s = server.plane, server.plane.clock()
    items = [answers.foreseen(plane, one, now_s) for one in await plane.forecast()]
    return answers.json(
        answers.ForecastAnswer(
            at_s=plane.told(now_s),
            policy=plane.policy().name,
            items=sorted(items, key=lambda item: item.job),
            text="as things are now, if nothing else comes",
        )
    )


@router.get("/v1/cluster", responses=documented("Cluster"))
async def show_cluster(server: Server, caller: Viewer) -> Response:
    """Totals, and the use of the devices over time."""
    plane, observed = server.plane, server.observed
    return answers.json(
        answers.ClusterAnswer(
            at_s=plane.told(plane.clock()),
            version=stretto.__version__,
            policy=plane.policy().name,
            devices=observed.devices,
            used=observed.used,
            nodes=len(plane.backend.nodes()),
            drained=len(plane.loop.rules.drained),
            jobs=observed.jobs,
            decisions=plane.loop.decisions,
            decision_s=plane.loop.decision_s,
            trouble=plane.ready,
            series=observed.series(),
        )
    )


def _node(server: Parts, name: str) -> Response:
    return answers.json(next(node for node in answers.nodes(server.plane) if node.name == name))
