"""`stretto class`: what was learned of jobs by their name or command, and how to forget it."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from stretto.cli import show, words
from stretto.cli.options import HERE, Connection, Json

Name = Annotated[str, Parameter(help="A job's name; of jobs without one, their command.")]


def list_(
    *,
    name: Annotated[str | None, Parameter(help="With * and ? for anything.")] = None,
    json: Json = False,
    connection: Connection = HERE,
) -> None:
    """List the classes of which something was learned."""
    with connection.client() as client:
        found = client.classes(name)
    if json:
        show.as_json(found)
        return
    if not found:
        show.note("nothing was learned yet: no job has succeeded")
        return
    now_s = show.now_s()
    headings = ["CLASS", "RUNS", "LENGTH", "SPREAD", "STEPS", "LAST", "SPEEDS"]
    show.columns(headings, [_row(one, now_s) for one in found], right=["RUNS", "LENGTH", "SPREAD", "STEPS", "LAST"])


def show_(name: Name, /, *, json: Json = False, connection: Connection = HERE) -> None:
    """Show what was learned of one: how long its jobs ran, by hyper-parameters, and how fast on how many workers."""
    with connection.client() as client:
        found = client.job_class(name)
    if json:
        show.as_json(found)
        return
    told = [("class", found.name), ("runs", str(found.runs)), ("length", _length(found)), ("steps", _steps(found))]
    show.listing([*told, ("last", words.ago(found.last_s, show.now_s()))])
    print()
    rows = [[_named(one["hyperparameters"]), str(one["runs"]), _length(one), _steps(one)] for one in found["variants"]]
    show.columns(["HYPERPARAMETERS", "RUNS", "LENGTH", "STEPS"], rows, right=["RUNS", "STEPS"])
    speeds = [
        [one["device"], str(size["workers"]), words.number(size["rate"])]
        for one in found["speeds"]
        for size in one["sizes"]
    ]
    if speeds:
        print()
        show.columns(["DEVICE", "WORKERS", "STEPS/S"], speeds, right=["WORKERS", "STEPS/S"])


def forget(name: Name, /, *, connection: Connection = HERE) -> None:
    """Forget a class: the next job of it is as new as the first was."""
    with connection.client() as client:
        client.forget_class(name)
    print(f"class {name} is forgotten")


def _row(one: dict[str, Any], now_s: float) -> list[str]:
    return [
        words.one_line(one["name"]), str(one["runs"]), words.span(one["seconds"]), _spread(one["spread"]),
        _steps(one), words.ago(one["last_s"], now_s), ", ".join(one["devices"]) or "-",
    ]  # fmt: skip


def _length(one: dict[str, Any]) -> str:
    """`6s ±10%`: the middle, on the minimum of workers."""
    spread = _spread(one["spread"])
    return words.span(one["seconds"]) + ("" if spread == "-" else f" {spread}")


def _spread(spread: float | None) -> str:
    """Of the logarithm, as people say it."""
    if spread is None:
        return "-"
    return f"±{100 * spread:.0f}%" if spread < 0.5 else f"×÷{2.718281828**spread:.1f}"


def _steps(one: dict[str, Any]) -> str:
    return "-" if one["steps"] is None else words.number(one["steps"])


def _named(values: dict[str, Any]) -> str:
    said = (f"{name}={words.number(value) if isinstance(value, float) else value}" for name, value in values.items())
    return ", ".join(said) or "-"
