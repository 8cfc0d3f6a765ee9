"""What a system lets us do is found by trying; whom a launch has started is found whatever they do."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from living import alive, wait_until
from local_world import MEANS

from stretto.backends.local import containment
from stretto.backends.local.containment import Box, Means, box, marked, survey


@pytest.fixture(params=list(MEANS))
def means(request: pytest.FixtureRequest) -> Iterator[Means]:
    found = survey(f"stretto-{uuid.uuid4().hex[:12]}", MEANS[request.param])
    if found.ending != request.param:
        pytest.skip(f"{request.param}: {found.why_not.get(request.param)}")
    yield found
    containment.sweep(found, ())
    assert not found.home or not os.path.exists(found.home)


def start(words: str, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", words], env={**os.environ, containment.MARK: mark}, stdout=subprocess.PIPE, start_new_session=True
    )


def test_everybody_inside_or_marked_is_ended(means: Means) -> None:
    held = Box(box(means, "x"))
    held.make()
    with start("setsid sh -c 'setsid sleep 1000 & sleep 1000' & sleep 1000", "x") as leader:
        held.take_in(leader.pid)
        wait_until(lambda: len(marked("x")) >= 4)
        everybody = marked("x")
        assert set(held.inside()) <= {each.pid for each in everybody}
        other = start("exec sleep 1000", "y")
        held.end()
        assert not [each for each in everybody if alive(each.pid)]
        assert alive(other.pid)
        other.kill()
        other.communicate()
    assert not any(os.path.exists(group["path"]) for group in held.groups)


def test_those_without_the_mark_are_found_by_their_session_and_parents() -> None:
    with subprocess.Popen(
        ["env", "-i", "/bin/sh", "-c", "/bin/sleep 1000 & /bin/sleep 1000 & echo up; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        about = containment.look_up(leader.pid)
        assert about is not None
        wait_until(lambda: len(marked("none", leader.pid, about.start)) == 3)
        assert {each.pid for each in containment.descendants(leader.pid)} == {
            each.pid for each in marked("none", leader.pid, about.start) if each.pid != leader.pid
        }
        assert marked("none", leader.pid, about.start + 1) == []
        leader.kill()
        wait_until(lambda: not alive(leader.pid))
        left = marked("none", leader.pid, about.start)
        assert len(left) == 2
        containment.kill_all(left)
        wait_until(lambda: marked("none", leader.pid, about.start) == [])


def test_a_mark_without_an_owner_does_not_reach_into_the_launch_of_another_server(tmp_path: Path) -> None:
    """Earlier versions marked a process with the name of its launch alone. Who has a living supervisor, which holds the
    lock of its run directory, is another's; who has none is ended."""
    name = f"x{os.getpid()}"
    (tmp_path / name).mkdir()
    words = f"exec 9>{tmp_path / name / 'lock'}; {containment.MARK}={name} sleep 1000 9>&- & wait"
    with subprocess.Popen(["sh", "-c", words]) as theirs, start("exec sleep 1000", name) as left:
        wait_until(lambda: len(containment.descendants(theirs.pid)) == 1)
        (worker,) = containment.descendants(theirs.pid)
        wait_until(lambda: {each.pid for each in marked(name)} == {left.pid})
        theirs.kill()
        theirs.wait()
        assert {each.pid for each in marked(name)} == {left.pid, worker.pid}
        containment.kill_all([worker])
        left.kill()


def test_a_process_is_only_killed_under_its_own_start_time() -> None:
    with start("sh -c 'echo $$; exec sleep 1000' & wait", "x") as leader:
        assert leader.stdout is not None
        pid = int(leader.stdout.readline())
        about = containment.look_up(pid)
        assert about is not None
        assert about.group == leader.pid
        # In our own session its group is left alone: the test itself might be in it.
        containment.kill_all([about._replace(start=about.start - 1, session=os.getsid(0))])
        assert alive(pid)
        containment.kill_all([about])
        wait_until(lambda: not alive(leader.pid))


