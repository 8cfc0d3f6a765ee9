"""From names and settings to figures: read the trace, find the policy, simulate, measure.

`--set key=value` reaches whoever knows the key: the policy's options, the trace reader's, and the world's. A key
that nobody knows is an error that lists all of them. The command line, the report and the experiments all
go through here, so a run means the same everywhere.
"""

from __future__ import annotations

import csv
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from stretto import plugins
from stretto.core import options, placement
from stretto.core.policy import Policy
from stretto.core.snapshot import Nodes
from stretto.errors import TraceError, UsageError, unknown
from stretto.sim import cluster as clusters
from stretto.sim import engine, levels, metrics, readers
from stretto.sim.metrics import Metrics
from stretto.sim.readers import NEVER
from stretto.sim.trace import Trace
from stretto.sim.world import Failure, Result, Settings

_HIDDEN = {"record"}
"""Settings of the world that a command turns on by itself."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation, ready to run."""

    trace: Trace
    pools: tuple[str, ...]
    nodes: Nodes
    policy: Policy
    settings: Settings

    @property
    def gpus(self) -> int:
        return int(self.nodes.devices.sum())

    @property
    def given(self) -> Trace:
        """The jobs with the throughputs of this cluster's device types."""
        return engine.on_pools(levels.settled(self.trace, self.settings), self.pools)

    @property
    def seen(self) -> Trace:
        """The jobs as the policy sees them."""
        return engine.seen_by(self.policy, levels.settled(self.trace, self.settings), self.pools)

    def recorded(self) -> Case:
        """The same, keeping every change so that it can be drawn."""
        return msgspec.structs.replace(self, settings=msgspec.structs.replace(self.settings, record=True))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A case that was run."""

    case: Case
    result: Result
    metrics: Metrics


def run(case: Case, progress: engine.Progress | None = None) -> Outcome:
    """Simulate and measure; the CPU time of both is part of the figures."""
    before = time.process_time()
    result = engine.simulate(case.trace, case.pools, case.nodes, case.policy, case.settings, progress)
    figures = metrics.measure(case.given, case.seen, case.nodes, result, case.settings.failures)
    figures = msgspec.structs.replace(
        figures, cpu_s=round(time.process_time() - before, 6), peak_rss_mib=round(peak_rss_mib(), 1)
    )
    return Outcome(case=case, result=result, metrics=figures)


def prepare(path: Path, format: str, cluster: str, policy: str, settings: Mapping[str, str]) -> Case:
    """Find and check everything that a run needs."""
    return prepare_all([path], format, cluster, [policy], settings)[0]


def prepare_all(
    paths: Sequence[Path], format: str, cluster: str, policies: Sequence[str], settings: Mapping[str, str]
) -> list[Case]:
    """Every trace under every policy. A setting must be known to the reader, the world or one of the policies."""
    check_known(settings, format, policies)
    pools, nodes = parse_cluster(cluster)
    world = parse_world(settings, nodes)
    found = [plugins.find(name, _of_policy(name, settings)) for name in policies]
    traces: dict[tuple[Path, bool], Trace] = {}
    cases = []
    for path in paths:
        for policy in found:
            adaptive = policy.traits.adapts_batch
            if (path, adaptive) not in traces:
                traces[path, adaptive] = _read(path, format, settings, adaptive)
            trace = traces[path, adaptive]
            cases.append(Case(trace=trace, pools=pools, nodes=nodes, policy=policy, settings=world))
    return cases


def read_trace(path: Path, format: str, settings: Mapping[str, str]) -> Trace:
    """A trace alone, for commands that run nothing."""
    for key in settings:
        if key not in readers.option_names(format):
            raise unknown(f"option of format {format}", key, readers.option_names(format))
    return readers.read(path, format, settings)


def parse_settings(pairs: Sequence[str]) -> dict[str, str]:
    """`key=value` words as a table."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"setting {pair!r} is not key=value", hint="for example --set resize_s=0.5")
        if key.strip() in settings:
            raise UsageError(f"setting {key.strip()!r} is given twice", hint="give it once")
        settings[key.strip()] = value.strip()
    return settings


def check_known(settings: Mapping[str, str], format: str, policies: Sequence[str]) -> None:
    """Raise for a key that neither policy, reader nor world knows, and list those they do."""
    known = {name for policy in policies for name in _options(policy)}
    known |= set(readers.option_names(format)) | set(world_names())
    for key in settings:
        if key not in known:
            raise unknown("setting", key, sorted(known))


def world_names() -> list[str]:
    """What `--set` may say to the world."""
    return [name for name in Settings.__struct_fields__ if name not in _HIDDEN]


def parse_world(settings: Mapping[str, str], nodes: Nodes) -> Settings:
    """The world's settings out of all settings, checked."""
    values: dict[str, Any] = {key: value for key, value in settings.items() if key in world_names()}
    if values.get("checkpoint_s") == NEVER:
        values["checkpoint_s"] = math.inf
    if "failures" in values:
        values["failures"] = _failures(values["failures"], len(nodes.name))
    world = options.read(Settings, values, "simulation", hint="docs/sim.md lists the settings of the simulated world")
    if world.placement:
        placement.load(world.placement)
    return world


def parse_cluster(text: str) -> tuple[tuple[str, ...], Nodes]:
    """`16x8` or a cluster file."""
    try:
        return clusters.parse(text)
    except (UnicodeDecodeError, csv.Error, OverflowError) as error:
        raise TraceError(f"cluster {text!r} cannot be read: {error}", hint="give NODESxGPUS or a CSV file") from None


def peak_rss_mib() -> float:
    """The largest memory this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _options(policy: str) -> tuple[str, ...]:
    return plugins.entry(policy).options.__struct_fields__


def _of_policy(policy: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in settings.items() if key in _options(policy)}


def _read(path: Path, format: str, settings: Mapping[str, str], adaptive: bool) -> Trace:
    names = readers.option_names(format)
    chosen = {key: value for key, value in settings.items() if key in names}
    if adaptive and "batch" in names:
        chosen.setdefault("batch", "adaptive")
    return readers.read(path, format, chosen)


def _failures(text: str, nodes: int) -> list[Failure]:
    """`100:0,500:0:up`: at 100 s node 0 fails, at 500 s it is back."""
    found = []
    for item in filter(None, text.split(",")):
        cells = item.split(":")
        try:
            failure = Failure(float(cells[0]), int(cells[1]), cells[2:] == ["up"])
            known = cells[2:] in ([], ["up"], ["down"]) and 0 <= failure.at_s < math.inf
        except (ValueError, IndexError):
            known = False
        if not known:
            raise UsageError(f"failures: {item!r} cannot be read", hint="give SECONDS:NODE or SECONDS:NODE:up")
        if not 0 <= failure.node < nodes:
            raise UsageError(f"failures: {item!r}: there is no node {failure.node}", hint=f"nodes are 0..{nodes - 1}")
        found.append(failure)
    return found
