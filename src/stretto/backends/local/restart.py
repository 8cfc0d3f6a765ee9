"""Jobs that resize by restart: the torchrun contract for scripts that know nothing of us.

A group of n processes gets the variables that torchrun would set. To change its size all are sent SIGTERM, upon which
they save what they need; those that still run after the grace period are killed; then as many as are wanted start anew,
with a new WORLD_SIZE. A script must therefore do nothing but end when it is started again after its last step. A member
that fails stops the rest, and the group starts again, at most `max_restarts` times.

`advance` is the whole logic, a pure function of (state, event, now); `RestartJob` carries out what it says.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from stretto.backends.local.forkserver import ForkServer
from stretto.backends.local.launch import Process, launch
from stretto.errors import UsageError


class Phase(StrEnum):
    IDLE = "idle"
    """Nothing runs, nothing is wanted: suspended."""
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


@dataclass(frozen=True)
class Rules:
    grace_s: float = 30.0
    max_restarts: int = 3


@dataclass(frozen=True)
class Group:
    """All that is known of a job's processes."""

    wanted: int = 0
    phase: Phase = Phase.IDLE
    size: int = 0
    """Of the members that run, or ran last."""
    alive: frozenset[int] = frozenset()
    starts: int = 0
    restarts: int = 0
    """Only those after a failure."""
    deadline_s: float | None = None
    """When those that still run are killed."""
    failed: tuple[int, int] | None = None
    """Rank and exit status of the member that failed first, since the last start."""
    cancelled: bool = False
    exit_code: int | None = None


# What happens.


@dataclass(frozen=True)
class Resize:
    size: int


@dataclass(frozen=True)
class Exited:
    rank: int
    status: int


@dataclass(frozen=True)
class Cancel:
    pass


@dataclass(frozen=True)
class Tick:
    pass


# What is to be done, in this order.


@dataclass(frozen=True)
class Start:
    size: int
    restarts: int


@dataclass(frozen=True)
class Terminate:
    ranks: frozenset[int]


@dataclass(frozen=True)
class Kill:
    ranks: frozenset[int]


Event = Resize | Exited | Cancel | Tick
Action = Start | Terminate | Kill


def advance(group: Group, event: Event, now_s: float, rules: Rules) -> tuple[Group, list[Action]]:
    """Take one event. Time only counts for the deadline in the state; give a `Tick` when it has come."""
    if group.phase is Phase.DONE:
        return group, []
    match event:
        case Resize(size):
            return _resize(replace(group, wanted=size), now_s, rules)
        case Exited(rank, status):
            return _exited(replace(group, alive=group.alive - {rank}), rank, status, now_s, rules)
        case Cancel():
            group = replace(group, cancelled=True)
            return _settle(group, rules) if group.phase is Phase.IDLE else _stop(group, now_s, rules)
        case Tick():
            if group.deadline_s is None or now_s < group.deadline_s:
                return group, []
            return replace(group, deadline_s=None), [Kill(group.alive)]


def _resize(group: Group, now_s: float, rules: Rules) -> tuple[Group, list[Action]]:
    """While members are stopping only the wish changes: several resizes become one."""
    if group.phase is Phase.IDLE and group.wanted:
        return _start(group)
    if group.phase is Phase.RUNNING and group.wanted != group.size:
        return _stop(group, now_s, rules)
    return group, []


def _exited(group: Group, rank: int, status: int, now_s: float, rules: Rules) -> tuple[Group, list[Action]]:
    """A member that was told to stop may end as it likes; one that was not has failed unless its status is 0."""
    if group.phase is Phase.RUNNING and status != 0:
        group, actions = _stop(replace(group, failed=(rank, status)), now_s, rules)
    else:
        actions = []
    if group.alive:
        return group, actions
    return _settle(group, rules)


def _stop(group: Group, now_s: float, rules: Rules) -> tuple[Group, list[Action]]:
    if group.phase is Phase.STOPPING:
        return group, []
    return replace(group, phase=Phase.STOPPING, deadline_s=now_s + rules.grace_s), [Terminate(group.alive)]


def _settle(group: Group, rules: Rules) -> tuple[Group, list[Action]]:
    """All have ended: is that the end, and if not, what comes next?"""
    group = replace(group, deadline_s=None)
    if group.cancelled:
        return replace(group, phase=Phase.DONE, exit_code=143), []
    if group.phase is Phase.RUNNING:
        return replace(group, phase=Phase.DONE, exit_code=0), []
    if group.failed is not None:
        if group.restarts >= rules.max_restarts:
            return replace(group, phase=Phase.DONE, exit_code=_exit_code(group.failed[1])), []
        group = replace(group, restarts=group.restarts + 1)
    if not group.wanted:
        return replace(group, phase=Phase.IDLE, failed=None), []
    return _start(group)


def _start(group: Group) -> tuple[Group, list[Action]]:
    group = replace(
        group,
        phase=Phase.RUNNING,
        size=group.wanted,
        alive=frozenset(range(group.wanted)),
        starts=group.starts + 1,
        failed=None,
    )
    return group, [Start(group.size, group.restarts)]


def _exit_code(status: int) -> int:
    """As a shell has it."""
    return status if status >= 0 else 128 - status


