"""A cluster as a site: what a policy is shown of it, and what is free there at this moment.

A worker counts as what its pod holds; one that is still to come, as its template and at least as those of its job that
are there: a template may have been changed since, and admission may make pods larger than it says.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import msgspec

from stretto.backends.protocol import Launch
from stretto.core.snapshot import GPU
from stretto.jobs import events as e
from stretto.jobs.model import Job, Worker
from stretto.kubernetes import capacity, fitting, pods, quantities
from stretto.kubernetes.cluster import Cluster, gpu_memory_mib, job_of
from stretto.kubernetes.drivers import driver_for
from stretto.kubernetes.ground import Ground
from stretto.kubernetes.landscape import landscape
from stretto.kubernetes.model import CPU, MEMORY, POD_COUNT, Amounts, Pod
from stretto.kubernetes.question import ClusterQuestion
from stretto.kubernetes.register import Entry, Register
from stretto.server import deciding, reconcile
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, Surroundings
from stretto.server.estimates import Estimates
from stretto.server.site import Question


class ClusterSite:
    def __init__(self, cluster: Cluster, register: Register, estimates: Estimates) -> None:
        self._cluster, self._register, self._estimates = cluster, register, estimates
        self._enlarged: dict[int, tuple[Amounts, Amounts]] = {}
        """By job: what its template asks for, and what a pod made from it holds if that is more."""
        cluster.on_worker(self._measure)

    def pools(self) -> tuple[str, ...]:
        return self._cluster.pools()

    # What a policy is shown.

    def ask(self, question: Question) -> Callable[[], deciding.Verdicts]:
        room, fit = self._cluster.room(), self._cluster.fitting()
        entries = {active.number: self._register[active.number] for active in question.jobs}
        needs = {number: self._needs(entry) for number, entry in entries.items()}
        jobs = [self._as_large(active, needs[active.number]) for active in question.jobs]
        memory_mib = [gpu_memory_mib(node) for node in fit.nodes]
        there = landscape(room, self._cluster.gpu_resource, self.pools(), self._cluster.types(), memory_mib)
        reach = {number: fit.mask(fitting.signature(entry.shape)) for number, entry in entries.items()}
        why_not = {
            number: fit.why_not(fitting.signature(entries[number].shape))
            for number, mask in reach.items()
            if not mask.any()
        }
        return ClusterQuestion(question, jobs, there, reach, needs, self._estimates, why_not).decide

    # What is free now.

    def floor(self, situations: Sequence[reconcile.Situation]) -> reconcile.Floor:
        held, where = self._cluster.held, self._cluster.worker_pods
        asks = functools.cache(lambda job: self._needs(self._register.get(job)))
        known = {worker.launch for s in situations for worker in s.workers}
        others = [(where[launch].spec.node_name, amounts) for launch, amounts in held.items() if launch not in known]
        return Ground(self._cluster.room(anew=False), situations, asks, held, others)

    # How large workers are.

    def _needs(self, entry: Entry | None) -> Amounts:
        """What a worker that is still to come takes of its node."""
        if entry is None:
            return {}
        needs = quantities.counted(entry.requests) | {POD_COUNT: 1}
        template, enlarged = self._enlarged.get(entry.number, ({}, {}))
        if enlarged and template == entry.requests:
            needs = capacity.larger(needs, enlarged)
        return capacity.larger(needs, self._cluster.largest(*entry.key))

    def _as_large(self, active: Active, needs: Amounts) -> Active:
        """As policies are to see it."""
        cpu, mib, milli = needs.get(CPU, 0), needs.get(MEMORY, 0), needs.get(self._cluster.gpu_resource, 0) * GPU
        asked = active.request
        if (cpu, mib, milli) == (asked.cpu_milli, asked.memory_mib, asked.width_milli):
            return active
        seen = copy.copy(active)
        seen.request = msgspec.structs.replace(asked, cpu_milli=cpu, memory_mib=mib, width_milli=milli)
        seen.row = None
        return seen

    def _measure(self, old: Pod | None, new: Pod | None) -> None:
        """A new pod that admission made larger than its template (a LimitRange, a webhook, a RuntimeClass): the next
        ones will be as large, also when this one has gone."""
        if old is not None or new is None or (entry := self._register.of(job_of(new))) is None:
            return
        held = self._cluster.held.get(pods.launch_of(new), {})
        template = entry.requests | {POD_COUNT: 1}
        if capacity.larger(template, held) == template:
            self._enlarged.pop(entry.number, None)
        elif self._enlarged.get(entry.number) != (entry.requests, held):
            living = {number: known for number, known in self._enlarged.items() if self._register.get(number)}
            self._enlarged = living | {entry.number: (entry.requests, held)}
            self._cluster.changed()

    # Drivers and launches.

    def preparation(self, active: Active, around: Surroundings) -> None:
        """Its journal was read with its object."""

    def driver(self, active: Active, around: Surroundings, prepared: object = None) -> Driver:
        return driver_for(active, around, self._register[active.number])

    def launch(self, active: Active, event: e.Launched, size: int, driver: Driver) -> Launch:
        """Command, folder and log are the template's and the cluster's business."""
        return Launch(
            id=event.launch,
            job=active.number,
            worker=event.worker,
            node=event.seat.node,
            command=(),
            cwd="",
            env=driver.environment(event.worker, event.seat, event.member, size),
            log="",
        )

    def identity(self, job: Job) -> None:
        """The boundary is the namespace: pods say themselves whose their processes are."""
        return

    def explanation(self, active: Active, worker: Worker) -> None:
        """Its pod has said already how its log ends."""
