"""The ledger adds up exactly when every sample was fed once; one slice less or more is found, and named.

What it costs a worker: some 7 µs per micro-batch of 64 shuffled samples, 2 µs per applied step;
`python tests/runtime/test_ledger.py` measures it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.runtime.ledger import AuditError, Fault, Ledger, LedgerError, audit, ledger_files
from stretto.runtime.order import Drawn, Loop, Turns, indices, micro, slices

LOOP = Loop(samples=23, size=8, epochs=2, seed=4)


def feed(
    book: list[Ledger],
    step: int,
    generation: int,
    *,
    loop: Loop = LOOP,
    number: int = 0,
    applies: tuple[int, ...] | None = None,
    change: Callable[[int, np.ndarray], np.ndarray] = lambda _, part: part,
) -> None:
    """One step of the members `book`; `applies` are the ranks that get to apply it (default: all)."""
    batch = indices(loop, step)
    for rank, (start, stop) in enumerate(slices(len(batch), len(book))):
        for first, last in micro(start, stop, 3):
            book[rank].fed(number, step, generation, change(rank, batch[first:last]))
    for rank in range(len(book)) if applies is None else applies:
        book[rank].applied(number, step, generation)


def opened(folder: Path, count: int) -> list[Ledger]:
    return [Ledger(folder / f"w{rank}.ledger", f"w{rank}") for rank in range(count)]


def kinds(folder: Path, **given_: object) -> list[str]:
    return [fault.kind for fault in audit(ledger_files(folder), {0: LOOP}, **given_).faults]


def test_an_undisturbed_run_adds_up(tmp_path: Path) -> None:
    book = opened(tmp_path, 3)
    for step in range(LOOP.total_steps):
        feed(book, step, 1)
    found = audit(ledger_files(tmp_path), {0: LOOP})
    found.check()
    assert (found.steps, found.samples, found.discarded, found.torn) == (6, 46, 0, ())


def test_a_step_counts_in_the_highest_generation_that_applied_it(tmp_path: Path) -> None:
    book = opened(tmp_path, 3)
    feed(book, 0, 1)
    feed(book, 1, 1, applies=())  # one died: nobody applied, all is done again
    feed(book[:2], 1, 2, applies=(1,))  # applied by one, which died with the result
    feed(book[:1], 1, 3)
    feed(book[:1], 2, 3)
    for step in range(3, 6):
        feed([book[0], book[2]], step, 4)
    found = audit(ledger_files(tmp_path), {0: LOOP})
    found.check()
    assert found.discarded == 16


def test_a_result_that_one_survivor_has_counts(tmp_path: Path) -> None:
    book = opened(tmp_path, 2)
    feed(book, 0, 1, applies=(0,))  # the other takes the state from it
    for step in range(1, 6):
        feed(book, step, 2)
    audit(ledger_files(tmp_path), {0: LOOP}).check()


def test_a_restore_voids_what_came_after_its_cursor(tmp_path: Path) -> None:
    old, new = opened(tmp_path, 2)
    for step in range(5):
        feed([old], step, 1)
    new.restored(0, 2, 2)
    for step in range(2, 4):
        feed([new], step, 2)
    found = audit(ledger_files(tmp_path), {0: LOOP}, stopped={0: 4})
    found.check()
    assert (found.steps, found.discarded) == (4, 7 + 8 + 8)
    assert "undone" in kinds(tmp_path)  # step 4 of generation 1 does not count any more


def test_a_restore_voids_later_loops_too(tmp_path: Path) -> None:
    one = Loop(samples=4, size=4)
    old, new = opened(tmp_path, 2)
    for number in (0, 1):
        feed([old], 0, 1, loop=one, number=number)
    new.restored(0, 0, 2)
    feed([new], 0, 2, loop=one, number=0)
    found = audit(ledger_files(tmp_path), {0: one, 1: one})
    assert [(fault.kind, fault.loop) for fault in found.faults] == [("undone", 1), ("epoch", 1)]


def test_without_the_restore_line_a_second_start_is_found(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    for step in (0, 1, 2, 1, 2, 3, 4, 5):
        feed([only], step, 1)
    assert {"doubled", "reapplied"} <= set(kinds(tmp_path))


def test_a_result_that_was_thrown_away_does_not_count(tmp_path: Path) -> None:
    book = opened(tmp_path, 2)
    for step in range(6):
        feed(book[:1], step, 1)
    feed(book[1:], 2, 2)  # the state behind steps 3 to 5 of generation 1 is gone
    assert kinds(tmp_path) == ["lost", "lost", "lost"]


def test_a_process_that_applies_a_step_twice_is_found(tmp_path: Path) -> None:
    book = opened(tmp_path, 2)
    for step in range(3):
        feed(book, step, 1)
    for step in range(2, 6):
        feed(book, step, 2)
    found = audit(ledger_files(tmp_path), {0: LOOP})
    assert found.faults == tuple(
        Fault(kind="reapplied", loop=0, step=2, generation=2, workers=(name,)) for name in ("w0", "w1")
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_dropping_doubling_or_swapping_one_part_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random histories add up; the same history with one micro-batch changed does not."""
    loop = Loop(samples=data.draw(st.integers(2, 40)), size=data.draw(st.integers(1, 12)), epochs=2, seed=1)
    history = [data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)) for _ in range(loop.total_steps)]
    where = data.draw(st.integers(0, loop.total_steps - 1))
    mutate = data.draw(st.sampled_from(MUTATIONS))

    def run(change: Callable[[np.ndarray], np.ndarray]) -> Path:
        folder = tmp_path_factory.mktemp("run")
        book, generation = opened(folder, 4), 0
        for step, tries in enumerate(history):
            for attempt, members in enumerate(tries):
                generation += 1
                counts = attempt == len(tries) - 1
                touched = [False]

                def once(_: int, part: np.ndarray, hit: bool = counts and step == where, done=touched) -> np.ndarray:
                    hit, done[0] = hit and not done[0], True
                    return change(part) if hit else part

                everybody = tuple(range(members))
                feed(book[:members], step, generation, loop=loop, applies=everybody if counts else (), change=once)
        for ledger in book:
            ledger.close()
        return folder

    audit(ledger_files(run(lambda part: part)), {0: loop}).check()
    found = audit(ledger_files(run(lambda part: mutate[1](part, loop))), {0: loop})
    first = found.faults[0]
    assert (first.step, mutate[0]) == (where, first.kind)
    with pytest.raises(AuditError, match=f"{mutate[0]}: loop 0 step {where} "):
        found.check()