def test_who_is_gone_may_have_left_somebody() -> None:
    with start("exec sleep 1000", "x") as process:
        about = containment.look_up(process.pid)
        assert about is not None
        process.kill()
    assert containment.kill_all([about])
    assert not containment.kill_all([])


def test_who_runs_on_by_forking_is_caught(means: Means) -> None:
    """Each of them lives for an instant only, and hands on to a child."""
    held = Box(box(means, "x"))
    held.make()
    relay = "import os\nprint('up', flush=True)\nwhile True:\n    if os.fork():\n        os._exit(0)\n"
    with subprocess.Popen(
        [sys.executable, "-c", f"import os; os.read(0, 1); exec({relay!r})"],
        env={**os.environ, containment.MARK: "x"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as first:
        held.take_in(first.pid)
        about = containment.look_up(first.pid)
        assert about is not None
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdin.write(b"!")
        first.stdin.flush()
        first.stdout.readline()
        held.end(first.pid, about.start)
        # All of them held the pipe: at its end nobody is left.
        assert first.stdout.read() == b""
    assert marked("x") == []


def test_no_environment_is_not_a_change_of_programs() -> None:
    with subprocess.Popen(["env", "-i", "/bin/sh", "-c", "echo up; read x"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        about = containment.look_up(process.pid)
        assert about is not None
        assert not about.changing
        process.kill()


def test_leftovers_are_swept_but_for_those_to_keep(means: Means) -> None:
    if not means.home:
        pytest.skip("without control groups there is nothing to sweep")
    kept, left = Box(box(means, "kept", 500, 512)), Box(box(means, "left", 500, 512))
    for each in (kept, left):
        each.make()
    with start("exec sleep 1000", "left") as process:
        left.take_in(process.pid)
        containment.sweep(means, {"kept"})
        wait_until(lambda: not alive(process.pid))
    assert all(os.path.exists(group["path"]) for group in kept.groups)
    assert not any(os.path.exists(group["path"]) for group in left.groups)


def test_nested_groups_are_ended_and_removed(means: Means) -> None:
    if not means.home:
        pytest.skip("without control groups there are none")
    held = Box(box(means, "x"))
    held.make()
    inner = Path(held.home, "inner")
    inner.mkdir()
    with start("exec sleep 1000", "elsewhere") as process:
        (inner / "cgroup.procs").write_text(str(process.pid))
        assert held.inside() == [process.pid]
        held.end()
        wait_until(lambda: not alive(process.pid))
    assert not os.path.exists(held.home)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text("31 23 0:28 / /sys rw - tmpfs tmpfs rw\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    found = survey("stretto-test", proc=str(tmp_path))
    assert (found.ending, found.home, found.cpu, found.memory) == ("walk", "", "", "")
    assert set(found.why_not) == {"cgroup.kill", "freezer", "cpu", "memory"}
    assert "mounted" in found.why_not["cgroup.kill"]


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "top").write_text("")
    (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {tmp_path}/top rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    found = survey("stretto-test", proc=str(tmp_path))
    assert found.ending == "walk"
    assert "no group can be made" in found.why_not["cgroup.kill"]


def test_a_unified_host_gives_everything_in_one_group(tmp_path: Path) -> None:
    """A made-up tree: folders take what a control group would."""
    top = tmp_path / "top"
    (top / "mine").mkdir(parents=True)
    (top / "mine" / "cgroup.procs").touch()
    (tmp_path / "mountinfo").write_text(f"31 23 0:28 / {top} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup").write_text("0::/mine\n")
    script = f"""
import os
from stretto.backends.local import containment
real = os.listdir
os.listdir = lambda path: ["cgroup.kill", "cpu.max", "memory.max"] if "trial" in path else real(path)
found = containment.survey("s", proc={str(tmp_path)!r})
assert (found.ending, found.home, found.cpu, found.memory) == ("cgroup.kill", *[{str(top / "mine" / "s")!r}] * 3), found
assert found.controllers == ("cpu", "memory")
words = containment.box(found, "x", 1500, 64)
(group,) = words["groups"]
assert group["settings"] == {{"cpu.max": "30000 20000", "memory.max": str(64 << 20), "memory.swap.max": "0"}}, group
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
