"""How jobs of each level are driven. This table is the one list of levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.jobs.model import Level
from stretto.server.book import Active
from stretto.server.drivers.base import Driver, Surroundings
from stretto.server.drivers.elastic import ElasticDriver
from stretto.server.drivers.group import GroupDriver
from stretto.server.drivers.service import ServiceDriver

DRIVERS: dict[Level, type[Driver]] = {
    "elastic": ElasticDriver,
    "restart": GroupDriver,
    "rigid": GroupDriver,
    "service": ServiceDriver,
}


def preparation(active: Active, surroundings: Surroundings) -> Callable[[], Any] | None:
    """What is to be done in a thread before; its result is what `driver_for` is given."""
    return DRIVERS[active.job.level].preparation(active, surroundings)


def driver_for(active: Active, surroundings: Surroundings, prepared: Any = None) -> Driver:
    """Somebody who drives this job, from wherever it is now."""
    kind = DRIVERS[active.job.level]
    return kind(active, surroundings) if prepared is None else kind(active, surroundings, prepared)  # type: ignore[call-arg]
