"""The best schedule of a tiny workload, by trying all: what lower bounds and policies are held against.

Workers change at whole seconds only, so the true optimum may still be a little better; never worse.
"""

from __future__ import annotations

import itertools
from functools import cache

from hypothesis import strategies as st

from strategies import trace_of
from stretto.sim.trace import Trace


@st.composite
def tiny(draw: st.DrawFn, *, jobs: int = 3, gpus: int = 3) -> Trace:
    """A few jobs of a few seconds, elastic or not, on up to `gpus` GPUs; gains need not fall with size."""
    found = []
    for _ in range(draw(st.integers(1, jobs))):
        low = draw(st.integers(1, gpus))
        high = draw(st.integers(low, gpus))
        gains = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=gpus - 1, max_size=gpus - 1))
        rate = [0.0, *itertools.accumulate([1.0, *gains])]
        work = float(draw(st.integers(1, 5)))
        submit = float(draw(st.integers(0, 2)))
        found.append(
            {"submit_s": submit, "work": work, "min_workers": low, "max_workers": high, "requested": low, "rate": rate}
        )
    return trace_of(found)


def best(trace: Trace, gpus: int) -> tuple[float, float]:
    """The smallest mean completion time, and the smallest makespan, of all schedules that change at whole seconds."""
    n = len(trace)
    sizes = [
        (0, *range(low, high + 1))
        for low, high in zip(trace.min_workers.tolist(), trace.max_workers.tolist(), strict=True)
    ]
    speeds = [trace.rates[0, c].tolist() for c in trace.curve.tolist()]
    submit = trace.submit_s.tolist()
    choices = [choice for choice in itertools.product(*sizes) if sum(choice) <= gpus]

    @cache
    def rest(second: int, left: tuple[float, ...]) -> tuple[float, float]:
        """Sum of the completion times still to come, and the last moment; from this second on."""
        if not any(left):
            return 0.0, 0.0
        here = [bool(left[j]) and submit[j] <= second for j in range(n)]
        if not any(here):
            return rest(second + 1, left)
        answers = []
        for choice in choices:
            if any(bool(size) > inside for size, inside in zip(choice, here, strict=True)):
                continue
            if not any(choice) or _can_add(choice, here, gpus, trace):
                continue
            ends, after = [], []
            for j, size in enumerate(choice):
                done = speeds[j][size]
                ends += [second + left[j] / done] if left[j] and done >= left[j] else []
                after.append(round(max(left[j] - done, 0.0), 9))
            total, last = rest(second + 1, tuple(after))
            late = sum(end for end in ends) - sum(submit[j] for j in range(n) if left[j] and not after[j])
            answers.append((total + late, max([last, *ends])))
        return min(a for a, _ in answers), min(b for _, b in answers)

    total, last = rest(0, tuple(trace.work.tolist()))
    return total / n, last - min(submit)


def _can_add(choice: tuple[int, ...], here: list[bool], gpus: int, trace: Trace) -> bool:
    """Whether a job that has nothing could run beside these: leaving it out never helps."""
    free = gpus - sum(choice)
    return any(
        inside and not size and trace.min_workers[j] <= free
        for j, (size, inside) in enumerate(zip(choice, here, strict=True))
    )
