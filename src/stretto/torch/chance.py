"""Random numbers: alike on all workers before a script's first loop; in a loop's body neither repeated from slice to
slice nor dependent on a worker's history.

Before every pass through the body torch's generators are set by the loop's seed, the loop, the step and the position of
the pass's first row in the global batch: dropout differs between the slices of a batch, and a batch that is done again
draws the same. `random` and `numpy.random` are set by seed, loop and step alone, so they are alike in all passes of all
workers and may decide what the body does. After a loop all generators are alike again. A world of one does the same.
`noise` draws for each sample by itself: what it gives does not depend on the number of workers at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import torch

READING = 2**32
"""Stands for a phase: numbers for what puts the samples of a pass together."""
_AFTER = 2**64 - 1
"""Stands for a step when a loop is over."""
_ASKED = 2**33
"""Stands for a phase: numbers for functions of the script that only some workers call."""


def begin_script() -> None:
    """Before a worker draws anything: scripts that seed nothing, neither weights nor data, have the same on all workers
    of their job. Whoever has seeded already has a small seed."""
    environment = os.environ
    if "STRETTO_COORDINATOR" in environment and "STRETTO_TOKEN" in environment and torch.initial_seed() >= 2**32:
        digest = hashlib.sha256(environment["STRETTO_TOKEN"].encode()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 2 | 1 << 61
        _set_shared(seed)
        torch.default_generator.manual_seed(seed)


def seed_of(*numbers: int) -> int:
    """0 to 2**63 - 1, the same on every platform."""
    digest = hashlib.sha256(struct.pack(f"<{len(numbers)}Q", *numbers)).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def begin_pass(seed: int, loop: int, step: int, first: int, device: torch.device, phase: int = 0) -> None:
    """`first` is the position of the pass's first row in the global batch; in `phases` each has numbers of its own."""
    _set_shared(seed_of(seed, loop, step, *_other(phase)))
    _set_torch(seed_of(seed, loop, step, first, *_other(phase)), device)


def end_loop(seed: int, loop: int, device: torch.device) -> None:
    """Everything alike on all workers, whatever they drew."""
    _set_shared(seed_of(seed, loop, _AFTER))
    _set_torch(seed_of(seed, loop, _AFTER), device)


def begin_epoch(call: int, epoch: int, device: torch.device) -> None:
    """Alike on all workers, those that skipped the epochs before included."""
    _set_shared(seed_of(_AFTER, call, epoch))
    _set_torch(seed_of(_AFTER, call, epoch), device)


def begin_exchange(key: Sequence[int], number: int, device: torch.device, *, over: bool = False) -> None:
    """Between loops, before a function is called for what is exchanged, and when it is `over`: alike on all workers,
    those that call it, or call it again, and those that only get its result."""
    places = [part % 2**64 for part in (*key, 2 * number + over)]
    _set_shared(seed_of(_AFTER, _ASKED, *places))
    _set_torch(seed_of(_AFTER, _ASKED, *places), device)


@contextlib.contextmanager
def apart(device: torch.device, *numbers: int) -> Iterator[None]:
    """What is drawn inside leaves all generators as they were: not all workers do it, or not equally often. Where
    `numbers` are given, they decide what is drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if numbers:
        _set_shared(seed_of(_ASKED, *numbers))
        _set_torch(seed_of(_ASKED, *numbers), device)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, device)


def noise(
    seed: int,
    loop: int,
    step: int,
    indices: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    phase: int = 0,
    call: int = 0,
) -> torch.Tensor:
    """A row of normal numbers for each sample; `call` counts those of one pass."""
    found = torch.empty((len(indices), *shape), dtype=dtype)
    generator = torch.Generator()
    for row, index in zip(found, indices, strict=True):
        generator.manual_seed(seed_of(seed, loop, step, index, *((phase, call) if call else _other(phase))))
        row.normal_(generator=generator)
    return found


def _other(phase: int) -> tuple[int, ...]:
    return (phase,) if phase else ()


def _set_shared(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _set_torch(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        # Of the one device that this worker drives.
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
