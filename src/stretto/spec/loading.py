"""From a path, a text or a mapping to a `JobFile`, or to one error that says everything that is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from stretto.errors import Problem, SpecError
from stretto.spec import document
from stretto.spec.model import Conflicts, JobFile

_HINT = "docs/job-file.md describes every field; `stretto job schema` prints the JSON Schema"
_ALSO_KNOWN_AS = {
    "cmd": "run", "script": "run", "args": "run", "entrypoint": "run",
    "mem": "memory", "ram": "memory", "gpus": "gpu", "cpus": "cpu", "vram": "gpu_memory", "gpu_mem": "gpu_memory",
    "accelerator": "gpu_type", "environment": "env", "envs": "env", "cwd": "workdir", "depends_on": "after",
    "num_workers": "workers", "replicas": "workers", "nodes": "workers", "max_retries": "retries",
    "params": "hyperparameters", "hparams": "hyperparameters", "timeout": "stop", "webhooks": "notify",
    "duration": "expect", "estimate": "expect", "expected": "expect", "time": "expect",
    "minimum": "min", "maximum": "max", "interval": "every", "min_workers": "min", "max_workers": "max",
}  # fmt: skip

_MOST_TOLD = 50
"""Problems; guessing what was meant costs more than finding out that it is wrong."""

_LIMITS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


def load(source: Path | str | Mapping[str, Any]) -> JobFile:
    """A job file from a path, from its text, or from a mapping with the same fields.

    A string that is one line and ends in .yaml, .yml or .json is a path.
    """
    if isinstance(source, Mapping):
        return _check("job", _plain("job", source))
    if isinstance(source, Path) or _is_path(source):
        return _parse(str(source), _text(Path(source)))
    return _parse("job file", source)


def schema() -> dict[str, Any]:
    """The JSON Schema of a job file."""
    made = JobFile.model_json_schema()
    made["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    made["title"] = "Stretto job file"
    made["properties"]["command"] = {**made["properties"]["run"], "description": "Another name for run."}
    made["required"] = [field for field in made.get("required", []) if field != "run"]
    made["oneOf"] = [{"required": ["run"]}, {"required": ["command"]}]
    return made


def _is_path(source: str) -> bool:
    return "\n" not in source and source.endswith((".yaml", ".yml", ".json"))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(4 * document.MOST_CHARACTERS + 1)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: is not a text file: byte {error.start} is not UTF-8", hint="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{path}: cannot be read: {why}", hint="give the path of a job file in YAML") from None


def _plain(name: str, values: Mapping[str, Any]) -> document.Document:
    try:
        document.check_size(values)
    except document.Unreadable as error:
        raise _error(name, [error.problem]) from None
    return document.Document(dict(values), {})


def _parse(name: str, text: str) -> JobFile:
    try:
        read = document.read(text)
    except document.Unreadable as error:
        raise _error(name, [error.problem]) from None
    return _check(name, read)


def _check(name: str, read: document.Document) -> JobFile:
    problems = list(read.problems)
    unread = {problem.field for problem in problems}
    try:
        job = JobFile.model_validate(read.values)
    except ValidationError as error:
        for found in error.errors(include_url=False)[:_MOST_TOLD]:
            new = _problems(found, read)
            # A value that could not be read is None here; that was told already.
            problems += [problem for problem in new if found["input"] is not None or problem.field not in unread]
    except RecursionError:
        problems.append(Problem(0, "", "is nested too deep"))
    if problems:
        raise _error(name, sorted(set(problems)))
    return job


def _error(name: str, problems: list[Problem]) -> SpecError:
    lines = [f"{_place(problem)}{problem.text}" for problem in problems]
    message = f"{name}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{name}: {len(lines)} problems", *lines])
    return SpecError(message, hint=_HINT, problems=tuple(problems))


def _place(problem: Problem) -> str:
    parts = [f"line {problem.line}" if problem.line else "", problem.field]
    place = ", ".join(part for part in parts if part)
    return f"{place}: " if place else ""


def _problems(found: ErrorDetails, read: document.Document) -> list[Problem]:
    conflicts = found.get("ctx", {}).get("error")
    path = _known_path(found["loc"], read.values)
    if isinstance(conflicts, Conflicts):
        return [_problem((*path, field), text, read) for field, text in conflicts.found]
    return [_problem(path, _sentence(found, path), read)]


def _problem(path: document.Path, text: str, read: document.Document) -> Problem:
    line = next((read.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in read.lines), 0)
    return Problem(line, document.dotted(path), text)


def _known_path(loc: tuple[int | str, ...], values: Any) -> document.Path:
    """Where the error is in the file: `run` may have been written as `command`, and dict keys end in `[key]`."""
    path = tuple(part for part in loc if part != "[key]")
    if path[:1] == ("run",) and isinstance(values, dict) and "command" in values and "run" not in values:
        path = ("command", *path[1:])
    return path


def _sentence(found: ErrorDetails, path: document.Path) -> str:
    kind, given, context = found["type"], found.get("input"), found.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return "is missing; add it"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        allowed = str(context["expected"])
        return f"{_shown(given)} is not one of {allowed}{_guess(given, allowed.replace(' or ', ', '))}"
    if kind in _LIMITS:
        return f"{_shown(given)} is out of range; it must be {_LIMITS[kind][0]} {context[_LIMITS[kind][1]]}"
    if kind.startswith("int_"):
        return f"{_shown(given)} is not a whole number"
    if kind.startswith("float_"):
        return f"{_shown(given)} is not a number"
    if kind == "string_type":
        return f"{_shown(given)} is not text; put it in quotes"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{_shown(given)} is not a section; write its fields indented below it"
    if kind == "tuple_type":
        return f"{_shown(given)} is not a list; write [one, two]"
    return f"{_shown(given)}: {found['msg'][:1].lower()}{found['msg'][1:]}"


def _unknown(path: document.Path) -> str:
    """An unknown field: what was meant, or where it belongs."""
    name = str(path[-1])
    if path == ("command",):
        return "is another name for run, which is given too; keep one"
    here = _fields(path[:-1])
    meant = _ALSO_KNOWN_AS.get(name, name)
    if meant in here:
        return f"unknown field; did you mean {meant!r}?"
    for section in ("resources", "elastic", "service", "stop", "checkpoint"):
        if meant in _fields((section,)):
            return f"unknown field; did you mean {section}.{meant}?"
    close = difflib.get_close_matches(name, here, n=1)
    return f"unknown field; did you mean {close[0]!r}?" if close else f"unknown field; known are {', '.join(here)}"


def _fields(path: document.Path) -> list[str]:
    """The fields that a section may have."""
    model: type[BaseModel] | None = JobFile
    for part in path:
        if model is None:
            return []
        field = model.model_fields.get(str(part))
        model = _model_in(field.annotation) if field else model
    return list(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)


def _guess(given: Any, allowed: str) -> str:
    close = difflib.get_close_matches(str(given), [word.strip(" '") for word in allowed.split(",")], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
