"""Real processes under a local backend: how they start, how they end, and that nobody is left."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from living import alive, wait_until
from local_world import MEANS, World, until, world

from disks import cannot_write, dead_disk, no_descriptors, read_only
from stretto.backends.local import containment, runs, supervisor
from stretto.backends.local.runs import FolderInUse, serving
from stretto.backends.protocol import Exit, LaunchError, LaunchFault

DAEMON = "echo $$ >> pids; trap '' TERM HUP; while :; do sleep 1000; done"

TREE = """
import os, signal, subprocess, sys
# A child, a daemon in a session of its own, and one that has also dropped its environment; each says who it is.
subprocess.Popen(["sh", "daemon.sh"])
subprocess.Popen(["setsid", "sh", "-c", "sh daemon.sh & exit 0"])
if "scrub" in sys.argv:
    subprocess.Popen(["setsid", "env", "-i", "/bin/sh", "-c", "/bin/sh daemon.sh & exit 0"])
while not os.path.exists("pids") or sum(1 for _ in open("pids")) < (3 if "scrub" in sys.argv else 2):
    pass
print("up", flush=True)
if "stay" in sys.argv:
    signal.pause()
os._exit(0)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "daemon.sh").write_text(DAEMON)
    return tmp_path / "data"


@pytest.fixture(params=list(MEANS))
def allow(request: pytest.FixtureRequest) -> frozenset[str]:
    """Each way to end a tree that this system has."""
    means = containment.survey("stretto-test", MEANS[request.param])
    containment.remove_parents(means)
    if means.ending != request.param:
        pytest.skip(f"{request.param}: {means.why_not.get(request.param)}")
    return MEANS[request.param]


def pids(data: Path) -> list[int]:
    return [int(line) for line in (data.parent / "pids").read_text().split()]


def in_world(data: Path, story: Callable[[World], Any], **options: Any) -> World:
    """Run a story in an open world; the world as it was afterwards."""

    async def run() -> World:
        async with world(data, **options) as here:
            await story(here)
        return here

    return asyncio.run(run())


ENDS = {
    "success": ("print('done')", "exited", 0),
    "code": ("import sys; sys.exit(7)", "exited", 7),
    "error": ("raise ValueError('wrong')", "exited", 1),
    "killed": ("import os; os.kill(os.getpid(), 9)", "signalled", 9),
    "abort": ("import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.abort()", "signalled", 6),
}


@pytest.mark.parametrize("warm", [False, True])
def test_how_a_worker_ends_is_told_once(data: Path, warm: bool) -> None:
    async def story(here: World) -> None:
        for name, (text, _, _) in ENDS.items():
            await here.script(name, text, warm=True)
        for name, (_, how, status) in ENDS.items():
            exit = await here.ended(name)
            assert (exit.how, exit.status, exit.asked) == (how, status, False), name
            (started,) = here.started(name)
            assert started.how == ("forked" if warm else "plain"), started.why
            assert bool(started.why) == (not warm)
            here.backend.forget(name)
        assert here.log("success") == "done\n"
        assert "ValueError: wrong" in here.log("error")

    in_world(data, story, warm=warm)
    assert os.listdir(data / "runs") == []


@pytest.mark.parametrize("warm", [False, True])
def test_what_a_worker_finds(data: Path, warm: bool) -> None:
    text = """
import json, os, signal, sys
environ = open("/proc/self/environ", "rb").read().split(b"\\0")
print(json.dumps({
    "mark": f"STRETTO_LAUNCH={os.environ['STRETTO_LAUNCH']}".encode() in environ,
    "env": [os.environ.get(name) for name in ("MINE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "STRETTO_LAUNCH")],
    "cwd": os.getcwd(), "leads": os.getsid(0) == os.getpid() == os.getpgid(0), "argv": sys.argv,
    "masked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "fds": [f for f in os.listdir("/proc/self/fd") if int(f) > 2 and os.path.exists(f"/proc/self/fd/{f}")],
    "stdin": sys.stdin.read(),
}))
"""

    async def story(here: World) -> None:
        (here.data / "logs").mkdir()
        (here.data / "logs" / "a.log").write_text("before\n")
        env = {**os.environ, "MINE": "1"}
        await here.script("a", text, "--x", warm=True, env=env)
        await here.ended("a")
        first, second = here.log("a").splitlines()
        assert first == "before"
        found = json.loads(second)
        assert found == {
            "mark": True,
            "env": ["1", "1", "", here.backend.runs.mark("a")],
            "cwd": str(here.data.parent),
            "leads": True,
            "argv": ["a.py", "--x"],
            "masked": [],
            "fds": [],
            "stdin": "",
        }

    in_world(data, story, warm=warm)


