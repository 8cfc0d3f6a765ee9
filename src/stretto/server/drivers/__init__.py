"""How jobs of each level are driven. This table is the one list of levels."""

from __future__ import annotations

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


def driver_for(active: Active, surroundings: Surroundings) -> Driver:
    """Somebody who drives this job, from wherever it is now."""
    return DRIVERS[active.job.level](active, surroundings)
