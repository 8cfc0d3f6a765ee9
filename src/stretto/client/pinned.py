"""The keys of servers that this user has pinned (`stretto login`), and the errors of those that show another one.

They are kept in `~/.config/stretto/servers.json` (or below XDG_CONFIG_HOME): address → {"key": "sha256:…"}. Whoever
pinned the key of a server is not talked into another one by anybody's signature.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stretto import jobfiles, pins
from stretto.errors import StrettoError, Unavailable, UsageError, WrongKey

_LARGEST = 1 << 20
_PLAIN = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})
"""What TLS says of an answer that is none of its own."""


def file(environment: Mapping[str, str] = os.environ) -> Path:
    given = environment.get("XDG_CONFIG_HOME", "")
    return (Path(given) if given.startswith("/") else Path.home() / ".config") / "stretto" / "servers.json"


def key_of(url: str, environment: Mapping[str, str] = os.environ) -> str:
    """The pin of that server; empty if there is none. A file that cannot be read is an error: to go on without it would
    be to believe anybody."""
    return _keys(file(environment)).get(address(url), "")


def keep(url: str, pin: str, environment: Mapping[str, str] = os.environ) -> Path:
    """From now on the server at that address has this key."""
    path = file(environment)
    known: dict[str, Any] = {at: {"key": key} for at, key in _keys(path).items()}
    known[address(url)] = {"key": pins.checked(pin)}
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        jobfiles.write(path, json.dumps(known, indent=2, sort_keys=True).encode() + b"\n", durable=True)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", hint="XDG_CONFIG_HOME names another folder"
        ) from None
    return path


def address(url: str) -> str:
    """An address as it is kept: with its port, however it was written."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def trouble(url: str, error: BaseException) -> StrettoError | None:
    """What to say of a connection on which TLS failed; None if it failed in another way."""
    wrong = pins.other_key(error)
    if wrong is not None:
        return WrongKey(
            f"the server at {url} has another key than the one that is pinned: {wrong.found}, not {wrong.pinned}",
            hint="somebody may be in between: nothing was sent. If its admin says that it has a new key, "
            f"and names this one: stretto login {url}",
        )
    failed: BaseException | None = error
    while failed is not None and not isinstance(failed, ssl.SSLError):
        failed = failed.__cause__ or failed.__context__
    if isinstance(failed, ssl.SSLCertVerificationError):
        return WrongKey(
            f"nobody whom this machine trusts vouches for the server at {url}: {failed.verify_message}",
            hint=f"stretto login {url} shows its key, and pins it",
        )
    if failed is not None and failed.reason in _PLAIN:
        return Unavailable(
            f"the server at {url} does not speak TLS", hint="write http:// in the address, if it is meant"
        )
    return None


def _keys(path: Path) -> dict[str, str]:
    try:
        told = json.loads(jobfiles.read(path.resolve(), _LARGEST))
        return {str(at): pins.checked(about["key"]) for at, about in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{path}, which has the keys of servers, cannot be read: {error}",
            hint="mend it, or remove it and log in again",
        ) from None
