"""Checkpoints of real jobs: all workers die, files are damaged, others go on. Samples count once, weights agree."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import chaos
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import launch
from stretto.errors import UsageError
from stretto.runtime.checkpoint import Store
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.testing import Harness
from stretto.torch.checkpoints import read_file, write_file
from stretto.torch.state import assemble, dismantle

CASE: dict[str, Any] = {**chaos.CASE, "epochs": 10}
SCRIPTS = Path(__file__).parent / "scripts"
KEEP = 3


@pytest.fixture(scope="module")
def warm() -> Iterator[ForkServer]:
    with chaos.warm_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, warm: ForkServer) -> dict[str, Any]:
    return alone(tmp_path_factory.mktemp("alone"), warm, CASE)


def alone(folder: Path, warm: ForkServer, case: dict[str, Any], script: str = "elastic.py") -> dict[str, Any]:
    """One worker outside Stretto."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CASE": json.dumps(case), "STRETTO_FOLDER": str(folder)}
    log = folder / "alone.log"
    with launch([sys.executable, str(SCRIPTS / script)], env=environment, log=log, warm=warm) as process:
        assert process.wait(60.0) == 0, log.read_text()
    found: dict[str, Any] = json.loads((folder / "alone.result").read_text())
    return found


def start(
    folder: Path,
    warm: ForkServer,
    count: int,
    script: str = "elastic.py",
    every_s: float = 0.03,
    least: int = 0,
    **case: Any,
) -> Harness:
    return Harness(
        folder,
        [sys.executable, str(SCRIPTS / script)],
        workers=count,
        min_workers=least or count,
        environment={
            "CASE": json.dumps(CASE | case),
            "OMP_NUM_THREADS": "1",
            "STRETTO_CHECKPOINT_S": str(every_s),
        },
        options=chaos.OPTIONS,
        warm=warm,
    )


def checkpoints(harness: Harness) -> list[Path]:
    """Oldest first."""
    found = [path for path in harness.folder.glob("checkpoints/step-*") if re.fullmatch(r"step-\d+-gen-\d+", path.name)]
    return sorted(found, key=lambda path: (int(path.name.split("-")[3]), step_of(path)))


def step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def in_loop(harness: Harness, loop: int) -> bool:
    return any(e["event"] == "progress" and e["heartbeat"]["loop"] >= loop for e in harness.events)


def kill_all(harness: Harness) -> None:
    for worker in harness.workers:
        worker.kill()
    harness.wait(lambda: not any(worker.running for worker in harness.workers), "all have ended")


def go_on(harness: Harness, count: int) -> int:
    """Others take over; the step at which they begin."""
    before = set(harness.members())
    harness.size = count
    harness.tell({"want": count})
    others = {worker.name for worker in harness.launch(count)}
    harness.wait(lambda: harness.over or not before & set(harness.members()), "others are there")
    formed = next(e for e in harness.events if e["event"] == "formed" and set(e["members"]) <= others)
    return int(formed["applied"])


def finish(harness: Harness, expected: dict[str, Any], case: dict[str, Any] = CASE) -> None:
    assert harness.wait_over()["event"] == "done", harness.describe()
    chaos.check(harness, case, expected)


