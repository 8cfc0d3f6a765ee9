"""From the book to seats: what policies see, and what becomes of their answers."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import plugins
from stretto.backends.protocol import Node
from stretto.core import cycle
from stretto.core.estimate.curve import Window
from stretto.jobs.model import Context, Job, Seat
from stretto.server import asked, deciding, view
from stretto.server.book import Active
from stretto.server.estimates import Estimates
from stretto.server.view import Cluster, Quota
from stretto.spec.model import JobFile

NOW_S = 1_000_000.0


def cluster(*devices: int, drained: tuple[str, ...] = (), pool: str = "cpu", mib: int = 0) -> Cluster:
    nodes = tuple(
        Node(name=f"node-{i}", pool=pool, devices=count, cpu_milli=8000, memory_mib=16000, gpu_memory_mib=mib)
        for i, count in enumerate(devices)
    )
    return Cluster(nodes, dict.fromkeys(drained, math.inf))


def active(number: int, target: tuple[Seat, ...] = (), user: str = "me", **fields: Any) -> Active:
    file = JobFile.model_validate({"run": "true", **fields})
    request = file.request()
    job = Job(
        number=number, name=file.name or f"job-{number}", user=user, submitted_s=NOW_S - 100 + number,
        changed_s=NOW_S - 100 + number, spec={}, context=Context(cwd="/"),
        level="service" if request.is_service else request.level,
        width_milli=request.width_milli, min_workers=request.min_workers, max_workers=request.max_workers,
    )  # fmt: skip
    found = Active(job, file, asked.request_of(job, file), target)
    found.pool = 0 if target else -1
    return found


def decide(
    jobs: list[Active],
    where: Cluster,
    policy: str = "elastic-fifo",
    quotas: dict[str, Quota] | None = None,
    estimates: Estimates | None = None,
) -> tuple[dict[int, deciding.Verdict], dict[int, view.Hold]]:
    names = {a.job.name: a.number for a in jobs}
    holds, most = view.held(jobs, names, quotas or {}, NOW_S)
    shown = [a for a in jobs if a.number not in holds]
    snapshot = view.snapshot(shown, where, estimates or Estimates(), NOW_S, most)
    held = {a.number: a.target for a in shown if a.target}
    decided = cycle.decide(snapshot, plugins.find(policy, {}), cycle.CycleState(), cycle.LIVE)
    found = deciding.verdicts(snapshot, decided, partial(deciding.on_devices, held), {})
    return found.of, holds


def sizes(verdicts: dict[int, deciding.Verdict]) -> dict[int, int]:
    return {number: len(verdict.seats) for number, verdict in verdicts.items()}


def elastic(low: int, high: int) -> dict[str, Any]:
    """Of the sizes that policies give; how sizes are explored is tested elsewhere."""
    return {"elastic": {"min": low, "max": high, "explore": False}}


def window(workers: int, step_s: float) -> Window:
    """Eight steps that were timed."""
    return Window(workers, 8, step_s, step_s / 50, NOW_S, NOW_S + 8 * step_s)


def test_two_jobs_that_do_not_fit_together_share_the_machine() -> None:
    verdicts, _ = decide([active(1, **elastic(1, 4)), active(2, **elastic(1, 4))], cluster(6))
    assert sizes(verdicts) == {1: 3, 2: 3}
    seats = [seat for verdict in verdicts.values() for seat in verdict.seats]
    assert sorted(seats) == [Seat("node-0", (i,)) for i in range(6)]


def test_who_has_a_seat_keeps_it() -> None:
    mine = (Seat("node-0", (3,)), Seat("node-0", (5,)))
    verdicts, _ = decide([active(1, target=mine, workers=2), active(2, workers=4)], cluster(6), "fit-first")
    assert sorted(verdicts[1].seats) == sorted(mine)
    assert len(verdicts[2].seats) == 4


def test_a_job_that_was_asked_to_move_is_placed_there() -> None:
    one = active(1, target=(Seat("node-0", (0,)), Seat("node-0", (1,))), workers=2)
    one.job = msgspec.structs.replace(one.job, node="node-1")
    verdicts, _ = decide([one], cluster(2, 2), "fifo")
    assert {seat.node for seat in verdicts[1].seats} == {"node-1"}


def test_a_drained_node_is_left() -> None:
    one = active(1, target=(Seat("node-0", (0,)),), workers=1)
    verdicts, _ = decide([one], cluster(2, 2, drained=("node-0",)), "fifo")
    assert [seat.node for seat in verdicts[1].seats] == ["node-1"]


def test_what_is_decided_but_has_no_place_is_told() -> None:
    """Two workers of two devices each do not fit on nodes of three, though four devices are free."""
    jobs = [active(1, workers=1, resources={"gpu": 2}), active(2, workers=2, resources={"gpu": 2})]
    verdicts, _ = decide(jobs, cluster(3, 3), "fit-first")
    without = [verdict for verdict in verdicts.values() if not verdict.seats]
    assert [verdict.ground.name for verdict in without] == ["fragmented"]


def test_jobs_go_only_where_their_device_type_is() -> None:
    where = Cluster(
        (
            Node(name="a", pool="h200", devices=2, cpu_milli=1000, memory_mib=1000, gpu_memory_mib=100),
            Node(name="b", pool="t4", devices=2, cpu_milli=1000, memory_mib=1000, gpu_memory_mib=50),
        )
    )
    jobs = [active(n, workers=1, resources={"gpu": 1, "gpu_type": "t4"}) for n in (1, 2, 3)]
    verdicts, _ = decide(jobs, where, "fit-first")
    assert [seat.node for verdict in verdicts.values() for seat in verdict.seats] == ["b", "b"]


def test_small_jobs_share_a_device() -> None:
    jobs = [active(n, workers=1, resources={"gpu": 0.5, "gpu_memory": "4Gi"}) for n in (1, 2, 3)]
    verdicts, _ = decide(jobs, cluster(2, pool="gpu", mib=16384), "fit-first")
    used = Counter(seat.devices for verdict in verdicts.values() for seat in verdict.seats)
    assert sorted(used.values()) == [1, 2]


# What holds a job back.


def test_holds_are_told_by_name() -> None:
    suspended, waiting, failing = active(1, name="a"), active(2, after="a"), active(3)
    suspended.job = msgspec.structs.replace(suspended.job, wish="suspend")
    failing.job = msgspec.structs.replace(failing.job, not_before_s=NOW_S + 5, message="w0 was lost")
    verdicts, holds = decide([suspended, waiting, failing, active(4)], cluster(8))
    assert {number: hold.name for number, hold in holds.items()} == {1: "suspended", 2: "dependency", 3: "back-off"}
    assert holds[3].until_s == NOW_S + 5
    assert list(verdicts) == [4]


def test_a_dependency_that_has_ended_holds_nobody() -> None:
    _, holds = decide([active(2, after="gone")], cluster(8))
    assert holds == {}


def test_a_quota_bounds_what_one_user_has() -> None:
    jobs = [active(1, **elastic(1, 8)), active(2, **elastic(2, 8)), active(3, **elastic(2, 8)), active(4, user="you")]
    verdicts, holds = decide(jobs, cluster(8), quotas={"me": Quota(devices=4)})
    assert {number: hold.name for number, hold in holds.items()} == {3: "quota"}
    assert "4 devices" in holds[3].text
    got = sizes(verdicts)
    assert got[1] + got[2] == 4
    assert got[4] == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_decided_fits(data: st.DataObject) -> None:
    """Seats exist, nobody sits on a device that is full, and sizes are allowed."""
    where = cluster(*data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), pool="gpu", mib=1000)
    jobs: list[Active] = []
    for number in range(data.draw(st.integers(1, 6))):
        low = data.draw(st.integers(1, 3))
        high = data.draw(st.integers(low, 5))
        width = data.draw(st.sampled_from([0.25, 0.5, 1, 2]))
        jobs.append(active(number, **elastic(low, high), resources={"gpu": width}))
    policy = data.draw(st.sampled_from(["elastic-fifo", "stretto", "afs-l", "fit-first", "tiresias"]))
    for _ in range(2):
        verdicts, _ = decide(jobs, where, policy)
        used: Counter[tuple[str, int]] = Counter()
        for one in jobs:
            seats = verdicts[one.number].seats
            assert len(seats) == 0 or one.request.min_workers <= len(seats) <= one.request.max_workers
            for seat in seats:
                node = next(n for n in where.nodes if n.name == seat.node)
                assert all(device < node.devices for device in seat.devices)
                for device in seat.devices:
                    used[seat.node, device] += min(one.request.width_milli, 1000)
            one.target, one.pool = seats, verdicts[one.number].pool
        assert max(used.values(), default=0) <= 1000


def test_a_policy_that_breaks_its_word_is_named() -> None:
    from stretto.errors import PolicyError

    broken = msgspec.structs.replace(plugins.find("fifo", {}), function=lambda *_: 1 / 0, rule=None)
    snapshot = view.snapshot([active(1)], cluster(2), Estimates(), NOW_S, {})
    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        cycle.decide(snapshot, broken, cycle.CycleState(), cycle.Settings(placement="pack"))


# What is learned.


def test_speeds_that_were_measured_change_what_is_believed() -> None:
    estimates = Estimates()
    one = active(1, name="slow", **elastic(1, 8))
    before = view.snapshot([one], cluster(8), estimates, NOW_S, {})
    for workers, step_s in ((1, 1.0), (2, 0.9), (4, 0.88)):
        for _ in range(5):
            estimates.observe(1, "cpu", window(workers, step_s))
    after = view.snapshot([one], cluster(8), estimates, NOW_S, {})
    assert before.rates[0, before.curve[0], 2] / before.rates[0, before.curve[0], 1] == pytest.approx(2**0.7)
    assert after.rates[0, after.curve[0], 2] / after.rates[0, after.curve[0], 1] == pytest.approx(1 / 0.9, rel=0.02)
    assert after.rates[0, after.curve[0], 4] / after.rates[0, after.curve[0], 1] < 1.3


def test_a_measured_job_that_may_have_more_workers_gets_them_at_once() -> None:
    """Also when nothing was measured since it was scaled; as far as it was seen to gain, and one doubling further."""
    estimates, seats = Estimates(), tuple(Seat("node-0", (i,)) for i in range(2))
    estimates.observe(1, "cpu", window(2, 0.5))
    for most, size in ((2, 2), (3, 3), (8, 4), (3, 3)):
        verdicts, _ = decide([active(1, seats, name="grows", **elastic(1, most))], cluster(8), estimates=estimates)
        assert sizes(verdicts) == {1: size}


@pytest.mark.parametrize(("ran_s", "workers"), [(3.0, 4), (3600.0, 8)])
def test_a_job_that_tells_nothing_is_as_old_as_it_is(ran_s: float, workers: int) -> None:
    """However short the jobs before it were: one that has run for an hour is worth a restart."""
    estimates = Estimates()
    short = active(1, name="short", **elastic(1, 4))
    estimates.ended(msgspec.structs.replace(short.job, device_s=40.0), short.request)
    seats = tuple(Seat("node-0", (i,)) for i in range(4))
    silent = active(2, seats, level="restart", **elastic(1, 8))
    silent.job = msgspec.structs.replace(silent.job, ran_s=ran_s, device_s=4 * ran_s, changed_s=NOW_S - 1.0, starts=1)
    verdicts, _ = decide([silent], cluster(8), estimates=estimates)
    assert sizes(verdicts) == {2: workers}


def test_what_was_measured_of_a_job_can_be_written_down_and_read() -> None:
    estimates, again = Estimates(), Estimates()
    one = active(1, name="slow", **elastic(1, 8))
    for workers, step_s in ((1, 1.0), (4, 0.88)):
        estimates.observe(1, "cpu", window(workers, step_s))
    again.remember(1, msgspec.json.decode(msgspec.json.encode(estimates.measured(1))))
    unequal, unseen = {"workers": [1, 2], "count": [1]}, {"workers": [1], "count": [0], "mean": [0], "squares": [0]}
    for foreign in (None, {}, {"cpu": 3}, {"cpu": {"workers": "x"}}, {"cpu": unequal}, {"cpu": unseen}):
        again.remember(1, foreign)
    tables = [view.snapshot([one], cluster(8), each, NOW_S, {}).rates for each in (estimates, again)]
    assert (tables[0] == tables[1]).all()


def test_a_speed_is_expected_only_where_something_like_it_was_timed() -> None:
    estimates = Estimates()
    assert estimates.rate(1, "digits", "cpu", 2) == 0
    taught = [estimates.observe(1, "cpu", window(2, 0.5)) for _ in range(12)]
    assert taught == [True] * 8 + [False] * 4, "what is known well teaches nothing new"
    assert estimates.rate(1, "digits", "cpu", 2) == pytest.approx(2.0)
    assert estimates.rate(1, "digits", "gpu", 2) == 0
    assert estimates.rate(2, "digits", "cpu", 2) == 0
    one = active(1, name="digits")
    estimates.ended(msgspec.structs.replace(one.job, steps=100), one.request)
    assert estimates.rate(2, "digits", "cpu", 2) == pytest.approx(2.0)


def test_what_the_class_learns_is_believed_of_its_jobs_that_run() -> None:
    """Also of those that were measured themselves; and no longer when the class is forgotten."""
    estimates = Estimates()
    measured = active(1, name="digits", **elastic(1, 8))
    estimates.observe(1, "cpu", window(1, 1.0))

    def gain() -> float:
        seen = view.snapshot([measured], cluster(8), estimates, NOW_S, {})
        return float(seen.rates[0, seen.curve[0], 2] / seen.rates[0, seen.curve[0], 1])

    alone = gain()
    for workers, step_s in ((1, 1.0), (2, 0.95)):
        estimates.observe(2, "cpu", window(workers, step_s))
    sibling = active(2, name="digits", **elastic(1, 8))
    estimates.ended(msgspec.structs.replace(sibling.job, steps=100), sibling.request)
    assert gain() == pytest.approx(1 / 0.95, rel=0.03)
    estimates.forget_class("digits")
    assert gain() == pytest.approx(alone)


def test_what_was_learned_outlives_the_server() -> None:
    estimates = Estimates()
    one = active(1, name="digits", **elastic(1, 4))
    for workers, step_s in ((1, 1.0), (2, 0.9), (4, 0.85)):
        estimates.observe(1, "cpu", window(workers, step_s))
    job = msgspec.structs.replace(one.job, steps=100, device_s=100.0)
    blob = estimates.ended(job, one.request)
    again = Estimates({"digits": blob, "broken": b"not json"})
    two = active(2, name="digits", **elastic(1, 4))
    snapshot = view.snapshot([two], cluster(8), again, NOW_S, {})
    row = snapshot.rates[0, snapshot.curve[0]]
    assert row[4] / row[1] < 1.5
    assert len(snapshot.history) == 1
    assert snapshot.history.size_s[0] == pytest.approx(100.0, rel=0.05)


def cores(workers: int | None = None, **fields: Any) -> dict[str, Any]:
    size = elastic(1, 16) if workers is None else {"workers": workers}
    return {"resources": {"gpu": 0, "cpu": 1}, **size, **fields}


@pytest.mark.parametrize("policy", ["stretto", "elastic-fifo"])
def test_jobs_without_gpus_share_the_cores_of_a_gpu_machine(policy: str) -> None:
    """The first shrinks for the second; the same policies rule over cores."""
    nodes = (Node(name="node-0", pool="h200", devices=1, cpu_milli=16000, memory_mib=16000, gpu_memory_mib=80000),)
    first = active(1, tuple([Seat("node-0")] * 16), **cores())
    alone, _ = decide([first], Cluster(nodes), policy)
    assert sizes(alone) == {1: 16}
    both, _ = decide([first, active(2, **cores(8))], Cluster(nodes), policy)
    assert sizes(both) == {1: 8, 2: 8}
    gpu, _ = decide([first, active(2, workers=1, resources={"cpu": 4})], Cluster(nodes), policy)
    assert sizes(gpu) == {1: 12, 2: 1}
    assert gpu[2].seats == (Seat("node-0", (0,)),)


def test_where_there_are_no_gpus_cores_are_slots() -> None:
    where = cluster(8)
    jobs = [active(1, workers=6), active(2, **cores(4))]
    verdicts, _ = decide(jobs, where, "fit-first")
    assert sizes(verdicts) == {1: 6, 2: 0}
    assert verdicts[2].ground.text == "waits: it needs 4 slots, 2 were left at its turn"


@pytest.mark.parametrize(
    ("fields", "few", "many"),
    [({}, 64, 301), ({"resources": {"gpu": 0.5}}, 64, 601), ({"resources": {"gpu": 0, "cpu": 0.04}}, 201, 401)],
)
def test_sizes_that_nobody_could_hold_are_not_looked_at(fields: dict[str, Any], few: int, many: int) -> None:
    """What is decided takes longer than the square of the largest size."""
    for where, most in ((cluster(4), few), (cluster(200, 100), many)):
        vast = active(1, elastic={"min": 1, "max": 100_000}, **fields)
        shown = view.snapshot([vast, active(2)], where, Estimates(), NOW_S, {})
        assert shown.max_workers.tolist() == [most, 1]
        assert shown.requested[0] == most
        assert shown.rates.shape[2] == most + 1


def test_who_has_all_that_there_is_is_not_said_to_have_all_that_it_could_use() -> None:
    seats = tuple(Seat("node-0", (i,)) for i in range(100))
    told, known = [], Estimates()
    known.observe(1, "cpu", Window(workers=100, count=64, median_s=0.1, spread_s=0.0, began_s=NOW_S, ended_s=NOW_S + 8))
    for most in (100, 100_000):
        wide = active(1, seats, elastic={"min": 1, "max": most}, resources={"gpu": 1})
        verdict = decide([wide], cluster(100), estimates=known)[0][1]
        assert len(verdict.seats) == 100
        told.append("the most that it may have" in verdict.ground.text)
    assert told == [True, False]


@given(have=st.integers(0, 12), low=st.integers(1, 4), more=st.integers(0, 8), step=st.sampled_from([0, 1, 2, 3]))
def test_what_is_kept_is_the_largest_size_that_there_are_seats_for(have: int, low: int, more: int, step: int) -> None:
    one = active(1, tuple(Seat("node-0", (i,)) for i in range(have)), elastic={"min": low, "max": low + more})
    one.request = msgspec.structs.replace(one.request, step=step)
    sizes = [size for size in one.request.sizes() if size <= have]
    assert len(view.kept(one, None)) == (sizes[-1] if sizes else 0)
