"""`stretto job …`: job files, before there is anything to submit them to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stretto.cli import show
from stretto.cli.words import limits

app = App(name="job", help="Job files: check one, print the schema.", help_format="plaintext")


@app.command
def check(file: Annotated[Path, Parameter(help="A job file in YAML.")], /) -> None:
    """Check a job file; says which line and field to change."""
    from stretto.spec import load

    request = load(file).request()
    low, high, noun = request.min_workers, request.max_workers, "replicas" if request.is_service else "workers"
    asks = f", asks for {request.requested}" if low < high and not request.is_service else ""
    print(f"{file}: ok: {limits(low, high)} {noun if high > 1 else noun[:-1]}{asks}")


@app.command
def schema() -> None:
    """Print the JSON Schema of job files."""
    from stretto.spec import schema as of_job_files

    show.as_json(of_job_files())
