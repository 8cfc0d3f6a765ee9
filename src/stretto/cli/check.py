"""`stretto check`: is my script right at any number of workers?"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stretto.cli import show
from stretto.cli.options import Json
from stretto.cli.run import argv
from stretto.errors import UsageError

if TYPE_CHECKING:
    from stretto.backends.local.forkserver import ForkServer
    from stretto.testing.checking import Row, Verdict


def check(
    script: Annotated[Path, Parameter(help="A Python script that trains with stretto.torch.")],
    /,
    *arguments: Annotated[str, Parameter(help="Its arguments; options after --.")],
    steps: Annotated[int, Parameter(help="How many steps of every run are compared.")] = 50,
    timeout: Annotated[float, Parameter(help="Seconds after which a run counts as hung.")] = 300.0,
    keep: Annotated[
        Path | None, Parameter(help="A new folder for logs and records; default: they are deleted.")
    ] = None,
    json: Json = False,
) -> int:
    """Run a script at 1, 2 and 3 workers and with a growth, a kill and a leave; compare all with one worker's.

    Options of the script come after --, as in: stretto check train.py --steps 50 -- --epochs 10
    """
    from stretto.testing.checking import Check

    command = _command(script, arguments)
    _reject(steps, timeout, keep)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-check-")))
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            folder = keep.absolute()
        warm = stack.enter_context(_warm(command[0]))
        verdict = Check(
            command, folder, source=Path.cwd(), steps=steps, timeout_s=timeout, warm=warm, tell=show.note
        ).run()
    show.as_json(verdict.plain()) if json else _print(verdict)
    return 0 if verdict.equal else 1


def _command(script: Path, arguments: tuple[str, ...]) -> list[str]:
    """Every run is in a copy of this folder: a script that is in it is named as seen from there."""
    if script.suffix != ".py" or not script.is_file():
        raise UsageError(f"there is no Python script {script}", hint="stretto check train.py -- --epochs 10")
    whole, here = Path(os.path.abspath(script)), Path.cwd()
    return argv((str(whole.relative_to(here) if whole.is_relative_to(here) else whole.resolve()), *arguments))


def _reject(steps: int, timeout: float, keep: Path | None) -> None:
    if steps < 1:
        raise UsageError(f"--steps {steps}: nothing would be compared", hint="give at least 1; 50 is a good number")
    if not timeout > 0:
        raise UsageError(f"--timeout {timeout:g}: no run ends in that time", hint="give seconds, such as 300")
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"--keep {keep}: that is there already", hint="give a new or an empty folder")


def _warm(python: str) -> ForkServer:
    """Ten workers are started: torch is imported once for all of them, where that is possible."""
    from stretto.backends.local.forkserver import ForkServer

    path = shutil.which(python) or sys.executable
    server = ForkServer(path, {**os.environ, "OMP_NUM_THREADS": "1"}, preload=("torch", "stretto.torch"))
    server.wait_ready()
    return server


def _print(verdict: Verdict) -> None:
    headings = ["run", "workers", "steps", "largest difference", "parts at", "faults"]
    show.columns(headings, [_cells(row) for row in verdict.rows], right=("steps", "largest difference"))
    print()
    for sentence in verdict.findings:
        print(sentence)
    if verdict.causes:
        print("usual causes:")
    for sentence in verdict.causes:
        print(f"- {sentence}")
    for sentence in verdict.notes:
        print(f"note: {sentence}")
    for row in verdict.rows:
        if row.stacks:
            print(f"where the workers of that run were:\n{row.stacks}")
    if verdict.forgotten:
        print(
            f"not the same in a worker that came later: {', '.join(verdict.forgotten)}. What a script holds in "
            "variables of its own begins anew there; if its result depends on them, register them with job.keep()"
        )
    if verdict.equal:
        but = ", as far as the job holds it" if verdict.forgotten else ""
        print(f"equal{but}: the result does not depend on the number of workers, nor on what happens to them")


def _cells(row: Row) -> list[str]:
    from stretto.testing.checking import NUDGED

    found = row.comparison
    parting = found.parting if found is not None else None
    where = f"step {parting.step}, {parting.name}" if parting is not None else "-"
    if found is None or row.run == NUDGED:  # What others are compared with: there is nothing that it should be.
        where = ""
    faults = ", ".join(fault if struck else f"{fault} not tried" for fault, struck in row.faults.items())
    return [
        row.run,
        row.workers,
        str(row.steps),
        f"{found.largest:.1e}" if found is not None else "",
        "failed" if row.error else where,
        faults,
    ]