def cut(name: str, share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        os.truncate(path / name, int((path / name).stat().st_size * share))

    return damage


def flip(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (path / name).write_bytes(content)

    return damage


def lose(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": cut("state", 0.0),
    "torn early": cut("state", 0.01),
    "torn late": cut("state", 0.999),
    "flipped": flip("state"),
    "skeleton torn": cut("skeleton", 0.5),
    "skeleton flipped": flip("skeleton"),
    "manifest torn": cut("manifest.json", 0.5),
    "manifest flipped": flip("manifest.json"),
    "manifest lost": lose("manifest.json"),
    "state lost": lose("state"),
    "folder emptied": lambda path: [child.unlink() for child in path.iterdir()] and None,
}


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, warm: ForkServer, expected: dict[str, Any]) -> None:
    """One job, hurt once for every kind of damage: each time the one before is used, and the numbers stay bounded."""
    with start(tmp_path, warm, 1, pause_s=0.004) as harness:
        for kind, damage in DAMAGES.items():
            seen = {path.name for path in checkpoints(harness)}
            harness.wait(
                lambda seen=seen: harness.over or sum(p.name not in seen for p in checkpoints(harness)) >= 2,
                "two more checkpoints",
            )
            assert not harness.over, f"over before {kind}"
            kill_all(harness)
            *_, good, newest = checkpoints(harness)
            damage(newest)
            assert go_on(harness, 1) == step_of(good), kind
        finish(harness, expected)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_restored_at_another_size(
    tmp_path: Path, warm: ForkServer, expected: dict[str, Any], before: int, after: int
) -> None:
    with start(tmp_path, warm, before, least=min(before, after)) as harness:
        harness.wait_members(before)
        harness.wait(lambda: len(checkpoints(harness)) >= 2, "two checkpoints")
        kill_all(harness)
        newest = checkpoints(harness)[-1]
        assert go_on(harness, after) == step_of(newest)
        harness.wait_members(after)
        finish(harness, expected)
        assert len(checkpoints(harness)) <= KEEP
        assert {path.name.split("-")[0] for path in newest.parent.iterdir()} == {"step", "fence"}, "nothing is left"


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_no_checkpoint_is_left(tmp_path: Path, warm: ForkServer, expected: dict[str, Any], what: str) -> None:
    """It begins again, exactly, and says so."""
    with start(tmp_path, warm, 2) as harness:
        harness.wait(lambda: len(checkpoints(harness)) >= 2, "two checkpoints")
        kill_all(harness)
        for path in checkpoints(harness):
            flip("state")(path) if what == "damaged" else shutil.rmtree(path)
        assert go_on(harness, 2) == 0
        finish(harness, expected)
        said = "".join(worker.text() for worker in harness.workers)
        assert ("cannot be used" in said) == (what == "damaged"), said


@pytest.mark.parametrize("kept", [True, False], ids=["checkpoint", "no checkpoint"])
def test_all_die_in_a_later_loop(tmp_path: Path, warm: ForkServer, kept: bool) -> None:
    """The checkpoint is of the first loop, which was over: what came after it is done again, not passed over."""
    case = {**CASE, "loops": 2, "epochs": 6}
    right = alone(tmp_path / "alone", warm, case)
    with start(tmp_path / "job", warm, 2, every_s=0.05 if kept else 600.0, **case) as harness:
        first: list[Path] = []
        if kept:
            harness.wait(lambda: bool(checkpoints(harness)) or harness.over, "a checkpoint")
            copy = tmp_path / "copy"
            first.append(shutil.copytree(checkpoints(harness)[0], copy / checkpoints(harness)[0].name))
            assert step_of(first[0]) < 60
        harness.wait(lambda: harness.over or in_loop(harness, 1), "the second loop")
        kill_all(harness)
        assert not harness.over
        for path in checkpoints(harness):
            shutil.rmtree(path)
        for path in first:
            shutil.copytree(path, tmp_path / "job" / "checkpoints" / path.name)
        assert go_on(harness, 2) == (step_of(first[0]) if kept else 0)
        finish(harness, right, case)


def being_written(harness: Harness, files: int) -> bool:
    """Whether a checkpoint is being written that has so many files by now."""
    for path in harness.folder.glob("checkpoints/.saving-*"):
        try:
            return len(os.listdir(path)) >= files
        except FileNotFoundError:
            continue
    return False


def catch(harness: Harness, files: int) -> None:
    """Return in the middle of writing: at once, so that this does not wait for events."""
    end_s = time.monotonic() + 30.0
    while not being_written(harness, files):
        assert not harness.over, "the job ended before"
        assert time.monotonic() < end_s, harness.describe()


HEAVY = {"ballast": 1_000_000, "epochs": 4}


def test_killed_while_writing(tmp_path: Path, warm: ForkServer) -> None:
    """At several instants of a write: what was there before is used, and the rest is cleaned up."""
    right = alone(tmp_path / "alone", warm, HEAVY, "keeping.py")
    with start(tmp_path / "job", warm, 1, "keeping.py", every_s=0.01, **HEAVY) as harness:
        for files in (0, 1, 1, 2, 3):
            harness.wait(lambda: harness.over or len(checkpoints(harness)) >= 2, "two checkpoints")
            catch(harness, files)
            kill_all(harness)
            usable = Store(tmp_path / "job" / "checkpoints").latest()
            assert not usable.rejected
            assert usable.checkpoint is not None
            assert go_on(harness, 1) == usable.checkpoint.step
        assert harness.wait_over()["event"] == "done", harness.describe()
        same(harness, right)
        audit(ledger_files(harness.folder / "ledger"), KEEPING_LONG).check()
        assert len(list(tmp_path.glob("job/checkpoints/step-*"))) <= KEEP
        assert not list(tmp_path.glob("job/checkpoints/.[!.]*")), "nothing is left of what was being written"


def test_a_frozen_writer_writes_nothing_any_more(tmp_path: Path, warm: ForkServer) -> None:
    """The leader freezes in the middle of a write; the others go on, write, and it wakes up."""
    right = alone(tmp_path / "alone", warm, HEAVY, "keeping.py")
    with start(tmp_path / "job", warm, 2, "keeping.py", every_s=0.01, **HEAVY) as harness:
        harness.wait_members(2)
        harness.wait(lambda: harness.over or bool(checkpoints(harness)), "a checkpoint")
        catch(harness, 1)
        leader = harness.worker(harness.members()[0])
        leader.freeze()
        theirs = {path.name for path in checkpoints(harness)}
        harness.wait_members(1)
        harness.wait(lambda: harness.over or not theirs & {p.name for p in checkpoints(harness)}, "others have written")
        assert not harness.over
        leader.thaw()
        harness.wait(lambda: not leader.running, "it has ended")
        assert leader.status == 75
        assert harness.wait_over()["event"] == "done", harness.describe()
        same(harness, right)
        audit(ledger_files(harness.folder / "ledger"), KEEPING_LONG).check()
        assert {path.name.split("-")[3] for path in checkpoints(harness)} == {"2"}
        assert not list(tmp_path.glob("job/checkpoints/.[!.]*"))


KEEPING_LONG = {number: Loop(samples=240, size=24, epochs=4, seed=number) for number in range(3)}
KEEPING = {number: Loop(samples=240, size=24, epochs=2, seed=number) for number in range(3)}


@pytest.mark.parametrize("at", ["after the first loop", "in the second loop"])
def test_a_saved_state_goes_on_anywhere(tmp_path: Path, warm: ForkServer, at: str) -> None:
    """Saved by two workers; restored by three, and outside Stretto by one: the end is the same."""
    file = tmp_path / "saved.safetensors"
    right = alone(tmp_path / "right", warm, {}, "keeping.py")
    with start(tmp_path / "saving", warm, 2, "keeping.py", epochs=2, save=str(file), at=at) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        same(harness, right)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name], "nothing else is left"
    with start(tmp_path / "restoring", warm, 3, "keeping.py", epochs=2, restore=str(file)) as harness:
        assert harness.wait_over()["event"] == "done", harness.describe()
        same(harness, right)
        done_again = audit(ledger_files(harness.folder / "ledger"), {2: KEEPING[2]})
        assert [fault for fault in done_again.faults if fault.loop == 2 or fault.loop == 0] == []
    found = alone(tmp_path / "one", warm, {"restore": str(file)}, "keeping.py")
    assert (found["steps"], found["facts"]) == (right["steps"], right["facts"])
    assert norm(found["exact"], right["exact"]) <= 1e-9


