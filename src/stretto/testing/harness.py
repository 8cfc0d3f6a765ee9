"""One job on this machine: a coordinator process and worker processes, to be resized, killed, frozen and watched.

Everything is a real process and may be killed at any time; what the harness waits for is a condition with a deadline.
When it is closed nothing that it started is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import Process, launch

if TYPE_CHECKING:
    from stretto.testing.network import Network

DEADLINE_S = 60.0


EVICTED_CODE = 75
"""Exit status of a worker that its job goes on without."""


class HarnessError(AssertionError):
    """What was waited for did not come; says how everything stands."""


class Worker:
    """One worker process and its log."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self.process, self.log = name, process, log
        self.reported = False
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def status(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        with self._lock:
            return self.process.poll()

    def close(self) -> None:
        """Kill it if it runs, and wait for its end."""
        with self._lock:
            self.process.close()

    def kill(self) -> None:
        """As the kernel would: at any instruction, with no last word."""
        self.process.kill()

    def freeze(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.signal(signal.SIGCONT)

    def text(self) -> str:
        return self.log.read_text(errors="replace")


class Harness:
    """A job: `start`, then `want` other sizes, hurt it, and wait for its end."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        *,
        workers: int = 1,
        min_workers: int = 1,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, float] | None = None,
        warm: ForkServer | None = None,
        network: Network | None = None,
        cwd: Path | None = None,
        replace: bool = False,
    ) -> None:
        """With `replace` another worker is started for each that ends because the job goes on without it."""
        self.replace = replace
        self.warm, self.network, self.cwd = warm, network, cwd
        self.folder, self.command = folder, list(command)
        self.workers: list[Worker] = []
        self.events: list[dict[str, Any]] = []
        self.size, self.min_workers = workers, min_workers
        self.environment = dict(environment or {})
        self.options = dict(options or {})
        self.token = secrets.token_hex(16)
        self.port = 0
        self.changed = threading.Condition()
        self.coordinator: subprocess.Popen[str] | None = None
        self._reaper = threading.Thread(target=self._reap, name="harness-reaper", daemon=True)
        self._closing = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Harness:
        self.start_coordinator()
        self._reaper.start()
        self.launch(self.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The coordinator.

    def start_coordinator(self) -> None:
        """Start it, or start it again after `kill_coordinator`, at the same address and with the same journal."""
        secret = self.folder / "token"
        secret.write_text(self.token)
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        command = [
            sys.executable, "-m", "stretto.control.coordination", "--journal", str(self.folder / "journal"),
            "--host", self._host("coordinator"), "--port", str(self.port), "--token-file", str(secret),
            "--min", str(self.min_workers), "--want", str(self.size), "--stdin-commands", *options,
        ]  # fmt: skip
        self.coordinator = subprocess.Popen(
            self._placed("coordinator", command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        before = self.count("listening")
        self._listener = threading.Thread(target=self._listen, args=(self.coordinator,), daemon=True)
        self._listener.start()
        self.wait(lambda: self.count("listening") > before, "the coordinator listens")
        self.port = next(e["port"] for e in reversed(self.events) if e["event"] == "listening")
        # The one before may not have kept what it was told of ended processes.
        for worker in self.workers:
            worker.reported = False

    def kill_coordinator(self) -> None:
        """At any instruction; it may be started again."""
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait()
        self._listener.join()
        for pipe in (self.coordinator.stdin, self.coordinator.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError, ValueError):
                    pipe.close()

    def tell(self, command: dict[str, Any]) -> None:
        assert self.coordinator is not None
        assert self.coordinator.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self.coordinator.stdin.write(json.dumps(command) + "\n")
            self.coordinator.stdin.flush()

    # Workers.

    def launch(self, count: int = 1) -> list[Worker]:
        """Start workers; they join when they are ready."""
        return [self._launch(f"w{len(self.workers)}") for _ in range(count)]

    def _launch(self, name: str) -> Worker:
        log = self.folder / f"{name}.log"
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **self.environment,
            "STRETTO_COORDINATOR": f"ws://{self._host('coordinator')}:{self.port}", "STRETTO_TOKEN": self.token,
            "STRETTO_WORKER": name, "STRETTO_HOST": self._host(name), "STRETTO_FOLDER": str(self.folder),
        }  # fmt: skip
        command = self._placed(name, self.command)
        worker = Worker(name, launch(command, env=environment, cwd=self.cwd, log=log, warm=self.warm), log)
        with self.changed:
            self.workers.append(worker)
        return worker

    def want(self, size: int) -> None:
        """Resize: launch who is missing, or have the latest leave."""
        missing = size - len(self.members())
        self.size = size
        self.tell({"want": size})
        if missing > 0:
            self.launch(missing)

    def leave(self, *names: str) -> None:
        self.tell({"leave": list(names), "want": len(self.members()) - len(names)})

    def worker(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def _host(self, name: str) -> str:
        return self.network.host(name) if self.network is not None else "127.0.0.1"

    def _placed(self, name: str, command: Sequence[str]) -> Sequence[str]:
        return self.network.inside(name, command) if self.network is not None else command

    # What is known.

    def count(self, event: str) -> int:
        with self.changed:
            return sum(found["event"] == event for found in self.events)

    def last(self, event: str) -> dict[str, Any] | None:
        with self.changed:
            return next((found for found in reversed(self.events) if found["event"] == event), None)

    def members(self) -> list[str]:
        """Of the generation that was formed last."""
        formed = self.last("formed")
        return list(formed["members"]) if formed is not None else []

    def applied(self) -> int:
        """Steps that somebody reported."""
        with self.changed:
            beats = [e["heartbeat"]["applied"] for e in self.events if e["event"] == "progress"]
        return max(beats, default=0)

    @property
    def over(self) -> bool:
        return self.last("done") is not None or self.last("failed") is not None

    def wait(self, condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Until the condition holds; everything that happens wakes it."""
        end_s = time.monotonic() + deadline_s
        with self.changed:
            while not condition():
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise HarnessError(f"after {deadline_s:g} s still not: {what}\n{self.describe()}")
                self.changed.wait(min(left_s, 0.05))

    def wait_members(self, size: int, deadline_s: float = DEADLINE_S) -> None:
        self.wait(lambda: len(self.members()) == size, f"{size} members", deadline_s)

    def wait_applied(self, steps: int, deadline_s: float = DEADLINE_S) -> None:
        self.wait(lambda: self.applied() >= steps or self.over, f"{steps} steps", deadline_s)

    def wait_over(self, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Until the job is done or has failed, and every worker has ended."""
        self.wait(lambda: self.over, "the end of the job", deadline_s)
        self.wait(lambda: self._deserted or not self._any_runs, "the end of the coordinator", deadline_s)
        self._end_strangers()
        self.wait(lambda: not self._any_runs, "the end of all workers", deadline_s)
        end = self.last("done") or self.last("failed")
        assert end is not None
        return end

    @property
    def _any_runs(self) -> bool:
        return any(worker.running for worker in self.workers)

    @property
    def _deserted(self) -> bool:
        return self.coordinator is not None and self.coordinator.poll() is not None

    def _end_strangers(self) -> None:
        """What a backend does with workers that come when the job is over: nobody will answer them."""
        heard = {event["worker"] for event in self.events if event["event"] == "progress"}
        for worker in self.workers:
            if worker.name not in heard and worker.running:
                worker.kill()

    def describe(self) -> str:
        beats = {event["worker"]: event for event in self.events if event["event"] == "progress"}
        told = [event for event in self.events if event["event"] != "progress"][-20:]
        lines = [json.dumps(event) for event in (*told, *beats.values())]
        for worker in self.workers:
            state = "running" if worker.running else f"ended with {worker.status}"
            lines += [f"-- {worker.name}: {state}", *worker.text().splitlines()[-15:]]
        return "\n".join(lines)

    def close(self) -> None:
        """End everything that was started."""
        self._closing.set()
        for worker in self.workers:
            worker.close()
        if self.coordinator is not None:
            self.kill_coordinator()

    def _listen(self, coordinator: subprocess.Popen[str]) -> None:
        assert coordinator.stdout is not None
        with contextlib.suppress(ValueError):
            for line in coordinator.stdout:
                with self.changed:
                    self.events.append({"at_s": time.monotonic(), **json.loads(line)})
                    self.changed.notify_all()

    def _reap(self) -> None:
        """What a backend does: confirm that a process is gone."""
        while not self._closing.wait(0.01):
            for worker in list(self.workers):
                if not worker.running and not worker.reported:
                    worker.reported = True
                    self.tell({"exited": worker.name, "status": worker.status})
                    if self.replace and worker.status == EVICTED_CODE:
                        self.launch()
                    with self.changed:
                        self.changed.notify_all()
