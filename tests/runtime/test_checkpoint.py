"""Checkpoints: whatever dies whenever, what was saved before is still there, whole; a stale writer changes nothing."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from stretto.runtime import checkpoint as module
from stretto.runtime.checkpoint import (
    MANIFEST,
    AsyncSaver,
    Checkpoint,
    CheckpointError,
    CorruptCheckpoint,
    StaleGeneration,
    Store,
)

PARTS = {"weights": b"abc" * 1000, "empty": b""}


def content(step: int) -> dict[str, Any]:
    return {"weights": b"%d" % step * 500, "state.json": lambda file: file.write(b"state %d" % step)}


def is_whole(found: Checkpoint | None) -> bool:
    return found is not None and all(
        found.read(name) == data
        for name, data in (("weights", b"%d" % found.step * 500), ("state.json", b"state %d" % found.step))
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(store: Store) -> Checkpoint:
    found = store.latest().checkpoint
    assert found is not None
    return found


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "er")
    assert store.latest().checkpoint is None
    assert store.generation() == 0
    array = np.arange(300_000, dtype=np.float64)

    def write(file: BinaryIO) -> None:
        for start in range(1000):
            pickle.dump({"n": start}, file)
        np.save(file, array)
        file.write(memoryview(array))

    path = store.save(7, 2, {**PARTS, "arrays": write, "view": memoryview(array)}, {"loop": 1, "cursor": [1, 7]})
    assert path == tmp_path / "deep" / "er" / "step-7-gen-2"
    found = newest(store)
    assert (found.path, found.step, found.generation) == (path, 7, 2)
    assert found.meta == {"loop": 1, "cursor": [1, 7]}
    assert [found.read("weights"), found.read("empty"), found.read("view")] == [*PARTS.values(), array.tobytes()]
    with found.open("arrays") as file:
        assert [pickle.load(file)["n"] for _ in range(1000)] == list(range(1000))
        assert np.array_equal(np.load(file), array)
        assert file.read() == array.tobytes()
    with pytest.raises(CheckpointError, match="no part 'other'; it has arrays, empty"):
        found.read("other")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden", MANIFEST, "a\n", "ä"])
def test_a_part_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a part"):
        Store(tmp_path).save(1, 1, {name: b""})


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise RuntimeError("out of memory")

    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(1, 1, PARTS, {"key": object()})
    with pytest.raises(RuntimeError, match="out of memory"):
        store.save(1, 1, {"weights": fail})
    with pytest.raises(io.UnsupportedOperation):
        store.save(1, 1, {"weights": lambda file: file.seek(0)})
    with pytest.raises(ValueError, match="step -1"):
        store.save(-1, 1, PARTS)
    with pytest.raises(ValueError, match="keep=0"):
        Store(tmp_path, keep=0)
    gc.collect()
    assert names(tmp_path) == []


def test_the_newest_are_kept_and_no_more(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for step in (5, 10, 100, 95):
        store.save(step, 1, PARTS)
    assert names(tmp_path) == ["step-100-gen-1", "step-95-gen-1"]
    store.save(3, 2, PARTS)  # a later generation is newer, though it has done fewer steps
    assert names(tmp_path) == ["step-100-gen-1", "step-3-gen-2"]
    assert newest(store).step == 3


def test_the_newest_valid_one_is_never_removed(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    broken = store.save(300, 1, PARTS)
    (broken / "weights").unlink()
    for step in (100, 200):  # a job that had to go back
        store.save(step, 1, PARTS)
        assert newest(store).step == step
    assert names(tmp_path) == ["step-200-gen-1", "step-300-gen-1"]


def test_the_same_step_saved_again_replaces_it_in_one_move(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=1)
    for again in range(4):
        store.save(5, 1, {"weights": b"%d" % again})
        assert newest(store).read("weights") == b"%d" % again
        assert len(names(tmp_path)) == 1


Damage = Callable[[Path], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated": (lambda path: os.truncate(path / "weights", 100), "weights: 100 bytes instead of 3000"),
    "longer": (lambda path: os.truncate(path / "weights", 3001), "3001 bytes"),
    "flipped": (lambda path: (path / "weights").write_bytes(b"abd" + b"abc" * 999), "weights: the content is not"),
    "missing part": (lambda path: (path / "empty").unlink(), "empty"),
    "missing manifest": (lambda path: (path / MANIFEST).unlink(), MANIFEST),
    "empty manifest": (lambda path: os.truncate(path / MANIFEST, 0), MANIFEST),
    "torn manifest": (lambda path: os.truncate(path / MANIFEST, 50), MANIFEST),
    "other manifest": (lambda path: (path / MANIFEST).write_text("[1]"), MANIFEST),
    "edited manifest": (
        lambda path: (path / MANIFEST).write_text((path / MANIFEST).read_text().replace("3000", "3001")),
        "checksum",
    ),
    "another's place": (lambda path: path.rename(path.with_name("step-9-gen-3")), "it is step 2 of generation 1"),
    "gone": (lambda path: [file.unlink() for file in path.iterdir()], MANIFEST),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    store.save(1, 1, PARTS)
    hurt, reason = DAMAGES[damage]
    hurt(store.save(2, 1, PARTS))
    found = store.latest()
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert len(found.rejected) == 1
    assert reason in found.rejected[0].reason


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(2, 1, {"weights": b"0123456789"}, {"a": 1})
    for file in (path / MANIFEST, path / "weights"):
        whole = file.read_bytes()
        for at in range(len(whole)):
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 2]) + whole[at + 1 :])
            assert store.latest().checkpoint is None, f"{file.name} byte {at}"
        file.write_bytes(whole)
    assert newest(store).step == 2


def test_contents_are_only_read_when_asked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(2, 1, PARTS)
    (path / "weights").write_bytes(b"x" * 3000)
    found = store.latest(validate=False).checkpoint
    assert found is not None
    with pytest.raises(CorruptCheckpoint, match="weights"):
        found.read("weights")


def test_a_lower_generation_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(10, 3, PARTS)
    store.fence(5)
    store.fence(5)
    for generation in (3, 4):
        with pytest.raises(StaleGeneration, match=f"generation {generation} is out: generation 5") as caught:
            store.save(11, generation, PARTS)
        assert (caught.value.generation, caught.value.current) == (generation, 5)
    with pytest.raises(StaleGeneration):
        store.fence(4)
    assert newest(store).step == 10  # what was there before counts
    store.save(11, 5, PARTS)
    store.save(12, 6, PARTS)
    with pytest.raises(StaleGeneration):  # also without a fence
        store.save(13, 5, PARTS)
    store.fence(7)
    assert [name for name in names(tmp_path) if name.startswith("fence")] == ["fence-7"]
    assert store.generation() == 7
    assert newest(store).step == 12


def test_a_writer_fenced_off_while_it_writes_is_refused(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    store.save(1, 1, PARTS)
    with pytest.raises(StaleGeneration):
        store.save(2, 1, {"weights": lambda _: other.fence(2)})
    assert names(tmp_path) == ["fence-2", "step-1-gen-1"]


def test_a_writer_overtaken_while_it_writes_is_refused(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)

    def write(_: BinaryIO) -> None:
        other.save(1, 2, PARTS)

    with pytest.raises(StaleGeneration):
        store.save(2, 1, {"weights": write})
    assert names(tmp_path) == ["step-1-gen-2"]


def test_a_writer_that_froze_before_its_rename_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fenced off between its last look and its rename: it arrives, is not seen, and goes."""
    store, other = Store(tmp_path), Store(tmp_path)
    store.save(1, 1, PARTS)
    seen = []

    def thaw(real: Callable[..., None], source: Path, target: Path) -> None:
        if target.name == "step-2-gen-1":
            monkeypatch.undo()
            other.fence(2)
            real(source, target)
            seen.append(other.latest())
        else:
            real(source, target)

    monkeypatch.setattr(module, "os", Wrapped(rename=thaw))
    with pytest.raises(StaleGeneration):
        store.save(2, 1, PARTS)
    assert seen[0].checkpoint.step == 1
    assert "arrived after generation 2 had taken over" in seen[0].rejected[0].reason
    assert names(tmp_path) == ["fence-2", "step-1-gen-1"]


