"""A hostile job: one attack after the other on everything that it can reach, each in a process of its own.

What it reports are lines of JSON: the attacks, and whatever it found that looks like somebody's secret. It knows how
these begin, which nobody who wants to steal one would.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LOOK_FOR = re.compile(rb"canary-[A-Z]+-[0-9a-f]{32}")
ROUNDS, SEED = int(os.environ["ROUNDS"]), int(os.environ["SEED"])
HOST, PORT = "127.0.0.1", int(os.environ["PORT"])
TOKEN = os.environ["TOKEN"]
DATA = Path(os.environ["DATA"])
LONGEST_S = 8
HERE = Path(os.environ.get("STRETTO_FOLDER", "."))
READ_BYTES = 1 << 20


def say(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


# What is there.


def readable(top: Path, most: int, luck: random.Random) -> Iterator[Path]:
    """Files below, in an order of chance."""
    left = [top]
    while left and most:
        place = left.pop(luck.randrange(len(left)))
        try:
            entries = list(os.scandir(place))
        except OSError:
            continue
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    left.append(Path(entry.path))
                elif entry.is_file(follow_symlinks=False):
                    most -= 1
                    yield Path(entry.path)


def peek(path: Path) -> None:
    """Does it hold a secret? The attacker's own processes do not count: what they look for is in none of them."""
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        tell(str(path), file.read(READ_BYTES))


def tell(where: str, data: bytes) -> None:
    for secret in sorted(set(LOOK_FOR.findall(data))):
        say(found=where, text=secret.decode())


def others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def listening() -> list[int]:
    """Ports of this machine that somebody listens on."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A":
                    found.add(int(parts[1].rpartition(":")[2], 16))
    return sorted(found)


def unix_sockets() -> list[str]:
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return [parts[7] for parts in (line.split() for line in lines) if len(parts) > 7]


# Attacks.


def searches_files(luck: random.Random) -> None:
    for top, most in ((DATA, 1_000), (DATA.parents[1], 2_000), (Path("/dev/shm"), 200), (Path("/tmp"), 2_000)):
        for path in readable(top, most, luck):
            peek(path)
    for path in readable(luck.choice([Path("/home"), Path("/var"), Path("/run"), Path("/root")]), 2_000, luck):
        peek(path)


def searches_processes(luck: random.Random) -> None:
    for pid in others():
        for name in ("environ", "cmdline", "cwd", "maps"):
            peek(Path(f"/proc/{pid}/{name}"))
        with contextlib.suppress(OSError):
            for one in os.listdir(f"/proc/{pid}/fd"):
                peek(Path(f"/proc/{pid}/fd/{one}"))


def reads_memory(luck: random.Random) -> None:
    for pid in others():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                low, high = (int(part, 16) for part in line.split()[0].split("-"))
                if "rw" in line and high - low < 1 << 24:
                    memory.seek(low)
                    tell(f"/proc/{pid}/mem", memory.read(high - low))


def searches_the_api(luck: random.Random) -> None:
    tails = ["", "/logs", "/logs/pages", "/events", "/metrics", "/file", "/results", "/why", "/checkpoints", "/workers"]
    paths = [f"/v1/jobs/{number}{tail}" for number in range(1, 13) for tail in tails]
    for path in (*paths, "/v1/jobs", "/v1/events", "/metrics", "/v1/nodes", "/v1/tokens", "/v1/../../etc/passwd"):
        tell(f"GET {path}", ask("GET", path))


def meddles_through_the_api(luck: random.Random) -> None:
    number = luck.randrange(1, 30)
    for act in ("cancel", "suspend", "scale", "migrate", "resume"):
        ask("POST", f"/v1/jobs/{number}/{act}", b'{"min": 1, "max": 1, "to": "x"}')
    ask("POST", "/v1/policy", b'{"name": "fifo"}')
    ask("DELETE", "/v1/tokens/1")


def sends_nonsense_to_the_api(luck: random.Random) -> None:
    bodies = [
        b"{" * 100_000,
        b'{"run": "' + b"a" * 300_000 + b'"}',
        b'{"run": "true", "priority": ' + b"9" * 5_000 + b"}",
        b'{"run": "true", "labels": {' + b",".join(b'"l%d": "x"' % i for i in range(5_000)) + b"}}",
        b'{"run": "true", "name": "\\u001b[2J\\u001b]0;owned\\u0007"}',
        luck.randbytes(50_000),
        b"a: &a [x,x,x,x,x,x,x,x]\n" + b"".join(b"b%d: [*a,*a,*a]\n" % i for i in range(9)),
    ]
    for kind in ("application/json", "application/yaml", "text/plain"):
        ask("POST", "/v1/jobs", luck.choice(bodies), kind)


def half_open(luck: random.Random) -> None:
    held = []
    for _ in range(60):
        with contextlib.suppress(OSError):
            one = socket.create_connection((HOST, PORT), 1)
            one.sendall(
                luck.choice([b"GET /v1/jobs HTTP/1.1\r\nX: ", b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 9\r\n\r\n{"])
            )
            held.append(one)
    time.sleep(luck.uniform(0.5, 3.0))


def speaks_to_sockets(luck: random.Random) -> None:
    """Whatever listens here: huge, malformed and half messages."""
    messages = [
        b"\x00" * 65_536, luck.randbytes(4_096), b"{" * 65_536, b'{"role": "rendezvous"}\n', struct.pack(">Q", 1 << 60),
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000, b'{"kind": "hello", "worker": "w0", "token": ""}\n', b"\n",
    ]  # fmt: skip
    for port in luck.sample(ports := listening(), min(8, len(ports))):
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1) as one:
            one.settimeout(0.5)
            one.sendall(luck.choice(messages))
            one.recv(1_000)
    for name in luck.sample(names := unix_sockets(), min(8, len(names))):
        address = "\0" + name[1:] if name.startswith("@") else name
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as one:
                one.settimeout(0.5)
                one.connect(address)
                one.sendall(luck.choice(messages))
                one.recv(1_000)


def joins_others(luck: random.Random) -> None:
    """Opens a WebSocket where workers join, and says it is one."""
    number = luck.randrange(1, 30)
    head = (
        f"GET /v1/jobs/{number}/join HTTP/1.1\r\nHost: {HOST}:{PORT}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    with contextlib.suppress(OSError), socket.create_connection((HOST, PORT), 2) as one:
        one.settimeout(1)
        one.sendall(head.encode())
        one.recv(4_000)
        for _ in range(20):
            body = luck.randbytes(luck.choice([10, 125]))
            one.sendall(bytes([0x82, 0x80 | len(body)]) + b"\0\0\0\0" + body)
        one.recv(4_000)


def signals(luck: random.Random) -> None:
    """To everybody but those who are this job's own, which would only be the end of the attack."""
    own = {os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0)}
    for pid in others():
        with contextlib.suppress(OSError):
            if pid not in own and os.stat(f"/proc/{pid}").st_uid != os.getuid():
                os.kill(pid, luck.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGSEGV]))
                say(found=f"process {pid} of another account", text="took a signal")


