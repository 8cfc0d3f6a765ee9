"""Holding all processes of a launch together, so that they can be limited and ended as one.

The best means is a control group of version 2: one write to `cgroup.kill` ends everybody in it, however they fork
meanwhile. It needs no controllers, so it also works on hybrid hosts, where those belong to version 1. Next comes the
freezer of version 1: stop all, kill all, let go. Where no control group can be made there is the walk through `/proc`:
everybody whose environment carries the launch's mark, with their sessions and descendants, again and again until
nobody is left. For those who drop their environment the supervisor then notes its descendants now and then. It also
ends all of them itself, whatever the means.

This file is loaded by path into interpreters where Stretto need not be installed: standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Container, Iterable, Iterator
from typing import Any, NamedTuple

MARK = "STRETTO_LAUNCH"
"""The variable that carries a launch's mark into every process of it: `<launch>@<whose>`, since others on this machine
may have launches of the same name. Marks of earlier versions end before the @."""

EVERYTHING = frozenset({"cgroup.kill", "freezer", "cpu", "memory"})

PERIOD_US = 20_000
"""Of the CPU quota: a worker that has used its share is stopped for less than this."""


class Means(NamedTuple):
    """What this system lets us do, and for what it does not, why."""

    ending: str
    """`cgroup.kill`, `freezer` or `walk`."""
    home: str
    """Parent of the groups that launches are ended by; empty for `walk`."""
    cpu: str
    """Parent of the groups that carry CPU quotas; empty: there are none."""
    memory: str
    controllers: tuple[str, ...]
    """Those of version 2 that the parent has to hand down."""
    why_not: dict[str, str]
    """What is not possible (`cgroup.kill`, `freezer`, `cpu`, `memory`) → the reason."""


class Process(NamedTuple):
    """One line of the process table. Number and start time together name a process for ever."""

    pid: int
    start: int
    parent: int
    group: int
    session: int
    changing: bool = False
    """It is just becoming another program, and shows no environment for a moment."""


def survey(name: str, allow: Iterable[str] = EVERYTHING, proc: str = "/proc/self") -> Means:
    """Find out by trying. Groups will be below one called `name`; only what is in `allow` is considered."""
    allowed, why_not = set(allow), {}
    for each in sorted(EVERYTHING - allowed):
        why_not[each] = "it is switched off"
    unified, offers = _best_unified(proc, name, allowed, why_not)
    parents: dict[str, str] = {}
    for which, file in (("freezer", "freezer.state"), ("cpu", "cpu.cfs_quota_us"), ("memory", "memory.limit_in_bytes")):
        if which in offers:
            parents[which] = unified
        elif which in allowed and not (which == "freezer" and "cgroup.kill" in offers):
            parents[which] = _find_version_1(proc, name, which, file, why_not)
    ending = "cgroup.kill" if "cgroup.kill" in offers else "freezer" if parents.get("freezer") else "walk"
    return Means(
        ending=ending,
        home=unified if ending == "cgroup.kill" else parents.get("freezer", ""),
        cpu=parents.get("cpu", ""),
        memory=parents.get("memory", ""),
        controllers=tuple(each for each in ("cpu", "memory") if each in offers),
        why_not={each: text for each, text in why_not.items() if each not in offers and not parents.get(each)},
    )


def box(means: Means, launch: str, cpu_milli: int = 0, memory_mib: int = 0, *, mark: str = "") -> dict[str, Any]:
    """What holds one launch: plain values, to be written down before anything is started."""
    settings: dict[str, dict[str, str]] = {means.home: {}} if means.home else {}
    if cpu_milli and means.cpu:
        settings.setdefault(means.cpu, {}).update(_cpu_settings(means, cpu_milli))
    if memory_mib and means.memory:
        settings.setdefault(means.memory, {}).update(_memory_settings(means, memory_mib))
    return {
        "mark": mark or launch,
        "ending": means.ending,
        "home": os.path.join(means.home, launch) if means.home else "",
        "memory": os.path.join(means.memory, launch) if memory_mib and means.memory else "",
        "memory_mib": memory_mib,
        "controllers": list(means.controllers),
        "groups": [{"path": os.path.join(parent, launch), "settings": each} for parent, each in settings.items()],
    }


def mark_of(launch: str, owner: str) -> str:
    """What tells the processes of a launch from those of others' launches with the same name."""
    return f"{launch}@{owner}"


