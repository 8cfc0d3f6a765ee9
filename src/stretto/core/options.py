"""Options that people set (`--set key=value`, the API): declared with their ranges, checked in one place.

Policies, the simulated world, trace readers and the generator each have a struct of options. What a field may be is
said by its type (`msgspec.Meta`), so that it is checked the same way for all of them, also for plug-ins, and can be
printed (`allowed`). Unless it is said, no option is nan or infinite: times that never come stop a scheduler for ever.

Two rules that `msgspec` has no words for are in `Meta.extra`: `or_least` (0, or at least so much), `ascending`.
`endless` allows infinity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, inspect

from stretto.errors import UsageError, unknown

LONGEST_S = 1e9
"""About thirty years: beyond any plan, and clocks still tell a microsecond there."""
SHORTEST_S = 0.1
"""No start or stop is faster; with shorter periods a scheduler would do nothing but decide."""

Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=LONGEST_S)]
"""A length of time, or a moment from now on."""
Cost: TypeAlias = Annotated[float, Meta(ge=0, le=1e6)]
"""Seconds that something takes which is done again and again: at most eleven days."""
Period: TypeAlias = Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_S)]
"""What happens again and again: not so often that nothing else does."""
PeriodOrZero: TypeAlias = Annotated[float, Meta(ge=0, le=LONGEST_S, extra={"or_least": SHORTEST_S})]
"""The same where 0 means that there are no periods."""
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Factor: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]
Spread: TypeAlias = Annotated[float, Meta(ge=0, le=10)]
"""Standard deviation of a logarithm: at 10, errors of a factor of 20,000 are common."""
Seed: TypeAlias = Annotated[int, Meta(ge=0, le=10**18)]
Amount: TypeAlias = Annotated[float, Meta(gt=0, le=1e12)]
"""GPU-seconds."""
Limits: TypeAlias = Annotated[tuple[Amount, ...], Meta(extra={"ascending": True})]

T = TypeVar("T", bound=msgspec.Struct)


def read(options: type[T], given: Mapping[str, Any], who: str, hint: str = "") -> T:
    """The struct with these values, which may be texts; or an error that names the option and what it may be."""
    fields = {field.name: field for field in msgspec.structs.fields(options)}
    for name in given:
        if name not in fields:
            raise unknown(f"option of {who}", name, list(fields))
    values = {name: _read(fields[name].type, value, f"{who}: {name}", hint) for name, value in given.items()}
    try:
        return msgspec.convert(values, options, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{who}: {error}", hint=hint) from None


def allowed(kind: Any) -> str:
    """What an option of this type may be, in words; empty for a text."""
    return _allowed(inspect.type_info(kind))


def _read(kind: Any, given: Any, what: str, hint: str) -> Any:
    try:
        value = msgspec.convert(_split(given, kind), kind, strict=False)
        if _keeps_rules(inspect.type_info(kind), value):
            return value
    except msgspec.ValidationError:
        pass
    raise UsageError(f"{what} is {_shown(given)}; it must be {allowed(kind) or 'a text'}", hint=hint)


def _split(value: Any, kind: Any) -> Any:
    """`3250,7200` on a command line is a list where the option is one."""
    listed = isinstance(_bare(inspect.type_info(kind))[0], inspect.VarTupleType | inspect.ListType)
    if isinstance(value, str) and listed:
        return [part for part in value.split(",") if part]
    return value


def _keeps_rules(kind: inspect.Type, value: Any) -> bool:
    _, extra = _bare(kind)
    if isinstance(value, float) and not math.isfinite(value):
        return value > 0 and bool(extra.get("endless"))
    if isinstance(value, tuple | list):
        ordered = all(low < high for low, high in pairwise(value) if extra.get("ascending"))
        return ordered and all(not isinstance(each, float) or math.isfinite(each) for each in value)
    return "or_least" not in extra or value == 0 or value >= extra["or_least"]


def _bare(kind: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """The type itself, and what is said of it besides."""
    if isinstance(kind, inspect.Metadata):
        return kind.type, dict(kind.extra or {})
    return kind, {}


def _allowed(kind: inspect.Type) -> str:
    bare, extra = _bare(kind)
    if isinstance(bare, inspect.FloatType | inspect.IntType):
        return _number(bare, extra)
    if isinstance(bare, inspect.VarTupleType | inspect.ListType):
        ascending = ", ascending" if extra.get("ascending") else ""
        return f"values separated by commas{ascending}, each {_allowed(bare.item_type) or 'a text'}"
    if isinstance(bare, inspect.LiteralType):
        return _either([repr(value) if value == "" else str(value) for value in bare.values])
    if isinstance(bare, inspect.UnionType):
        return _either([_allowed(each) or "a text" for each in bare.types])
    return {"BoolType": "true or false", "NoneType": "null"}.get(type(bare).__name__, "")


def _number(kind: inspect.FloatType | inspect.IntType, extra: Mapping[str, Any]) -> str:
    noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
    before, after = "0, or " if "or_least" in extra else "", ", or inf" if extra.get("endless") else ""
    return before + " ".join([noun, *_bounds(kind, extra.get("or_least", kind.ge))]) + after


def _bounds(kind: inspect.FloatType | inspect.IntType, least: float | None) -> list[str]:
    if least is not None and kind.le is not None:
        return [f"from {_figure(least)} to {_figure(kind.le)}"]
    bounds = [("of at least", least), ("above", kind.gt), ("of at most", kind.le), ("below", kind.lt)]
    said = [f"{word} {_figure(bound)}" for word, bound in bounds if bound is not None]
    return [" and ".join(said)] if said else []


def _figure(bound: float) -> str:
    if isinstance(bound, int) and abs(bound) < 10**7:
        return str(bound)
    return f"{bound:.7g}".replace("e+", "e").replace("e0", "e")


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, str | int | float) and str(value).strip() else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