@pytest.mark.parametrize("warm", [False, True])
def test_a_tree_ends_with_its_worker(data: Path, allow: frozenset[str], warm: bool) -> None:
    async def story(here: World) -> None:
        await here.script("a", TREE, "scrub", warm=True)
        exit = await here.ended("a")
        assert (exit.how, exit.status) == ("exited", 0), here.log("a")
        assert len(pids(data)) == 3
        assert not [pid for pid in pids(data) if alive(pid)]

    in_world(data, story, allow=allow, warm=warm)


def test_a_tree_is_killed_when_asked(data: Path, allow: frozenset[str]) -> None:
    async def story(here: World) -> None:
        await here.script("a", TREE, "stay")
        await until(lambda: "up" in here.log("a"))
        assert all(alive(pid) for pid in pids(data))
        here.backend.kill("a")
        exit = await here.ended("a")
        assert (exit.how, exit.status, exit.asked) == ("signalled", signal.SIGKILL, True)
        assert not [pid for pid in pids(data) if alive(pid)]

    in_world(data, story, allow=allow)


@pytest.mark.parametrize("warm", [False, True])
def test_a_supervisor_takes_its_worker_with_it(data: Path, allow: frozenset[str], warm: bool) -> None:
    async def story(here: World) -> None:
        await here.script("a", TREE, "stay", warm=True)
        await until(lambda: "up" in here.log("a"))
        (started,) = here.started("a")
        os.kill(here.supervisor("a"), signal.SIGKILL)
        exit = await here.ended("a")
        assert (exit.how, exit.asked) == ("lost", False)
        assert "died" in exit.text
        assert not [pid for pid in (started.pid, *pids(data)) if alive(pid)]

    in_world(data, story, allow=allow, warm=warm)


def test_without_groups_those_who_dropped_their_environment_are_found_too(data: Path) -> None:
    async def story(here: World) -> None:
        await here.script("a", TREE, "stay", "scrub")
        await until(lambda: "up" in here.log("a"))
        tree = here.backend.runs.path("a") / supervisor.TREE
        await until(
            lambda: tree.exists() and set(pids(data)) <= {pid for pid, _ in json.loads(tree.read_text())["tree"]}
        )
        os.kill(here.supervisor("a"), signal.SIGKILL)
        assert (await here.ended("a")).how == "lost"
        assert len(pids(data)) == 3
        assert not [pid for pid in pids(data) if alive(pid)]

    in_world(data, story, allow=())


def test_only_the_worker_is_asked_to_end(data: Path) -> None:
    text = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
