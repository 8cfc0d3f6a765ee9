"""`stretto login`: see the key of a server, and pin it."""

from __future__ import annotations

import sys
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from stretto import pins
from stretto.cli import show
from stretto.cli.options import Json
from stretto.client import finding, pinned
from stretto.client.problems import lost
from stretto.errors import UsageError, WrongKey

_TIMEOUT_S = 30.0


def login(
    url: Annotated[str, Parameter(help="https://HOST:PORT")],
    /,
    *,
    fingerprint: Annotated[
        str, Parameter(help="Do not ask: pin this key (sha256:…, as `stretto up` prints it), if the server has it.")
    ] = "",
    json: Json = False,
) -> None:
    """Pin the key of a server, so that no other one is talked to from now on.

    A server whose certificate an authority has signed that this machine trusts needs no pin; --fingerprint pins its key
    all the same.
    """
    server, given = pins.parted(url.strip())
    if not server.startswith("https:"):
        raise UsageError(f"{url!r} has no key: only addresses with https:// do", hint="write https://HOST:PORT")
    server = finding.find(server, "-").url
    wanted = finding.pin(pins.joined(server, fingerprint or given)) if fingerprint or given else ""
    found = _shown_by(server)
    known = pinned.key_of(server)
    if wanted and found != wanted:
        raise WrongKey(
            f"the server at {server} has another key: {found}, not {wanted}",
            hint="nothing is pinned. Compare with what `stretto up` prints on the server: somebody may be in between",
        )
    if not wanted and known != found:
        if not known and _is_vouched_for(server):
            _tell(server, found, "an authority that this machine trusts vouches for it: nothing is pinned", False, json)
            return
        _ask(server, found, known)
    where = pinned.keep(server, found)
    _tell(server, found, f"its key is pinned, in {where}", True, json)


def _shown_by(server: str) -> str:
    parts = urlsplit(server)
    try:
        return pins.shown_by(parts.hostname or "", parts.port or 443, _TIMEOUT_S)
    except OSError as error:
        raise lost(server, error) from None


def _is_vouched_for(server: str) -> bool:
    parts = urlsplit(server)
    try:
        return pins.is_vouched_for(parts.hostname or "", parts.port or 443, _TIMEOUT_S)
    except OSError as error:
        raise lost(server, error) from None


def _ask(server: str, found: str, known: str) -> None:
    if not sys.stdin.isatty():
        raise UsageError(
            f"the server at {server} has the key {found}, and there is nobody to ask whether that is right",
            hint=f"compare, and say so: --fingerprint {found}",
        )
    print(f"the server at {server} has the key\n  {found}")
    if known:
        print(f"until now it had\n  {known}")
    print("`stretto up` printed it on the server, and `server.json` in its data directory has it.")
    print("Is it the right one? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise WrongKey("nothing is pinned", hint="ask the server's admin for its key")


def _tell(server: str, key: str, text: str, is_pinned: bool, json: bool) -> None:
    if json:
        show.as_json({"url": server, "key": key, "pinned": is_pinned})
    else:
        print(f"{server}: {text}")