MUTATIONS: list[tuple[str, Callable[[np.ndarray, Loop], np.ndarray]]] = [
    ("missing", lambda part, _: part[:0]),
    ("missing", lambda part, _: part[1:]),
    ("doubled", lambda part, _: np.concatenate([part, part])),
    ("doubled", lambda part, _: np.append(part, part[0])),
    ("missing", lambda part, loop: np.append(part[1:], loop.samples)),
    ("foreign", lambda part, loop: np.append(part, loop.samples)),
]


REPEATS = [[[5, 5, 1], [5, 2, 2, 2]], [[0], [5, 5]]]
"""Batches of two epochs with repetition."""


def fed_by_one(folder: Path, steps: list[list[int]]) -> tuple[list[str], int]:
    """Kinds of faults, and how many samples counted."""
    (only,) = opened(folder, 1)
    for step, samples in enumerate(steps):
        only.fed(0, step, 1, samples[:1])
        only.fed(0, step, 1, samples[1:])
        only.applied(0, step, 1)
    only.close()
    loop = Drawn(lambda epoch: REPEATS[epoch], samples=6, epochs=2)
    found = audit(ledger_files(folder), {0: loop})
    return [fault.kind for fault in found.faults], found.samples


def test_a_sampler_may_repeat_samples(tmp_path: Path) -> None:
    assert fed_by_one(tmp_path, [[5, 5, 1], [5, 2, 2, 2], [0], [5, 5]]) == ([], 10)


@pytest.mark.parametrize(
    ("steps", "kinds"),
    [
        ([[5, 1], [5, 2, 2, 2], [0], [5, 5]], ["missing", "epoch"]),
        ([[5, 5, 5, 1], [5, 2, 2, 2], [0], [5, 5]], ["doubled", "epoch"]),
        ([[5, 5, 1], [5, 2, 2, 5], [0], [5, 5]], ["missing", "doubled", "epoch"]),
        ([[5, 5, 1], [5, 2, 2, 2], [0, 3], [5, 5]], ["foreign", "epoch"]),
        ([[5, 5, 1], [5, 2, 2, 2], [0]], ["undone", "epoch"]),
        ([[5, 5, 1], [5, 2, 2, 2], [0], [5, 5], [1]], ["beyond"]),
    ],
)
def test_what_is_fed_more_or_less_often_than_it_was_drawn_is_found(
    tmp_path: Path, steps: list[list[int]], kinds: list[str]
) -> None:
    assert fed_by_one(tmp_path, steps)[0] == kinds


