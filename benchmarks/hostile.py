"""Does a hostile job of one account, or a failing machine, reach ten innocent jobs of another?

    python benchmarks/hostile.py [--rounds 300] [--innocents 10] [--seed 1] [--keep FOLDER] [--same-account]

As root: two accounts are made for it, and go at the end. A server that separates accounts runs ten training jobs of the
one, which have canaries in their environment, logs, checkpoints and results; and a job of the other that attacks, round
by round, what it can reach (`scripts/attacker.py`), beside short jobs of its own that end badly. Meanwhile the machine
fails: the disk of the data directory is full for a while, or has no inodes, writes end with EIO (a library that is
loaded before the C library), the server may open no more files, the clock is set.

At the end every innocent job has ended once, with the same weights as by hand; the attacker has found no canary and has
written to, removed or signalled nothing of others; no process of either account is left. All the while requests come at
fixed times, whether the last one was answered or not (late ones count from when they were due), and `/readyz` is asked
at the same moment as a job is submitted. With `--same-account` the attacker is of the innocent jobs' account, and must
find their canaries: so it would elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pwd
import random
import resource
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _measure import machine
from _verdict import report
from stretto.client import Client

SCRIPTS = Path(__file__).parent / "scripts"
GOOD, BAD = "stretto-good", "stretto-bad"
KINDS = ("ENV", "LOG", "CHECKPOINT", "RESULT")
EVERY_S = 0.02
PERCENTILE = 0.99
LIMITS = {"healthz": 0.1, "list": 0.25, "submit": 0.5}
"""Seconds, of 99 % of the requests."""
LONGEST_BLOCK_S = 0.5
TROUBLES = struct.Struct("<qd")
FAULTS = ("full", "no inodes", "EIO", "no descriptors", "clock back", "clock ahead")
STEP_S = 0.25
STEPS_A_ROUND = 6
"""Of the innocent jobs: they are to outlast the attacks."""
STEPS_BEFORE = 60
"""Of every innocent job before the attack: it has a log and a checkpoint by then."""
DEADLINE_S = 1800.0


# The machine.


@contextlib.contextmanager
def account(name: str, home: Path) -> Iterator[pwd.struct_passwd]:
    subprocess.run(["useradd", "--no-user-group", "-d", str(home), "-m", "-s", "/bin/sh", name], check=True)
    home.chmod(0o700)
    try:
        yield pwd.getpwnam(name)
    finally:
        end_processes_of(name)
        subprocess.run(["userdel", name], check=True)


def processes_of(name: str) -> list[int]:
    uid = pwd.getpwnam(name).pw_uid
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdecimal() and os.stat(f"/proc/{entry}").st_uid == uid:
                found.append(int(entry))
    return found


def end_processes_of(name: str) -> None:
    for pid in processes_of(name):
        with contextlib.suppress(OSError):
            os.kill(pid, 9)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512m,nr_inodes=60000,mode=0755", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def interpreter() -> tuple[str, dict[str, str]]:
    """A Python that every account may run, and what it must be told: the packages of this one."""
    here = Path(sys.executable).resolve()
    if all(place.stat().st_mode & 0o005 == 0o005 for place in here.parents):
        return sys.executable, {}
    found = shutil.which(f"python3.{sys.version_info.minor}", path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        sys.exit(f"other accounts cannot run {here}, and there is no other Python of this version")
    packages = [place for place in sys.path if place.endswith(("site-packages", "/src"))]
    return found, {"PYTHONPATH": ":".join(packages)}


class Troubles:
    """What goes wrong with the machine, and for how long."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.file, self._disk = folder / "troubles", disk
        self.library = folder / "failing.so"
        self.file.write_bytes(TROUBLES.pack(0, 0.0))
        command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(self.library), str(SCRIPTS / "failing.c"), "-ldl"]
        subprocess.run(command, check=True)
        self.met: Counter[str] = Counter()

    @contextlib.contextmanager
    def having(self, kind: str, server: subprocess.Popen[str]) -> Iterator[None]:
        self.met[kind] += 1
        if kind == "EIO":
            self._tell(50, 0.0)
        elif kind.startswith("clock"):
            self._tell(0, -600.0 if kind == "clock back" else 3_600.0)
        elif kind == "no descriptors":
            before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
            held = len(os.listdir(f"/proc/{server.pid}/fd"))
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (held, before[1]))
        elif kind == "full":
            with open(self._disk / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(b"x" * 65_536):
                    pass
        else:
            (self._disk / "inodes").mkdir()
            with contextlib.suppress(OSError):
                for i in range(100_000):
                    (self._disk / "inodes" / str(i)).touch()
        try:
            yield
        finally:
            self._tell(0, 0.0)
            if kind == "no descriptors":
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
            (self._disk / "filler").unlink(missing_ok=True)
            shutil.rmtree(self._disk / "inodes", ignore_errors=True)

    def _tell(self, percent: int, seconds: float) -> None:
        with open(self.file, "r+b") as file:
            file.write(TROUBLES.pack(percent, seconds))


# Who asks.


class Asking:
    """Requests at fixed times, whatever becomes of the last one; in a thread of its own."""

    def __init__(self, port: int, token: str, innocents: int) -> None:
        self._port, self._token, self._innocents = port, token, innocents
        self.took_s: defaultdict[str, list[float]] = defaultdict(list)
        self.refused: Counter[str] = Counter()
        self.pairs: Counter[bool] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), name="asking")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    async def _ask(self) -> None:
        began_s, number = time.monotonic(), 0
        running: set[asyncio.Task[None]] = set()
        while not self._over.is_set():
            number += 1
            due_s = began_s + number * EVERY_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if number % 25 == 0:
                act = self._pair(due_s, number)
            elif number % 5 == 0:
                act = self._timed("list", due_s, "GET", f"/v1/jobs?limit={self._innocents}")
            else:
                act = self._timed("healthz", due_s, "GET", "/healthz")
            task = asyncio.create_task(act)
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.gather(*running)

    async def _timed(self, kind: str, due_s: float, *request: Any) -> None:
        status, _ = await self._request(*request)
        self.took_s[kind].append(time.monotonic() - due_s)
        if status >= 300 or not status:
            self.refused[f"{kind} {status}"] += 1

    async def _pair(self, due_s: float, number: int) -> None:
        """Is what `/readyz` says what a submission gets?"""
        file = json.dumps({"run": "true", "name": f"asked-{number}", "after": ["innocent-0"]})
        ready, submitted = await asyncio.gather(
            self._request("GET", "/readyz"), self._timed_submission(due_s, file.encode())
        )
        self.pairs[(ready[0] == 200) == (submitted[0] == 201)] += 1
        if submitted[0] == 201:
            await self._request("POST", f"/v1/jobs/{json.loads(submitted[1])['number']}/cancel")

    async def _timed_submission(self, due_s: float, file: bytes) -> tuple[int, bytes]:
        answer = await self._request("POST", "/v1/jobs", file)
        if answer[0] == 201:
            self.took_s["submit"].append(time.monotonic() - due_s)
        else:
            self.refused[f"submit {answer[0]}"] += 1
        return answer

    async def _request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Its status, and 0 if nothing came back."""
        writer = None
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                head = (
                    f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nConnection: close\r\n"
                    f"Authorization: Bearer {self._token}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                writer.write(head.encode() + body)
                answer = await reader.read()
            first, _, rest = answer.partition(b"\r\n\r\n")
            return int(first.split()[1]), rest
        except (OSError, ValueError, IndexError, TimeoutError):
            return 0, b""
        finally:
            if writer is not None:
                writer.close()


# The jobs.


def innocent(
    number: int, steps: int, python: str, more: dict[str, str], results: Path, canaries: dict[str, str]
) -> dict[str, Any]:
    return {
        "name": f"innocent-{number}",
        "run": [python, str(SCRIPTS / "innocent.py")],
        "env": {
            **more, **canaries, "STEPS": str(steps), "STEP_S": str(STEP_S), "SEED": str(number),
            "RESULTS": str(results), "OMP_NUM_THREADS": "1",
        },
        "elastic": {"min": 1, "max": 2, "explore": False},
        "checkpoint": {"every": "10s"},
    }  # fmt: skip


def by_hand(steps: int, python: str, more: dict[str, str], folder: Path, number: int) -> dict[str, Any]:
    """What it comes to where nobody disturbs it."""
    environment = {
        **os.environ, **more, "STEPS": str(steps), "STEP_S": "0", "SEED": str(number), "RESULTS": str(folder),
        "OMP_NUM_THREADS": "1", **{f"CANARY_{kind}": "none" for kind in KINDS},
    }  # fmt: skip
    subprocess.run([python, str(SCRIPTS / "innocent.py")], env=environment, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / f"{number}.json").read_text())
    return found


ENDINGS = (
    # Everything of its own becomes something that nobody should open.
    'cd "$STRETTO_FOLDER" 2>/dev/null; rm -rf ./* 2>/dev/null; mkfifo log w0.log notice.json; exit 3',
    'head -c 50000000 /dev/zero | tr "\\0" x; exit 1',
    'printf "\\033[2J\\033]0;owned\\007Traceback (most recent call last):\\n  x\\nError: \\033[31m\\n"; exit 1',
    "kill -9 $$",
    "exec python3 -c 'x = bytearray(1 << 33)'",
    "(setsid sleep 100000 &) ; (sh -c \"trap '' TERM; sleep 100000\" &) ; exit 0",
    "exec 2>&1; exec 1>&-; exit 4",
    'mv "$STRETTO_FOLDER" "$STRETTO_FOLDER.gone" 2>/dev/null; ln -s /etc "$STRETTO_FOLDER" 2>/dev/null; exit 5',
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--innocents", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of the attacker and the server")
    parser.add_argument("--same-account", action="store_true", help="see that the attacker finds what it can reach")
    given = parser.parse_args()
    if os.geteuid():
        sys.exit("this must be run by root: it makes accounts, and a server that separates them")
    # What was made is taken away, too, if somebody ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it was ended"))
    met = run(given.rounds, given.innocents, given.seed, given.keep, same_account=given.same_account)
    sys.exit(0 if met else 1)


def run(rounds: int, innocents: int, seed: int, keep: Path | None, *, same_account: bool = False) -> bool:
    luck = random.Random(seed)
    steps = STEPS_BEFORE + 40 + 10 * (rounds * STEPS_A_ROUND // 10)
    python, more = interpreter()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hostile-")))
        folder.chmod(0o755)
        disk = stack.enter_context(small_disk(folder / "disk"))
        good = stack.enter_context(account(GOOD, folder / "good"))
        stack.enter_context(account(BAD, folder / "bad"))
        troubles = Troubles(folder, disk)
        data = disk / "data"
        server = stack.enter_context(serving(folder, data, troubles, innocents + 2))
        admin = stack.enter_context(Client(data=data))
        tokens = {name: admin.create_token(name).secret for name in (GOOD, BAD)}
        url = json.loads((data / "server.json").read_text())["url"]
        port = int(url.rpartition(":")[2])
        ours = stack.enter_context(Client(url, tokens[GOOD]))
        hostile = tokens[GOOD if same_account else BAD]
        theirs = stack.enter_context(Client(url, hostile))
        results = Path(good.pw_dir)
        canaries = {
            n: {f"CANARY_{kind}": f"canary-{kind}-{secrets.token_hex(16)}" for kind in KINDS} for n in range(innocents)
        }
        jobs = [
            ours.submit(innocent(n, steps, python, more, results, canaries[n]), cwd=str(results)).number
            for n in range(innocents)
        ]
        attack = {
            "name": "attacker", "run": [python, str(SCRIPTS / "attacker.py")], "workers": 1,
            "resources": {"gpu": 1, "memory": "1Gi"},
            "env": {
                "ROUNDS": str(rounds), "SEED": str(seed), "PORT": str(port), "TOKEN": hostile, "DATA": str(data),
            },
        }  # fmt: skip
        _wait_for_steps(ours, jobs)
        attacker = theirs.submit(attack, cwd="/tmp").number
        asking = Asking(port, tokens[GOOD], innocents)
        try:
            _disturb(theirs, server, troubles, attacker, luck)
            ended = [ours.wait(number, timeout_s=DEADLINE_S) for number in jobs]
        finally:
            asking.stop()
        found = _found(admin, attacker, canaries, keep)
        if same_account:
            seen = {kind for kind in ("ENV", "LOG", "CHECKPOINT", "RESULT") if any(kind in one for one in found)}
            report(
                "hostile: the same account", ours=len(seen), peer=None, ratio=None, unit="kinds of canaries found",
                goal="all 4", ok=len(seen) == len(KINDS), found=found[:20],
            )  # fmt: skip
            return len(seen) == len(KINDS)
        wrong = _wrong(ended, results, [by_hand(steps, python, more, folder, n) for n in range(innocents)], canaries)
        left = _left_over(admin)
        if keep is not None:
            shutil.copy(folder / "server.log", keep / "server.log")
        traceback = "Traceback" in (folder / "server.log").read_text()
    return _judge(rounds, innocents, asking, troubles, found, wrong, left, traceback)


@contextlib.contextmanager
def serving(folder: Path, data: Path, troubles: Troubles, slots: int) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable, str(SCRIPTS / "troubled_server.py"), "--json", "--port", "0", "--data", str(data), "--cpu",
        "--slots", str(slots),
    ]  # fmt: skip
    environment = {**os.environ, "LD_PRELOAD": str(troubles.library), "TROUBLES": str(troubles.file)}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        if not server.stdout.readline():
            sys.exit(f"the server did not start:\n{(folder / 'server.log').read_text()}")
        yield server
    finally:
        server.terminate()
        try:
            server.wait(60)
        finally:
            server.kill()
            server.wait()


def _wait_for_steps(ours: Client, jobs: list[int]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while any((ours.job(number).steps or 0) < STEPS_BEFORE for number in jobs):
        if time.monotonic() > end_s:
            sys.exit("the innocent jobs do not train")
        time.sleep(0.5)


def _disturb(
    theirs: Client, server: subprocess.Popen[str], troubles: Troubles, attacker: int, luck: random.Random
) -> None:
    """While the attacker is at work: jobs that end badly, and a machine that fails, one thing after the other."""
    number = 0
    while not _try(lambda: theirs.job(attacker).ended):
        number += 1
        ending = ENDINGS[number % len(ENDINGS)]
        _try(
            lambda ending=ending, number=number: theirs.submit(
                {"run": ["sh", "-c", ending], "name": f"bad-{number}", "resources": {"memory": "512Mi"}, "retries": 0},
                cwd="/tmp",
            )
        )
        with troubles.having(FAULTS[number % len(FAULTS)], server):
            time.sleep(luck.uniform(0.5, 2.0))
        time.sleep(luck.uniform(2.0, 6.0))


def _try(act: Callable[[], Any]) -> Any:
    """A server in trouble may refuse."""
    with contextlib.suppress(Exception):
        return act()
    return None


def _found(admin: Client, attacker: int, canaries: dict[int, dict[str, str]], keep: Path | None) -> list[str]:
    """What the attacker got hold of, or could do."""
    text = "".join(admin.log_pages(attacker))
    if keep is not None:
        (keep / "attacker.log").write_text(text)
    secret = {value: f"{kind} of innocent-{n}" for n, values in canaries.items() for kind, value in values.items()}
    found = []
    over = False
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            over |= "over" in told
            if "found" in told and not told["text"]:
                found.append(told["found"])
            elif "found" in told:
                found += [f"{whose} in {told['found']}" for value, whose in secret.items() if value in told["text"]]
                if "signal" in told["text"]:
                    found.append(f"{told['found']} {told['text']}")
    return sorted(set(found)) + ([] if over else ["the attacker did not come to its end"])


def _wrong(
    ended: list[Any], results: Path, right: list[dict[str, Any]], canaries: dict[int, dict[str, str]]
) -> list[str]:
    wrong = []
    for n, job in enumerate(ended):
        place = results / f"{n}.json"
        found = json.loads(place.read_text()) if place.exists() else {}
        if job.phase != "succeeded":
            wrong.append(f"innocent-{n} has {job.phase}: {job.message}")
        elif (found.get("steps"), found.get("weights")) != (right[n]["steps"], right[n]["weights"]):
            wrong.append(f"innocent-{n} came to another result")
        elif found["canary"] != canaries[n]["CANARY_RESULT"]:
            wrong.append(f"innocent-{n} has lost its canary")
    return wrong


def _left_over(admin: Client) -> list[str]:
    """Processes of the accounts, once all their jobs have ended."""
    end_s = time.monotonic() + 60
    for job in admin.jobs(phase="active"):
        _try(lambda job=job: admin.cancel(job))
    left: list[str] = []
    while time.monotonic() < end_s:
        left = [_named(pid) for name in (GOOD, BAD) for pid in processes_of(name)]
        # Fork servers stay for the next job of their account.
        left = [name for name in left if "forkhost" not in name and "forkserver" not in name]
        if not left:
            return []
        time.sleep(0.5)
    return left


def _named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100]
    except OSError:
        return ""


def _judge(
    rounds: int, innocents: int, asking: Asking, troubles: Troubles, found: list[str], wrong: list[str],
    left: list[str], traceback: bool,
) -> bool:  # fmt: skip
    quantiles = {}
    for kind, limit_s in LIMITS.items():
        some = sorted(asking.took_s[kind])
        quantiles[kind] = {
            "count": len(some), "p50_ms": round(1e3 * some[len(some) // 2], 1),
            "p99_ms": round(1e3 * some[int(PERCENTILE * (len(some) - 1))], 1), "limit_ms": round(1e3 * limit_s),
        }  # fmt: skip
    longest_s = max(asking.took_s["healthz"])
    pairs = sum(asking.pairs.values())
    alike = asking.pairs[True] / max(1, pairs)
    in_time = all(one["p99_ms"] <= one["limit_ms"] for one in quantiles.values()) and longest_s <= LONGEST_BLOCK_S
    enough = rounds < 300 or pairs >= 1_000
    ok = not (found or wrong or left or traceback) and in_time and alike >= 0.99 and enough
    report(
        "hostile", ours=quantiles["healthz"]["p99_ms"], peer=None, ratio=None, unit="ms, p99 of /healthz",
        goal="nothing reached, all results right, nothing left over, requests in time, /readyz right in 99 %", ok=ok,
        rounds=rounds, innocents=innocents, found=found, wrong=wrong, left_over=left, traceback=traceback,
        requests=quantiles, longest_healthz_ms=round(1e3 * longest_s, 1), refused=dict(asking.refused),
        readyz_alike=round(alike, 4), pairs=pairs, faults=dict(troubles.met), machine=machine(),
    )  # fmt: skip
    return ok


if __name__ == "__main__":
    main()
