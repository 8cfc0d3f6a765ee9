"""Errors as problem details (RFC 9457): the one place that knows which error is which HTTP status.

Whoever handles a request raises; nobody else builds an error's answer. What is none of our errors is a mistake of ours:
the client hears that much, the log has the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from stretto import errors as e
from stretto.backends.protocol import LaunchError
from stretto.store import Refused, StoreCorrupted, StoreError, StoreTooNew

MEDIA_TYPE = "application/problem+json"
_TYPE = "https://stretto.dev/problems/"
_log = logging.getLogger("stretto.api")


class Malformed(e.UsageError):
    """What came is not even in the right form."""

    code = "malformed"


class TooLarge(e.UsageError):
    code = "too-large"


class MediaType(e.UsageError):
    code = "media-type"


class Misdirected(e.UsageError):
    """It was meant for another server."""

    code = "misdirected"


class Unauthenticated(e.Denied):
    """Nobody knows who asks; `Denied` itself is for those who are known."""

    code = "unauthenticated"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, and what to change."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    """For programs: stays the same when the wording changes."""
    hint: str
    problems: list[Detail]
    """Of a job file, or of parameters."""


class Detail(msgspec.Struct, frozen=True):
    line: int
    """From 1; 0 when there is none to point at."""
    field: str
    text: str


_STATUS: Sequence[tuple[type[e.StrettoError], int, str]] = (
    # The first that fits: subclasses before their base.
    (Malformed, 400, "The request cannot be read"),
    (Unauthenticated, 401, "A token is needed"),
    (e.Denied, 403, "Not allowed"),
    (e.NotFound, 404, "Not found"),
    (e.Conflict, 409, "Not possible now"),
    (e.Occupied, 409, "In use"),
    (Refused, 409, "It has changed meanwhile"),
    (e.MissingExtra, 409, "A part is not installed"),
    (TooLarge, 413, "Too large"),
    (MediaType, 415, "Unknown kind of contents"),
    (Misdirected, 421, "Not for this server"),
    (e.SpecError, 422, "The job file cannot be accepted"),
    (e.UsageError, 422, "The request cannot be accepted"),
    (e.TraceError, 422, "The request cannot be accepted"),
    (e.PolicyError, 422, "The policy cannot be used"),
    (e.Impossible, 422, "Impossible here"),
    (LaunchError, 422, "It cannot be started"),
    (e.TooMany, 429, "Too many at a time"),
    (e.Unavailable, 503, "Not now"),
    (StoreCorrupted, 500, "The store is damaged"),
    (StoreTooNew, 500, "The store is too new"),
    (StoreError, 503, "The store cannot be used now"),
)


def status_of(error: e.StrettoError) -> int:
    return _about(error)[0]


def response(error: e.StrettoError, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to whoever caused it."""
    status, title = _about(error)
    if isinstance(error, Unauthenticated):
        headers = {"WWW-Authenticate": 'Bearer realm="stretto"', **(headers or {})}
    if isinstance(error, TooLarge):
        # The rest of it is not waited for.
        headers = {"Connection": "close", **(headers or {})}
    details = [Detail(*problem) for problem in error.problems] if isinstance(error, e.SpecError) else []
    return _answer(status, title, error.message, error.code, error.hint, details, headers)


def install(app: FastAPI) -> None:
    app.add_exception_handler(e.StrettoError, _ours)
    app.add_exception_handler(RequestValidationError, _parameters)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _mistake)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, e.StrettoError)
    if status_of(error) >= 500:
        _log.error("%s %s: %s", request.method, request.url.path, error)
    return response(error)


async def _gone(request: Request, error: Exception) -> Response:
    """Who has hung up before the end of the body hears nothing, and is no mistake of ours."""
    return response(Malformed("the body has no end", hint="send all of it"))


async def _parameters(_: Request, error: Exception) -> Response:
    """What FastAPI says of a path's or query's parameters."""
    assert isinstance(error, RequestValidationError)
    details = [Detail(0, str(found["loc"][-1]), found["msg"]) for found in error.errors()]
    text = "; ".join(f"{detail.field}: {detail.text}" for detail in details)
    return _answer(422, "The request cannot be accepted", text, "usage", "docs/api.md lists all parameters", details)


async def _http(request: Request, error: Exception) -> Response:
    """What the router says."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return response(e.NotFound(f"there is nothing at {path}", hint="/v1/openapi.json lists all paths"))
    if error.status_code == 405:
        allowed = ", ".join(_methods(request))
        text = f"{path} does not know {request.method}"
        return _answer(405, "Unknown method", text, "method", f"use {allowed}", [], {"Allow": allowed})
    return _answer(error.status_code, "The request cannot be accepted", str(error.detail), "usage", "", [])


def _methods(request: Request) -> list[str]:
    """All of the path's, over all of its routes."""
    found: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            found |= getattr(route, "methods", None) or set()
    return sorted(found)


async def _mistake(request: Request, error: Exception) -> Response:
    _log.error("%s %s: a mistake of ours", request.method, request.url.path, exc_info=error)
    hint = "the server's log says more; please report it"
    return _answer(500, "A mistake of ours", "something went wrong inside the server", "internal", hint, [])


def _about(error: e.StrettoError) -> tuple[int, str]:
    for kind, status, title in _STATUS:
        if isinstance(error, kind):
            return status, title
    return 500, "It went wrong"


def _answer(
    status: int,
    title: str,
    detail: str,
    code: str,
    hint: str,
    problems: list[Detail],
    headers: Mapping[str, str] | None = None,
) -> Response:
    problem = Problem(
        type=_TYPE + code,
        title=title,
        status=status,
        detail=_clean(detail),
        code=code,
        hint=_clean(hint),
        problems=[Detail(one.line, _clean(one.field), _clean(one.text)) for one in problems],
    )
    return Response(msgspec.json.encode(problem), status, dict(headers or {}), MEDIA_TYPE)


def _clean(text: Any) -> str:
    """Halves of characters, which a YAML text can contain, cannot be sent back."""
    return str(text).encode(errors="replace").decode()