def leave(*_):
    print("child", child.poll(), flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    signal.pause()
"""

    async def story(here: World) -> None:
        await here.script("a", text)
        await until(lambda: "up" in here.log("a"))
        here.backend.terminate("a")
        exit = await here.ended("a")
        assert (exit.how, exit.status, exit.asked) == ("exited", 5, True)
        assert here.log("a") == "up\nchild None\n"
        here.backend.terminate("a")
        here.backend.terminate("unknown")

    in_world(data, story)


@pytest.mark.parametrize("order", ["terminate", "kill"])
@pytest.mark.parametrize("warm", [False, True])
def test_an_order_may_come_before_the_worker(data: Path, order: str, warm: bool) -> None:
    async def story(here: World) -> None:
        task = asyncio.ensure_future(here.script("a", "import signal; signal.pause()", warm=True))
        await until(lambda: "a" in here.backend._known)
        getattr(here.backend, order)("a")
        await task
        exit = await here.ended("a")
        assert (exit.how, exit.asked) == ("signalled", True)
        assert exit.status == (signal.SIGTERM if order == "terminate" else signal.SIGKILL)

    in_world(data, story, warm=warm)


def test_a_launch_that_is_asked_for_twice_starts_once(data: Path) -> None:
    async def story(here: World) -> None:
        launch = here.describe("a", "sh", "-c", "echo ran; exec sleep 1000")
        await asyncio.gather(here.backend.launch(launch), here.backend.launch(launch))
        await here.backend.launch(launch)
        await until(lambda: here.log("a"))
        here.backend.kill("a")
        await here.ended("a")
        await here.backend.launch(launch)
        assert here.log("a") == "ran\n"
        assert len(here.started("a")) == len(here.exits("a")) == 1

    in_world(data, story)


def test_a_caller_that_is_cancelled_does_not_undo_a_launch(data: Path) -> None:
    async def story(here: World) -> None:
        task = asyncio.ensure_future(here.launch("a", "sh", "-c", "exit 3"))
        await until(lambda: "a" in here.backend._known)
        task.cancel()
        assert (await here.ended("a")).status == 3

    in_world(data, story)


IMPOSSIBLE: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "program": (("no-such-program",), {}, "there is no program 'no-such-program'"),
    "file": (("./no-such-file",), {}, "there is no program './no-such-file'"),
    "not executable": (("./plain.txt",), {}, "there is no program './plain.txt'"),
    "no format": (("./broken",), {}, "Exec format error"),
    "no interpreter": (("./stray",), {}, "No such file"),
    "folder": (("true",), {"cwd": "/no/such/folder"}, "there is no folder"),
    "log": (("true",), {"log": "/dev/null/x/log"}, "cannot be written"),
    "node": (("true",), {"node": "m"}, "there is no node 'm'"),
    "nothing": ((), {}, "there is no command"),
    "id": (("true",), {"id": "../up"}, "is not a launch id"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_start_is_refused_and_leaves_nothing(data: Path, name: str) -> None:
    command, changes, message = IMPOSSIBLE[name]
    (data.parent / "plain.txt").write_text("hello")
    for file, contents in (("broken", b"\x7fELF?"), ("stray", b"#!/no/such/interpreter\n")):
        (data.parent / file).write_bytes(contents)
        (data.parent / file).chmod(0o755)

    async def story(here: World) -> None:
        with pytest.raises(LaunchError, match=message):
            await here.launch("a", *command, **changes)
        assert here.news == []
        assert here.backend.runs.all() == []
        await here.launch("a", "true")
        await here.ended("a")

    in_world(data, story)
    assert not [parent for parent in containment.survey("stretto-test")[1:4] if parent and os.path.exists(parent)]


def test_the_next_server_adopts_what_runs(data: Path, allow: frozenset[str]) -> None:
    async def story() -> None:
        async with world(data, leave=True, allow=allow) as first:
            await first.script("plain", TREE, "stay")
            await until(lambda: "up" in first.log("plain"))
            await first.launch("quick", "sh", "-c", "exit 4")
            await first.ended("quick")
        assert alive(first.started("plain")[0].pid)
        async with world(data, ["plain", "quick", "never"], allow=allow) as second:
            (adopted,) = second.started("plain")
            assert (adopted.how, adopted.pid) == ("adopted", first.started("plain")[0].pid)
            assert second.exits("quick")[0] == first.exits("quick")[0]
            assert (second.exits("never")[0].how, second.exits("never")[0].text) == ("lost", "it was never started")
            await second.backend.launch(second.describe("plain", "sh", "-c", "echo twice"))
            second.backend.terminate("plain")
            exit = await second.ended("plain")
            assert (exit.how, exit.status, exit.asked) == ("signalled", signal.SIGTERM, True)
            assert not [pid for pid in pids(data) if alive(pid)]

    asyncio.run(story())


def test_forks_outlive_their_server(data: Path) -> None:
    async def story() -> None:
        async with world(data, leave=True, warm=True) as first:
            await first.script("a", "import signal; print('up', flush=True); signal.pause()", warm=True)
            await until(lambda: first.log("a"))
        async with world(data, ["a"]) as second:
            assert second.started("a")[0].pid == first.started("a")[0].pid
            second.backend.kill("a")
            assert (await second.ended("a")).how == "signalled"

    asyncio.run(story())


def test_what_nobody_knows_of_is_ended_at_the_next_start(data: Path, allow: frozenset[str]) -> None:
    async def story() -> None:
        async with world(data, leave=True, allow=allow) as first:
            await first.script("a", TREE, "stay")
            await until(lambda: "up" in first.log("a"))
            await first.launch("b", "true")
            await first.ended("b")
        async with world(data, allow=allow) as second:
            await until(lambda: second.backend.runs.all() == [])
            assert second.news == []
            assert not [pid for pid in pids(data) if alive(pid)]

    asyncio.run(story())


def test_a_supervisor_that_does_not_obey_is_killed(data: Path) -> None:
    async def story(here: World) -> None:
        await here.launch("a", "sleep", "1000")
        os.kill(here.supervisor("a"), signal.SIGSTOP)
        here.backend.kill("a")
        exit = await here.ended("a")
        assert (exit.how, exit.asked) == ("lost", True)
        assert not alive(here.started("a")[0].pid)

    in_world(data, story, stuck_s=0.1)


def test_a_worker_stops_when_no_server_comes_back(data: Path) -> None:
    stubborn = "trap 'echo asked' TERM; echo up; while :; do sleep 0.01; done"

    async def first() -> None:
        async with world(data, leave=True, away_s=0.1) as here:
            await here.launch("a", "sh", "-c", stubborn, grace_s=0.1)
            await here.launch("b", "sh", "-c", "exec sleep 1000", grace_s=1000.0)
            await until(lambda: here.log("a"))

    async def second() -> list[Exit]:
        async with world(data, ["a", "b"]) as here:
            return [*here.exits("a"), *here.exits("b")]

    asyncio.run(first())
    wait_until(lambda: all((data / "runs" / each / supervisor.EXIT).exists() for each in "ab"))
    killed, ended = asyncio.run(second())
    assert (killed.status, ended.status) == (signal.SIGKILL, signal.SIGTERM)
    assert killed.asked
    assert killed.text == ended.text == "no server was there for 0.1 s"
    assert (data / "logs" / "a.log").read_text() == "up\nasked\n"


def test_a_server_that_is_there_keeps_them_running(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(here: World) -> None:
        await here.launch("a", "sh", "-c", "exec sleep 1000")
        running = here.backend.runs.running("a")
        assert running is not None
        ticks = supervisor_ticks(running.pid)
        await until(lambda: supervisor_ticks(running.pid) >= ticks + 3)
        assert here.exits("a") == []

    in_world(data, story, away_s=0.1)


def supervisor_ticks(pid: int) -> int:
    """How often it has slept: once per tick, when nothing else happens."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.parametrize("warm", [False, True])
def test_launches_of_one_name_in_two_data_directories_are_two(tmp_path: Path, warm: bool) -> None:
    """Two servers of one account, without control groups: the one whose supervisor was killed ends what is left of its
    own launch, also as a restarted server, and nobody else's."""
    text = "import os, signal; os.fork(); os.write(1, b'%d\\n' % os.getpid()); signal.pause()"
    options: dict[str, Any] = {"warm": warm, "allow": MEANS["walk"]}
    mine, theirs = tmp_path / "mine" / "data", tmp_path / "theirs" / "data"

    def living(here: World, launch: str) -> list[int]:
        return [pid for pid in map(int, here.log(launch).split()) if alive(pid)]

    async def story() -> None:
        for each in (mine, theirs):
            each.mkdir(parents=True)
        async with world(theirs, **options) as other:
            async with world(mine, leave=True, **options) as here:
                for each in (here, other):
                    for launch in ("a", "b"):
                        await each.script(launch, text, warm=True)
                        await until(lambda each=each, launch=launch: len(each.log(launch).split()) == 2)
                os.kill(here.supervisor("a"), signal.SIGKILL)
                assert (await here.ended("a")).how == "lost"
                assert (len(living(here, "a")), len(living(other, "a"))) == (0, 2)
                supervisor_of_b = here.supervisor("b")
            os.kill(supervisor_of_b, signal.SIGKILL)
            await until(lambda: not alive(supervisor_of_b))
            async with world(mine, ["b"], **options) as again:
                assert (await again.ended("b")).how == "lost"
                assert (len(living(again, "b")), len(living(other, "b"))) == (0, 2)
            assert not other.exits("a")
            assert not other.exits("b")

    asyncio.run(story())


@pytest.mark.parametrize("where", ["its folder", "its PATH"])
def test_who_waits_for_a_file_system_that_hangs_holds_up_nobody_else(data: Path, where: str) -> None:
    """More of them than there are threads; of one job no more than its room."""

    async def story(here: World) -> None:
        with dead_disk(data.parent / "dead") as dead:
            about: dict[str, Any] = {"cwd": str(dead / "x")} if where == "its folder" else {"env": {"PATH": str(dead)}}
            waiting = [
                asyncio.create_task(here.launch(f"h{i}", "python", "x.py", job=10 + i % 16, **about)) for i in range(64)
            ]
            await until(lambda: _looking() == 32)
            await here.script("a", "print('done')", job=2)
            assert (await here.ended("a")).status == 0
            assert _looking() == 32
            told = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(error) for error in told} == {LaunchFault}
            assert all("does not answer" in str(error) for error in told)
            # Those that still hang are waited for, and not added to.
            with pytest.raises(LaunchFault):
                await here.launch("again", "python", "x.py", job=10, **about)
            assert _looking() == 32
        await until(lambda: _looking() == 0)

    in_world(data, story, patience_s=5.0)


