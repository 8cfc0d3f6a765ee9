"""Real worker processes that a test tells what to do, one call at a time.

Each runs functions of the test's module in its main thread; the first argument is a namespace that lives as long as the
worker. Workers are forks of one server that has imported torch and done nothing with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import types
from collections.abc import Callable, Sequence
from typing import Any

DEADLINE_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch.nn", "torch._dynamo", "numpy", "stretto.errors"])


class Worker:
    def __init__(self) -> None:
        self._here, there = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(there,), daemon=True)
        self.process.start()
        there.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        self._here.send((function, args))

    def result(self) -> Any:
        """What the function returned; what it raised is raised here."""
        if not self._here.poll(DEADLINE_S):
            raise TimeoutError("the worker did not answer")
        value = self._here.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.result()

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(DEADLINE_S)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self._here.close()
        self.process.close()


class Crew:
    """`with Crew(3) as crew: crew.call(function, lambda rank: (rank,))`."""

    def __init__(self, size: int) -> None:
        self.workers = [Worker() for _ in range(size)]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.end()

    def __getitem__(self, rank: int) -> Worker:
        return self.workers[rank]

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Worker]:
        """Start it on these workers (all), each with its position among them before the other arguments."""
        chosen = [self.workers[rank] for rank in (range(len(self.workers)) if ranks is None else ranks)]
        for position, worker in enumerate(chosen):
            worker.start(function, position, *args)
        return chosen

    def call(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> list[Any]:
        return [worker.result() for worker in self.start(function, *args, ranks=ranks)]


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    kept = types.SimpleNamespace()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = function(kept, *args)
        except Exception as error:
            answer = error
        pipe.send(answer)
