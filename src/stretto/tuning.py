"""How the interpreter is set in processes that serve for long: what matters to them is the longest pause."""

from __future__ import annotations

import gc
import sys

_GIVE_WAY_S = 0.0005
_COLLECT = 20_000, 5, 100


def for_serving() -> None:
    # Policies think in a thread; who waits for it to give way waits so long each time, and the default is 5 ms.
    sys.setswitchinterval(_GIVE_WAY_S)
    # Ten thousand jobs are many objects, none of them garbage: going through them takes 0.1 s.
    gc.set_threshold(*_COLLECT)