def _looking() -> int:
    return sum(thread.name == "stretto-aside" for thread in threading.enumerate())


def test_a_worker_over_its_memory_limit(data: Path) -> None:
    async def story(here: World) -> None:
        if not here.backend.means.memory:
            pytest.skip(f"no memory limits here: {here.backend.means.why_not['memory']}")
        await here.script("a", "x = bytearray(1 << 30)", memory_mib=64)
        await here.script("b", "x = bytearray(1 << 20)", memory_mib=64)
        exit = await here.ended("a")
        assert (exit.how, exit.status, exit.text) == ("signalled", signal.SIGKILL, "out of memory (limit 64 MiB)")
        assert (await here.ended("b")).text == ""

    in_world(data, story)


@pytest.mark.parametrize("warm", [False, True])
def test_limits_are_set_and_groups_are_removed(data: Path, warm: bool) -> None:
    async def story(here: World) -> None:
        means = here.backend.means
        if not means.cpu:
            pytest.skip(f"no CPU limits here: {means.why_not['cpu']}")
        await here.script("a", "import signal; signal.pause()", warm=True, cpu_milli=500, memory_mib=512)
        group = Path(means.cpu, "a")
        await until(lambda: str(here.started("a")[0].pid) in (group / "cgroup.procs").read_text().split())
        if "cpu" in means.controllers:
            assert (group / "cpu.max").read_text().split() == ["10000", "20000"]
        else:
            assert (group / "cpu.cfs_quota_us").read_text().split() == ["10000"]
        here.backend.kill("a")
        await here.ended("a")
        assert not group.exists()

    here = in_world(data, story, warm=warm)
    assert not [parent for parent in here.backend.means[1:4] if parent and os.path.exists(parent)]


