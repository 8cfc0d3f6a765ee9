"""`/readyz` says what a submission gets at that moment, whatever keeps the server from taking it."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from api_client import Answer, Api, eventually, running, serving


@contextlib.contextmanager
def locked(data: Path) -> Iterator[None]:
    """By another program that writes."""
    with contextlib.closing(sqlite3.connect(data / "stretto.db", timeout=30, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def full(data: Path) -> Iterator[None]:
    """No file may grow: as with a disk, or a quota, that is used up."""
    info = running(data)
    assert info is not None
    before = resource.prlimit(info.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(info.pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.prlimit(info.pid, resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("trouble", [locked, full])
def test_ready_is_what_a_submission_gets(
    tmp_path: Path, trouble: Callable[[Path], AbstractContextManager[None]]
) -> None:
    with serving(tmp_path) as api:
        assert pair(api) == (200, 201)
        with trouble(tmp_path):
            ready = api.as_(None).get("/readyz")
            assert (ready.status, submission(api).status) == (503, 503), ready.text
            assert ready.json["detail"]
            assert ready.json["hint"]
        eventually(lambda: pair(api) == (200, 201))
        for job in api.get("/v1/jobs", phase="active", limit=1000).json["items"]:
            api.until(job["id"], "succeeded")


def pair(api: Api) -> tuple[int, int]:
    return api.as_(None).get("/readyz").status, submission(api).status


def submission(api: Api) -> Answer:
    return api.post("/v1/jobs", {"run": "true"})


def test_what_the_server_knows_of_itself_keeps_submissions_out_too(tmp_path: Path) -> None:
    """A loop that cannot decide takes nothing, though the store would."""
    code = tmp_path / "failing.py"
    code.write_text(
        "from stretto.core.policy import Traits, policy\n"
        "@policy('failing', traits=Traits())\n"
        "def failing(view, memory, options):\n"
        "    raise RuntimeError('I cannot')\n"
    )
    with serving(tmp_path / "data") as api:
        waiting = api.submit("sleep 600", name="waiting")
        assert api.send("PUT", "/v1/policy", {"name": f"{code}:failing"}).status == 200
        eventually(lambda: api.as_(None).get("/readyz").status == 503)
        assert pair(api) == (503, 503)
        assert api.post(f"/v1/jobs/{waiting['id']}/cancel").status == 202
        assert api.send("PUT", "/v1/policy", {"name": "fifo"}).status == 200
        eventually(lambda: pair(api) == (200, 201))
