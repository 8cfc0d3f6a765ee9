"""`stretto top`: a live view in the terminal. The view itself (`live`) is imported only when it is drawn."""

from __future__ import annotations

import sys

from stretto.cli import show
from stretto.cli.options import HERE, Connection, Json
from stretto.errors import MissingExtra, UsageError


def top(*, json: Json = False, connection: Connection = HERE) -> None:
    """Watch devices, jobs and the queue, live. With --json: all of it once."""
    with connection.client() as client:
        # Also says at once, and not inside a drawing, that there is no server or no right to look.
        now = {"cluster": client.cluster(), "nodes": client.nodes(), "jobs": list(client.jobs(phase="active"))}
    if json:
        show.as_json(now)
        return
    if not sys.stdout.isatty():
        raise UsageError("the live view needs a terminal", hint="`stretto top --json` or `stretto ps` do not")
    try:
        from stretto.cli.live import Live
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"the live view needs {error.name}, which is not installed", hint=f"pip install {error.name}"
        ) from None
    Live(connection).run()
