"""What one job asks for, in the units of the core. The job file turns into this; the loop turns it into columns."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from stretto.core.snapshot import GPU

POWERS_OF_TWO = 0
"""A `step` of this: sizes double."""


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes, resources per worker and wishes. Names are those of the snapshot's columns where there is one."""

    name: str
    klass: str
    """Jobs with the same class are expected to behave alike: estimates are shared."""
    queue: str = "default"
    priority: int = 0
    requested: int = 1
    min_workers: int = 1
    max_workers: int = 1
    step: int = 1
    """Workers come in minimum + multiples of this; `POWERS_OF_TWO`: the minimum and powers of two."""
    explore: bool = False
    """Its speed at other sizes may be tried while it runs."""
    width_milli: int = GPU
    """Milli-GPU per worker."""
    cpu_milli: int = 0
    memory_mib: int = 0
    gpu_memory_mib: int = 0
    """GPU memory per worker, over all its devices."""
    fixed_milli: int = 0
    """Milli-GPU of fixed roles."""
    pools: tuple[str, ...] = ()
    """Device types it can use; empty: any."""
    deadline_s: float = math.inf
    """Seconds after submission."""
    level: Literal["elastic", "restart", "rigid"] = "rigid"
    is_service: bool = False
    hyperparameters: tuple[tuple[str, float | str], ...] = ()
    """What its length depends on, by name."""
    expect_s: float = 0.0
    """The user's hint: seconds on the workers requested. 0: none."""
    expect_steps: int = 0
    """The user's hint: steps. 0: none."""
    preemptible: bool = True
    """Whether more urgent jobs may stop it."""

    @property
    def demand(self) -> tuple[int, int, int]:
        """CPU milli, memory MiB and GPU memory MiB per worker, as the snapshot has them."""
        return self.cpu_milli, self.memory_mib, self.gpu_memory_mib

    def sizes(self) -> tuple[int, ...]:
        """The numbers of workers it may run with."""
        if self.step == POWERS_OF_TWO:
            powers = {
                2**k for k in range(self.max_workers.bit_length()) if self.min_workers <= 2**k <= self.max_workers
            }
            return tuple(sorted(powers | {self.min_workers}))
        return tuple(range(self.min_workers, self.max_workers + 1, self.step))

    def share_milli(self, device_mib: int) -> int:
        """Milli-GPU to count for a worker that asked for GPU memory alone, on devices of this size."""
        if self.width_milli or not self.gpu_memory_mib:
            return self.width_milli
        return min(GPU, -(-self.gpu_memory_mib * GPU // max(device_mib, 1)))
