"""What a stop would lose: work since a moment that was seen, not what a level promises.

- An *elastic* job whose script has joined loses nothing. One whose script never did is a plain program.
- A *restart* job loses what it did since its newest checkpoint (`Active.saved_s`, which its driver looks for), until
  it was seen to save when it is asked to end: from then on nothing.
- A *rigid* job loses all since its launch.
- A *service* is a matter of its load, and loses nothing.

What was seen is an event (`Kept`), so that the next server knows it, too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from stretto.jobs.model import Job
from stretto.server.book import Active

FORCED_S = 60.0
"""People who stop jobs that would lose more have to say that they mean it."""

_UNSEEN_START_S = 5.0
"""So long a script may need until it joins, as long as nobody knows better."""
_MOST_FILES = 10_000
_UNFINISHED = (".tmp", ".part", ".partial")


def since_s(active: Active, job: Job | None = None) -> float:
    """When the work began that would be lost by a stop now; inf: there is none. `job`: as it was before, say."""
    job = active.job if job is None else job
    if job.level == "service" or job.keeps or not job.workers:
        return math.inf
    launched_s = min(worker.launched_s for worker in job.workers)
    return max(launched_s, active.saved_s) if job.level == "restart" else launched_s


def lost_s(active: Active, now_s: float, job: Job | None = None) -> float:
    return max(0.0, now_s - since_s(active, job))


def fragile(job: Job) -> bool:
    """Whether its progress ends with its processes, as far as is known; also of one that still waits."""
    return job.level == "rigid" or (job.level == "restart" and not job.keeps)


def start_s(job: Job, usual_s: float) -> float:
    """What a start costs it: as measured, or as usual. Who has not joined yet may be about to."""
    if job.start_s:
        return job.start_s
    about_to = job.level == "elastic" and job.workers and not job.keeps
    return max(usual_s, _UNSEEN_START_S) if about_to else usual_s


def newest_s(folder: Path) -> float:
    """When the newest file in a folder of checkpoints was written; 0: there is none. Those that are being written and
    renamed afterwards do not count."""
    return max(_times(folder), default=0.0)


def _times(folder: Path) -> Iterator[float]:
    seen = 0
    for path, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > _MOST_FILES:
                return
            if name.endswith(_UNFINISHED) or name.startswith("."):
                continue
            try:
                yield os.stat(os.path.join(path, name)).st_mtime
            except OSError:
                # It was renamed or removed meanwhile.
                continue
