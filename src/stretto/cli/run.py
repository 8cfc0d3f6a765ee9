"""`stretto run`: a command becomes a job, and is followed to its end as if it ran here."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from stretto.cli import following, show, words
from stretto.cli.jobs import called
from stretto.cli.options import SOMEWHERE, Json, Place
from stretto.cli.submit import Env, asked_for, environment
from stretto.errors import NotFound, UsageError

if TYPE_CHECKING:
    from stretto.client import Client, Job


Length = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
"""A length of time. One below 0 is told so by the job file's rules, not taken for an option."""


def run(
    *command: Annotated[
        str, Parameter(help="A Python script with its arguments, or after -- any command with its arguments.")
    ],
    workers: Annotated[str, Parameter(name=["--workers", "-w"], help="4, or a range such as 1..4.")] = "1",
    name: Annotated[str | None, Parameter(help="Jobs of one name share what was learned of them.")] = None,
    gpu: Annotated[str | None, Parameter(help="GPUs (or slots) of every worker; a share such as 0.5; 0: none.")] = None,
    gpu_memory: Annotated[str | None, Parameter(help="Memory needed on each of its GPUs, such as 8Gi.")] = None,
    cpu: Annotated[str | None, Parameter(help="Cores of every worker.")] = None,
    memory: Annotated[str | None, Parameter(help="Memory of every worker, such as 4Gi.")] = None,
    priority: Annotated[int | None, Parameter(help="0 to 100, larger is more urgent.")] = None,
    level: Annotated[
        Literal["elastic", "restart", "rigid"] | None,
        Parameter(help="Resizes in process, by restart, or never. A range of workers means elastic."),
    ] = None,
    preemptible: Annotated[
        bool | None,
        Parameter(help="Whether more urgent jobs may stop it; default: yes, unless it is rigid."),
    ] = None,
    queue: str | None = None,
    after: Annotated[
        list[str], Parameter(negative=(), help="Numbers or names of jobs that must have ended before; may be repeated.")
    ] = [],  # noqa: B006
    deadline: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help="Should be done so long after submission, such as 4h.")
    ] = None,
    expect: Annotated[
        Length,
        Parameter(
            help="How long it will run at the size it asks for: 2h, or 5000 steps. A hint only.",
        ),
    ] = None,
    stop_after: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help="End it after so much run time, such as 2h.")
    ] = None,
    grace: Annotated[
        str | None, Parameter(allow_leading_hyphen=True, help="Time between the polite and the hard stop, such as 1m.")
    ] = None,
    label: Annotated[list[str], Parameter(negative=(), help="key=value; may be repeated.")] = [],  # noqa: B006
    env: Env = [],  # noqa: B006
    image: Annotated[
        str | None, Parameter(help="On Kubernetes: what it runs in. Scripts are in it: none is taken along from here.")
    ] = None,
    detach: Annotated[bool, Parameter(name=["--detach", "-d"], negative=(), help="Submit it and leave.")] = False,
    json: Json = False,
    place: Place = SOMEWHERE,
) -> int:
    """Run a script or command as a job, show its log, and end with its exit code.

    Options of the script come after --, as in: stretto run train.py --workers 1..4 -- --epochs 10
    """
    on_server = place.cluster is None
    if on_server:
        place.only_on_kubernetes(**{"--image": image})
    resources = {"gpu": gpu, "gpu_memory": gpu_memory, "cpu": cpu, "memory": memory}
    fields = {
        "run": argv(command, "" if on_server else "python"), "name": name, "image": image, "priority": priority,
        "level": level, "queue": queue, "preemptible": preemptible,
        "labels": words.pairs(label), "deadline": deadline, "expect": expect,
        "stop": _given({"after": stop_after, "grace": grace}),
        "resources": _given(resources), **sizes(workers),
    }  # fmt: skip
    with place.client() as client:
        fields["after"] = names(client, after) if on_server else after
        job = client.submit(_given(fields), env=environment(env) if on_server else asked_for(env))
        if detach:
            show.as_json(job) if json else print(f"job {called(job)} submitted")
            return 0
        if not json:
            show.note(f"job {called(job)} submitted")
        return following.follow(client, job, json)


def argv(command: tuple[str, ...], python: str = "") -> list[str]:
    """A Python script is run by `python`, or the environment that is active, else by ours; anything else is what it
    says."""
    if not command:
        raise UsageError(
            "nothing to run was given", hint="stretto run train.py --workers 1..4; or: stretto run -- COMMAND"
        )
    if not command[0].endswith(".py"):
        return list(command)
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX")
    return [python or ("python" if active else sys.executable), *command]


def sizes(workers: str) -> dict[str, Any]:
    """A range makes it elastic, also one of a single size: that job is started as elastic ones are."""
    low, high = words.parse_sizes(workers)
    return {"workers": low} if workers.strip().isdecimal() else {"elastic": {"min": low, "max": high}}


def names(client: Client, refs: list[str]) -> list[str]:
    """A job file knows others by their names. A job that has ended is not waited for: its name may be a newer one's."""
    found: list[str] = []
    for ref in refs:
        job = _numbered(client, ref)
        if job is None or not job.ended:
            found.append(ref if job is None else job.name)
    return found


def _numbered(client: Client, ref: str) -> Job | None:
    """None: it is a name."""
    if not ref.isdecimal():
        return None
    try:
        return client.job(ref)
    except NotFound:
        return None


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {})}
