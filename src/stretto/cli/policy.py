"""`stretto policy list` and `show`: which policies there are, what they promise and which options they take."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from stretto import plugins
from stretto.cli import show
from stretto.cli.options import Json
from stretto.core import options as declared
from stretto.core.policies import ALIASES, BUILTIN
from stretto.core.policy import Entry, Traits
from stretto.errors import PolicyError


def list_(
    *,
    json: Json = False,
) -> None:
    """List every policy: built in, or installed as a plug-in."""
    rows = [_row(name) for name in plugins.names()]
    if json:
        show.as_json(rows)
    else:
        shown = [[row["name"], row["kind"], row["preempts"], row["summary"]] for row in rows]
        wide = [max(len(row[i]) for row in shown) for i in range(3)]
        for name, kind, preempts, summary in shown:
            print(f"{name:<{wide[0]}}  {kind:<{wide[1]}}  preempts {preempts:<{wide[2]}}  {summary}")


def show_(
    name: Annotated[str, Parameter(help="A policy's name, or file.py[:name].")],
    /,
    *,
    json: Json = False,
) -> None:
    """Show one policy: its definition, what it promises and its options."""
    entry = plugins.entry(name)
    if json:
        show.as_json(_details(entry))
        return
    print(f"{entry.name}{_also(entry.name)}\n")
    print(_definition(entry) + "\n")
    show.listing([(trait, str(value)) for trait, value in _traits(entry.traits).items()])
    options = _options(entry)
    print("\nOptions (--set key=value):" if options else "\nNo options.")
    for option in options:
        told = [option["help"], f"Allowed: {option['allowed']}." if option["allowed"] else ""]
        print("    ".join([f"  {option['name']} = {option['default']}", *filter(None, told)]))


def _row(name: str) -> dict[str, str]:
    """One line of the list. A plug-in that cannot be loaded is listed with its error."""
    try:
        entry = plugins.entry(name)
    except PolicyError as error:
        return {"name": name, "kind": "broken", "preempts": "?", "uses": "", "options": "", "summary": error.message}
    traits = entry.traits
    return {
        "name": name,
        "kind": "elastic" if traits.elastic else "rigid",
        "preempts": traits.preempts,
        "uses": ", ".join(sorted(traits.uses)),
        "options": ", ".join(option["name"] for option in _options(entry)),
        "summary": (entry.function.__doc__ or "").strip().split("\n")[0],
    }


def markdown(*, short: bool = False) -> str:
    """The built-in policies as the table of a page (`docs/tables.py`)."""
    columns = ["name", "kind", "summary"] if short else ["name", "kind", "preempts", "uses", "options", "summary"]
    titles = {"name": "policy", "uses": "must know", "summary": "what it does"}
    lines = [_line([titles.get(column, column) for column in columns]), _line(["---"] * len(columns))]
    for row in map(_row, BUILTIN):
        row = row | {"name": f"`{row['name']}`", "options": re.sub(r"(\w+)", r"`\1`", row["options"])}
        lines.append(_line([row[column].replace("|", "\\|") for column in columns]))
    return "\n".join(lines)


def options_markdown() -> str:
    """The options of the built-in policies, likewise."""
    columns = ["option", "default", "allowed", "what it is"]
    lines = [_line(["policy", *columns]), _line(["---"] * 5)]
    for name in BUILTIN:
        for option in _options(plugins.entry(name)):
            cells = [f"`{name}`", f"`{option['name']}`", option["default"], option["allowed"], option["help"]]
            lines.append(_line([cell.replace("|", "\\|") for cell in cells]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _details(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "aliases": [alias for alias, name in ALIASES.items() if name == entry.name],
        "definition": _definition(entry),
        "traits": _traits(entry.traits),
        "options": _options(entry),
    }


def _also(name: str) -> str:
    aliases = [alias for alias, real in ALIASES.items() if real == name]
    return f" (also: {', '.join(aliases)})" if aliases else ""


def _definition(entry: Entry) -> str:
    """The module's story and the function's exact words."""
    module = inspect.getmodule(entry.function)
    parts = [inspect.cleandoc(text) for text in (getattr(module, "__doc__", None), entry.function.__doc__) if text]
    return "\n\n".join(parts) or "(no description)"


def _traits(traits: Traits) -> dict[str, Any]:
    values = {name: getattr(traits, name) for name in traits.__struct_fields__}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}


def _options(entry: Entry) -> list[dict[str, str]]:
    helps = _field_docs(entry.options)
    return [
        {
            "name": field.name,
            "default": _default(field),
            "allowed": declared.allowed(field.type),
            "help": helps.get(field.name, ""),
        }
        for field in msgspec.structs.fields(entry.options)
    ]


def _default(field: Any) -> str:
    if field.required:
        return "(needed)"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return ",".join(str(item) for item in value) if isinstance(value, tuple) else str(value)


def _field_docs(options: type[msgspec.Struct]) -> dict[str, str]:
    """The string below each field, as it stands in the source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(options))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, text in pairwise(statements):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs
