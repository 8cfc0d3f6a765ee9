"""One step at a time, for trainers that count their steps themselves.

A loop over `job.batches()` learns what became of a step when it asks for its next batch: it is the same one again if a
worker was lost. Trainers that read ahead, or count the batches that they were given, cannot work so. `job.attempt(fn)`
takes the next batch, calls `fn` on it, settles the step, and calls `fn` again on this worker's new slice until the step
is applied; only then it returns.

It drives the loop that `job.batches()` made, which says by `SETTLED` that a step is applied and another one follows; an
ordinary `for` never sees that.

Between two attempts a trainer changes what belongs to the state: it steps a scheduler, or averages weights. So a state
is taken and sent only when it asks for the next step: newcomers and checkpoints have what it did after the last one. A
worker whose own step failed while others had theirs applied gets the state of those, which have done that part already;
it does it, too, and then gets that state once more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from inspect import GEN_CLOSED, GEN_RUNNING, GEN_SUSPENDED, getgeneratorstate
from types import CodeType
from typing import Any

from torch import Tensor

from stretto.torch import checks
from stretto.torch.state import Holder

SETTLED = object()
"""Between two steps of a loop that is driven by attempts."""
_OVER = object()

Loop = Generator[Any, None, None]


class Attempts:
    """Of one job."""

    def __init__(self, code: CodeType) -> None:
        """`code` is that of the job's loops, by which they are known from other iterators."""
        self._code = code
        self.on = False
        """An attempt is under way: the loop is to say when a step is settled."""
        self._made: Loop | None = None
        """The last loop that was made, as long as nobody has begun it; then it must not be held, since an ordinary
        loop ends when it is let go of."""
        self._driven: Loop | None = None
        self._left: weakref.WeakSet[Loop] = weakref.WeakSet()
        self._state: tuple[str, list[Tensor]] | None = None

    @property
    def between(self) -> bool:
        """Whether a loop that is driven has more steps."""
        return self._driven is not None and getgeneratorstate(self._driven) == GEN_SUSPENDED

    def made(self, loop: Loop) -> Loop:
        """A loop was made."""
        self._made = loop
        return loop

    def begins(self) -> None:
        """A loop begins: one that was driven until now is left."""
        if self._made is not None and getgeneratorstate(self._made) == GEN_RUNNING:
            self._made = None
        if self._driven is not None and getgeneratorstate(self._driven) != GEN_RUNNING:
            self._leave()

    def run(self, act: Callable[[Any], Any], loop: Any, *, inside: Callable[[], bool], in_body: bool) -> Any:
        """What `act` returned when its step was applied, or None where the loop has no more steps. `inside`: whether
        batches count, as they do not in the rehearsal of a newcomer. `in_body`: a batch is being worked on."""
        if not callable(act):
            raise checks.no_attempt(f"the first argument is a {type(act).__name__}")
        if self.on:
            raise checks.no_attempt("attempt() was called by the function of another attempt")
        chosen = self._choose(loop)
        if in_body and getgeneratorstate(chosen) == GEN_SUSPENDED:
            raise checks.no_attempt("this is the body of the loop, or one that has failed")
        if self._driven is not chosen:
            self._leave()
        self._driven, self.on = chosen, True
        try:
            return self._until_applied(chosen, act, inside)
        except BaseException:
            # As by any exception in the body of a loop.
            self._leave()
            raise
        finally:
            self.on = False

    def keep(self, holder: Holder, cursor: Sequence[int]) -> None:
        """The state of those who have done already what this script is about to do to it."""
        skeleton, tensors = holder.take(cursor)
        self._state = skeleton, [tensor.clone() for tensor in tensors]

    def put_back(self, holder: Holder) -> None:
        """What was kept, if anything was: the script has done its part."""
        if self._state is not None:
            state, self._state = self._state, None
            holder.put(*state)

    def _until_applied(self, loop: Loop, act: Callable[[Any], Any], inside: Callable[[], bool]) -> Any:
        found, counts = None, False
        while (batch := next(loop, _OVER)) is not _OVER:
            if batch is not SETTLED:
                counts = inside()
                found = act(batch)
            elif counts:
                break
        if counts and found is None:
            raise checks.no_attempt("its function returned None, which is how attempt() says that the loop is over")
        return found if counts else None

    def _leave(self) -> None:
        """The loop that was driven, if it is not over: as by `break`."""
        driven, self._driven = self._driven, None
        if driven is not None and getgeneratorstate(driven) != GEN_CLOSED:
            self._left.add(driven)
            driven.close()

    def _choose(self, given: Any) -> Loop:
        chosen: Any = getattr(given, "generator", given) if given is not None else self._made or self._driven
        if getattr(chosen, "gi_code", None) is not self._code:
            raise checks.no_attempt("there is no loop" if chosen is None else f"the loop is a {type(given).__name__}")
        if chosen in self._left:
            raise checks.no_attempt("the loop was left when another one began")
        found: Loop = chosen
        return found
