"""The programs of a test bed: each with a log, under a guard, and waited for with a deadline."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stretto.errors import Unavailable
from stretto.testing.kubernetes.guard import Guard

#: Below the ports that the kernel gives to outgoing connections, so that nobody takes one by chance.
PORTS = range(20_000, 32_000)
TAIL_LINES = 15
#: Nothing that they hold is needed afterwards.
END_S = 1.0


class Program:
    """A process in the background and its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, guard: Guard, env: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | dict(env), cwd=log.parent,
            )  # fmt: skip
        guard.process(self.process.pid, END_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def stop(self, grace_s: float = 20.0) -> None:
        self.process.terminate()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        state = "runs" if self.running else f"ended with {self.process.returncode}"
        return "\n".join([f"-- {self.name} {state}, the end of {self.log}:", *lines])


def wait_until(
    condition: Callable[[], bool], what: str, *, deadline_s: float = 60.0, programs: Sequence[Program] = ()
) -> None:
    """Until it holds. A program that ends meanwhile is a failure, and the logs are shown."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        ended = [program for program in programs if not program.running]
        late = time.monotonic() > end_s
        if ended or late:
            why = f"{ended[0].name} ended" if ended else f"{deadline_s:g} s passed"
            told = "\n".join(program.tail() for program in ended or programs)
            raise Unavailable(f"{why}, and still not: {what}\n{told}")
        time.sleep(0.05)


def free_port(address: str = "127.0.0.1") -> int:
    while True:
        port = random.choice(PORTS)
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((address, port))
            except OSError:
                continue
            return port


def run(*command: str, text: str | None = None, timeout_s: float = 120.0) -> str:
    """A command that must succeed; what it printed."""
    done = subprocess.run(command, input=text, text=True, capture_output=True, timeout=timeout_s, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise Unavailable(f"{' '.join(command)} ended with {done.returncode}: {said}")
    return done.stdout
