"""Which pod may run on which node, resources aside: taints, cordons, selectors, required node affinity, readiness.

Pure. The rules are kube-scheduler's. Pods that ask for the same are alike here: `signature` is what they ask, hashable,
and `Fitting` works each of them out once for all nodes, so that five hundred jobs of three sorts cost three passes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.kubernetes import quantities
from stretto.kubernetes.model import Amounts, Node, NodeSelectorTerm, PodSpec, Requirement, Taint, Toleration

BoolArray: TypeAlias = NDArray[np.bool_]

UNSCHEDULABLE = Taint(key="node.kubernetes.io/unschedulable", effect="NoSchedule")
_FORBIDDING = ("NoSchedule", "NoExecute")

NOT_READY = "were not ready"
CORDONED = "were unschedulable"
NO_MATCH = "did not match the node selector or affinity"


class Constraints(msgspec.Struct, frozen=True):
    """What a pod asks of its node besides resources."""

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[NodeSelectorTerm, ...] | None = None
    """Required node affinity: one of these must hold. None when there is none; no terms at all match nothing."""
    tolerations: tuple[Toleration, ...] = ()


ANYWHERE = Constraints()


def signature(spec: PodSpec) -> Constraints:
    """Equal for pods that may run on the same nodes."""
    affinity = spec.affinity and spec.affinity.node_affinity
    required = affinity.required if affinity else None
    return Constraints(
        selector=tuple(sorted(spec.node_selector.items())),
        terms=None if required is None else required.node_selector_terms,
        tolerations=spec.tolerations,
    )


def needs_kube_scheduler(spec: PodSpec) -> bool:
    """Whether placing it takes more than we know: volumes bound late, devices claimed, other pods' places, host ports.

    Such a pod is pinned to its node by affinity and left to kube-scheduler to bind.
    """
    return bool(
        spec.resource_claims
        or spec.topology_spread_constraints
        or (spec.affinity and (spec.affinity.pod_affinity or spec.affinity.pod_anti_affinity))
        or any(volume.persistent_volume_claim or volume.ephemeral is not None for volume in spec.volumes)
        or any(port.host_port for container in spec.containers for port in container.ports)
    )


def could_run(asked: Constraints, node: Node) -> str | None:
    """None when it could; else why not, as the end of a sentence about nodes."""
    if not node.is_ready:
        return NOT_READY
    if node.spec.unschedulable and not _is_tolerated(UNSCHEDULABLE, asked.tolerations):
        return CORDONED
    for taint in node.spec.taints:
        # A cordon is told as such: the server adds its taint to the mark.
        if taint.effect in _FORBIDDING and not _is_tolerated(taint, asked.tolerations):
            return f"had the taint {_text(taint)}"
    return None if matches(asked, node) else NO_MATCH


def matches(asked: Constraints, node: Node) -> bool:
    """Whether the node is one that the pod wants: selector and required affinity."""
    labels = node.labels
    if any(labels.get(key) != value for key, value in asked.selector):
        return False
    return asked.terms is None or any(_holds(term, node) for term in asked.terms)


class Fitting:
    """The nodes, and for every distinct set of constraints seen so far, which of them would do."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self._masks: dict[Constraints, BoolArray] = {}
        self._labels: dict[str, dict[str, list[int]]] = {}
        # Nodes differ in few ways as far as taints go: each way is looked at once.
        states: dict[tuple[bool, bool, tuple[Taint, ...]], int] = {}
        self._samples: list[Node] = []
        self._state = np.empty(len(self.nodes), np.intp)
        for place, node in enumerate(self.nodes):
            state = (node.is_ready, node.spec.unschedulable, node.spec.taints)
            if state not in states:
                states[state] = len(states)
                self._samples.append(node)
            self._state[place] = states[state]

    @cached_property
    def allocatable(self) -> tuple[Amounts, ...]:
        """What pods may use of each node."""
        return tuple(_offers(node) for node in self.nodes)

    def mask(self, asked: Constraints) -> BoolArray:
        """For each node whether it would do. Not to be written to."""
        known = self._masks.get(asked)
        if known is None:
            known = self._masks[asked] = self._worked_out(asked)
            known.flags.writeable = False
        return known

    def masks(self, asked: Sequence[Constraints]) -> BoolArray:
        """[pod, node]."""
        if not asked:
            return np.zeros((0, len(self.nodes)), np.bool_)
        return np.stack([self.mask(one) for one in asked])

    def why_not(self, asked: Constraints) -> str:
        """In one line, what keeps a pod from the nodes it cannot use; empty when it can use all."""
        reasons = Counter(reason for node in self.nodes if (reason := could_run(asked, node)) is not None)
        if not reasons:
            return "" if self.nodes else "there are no nodes"
        could = len(self.nodes) - reasons.total()
        told = ", ".join(
            f"{number} {reason}" for reason, number in sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
        )
        return f"{could}/{len(self.nodes)} nodes could run it: {told}"

    def _worked_out(self, asked: Constraints) -> BoolArray:
        bare = Constraints(tolerations=asked.tolerations)
        open_states = np.array([could_run(bare, sample) is None for sample in self._samples], np.bool_)
        mask: BoolArray = open_states[self._state] if self.nodes else np.zeros(0, np.bool_)
        for key, value in asked.selector:
            labelled = np.zeros_like(mask)
            labelled[self._with_label(key).get(value, [])] = True
            mask &= labelled
        if asked.terms is not None:
            for place in np.flatnonzero(mask):
                mask[place] = matches(asked, self.nodes[place])
        return mask

    def _with_label(self, key: str) -> dict[str, list[int]]:
        """Value → which nodes have it."""
        known = self._labels.get(key)
        if known is None:
            known = self._labels[key] = {}
            for place, node in enumerate(self.nodes):
                if key in node.labels:
                    known.setdefault(node.labels[key], []).append(place)
        return known


def _offers(node: Node) -> Amounts:
    """Nothing, where it says what cannot be understood."""
    try:
        return quantities.counted(node.allocatable)
    except ValueError:
        return {}


def _is_tolerated(taint: Taint, tolerations: Sequence[Toleration]) -> bool:
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    """An empty effect is every effect, an empty key with Exists every taint. Unknown operators tolerate nothing."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if toleration.operator == "Exists":
        return True
    return toleration.operator in ("Equal", "") and bool(toleration.key) and toleration.value == taint.value


def _holds(term: NodeSelectorTerm, node: Node) -> bool:
    """All of a term; a term that says nothing holds nowhere."""
    if not term.match_expressions and not term.match_fields:
        return False
    fields = {"metadata.name": node.name}
    return all(_meets(one, node.labels) for one in term.match_expressions) and all(
        _meets(one, fields) for one in term.match_fields
    )


def _meets(requirement: Requirement, labels: dict[str, str]) -> bool:
    value = labels.get(requirement.key)
    match requirement.operator:
        case "In":
            return value is not None and value in requirement.values
        case "NotIn":
            return value is None or value not in requirement.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            return value is not None and _compares(value, operator, requirement.values)
    return False


def _compares(value: str, operator: str, bounds: tuple[str, ...]) -> bool:
    try:
        left, (right,) = int(value), (int(bound) for bound in bounds)
    except ValueError:
        return False
    return left > right if operator == "Gt" else left < right


def _text(taint: Taint) -> str:
    return f"{taint.key}={taint.value}:{taint.effect}" if taint.value else f"{taint.key}:{taint.effect}"