class Box:
    """The control groups of one launch, as `box` has described them."""

    def __init__(self, words: dict[str, Any]) -> None:
        self.mark: str = words["mark"]
        self.ending: str = words["ending"]
        self.home: str = words["home"]
        self.memory: str = words["memory"]
        self.memory_mib: int = words["memory_mib"]
        self.controllers: list[str] = words["controllers"]
        self.groups: list[dict[str, Any]] = words["groups"]

    def make(self) -> None:
        """Create the groups with their limits; raises `OSError`."""
        for group in self.groups:
            self._make_group(group["path"])
            for file, value in group["settings"].items():
                with contextlib.suppress(OSError) if file in _OPTIONAL else contextlib.nullcontext():
                    _write(os.path.join(group["path"], file), value)

    def _make_group(self, path: str) -> None:
        """The parent may be taken away at any time by somebody whose group was the last in it."""
        for attempts_left in reversed(range(100)):
            with contextlib.suppress(FileExistsError):
                os.mkdir(os.path.dirname(path))
            _hand_down(os.path.dirname(path), self.controllers)
            try:
                os.mkdir(path)
            except FileExistsError:
                return
            except FileNotFoundError:
                if not attempts_left:
                    raise
            else:
                return

    def enter(self) -> None:
        """Called by the worker: it, and all that it starts, is inside from now on."""
        for group in self.groups:
            _write(os.path.join(group["path"], "cgroup.procs"), "0")

    def take_in(self, pid: int) -> None:
        """Put a process inside that runs already, and whom it has started before; raises `OSError`."""
        if not self.groups:
            return
        inside: set[int] = set()
        while rest := [each for each in (pid, *offspring(pid)) if each not in inside]:
            for each in rest:
                inside.add(each)
                for group in self.groups:
                    with contextlib.suppress(ProcessLookupError):
                        _write(os.path.join(group["path"], "cgroup.procs"), str(each))

    def strike(self) -> None:
        """Kill everybody inside, once. Who is left afterwards is a matter of waiting, or of striking again."""
        if not self.home:
            return
        with contextlib.suppress(OSError):
            if self.ending == "cgroup.kill":
                for folder in _and_below(self.home):
                    _write(os.path.join(folder, "cgroup.kill"), "1")
            else:
                _strike_frozen(self.home)

    def inside(self) -> list[int]:
        """Who lives in the group that the launch is ended by."""
        found: list[int] = []
        for folder in _and_below(self.home) if self.home else ():
            with contextlib.suppress(OSError), open(os.path.join(folder, "cgroup.procs")) as file:
                found += [int(line) for line in file]
        return found

    def out_of_memory(self) -> str:
        """What to tell a person when the kernel killed somebody for the memory limit."""
        for file in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError), open(os.path.join(self.memory, file)) as lines:
                if any(line.startswith("oom_kill ") and int(line.split()[1]) for line in lines):
                    return f"out of memory (limit {self.memory_mib} MiB)"
        return ""

    def remove(self) -> None:
        """Remove the groups, and an empty parent; what is not empty stays, and is found again at the next start."""
        for group in self.groups:
            for folder in reversed(list(_and_below(group["path"]))):
                _remove_group(folder)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(group["path"]))

    def end(self, session: int = 0, since: int = 0, noted: Iterable[Iterable[int]] = ()) -> None:
        """For who is not the parent: end everybody inside, and everybody with the mark. Returns when nobody is left."""
        known = {(pid, start) for pid, start in noted}
        pause_s = 0.001
        while True:
            self.strike()
            _strike_group(session, since)
            left = kill_all(marked(self.mark, session, since, known))
            if not left and not self.inside():
                break
            time.sleep(pause_s)
            pause_s = min(0.25, pause_s * 2)
        self.remove()


