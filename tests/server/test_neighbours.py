"""Steps that were timed while a neighbour came or went do not count."""

from __future__ import annotations

import pytest

from stretto.backends.protocol import Node
from stretto.jobs.model import Seat, Worker
from stretto.server.neighbours import Neighbours

CROWDED = Node(name="n0", pool="cpu", devices=8, cpu_milli=2000, memory_mib=1)
ROOMY = Node(name="n1", pool="gpu", devices=2, cpu_milli=16_000, memory_mib=1)


class Scene:
    def __init__(self) -> None:
        self.now_s, self.asked = 10.0, 0
        self.them = Neighbours(self.nodes, lambda: self.now_s)

    def nodes(self) -> tuple[Node, ...]:
        self.asked += 1
        return CROWDED, ROOMY

    def disturbed(self, seat: Seat, since_s: float, until_s: float, job: int = 1) -> bool:
        return self.them.disturbed(job, [seat], since_s, until_s)

    def start(self, seat: Seat, job: int = 2, until_s: float = 12.0) -> None:
        self.them.launched(job, "w0", seat)
        self.now_s = until_s
        self.them.takes_part(job, {"w0", "w1"})

    def exit(self, seat: Seat, job: int = 2) -> None:
        self.them.exited(job, Worker(name="w0", launch="2.w0.x", seat=seat, launched_s=0.0))


@pytest.fixture
def scene() -> Scene:
    return Scene()


@pytest.mark.parametrize(
    ("since_s", "until_s", "disturbed"), [(5.0, 9.0, False), (9.0, 10.5, True), (11.0, 11.5, True), (12.5, 14.0, False)]
)
def test_a_start_disturbs_as_long_as_it_takes(scene: Scene, since_s: float, until_s: float, disturbed: bool) -> None:
    scene.start(Seat("n0", (3,)))
    assert scene.disturbed(Seat("n0", (4,)), since_s, until_s) == disturbed
    assert not scene.disturbed(Seat("n0", (4,)), since_s, until_s, job=2), "not by itself"


def test_a_start_that_goes_on_disturbs_but_not_for_ever(scene: Scene) -> None:
    scene.them.launched(2, "w0", Seat("n0", (3,)))
    assert scene.disturbed(Seat("n0"), 15.0, 20.0)
    assert not scene.disturbed(Seat("n0"), 1000.0, 1001.0)


def test_an_end_disturbs_those_who_time_a_step_then(scene: Scene) -> None:
    scene.exit(Seat("n0", (3,)))
    assert scene.disturbed(Seat("n0", (4,)), 9.0, 11.0)
    assert not scene.disturbed(Seat("n0", (4,)), 10.5, 11.0)


def test_where_there_are_cores_enough_only_those_on_one_device_are_neighbours(scene: Scene) -> None:
    scene.start(Seat("n1", (0,)))
    assert scene.disturbed(Seat("n1", (0,)), 11.0, 12.0)
    assert not scene.disturbed(Seat("n1", (1,)), 11.0, 12.0)
    assert not scene.disturbed(Seat("n0", (0,)), 11.0, 12.0)


def test_what_happens_elsewhere_costs_nothing(scene: Scene) -> None:
    for _ in range(1000):
        scene.start(Seat("n1", (0,)), until_s=scene.now_s)
    assert not scene.disturbed(Seat("n0", (0,)), 0.0, 20.0)
    assert scene.asked == 0, "nodes need not be looked up"


def test_the_latest_changes_of_a_node_are_remembered_for_a_while(scene: Scene) -> None:
    for _ in range(1000):
        scene.exit(Seat("n0", (3,)))
        scene.now_s += 1.0
    assert scene.disturbed(Seat("n0", (4,)), scene.now_s - 30.0, scene.now_s - 29.0)
    assert not scene.disturbed(Seat("n0", (4,)), 0.0, 100.0), "nobody asks for so long ago"
