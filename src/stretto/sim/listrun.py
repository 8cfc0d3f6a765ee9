"""The incremental runner of list policies."""

from __future__ import annotations

from stretto.core.policy import Policy
from stretto.core.snapshot import Nodes
from stretto.sim.trace import Trace
from stretto.sim.world import Result, Settings


def applies(trace: Trace, pools: tuple[str, ...], policy: Policy, settings: Settings) -> bool:
    """Whether this world is simple enough for it."""
    return False


def run(
    trace: Trace, pools: tuple[str, ...], nodes: Nodes, policy: Policy, settings: Settings, progress: object
) -> Result:
    """Run the trace to its end."""
    raise NotImplementedError
