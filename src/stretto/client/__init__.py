"""The Python client: everything that the command line can do, from a script or a notebook.

    from stretto.client import Client

    with Client() as stretto:
        job = stretto.submit({"run": "python train.py", "elastic": {"max": 4}})
        job = stretto.wait(job)
        print(job.phase, job.exit_code)

`AsyncClient` has the same methods as coroutines. What a call sends and how its answer is read is written down once
(`calls`); the two clients only carry it. Errors of the API come back as those of `stretto.errors`.

`Client` needs nothing but the standard library (following a log: websockets), so that a command costs no more than it
must; `AsyncClient` needs httpx2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stretto.client.documents import (
    Class,
    Cluster,
    Document,
    Event,
    Forecast,
    Job,
    Node,
    Piece,
    Policy,
    Preview,
    Token,
    Why,
)
from stretto.client.sync import Client

if TYPE_CHECKING:
    from stretto.client.asynchronous import AsyncClient

__all__ = [
    "AsyncClient", "Class", "Client", "Cluster", "Document", "Event", "Forecast", "Job", "Node", "Piece", "Policy",
    "Preview", "Token", "Why",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "AsyncClient":
        from stretto.client.asynchronous import AsyncClient

        return AsyncClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
