"""What a stop would lose: work since a moment that was seen, not what a level promises.

- An *elastic* job whose script has joined loses nothing. One whose script never did is a plain program.
- A *restart* job loses what it did since its newest checkpoint (`Active.saved_s`, see `saves`), until
  it was seen to save when it is asked to end: from then on nothing.
- A *rigid* job loses all since it began.
- Who has no process yet has nothing to lose.
- A *service* is a matter of its load, and loses nothing.

What was seen is an event (`Kept`), so that the next server knows it, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from stretto.core.snapshot import LOST_STARTS
from stretto.jobs.model import Job, Worker
from stretto.server.book import Active

FORCED_S = 60.0
"""People who stop jobs that would lose more have to say that they mean it."""

_UNSEEN_START_S = 5.0
"""So long a script may need until it joins, as long as nobody knows better."""


def since_s(active: Active, job: Job | None = None) -> float:
    """When the work began that would be lost by a stop now; inf: there is none. `job`: as it was before, say."""
    job = active.job if job is None else job
    if job.level == "service" or job.keeps or not job.workers:
        return math.inf
    first_s = began_s(job.workers)
    return max(first_s, active.saved_s) if job.level == "restart" else first_s


def lost_s(active: Active, now_s: float, job: Job | None = None) -> float:
    return max(0.0, now_s - since_s(active, job))


def began_s(workers: Iterable[Worker]) -> float:
    """When the first of them got its process; inf: none has one. How long its launch took is no work."""
    return min((worker.began_s or worker.launched_s for worker in workers if worker.pid), default=math.inf)


def parted_s(job: Job, leavers: Collection[str], now_s: float) -> float:
    """Work that ends with these workers though others go on or take their place: of an elastic job whose script has
    never joined each is a program of its own. What a start may take until it joins is no work yet."""
    if not unproven(job):
        return 0.0
    spent_s = now_s - began_s(worker for worker in job.workers if worker.name in leavers)
    return spent_s if spent_s > weighed_s(job) else 0.0


def weighed_s(job: Job, usual_s: float = 0.0) -> float:
    """Up to so much time since its launch is weighed like its start."""
    return LOST_STARTS * start_s(job, usual_s)


def fragile(job: Job) -> bool:
    """Whether its progress ends with its processes, as far as is known; also of one that still waits."""
    return job.level == "rigid" or (job.level == "restart" and not job.keeps)


def unproven(job: Job) -> bool:
    """Whether its script is said to take part but was never seen to: nobody knows yet what a stop would cost it."""
    return job.level == "elastic" and not job.keeps


def start_s(job: Job, usual_s: float) -> float:
    """What a start costs it: as measured, or as usual. Who has not joined yet may be about to."""
    if job.start_s:
        return job.start_s
    about_to = job.level == "elastic" and job.workers and not job.keeps
    return max(usual_s, _UNSEEN_START_S) if about_to else usual_s