def test_a_late_one_that_could_not_be_removed_is_never_used(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, 1, PARTS)
    late = Store(tmp_path / "elsewhere").save(2, 1, PARTS)
    store.fence(2)
    late.rename(tmp_path / "step-2-gen-1")
    assert newest(store).step == 1
    store.fence(3)  # nor does the next fence let it in
    assert newest(store).step == 1
    store.save(2, 3, PARTS)
    assert "step-2-gen-1" not in names(tmp_path)


def test_a_damaged_fence_still_refuses_and_loses_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(1, 1, PARTS)
    store.fence(2)
    (tmp_path / "fence-2").write_bytes(b"\0")
    assert newest(store).step == 1
    with pytest.raises(StaleGeneration):
        store.save(2, 1, PARTS)


def test_cleaning_spares_a_live_writer(tmp_path: Path) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    for leftover in (".saving-1-ab", ".removed-ab"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights").write_bytes(b"half")
    (tmp_path / ".fencing-0-ab").write_bytes(b"{")
    (tmp_path / "notes.txt").write_bytes(b"of the user")

    def write(file: BinaryIO) -> None:
        other.save(1, 1, PARTS)
        other.clean()
        file.write(b"on")

    assert store.save(2, 1, {"weights": write}) == tmp_path / "step-2-gen-1"
    assert names(tmp_path) == ["notes.txt", "step-1-gen-1", "step-2-gen-1"]
    assert newest(store).read("weights") == b"on"


def test_a_temporary_folder_cleaned_away_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Store(tmp_path)

    def mkdir(real: Callable[..., None], path: Path) -> None:
        real(path)
        if not made:
            made.append(path)
            other.clean()

    made: list[Path] = []
    monkeypatch.setattr(module, "os", Wrapped(mkdir=mkdir))
    Store(tmp_path).save(1, 1, PARTS)
    assert made
    assert names(tmp_path) == ["step-1-gen-1"]


def test_a_reader_looks_again_when_what_it_read_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = Store(tmp_path, keep=1), Store(tmp_path, keep=1)
    writer.save(1, 1, PARTS)

    def stat(real: Callable[..., os.stat_result], path: Path) -> os.stat_result:
        monkeypatch.undo()
        writer.save(2, 1, PARTS)
        return real(path)

    monkeypatch.setattr(module, "os", Wrapped(stat=stat))
    found = reader.latest()
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.rejected) == (2, ())


