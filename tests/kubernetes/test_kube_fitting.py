"""Which pod may run on which node: kube-scheduler's rules one by one, and the fast way against the slow one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.kubernetes.fitting import (
    ANYWHERE,
    CORDONED,
    NO_MATCH,
    NOT_READY,
    Constraints,
    Fitting,
    could_run,
    needs_kube_scheduler,
    signature,
)
from stretto.kubernetes.model import Node, PodSpec


def node(name: str = "n", ready: bool = True, cordoned: bool = False, **given: Any) -> Node:
    """`labels` and `taints` as the API has them."""
    return msgspec.convert(
        {
            "metadata": {"name": name, "labels": given.get("labels", {})},
            "spec": {"unschedulable": cordoned, "taints": given.get("taints", [])},
            "status": {"conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]},
        },
        Node,
    )


def asking(**spec: Any) -> Constraints:
    return signature(msgspec.convert(spec, PodSpec))


def required(*terms: dict[str, Any]) -> dict[str, Any]:
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}}


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


def test_a_plain_pod_runs_on_a_plain_node_that_is_ready() -> None:
    assert could_run(ANYWHERE, node()) is None
    assert could_run(ANYWHERE, node(ready=False)) == NOT_READY


def test_a_node_without_a_ready_condition_is_not_ready() -> None:
    assert could_run(ANYWHERE, msgspec.convert({"metadata": {"name": "new"}}, Node)) == NOT_READY


@pytest.mark.parametrize(
    ("toleration", "runs"),
    [
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists"}, True),
        ({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_a_cordon_keeps_out_who_does_not_tolerate_it(toleration: dict[str, str], runs: bool) -> None:
    asked = asking(tolerations=[toleration])
    assert could_run(ANYWHERE, node(cordoned=True)) == CORDONED
    assert could_run(asked, node(cordoned=True)) == (None if runs else CORDONED)


TAINT = {"key": "gpu", "value": "a100", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("toleration", "runs"),
    [
        ({"key": "gpu", "value": "a100"}, True),
        ({"key": "gpu", "operator": "Equal", "value": "a100", "effect": "NoSchedule"}, True),
        ({"key": "gpu", "operator": "Exists"}, True),
        ({"operator": "Exists"}, True),
        ({"operator": "Exists", "effect": "NoSchedule"}, True),
        ({"operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "gpu", "value": "h100"}, False),
        ({"key": "gpu", "value": ""}, False),
        ({"value": "a100"}, False),
        ({"key": "gp", "operator": "Exists"}, False),
        ({"key": "gpu", "operator": "Around", "value": "a100"}, False),
    ],
)
def test_a_taint_keeps_out_who_does_not_tolerate_it(toleration: dict[str, str], runs: bool) -> None:
    refusal = could_run(asking(tolerations=[toleration]), node(taints=[TAINT]))
    assert refusal == (None if runs else "had the taint gpu=a100:NoSchedule")


def test_every_taint_must_be_tolerated_and_a_preference_is_none() -> None:
    both = [TAINT, {"key": "spot", "effect": "NoExecute"}]
    asked = asking(tolerations=[{"key": "gpu", "operator": "Exists"}])
    assert could_run(asked, node(taints=both)) == "had the taint spot:NoExecute"
    assert could_run(ANYWHERE, node(taints=[{"key": "slow", "effect": "PreferNoSchedule"}])) is None


def test_the_selector_must_match_in_full() -> None:
    asked = asking(nodeSelector={"zone": "a", "disk": "ssd"})
    assert could_run(asked, node(labels={"zone": "a", "disk": "ssd", "more": "1"})) is None
    assert could_run(asked, node(labels={"zone": "a"})) == NO_MATCH
    assert could_run(asked, node(labels={"zone": "b", "disk": "ssd"})) == NO_MATCH


@pytest.mark.parametrize(
    ("operator", "values", "label", "runs"),
    [
        ("In", ["a", "b"], "b", True),
        ("In", ["a", "b"], "c", False),
        ("In", ["a"], None, False),
        ("NotIn", ["a"], "b", True),
        ("NotIn", ["a"], "a", False),
        ("NotIn", ["a"], None, True),
        ("Exists", [], "", True),
        ("Exists", [], None, False),
        ("DoesNotExist", [], None, True),
        ("DoesNotExist", [], "x", False),
        ("Gt", ["8"], "9", True),
        ("Gt", ["8"], "8", False),
        ("Gt", ["8"], "many", False),
        ("Gt", ["8"], None, False),
        ("Gt", [], "9", False),
        ("Lt", ["8"], "-7", True),
        ("Lt", ["8"], "10", False),
        ("Like", ["a"], "a", False),
    ],
)
def test_every_operator_of_node_affinity(operator: str, values: list[str], label: str | None, runs: bool) -> None:
    asked = asking(affinity=required(expression("k", operator, *values)))
    labels = {} if label is None else {"k": label}
    assert (could_run(asked, node(labels=labels)) is None) is runs


def test_terms_are_alternatives_and_what_a_term_says_must_all_hold() -> None:
    both = {
        "matchExpressions": [
            *expression("a", "Exists")["matchExpressions"],
            *expression("b", "Exists")["matchExpressions"],
        ]
    }
    asked = asking(affinity=required(both, expression("c", "Exists")))
    assert could_run(asked, node(labels={"c": ""})) is None
    assert could_run(asked, node(labels={"a": "", "b": ""})) is None
    assert could_run(asked, node(labels={"a": ""})) == NO_MATCH


def test_a_term_that_says_nothing_matches_nothing() -> None:
    assert could_run(asking(affinity=required({})), node()) == NO_MATCH
    assert could_run(asking(affinity=required()), node()) == NO_MATCH


def test_a_daemon_is_tied_to_one_node_by_its_name() -> None:
    field = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}
    asked = asking(affinity=required(field))
    assert [could_run(asked, node(name)) for name in ("n1", "n2")] == [NO_MATCH, None]


def test_pods_that_ask_for_the_same_are_alike_whatever_else_they_are() -> None:
    one = asking(nodeSelector={"a": "1", "b": "2"}, priority=3, containers=[{"name": "x"}])
    other = asking(nodeSelector={"b": "2", "a": "1"}, priority=4)
    assert one == other
    assert hash(one) == hash(other)
    assert one != asking(nodeSelector={"a": "1"})


@pytest.mark.parametrize(
    "spec",
    [
        {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]},
        {"volumes": [{"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}]},
        {"resourceClaims": [{"name": "gpu"}]},
        {
            "affinity": {
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone"}]}
            }
        },
        {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1}]}}},
        {"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone"}]},
        {"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]},
    ],
)
def test_what_we_cannot_place_by_ourselves(spec: dict[str, Any]) -> None:
    assert needs_kube_scheduler(msgspec.convert(spec, PodSpec))


def test_an_ordinary_pod_is_placed_by_us() -> None:
    spec = {
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "configMap": {"name": "c"}}],
        "affinity": required(expression("zone", "Exists")),
        "containers": [{"name": "c", "ports": [{"containerPort": 80}]}],
    }
    assert not needs_kube_scheduler(msgspec.convert(spec, PodSpec))


def test_the_summary_counts_the_reasons() -> None:
    nodes = [
        node("a"),
        node("b", labels={"zone": "x"}),
        node("c", taints=[TAINT]),
        node("d", taints=[TAINT]),
        node("e", ready=False),
    ]
    asked = asking(nodeSelector={"zone": "y"})
    assert Fitting(nodes).why_not(asked) == (
        "0/5 nodes could run it: 2 did not match the node selector or affinity, "
        "2 had the taint gpu=a100:NoSchedule, 1 were not ready"
    )
    assert Fitting(nodes[:2]).why_not(ANYWHERE) == ""
    assert Fitting([]).why_not(ANYWHERE) == "there are no nodes"


KEYS = st.sampled_from(["k", "l"])
VALUES = st.sampled_from(["", "1", "2"])
EFFECTS = st.sampled_from(["NoSchedule", "NoExecute", "PreferNoSchedule"])
REQUIREMENTS = st.fixed_dictionaries(
    {
        "key": KEYS,
        "operator": st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]),
        "values": st.lists(VALUES, max_size=2),
    }
)
ASKED = st.builds(
    asking,
    nodeSelector=st.dictionaries(KEYS, VALUES, max_size=1),
    tolerations=st.lists(
        st.fixed_dictionaries(
            {
                "key": st.sampled_from(["", "k", "node.kubernetes.io/unschedulable"]),
                "operator": st.sampled_from(["Exists", "Equal"]),
                "value": VALUES,
                "effect": st.sampled_from(["", "NoSchedule", "NoExecute"]),
            }
        ),
        max_size=2,
    ),
    affinity=st.one_of(
        st.none(),
        st.lists(st.fixed_dictionaries({"matchExpressions": st.lists(REQUIREMENTS, max_size=2)}), max_size=2).map(
            lambda terms: required(*terms)
        ),
    ),
)
NODES = st.lists(
    st.builds(
        node,
        ready=st.booleans(),
        cordoned=st.booleans(),
        labels=st.dictionaries(KEYS, VALUES, max_size=2),
        taints=st.lists(st.fixed_dictionaries({"key": KEYS, "value": VALUES, "effect": EFFECTS}), max_size=2),
    ),
    max_size=8,
)


@given(nodes=NODES, asked=st.lists(ASKED, max_size=5))
def test_the_masks_say_what_one_question_after_the_other_would(nodes: list[Node], asked: list[Constraints]) -> None:
    masks = Fitting(nodes).masks(asked)
    assert masks.tolist() == [[could_run(one, place) is None for place in nodes] for one in asked]