def test_whom_a_fork_starts_at_once_is_taken_in_as_well(data: Path) -> None:
    # In one piece: the four write at once.
    text = "import os, signal; os.fork(); os.fork(); os.write(1, b'%d\\n' % os.getpid()); signal.pause()"

    async def story(here: World) -> None:
        if not here.backend.means.home:
            pytest.skip("no control groups here")
        await here.script("a", text, warm=True)
        await until(lambda: len(here.log("a").split()) == 4)
        box = containment.Box(containment.box(here.backend.means, "a"))
        await until(lambda: set(box.inside()) == set(map(int, here.log("a").split())))

    in_world(data, story, warm=True)


def test_a_log_takes_no_more_room_than_it_may(data: Path) -> None:
    text = """
import os, sys
line = b"x" * 1023 + b"\\n"
for _ in range(6 * 1024):
    os.write(1, line)
open("written", "w").close()
sys.stdin.close()
import signal
import stat
signal.pause()
"""

    async def story(here: World) -> None:
        await here.script("a", text)
        await until((data.parent / "written").exists)
        log = data / "logs" / "a.log"
        await until(lambda: log.stat().st_size == 6 << 20)
        assert log.stat().st_blocks * 512 <= 1 << 20
        with open(log, "rb") as file:
            start = runs.log_start(file.fileno())
            assert 0 < start <= (6 << 20) - (1 << 19)
            file.seek(-1024, os.SEEK_END)
            assert file.read() == b"x" * 1023 + b"\n"

    in_world(data, story, log_mib=1)


def test_an_exit_waits_for_room(data: Path) -> None:
    """The supervisor can write neither the exit nor what it has to complain about."""

    async def story(here: World) -> None:
        await here.launch("a", "sh", "-c", "until [ -e go ]; do sleep 0.01; done; exit 3")
        pid, worker = here.supervisor("a"), here.started("a")[0].pid
        with cannot_write(pid):
            (data.parent / "go").touch()
            await until(lambda: containment.look_up(worker) is None)
            ticks = supervisor_ticks(pid)
            await until(lambda: supervisor_ticks(pid) > ticks + 1)
            assert here.exits("a") == []
        exit = await here.ended("a")
        assert (exit.how, exit.status) == ("exited", 3)

    in_world(data, story)


