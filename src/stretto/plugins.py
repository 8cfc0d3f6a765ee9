"""Policies of your own: a file on the command line, or an installed package.

`find` takes the name of a built-in policy, the name of an entry point in the group `stretto.policies`, or the
path of a Python file that registers one with `@policy` (`mine.py`, or `mine.py:name` where it has several).
A file's policies are known under the path only: one that calls itself `fifo` does not replace the built-in.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.core import policy as registry
from stretto.core.policies import ALIASES, BUILTIN
from stretto.core.policy import Entry, Policy
from stretto.errors import PolicyError, StrettoError, UsageError, unknown

GROUP = "stretto.policies"


def find(name: str, settings: Mapping[str, Any] | None = None) -> Policy:
    """The policy of that name or file, with these options."""
    return registry.bind(entry(name), settings or {})


def entry(name: str) -> Entry:
    """The registration behind a name or file: function, traits and options."""
    if _is_path(name):
        return _from_file(name)
    if name in BUILTIN or name in ALIASES:
        return registry.entry(name)
    if name in installed():
        return _from_package(installed()[name])
    raise unknown("policy", name, names())


def names() -> list[str]:
    """Every name that `find` knows: built-in policies, then installed ones."""
    return [*BUILTIN, *(name for name in installed() if name not in BUILTIN)]


@cache
def installed() -> dict[str, EntryPoint]:
    """The entry points of installed packages."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _is_path(name: str) -> bool:
    return ".py" in name or os.sep in name


def _from_file(name: str) -> Entry:
    text, _, wanted = name.partition(".py:") if ".py:" in name else (name, "", "")
    path = Path(text + ".py" if wanted else text)
    if not _is_file(path):
        raise UsageError(
            f"policy file {str(path)!r} does not exist", hint="give path/to/file.py or path/to/file.py:name"
        )
    found = _registered_by(path)
    if not found:
        raise PolicyError(
            f"policy file {str(path)!r} registers no policy",
            hint="decorate a function with @policy(name, …) or @list_policy(name, …)",
        )
    if wanted and wanted not in found:
        raise unknown(f"policy of {str(path)!r}", wanted, list(found))
    if not wanted and len(found) > 1:
        raise UsageError(
            f"policy file {str(path)!r} registers several policies",
            hint=f"say which: {', '.join(f'{path}:{each}' for each in found)}",
        )
    return found[wanted or next(iter(found))]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        # A name too long for any file system, say.
        return False


@cache
def _registered_by(path: Path) -> dict[str, Entry]:
    """Run the file once, and take what it registered out of the table of names again."""
    label = "stretto_plugin_" + hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    spec = importlib.util.spec_from_file_location(label, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"policy file {str(path)!r} is not a Python file", hint="its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    with registry.apart() as found:
        sys.modules[label] = module
        _execute(spec.loader.exec_module, module, f"policy file {str(path)!r}")
    return {name: each for name, each in found.items() if each.function.__module__ == label}


_packaged: list[Entry] = []
"""What installed packages have registered so far: a module runs once, however many policies it has."""


def _from_package(point: EntryPoint) -> Entry:
    with registry.apart() as found:
        loaded = _execute(lambda _: point.load(), None, f"installed policy {point.name!r} ({point.value})")
    _packaged.extend(found.values())
    for each in _packaged:
        if loaded in (each.function, each.rule) or each.name == point.name:
            return each
    raise PolicyError(
        f"installed policy {point.name!r} ({point.value}) registers no policy of that name",
        hint="the entry point must name a function decorated with @policy or @list_policy, or its module",
    )


def _execute(action: Any, module: ModuleType | None, what: str) -> Any:
    try:
        return action(module)
    except StrettoError:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyError(
            f"{what} cannot be loaded: {type(error).__name__}: {error}{_line(error)}",
            hint="run it with python alone to see the whole traceback",
        ) from error


def _line(error: BaseException) -> str:
    """Where in the plug-in it happened: the last frame."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" (line {trace.tb_lineno} of {Path(trace.tb_frame.f_code.co_filename).name})" if trace else ""
