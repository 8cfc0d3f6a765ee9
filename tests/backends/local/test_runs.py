"""Run directories: who holds the lock decides."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from living import wait_until

from stretto.backends.local import containment, supervisor
from stretto.backends.local.runs import Runs, log_start
from stretto.backends.protocol import Exit, Launch

WALK = containment.survey("stretto-test", allow=())


def made(tmp_path: Path, launch: str = "a") -> Runs:
    runs = Runs(tmp_path)
    about = Launch(id=launch, job=1, worker="w", node="n", command=("true",), cwd="/", env={}, log="")
    runs.create(about, {"SECRET": "1"}, (), box=containment.box(WALK, launch))
    return runs


def test_a_launch_is_only_for_us_to_read(tmp_path: Path) -> None:
    runs = made(tmp_path)
    assert runs.all() == ["a"]
    assert os.listdir(runs.path("a")) == [supervisor.LAUNCH]
    words = supervisor.read(str(runs.path("a")), supervisor.LAUNCH)
    assert words is not None
    assert words["env"] == {"SECRET": "1", "STRETTO_LAUNCH": "a"}
    assert runs.path("a").stat().st_mode & 0o777 == 0o700
    assert (runs.path("a") / supervisor.LAUNCH).stat().st_mode & 0o777 == 0o600


def test_a_launch_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    runs = made(tmp_path)
    before = (runs.path("a") / supervisor.LAUNCH).read_bytes()
    with pytest.raises(FileExistsError):
        made(tmp_path)
    assert (runs.path("a") / supervisor.LAUNCH).read_bytes() == before


@pytest.mark.parametrize("launch", ["", ".", "..", "../a", "a/b", ".hidden", "a b", "a\n", "x" * 65])
def test_what_is_no_launch_id(tmp_path: Path, launch: str) -> None:
    with pytest.raises(ValueError):
        Runs(tmp_path).path(launch)


def test_who_has_the_lock_decides(tmp_path: Path) -> None:
    runs = made(tmp_path)
    lock = supervisor.take(str(runs.path("a")))
    assert lock >= 0
    assert supervisor.take(str(runs.path("a"))) == -1
    assert runs.give_up("a", 5.0) is None
    assert runs.exit("a") is None
    os.close(lock)
    lost = runs.give_up("a", 5.0)
    assert lost == runs.exit("a") == Exit(launch="a", how="lost", text="its supervisor never came", at_s=5.0)
    assert runs.give_up("a", 6.0) == lost


def test_what_was_ordered_is_remembered(tmp_path: Path) -> None:
    runs = made(tmp_path)
    assert not runs.asked("a")
    runs.order("a", "terminate")
    lost = runs.give_up("a", 5.0)
    assert lost is not None
    assert lost.asked
    runs.order("gone", "kill")


def test_a_file_that_was_never_completed_is_not_there(tmp_path: Path) -> None:
    runs = made(tmp_path)
    (runs.path("a") / supervisor.EXIT).write_text('{"how": "exi')
    assert runs.exit("a") is None
    (runs.path("a") / supervisor.RUNNING).write_text("")
    assert runs.running("a") is None
    (runs.path("a") / supervisor.LAUNCH).write_text("")
    lost = runs.give_up("a", 5.0)
    assert lost is not None
    assert lost.how == "lost"


def test_a_removal_that_was_interrupted_is_completed(tmp_path: Path) -> None:
    runs = made(tmp_path)
    runs.path("a").rename(runs.folder / ".gone-a")
    assert runs.all() == []
    assert os.listdir(runs.folder) == []
    runs.remove("a")
    made(tmp_path, "b").remove("b")
    assert os.listdir(runs.folder) == []


def test_a_hole_leaves_offsets_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (1 << 20))
    with open(path, "r+b") as log:
        supervisor.bound(log.fileno(), 1 << 20)
        assert log_start(log.fileno()) == 0
        supervisor.bound(log.fileno(), 1 << 16)
        if not supervisor.punch(log.fileno(), 4096):
            pytest.skip("this file system has no holes")
        assert log_start(log.fileno()) == (1 << 20) - (1 << 15)
        assert os.fstat(log.fileno()).st_size == 1 << 20
        assert os.fstat(log.fileno()).st_blocks * 512 <= 1 << 16


def test_without_holes_the_end_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "punch", lambda log, hole: False)
    path = tmp_path / "log"
    path.write_bytes(bytes(range(256)) * 4096)
    with open(path, "a+b") as log:
        supervisor.bound(log.fileno(), 1 << 16)
        os.write(log.fileno(), b"more")
    assert path.read_bytes() == bytes(range(256)) * 128 + b"more"


def test_what_a_full_disk_does_not_take_is_lost_and_said(tmp_path: Path) -> None:
    """And whoever says it goes on."""
    output, says = os.pipe()
    log = os.open("/dev/full", os.O_WRONLY)
    pump = supervisor.Pump(output, log, 1 << 20)
    for count in (1, 2):
        os.write(says, b"x" * (1 << 16))
        wait_until(lambda count=count: pump._lost == count << 16)
    with open(tmp_path / "log", "wb") as file:
        os.dup2(file.fileno(), log)
    os.write(says, b"more")
    os.close(says)
    pump.finish()
    os.close(log)
    assert (tmp_path / "log").read_bytes() == b"\n[131072 bytes were lost: the disk was full]\nmore"
