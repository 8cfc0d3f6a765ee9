"""Several steps on one batch that is done in parts: each phase goes through all micro-batches before the next begins.

In a GAN the generator learns from the critic that has just stepped. Where a worker's slice is cut into passes through
the body, a `step()` counts only in the last of them, so a second backward pass in the same body would see the old
critic. `job.phases(batch, critic, generator)` turns this round: the passes but the last only keep their batches; in the
last one the first phase is played on all of them, its gradients are added up over the workers and its step counts, then
the next phase is played on the model as it is now. How often anything steps does not depend on how the batch is cut.

A phase is played as passes through the body are: `begin_pass` sets gate, sums and random numbers for each of its
micro-batches, with a number of its own. All members go through the same sums, those with fewer micro-batches and those
whose samples do not count included. When a sum fails the remaining phases are played for nothing, as the rest of a body
would be, and the whole batch is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from stretto.torch import checks
from stretto.torch.data import Part

if TYPE_CHECKING:
    from stretto.torch.job import Job

Phase = Callable[[Any], Any]


class BeginPass(Protocol):
    """What sets everything up for a pass through the body, or of a phase."""

    def __call__(self, part: Part, share: float, *, first: bool, last: bool, phase: int) -> None: ...


class _Fed(NamedTuple):
    """A pass through the body."""

    part: Part
    share: float


class _Kept(NamedTuple):
    """What the body gave in a pass: functions that it makes anew in each may hold what belongs to that pass."""

    batch: Any
    phases: tuple[Phase, ...]


class Phases:
    """Of one job: `fed` before each pass through the body, `run` in it, `end` after the last."""

    def __init__(self, job: Job, begin_pass: BeginPass, several: Callable[[], None]) -> None:
        """`several` is told of a batch that is about to take more than one step."""
        self._job, self._begin_pass, self._several = job, begin_pass, several
        self._fed: list[_Fed] = []
        self._kept: list[_Kept] = []
        self._last = False
        self._called = False
        self.number = 0
        """Of the phase that is played, from 1 on; 0 outside."""
        self.counts = True
        """Whether what is to happen once per step may happen here: not where the same phase comes again."""

    @property
    def over(self) -> bool:
        """Whether this pass has had its phases: nothing more may be trained in it."""
        return self._called and not self.number and self._job.gate.inside

    def fed(self, part: Part, share: float, *, first: bool, last: bool) -> None:
        """A pass through the body is about to begin."""
        if first:
            self._fed, self._kept = [], []
        self._fed.append(_Fed(part, share))
        self._last, self._called = last, False

    def rehearse(self, part: Part) -> None:
        """A pass that counts for nothing: its phases are played at once, and nothing steps."""
        self.fed(part, 1.0, first=True, last=False)

    def end(self) -> None:
        """All passes of a step are over."""
        self._called = False
        if self._kept:
            raise checks.phases_left_out(self._job.cursor.step)

    def run(self, batch: Any, phases: Sequence[Phase], *, inside: bool) -> list[Any] | None:
        """Play the phases, or keep the batch for the pass in which they are; `inside`: it is not a rehearsal."""
        self._check(batch, phases)
        self._called = True
        self._kept.append(_Kept(batch, tuple(phases)))
        if inside and not self._last:
            return None
        kept, self._kept = self._kept, []
        if len(phases) > 1:
            self._several()
        try:
            return [self._play(number, kept) for number in range(1, len(phases) + 1)]
        finally:
            self.number, self.counts = 0, True
            self._job.gate.begin(first=False, last=self._last)

    def _play(self, number: int, kept: list[_Kept]) -> Any:
        """One phase, on all micro-batches; what it returned for the last of them."""
        job, found = self._job, None
        self.number = number
        if job.passes is not None:
            # In a rehearsal each is the first: there is nothing to add up.
            job.passes.begin_phase(number if self._last else 1)
        for place, ((part, share), (batch, phases)) in enumerate(zip(self._fed, kept, strict=True)):
            phase = phases[number - 1]
            self.counts = phase not in phases[number:]
            self._begin_pass(part, share, first=False, last=self._last and place == len(kept) - 1, phase=number)
            before = self._backwards()
            found = phase(batch)
            if before is not None and before == self._backwards():
                raise checks.phase_without_backward(job.cursor.step, _name(phase))
        return found

    def _backwards(self) -> int | None:
        """Backward passes of this step so far; None where nobody listens."""
        reducer = self._job.reducer
        return reducer.backwards if reducer is not None and reducer.listens else None

    def _check(self, batch: Any, phases: Sequence[Phase]) -> None:
        job, step = self._job, self._job.cursor.step
        if not phases:
            raise checks.no_phases("none was given")
        if callable(batch):
            raise checks.no_phases(f"the first argument is the function {_name(batch)}")
        for phase in phases:
            if not callable(phase):
                raise checks.no_phases(f"one of them is a {type(phase).__name__}")
        if self.number:
            raise checks.no_phases("phases() was called by a phase")
        if self._called:
            raise checks.phases_twice(step)
        if job.gate.asked_here or self._backwards():
            raise checks.outside_of_phases(step)
        if len(self._kept) != len(self._fed) - 1:
            raise checks.phases_left_out(step)
        if self._kept and len(self._kept[0].phases) != len(phases):
            raise checks.other_phases(step, len(self._kept[0].phases), len(phases))


def _name(phase: Any) -> str:
    return str(getattr(phase, "__name__", None) or type(phase).__name__)