@pytest.mark.parametrize(
    ("fed", "kinds"), [([0, 1, 2], []), ([0], []), ([0, 2], ["missing"]), ([0, 1, 1], ["doubled"]), ([], ["missing"])]
)
def test_each_place_of_a_step_without_samples_counts_once(tmp_path: Path, fed: list[int], kinds: list[str]) -> None:
    (only,) = opened(tmp_path, 1)
    for place in fed:
        only.fed(0, 0, 1, [place])
    only.applied(0, 0, 1)
    found = audit(ledger_files(tmp_path), {0: Turns(total_steps=1)})
    assert [fault.kind for fault in found.faults] == kinds


def test_a_fault_names_step_worker_and_generation(tmp_path: Path) -> None:
    book = opened(tmp_path, 2)
    for step in range(6):
        feed(book, step, 3)
    extra = indices(LOOP, 4)[:1]
    book[1].fed(0, 4, 3, extra)
    fault = audit(ledger_files(tmp_path), {0: LOOP}).faults[0]
    assert fault == Fault(kind="doubled", loop=0, step=4, generation=3, indices=(int(extra[0]),), workers=("w0", "w1"))
    assert str(fault) == f"doubled: loop 0 step 4 generation 3: 1 samples ({extra[0]}) by w0, w1"


