"""Room on the disk: jobs that take more than they may, and the reserve."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import machine_of, play

from disks import small_disk
from stretto.errors import Unavailable
from stretto.jobs import events as e
from stretto.server import disk
from stretto.server.readiness import Readiness

FILLS = """
import os, time
folder = os.environ["STRETTO_JOB_FOLDER"]
def fill(name, mib, inside="."):
    os.makedirs(f"{folder}/{inside}", exist_ok=True)
    with open(f"{folder}/{inside}/{name}", "wb") as file:
        file.write(os.urandom(mib << 20))
"""
OFTEN = disk.Rules(every_s=0.02, grace_s=0.0)
PATIENT = disk.Rules(every_s=0.02, grace_s=3600.0)


@pytest.mark.parametrize(
    "how",
    ["fill('x', 9)", "fill('x', 9, 'checkpoints/a/b')", "print('x' * (9 << 20), flush=True)",
     "for i in range(9): fill(str(i), 1, str(i))"],
)  # fmt: skip
def test_who_stays_over_its_bound_has_failed(tmp_path: Path, how: str) -> None:
    """Wherever in its folder it is; the one beside it, which says nothing, goes on."""
    (tmp_path / "fills.py").write_text(f"{FILLS}\n{how}\ntime.sleep(1000)")

    async def story() -> None:
        async with machine_of(tmp_path, "1x2", room=OFTEN) as m:
            innocent = await m.submit("until [ -e over ]; do sleep 0.02; done")
            job = await m.submit([sys.executable, "fills.py"], resources={"disk": "8Mi"})
            done = await m.ended(job, "failed")
            assert done.message == "its folder and logs take more than 8 MiB of disk (resources.disk)"
            warned = [x.event for x in await m.plane.events(job.id, 0, 1000) if isinstance(x.event, e.Warned)]
            assert len(warned) == 1
            assert warned[0].text == f"{done.message}; it will be ended if that goes on"
            (tmp_path / "over").touch()
            assert (await m.ended(innocent)).starts == 1

    play(story())


def test_who_makes_room_in_time_goes_on_and_who_is_far_over_does_not(tmp_path: Path) -> None:
    (tmp_path / "near.py").write_text(f"""{FILLS}
fill("x", 9)
while not os.path.exists("smaller"):
    time.sleep(0.01)
os.unlink(f"{{folder}}/x")
while not os.path.exists("over"):
    time.sleep(0.01)
""")
    (tmp_path / "far.py").write_text(f"{FILLS}\nfill('x', 30)\ntime.sleep(1000)")

    async def story() -> None:
        async with machine_of(tmp_path, "1x2", room=PATIENT) as m:
            near = await m.submit([sys.executable, "near.py"], resources={"disk": "8Mi"})
            far = await m.submit([sys.executable, "far.py"], resources={"disk": "8Mi"})
            await m.ended(far, "failed")
            await m.until(near, lambda job: "8 MiB" in job.message, "told")
            (tmp_path / "smaller").touch()
            await m.until(near, lambda job: not m.plane.disk._told_s, "forgiven")
            (tmp_path / "over").touch()
            assert (await m.ended(near)).starts == 1

    play(story())


def counted(folder: Path) -> disk.Count:
    count = disk.Count([folder / "job"], folder)
    while not count.whole:
        # As little at a time as there can be.
        count.go_on(time.monotonic())
    return count


def put_many(job: Path) -> int:
    for i in range(1200):
        (job / f"{i}").write_bytes(b"x" * 4096)
    return 1200 * 4096


def put_links(job: Path) -> int:
    (job / "file").write_bytes(b"x" * 8192)
    for i in range(10):
        os.link(job / "file", job / f"again{i}")
    (job / "out").symlink_to("/usr")
    os.truncate(os.open(job / "hole", os.O_CREAT | os.O_WRONLY), 1 << 42)
    os.mkfifo(job / "fifo")
    return 8192


@pytest.mark.parametrize("put", [put_many, put_links])
def test_what_is_counted(tmp_path: Path, put: Callable[[Path], int]) -> None:
    (tmp_path / "job").mkdir()
    wanted = put(tmp_path / "job")
    count = counted(tmp_path)
    assert not count.hidden
    assert wanted <= count.bytes <= wanted + 65536


def test_what_cannot_be_counted_counts_as_too_much(tmp_path: Path) -> None:
    deep = tmp_path / "job"
    for _ in range(260):
        deep /= "d"
    deep.mkdir(parents=True)
    (deep / "file").write_bytes(b"x" * 65536)
    count = counted(tmp_path)
    assert "folders in each other" in count.hidden
    assert disk.over_bound(count, 100)


def test_a_slice_ends_in_the_middle_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    put_many(tmp_path / "job")
    count = disk.Count([tmp_path / "job"], tmp_path)
    count.go_on(time.monotonic())
    assert count.bytes < 600 * 4096
    assert not count.whole


def test_nothing_is_accepted_below_the_reserve(tmp_path: Path) -> None:
    """Before the store cannot write; what was accepted runs on. `/readyz` says the same, with the reason."""

    async def story() -> None:
        with small_disk(tmp_path / "data", "32m") as data:
            async with machine_of(tmp_path, "1x1", room=disk.Rules(reserve_mib=8, room_every_s=0.02)) as m:
                readiness = Readiness(m.plane.store, lambda: m.plane.ready)
                job = await m.submit("until [ -e over ]; do sleep 0.02; done")
                assert await readiness.trouble() == ""
                (data / "filler").write_bytes(b"x" * (25 << 20))
                await m.until(job, lambda job: bool(m.plane.disk.trouble), "short of room")
                with pytest.raises(Unavailable, match="8 MiB are kept"):
                    await m.submit("true")
                assert "8 MiB are kept" in await readiness.trouble()
                assert m.plane.book.trouble == ""
                (tmp_path / "over").touch()
                await m.ended(job)
                (data / "filler").unlink()
                await m.until(job, lambda job: not m.plane.disk.trouble, "room again")
                assert await readiness.trouble() == ""
                await m.ended(await m.submit("true"))

    play(story())


def test_what_is_kept() -> None:
    mib = 1 << 20
    usual = disk.Room(free=600 * mib, size=10**12, files_free=10**6, files=10**7)
    assert disk.short_of(usual, None) == ""
    assert "511 MiB free" in disk.short_of(usual._replace(free=512 * mib - 1), None)
    assert disk.short_of(usual._replace(free=5 * mib, size=80 * mib), None) == ""
    assert "3 MiB free" in disk.short_of(usual._replace(free=3 * mib, size=80 * mib), None)
    assert disk.short_of(usual._replace(free=0), 0) == ""
    assert "2048 MiB are kept" in disk.short_of(usual, 2048)
    assert "20 more files" in disk.short_of(usual._replace(files_free=20), None)
    assert disk.short_of(usual._replace(files_free=0, files=0), None) == ""
