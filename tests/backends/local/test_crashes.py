"""Servers, supervisors and workers are killed; a launch still has one worker at most, and one end exactly."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_server import POINTS
from living import alive, wait_until
from local_world import MEANS, until, world

from stretto.backends.local import containment, supervisor
from stretto.backends.local.runs import Runs

SERVER = Path(__file__).with_name("crash_server.py")

WORKER = """
import os, subprocess, sys, time
name, seconds = sys.argv[1:]
with open("starts", "a") as file:
    file.write(f"{name} {os.getpid()}\\n")
subprocess.Popen(["setsid", "sh", "-c", "sh daemon.sh & exit 0"])
end_s = time.monotonic() + float(seconds)
while time.monotonic() < end_s:
    time.sleep(0.005)
"""

DAEMON = "echo $$ >> daemons; trap '' TERM HUP; while :; do sleep 1000; done"


class Site:
    """A folder in which servers come and go."""

    def __init__(self, work: Path) -> None:
        self.work = work
        (work / "worker.py").write_text(WORKER)
        (work / "daemon.sh").write_text(DAEMON)
        self.running: subprocess.Popen[bytes] | None = None

    def serve(self, launches: list[dict[str, Any]], *, stay: bool = True, die: str = "", **options: Any) -> None:
        plan = {"launches": launches, "stay": stay, "die": die, "options": options}
        (self.work / "plan.json").write_text(json.dumps(plan))
        with open(self.work / "server.log", "ab") as log:
            self.running = subprocess.Popen([sys.executable, SERVER, self.work], stdout=log, stderr=log)

    def wait(self) -> int:
        assert self.running is not None
        return self.running.wait(60.0)

    def kill(self) -> None:
        if self.running is not None:
            self.running.kill()
            self.running.wait()

    def launch(self, name: str, seconds: float, warm: bool) -> dict[str, Any]:
        return {"id": name, "command": [sys.executable, "worker.py", name, str(seconds)], "warm": warm}

    def lines(self, name: str) -> list[list[str]]:
        path = self.work / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def events(self, kind: str) -> list[list[str]]:
        return [line[1:] for line in self.lines("events") if line[0] == kind]

    def living(self) -> list[int]:
        """Workers and daemons that the jobs have reported."""
        reported = [int(line[1]) for line in self.lines("starts")] + [int(line[0]) for line in self.lines("daemons")]
        return [pid for pid in reported if alive(pid)]

    def server_log(self) -> str:
        return (self.work / "server.log").read_text()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.kill()


@pytest.fixture(params=list(MEANS))
def allow(request: pytest.FixtureRequest) -> list[str]:
    means = containment.survey("stretto-test", MEANS[request.param])
    containment.remove_parents(means)
    if means.ending != request.param:
        pytest.skip(f"{request.param}: {means.why_not.get(request.param)}")
    return sorted(MEANS[request.param])


@pytest.mark.parametrize("warm", [False, True], ids=["plain", "warm"])
@pytest.mark.parametrize("point", [point for point in POINTS if point != "before the exit is written"])
def test_a_server_may_die_anywhere(site: Site, point: str, warm: bool) -> None:
    if point == f"after a {'plain' if warm else 'forked'} supervisor":
        pytest.skip("it does not come by there")
    seconds = 0.0 if point == "when the supervisor has ended" else 1000.0
    site.serve([site.launch("a", seconds, warm)], die=point)
    assert site.wait() == -signal.SIGKILL, site.server_log()
    assert site.events("exited") == []

    async def story() -> None:
        async with world(site.work / "data", ["a"]) as here:
            for started in here.started("a"):
                assert started.how == "adopted"
                here.backend.kill("a")
            exit = await here.ended("a")
            if point == "when the supervisor has ended":
                assert (exit.how, exit.status) == ("exited", 0)
            elif "run" in point and "before" not in point:
                assert (exit.how, exit.asked) == ("signalled", True)
            assert site.living() == []
            here.backend.forget("a")

    asyncio.run(story())
    assert len(site.lines("starts")) <= 1
    assert os.listdir(site.work / "data" / "runs") == [] if (site.work / "data" / "runs").exists() else True


@pytest.mark.parametrize("warm", [False, True], ids=["plain", "warm"])
def test_two_servers_may_die_over_a_lost_launch(site: Site, allow: list[str], warm: bool) -> None:
    """The supervisor is killed, then the server that is about to write so."""
    site.serve([site.launch("a", 1000.0, warm)], die="before the exit is written", allow=allow)
    wait_until(lambda: site.lines("daemons"))
    wait_until(lambda: Runs(site.work / "data").running("a"))
    running = Runs(site.work / "data").running("a")
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    assert site.wait() == -signal.SIGKILL, site.server_log()
    site.serve([], stay=False, allow=allow)
    assert site.wait() == 0, site.server_log()
    assert site.events("exited") == [["a", "lost", "0"]]
    assert site.living() == []


def test_a_supervisor_that_comes_too_late_starts_nothing(site: Site) -> None:
    """The server dies before the supervisor has the lock, and the next one has given the launch up by then."""
    site.serve([site.launch("a", 0.0, False)], die="after launch.json")
    assert site.wait() == -signal.SIGKILL

    async def story() -> None:
        async with world(site.work / "data", ["a"]) as here:
            exit = await here.ended("a")
            assert (exit.how, exit.text) == ("lost", "its supervisor never came")
            late = [sys.executable, "-I", "-S", supervisor.__file__, str(here.backend.runs.path("a")), "1", ""]
            assert subprocess.run(late, timeout=60).returncode == 0
            here.backend.forget("a")
            await until(lambda: here.backend.runs.all() == [])
            assert subprocess.run(late, timeout=60).returncode == 0
            assert here.backend.runs.all() == []

    asyncio.run(story())
    assert site.lines("starts") == []


def test_of_two_supervisors_one_starts_the_worker(site: Site) -> None:
    site.serve([site.launch("a", 1000.0, False)], die="after launch.json")
    assert site.wait() == -signal.SIGKILL
    path = str(Runs(site.work / "data").path("a"))
    both = [
        subprocess.Popen([sys.executable, "-I", "-S", supervisor.__file__, path, "1", ""], start_new_session=True)
        for _ in range(2)
    ]
    wait_until(lambda: site.lines("daemons"))
    wait_until(lambda: any(each.poll() is not None for each in both))

    async def story() -> None:
        async with world(site.work / "data", ["a"]) as here:
            assert len(here.started("a")) == 1
            here.backend.kill("a")
            await here.ended("a")

    asyncio.run(story())
    assert [each.wait(60.0) for each in both] == [0, 0]
    assert len(site.lines("starts")) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_schedule_of_kills(site: Site, allow: list[str], seed: int) -> None:
    """Servers, supervisors and workers are killed as the seed has it, under a stream of launches."""
    draw = random.Random(seed)
    launches: list[dict[str, Any]] = []
    for turn in range(5):
        launches += [
            site.launch(f"{turn}-{number}", draw.choice([0.0, 0.2, 1000.0]), draw.random() < 0.5) for number in range(2)
        ]
        site.serve(launches, allow=allow)
        wanted = draw.randrange(2 * turn, len(launches) + 1)
        wait_until(lambda wanted=wanted: len(site.events("launched")) >= wanted)
        victims = [line[1] for line in site.lines("starts")] + [
            str(running.pid)
            for launch in Runs(site.work / "data").all()
            if (running := Runs(site.work / "data").running(launch)) is not None
        ]
        for victim in draw.sample(victims, min(len(victims), draw.randrange(3))):
            if alive(int(victim)):
                os.kill(int(victim), signal.SIGKILL)
        site.kill()
    asyncio.run(end_all(site, allow))
    site.serve([], stay=False, allow=allow)
    assert site.wait() == 0, site.server_log()
    launched = [line[0] for line in site.events("launched")]
    assert Counter(line[0] for line in site.events("exited")) == Counter(launched)
    assert max(Counter(line[0] for line in site.lines("starts")).values()) == 1
    assert site.living() == []


async def end_all(site: Site, allow: list[str]) -> None:
    """Kill what still runs; its end is left for the next server to record."""
    launched = {line[0] for line in site.events("launched")}
    known = launched - {line[0] for line in site.events("exited")}
    async with world(site.work / "data", sorted(known), allow=allow) as here:
        for launch in known:
            here.backend.kill(launch)
        for launch in known:
            await here.ended(launch)
