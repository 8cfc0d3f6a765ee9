"""The numbers of a controller for Prometheus; `docs/kubernetes.md` lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stretto.jobs.model import Phase
from stretto.kubernetes.controller import Controller

PHASES: tuple[Phase, ...] = ("queued", "running", "suspended")


def exposition(controller: Controller | None, leads: bool) -> tuple[bytes, str]:
    registry = CollectorRegistry()
    registry.register(_Numbers(controller, leads))
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _Numbers:
    """Taken when they are asked for."""

    def __init__(self, controller: Controller | None, leads: bool) -> None:
        self._controller, self._leads = controller, leads

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("stretto_controller_leader", "1 while this controller leads.", float(self._leads))
        controller = self._controller
        if controller is None:
            return
        phases = Counter(active.job.phase for active in controller.book)
        jobs = GaugeMetricFamily("stretto_jobs", "Jobs that have not ended, by phase.", labels=["phase"])
        for phase in PHASES:
            jobs.add_metric([phase], phases[phase])
        yield jobs
        workers = sum(len(active.job.workers) for active in controller.book)
        yield GaugeMetricFamily("stretto_workers", "Worker pods of all jobs.", workers)
        loop, backend = controller.loop, controller.backend
        yield CounterMetricFamily("stretto_decisions", "Decisions made.", loop.decisions)
        yield GaugeMetricFamily("stretto_decision_seconds", "How long the last decision took.", loop.decision_s)
        yield CounterMetricFamily("stretto_pods_created", "Worker pods made by this controller.", backend.launched)
        yield CounterMetricFamily("stretto_pods_bound", "Worker pods bound by this controller.", backend.bound)
        lost = CounterMetricFamily(
            "stretto_work_lost_seconds", "Work that jobs lost since this controller leads.", labels=["cause"]
        )
        for cause, lost_s in controller.lost_s.items():
            lost.add_metric([cause], lost_s)
        yield lost
        yield GaugeMetricFamily(
            "stretto_watch_stale_seconds", "Time since the API server was last heard of.", controller.cluster.stale_s()
        )
        claims = Counter(claim.how for claim in controller.cluster.room(anew=False).claims)
        foreign = GaugeMetricFamily(
            "stretto_foreign_pods_pending", "Pending pods of others that room is kept for.", labels=["how"]
        )
        for how in ("nominated", "fits", "giving-way"):
            foreign.add_metric([how], claims[how])
        yield foreign