def test_a_checkpoint_comes_before_a_saved_file(tmp_path: Path, warm: ForkServer) -> None:
    """A script that begins with a file is started again after all have died: it goes on from the checkpoint."""
    file = tmp_path / "saved.safetensors"
    right = alone(tmp_path / "right", warm, {"save": str(file)}, "keeping.py")
    with start(tmp_path / "job", warm, 2, "keeping.py", every_s=0.02, least=1, epochs=2, restore=str(file)) as harness:
        harness.wait(lambda: harness.over or bool(checkpoints(harness)), "a checkpoint")
        assert not harness.over
        kill_all(harness)
        assert go_on(harness, 1) == step_of(checkpoints(harness)[-1]) > 20
        assert harness.wait_over()["event"] == "done", harness.describe()
        same(harness, right)


def same(harness: Harness, right: dict[str, Any]) -> None:
    results = [json.loads(path.read_text()) for path in harness.folder.glob("w*.result")]
    assert results
    for result in results:
        assert (result["steps"], result["facts"]) == (right["steps"], right["facts"])
        assert norm(result["exact"], right["exact"]) <= 1e-9


def norm(here: list[float], there: list[float]) -> float:
    return float(np.linalg.norm(np.array(here) - np.array(there)) / np.linalg.norm(there))


