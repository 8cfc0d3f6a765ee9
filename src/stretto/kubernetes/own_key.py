"""The key that the controllers of a cluster show: all of them the same, kept in one secret.

Workers know the controllers by it, whichever leads, and they have it from their pods' environment for as long as they
live. So it is made once, by whoever comes first, and nobody changes it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stretto import jobfiles
from stretto.api import tls
from stretto.api.tls import Tls
from stretto.errors import Conflict
from stretto.kubernetes.client import Api
from stretto.kubernetes.kinds import SECRETS
from stretto.kubernetes.problems import AlreadyExists, ObjectNotFound

NAME = "stretto-controller-tls"
_CERTIFICATE, _KEY = "tls.crt", "tls.key"


async def found_or_made(api: Api, namespace: str, names: Iterable[str], folder: Path) -> Tls:
    """Its files, in that folder, which must be nobody else's. Raises `Conflict` where the secret is spoilt."""
    try:
        secret = await api.get(SECRETS, NAME, namespace)
    except ObjectNotFound:
        made = tls.made(folder, names)
        try:
            secret = await api.create(SECRETS, _body(namespace, made), namespace)
        except AlreadyExists:
            # Another controller was faster.
            secret = await api.get(SECRETS, NAME, namespace)
    certificate, key = folder / _CERTIFICATE, folder / _KEY
    for path in (certificate, key):
        jobfiles.write(path, _content(secret, path.name))
    try:
        return tls.checked(certificate, key)
    except tls.Unfit as error:
        raise _spoilt(str(error)) from None


def _body(namespace: str, made: Tls) -> dict[str, Any]:
    files = {_CERTIFICATE: Path(made.certificate), _KEY: Path(made.key)}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": {"name": NAME, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "stretto"}},
        "data": {name: base64.b64encode(path.read_bytes()).decode() for name, path in files.items()},
    }


def _content(secret: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode((secret.get("data") or {})[name], validate=True)
    except (KeyError, ValueError):
        raise _spoilt(f"it has no {name} that can be read") from None


def _spoilt(why: str) -> Conflict:
    return Conflict(f"the secret {NAME} is spoilt: {why}", hint="delete it, and start the controllers again")
