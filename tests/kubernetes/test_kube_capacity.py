"""What our workers may use: the rules one by one, and the arithmetic against an obviously right version of it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.kubernetes.capacity import Claim, Room, Usage, room
from stretto.kubernetes.fitting import Fitting, could_run, signature
from stretto.kubernetes.model import Node, Pod

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
GPU = "nvidia.com/gpu"
SHORT = {"gpu": GPU, "cpu": "cpu", "memory": "memory", "fpga": "example.com/fpga"}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}


def node(name: str, **has: Any) -> Node:
    there = {"cpu": "100", "memory": "100Gi", "pods": "100"} | {SHORT.get(k, k): str(v) for k, v in has.items()}
    return msgspec.convert(
        {
            "metadata": {"name": name, "labels": {"host": name}},
            "status": {"allocatable": there, "conditions": [{"type": "Ready", "status": "True"}]},
        },
        Node,
    )


def pod(
    name: str,
    on: str = "",
    *,
    ours: bool = False,
    leaving: bool = False,
    age_s: float = 60,
    spec: dict[str, Any] | None = None,
    status: dict[str, Any] | None = None,
    **asks: Any,
) -> Pod:
    requests = {SHORT.get(key, key): str(value) for key, value in asks.items()}
    return msgspec.convert(
        {
            "metadata": {
                "name": name,
                "namespace": "x",
                "uid": f"uid-{name}",
                "labels": {"ours": "1"} if ours else {},
                "creationTimestamp": (NOW - timedelta(seconds=age_s)).isoformat(),
                "deletionTimestamp": NOW.isoformat() if leaving else None,
            },
            "spec": {
                "nodeName": on,
                "containers": [{"name": "c", "resources": {"requests": requests}}],
                **(spec or {}),
            },
            "status": {"phase": "Running" if on else "Pending", **(status or {})},
        },
        Pod,
    )


def is_ours(pod: Pod) -> bool:
    return "ours" in pod.metadata.labels


def usage_of(pods: Iterable[Pod]) -> Usage:
    usage = Usage(is_ours)
    for one in pods:
        usage.change(None, one)
    return usage


def asked(nodes: list[Node], pods: Iterable[Pod], before: dict[str, str] | None = None, our_priority: int = 0) -> Room:
    return room(Fitting(nodes), usage_of(pods), now=NOW, before=before, our_priority=our_priority)


def told(answer: Room) -> list[tuple[str, str, str, int]]:
    return [(claim.name, claim.node, claim.how, claim.leaving) for claim in answer.claims]


def test_room_is_what_others_leave_in_every_resource() -> None:
    nodes = [node("n1", cpu="8", memory="16Gi", gpu=4, pods=10), node("n2", cpu="2500m", memory="1000Mi")]
    pods = [
        pod("foreign", "n1", cpu="1500m", memory="1Gi", gpu=1),
        pod("bare", "n1"),
        pod("mine", "n1", ours=True, cpu="2", gpu=2),
        pod("ended", "n1", gpu=1, status={"phase": "Succeeded"}),
        pod("going", "n2", leaving=True, cpu="1"),
    ]
    answer = asked(nodes, pods)
    assert answer.nodes == ("n1", "n2")
    assert answer.resources == ("cpu", "memory", "pods", GPU)
    assert answer.cpu_milli.tolist() == [6500, 1500]
    assert answer.memory_mib.tolist() == [15 * 1024, 1000]
    assert answer.devices.tolist() == [3, 0]
    assert answer.pods.tolist() == [8, 99]
    assert answer.free[0].tolist() == [4500, 15 * 1024, 7, 1]


def test_an_overbooked_node_has_no_room_rather_than_less_than_none() -> None:
    answer = asked([node("n", gpu=2)], [pod("foreign", "n", gpu=3)])
    assert answer.devices.tolist() == [0]


def test_resources_nobody_offers_and_nodes_nobody_knows_do_no_harm() -> None:
    answer = asked([node("n")], [pod("lost", "elsewhere", gpu=1), pod("odd", fpga=1)])
    assert answer.column("example.com/fpga").tolist() == [0]
    assert answer.column("never.heard/of").tolist() == [0]
    assert answer.claims == ()


def test_a_nominated_pod_is_counted_there_even_while_it_does_not_fit() -> None:
    pods = [
        pod("mine", "n2", ours=True, gpu=4),
        pod("urgent", gpu=4, spec={"priority": 9}, status={"nominatedNodeName": "n2"}),
    ]
    answer = asked([node("n1", gpu=4), node("n2", gpu=4)], pods)
    assert told(answer) == [("urgent", "n2", "nominated", 0)]
    assert answer.devices.tolist() == [4, 0]


def test_a_pod_goes_where_it_fits_tightest_and_nobody_gives_way() -> None:
    pods = [pod("mine", "n1", ours=True, gpu=4), pod("theirs", "n3", gpu=2), pod("new", gpu=2)]
    answer = asked([node("n1", gpu=4), node("n2", gpu=4), node("n3", gpu=4)], pods)
    assert told(answer) == [("new", "n3", "fits", 0)]
    assert answer.devices.tolist() == [4, 4, 0]


def test_else_where_the_fewest_of_ours_have_to_go() -> None:
    many = [pod(f"small-{i}", "n1", ours=True, gpu=1) for i in range(4)]
    pods = [*many, pod("large", "n2", ours=True, gpu=4), pod("new", gpu=3)]
    answer = asked([node("n1", gpu=4), node("n2", gpu=4)], pods)
    assert told(answer) == [("new", "n2", "giving-way", 1)]
    assert answer.devices.tolist() == [4, 1]
    assert answer.free[1].tolist()[-1] == -3


def test_those_that_are_leaving_already_cost_nothing() -> None:
    pods = [pod("stays", "n1", ours=True, gpu=4), pod("goes", "n2", ours=True, leaving=True, gpu=4), pod("new", gpu=4)]
    answer = asked([node("n1", gpu=4), node("n2", gpu=4)], pods)
    assert told(answer) == [("new", "n2", "giving-way", 0)]


def test_two_pods_do_not_count_on_the_same_leaver() -> None:
    pods = [pod("a", "n1", ours=True, gpu=2), pod("b", "n1", ours=True, gpu=2), pod("p", gpu=2), pod("q", gpu=2)]
    answer = asked([node("n1", gpu=4)], pods)
    assert told(answer) == [("p", "n1", "giving-way", 1), ("q", "n1", "giving-way", 1)]
    assert answer.devices.tolist() == [0]


def test_what_one_leaver_frees_beyond_the_need_serves_the_next_pod() -> None:
    pods = [pod("a", "n1", ours=True, gpu=4), pod("b", "n2", ours=True, gpu=4), pod("p", gpu=2), pod("q", gpu=2)]
    answer = asked([node("n1", gpu=4), node("n2", gpu=4)], pods)
    assert told(answer) == [("p", "n1", "giving-way", 1), ("q", "n1", "giving-way", 0)]
    assert answer.devices.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("spec", "our_priority", "counted"),
    [
        ({"priority": 0}, 0, True),
        ({"priority": -5}, 0, True),
        ({"priority": 1}, 0, False),
        ({"priority": 1}, 1, True),
        ({"priority": 1, "preemptionPolicy": "Never"}, 0, True),
        ({"priority": 1, "preemptionPolicy": "PreemptLowerPriority"}, 0, False),
    ],
)
def test_we_give_way_only_to_pods_that_cannot_push_us_away(
    spec: dict[str, Any], our_priority: int, counted: bool
) -> None:
    pods = [pod("mine", "n", ours=True, gpu=4), pod("new", gpu=1, spec=spec)]
    answer = asked([node("n", gpu=4)], pods, our_priority=our_priority)
    assert len(answer.claims) == counted


def test_giving_way_where_it_does_not_help_is_not_done() -> None:
    pods = [
        pod("mine", "n1", ours=True, gpu=4),
        pod("theirs", "n1", memory="90Gi"),
        pod("huge", gpu=5),
        pod("fat", gpu=1, memory="11Gi"),
        pod("elsewhere", gpu=1, spec={"nodeSelector": {"host": "n9"}}),
    ]
    answer = asked([node("n1", gpu=4)], pods)
    assert answer.claims == ()
    assert answer.devices.tolist() == [4]


@pytest.mark.parametrize(
    ("given", "counted"),
    [
        (
            {"status": {"conditions": [UNSCHEDULABLE | {"message": "0/1 nodes are available: 1 Insufficient cpu."}]}},
            True,
        ),
        ({"status": {"conditions": [UNSCHEDULABLE | {"message": "0/1 nodes are available: 1 Too many pods."}]}}, True),
        ({"status": {"conditions": [UNSCHEDULABLE]}}, True),
        ({"status": {"conditions": [UNSCHEDULABLE | {"message": "unbound immediate PersistentVolumeClaims"}]}}, False),
        ({"spec": {"schedulingGates": [{"name": "quota"}]}}, False),
        ({"leaving": True}, False),
        ({"ours": True}, False),
        ({"status": {"phase": "Failed"}}, False),
    ],
)
def test_who_waits_for_resources(given: dict[str, Any], counted: bool) -> None:
    assert len(asked([node("n", gpu=4)], [pod("new", gpu=1, **given)]).claims) == counted


@pytest.mark.parametrize(
    ("reason", "age_s", "ours", "room_left"),
    [
        ("OutOfcpu", 10, False, 0),
        ("OutOfpods", 10, False, 0),
        ("OutOfcpu", 31, False, 4),
        ("Evicted", 10, False, 4),
        ("OutOfcpu", 10, True, 4),
    ],
)
def test_a_pod_that_kubelet_turned_away_holds_its_place_for_a_while(
    reason: str, age_s: float, ours: bool, room_left: int
) -> None:
    refused = pod("r", "n", gpu=4, age_s=age_s, ours=ours, status={"phase": "Failed", "reason": reason})
    assert asked([node("n", gpu=4)], [refused]).devices.tolist() == [room_left]


def test_urgent_pods_choose_first_then_older_ones() -> None:
    pods = [
        pod("young", gpu=4, age_s=1),
        pod("old", gpu=4, age_s=9),
        pod("urgent", gpu=4, age_s=0, spec={"priority": 5}),
    ]
    assert told(asked([node("n1", gpu=4), node("n2", gpu=4)], pods)) == [
        ("urgent", "n1", "fits", 0),
        ("old", "n2", "fits", 0),
    ]


def test_a_pod_stays_where_it_was_counted_before() -> None:
    nodes = [node("n1", gpu=4), node("n2", gpu=4)]
    ours = [pod("a", "n1", ours=True, gpu=4), pod("b", "n2", ours=True, gpu=4)]
    new = pod("new", gpu=2)
    assert told(asked(nodes, [new], before={"uid-new": "n2"})) == [("new", "n2", "fits", 0)]
    assert told(asked(nodes, [*ours, new])) == [("new", "n1", "giving-way", 1)]
    assert told(asked(nodes, [*ours, new], before={"uid-new": "n2"})) == [("new", "n2", "giving-way", 1)]
    assert told(asked(nodes, [*ours, new], before={"uid-new": "n9"})) == [("new", "n1", "giving-way", 1)]


def test_but_not_when_nobody_needs_to_go_elsewhere() -> None:
    nodes = [node("n1", gpu=4), node("n2", gpu=4)]
    pods = [pod("a", "n1", ours=True, gpu=4), pod("new", gpu=2)]
    assert told(asked(nodes, pods, before={"uid-new": "n1"})) == [("new", "n2", "fits", 0)]


def test_the_answer_is_a_fixed_point() -> None:
    """Asked again with its own choices, it says the same: plans do not flap."""
    nodes = [node(f"n{i}", gpu=4) for i in range(4)]
    pods = [pod(f"w{i}", f"n{i}", ours=True, gpu=1 + i) for i in range(4)] + [pod(f"p{i}", gpu=3) for i in range(4)]
    first = asked(nodes, pods)
    assert asked(nodes, pods, before=first.choices).claims == first.claims


SIZES = st.integers(0, 4)
WHERE = st.sampled_from(["", "n0", "n1", "n2"])


@st.composite
def clusters(draw: st.DrawFn, resources: tuple[str, ...]) -> tuple[list[Node], list[Pod]]:
    nodes = [
        node(f"n{i}", pods=draw(st.integers(0, 6)), **{name: draw(st.integers(0, 6)) for name in resources})
        for i in range(draw(st.integers(0, 3)))
    ]
    pods = [
        pod(
            f"p{i}",
            draw(WHERE),
            ours=draw(st.booleans()),
            leaving=draw(st.integers(0, 4)) == 0,
            age_s=draw(st.integers(0, 60)),
            spec={
                "priority": draw(st.integers(0, 2)),
                "preemptionPolicy": draw(st.sampled_from(["", "Never"])),
                "nodeSelector": {"host": "n1"} if draw(st.integers(0, 4)) == 0 else {},
                "schedulingGates": [{"name": "g"}] if draw(st.integers(0, 9)) == 0 else [],
            },
            status={
                "nominatedNodeName": draw(st.sampled_from(["", "", "", "n0"])),
                **draw(st.sampled_from([{}, {}, {"phase": "Failed", "reason": "OutOfcpu"}, {"phase": "Succeeded"}])),
            },
            **{name: draw(SIZES) for name in resources},
        )
        for i in range(draw(st.integers(0, 9)))
    ]
    return nodes, pods


BEFORE = st.dictionaries(
    st.integers(0, 9).map("uid-p{}".format), st.sampled_from(["n0", "n1", "n2", "gone"]), max_size=3
)


@given(cluster=clusters(("gpu",)), before=BEFORE, our_priority=st.integers(0, 1))
def test_it_agrees_with_the_slow_version(
    cluster: tuple[list[Node], list[Pod]], before: dict[str, str], our_priority: int
) -> None:
    nodes, pods = cluster
    answer = asked(nodes, pods, before, our_priority)
    left, claims = slow_room(nodes, pods, before, our_priority)
    assert list(answer.claims) == claims
    for place, there in enumerate(nodes):
        for column, name in enumerate(answer.resources):
            assert answer.room[place, column] == max(left[there.name].get(name, 0), 0)


@given(cluster=clusters(("gpu", "cpu", "memory")), before=BEFORE)
def test_we_never_get_what_is_not_there_and_give_way_only_where_it_helps(
    cluster: tuple[list[Node], list[Pod]], before: dict[str, str]
) -> None:
    nodes, pods = cluster
    answer = asked(nodes, pods, before)
    held = asked(nodes, [one for one in pods if one.is_bound and not one.is_terminal])
    assert answer.room.min(initial=0) >= 0
    by_uid = {one.metadata.uid: one for one in pods}
    for column, name in enumerate(answer.resources):
        assert (answer.room[:, column] <= held.column(name)).all()
        for place, there in enumerate(nodes):
            taken = (
                sum(by_uid[claim.uid].requests.get(name, 0) for claim in answer.claims if claim.node == there.name)
                if name != "pods"
                else sum(claim.node == there.name for claim in answer.claims)
            )
            helped = [claim for claim in answer.claims if claim.node == there.name and claim.how != "nominated"]
            if taken and helped and by_uid[helped[-1].uid].requests.get(name, 0):
                # The last to choose this node fits there once enough of ours have gone.
                assert taken + refused_there(pods, there.name, name) <= held.column(name)[place]
    for claim in answer.claims:
        if claim.how != "nominated":
            there = next(one for one in nodes if one.name == claim.node)
            assert could_run(signature(by_uid[claim.uid].spec), there) is None


def refused_there(pods: list[Pod], name: str, resource: str) -> int:
    refused = [
        one for one in pods
        if one.spec.node_name == name and not is_ours(one) and one.status.reason == "OutOfcpu"
        and NOW - (one.metadata.creation_timestamp or NOW) < timedelta(seconds=30)
    ]  # fmt: skip
    return len(refused) if resource == "pods" else sum(one.requests.get(resource, 0) for one in refused)


@given(cluster=clusters(("gpu", "cpu")), order=st.randoms(use_true_random=False))
def test_sums_kept_pod_by_pod_are_those_made_at_once(cluster: tuple[list[Node], list[Pod]], order: Any) -> None:
    _, pods = cluster
    usage = usage_of(pods)
    # Every pod changes into another one's state and back, some go and return, in any order.
    for _ in range(3):
        one = order.choice(pods) if pods else None
        if one is not None:
            other = msgspec.structs.replace(one, spec=order.choice(pods).spec, status=order.choice(pods).status)
            usage.change(one, other)
            usage.change(other, None)
            usage.change(None, one)
    direct = usage_of(pods)
    assert vars(usage) | {"_is_ours": None} == vars(direct) | {"_is_ours": None}
    for one in pods:
        usage.change(one, None)
    assert not any((usage.foreign, usage.ours, usage.workers, usage.pending, usage.refused))


def slow_room(
    nodes: list[Node], pods: list[Pod], before: dict[str, str], our_priority: int
) -> tuple[dict[str, dict[str, int]], list[Claim]]:
    """The rules of `capacity`, straight from its first lines, one pod and one node after the other."""

    def needs(one: Pod) -> dict[str, int]:
        return {name: amount for name, amount in (one.requests | {"pods": 1}).items() if amount}

    def fits(want: dict[str, int], there: dict[str, int]) -> bool:
        return all(there.get(name, 0) >= amount for name, amount in want.items())

    left = {there.name: dict(there.allocatable) for there in nodes}
    workers: dict[str, list[Pod]] = {there.name: [] for there in nodes}

    def take(name: str, want: dict[str, int]) -> None:
        for resource, amount in want.items():
            left[name][resource] = left[name].get(resource, 0) - amount

    def without(name: str, staying: Iterable[Pod]) -> dict[str, int]:
        there = dict(left[name])
        for one in staying:
            for resource, amount in needs(one).items():
                there[resource] = there.get(resource, 0) - amount
        return there

    for one in pods:
        at = one.spec.node_name
        if at not in left:
            continue
        young = NOW - (one.metadata.creation_timestamp or NOW) < timedelta(seconds=30)
        if one.is_terminal:
            if not is_ours(one) and one.status.reason.startswith("OutOf") and young:
                take(at, needs(one))
        elif is_ours(one):
            workers[at].append(one)
        else:
            take(at, needs(one))
    staying = {
        name: [one for one in sorted(held, key=lambda one: one.metadata.uid) if not one.metadata.is_leaving]
        for name, held in workers.items()
    }
    waiting = [
        one for one in pods
        if not (one.is_bound or one.is_terminal or is_ours(one) or one.metadata.is_leaving or one.spec.scheduling_gates)
    ]  # fmt: skip
    waiting.sort(key=lambda one: (-one.spec.priority, one.metadata.creation_timestamp, one.metadata.uid))
    claims: list[Claim] = []

    def claim(one: Pod, name: str, how: Any, leaving: int = 0) -> None:
        take(name, needs(one))
        claims.append(Claim("x", one.metadata.name, one.metadata.uid, name, how, leaving))

    for one in waiting:
        if one.status.nominated_node_name in left:
            claim(one, one.status.nominated_node_name, "nominated")
    for one in waiting:
        if one.status.nominated_node_name in left:
            continue
        want, earlier = needs(one), before.get(one.metadata.uid, "")
        allowed = [there for there in nodes if could_run(signature(one.spec), there) is None]

        def over(there: Node, want: dict[str, int] = want) -> float:
            now = without(there.name, workers[there.name])
            columns = sorted(want, key=("cpu", "memory", "pods", GPU).index)
            return float(sum((now[name] - want[name]) / max(there.allocatable.get(name, 0), 1) for name in columns))

        open_now = [there for there in allowed if fits(want, without(there.name, workers[there.name]))]
        if open_now:
            best = min(open_now, key=lambda there: (there.name != earlier, over(there)))
            claim(one, best.name, "fits")
            continue
        if one.spec.priority > our_priority and one.spec.preemption_policy != "Never":
            continue
        ways: list[tuple[int, bool, int, Node]] = []
        for place, there in enumerate(nodes):
            held = staying[there.name]
            if there in allowed and fits(want, without(there.name, [])):
                enough = (
                    number
                    for number in range(len(held) + 1)
                    for gone in combinations(held, number)
                    if fits(want, without(there.name, [one for one in held if one not in gone]))
                )
                ways.append((next(enough), there.name != earlier, place, there))
        if ways:
            number, _, _, there = min(ways, key=lambda way: way[:3])
            for _ in range(number):
                lacks = want.get(GPU, 0) - without(there.name, staying[there.name]).get(GPU, 0)
                gone = min(
                    staying[there.name],
                    key=lambda one: (
                        -min(one.requests.get(GPU, 0), max(lacks, 0)),
                        one.requests.get(GPU, 0),
                        one.metadata.uid,
                    ),
                )
                staying[there.name].remove(gone)
            claim(one, there.name, "giving-way", number)
    return left, claims
