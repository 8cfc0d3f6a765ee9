"""`stretto submit`: a job file goes in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from cyclopts import Parameter

from stretto.cli import following, show, words
from stretto.cli.jobs import called
from stretto.cli.options import SOMEWHERE, Json, Place
from stretto.client import surroundings
from stretto.errors import SpecError, UsageError

if TYPE_CHECKING:
    from stretto.client import Client, Job, Preview

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
    image: Annotated[str | None, Parameter(help="On Kubernetes: the image, where the file names none.")] = None,
    name: Annotated[str | None, Parameter(help="On Kubernetes: of its object, if not the file's.")] = None,
    template: Annotated[
        Path | None, Parameter(help="On Kubernetes: a pod template in YAML to build on (volumes, tolerations …).")
    ] = None,
    dry_run: Annotated[
        bool,
        Parameter(
            negative=(),
            help="Submit nothing: check it, say when it would start and end; on Kubernetes, print what would be made.",
        ),
    ] = False,
    wait: Annotated[bool, Parameter(negative=(), help="Wait for its end; the exit code is the job's.")] = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative=(), help="Print its number only.")] = False,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> int:
    """Submit a job file. It is accepted for good when this returns."""
    source: Any = _read(file)
    if set_:
        source = _changed(source, words.pairs(set_))
    with _naming(file):
        if place.cluster is not None:
            how = {"name": name, "image": image, "env": asked_for(env), "template": _template(template)}
            if dry_run:
                _print_object(source, how, place, json)
                return 0
            with place.kubernetes() as cluster:
                return _submitted(cast("Client", cluster), cluster.submit(source, **how), wait, json, quiet)
        place.only_on_kubernetes(**{"--name": name, "--image": image, "--template": template})
        variables = environment(env)
        with place.client() as client:
            if dry_run:
                _print_preview(client.dry_run(source, env=variables), json)
                return 0
            return _submitted(client, client.submit(source, env=variables), wait, json, quiet)


def _submitted(client: Client, job: Job, wait: bool, json: bool, quiet: bool) -> int:
    if not wait:
        _print(job, json, quiet)
        return 0
    show.note(f"job {called(job)} submitted")
    ended = client.wait(job)
    if json:
        show.as_json(ended)
    else:
        print(ended.id if quiet else words.outcome(ended))
    return following.exit_code(ended)


def environment(asked: list[str]) -> dict[str, str]:
    """What the job takes along: a few variables always, and those that were asked for."""
    return {**surroundings.captured(), **asked_for(asked)}


def asked_for(asked: list[str]) -> dict[str, str]:
    import os

    found: dict[str, str] = {}
    for text in asked:
        name, sign, value = text.partition("=")
        if not name or (not sign and name not in os.environ):
            raise UsageError(f"there is no variable {name!r} here", hint="write NAME=VALUE, or a NAME that is set")
        found[name] = value if sign else os.environ[name]
    return found


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    try:
        yield
    except SpecError as error:
        raise _about(file, error) from None


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
    if error.message.startswith(f"{name}: "):
        return error
    head, colon, rest = error.message.partition(":")
    message = f"{name}:{rest}" if colon and head in ("job file", "job") else f"{name}: {error.message}"
    return SpecError(message, hint=error.hint, problems=error.problems)


def _print(job: Any, json: bool, quiet: bool) -> None:
    if json:
        show.as_json(job)
    else:
        print(job.id if quiet else f"job {called(job)} submitted")


def _template(file: Path | None) -> Any:
    if file is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{file}: cannot be read: {error}", hint="give a pod template in YAML") from None
    if not isinstance(found, dict) or "spec" not in found:
        raise UsageError(f"{file}: is not a pod template", hint="it has metadata, if need be, and spec, as a pod has")
    return {name: value for name, value in found.items() if name in ("metadata", "spec")}


def _print_object(source: Any, how: dict[str, Any], place: Place, json: bool) -> None:
    """What would be created; nobody is asked, so that it works without a cluster."""
    import yaml

    from stretto.kubernetes.sdk import elastic_job_of

    made = elastic_job_of(source, namespace=place.namespace, **how)
    if json:
        show.as_json(made)
    else:
        print(yaml.safe_dump(made, sort_keys=False, allow_unicode=True), end="")


def _print_preview(preview: Preview, json: bool) -> None:
    if json:
        show.as_json(preview)
        return
    now_s, expected = show.now_s(), preview.forecast
    print(f"{preview.job['name']} would be accepted")
    start, end = words.foreseen(expected, "start", now_s), words.foreseen(expected, "end", now_s)
    show.listing([("starts", start), ("ends", end), ("workers", words.limits(*_sizes(preview.job)))])


def _sizes(job: dict[str, Any]) -> tuple[int, int]:
    return job["min_workers"], job["max_workers"]
