"""What rides on every reduction beside the gradients, one number each, added up over the members."""

from __future__ import annotations

from typing import NamedTuple


class Flags(NamedTuple):
    """Of one member, or the sum of all. Where all must be the same, the sum of squares shows whether they are."""

    ahead: float = 0.0
    """How far ahead this member would take up the next generation."""
    ahead_squared: float = 0.0
    stop: float = 0.0
    skipped: float = 0.0
    """It did no backward pass."""
    steps: float = 0.0
    """Calls of optimizers' `step` in the step before."""
    steps_squared: float = 0.0
    sign: float = 0.0
    """What its loop is like."""
    sign_squared: float = 0.0
    compare: float = 0.0
    """The leader wants replicas to be compared after this step."""
    round: float = 1.0
    """Which sum of its step this is: a body may have several backward passes."""
    round_squared: float = 1.0

    @classmethod
    def of(cls, *, ahead: int, stop: bool, steps: int, sign: int, compare: bool = False) -> Flags:
        return cls(ahead, ahead * ahead, stop, 0.0, steps, steps * steps, sign, sign * sign, compare)

    def same_ahead(self, size: int) -> bool:
        return _all_equal(self.ahead, self.ahead_squared, size)

    def same_steps(self, size: int) -> bool:
        return _all_equal(self.steps, self.steps_squared, size)

    def same_sign(self, size: int) -> bool:
        return _all_equal(self.sign, self.sign_squared, size)

    def same_round(self, size: int) -> bool:
        return _all_equal(self.round, self.round_squared, size)

    def in_round(self, number: int) -> Flags:
        """The same of another sum of the step."""
        return self._replace(round=number, round_squared=number * number)


COUNT = len(Flags._fields)


def _all_equal(total: float, squared: float, size: int) -> bool:
    return round(size * squared) == round(total * total)
