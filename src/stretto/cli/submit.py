"""`stretto submit`: a job file goes in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from stretto.cli import following, show, words
from stretto.cli.options import HERE, Connection, Json
from stretto.client import surroundings
from stretto.errors import SpecError, UsageError

if TYPE_CHECKING:
    from stretto.client import Preview

Env = Annotated[
    list[str],
    Parameter(
        name=["--env", "-e"], negative=(), help="NAME=VALUE, or NAME to take it along from here; may be repeated."
    ),
]


def submit(
    file: Annotated[Path, Parameter(allow_leading_hyphen=True, help="A job file in YAML; - reads standard input.")],
    /,
    *,
    set_: Annotated[
        list[str],
        Parameter(name="--set", negative=(), help="field=value, such as elastic.max=8; may be repeated."),
    ] = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    dry_run: Annotated[
        bool, Parameter(negative=(), help="Check it and say when it would start and end; submit nothing.")
    ] = False,
    wait: Annotated[bool, Parameter(negative=(), help="Wait for its end; the exit code is the job's.")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), help="Print its number only.")] = False,
    json: Json = False,
    connection: Connection = HERE,
) -> int:
    """Submit a job file. It is accepted for good when this returns."""
    source: Any = _read(file)
    if set_:
        source = _changed(source, words.pairs(set_))
    variables = environment(env)
    with connection.client() as client:
        try:
            if dry_run:
                _print_preview(client.dry_run(source, env=variables), json)
                return 0
            job = client.submit(source, env=variables)
        except SpecError as error:
            raise _about(file, error) from None
        if not wait:
            _print(job, json, quiet)
            return 0
        show.note(f"job {job.id} ({job.name}) submitted")
        ended = client.wait(job)
    if json:
        show.as_json(ended)
    else:
        print(ended.id if quiet else words.outcome(ended))
    return following.exit_code(ended)


def environment(asked: list[str]) -> dict[str, str]:
    """What the job takes along: a few variables always, and those that were asked for."""
    import os

    found = surroundings.captured()
    for text in asked:
        name, sign, value = text.partition("=")
        if not name or (not sign and name not in os.environ):
            raise UsageError(f"there is no variable {name!r} here", hint="write NAME=VALUE, or a NAME that is set")
        found[name] = value if sign else os.environ[name]
    return found


def _read(file: Path) -> Any:
    if str(file) != "-":
        return file
    import sys

    return sys.stdin.read() or "\n"


def _changed(source: Any, settings: dict[str, str]) -> dict[str, Any]:
    """The job file with some of its fields set; values are YAML."""
    import yaml

    from stretto.client.calls import job_file

    try:
        fields = yaml.safe_load(job_file(source))
    except yaml.YAMLError as error:
        raise SpecError(f"the job file is not YAML: {error}", hint="`stretto job check` says more") from None
    if not isinstance(fields, dict):
        raise SpecError("the job file is not a list of fields", hint="write `field: value`, one to a line")
    for path, text in settings.items():
        *sections, name = path.split(".")
        place = fields
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UsageError(f"{path!r} cannot be set: {section} is no section", hint="give the path of a field")
        try:
            place[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            place[name] = text
    return fields


def _about(file: Path, error: SpecError) -> SpecError:
    """The server knows the text, not its name."""
    name = "standard input" if str(file) == "-" else str(file)
    head, colon, rest = error.message.partition(":")
    message = f"{name}:{rest}" if colon and head in ("job file", "job") else f"{name}: {error.message}"
    return SpecError(message, hint=error.hint, problems=error.problems)


def _print(job: Any, json: bool, quiet: bool) -> None:
    if json:
        show.as_json(job)
    else:
        print(job.id if quiet else f"job {job.id} ({job.name}) submitted")


def _print_preview(preview: Preview, json: bool) -> None:
    if json:
        show.as_json(preview)
        return
    now_s, expected = show.now_s(), preview.forecast
    print(f"{preview.job['name']} would be accepted")
    start, end = words.ahead(expected["start_s"], now_s), words.ahead(expected["end_s"], now_s)
    show.listing([("starts", start), ("ends", end), ("workers", words.limits(*_sizes(preview.job)))])


def _sizes(job: dict[str, Any]) -> tuple[int, int]:
    return job["min_workers"], job["max_workers"]
