"""Where the server is, and with which token: arguments, then the environment, then what `stretto up` left here.

The token in the data directory is for the server whose address stands beside it: it is never sent elsewhere. Its key
stands there as well; those of other servers are pinned by `stretto login`, or stand behind a # of the address.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from stretto import jobfiles, pins
from stretto.client import near
from stretto.errors import Unavailable, UsageError


class Where(NamedTuple):
    url: str
    """Without a slash at its end."""
    token: str


def data_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where the server of this user keeps everything."""
    home = environment.get("STRETTO_HOME")
    return Path(home) if home else Path.home() / ".local" / "share" / "stretto"


def find(
    server: str | None = None,
    token: str | None = None,
    *,
    data: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Where:
    folder = Path(data) if data is not None else data_folder(environment)
    here, _ = _left_here(folder)
    url, _ = _asked(server, data, environment, here)
    if not url:
        raise Unavailable(
            f"no server is known here: {folder} has no server.json",
            hint="`stretto up -d` starts one; STRETTO_SERVER says where another is",
        )
    secret = token or environment.get("STRETTO_TOKEN") or ""
    return Where(url, _secret(secret or (_read(folder / "token") if url == here else "")))


def pin(
    server: str | None = None,
    *,
    data: str | Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """By which key that server is known; empty if by the authorities that vouch for it."""
    here, key = _left_here(Path(data) if data is not None else data_folder(environment))
    url, given = _asked(server, data, environment, here)
    if not url.startswith("https:"):
        return ""
    if given:
        return _pin(given)
    if url == here and key:
        return _pin(key)
    from stretto.client import pinned

    return pinned.key_of(url, environment)


def _asked(server: str | None, data: str | Path | None, environment: Mapping[str, str], here: str) -> tuple[str, str]:
    """The address, and the pin that it carries."""
    # A data directory that was named is more than what the environment says in general.
    url = server or (None if data is not None else environment.get("STRETTO_SERVER")) or here
    address, pin = pins.parted(url.strip())
    return _address(address), pin


def _pin(text: str) -> str:
    try:
        return pins.checked(text)
    except ValueError as error:
        raise UsageError(str(error), hint="`stretto up` prints it, and `stretto login` shows it") from None


def _address(url: str) -> str:
    if socket := near.address(url):
        return socket
    if url and not _is_address(url):
        raise UsageError(
            f"{url!r} is not the address of a server", hint="write it as http://HOST:PORT, https:// or unix:/PATH"
        )
    return url.rstrip("/")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").encode("idna"), parts.port
    except ValueError:
        return False
    plain = url.isprintable() and " " not in url and parts.path.isascii()
    return plain and bool(host) and parts.scheme in ("http", "https")


def _secret(token: str) -> str:
    """As it is sent in a header; without the end of the line that came with it out of some file."""
    token = token.strip()
    if not (token.isascii() and token.isprintable()):
        raise UsageError(
            "the token has characters in it that no token has", hint="see what STRETTO_TOKEN or the token file holds"
        )
    return token


def _left_here(folder: Path) -> tuple[str, str]:
    """The address of the server, and its key if it speaks TLS."""
    try:
        told: Any = json.loads(_read(folder / "server.json") or "{}")
    except ValueError:
        told = None
    if not isinstance(told, dict):
        return "", ""
    return str(told.get("url", "")).rstrip("/"), str(told.get("pin", ""))


def _read(path: Path) -> str:
    try:
        return jobfiles.read(path, 1 << 16).decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
