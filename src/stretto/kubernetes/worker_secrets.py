"""What the workers of a job prove themselves with: a secret that its object owns, made once."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
from collections.abc import Mapping
from typing import Any

from stretto.errors import Conflict
from stretto.jobs.model import Level
from stretto.kubernetes import pods, status
from stretto.kubernetes.client import Api
from stretto.kubernetes.fields import API_VERSION, KIND
from stretto.kubernetes.kinds import SECRETS
from stretto.kubernetes.model import ElasticJob
from stretto.kubernetes.problems import AlreadyExists, ObjectNotFound, Unreachable

_AGAIN_S = 1.0


async def token(api: Api, job: ElasticJob, level: Level) -> str:
    """Its content; empty for jobs that have no coordinator. Raises `Conflict` when somebody else has made a secret of
    that name, or spoiled ours."""
    if level != "elastic":
        return ""
    meta = job.metadata
    name = pods.secret_name(meta.name)
    while True:
        with contextlib.suppress(AlreadyExists, Unreachable):
            found = await _found_or_made(api, job, name)
            if _is_of(found, meta.uid):
                return _content(found)
            # Of an object that had its name before: it is about to go.
        await asyncio.sleep(_AGAIN_S)


async def _found_or_made(api: Api, job: ElasticJob, name: str) -> Mapping[str, Any]:
    try:
        return await api.get(SECRETS, name, job.metadata.namespace)
    except ObjectNotFound:
        return await api.create(SECRETS, _body(job, name), job.metadata.namespace)


def _is_of(secret: Mapping[str, Any], uid: str) -> bool:
    """Whether it is that object's. Raises `Conflict` for one that nobody of ours has made."""
    meta = secret["metadata"]
    if not status.SECRET_LABEL.items() <= (meta.get("labels") or {}).items():
        raise Conflict(f"there is a secret {meta['name']} that is not this job's", hint="delete it, or rename the job")
    return any(owner.get("uid") == uid for owner in meta.get("ownerReferences") or ())


def _content(secret: Mapping[str, Any]) -> str:
    try:
        return base64.b64decode((secret.get("data") or {})[pods.SECRET_KEY]).decode()
    except (KeyError, ValueError):
        raise Conflict(
            f"the secret {secret['metadata']['name']} has no {pods.SECRET_KEY}", hint="delete it: it is made anew"
        ) from None


def _body(job: ElasticJob, name: str) -> dict[str, Any]:
    meta = job.metadata
    owner = {"apiVersion": API_VERSION, "kind": KIND, "name": meta.name, "uid": meta.uid, "controller": True}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": meta.namespace,
            "ownerReferences": [owner],
            "labels": status.SECRET_LABEL,
        },
        "stringData": {pods.SECRET_KEY: secrets.token_urlsafe(32)},
    }