def test_steps_that_the_loop_does_not_have_are_found(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    for step in range(6):
        feed([only], step, 1)
    only.applied(0, 6, 1)
    only.applied(5, 0, 1)
    assert kinds(tmp_path) == ["beyond", "beyond"]


def test_an_early_stop_is_declared(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    for step in range(4):
        feed([only], step, 1)
    assert kinds(tmp_path, stopped={0: 4}) == []
    assert kinds(tmp_path) == ["undone", "undone", "epoch"]


def test_drop_last_needs_no_sample_twice(tmp_path: Path) -> None:
    loop = Loop(samples=23, size=8, epochs=2, drop_last=True)
    (only,) = opened(tmp_path, 1)
    for step in range(4):
        feed([only], step, 1, loop=loop)
    audit(ledger_files(tmp_path), {0: loop}).check()


@pytest.mark.parametrize("top", [5, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**40])
def test_any_index_comes_back(tmp_path: Path, top: int) -> None:
    loop = Loop(samples=2**41, size=3, shuffle=False)
    with Ledger(tmp_path / "w.ledger", "w") as ledger:
        ledger.fed(0, 0, 1, [top, 0, 3])
        ledger.applied(0, 0, 1)
    (missing, foreign) = audit(ledger_files(tmp_path), {0: loop}, stopped={0: 1}).faults
    assert missing.indices == (1, 2)
    assert foreign.indices == (3, top)


def test_neighbours_are_written_as_a_run(tmp_path: Path) -> None:
    with Ledger(tmp_path / "w.ledger", "a worker\n") as ledger:
        ledger.fed(0, 0, 1, range(100, 164))
        ledger.fed(0, 1, 1, [2, 1, 0])  # as many as a run, but not one
        ledger.fed(0, 2, 1, [])
    lines = (tmp_path / "w.ledger").read_text().splitlines()
    assert [line.rsplit(" ", 1)[0] for line in lines] == [
        "ledger 1 a%20worker%0A",
        "fed 0 0 1 100-164",
        "fed 0 1 1 u2:AgABAAAA",
    ]


@pytest.mark.parametrize("wrong", [[-1, 2], [0.5], [[1, 2]]])
def test_what_is_no_sample_is_refused(tmp_path: Path, wrong: list[int]) -> None:
    with Ledger(tmp_path / "w.ledger", "w") as ledger, pytest.raises(LedgerError, match="integers from 0"):
        ledger.fed(0, 0, 1, wrong)


def test_a_torn_last_line_is_passed_over_wherever_it_is_torn(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    for step in range(6):
        feed([only], step, 1)
    whole = only.path.read_bytes()
    size = len(whole)
    only.fed(0, 6, 2, [9, 4, 1])
    longer = only.path.read_bytes()
    for cut in range(size, len(longer)):
        only.path.write_bytes(longer[:cut])
        found = audit([only.path], {0: LOOP})
        found.check()
        assert found.torn == ((str(only.path),) if cut > size else ())


def test_a_file_torn_in_its_first_line_or_empty_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "w.ledger"
    for content in (b"", b"ledger 1 w"):
        path.write_bytes(content)
        assert audit([path], {}).ok


def test_garbage_before_the_end_is_an_error(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    feed([only], 0, 1)
    whole = only.path.read_bytes()
    for at in range(len(whole) - 1):  # all but the last newline: that would be a torn line
        only.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(LedgerError, match=r"w0\.ledger:\d"):
            audit([only.path], {0: LOOP})


def test_a_file_is_counted_once_and_written_once(tmp_path: Path) -> None:
    (only,) = opened(tmp_path, 1)
    with pytest.raises(LedgerError, match="exists"):
        Ledger(only.path, "w0")
    with pytest.raises(LedgerError, match="twice"):
        audit([only.path, only.path], {})
    only.close()
    only.close()
    with pytest.raises(LedgerError, match="closed"):
        only.applied(0, 0, 1)


def test_a_full_disk_is_an_error_and_leaves_only_a_torn_line(tmp_path: Path) -> None:
    """The file size limit cuts a write short as a full disk does."""
    script = (
        "import resource, signal, sys; from stretto.runtime.ledger import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "ledger = Ledger(sys.argv[1], 'w'); ledger.applied(0, 0, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60, 60))\n"
        "for step in range(1, 9):\n"
        "    try: ledger.applied(0, step, 1)\n"
        "    except LedgerError as error: print(error)\n"
    )
    path = tmp_path / "w.ledger"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert "disk full" in said[0]
    assert all("closed" in line for line in said[1:])
    assert path.stat().st_size == 60
    assert audit([path], {0: LOOP}, stopped={0: 0}).torn == (str(path),)


def test_a_patient_one_waits_for_room_and_writes_everything_in_order(tmp_path: Path) -> None:
    """Lines that were cut short are completed."""
    script = (
        "import resource, signal, sys; from stretto.runtime.ledger import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "ledger = PatientLedger(sys.argv[1], 'w'); ledger.fed(0, 0, 1, [0]); ledger.applied(0, 0, 1)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))\n"
        "for step in range(1, 9): ledger.fed(0, step, 1, [step]); ledger.applied(0, step, 1)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "ledger.fed(0, 9, 1, [9]); ledger.applied(0, 9, 1); ledger.close()\n"
    )
    path = tmp_path / "w.ledger"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    found = [line.split()[:3] for line in path.read_text().splitlines()[1:]]
    assert found == [[kind, "0", str(step)] for step in range(10) for kind in ("fed", "applied")]


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    script = (
        "import sys; from stretto.runtime.ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1], 'w'); step = 0\n"
        "while True:\n"
        "    ledger.fed(0, step, 1, [5, 3, 9]); ledger.applied(0, step, 1); print(step, flush=True); step += 1\n"
    )
    path = tmp_path / "w.ledger"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(last := process.stdout.readline()) < 300:
            pass
        os.kill(process.pid, signal.SIGKILL)
    applied = path.read_text().count("applied")
    assert applied > int(last)
    loop = Loop(samples=10, size=3, epochs=applied)
    assert not [fault for fault in audit([path], {0: loop}, stopped={0: applied}).faults if fault.kind == "undone"]


def _measure() -> None:
    import tempfile
    import timeit

    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "w.ledger", "w") as ledger:
        for count in (16, 64, 256, 4096):
            batch = np.random.default_rng(0).permutation(1_000_000)[:count]
            fed_s = min(timeit.repeat(lambda batch=batch: ledger.fed(0, 1, 1, batch), number=2000, repeat=5)) / 2000
            print(f"fed, {count} shuffled samples: {fed_s * 1e6:.1f} µs")
        applied_s = min(timeit.repeat(lambda: ledger.applied(0, 1, 1), number=2000, repeat=5)) / 2000
        print(f"applied: {applied_s * 1e6:.1f} µs")


if __name__ == "__main__":
    _measure()
