"""Ways out of a loop: those after which the script goes on, and those by which it ends there."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from sys import exit as die
from typing import Any

import torch
from torch import nn

from stretto.torch import Batch, Job, join


def _job() -> tuple[Job, Callable[[Batch], None]]:
    torch.manual_seed(1)
    job = join()
    model = job.model(nn.Linear(3, 2).double())
    optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def train(batch: Batch) -> None:
        optimizer.zero_grad()
        model(batch.x).square().mean().backward()
        optimizer.step()

    return job, train


job, train = _job()
data = torch.utils.data.TensorDataset(torch.arange(360, dtype=torch.float64).reshape(120, 3), torch.zeros(120))


class Enough(Exception):
    pass


trainer: Any = None


def loop() -> Any:
    return job.batches(data, size=24, epochs=4)


def passing_on(batches: Iterable[Batch]) -> Iterator[Batch]:
    """As progress bars do."""
    try:
        yield from (batch for batch in batches)
    finally:
        sys.stdout.flush()


def ends(raises: Callable[[], Any], batches: Iterable[Batch]) -> None:
    for batch in batches:
        train(batch)
        if batch.step == 7:
            raises()


def raising() -> None:
    raise SystemExit(0)


def raised() -> None:
    ends(raising, loop())


def held() -> None:
    batches = loop()
    ends(raising, batches)


def in_front() -> None:
    for batch in loop():
        train(batch)
        raise SystemExit


def imported() -> None:
    ends(lambda: die(0), loop())


def in_sys() -> None:
    ends(lambda: sys.exit(0), loop())


def typed() -> None:
    ends(lambda: quit(0), loop())


def with_a_word() -> None:
    ends(lambda: die("that is enough"), loop())


def cleaning_up() -> None:
    for batch in loop():
        try:
            with nullcontext():
                train(batch)
                if batch.step == 7:
                    raise SystemExit(0)
        finally:
            sys.stdout.flush()


def under_others() -> None:
    try:
        ends(raising, loop())
    except ValueError:
        print("never")
    finally:
        sys.stdout.flush()


def counted() -> None:
    for i, batch in enumerate(passing_on(loop())):
        train(batch)
        if i == 7:
            raise SystemExit(0)


def one_by_one() -> None:
    batches = loop()
    while True:
        batch = next(batches)
        train(batch)
        if batch.step == 7:
            raise SystemExit(0)


def attempted() -> None:
    batches = loop()

    def step(batch: Batch) -> bool:
        train(batch)
        if batch.step == 7:
            raise SystemExit(0)
        return True

    while job.attempt(step, batches):
        pass


def in_epochs() -> None:
    for _ in job.epochs(3):
        ends(raising, loop())


def in_a_thread() -> None:
    thread = threading.Thread(target=raised)
    thread.start()
    thread.join()


def failing_in_a_thread() -> None:
    thread = threading.Thread(target=ends, args=(lambda: [][0], loop()))
    thread.start()
    thread.join()


class Stopping:
    """Made before the job was joined."""

    def __init__(self, on_stop: Callable[[int], Any] = sys.exit) -> None:
        self.on_stop = on_stop


ACTIONS = {"stop": sys.exit}


def kept() -> None:
    ends(lambda: Stopping().on_stop(0), loop())


def in_a_table() -> None:
    ends(lambda: ACTIONS["stop"](0), loop())


class Trap:
    """That ends the script when it is written to, or asked."""

    def __setitem__(self, key: int, value: float) -> None:
        raise SystemExit(0)

    def __setattr__(self, name: str, value: float) -> None:
        raise SystemExit(0)

    def __bool__(self) -> bool:
        raise SystemExit(0)


def set_by_key() -> None:
    log = Trap()
    for batch in loop():
        train(batch)
        if batch.step == 7:
            log[7] = 1.0


def set_by_name() -> None:
    log = Trap()
    for batch in loop():
        train(batch)
        if batch.step == 7:
            log.best = 1.0


def asked() -> None:
    trap = Trap()
    for batch in loop():
        train(batch)
        if batch.step == 7 and trap:
            print("never")


def left_alone() -> None:
    """A thread that nobody waits for."""
    reached = threading.Event()

    def go() -> None:
        for batch in loop():
            train(batch)
            if batch.step == 7:
                reached.set()
                threading.Event().wait()

    threading.Thread(target=go, daemon=True).start()
    reached.wait()


ENDS = (
    raised, held, in_front, imported, in_sys, typed, with_a_word, cleaning_up, under_others, counted, one_by_one,
    attempted, in_epochs, in_a_thread, failing_in_a_thread,
    kept, in_a_table, set_by_key, set_by_name, asked, left_alone,
)  # fmt: skip


def enough() -> None:
    raise Enough


def broken() -> None:
    for batch in loop():
        train(batch)
        if batch.step == 7:
            break


def returned() -> int | None:
    for batch in loop():
        train(batch)
        if batch.step == 7:
            return 0
    return None


def bars() -> None:
    for i, batch in enumerate(passing_on(loop())):
        train(batch)
        if i == 7:
            break


def caught() -> None:
    """Early stopping by an exception of one's own."""
    with suppress(Enough):
        ends(enough, loop())


