"""docs/cli.md and docs/sdk.md name everything that there is."""

from __future__ import annotations

import inspect
from pathlib import Path

from stretto import errors
from stretto.cli import app
from stretto.client import Client, surroundings

DOCS = Path(__file__).parent.parent.parent / "docs"
ELSEWHERE = {"sim", "trace", "lab", "job", "version", "--help", "-h", "--version"}


def test_every_verb_is_described() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    verbs = set(app) - ELSEWHERE
    assert {"ps", "top", "completion"} <= verbs
    assert [
        verb for verb in verbs if f"`{verb}" not in page and f"stretto {verb}" not in page and f", `{verb}" not in page
    ] == []
    assert all(f"`{name}`" in page for name in surroundings.CAPTURED)


def test_every_exit_code_is_described() -> None:
    page = (DOCS / "cli.md").read_text(encoding="utf-8")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StrettoError)]
    assert len(kinds) > 8
    assert all(f"| {kind.exit_code} |" in page for kind in kinds)


def test_every_method_is_described() -> None:
    page = (DOCS / "sdk.md").read_text(encoding="utf-8")
    methods = [name for name, _ in inspect.getmembers(Client, inspect.isfunction) if name[0] != "_" and name != "close"]
    assert "submit" in methods
    assert [name for name in methods if f"`{name}" not in page] == []
