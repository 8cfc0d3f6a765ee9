"""From a problem document of the API (RFC 9457) back to the error that it was on the server."""

from __future__ import annotations

import json
from typing import Any

from stretto import errors
from stretto.client import pinned
from stretto.errors import Problem, SpecError, StrettoError

_BY_STATUS: dict[int, type[StrettoError]] = {
    400: errors.UsageError, 401: errors.Denied, 403: errors.Denied, 404: errors.NotFound, 405: errors.UsageError,
    409: errors.Conflict, 413: errors.UsageError, 415: errors.UsageError, 422: errors.UsageError,
    429: errors.Unavailable, 502: errors.Unavailable, 503: errors.Unavailable, 504: errors.Unavailable,
    507: errors.Unavailable,
}  # fmt: skip

_BY_CODE: dict[str, type[StrettoError]] = {
    kind.code: kind
    for kind in reversed(list(vars(errors).values()))
    if isinstance(kind, type) and issubclass(kind, StrettoError)
}


def error_of(status: int, body: bytes | bytearray) -> StrettoError:
    """The error of an answer that is not one of success.

    A code that is not one of `stretto.errors` (a newer server, the store's) keeps its code and is raised as what its
    status means.
    """
    told = _document(body)
    code, hint = str(told.get("code") or ""), str(told.get("hint") or "")
    message = str(told.get("detail") or told.get("title") or f"the server answered with status {status}")
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, StrettoError)
    if issubclass(kind, SpecError):
        return SpecError(message, hint=hint, problems=_problems(told))
    error = kind(message, hint=hint)
    if code:
        error.code = code
    return error


def unreachable(url: str, why: str) -> errors.Unavailable:
    return errors.Unavailable(
        f"no server answers at {url}: {why}", hint="`stretto up -d` starts one; STRETTO_SERVER says where another is"
    )


def lost(url: str, error: BaseException) -> StrettoError:
    """A connection that failed, or could not be made: why, in one error."""
    trouble = pinned.trouble(url, error)
    return trouble or unreachable(url, getattr(error, "strerror", "") or str(error) or type(error).__name__)


def closed_early(frame: Any) -> StrettoError:
    """A WebSocket was closed before the end: with a reason of the server's, or because it went away."""
    code, reason = getattr(frame, "code", 1006), getattr(frame, "reason", "")
    if code == 1008:
        return errors.Denied(reason or "the server does not allow that", hint="check the token")
    if 4000 <= code < 5000:
        return _BY_STATUS.get(code - 4000, StrettoError)(reason or f"the server closed the connection ({code})")
    return errors.Unavailable(f"the server closed the connection ({reason or code})", hint="try again")


def _document(body: bytes | bytearray) -> dict[str, Any]:
    try:
        told = json.loads(body)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _problems(told: dict[str, Any]) -> tuple[Problem, ...]:
    found = told.get("problems")
    return tuple(
        Problem(int(each.get("line") or 0), str(each.get("field") or ""), str(each.get("text") or ""))
        for each in (found if isinstance(found, list) else [])
        if isinstance(each, dict)
    )