def test_a_disk_that_becomes_read_only_is_borne_as_a_full_one(data: Path) -> None:
    async def story(here: World) -> None:
        await here.launch("a", "sh", "-c", "until [ -e go ]; do sleep 0.01; done; exit 3")
        pid, worker = here.supervisor("a"), here.started("a")[0].pid
        with read_only(data / "runs"):
            with pytest.raises(LaunchFault, match="Read-only"):
                await here.launch("b", "true")
            (data.parent / "go").touch()
            await until(lambda: containment.look_up(worker) is None)
            ticks = supervisor_ticks(pid)
            await until(lambda: supervisor_ticks(pid) > ticks + 1)
            assert here.exits("a") == []
        exit = await here.ended("a")
        assert (exit.how, exit.status) == ("exited", 3)
        await here.launch("b", "true")
        await here.ended("b")

    in_world(data, story)


def test_the_last_words_of_a_worker_are_in_its_log_when_its_end_is_told(data: Path) -> None:
    """However late the thread comes that writes them: it is held until the supervisor waits for it, or has ended."""

    async def story(here: World) -> None:
        await here.launch("a", "sh", "-c", "echo first; until [ -e go ]; do sleep 0.01; done; echo last")
        await until(lambda: "first" in here.log("a"))
        pid, worker = here.supervisor("a"), here.started("a")[0].pid
        with held(next(int(task) for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid)):
            (data.parent / "go").touch()
            await until(lambda: containment.look_up(worker) is None)
            await until(lambda: waits_for_a_lock(pid) or here.backend.runs.exit("a") is not None)
        await here.ended("a")
        assert here.log("a") == "first\nlast\n"

    in_world(data, story)


@contextlib.contextmanager
def held(thread: int) -> Iterator[None]:
    """A thread of another process that does nothing meanwhile."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes, libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
    if libc.ptrace(PTRACE_SEIZE, thread, 0, 0) or libc.ptrace(PTRACE_INTERRUPT, thread, 0, 0):
        pytest.skip(f"no thread can be held here: {os.strerror(ctypes.get_errno())}")
    os.waitpid(thread, WALL)
    try:
        yield
    finally:
        libc.ptrace(PTRACE_DETACH, thread, 0, 0)


PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, WALL = 0x4206, 0x4207, 17, 0x40000000


def waits_for_a_lock(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/wchan") as file:
        return "futex" in file.read()
    return False


@pytest.mark.parametrize("warm", [False, True])
def test_a_log_never_takes_much_more_room_than_it_may(data: Path, warm: bool) -> None:
    """However fast it is written; each of the writers waits until there is room."""
    text = """
import os
if os.fork() == 0:
    for _ in range(64):
        os.write(1, b"x" * 1048575 + b"\\n")
    os._exit(0)
for _ in range(64):
    os.write(1, b"y" * 1048575 + b"\\n")
os.wait()
print("the end")
"""

    async def story(here: World) -> None:
        log, most = data / "logs" / "a.log", 0
        await here.script("a", text, warm=warm)
        while not here.exits("a"):
            most = max(most, log.stat().st_blocks * 512)
            await asyncio.sleep(0)
        assert (await here.ended("a")).status == 0
        assert most <= 1.5 * (8 << 20)
        assert log.stat().st_blocks * 512 <= 8 << 20
        assert log.stat().st_size == (128 << 20) + len("the end\n")
        with open(log, "rb") as file:
            file.seek(-20, os.SEEK_END)
            assert file.read().endswith(b"\nthe end\n")

    in_world(data, story, log_mib=8, warm=warm)


def test_the_last_words_are_in_the_log_when_the_end_is_told(data: Path) -> None:
    """Those of whoever is left behind are not waited for, nor who hands its output to somebody else."""
    text = """
