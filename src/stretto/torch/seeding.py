"""Random generators that data is made with: seeded, put back, and found where an object has some of its own."""

from __future__ import annotations

import contextlib
import itertools
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import _rand, get_bit_generator, set_bit_generator

_DEPTH, _WIDTH = 4, 64
"""How far a generator is looked for."""
_GLOBAL = {id(given) for given in (torch.default_generator, _rand, random._inst)}
_LEAVES = (str, bytes, int, float, torch.Tensor, np.ndarray, type, types.ModuleType, types.FunctionType)


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """What is drawn inside leaves the generators of the training as they were."""
    # numpy's is exchanged: to copy its state takes as long as to read several samples.
    before = random.getstate(), get_bit_generator(), torch.get_rng_state()
    set_bit_generator(_reading)
    try:
        yield
    finally:
        random.setstate(before[0])
        set_bit_generator(before[1])
        torch.set_rng_state(before[2])


_reading = np.random.MT19937(0)


def seed_all(seed: int) -> None:
    """The global generators that data on the CPU is made with."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # Not torch.manual_seed, which would seed every GPU for each sample: those are read on the CPU.
    torch.default_generator.manual_seed(seed)


def generators(owner: Any, *, apart: Any = None) -> list[Any]:
    """Those that belong to an object, as far as they can be reached; not those of `apart`."""
    found: list[Any] = []
    seen = {id(apart), *_GLOBAL}

    def look(part: Any, depth: int) -> None:
        if id(part) in seen or isinstance(part, _LEAVES):
            return
        seen.add(id(part))
        if isinstance(part, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)):
            found.append(part)
        elif depth:
            for inner in _inside(part):
                look(inner, depth - 1)

    look(owner, _DEPTH)
    return found


def reseed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    else:
        generator.seed(seed)


def position(generator: Any) -> str:
    """Where it is in its stream, to be compared."""
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    return str(generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate())


def _inside(part: Any) -> list[Any]:
    """Of plain containers and objects: others may have to read a file to say what is in them."""
    known = part.values() if isinstance(part, dict) else part
    if not isinstance(part, (dict, list, tuple)):
        known = getattr(part, "__dict__", {}).values()
    return list(itertools.islice(known, _WIDTH))