def contract(
    rank: int, size: int, port: int, *, restarts: int, max_restarts: int, run_id: str, env: Mapping[str, str]
) -> dict[str, str]:
    """The variables of one member, on one machine, added to those of the job."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    usual = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | ({"OMP_NUM_THREADS": "1"} if size > 1 else {})
    return {
        **usual,
        **env,
        **ranks,
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Nobody but rank 0 keeps a store.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


class RestartJob:
    """Runs a group. One thread calls `run` or `turn`; `resize` and `cancel` may be called from any."""

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        *,
        logs: str | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        warm: ForkServer | None = None,
        rules: Rules | None = None,
        run_id: str = "",
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """Member r writes to `logs`/r.log. `tell` gets what a person should read: failures, each traceback once."""
        self.command = list(command)
        self.logs = Path(logs)
        self.env = dict(os.environ if env is None else env)
        self.cwd = os.getcwd() if cwd is None else cwd
        self.warm = warm
        self.rules = Rules() if rules is None else rules
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self.group = Group()
        self.members: dict[int, Process] = {}
        self._tell = tell or _to_stderr
        self._log_starts: dict[int, int] = {}
        self._told: set[str] = set()
        self._events: deque[Event] = deque()
        self._awake, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.resize(size)

    def resize(self, size: int) -> None:
        """Ask for another number of members; 0 suspends the job."""
        if size < 0:
            raise UsageError(f"a job cannot have {size} workers", hint="give 0 to suspend it, or more")
        self._post(Resize(size))

    def cancel(self) -> None:
        """Ask it to end: SIGTERM, grace, SIGKILL. Its exit code is then 143."""
        self._post(Cancel())

    def run(self) -> int:
        """Work until the job is done; its exit code."""
        while self.group.exit_code is None:
            self.turn()
        return self.group.exit_code

    def turn(self, timeout_s: float | None = None) -> None:
        """Wait until something happens, a deadline comes or the time is over, and act on it."""
        self._wait(timeout_s)
        self._take(Tick())
        while self._events:
            self._take(self._events.popleft())
        for rank, member in list(self.members.items()):
            if (status := member.poll()) is not None and self.members.get(rank) is member:
                self._ended(rank, status)

    def close(self) -> None:
        """Kill what runs, and wait for its end."""
        for member in self.members.values():
            member.kill()
        for member in self.members.values():
            member.close()
        self.members.clear()
        with self._lock:
            if self._wake != -1:
                os.close(self._wake)
                os.close(self._awake)
                self._wake = self._awake = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _post(self, event: Event) -> None:
        self._events.append(event)
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake != -1:
                os.write(self._wake, b"!")

    def _wait(self, timeout_s: float | None) -> None:
        if self.group.deadline_s is not None:
            left_s = max(0.0, self.group.deadline_s - time.monotonic())
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        poller = select.poll()
        poller.register(self._awake, select.POLLIN)
        for member in self.members.values():
            poller.register(member.fileno(), select.POLLIN)
        poller.poll(None if timeout_s is None else timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            os.read(self._awake, 4096)

    def _take(self, event: Event) -> None:
        before = self.group
        self.group, actions = advance(before, event, time.monotonic(), self.rules)
        if isinstance(event, Exited) and before.phase is Phase.RUNNING and event.status != 0:
            self._explain(event, before)
        for action in actions:
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Start(size, restarts):
                self._start(size, restarts)
            case Terminate(ranks):
                for rank in ranks:
                    self.members[rank].terminate()
            case Kill(ranks):
                for rank in ranks:
                    self.members[rank].kill()

    def _start(self, size: int, restarts: int) -> None:
        port = _fresh_port()
        for rank in range(size):
            env = contract(
                *(rank, size, port),
                restarts=restarts,
                max_restarts=self.rules.max_restarts,
                run_id=self.run_id,
                env=self.env,
            )
            log = self.logs / f"{rank}.log"
            self._log_starts[rank] = log.stat().st_size if log.exists() else 0
            self.members[rank] = launch(self.command, env=env, cwd=self.cwd, log=log, warm=self.warm)

    def _ended(self, rank: int, status: int) -> None:
        del self.members[rank]
        self._take(Exited(rank, status))

    def _explain(self, failure: Exited, group: Group) -> None:
        """Say who failed and how; a traceback that was shown already is not shown again."""
        how = f"with exit code {failure.status}" if failure.status > 0 else f"by signal {-failure.status}"
        trace = last_traceback(self.logs / f"{failure.rank}.log", self._log_starts[failure.rank])
        again = " (the same error as before)" if trace in self._told else ""
        most = self.rules.max_restarts
        then = f"restart {group.restarts + 1} of {most} follows" if group.restarts < most else "no restart is left"
        self._tell(f"member {failure.rank} of {group.size} ended {how}; {then}{again}")
        if trace and not again:
            self._told.add(trace)
            self._tell(trace)


def last_traceback(log: Path, start: int, most_bytes: int = 65536) -> str:
    """The traceback at the end of a log, from where this run of the member began; empty if there is none."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - most_bytes))
        text = file.read().decode(errors="replace")
        found = re.search(r"^Traceback \(most recent call last\):$.*", text, re.MULTILINE | re.DOTALL)
        return found.group().strip() if found else ""
    return ""


_handed_out: deque[int] = deque(maxlen=256)


def _fresh_port() -> int:
    """A port that is free, and that we have not given to another group lately."""
    while True:
        with socket.socket() as trial:
            trial.bind(("127.0.0.1", 0))
            port = int(trial.getsockname()[1])
        if port not in _handed_out:
            _handed_out.append(port)
            return port


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
