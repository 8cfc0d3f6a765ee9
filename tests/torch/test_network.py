"""Jobs on machines of their own, whose links are cut: packets vanish in silence, connections only hang."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import pytest

from stretto.backends.local.forkserver import ForkServer
from stretto.testing import Harness
from stretto.testing.network import Network, NetworkUnavailable

CASE: dict[str, Any] = {**chaos.CASE, "pause_s": 0.05}
"""Slow, until the test is in a hurry."""
OPTIONS = {**chaos.OPTIONS, "lease_s": 5.0}
EVICTED = 75


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, warm: ForkServer) -> dict[str, Any]:
    return chaos.reference(tmp_path_factory.mktemp("alone"), CASE, warm=warm)


@pytest.fixture
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    try:
        made = Network(getattr(request, "param", 1))
    except NetworkUnavailable as why:
        pytest.skip(str(why))
    with made:
        yield made


@pytest.fixture
def job(tmp_path: Path, warm: ForkServer, network: Network) -> Iterator[Harness]:
    """Three workers in the midst of training."""
    with start(tmp_path, warm, network, 3) as harness:
        harness.wait_members(3)
        harness.wait_applied(5)
        yield harness


def start(folder: Path, warm: ForkServer, network: Network, workers: int, **environment: str) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(chaos.SCRIPT)],
        workers=workers,
        min_workers=workers,
        environment={
            "CASE": json.dumps(CASE), "OMP_NUM_THREADS": "1", "STRETTO_LINK_S": "1", "STRETTO_CHECKPOINT_S": "0.1",
            **environment,
        },
        options=OPTIONS,
        warm=warm,
        network=network,
    )  # fmt: skip


def finish(job: Harness, expected: dict[str, Any], out: set[str]) -> None:
    """The job ends well; these were put out, and wrote no result."""
    (job.folder / "hurry").touch()
    job.wait_over()
    chaos.check(job, CASE, expected)
    status = {worker.name: worker.status for worker in job.workers}
    assert status == {name: EVICTED if name in out else 0 for name in status}, job.describe()
    assert {path.stem for path in job.folder.glob("w*.result")} == set(status) - out


def ledger(job: Harness, name: str) -> str:
    """What a worker has written of its steps."""
    (path,) = (job.folder / "ledger").glob(f"{name}-*")
    return path.read_text()


def checkpoints(job: Harness, generation: int) -> set[str]:
    return {path.name for path in job.folder.glob(f"checkpoints/step-*-gen-{generation}")}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_cut_off(job: Harness, network: Network, expected: dict[str, Any], rank: int) -> None:
    """The leader too, who hosts the rendezvous and writes the checkpoints. It learns that it is out when it can."""
    cut = job.members()[rank]
    network.cut(cut)
    job.wait_members(2)
    wrote = ledger(job, cut), checkpoints(job, 1)
    job.wait(lambda: bool(checkpoints(job, 2)), "the others go on, and write")
    assert job.worker(cut).running
    network.heal()
    job.wait(lambda: not job.worker(cut).running, "it ends")
    assert "goes on without it" in job.worker(cut).text()
    finish(job, expected, {cut})
    assert ledger(job, cut) == wrote[0]
    assert checkpoints(job, 1) <= wrote[1]


def test_a_worker_that_is_cut_off_for_good(job: Harness, network: Network, expected: dict[str, Any]) -> None:
    cut = job.members()[2]
    network.cut(cut)
    finish(job, expected, {cut})
    assert "length of the lease" in job.worker(cut).text(), "it stops by itself"


def test_a_worker_that_cannot_reach_the_coordinator(job: Harness, network: Network, expected: dict[str, Any]) -> None:
    """Though its peers could go on with it."""
    cut = job.members()[0]
    network.cut_between(cut, "coordinator")
    job.wait_members(2)
    finish(job, expected, {cut})


def test_a_coordinator_that_cannot_reach_anybody(job: Harness, network: Network, expected: dict[str, Any]) -> None:
    """They train on, for longer than a silent worker is waited for, and are found again as they are."""
    before = ledger(job, "w0").count("\n")
    network.cut("coordinator")
    job.wait(lambda: ledger(job, "w0").count("\n") > before + 100, "some seconds of training")
    network.heal()
    finish(job, expected, set())
    assert job.count("announced") == 1


@pytest.mark.parametrize(("ranks", "both"), [((0, 1), True), ((2, 1), False)])
def test_two_that_cannot_talk(
    job: Harness, network: Network, expected: dict[str, Any], ranks: tuple[int, int], both: bool
) -> None:
    """Everybody reaches the coordinator: one of the two must go, and nobody else. Also if one still hears the other."""
    one, other = (job.members()[rank] for rank in ranks)
    (network.cut_between if both else network.cut_towards)(one, other)
    job.wait_members(2)
    out = {one, other} - set(job.members())
    assert len(out) == 1
    finish(job, expected, out)


def test_a_newcomer_that_cannot_reach_a_member(
    tmp_path: Path, warm: ForkServer, network: Network, expected: dict[str, Any]
) -> None:
    """The members train on and are not disturbed."""
    with start(tmp_path, warm, network, 2) as job:
        job.wait_members(2)
        network.cut_between("w2", job.members()[1])
        job.want(3)
        job.wait(lambda: job.count("evicted") > 0, "it is put out")
        finish(job, expected, {"w2"})
        assert [event["planned"] for event in job.events if event["event"] == "announced"][1:] == [True, True, True]


def test_two_that_could_never_talk(
    tmp_path: Path, warm: ForkServer, network: Network, expected: dict[str, Any]
) -> None:
    """One of them is put out though nobody has trained yet; another can take its place."""
    network.cut_between("w1", "w2")
    with start(tmp_path, warm, network, 3) as job:
        job.wait(lambda: job.count("evicted") > 0, "one of them is put out")
        out = [event["worker"] for event in job.events if event["event"] == "evicted"]
        job.launch(1)
        job.wait_members(3)
        assert set(out) <= {"w1", "w2"}
        finish(job, expected, set(out))


def test_slow_links(tmp_path: Path, warm: ForkServer, network: Network, expected: dict[str, Any]) -> None:
    """Nobody is put out for being slow."""
    for name in ("w0", "w1", "w2"):
        network.slow(name, kbit_s=2000)
    with start(tmp_path, warm, network, 3) as job:
        finish(job, expected, set())


def test_nothing_is_left_of_a_network() -> None:
    before = os.listdir("/proc/self/fd")
    try:
        with Network() as network:
            network.host("somewhere")
            assert len(os.listdir("/proc/self/fd")) == len(before) + 2
    except NetworkUnavailable as why:
        pytest.skip(str(why))
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("network", [2], indirect=True)
def test_workers_meet_on_the_interface_they_are_told(
    tmp_path: Path, warm: ForkServer, network: Network, expected: dict[str, Any]
) -> None:
    """They reach the coordinator over eth0; that they cannot reach each other there does not matter."""
    for one, other in (("w0", "w1"), ("w0", "w2"), ("w1", "w2")):
        network.cut_between(one, other)
    with start(tmp_path, warm, network, 3, STRETTO_INTERFACE="eth1") as job:
        job.wait_members(3)
        job.wait_applied(5)
        finish(job, expected, set())