def spoils_its_folder(luck: random.Random) -> None:
    for place in [HERE, *[path for path in HERE.rglob("*") if path.is_dir()]][:20]:
        name = place / luck.choice(["log", "w0.log", "notice.json", "checkpoint-1.pt", "ledger", "server.json", "x"])
        with contextlib.suppress(OSError):
            kind = luck.randrange(5)
            if kind == 0:
                os.mkfifo(name)
            elif kind == 1:
                name.symlink_to(
                    luck.choice(["/etc/shadow", str(DATA / "db.sqlite"), "/dev/zero", "/proc/kmsg", str(name)])
                )
            elif kind == 2:
                os.mknod(name, stat.S_IFCHR | 0o666, os.makedev(1, 5))
            elif kind == 3:
                with open(name, "wb") as file:
                    file.truncate(1 << 40)
            else:
                name.mkdir()


def spoils_the_servers_folder(luck: random.Random) -> None:
    for place in list(readable(DATA, 200, luck)):
        with contextlib.suppress(OSError), open(place, "ab") as file:
            file.write(b"\0")
            if HERE not in place.parents:
                say(found=f"{place} can be written", text="")
    for name in ("x", "server.json", "token"):
        with contextlib.suppress(OSError):
            (DATA / name).unlink()
            say(found=f"{DATA / name} can be removed", text="")


def forks(luck: random.Random) -> None:
    children = []
    with contextlib.suppress(OSError):
        for _ in range(400):
            pid = os.fork()
            if not pid:
                time.sleep(2)
                os._exit(0)
            children.append(pid)
    for pid in children:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def goes_into_hiding(luck: random.Random) -> None:
    """A grandchild in a session of its own, without the variables by which it might be known."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execve("/bin/sleep", ["sleep", "100000"], {})
        os._exit(0)


def takes_memory(luck: random.Random) -> None:
    hold = []
    with contextlib.suppress(MemoryError):
        hold.extend(b"x" * (8 << 20) for _ in range(40))


def takes_descriptors(luck: random.Random) -> None:
    held = []
    with contextlib.suppress(OSError):
        while len(held) < 4_000:
            held.append(os.open("/dev/null", os.O_RDONLY))


def takes_disk(luck: random.Random) -> None:
    name = HERE / f"big-{os.getpid()}"
    with contextlib.suppress(OSError):
        with open(name, "wb") as file:
            for _ in range(16):
                file.write(b"x" * (1 << 20))
        name.unlink()


def takes_files(luck: random.Random) -> None:
    folder = HERE / f"many-{os.getpid()}"
    with contextlib.suppress(OSError):
        folder.mkdir()
        for i in range(2_000):
            (folder / str(i)).touch()
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            one.unlink()
        folder.rmdir()


def writes_escapes(luck: random.Random) -> None:
    os.write(1, b"\x1b[2J\x1b]0;owned\x07\x9b31m\n" * 200)


def writes_much(luck: random.Random) -> None:
    for _ in range(64):
        os.write(1, b"x" * 65_535 + b"\n")


ATTACKS: tuple[Callable[[random.Random], None], ...] = (
    searches_files, searches_processes, reads_memory, searches_the_api, meddles_through_the_api,
    sends_nonsense_to_the_api, half_open, speaks_to_sockets, joins_others, signals, spoils_its_folder,
    spoils_the_servers_folder, forks, goes_into_hiding, takes_memory, takes_descriptors, takes_disk, takes_files,
    writes_escapes, writes_much,
)  # fmt: skip


def ask(method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> bytes:
    connection = http.client.HTTPConnection(HOST, PORT, timeout=5)
    try:
        connection.request(method, path, body, {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind})
        return connection.getresponse().read(READ_BYTES)
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def main() -> None:
    luck = random.Random(SEED)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in range(ROUNDS):
        attack = ATTACKS[number % len(ATTACKS)] if number < len(ATTACKS) else luck.choice(ATTACKS)
        seed = luck.random()
        child = os.fork()
        if not child:
            signal.alarm(LONGEST_S)
            with contextlib.suppress(Exception):
                attack(random.Random(seed))
            os._exit(0)
        os.waitpid(child, 0)
        say(round=number, attack=attack.__name__)
    say(over=ROUNDS)


if __name__ == "__main__":
    sys.exit(main())
