"""What a policy is, what it declares, and how one is found by name.

A policy is a pure function `(view, memory, options) -> Decision`, registered under a name:

    class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        quantum_s: float = 60.0

    @policy("round-robin", traits=Traits(preempts="any"), options=Options)
    def round_robin(view: Snapshot, memory: Memory, options: Options) -> Decision: ...

A policy that is an order of jobs, walked once, need not decide at all: it declares the order (`list_policy`).

`load(name, settings)` binds the options and gives a `Policy` with `decide(view, memory)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Literal, TypeVar

import msgspec

from stretto.core import listing, pools, services, steps
from stretto.core import options as declared
from stretto.core.decision import Decision, Memory
from stretto.core.listing import ListRule
from stretto.core.snapshot import Snapshot
from stretto.errors import PolicyError, unknown


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy promises; the contract suite checks what is declared."""

    work_conserving: bool = False
    """Afterwards no waiting job's minimum fits, and no running job would gain from the free slots."""
    preempts: Literal["never", "higher", "any"] = "any"
    """`higher`: a job is stopped only if jobs strictly ahead of it leave it no room."""
    starvation_free: bool = False
    """In simulation every job starts within a bound that does not depend on later arrivals."""
    elastic: bool = False
    """Gives min..max workers; otherwise 0 or exactly the requested number."""
    rounds: bool = False
    """Decides at its own times only (`wake_s`), not when something happens."""
    uses: frozenset[Literal["length", "curve", "deadline", "history", "priority"]] = frozenset()
    """What it must know of a job beyond its request."""
    pools: bool = False
    """Chooses device types itself; otherwise it sees one merged pool and `pools.assign` does."""
    hysteresis: bool = False
    """Resizes that cost more than they gain are dropped; otherwise they are made, as its authors had it."""
    sees_falls: bool = False
    """Is shown sizes at which a job is slower than on fewer workers, as its authors had it; others are not."""
    adapts_batch: bool = False
    """Chooses the batch size too, where the job allows it."""


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For policies without any."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy with its options bound."""

    name: str
    traits: Traits
    options: Any
    summary: str
    function: Callable[[Snapshot, Memory, Any], Decision]
    rule: ListRule | None = None
    """Set when the policy is a declared order; the simulator then runs it incrementally."""

    def decide(self, view: Snapshot, memory: Memory) -> Decision:
        """Answer for this snapshot. Pure: the same arguments give the same answer.

        Services are served first; the policy decides on training jobs and what room is left. Sizes that a job
        cannot have are brought down to the next one that it can.
        """
        if view.is_service.any():
            decision = services.first(view, lambda rest: self._train(rest, memory))
        else:
            decision = self._train(view, memory)
        return decision if view.step is None else steps.rounded(view, decision)

    def _train(self, view: Snapshot, memory: Memory) -> Decision:
        if len(view.pools) == 1 or self.traits.pools:
            return self.function(view, memory, self.options)
        decision = self.function(pools.merged(view), memory, self.options)
        return pools.assign(view, decision, view.min_workers if self.traits.elastic else decision.workers)


class Entry(msgspec.Struct, frozen=True):
    """A registration: what `@policy` was told, and the function."""

    name: str
    traits: Traits
    options: type[msgspec.Struct]
    function: Callable[[Snapshot, Memory, Any], Decision]
    rule: Callable[[Any], ListRule | None] | None


_registered: dict[str, Entry] = {}

F = TypeVar("F", bound=Callable[..., Decision])


def policy(
    name: str,
    *,
    traits: Traits,
    options: type[msgspec.Struct] = NoOptions,
    rule: Callable[[Any], ListRule | None] | None = None,
) -> Callable[[F], F]:
    """Register a function as the policy of that name."""

    def register(function: F) -> F:
        _registered[name] = Entry(name, traits, options, function, rule)
        return function

    return register


def list_policy(
    name: str, *, traits: Traits, options: type[msgspec.Struct] = NoOptions
) -> Callable[[Callable[[Any], ListRule]], Callable[[Any], ListRule]]:
    """Register a declaration as the policy of that name: its decisions follow from it (`listing.decide`)."""

    def register(rule: Callable[[Any], ListRule]) -> Callable[[Any], ListRule]:
        @wraps(rule)
        def function(view: Snapshot, memory: Memory, options: Any) -> Decision:
            return listing.decide(rule(options), view, memory)

        _registered[name] = Entry(name, traits, options, function, rule)
        return rule

    return register


def load(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The built-in or already registered policy of that name, with these options."""
    return bind(entry(name), settings or {})


def entry(name: str) -> Entry:
    """The registration of a built-in or already registered policy; loads its module on first use."""
    from stretto.core.policies import ALIASES, BUILTIN

    name = ALIASES.get(name, name)
    if name not in _registered and name in BUILTIN:
        importlib.import_module(BUILTIN[name])
    if name not in _registered:
        raise unknown("policy", name, sorted({*BUILTIN, *_registered}))
    return _registered[name]


def bind(of: Entry, settings: Mapping[str, Any]) -> Policy:
    """The registered policy with these options."""
    options = _bind(of, settings)
    return Policy(
        name=of.name,
        traits=of.traits,
        options=options,
        summary=(of.function.__doc__ or "").strip().split("\n")[0],
        function=of.function,
        rule=of.rule(options) if of.rule else None,
    )


@contextmanager
def apart() -> Iterator[dict[str, Entry]]:
    """Registrations made inside go to the caller instead of the table (built-in policies excepted)."""
    from stretto.core.policies import BUILTIN

    before, found = dict(_registered), dict[str, Entry]()
    try:
        yield found
    finally:
        for name, each in list(_registered.items()):
            if before.get(name) is not each and each.function.__module__ != BUILTIN.get(name):
                found[name] = _registered.pop(name)
        _registered.update({name: before[name] for name in found if name in before})


def _bind(entry: Entry, settings: Mapping[str, Any]) -> Any:
    return declared.read(entry.options, settings, f"policy {entry.name}", hint=f"defaults: {_defaults(entry.options)}")


def _defaults(of: type[msgspec.Struct]) -> str:
    """As they would be set."""
    try:
        usual = msgspec.to_builtins(of())
    except TypeError:
        return "none, every option must be given"
    texts = {name: ",".join(map(str, told)) if isinstance(told, list | tuple) else told for name, told in usual.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def fail(policy_name: str, message: str) -> PolicyError:
    """The error for a policy that broke its contract."""
    return PolicyError(
        f"policy {policy_name!r}: {message}",
        hint="the decision was not carried out; this is a defect of the policy, not of the trace",
    )
