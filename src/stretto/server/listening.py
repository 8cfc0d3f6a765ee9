"""A listening socket that outlives its server's replicas, where there is no proxy.

`hold` is a process beside the replicas: it listens on the service's port, accepts nothing, and hands the socket to
whoever asks at a Unix socket in its folder. `take` is how a replica begins: it gets the socket, puts it where programs
look for one that they inherit (descriptor 3, LISTEN_FDS and LISTEN_PID, as systemd does it), and becomes the command.
All replicas accept from one queue: what one does not take another does, so that none is lost when replicas come and go.

Run by path, in any interpreter: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time

NAME = "listen.sock"
INHERITED = 3
_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.05


def hold(folder: str, host: str, port: int) -> int:
    """Listen, and hand the socket out until asked to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        print(f"cannot listen on {host}:{port}: {error.strerror}", flush=True)
        return 1
    listener.listen(1024)
    os.chdir(folder)  # The name of a Unix socket is short; a folder's need not be.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME)
    os.umask(0o077)
    counter = socket.socket(socket.AF_UNIX)
    counter.bind(NAME)
    counter.listen()
    while True:
        customer, _ = counter.accept()
        with customer, contextlib.suppress(OSError):
            socket.send_fds(customer, [b"1"], [listener.fileno()])


def take(folder: str, command: list[str]) -> int:
    """Get the socket and become the command; only an error comes back."""
    here = os.getcwd()
    os.chdir(folder)
    listener = _ask()
    os.chdir(here)
    if listener != INHERITED:
        os.dup2(listener, INHERITED)
        os.close(listener)
    os.set_inheritable(INHERITED, True)
    os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
    if command[0] in ("python", "python3") and shutil.which(command[0]) is None:
        command = [sys.executable, *command[1:]]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127


def _ask() -> int:
    """The socket, once its holder is there."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.connect(NAME)
            _, found, _, _ = socket.recv_fds(asking, 1, 1)
            if found:
                return found[0]
        if time.monotonic() > deadline_s:
            sys.exit(f"nobody handed out the listening socket for {_PATIENCE_S:g} s")
        time.sleep(_LOOK_AGAIN_S)


def main(words: list[str]) -> int:
    match words:
        case ["hold", folder, host, port]:
            return hold(folder, host, int(port))
        case ["take", folder, *command] if command:
            return take(folder, command)
    sys.exit("hold FOLDER HOST PORT, or take FOLDER COMMAND...")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
