"""`stretto lab`: the experiments."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from stretto.errors import UsageError

app = App(name="lab", help="The experiments of the documentation, re-run.", help_format="plaintext")


@app.command
def field(
    *,
    data: Path | None = None,
    results: Path = Path("docs/field.jsonl"),
    page: Path | None = None,
    traces: str = "",
    policies: str = "",
    dual: bool = False,
    processes: Annotated[int, Parameter(name=["--processes", "-n"])] = 2,
) -> None:
    """Compare `stretto` with every policy of its class on the ITP and Pollux traces.

    Parameters
    ----------
    data
        Folder with the public traces (elasticflow/, pollux/); default: the environment variable STRETTO_DATA.
    results
        File to which every finished case is added; cases that are in it are not run again.
    page
        Write the tables to this Markdown file, between its two marker lines.
    traces
        Only these, separated by commas: itp-01, itp-02, itp-06, pollux-1 … pollux-6.
    policies
        Only these.
    dual
        Compute the time-priced dual bounds of the ITP traces too (minutes each).
    processes
        Cases to run at the same time.
    """
    from stretto.lab import field as experiment

    names = [name for name in policies.split(",") if name]
    worlds = [name for name in traces.split(",") if name]
    folder = data or (Path(os.environ["STRETTO_DATA"]) if "STRETTO_DATA" in os.environ else None)
    if folder is None:
        raise UsageError("no folder with traces was given", hint="use --data FOLDER or set STRETTO_DATA")

    def tell(line: str) -> None:
        print(line, file=sys.stderr)

    found = experiment.run(experiment.cases(worlds, names), folder, results, processes, tell)
    if dual:
        experiment.bounds(worlds, folder, results, tell)
        found = experiment.read(results)
    if page is not None:
        write_between(page, experiment.table(found))
    print("\n".join(experiment.verdicts(found)))


@app.command
def demo(
    *,
    script: Path = Path("examples/paced.py"),
    epochs: int = 17,
    png: Path | None = Path("out/two-jobs.png"),
) -> None:
    """Two real training jobs that do not fit together, under a gang scheduler and elastic, on this machine's processor.

    Parameters
    ----------
    script
        What both jobs train; it takes --epochs.
    epochs
        How long.
    png
        Where the picture goes.
    """
    from stretto.lab import demo as story

    if not script.is_file():
        raise UsageError(f"there is no script {script}", hint="run it in the project's folder, or give --script")
    story.run(script.absolute(), ["--epochs", str(epochs)], png)


def write_between(page: Path, text: str, start: str = "<!-- table -->", end: str = "<!-- /table -->") -> None:
    """Replace what stands between two marker lines of a page."""
    old = page.read_text() if page.is_file() else f"{start}\n{end}\n"
    if start not in old or end not in old:
        raise UsageError(f"{page} has no lines {start} and {end}", hint="add them where the tables should stand")
    before, rest = old.split(start, 1)
    page.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end, 1)[1]}")
