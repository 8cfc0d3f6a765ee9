"""A Stretto server for measurements: a real process, in a temporary folder, on a free port of the loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from _measure import cpu_s
from stretto.client import Client

T = TypeVar("T")
DEADLINE_S = 60.0


class Server:
    def __init__(self, folder: Path, *options: str) -> None:
        self.data = folder / "data"
        self._log = folder / "server.log"
        self._command = [sys.executable, "-m", "stretto.cli", "up", "--json", "--port", "0", "--data", str(self.data)]
        self._command += options
        self._process: subprocess.Popen[str] | None = None
        self.ready_after_s = 0.0

    @property
    def environment(self) -> dict[str, str]:
        """For commands that are to talk to it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("STRETTO_")}
        return {**kept, "STRETTO_HOME": str(self.data)}

    def start(self) -> None:
        began_s = time.monotonic()
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=log, text=True, env=self.environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the server did not start:\n{self._log.read_text()}")
        self.url: str = json.loads(line)["url"]
        self.token = (self.data / "token").read_text().strip()
        self.ready_after_s = time.monotonic() - began_s

    def stop(self) -> None:
        """With all workers that run: the queue is drained first. A server that will not end is killed."""
        process = self._process
        if process is None:
            return
        try:
            if process.poll() is None:
                self._cancel_running()
            process.terminate()
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _cancel_running(self) -> None:
        """What waits may wait for ever: its folder goes."""
        self.drain()
        with self.client() as client:
            for job in list(client.jobs(phase="running")):
                client.cancel(job)
            until(lambda: not any(node["workers"] for node in client.nodes()), "the end of the last worker")

    def client(self) -> Client:
        return Client(data=self.data)

    def drain(self) -> None:
        """From now on no job is started."""
        with self.client() as client:
            for node in client.nodes():
                client.drain(node.name)

    def undrain(self) -> None:
        with self.client() as client:
            for node in client.nodes():
                client.undrain(node.name)

    def memory_mb(self, field: str = "VmRSS") -> float:
        """Of the server process, in MB (10^6 bytes); `VmHWM` is the most it ever was."""
        assert self._process is not None
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024 / 1e6
        raise KeyError(field)

    def cpu_s(self) -> float:
        """What the server process has used so far, all threads."""
        assert self._process is not None
        return cpu_s(self._process.pid)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(folder, *options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def until(look: Callable[[], T], what: str, *, every_s: float = 0.005) -> T:
    """Look again and again until there is something."""
    end_s = time.monotonic() + DEADLINE_S
    while not (found := look()):
        if time.monotonic() >= end_s:
            sys.exit(f"{what} did not come about within {DEADLINE_S:g} s")
        time.sleep(every_s)
    return found
