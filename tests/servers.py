"""A real server for tests, as a process of its own, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from stretto.client import Client

T = TypeVar("T")
DEADLINE_S = 60.0


def until(look: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Look again and again until there is something."""
    end_s = time.monotonic() + deadline_s
    while not (found := look()):
        assert time.monotonic() < end_s, "it did not come about in time"
        time.sleep(0.02)
    return found


class Server:
    def __init__(self, data: Path, *options: str) -> None:
        self.data, self._options = data, options
        self.url = ""
        self._process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}
        return {**kept, "STRETTO_HOME": str(self.data)}

    def start(self, *options: str) -> None:
        command = [sys.executable, "-m", "stretto.cli", "up", "--json", "--cold", "--shared", "--data", str(self.data)]
        command += [*self._options, *options]
        with (self.data.parent / "server.log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, (self.data.parent / "server.log").read_text()
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        """As hard as can be."""
        assert self._process is not None
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """With all jobs; for the end of a test."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        assert self._process is not None
        ended = self.stretto("down", "--cancel-jobs")
        if ended.returncode:
            self._process.kill()
        self._reap()
        assert ended.returncode == 0, ended.stderr

    def client(self) -> Client:
        return Client(data=self.data)

    def stretto(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """The command line, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "stretto.cli", *words],
            env=self.environment, input=text, capture_output=True, text=True, timeout=120, check=False,
            cwd=self.data.parent,
        )  # fmt: skip

    def begin(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """The command line, beginning."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "stretto.cli", *words], env=self.environment, text=True,
            cwd=self.data.parent, **streams,
        )  # fmt: skip

    def _reap(self) -> None:
        assert self._process is not None
        self._process.wait(DEADLINE_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder / "data", *options)
    server.start("--port", "0")
    try:
        yield server
    finally:
        server.stop()