import os, subprocess, sys
subprocess.Popen(["sleep", "600"])
sys.stdout.write("x" * 50_000 + "last words")
"""

    async def story(here: World) -> None:
        for number in range(10):
            launch = f"a{number}"
            await here.script(launch, text)
            assert (await here.ended(launch)).status == 0
            assert here.log(launch).endswith("xlast words")
            assert stat.S_IMODE((data / "logs" / f"{launch}.log").stat().st_mode) == 0o600

    in_world(data, story)


def test_an_end_is_found_out_when_the_machine_has_room_for_a_look(data: Path) -> None:
    async def story(here: World) -> None:
        await here.launch("a", "sleep", "1000")
        pid = here.supervisor("a")
        with no_descriptors():
            os.kill(pid, signal.SIGKILL)
            await until(lambda: here.backend._known["a"].pidfd == -1)
            assert here.exits("a") == []
        exit = await here.ended("a")
        assert (exit.how, exit.text[:15]) == ("lost", "its supervisor,")

    in_world(data, story)


def test_a_launch_without_descriptors_ends_with_a_reason(data: Path) -> None:
    async def story(here: World) -> None:
        await here.launch("before", "true")
        await here.ended("before")
        with no_descriptors(), pytest.raises(LaunchFault, match="Too many open files"):
            await here.launch("a", "true")
        assert not here.backend.attends("a")
        await here.launch("b", "true")
        assert (await here.ended("b")).status == 0
        assert {path.name for path in (data / "runs").iterdir()} <= {"before", "b"}

    in_world(data, story)


def test_a_log_that_nobody_can_write_to_holds_up_nobody(data: Path) -> None:
    """More of them than there are threads."""
    logs = data / "logs"
    logs.mkdir()
    spoilt = [f"a{number}" for number in range(10)]
    for launch in spoilt:
        os.mkfifo(logs / f"{launch}.log")

    def open_all() -> None:
        for launch in spoilt:
            os.close(os.open(logs / f"{launch}.log", os.O_RDWR | os.O_NONBLOCK))

    late = threading.Timer(60, open_all)
    late.start()

    async def story(here: World) -> None:
        refused = await asyncio.gather(*(here.launch(one, "/bin/true") for one in spoilt), return_exceptions=True)
        for error in refused:
            assert isinstance(error, LaunchError)
            assert "cannot be written" in error.message
        await here.launch("good", "/bin/true")
        assert (await here.ended("good")).status == 0
        assert late.is_alive(), "somebody waited for a FIFO"

    try:
        in_world(data, story)
    finally:
        late.cancel()
        late.join()


@pytest.mark.parametrize(
    "put",
    ["os.mkfifo(run + '/exit.json')", "os.mkdir(run + '/exit.json')", "os.symlink('/dev/zero', run + '/exit.json')",
     "open(run + '/exit.json', 'w').write('{\"how\": \"well\", \"status\": 1e99}')",
     "open(run + '/exit.json', 'w').write('{\"how\": \"lost\", \"text\": \"\\\\ud800\", \"at_s\": 1}')",
     "os.unlink(run + '/running.json'); os.mkfifo(run + '/running.json')",
     "os.unlink(run + '/launch.json'); os.symlink('/dev/zero', run + '/launch.json')",
     "os.unlink(run + '/lock'); os.mkdir(run + '/lock')",
     "os.mkfifo(run + '/orders')"],
)  # fmt: skip
@pytest.mark.parametrize("kills", [False, True])
def test_whatever_a_worker_does_to_its_run_directory_it_has_one_end(data: Path, put: str, kills: bool) -> None:
    """Also if it kills its supervisor afterwards, so that we have to write down how it ended."""
    end = "os.kill(os.getppid(), 9)\nsignal.pause()" if kills else "sys.exit(3)"
    text = f"import os, signal, sys\nrun = os.getcwd() + '/data/runs/a'\n{put}\n{end}\n"

    async def story(here: World) -> None:
        await here.script("a", text)
        exit = await here.ended("a")
        assert exit.launch == "a"
        exit.text.encode()
        await here.launch("b", "/bin/true")
        assert (await here.ended("b")).status == 0

    in_world(data, story)


def test_one_server_per_data_directory(data: Path) -> None:
    with serving(data):
        with pytest.raises(FolderInUse), serving(data, patience_s=0.0):
            pass
        assert supervisor.is_held(str(runs.server_lock(data)))
    assert not supervisor.is_held(str(runs.server_lock(data)))
    with serving(data):
        pass


def test_a_fork_is_refused_with_the_reason_and_started_anyway(data: Path) -> None:
    async def story(here: World) -> None:
        await here.launch("flag", sys.executable, "-B", "-c", "pass", warm=True)
        await here.launch("other", "sh", "-c", "exit 0", warm=True)
        assert "flag -B" in here.started("flag")[0].why
        assert "no Python interpreter" in here.started("other")[0].why
        for launch in ("flag", "other"):
            assert (await here.ended(launch)).status == 0

    in_world(data, story, warm=True)
