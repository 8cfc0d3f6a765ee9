"""Options are declared with their ranges; what is outside is refused in one sentence, before anything is decided."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from stretto.core import options
from stretto.core.options import Limits, Period, PeriodOrZero, Seconds
from stretto.core.policies import BUILTIN
from stretto.core.policy import entry, load
from stretto.errors import UsageError


class Some(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    wait_s: Seconds = 1.0
    every_s: Period = 1.0
    round_s: PeriodOrZero = 0.0
    limits: Limits = ()
    plain: float = 0.0
    several: tuple[float, ...] = ()
    save_s: Annotated[float, Meta(ge=0, extra={"endless": True})] = 0.0
    kind: Literal["one", "two"] = "one"
    maybe: bool | None = None
    count: Annotated[int, Meta(ge=1)] = 1


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("wait_s", "0", 0.0),
        ("wait_s", 5, 5.0),
        ("round_s", "0", 0.0),
        ("round_s", "0.1", 0.1),
        ("limits", "3250,7200", (3250.0, 7200.0)),
        ("limits", [1, 2], (1.0, 2.0)),
        ("limits", "", ()),
        ("save_s", "inf", float("inf")),
        ("maybe", "null", None),
        ("maybe", "true", True),
        ("kind", "two", "two"),
        ("count", "7", 7),
    ],
)
def test_what_is_allowed_is_taken(name: str, given: Any, value: Any) -> None:
    assert getattr(options.read(Some, {name: given}, "it"), name) == value


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("wait_s", "-1", "it: wait_s is -1; it must be a number from 0 to 1e9"),
        ("wait_s", "nan", "it: wait_s is nan; it must be a number from 0 to 1e9"),
        ("wait_s", "1e400", "it: wait_s is 1e400; it must be a number from 0 to 1e9"),
        ("wait_s", "", "it: wait_s is ''; it must be a number from 0 to 1e9"),
        ("wait_s", [1], "it: wait_s is [1]; it must be a number from 0 to 1e9"),
        ("every_s", "0", "it: every_s is 0; it must be a number from 0.1 to 1e9"),
        ("round_s", "1e-300", "it: round_s is 1e-300; it must be 0, or a number from 0.1 to 1e9"),
        ("limits", "2,1", "it: limits is 2,1; it must be values separated by commas, ascending, each a number above 0"),
        ("limits", "nan", "it: limits is nan; it must be values separated by commas, ascending"),
        ("plain", "nan", "it: plain is nan; it must be a number"),
        ("plain", float("inf"), "it: plain is inf; it must be a number"),
        ("several", "1,nan", "it: several is 1,nan; it must be values separated by commas, each a number"),
        ("save_s", "nan", "it: save_s is nan; it must be a number of at least 0, or inf"),
        ("save_s", "-inf", "it: save_s is -inf; it must be a number of at least 0, or inf"),
        ("kind", "three", "it: kind is three; it must be one or two"),
        ("maybe", "x", "it: maybe is x; it must be true or false or null"),
        ("count", "1.5", "it: count is 1.5; it must be a whole number of at least 1"),
    ],
)
def test_what_is_not_is_told_with_what_is(name: str, given: Any, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        options.read(Some, {name: given}, "it", "look there")
    assert caught.value.message.startswith(told)
    assert caught.value.hint == "look there"


@pytest.mark.parametrize("name", BUILTIN)
def test_every_number_of_a_policy_has_a_range(name: str) -> None:
    for field in msgspec.structs.fields(entry(name).options):
        for bad in ("nan", "inf", "-inf", "1e308", "x"):
            with pytest.raises(UsageError, match=f"policy {name}: {field.name} is {bad}; it must be "):
                load(name, {field.name: bad})


def test_a_rule_of_the_struct_itself_is_told_too() -> None:
    class Pair(msgspec.Struct, frozen=True):
        low: int = 0
        high: int = 1

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    with pytest.raises(UsageError, match="it: low is above high"):
        options.read(Pair, {"low": "5"}, "it")
