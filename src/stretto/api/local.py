"""Local users, whom a Unix socket knows: the kernel says which account is at its other end.

The account that the server runs as is the local admin, as with the token in the data directory, which it can read
anyway. Nobody else's account stands for a user yet.
"""

from __future__ import annotations

import errno
import getpass
import os
import pwd
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto import jobfiles
from stretto.api.problems import Unauthenticated
from stretto.errors import Occupied, UsageError
from stretto.store import Role

PEER = "stretto.uid"
"""In a connection's state: whose process is at its other end. Only Unix sockets have it."""
_LONGEST_PATH = 107
_CREDENTIALS = struct.Struct("3i")
_UNKNOWN_UID = 65534
_TRIAL_S = 1.0


def user_of_uid(uid: int) -> tuple[str, Role]:
    """Who that account is. Raises `Unauthenticated`."""
    if uid == os.geteuid() and uid != _unknown_uid():
        return own_name(), "admin"
    raise Unauthenticated(
        f"the account {_name(uid)} is nobody here",
        hint="whoever runs the server makes a token with `stretto token create NAME`; put it into STRETTO_TOKEN",
    )


def own_name() -> str:
    """Of the account that the server runs as."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def peer_of(transport: Any) -> int | None:
    """The account at the other end of a Unix socket; None if it is another kind."""
    plain = transport.get_extra_info("socket")
    if plain is None or plain.family != socket.AF_UNIX:
        return None
    _, uid, _ = _CREDENTIALS.unpack(plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def peer_in(state: Mapping[str, Any]) -> int | None:
    """What `peer_of` said when the connection was made."""
    found: int | None = state.get(PEER)
    return found


def fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= _LONGEST_PATH


def bind(path: Path) -> socket.socket:
    """Listen there; anybody may connect, as it is known who does. What a server left that was killed is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            _make_room(path)
            listening.bind(os.fspath(path))
            os.chmod(path, 0o666)
            listening.listen(1024)
        except OSError as error:
            raise UsageError(
                f"the socket {path} cannot be made: {error.strerror or error}", hint="give another path with --socket"
            ) from None
        listening.setblocking(False)
        return socket.socket(fileno=listening.detach())


def _make_room(path: Path) -> None:
    """Raises `Occupied` if somebody listens there, `OSError` if there is something else than a socket."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(errno.EEXIST, "there is something else in its place")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(_TRIAL_S)
        try:
            trial.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except TimeoutError:
            pass
    raise Occupied(f"another server listens at {path}", hint="stop it, or give another path with --socket")


def _unknown_uid() -> int:
    """What accounts look like that this user namespace does not know: it is all of them."""
    try:
        return int(jobfiles.read(Path("/proc/sys/kernel/overflowuid"), 64))
    except (OSError, ValueError):
        return _UNKNOWN_UID


def _name(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"with the uid {uid}"