def looked() -> None:
    """At one batch."""
    next(iter(loop()))


def taken() -> None:
    batches = loop()
    for _ in range(8):
        train(next(batches))


def came_back() -> None:
    """What was meant as an end is caught, and training goes on."""
    try:
        ends(raising, loop())
    except SystemExit:
        ends(lambda: None, loop())


def exit_caught() -> None:
    """And nothing of the job is asked for after that; the script ends in its own way."""
    with suppress(SystemExit):
        ends(raising, loop())
    os.environ["ENDS"] = "well"


def all_taken() -> None:
    """By a trainer that is there to the end."""
    global trainer
    trainer = loop()
    for _ in range(20):
        train(next(trainer))


def attempted_enough() -> None:
    def step(batch: Batch) -> bool:
        train(batch)
        if batch.step == 7:
            raise Enough
        return True

    batches = loop()
    with suppress(Enough):
        while job.attempt(step, batches):
            pass
    job.model(nn.Linear(2, 2))


def another_thread() -> None:
    """Another one, later, ends by an exit."""

    def go() -> None:
        for batch in loop():
            train(batch)
            if batch.step == 7:
                break

    for act in (go, raising):
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()


def in_steps() -> None:
    """An exit from what is no loop of the job."""
    ends(lambda: None, loop())
    for number in range(3):
        if number == 1:
            raise SystemExit(0)


def beside_a_thread() -> None:
    """That ends by an exit while others train."""
    for batch in loop():
        train(batch)
        thread = threading.Thread(target=raising)
        thread.start()
        thread.join()
        if batch.step == 7:
            break


def held_by_a_counter() -> None:
    """The script's own variable holds what goes through the loop."""
    global trainer
    trainer = enumerate(loop())
    for i, batch in trainer:
        train(batch)
        if i == 7:
            break


def held_to_the_end() -> None:
    global trainer
    trainer = loop()
    for _ in range(8):
        train(next(trainer))


GOES_ON = (
    held_by_a_counter, held_to_the_end,
    broken, returned, bars, caught, looked, taken, came_back, in_steps, beside_a_thread, exit_caught, all_taken,
    attempted_enough, another_thread,
)  # fmt: skip
EVERY = {way.__name__: way for way in (*ENDS, *GOES_ON)}

if __name__ == "__main__":
    if os.environ["CASE"] == "in_the_script":
        batches = loop()
        while True:
            batch = next(batches)
            train(batch)
            if batch.step == 7:
                sys.exit(0)
    EVERY[os.environ["CASE"]]()
    # After whatever was above: an ordinary way for a script to end.
    if "ENDS" not in os.environ:
        raise SystemExit(0)