class Wrapped:
    """The os module, with some functions put between: each gets the real one first."""

    def __init__(self, **between: Callable[..., Any]) -> None:
        self.between = between

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        between = self.between.get(name)
        return real if between is None else lambda *given: between(real, *given)


class Dead(BaseException):
    """The machine is off."""


class Failing:
    """The os module of a machine that goes off before its n-th change: nothing happens after that.

    `power_off` takes away what was not synced: contents of files, names in folders, renames.
    """

    CHANGES = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "close")

    def __init__(self, stop: int) -> None:
        self.left = stop
        self.unsynced: dict[int, None] = {}
        self.unnamed: dict[int, set[int]] = {}
        self.renamed: dict[int, list[tuple[Path, Path]]] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGES:
            return real
        return lambda *given: self._call(name, real, *given)

    def _call(self, name: str, real: Callable[..., Any], *given: Any) -> Any:
        if name == "close":
            return real(*given)  # the kernel closes files of the dead too
        if self.left <= 0:
            raise Dead
        self.left -= 1
        if name == "write" and self.left == 0:
            real(given[0], bytes(given[1])[: len(given[1]) // 2])  # torn
            self._note(name, None, given)
            raise Dead
        done = real(*given)
        self._note(name, done, given)
        return done

    def _note(self, name: str, done: Any, given: tuple[Any, ...]) -> None:
        if name == "open" and given[1] & os.O_CREAT:
            self.unnamed.setdefault(os.stat(Path(given[0]).parent).st_ino, set()).add(os.fstat(done).st_ino)
        elif name == "rename":
            self.renamed.setdefault(os.stat(given[1].parent).st_ino, []).append(given)
        elif name == "write":
            self.unsynced[os.fstat(given[0]).st_ino] = None
        elif name == "fsync":
            for kind in (self.unsynced, self.unnamed, self.renamed):
                kind.pop(os.fstat(given[0]).st_ino, None)

    def power_off(self, folder: Path) -> None:
        for source, target in reversed([pair for pairs in self.renamed.values() for pair in pairs]):
            if target.exists():
                target.rename(source)
        for inside in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
            lost = self.unnamed.get(inside.stat().st_ino, set())
            for path in inside.iterdir():
                if path.is_file() and path.stat().st_ino in lost:
                    path.unlink()
                elif path.is_file() and path.stat().st_ino in self.unsynced:
                    os.truncate(path, path.stat().st_size // 2)


def until_done(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    power: bool,
    before: Callable[[Store], object],
    act: Callable[[Store], object],
) -> list[tuple[int, Store, bool]]:
    """`act` on a fresh folder, dying before its first, second, … change, until it gets through."""
    ends = []
    for stop in range(400):
        folder = tmp_path / f"stop-{stop}"
        store = Store(folder, keep=2)
        before(store)
        failing = Failing(stop)
        with monkeypatch.context() as patch:
            patch.setattr(module, "os", failing)
            try:
                act(store)
                died = False
            except Dead:
                died = True
        if power:
            failing.power_off(folder)
        ends.append((stop, Store(folder, keep=2), died))
        if not died:
            return ends
    raise AssertionError("it never got through")


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_save_that_dies_anywhere_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool, again: bool
) -> None:
    def before(store: Store) -> None:
        for step in (1, 2):
            store.save(step, 1, content(step))
        (store.folder / ".saving-1-ab").mkdir()
        (store.folder / ".saving-1-ab" / "weights").write_bytes(b"half")

    wanted = 2 if again else 3
    ends = until_done(tmp_path, monkeypatch, power, before, lambda store: store.save(wanted, 1, content(wanted)))
    assert len(ends) > 20
    seen = set()
    for stop, store, died in ends:
        found = newest(store)
        assert is_whole(found), f"stopped before change {stop}"
        assert not store.latest().rejected
        assert found.step == wanted or (died and found.step == 2)
        seen.add(found.path.name)
        store.save(4, 1, content(4))  # the next one goes through and clears up
        assert is_whole(newest(store))
        assert newest(store).step == 4
        assert len(names(store.folder)) == 2
    assert len(seen) == 2  # some died before the rename, some after


@pytest.mark.parametrize("power", [False, True])
def test_a_fence_that_dies_anywhere_is_up_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, power: bool) -> None:
    def before(store: Store) -> None:
        store.fence(1)
        store.save(1, 1, content(1))

    up = set()
    for stop, store, died in until_done(tmp_path, monkeypatch, power, before, lambda store: store.fence(2)):
        up.add(store.generation())
        assert store.generation() == 2 or died
        assert is_whole(newest(store)), f"stopped before change {stop}"
        store.fence(3)
        store.save(2, 3, content(2))
        assert names(store.folder) == ["fence-3", "step-1-gen-1", "step-2-gen-3"]
    assert up == {1, 2}


WRITER = """
import sys
from stretto.runtime.checkpoint import Store, StaleGeneration
folder, generation, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = Store(folder, keep=2)
while True:
    step += 1
    body = b"%d" % step * 500
    try:
        store.save(step, generation, {"weights": body, "state.json": lambda file: file.write(b"state %d" % step)})
    except StaleGeneration:
        print("stale", flush=True)
        break
    print(step, flush=True)
"""


def writer(folder: Path, generation: int, step: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), str(generation), str(step)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_real_kill_at_any_time_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    chance, store, said = random.Random(0), Store(tmp_path, keep=2), 0
    for _ in range(12):
        with writer(tmp_path, 1, said) as process:
            assert process.stdout is not None
            for _ in range(chance.randint(1, 4)):
                said = int(process.stdout.readline())
            for _ in range(chance.randint(0, 20_000)):
                pass  # somewhere inside the next save
            os.kill(process.pid, signal.SIGKILL)
            said = max([said, *map(int, process.stdout.read().split())])
        found = newest(store)
        assert is_whole(found)
        assert found.step >= said
        assert not store.latest().rejected
        said = found.step
    store.save(said + 1, 1, content(said + 1))
    assert len(names(tmp_path)) == 2


def test_an_evicted_writer_beside_the_new_one_does_no_harm(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    with writer(tmp_path, 1, 0) as old:
        assert old.stdout is not None
        old.stdout.readline()
        os.kill(old.pid, signal.SIGSTOP)  # frozen wherever it is
        store.fence(2)
        found = newest(store)
        assert is_whole(found)
        with writer(tmp_path, 2, found.step) as new:
            assert new.stdout is not None
            new.stdout.readline()
            os.kill(old.pid, signal.SIGCONT)
            assert old.stdout.read().split()[-1] == "stale"
            for _ in range(3):
                new.stdout.readline()
            new.kill()
    found = newest(store)
    assert is_whole(found)
    assert found.generation == 2
    store.save(found.step + 1, 2, content(found.step + 1))
    assert len([name for name in names(tmp_path) if name != "fence-2"]) == 2


def test_threads_may_save_at_once(tmp_path: Path) -> None:
    store, errors = Store(tmp_path, keep=3), []

    def save(steps: range) -> None:
        try:
            for step in steps:
                store.save(step, 1, content(step))
                # Whole when it was found; by now three newer ones may have replaced it.
                assert store.latest().checkpoint is not None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(range(first, 30, 3),)) for first in (0, 1, 2, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert is_whole(newest(store))
    assert newest(store).step == 29
    assert not [name for name in names(tmp_path) if name.startswith(".")]


class Gate:
    """A part that lets the test decide when it is written."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def __call__(self, file: BinaryIO) -> None:
        self.begun.set()
        assert self.open.wait(30)
        file.write(b"through")


def test_saving_in_the_background_keeps_only_the_latest_waiting(tmp_path: Path) -> None:
    store, gate = Store(tmp_path, keep=9), Gate()
    with AsyncSaver(store) as saver:
        assert saver.wait() is None
        saver.save(1, 1, {"weights": gate})
        assert gate.begun.wait(30)
        for step in (2, 3, 4):
            saver.save(step, 1, PARTS)
        assert saver.busy
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            saver.wait(0.01)
        gate.open.set()
        assert saver.wait() == tmp_path / "step-4-gen-1"
        assert not saver.busy
    assert names(tmp_path) == ["step-1-gen-1", "step-4-gen-1"]
    with pytest.raises(CheckpointError, match="closed"):
        saver.save(5, 1, PARTS)


def test_closing_waits_for_what_was_asked_for(tmp_path: Path) -> None:
    with AsyncSaver(Store(tmp_path)) as saver:
        saver.save(1, 1, PARTS)
    assert names(tmp_path) == ["step-1-gen-1"]
    assert not saver._thread.is_alive()


def test_an_error_in_the_background_surfaces_once_at_the_next_call(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.fence(5)
    saver = AsyncSaver(store)
    saver.save(1, 4, PARTS)
    with pytest.raises(StaleGeneration) as caught:
        saver.wait()
    assert "_refuse_stale" in caught.value.__notes__[0]
    assert saver.wait() is None

    def fail(_: BinaryIO) -> None:
        begun.set()
        raise RuntimeError("no")

    begun = threading.Event()
    saver.save(1, 5, {"weights": fail})
    assert begun.wait(30)
    while saver.busy:
        pass
    with pytest.raises(RuntimeError, match="no"):
        saver.save(2, 5, PARTS)
    saver.save(3, 5, PARTS)
    saver.close()
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-3-gen-5"]
    other = AsyncSaver(store)
    other.save(1, 1, PARTS)
    with pytest.raises(StaleGeneration):
        other.close()


def test_parts_are_let_go_after_a_save_and_after_an_error(tmp_path: Path) -> None:
    with AsyncSaver(Store(tmp_path)) as saver:
        for wrong in (False, True):
            gate = Gate()
            gate.open.set()
            held = weakref.ref(gate)
            saver.save(1, 1, {"a/b" if wrong else "weights": gate})
            del gate
            if wrong:
                with pytest.raises(ValueError, match="a/b"):
                    saver.wait()
            else:
                saver.wait()
            gc.collect()
            assert held() is None


def test_the_manifest_can_be_read_by_people(tmp_path: Path) -> None:
    path = Store(tmp_path).save(4, 2, PARTS, {"loop": 0})
    body = json.loads(json.loads((path / MANIFEST).read_text())["body"])
    assert body["step"] == 4
    assert body["parts"]["weights"][0] == 3000


def _measure() -> None:
    import tempfile
    import time

    data = os.urandom(400_000_000)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder, keep=1)
        for what, work in (
            ("save", lambda: store.save(1, 1, {"weights": data})),
            ("validate", store.latest),
            ("find", lambda: store.latest(validate=False)),
        ):
            begun = time.perf_counter()
            work()
            taken_s = time.perf_counter() - begun
            print(f"{what}: {taken_s * 1e3:.1f} ms for {len(data) / 1e6:.0f} MB ({len(data) / taken_s / 1e6:.0f} MB/s)")
        begun = time.perf_counter()
        for step in range(2, 52):
            store.save(step, 1, {"weights": b"x" * 1000})
        print(f"save of 1 kB: {(time.perf_counter() - begun) / 50 * 1e3:.2f} ms")


if __name__ == "__main__":
    _measure()