def sweep(means: Means, keep: Iterable[str], owner: str = "") -> None:
    """End and remove what is left below our parents of launches that are not to be kept; then empty parents."""
    kept = set(keep)
    for parent in {means.home, means.cpu, means.memory} - {""}:
        with contextlib.suppress(OSError):
            for name in sorted(set(_folders(parent)) - kept):
                ending = means.ending if parent == means.home else "walk"
                path = os.path.join(parent, name)
                home, mark = path if parent == means.home else "", mark_of(name, owner) if owner else name
                words = {"mark": mark, "ending": ending, "home": home, "memory": ""}
                Box({**words, "memory_mib": 0, "controllers": [], "groups": [{"path": path, "settings": {}}]}).end()
    remove_parents(means)


def remove_parents(means: Means) -> None:
    """Those that hold no group any more."""
    for parent in {means.home, means.cpu, means.memory} - {""}:
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def processes() -> dict[int, Process]:
    """All that live; zombies do not."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (process := look_up(int(entry))) is not None:
            found[process.pid] = process
    return found


def look_up(pid: int) -> Process | None:
    """The process with this number; None when there is none that lives."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    parent, group, session, flags, start, environment = (int(fields[number]) for number in (1, 2, 3, 6, 19, 47))
    return Process(pid, start, parent, group, session, environment == 0 and not flags & _NO_PROGRAM)


_NO_PROGRAM = 0x00200000 | 0x00000004
"""Flags of threads of the kernel, and of who is on the way out."""


