"""Asking a policy: its answer is checked before anybody uses it, and whatever it raises names it."""

from __future__ import annotations

from stretto.core import invariants
from stretto.core.decision import Decision, Memory
from stretto.core.policy import Policy, fail
from stretto.core.snapshot import Snapshot
from stretto.errors import MissingExtra, StrettoError


def ask(policy: Policy, view: Snapshot, memory: Memory, when: str = "") -> Decision:
    """Its decision, which may be carried out. `when` is added to what went wrong."""
    try:
        decision = policy.decide(view, memory)
        invariants.check(policy, view, decision)
    except StrettoError:
        raise
    except ModuleNotFoundError as error:
        hint = f"pip install {error.name}, or 'stretto[sim]' for all that our own policies use"
        raise MissingExtra(f"policy {policy.name!r} needs {error.name}", hint=hint) from error
    except Exception as error:
        raise fail(policy.name, f"raised {type(error).__name__}: {error}{when}") from error
    return decision
