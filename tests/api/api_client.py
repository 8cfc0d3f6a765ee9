"""A plain client of the API, and a server to talk with: nothing of ours between the test and the wire."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from stretto.api.process import Info, Options, down, running, serve

PATIENCE_S = 120.0


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode()


class Api:
    def __init__(self, url: str, token: str | None) -> None:
        self.url, self.token = url, token
        self.address = urlsplit(url).netloc

    def as_(self, token: str | None) -> Api:
        return Api(self.url, token)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None, **query: Any
    ) -> Answer:
        sent = {"Authorization": f"Bearer {self.token}"} if self.token is not None else {}
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            target = quote(path, safe="/?&=%") + (f"?{urlencode(query, doseq=True)}" if query else "")
            connection.request(method, target, body, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())

    def get(self, path: str, **query: Any) -> Answer:
        return self.ask("GET", path, **query)

    def send(self, method: str, path: str, value: Any, headers: dict[str, str] | None = None, **query: Any) -> Answer:
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self.ask(method, path, json.dumps(value).encode(), sent, **query)

    def post(self, path: str, value: Any = None, **query: Any) -> Answer:
        return self.ask("POST", path, **query) if value is None else self.send("POST", path, value, **query)

    def submit(self, run: str = "true", **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/jobs", {"run": run, "stop": {"grace": "5s"}, **fields})
        assert answer.status == 201, answer.text
        job: dict[str, Any] = answer.json
        return job

    def job(self, ref: str) -> dict[str, Any]:
        answer = self.get(f"/v1/jobs/{ref}")
        assert answer.status == 200, answer.text
        found: dict[str, Any] = answer.json
        return found

    def until(self, ref: str, *phases: str) -> dict[str, Any]:
        """Wait until the job is in one of these phases; if that is running, until its workers have processes."""

        def look() -> dict[str, Any] | None:
            found = self.job(ref)
            there = found["phase"] in phases and all(worker["pid"] for worker in found["workers"])
            return found if there else None

        return eventually(look)

    def websocket(self, path: str) -> str:
        return f"ws://{self.address}{path}"


def eventually(look: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """What `look` gives, once it gives anything."""
    deadline_s = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.02)
    return found


def options(data: Path, **changes: Any) -> Options:
    return Options(
        **{"data": str(data), "port": 0, "nodes": "1x4", "warm": False, "shared": True, "opened": True, **changes}
    )


def api_of(data: Path) -> Api:
    info = running(data)
    assert info is not None
    return Api(info.url, (data / "token").read_text().strip())


@contextlib.contextmanager
def serving(data: Path, **changes: Any) -> Iterator[Api]:
    """A server in a process of its own. It is ended, and all its jobs with it."""
    serve(options(data, **changes), detach=True)
    try:
        yield api_of(data)
    finally:
        if running(data) is not None:
            down(data, cancel_jobs=True)
    eventually(lambda: not alive_in(data))


def kill(data: Path) -> Info:
    """`kill -9` of the server, and wait until it is gone."""
    info = running(data)
    assert info is not None
    pidfd = os.pidfd_open(info.pid)
    os.kill(info.pid, signal.SIGKILL)
    with open(pidfd, "rb", closefd=True):
        eventually(lambda: running(data) is None)
    return info


def alive_in(data: Path) -> list[int]:
    """Processes that were started on behalf of this data directory: their environment or arguments name it."""
    found, needle = [], os.fsencode(data)
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                said = Path(f"/proc/{entry}/cmdline").read_bytes() + Path(f"/proc/{entry}/environ").read_bytes()
                state = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[0]
                if needle in said and state != "Z":
                    found.append(int(entry))
    return found
