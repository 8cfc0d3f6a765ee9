"""Resources that no snapshot shows are shared out by who may lose what: pinned jobs come before everybody else."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from strategies import fragile, job, view_of
from stretto.core import cycle
from stretto.core.cycle import CycleState, Settings
from stretto.core.policy import load
from stretto.core.request import JobRequest
from stretto.core.snapshot import Snapshot
from stretto.jobs.model import Context, Job
from stretto.kubernetes.capacity import Room
from stretto.kubernetes.landscape import Landscape
from stretto.kubernetes.question import ClusterQuestion, Hidden
from stretto.server.book import Active
from stretto.server.estimates import Estimates
from stretto.server.site import Question
from stretto.spec.model import JobFile

GPU, HCA = "nvidia.com/gpu", "rdma/hca"


def test_sizes_that_no_cluster_could_hold_are_not_looked_at() -> None:
    """What is decided takes longer than the square of the largest size."""
    file = JobFile.model_validate({"run": "true", "elastic": {"min": 1, "max": 100_000}, "resources": {"gpu": 1}})
    vast = Active(
        Job(number=1, name="vast", user="me", submitted_s=0.0, spec={}, context=Context(cwd="/"), level="elastic"),
        file,
        file.request(),
    )
    some = view_of([80], [PINNED]).nodes
    there = Landscape(("gpu",), some, Room(some.name, (GPU,), some.devices[:, None], some.devices[:, None], ()), GPU)
    question = Question(
        jobs=[vast], most={}, policy=load("elastic-fifo"), settings=Settings(), state=CycleState(),
        decide=cycle.decide, drained={}, now_s=100.0,
    )  # fmt: skip
    allowed = {1: np.ones(1, np.bool_)}
    asked = ClusterQuestion(question, [vast], there, allowed, {1: {GPU: 1}}, Estimates(), {})
    assert asked._view.rates.shape[2] == 82


def cluster(view: Snapshot, adapters: list[int]) -> tuple[Snapshot, Hidden]:
    """The same jobs on nodes with so many adapters; every worker needs one."""
    nodes = view.nodes
    room = np.column_stack([nodes.devices, adapters]).astype(np.int64)
    there = Landscape(view.pools, nodes, Room(nodes.name, (GPU, HCA), room, room, ()), GPU)
    requests = {
        number: JobRequest(name=str(number), klass="", min_workers=low, max_workers=high, requested=high)
        for number, low, high in zip(*(c.tolist() for c in (view.job, view.min_workers, view.max_workers)), strict=True)
    }
    reach = dict.fromkeys(requests, np.ones(len(nodes.name), np.bool_))
    return view, Hidden(requests, {number: {HCA: 1} for number in requests}, there, reach)


def placed(devices: list[int], jobs: list[dict[str, Any]], where: list[list[int]]) -> Snapshot:
    there = np.array(where, np.int64)
    view = msgspec.structs.replace(view_of(devices, jobs), placed=there, workers=there.sum(axis=1))
    return msgspec.structs.replace(view, pool=np.where(view.workers > 0, 0, -1))


PINNED = fragile(min_workers=1, max_workers=4, ran_s=100.0, start_s=1.0, remaining=1e6)
NEW = job(min_workers=1, max_workers=4, lost_s=0.0, fragile=False, remaining=1.0)


@pytest.mark.parametrize("policy", ["elastic-fifo", "elastic-srtf", "stretto", "afs-l"])
def test_a_pinned_job_keeps_what_an_equal_would_need(policy: str) -> None:
    view, fit = cluster(placed([8], [PINNED, NEW], [[4], [0]]), [4])
    outcome = cycle.decide(view, load(policy), CycleState(), Settings(placement="fewest-moves"), fit)
    assert outcome.workers.tolist() == [4, 0]


def test_a_pinned_job_stays_where_it_is_also_if_others_came_first() -> None:
    grown = job(min_workers=1, max_workers=6, lost_s=0.0, fragile=False, priority=5)
    view, fit = cluster(placed([8, 8], [grown, PINNED], [[0, 2], [2, 2]]), [4, 4])
    found = fit(view, np.array([[2, 4], [2, 2]]), np.zeros(2, np.int64))
    assert found.tolist() == [[2, 2], [2, 2]]
