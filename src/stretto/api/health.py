"""For machines that look after us: alive, ready, and numbers for Prometheus."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import stretto
from stretto.api import answers
from stretto.api.describing import answers as documented
from stretto.api.describing import text_answer
from stretto.api.parts import Parts, Server
from stretto.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/healthz", responses=documented("Health"))
async def healthz() -> Response:
    """Whether it is alive."""
    return answers.json(answers.HealthAnswer(status="alive", version=stretto.__version__))


@router.get("/readyz", responses=documented("Health"))
async def readyz(server: Server) -> Response:
    """Whether it takes jobs at this moment; a 503 says why not."""
    if trouble := await server.readiness.trouble():
        raise not_ready(trouble)
    troubled = len(server.plane.loop.troubles)
    return answers.json(answers.HealthAnswer(status="ready", version=stretto.__version__, troubled=troubled))


def not_ready(trouble: str) -> Unavailable:
    return Unavailable(trouble, hint="it may get well by itself; the server's log says more")


@router.get("/metrics", responses=text_answer("text/plain", "Prometheus' text format."))
async def metrics(request: Request, server: Server) -> Response:
    """Numbers for Prometheus; from elsewhere than this machine only with a token."""
    if not _on_loopback(request):
        await server.auth.caller(request, "viewer")
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


class Collector:
    """Looks when it is asked, so that nothing has to be kept up to date."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        plane, observed = self._parts.plane, self._parts.observed
        jobs = GaugeMetricFamily("stretto_jobs", "Jobs by phase.", labels=["phase"])
        for phase, count in observed.jobs.items():
            jobs.add_metric([phase], count)
        yield jobs
        events = CounterMetricFamily("stretto_events", "Events since the server started.", labels=["kind"])
        for kind, count in sorted(observed.events.items()):
            events.add_metric([kind], count)
        yield events
        lost = CounterMetricFamily(
            "stretto_work_lost_seconds", "Work that jobs lost since the server started.", labels=["cause"]
        )
        for cause, lost_s in observed.lost_s.items():
            lost.add_metric([cause], lost_s)
        yield lost
        drained = len(plane.loop.rules.drained)
        for name, text, value in (
            ("devices_total", "Devices of nodes that are in use.", observed.devices),
            ("devices_used", "Devices that workers have.", observed.used),
            ("nodes", "Nodes.", len(plane.backend.nodes())),
            ("nodes_drained", "Nodes that are drained.", drained),
            ("decision_seconds", "How long the last decision took.", plane.loop.decision_s),
            ("listeners", "Event streams that are open.", plane.listeners),
            ("ready", "1: jobs are taken.", not plane.ready),
        ):
            yield GaugeMetricFamily(f"stretto_{name}", text, value)
        for name, text, total in (
            ("decisions", "Decisions since the server started.", plane.loop.decisions),
            ("submits", "Submissions since the server started.", observed.events["submitted"]),
            ("store_transactions", "Commits since the server started.", plane.store.transactions),
        ):
            yield CounterMetricFamily(f"stretto_{name}", text, total)


def registry(parts: Parts) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(Collector(parts))
    ProcessCollector(registry=made)
    return made


def _on_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