def foreign(path: Path) -> None:
    """A file of the right format, by another program."""
    save_file({"weight": torch.zeros(3)}, path)


def torn(path: Path) -> None:
    write_file(path, *dismantle({"cursor": [0, 0, 0, 0], "weight": torch.zeros(1000)}))
    os.truncate(path, path.stat().st_size - 100)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("weights = 3\n" * 100),
    "pickle": lambda path: torch.save({"a": 1}, path),
    "foreign": foreign,
    "torn": torn,
}


@pytest.mark.parametrize("kind", NO_FILES)
def test_a_file_that_cannot_be_restored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "state.safetensors"
    NO_FILES[kind](path)
    with pytest.raises(UsageError) as error:
        read_file(path)
    assert str(path) in error.value.message
    assert "job.save" in error.value.hint


def test_the_state_of_another_model(tmp_path: Path, warm: ForkServer) -> None:
    file = tmp_path / "saved.safetensors"
    alone(tmp_path / "alone", warm, {"save": str(file), "wide": True}, "keeping.py")
    with start(tmp_path / "job", warm, 2, "keeping.py", restore=str(file)) as harness:
        end = harness.wait_over()
        assert end["event"] == "failed"
        assert end["reason"].count("Traceback") == 1
        assert "differs from" in end["reason"]


def test_an_interrupted_save_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_file(path, *dismantle({"weight": torch.ones(3)}))
    with pytest.raises(OSError):
        write_file(path.parent / "none" / path.name, *dismantle({}))
    with pytest.raises(RuntimeError):
        write_file(path, "{}", [torch.empty(3, device="meta")])
    skeleton, tensors = read_file(path)
    assert assemble(skeleton, tensors)["weight"].tolist() == [1.0, 1.0, 1.0]
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def loads(path: Path) -> bool:
    try:
        torch.load(path)
    except (OSError, RuntimeError, EOFError):
        return False
    return True


@pytest.mark.parametrize("by", ["all", "leader"])
def test_a_file_that_several_workers_save_to_is_spoilt_meanwhile(tmp_path: Path, warm: ForkServer, by: str) -> None:
    """As docs/torch/best.md says of `torch.save`: one worker has written it, another one is at it."""
    with start(tmp_path, warm, 2, "saving.py", by=by) as harness:
        harness.wait(lambda: (tmp_path / "writing").exists() or harness.over, "the other worker")
        assert loads(tmp_path / "model.pt") == (by == "leader")
        (tmp_path / "go").touch()
        assert harness.wait_over()["event"] == "done", harness.describe()


def test_conjugates_are_numbers_of_their_own() -> None:
    """Lazily conjugated, they share the memory of what they were made of."""
    one = torch.tensor([1 + 2j, 3 - 1j])
    found = assemble(*dismantle({"one": one, "other": one.conj(), "part": one.conj().imag}))
    assert torch.equal(found["one"], one)
    assert torch.equal(found["other"], one.conj().resolve_conj())
    assert torch.equal(found["part"], torch.tensor([-2.0, 1.0]))