def marked(mark: str, session: int = 0, since: int = 0, known: Container[tuple[int, int]] = ()) -> list[Process]:
    """Who belongs to a launch, as far as the process table tells: who carries its mark, who is in the session that its
    worker led (since the worker's start), who is known by number and start time, and all of their descendants.
    Never ourselves."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        table = processes()
        found = _belonging(table, mark, session, since, known)
        if found or time.monotonic() > deadline_s or not any(map(_is_unclear, table.values())):
            return found
        time.sleep(0.001)


_PATIENCE_S = 2.0
"""With somebody who is changing programs: it takes an instant, unless a disk hangs."""


def _belonging(
    table: dict[int, Process], mark: str, session: int, since: int, known: Container[tuple[int, int]]
) -> list[Process]:
    leader = table.get(session)
    if leader is not None and leader.start != since:
        session = 0  # The number is somebody else's by now.
    needle = f"{MARK}={mark}".encode()
    found = [
        each
        for each in table.values()
        if (session and each.session == session and each.start >= since)
        or (each.pid, each.start) in known
        or (_carries(each.pid, needle) and ("@" in mark or not _has_supervisor(each, mark, table)))
    ]
    return [each for each in _with_descendants(found, table) if each.pid not in (1, os.getpid())]


def _has_supervisor(process: Process, launch: str, table: dict[int, Process]) -> bool:
    """Whether somebody attends to it: then it belongs to another launch of the same name, since ours has nobody left.
    Told by the lock of a run directory, which its supervisor holds open as long as it lives."""
    parent, seen = table.get(process.parent), set[int]()
    while parent is not None and parent.pid not in seen:
        seen.add(parent.pid)
        if parent.pid != os.getpid() and any(path.endswith(f"/{launch}/lock") for path in _open_files(parent.pid)):
            return True
        parent = table.get(parent.parent)
    return False


def _open_files(pid: int) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def _is_unclear(process: Process) -> bool:
    """Not those whose environment is never shown to us, nor those that have changed meanwhile."""
    if not process.changing:
        return False
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/environ", "rb"):
        now = look_up(process.pid)
        return now is not None and now.changing
    return False


def descendants(pid: int) -> list[Process]:
    """Children, grandchildren, …; for a subreaper that is everybody who ever was."""
    table = processes()
    return [each for each in _with_descendants([table[pid]], table) if each.pid != pid] if pid in table else []


def offspring(pid: int) -> list[int]:
    """Descendants, without a look at the whole table where the kernel lists children."""
    if not os.path.exists("/proc/thread-self/children"):
        return [each.pid for each in descendants(pid)]
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = [int(child) for child in file.read().split()]
            for child in children:
                found += [child, *offspring(child)]
    return found


def kill_all(targets: Iterable[Process]) -> bool:
    """Kill these, with their process groups: who forks and ends all the time would be gone when we come.

    Whether to look again: somebody who has ended by himself may have left a child behind. False when there was nobody,
    or nobody that we may kill.
    """
    again = False
    own = os.getsid(0)
    for each in targets:
        again = _kill_exactly(each) or again
        if each.group > 1 and each.session != own:
            with contextlib.suppress(OSError):
                os.killpg(each.group, signal.SIGKILL)
    return again


def _strike_group(leader: int, since: int) -> None:
    """Kill the process group that this process led: nobody in it can fork away from that."""
    now = look_up(leader)
    if leader > 1 and (now is None or now.start == since):
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def _kill_exactly(target: Process) -> bool:
    """By number and start time; False when we may not."""
    try:
        pidfd = os.pidfd_open(target.pid)
    except OSError:
        return True
    try:
        now = look_up(target.pid)
        if now is not None and now.start == target.start:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except PermissionError:
        return False
    except OSError:
        pass
    finally:
        os.close(pidfd)
    return True


def _with_descendants(found: list[Process], table: dict[int, Process]) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for each in table.values():
        children.setdefault(each.parent, []).append(each)
    seen = {each.pid: each for each in found}
    rest = list(found)
    while rest:
        for child in children.get(rest.pop().pid, ()):
            if child.pid not in seen:
                seen[child.pid] = child
                rest.append(child)
    return list(seen.values())


def _carries(pid: int, needle: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return needle in file.read().split(b"\0")
    except OSError:
        return False


def _strike_frozen(home: str) -> None:
    """Nobody can fork while all are frozen; the kill takes effect when they thaw."""
    state = os.path.join(home, "freezer.state")
    _write(state, "FROZEN")
    try:
        _wait_frozen(state)
        for folder in _and_below(home):
            with open(os.path.join(folder, "cgroup.procs")) as file:
                for line in file:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(int(line), signal.SIGKILL)
    finally:
        _write(state, "THAWED")


def _wait_frozen(state: str, most_s: float = 1.0) -> None:
    """Somebody deep in the kernel may hold it up: then some are killed running, and the next strike finds the rest."""
    deadline_s = time.monotonic() + most_s
    while time.monotonic() < deadline_s:
        with open(state) as file:
            if file.read().strip() == "FROZEN":
                return
        time.sleep(0.001)


def _best_unified(proc: str, name: str, allowed: set[str], why_not: dict[str, str]) -> tuple[str, set[str]]:
    """The parent of version 2 that offers most, and what: a process can only be in one group of version 2."""
    best, offers, problem = "", set[str](), "no control groups of version 2 are mounted"
    for base in _bases(proc, "cgroup2", ""):
        try:
            with _trial(base, name, ("cpu", "memory")) as files:
                found = {which for which, file in _FILES_2.items() if file in files} & allowed
            problem = f"{base} does not offer it"
        except OSError as error:
            problem = f"no group can be made in {base}: {error.strerror}"
            continue
        if len(found) > len(offers):
            best, offers = os.path.join(base, name), found
    for which in (_FILES_2.keys() & allowed) - offers:
        why_not.setdefault(which, problem)
    return best, offers


_FILES_2 = {"cgroup.kill": "cgroup.kill", "cpu": "cpu.max", "memory": "memory.max"}


def _find_version_1(proc: str, name: str, controller: str, file: str, why_not: dict[str, str]) -> str:
    for base in _bases(proc, "cgroup", controller):
        try:
            with _trial(base, name, ()) as files:
                if file in files:
                    return os.path.join(base, name)
                why_not[controller] = f"{base} has no {file}"
        except OSError as error:
            why_not[controller] = f"no group can be made in {base}: {error.strerror}"
    why_not.setdefault(controller, f"no control groups with {controller} are mounted")
    return ""


def _bases(proc: str, kind: str, controller: str) -> Iterator[str]:
    """Where groups might be made: in the group that we are in ourselves, else at the top of what is mounted."""
    own = _own_groups(proc)
    with contextlib.suppress(OSError), open(os.path.join(proc, "mountinfo")) as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            top, point = before.split()[3:5]
            found, _, options = after.split()[:3]
            if found != kind or (controller and controller not in options.split(",")):
                continue
            path = own.get(controller, "/")
            inner = os.path.normpath(os.path.join(point, os.path.relpath(path, top)))
            yield from dict.fromkeys(each for each in (inner, point) if each.startswith(point))


def _own_groups(proc: str) -> dict[str, str]:
    own = {}
    with contextlib.suppress(OSError), open(os.path.join(proc, "cgroup")) as lines:
        for line in lines:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            own.update(dict.fromkeys(controllers.split(","), path))
    return own


@contextlib.contextmanager
def _trial(base: str, name: str, controllers: tuple[str, ...]) -> Iterator[list[str]]:
    """The files of a group that a process of ours could really enter."""
    parent = os.path.join(base, name)
    trial = os.path.join(parent, f"trial-{os.getpid()}")
    for folder in (parent, trial):
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
    try:
        if not os.access(os.path.join(base, "cgroup.procs"), os.W_OK):
            raise PermissionError(errno.EACCES, "processes may not be moved there")
        _hand_down(parent, controllers)
        yield os.listdir(trial)
    finally:
        _remove_group(trial)
        with contextlib.suppress(OSError):
            os.rmdir(parent)


def _hand_down(parent: str, controllers: Iterable[str]) -> None:
    """Let the groups in `parent`, which is ours, have these controllers as far as it has them itself."""
    for controller in controllers:
        with contextlib.suppress(OSError):
            _write(os.path.join(parent, "cgroup.subtree_control"), f"+{controller}")


def _cpu_settings(means: Means, cpu_milli: int) -> dict[str, str]:
    quota_us = max(1000, cpu_milli * PERIOD_US // 1000)
    if "cpu" in means.controllers:
        return {"cpu.max": f"{quota_us} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}


def _memory_settings(means: Means, memory_mib: int) -> dict[str, str]:
    limit = str(memory_mib << 20)
    if "memory" in means.controllers:
        return {"memory.max": limit, "memory.swap.max": "0"}
    return {"memory.limit_in_bytes": limit, "memory.memsw.limit_in_bytes": limit}


_OPTIONAL = frozenset({"memory.swap.max", "memory.memsw.limit_in_bytes"})
"""Missing where the kernel does not count swap."""


def _and_below(folder: str) -> Iterator[str]:
    """A group and those in it, outermost first."""
    yield folder
    with contextlib.suppress(OSError):
        for name in _folders(folder):
            yield from _and_below(os.path.join(folder, name))


def _folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _remove_group(folder: str) -> None:
    """Somebody who has just been reaped may still be on the way out."""
    for _ in range(20):
        try:
            os.rmdir(folder)
        except OSError as error:
            if error.errno != errno.EBUSY:
                return
            time.sleep(0.001)
        else:
            return


def _write(path: str, value: str) -> None:
    """Without O_CREAT, which control groups refuse, and in one write."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
