"""What can go wrong when the API server is asked, and how an answer of its becomes an error.

ApiError                       of stretto.errors
├── ObjectNotFound             NotFound      404
├── ObjectConflict             Conflict      409: somebody changed the object since it was read; read again
├── AlreadyExists              Conflict      409 on create
├── Gone                       Conflict      410: that resourceVersion (or page) is too old; list again
├── Invalid                    UsageError    400, 422: names the fields
├── Refused                    Denied        401, 403
└── Unreachable                Unavailable   no connection, TLS, time-out, 5xx
    ├── TooMany                              429, after a few tries
    └── Unreadable                           an answer that is not what the API sends
"""

from __future__ import annotations

import ssl

import msgspec

from stretto import errors
from stretto.kubernetes.connection import Broken


class ApiError(errors.StrettoError):
    """The API server did not do what it was asked; `reason` is its own word for why."""

    code = "kubernetes"

    def __init__(self, message: str, *, hint: str = "", status: int = 0, reason: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.reason = reason


class ObjectNotFound(ApiError, errors.NotFound):
    code, exit_code = errors.NotFound.code, errors.NotFound.exit_code


class ObjectConflict(ApiError, errors.Conflict):
    code, exit_code = errors.Conflict.code, errors.Conflict.exit_code


class AlreadyExists(ApiError, errors.Conflict):
    code, exit_code = errors.Conflict.code, errors.Conflict.exit_code


class Gone(ApiError, errors.Conflict):
    code, exit_code = errors.Conflict.code, errors.Conflict.exit_code


class Invalid(ApiError, errors.UsageError):
    """`causes`: (field, what is wrong with it)."""

    code, exit_code = errors.UsageError.code, errors.UsageError.exit_code
    causes: tuple[tuple[str, str], ...] = ()


class Refused(ApiError, errors.Denied):
    code, exit_code = errors.Denied.code, errors.Denied.exit_code


class Unreachable(ApiError, errors.Unavailable):
    code, exit_code = errors.Unavailable.code, errors.Unavailable.exit_code


class TooMany(Unreachable):
    """The server asks us to come back later."""


class Unreadable(Unreachable):
    """What came cannot be decoded: asking for the same again may bring the same."""


def of_answer(what: str, code: int, body: bytes) -> ApiError:
    """The error for an answer that is none of success."""
    try:
        status = _STATUS.decode(body)
    except msgspec.DecodeError:
        status = _Status(message=body[:200].decode(errors="replace").strip())
    return _of_status(what, code, status)


def _of_status(what: str, code: int, status: _Status) -> ApiError:
    message = status.message or f"{what}: the server answered {code}"
    match code, status.reason:
        case 404, _:
            return ObjectNotFound(message, status=code, reason=status.reason)
        case 409, "AlreadyExists":
            return AlreadyExists(message, status=code, reason=status.reason)
        case 409, _:
            return ObjectConflict(message, status=code, reason=status.reason)
        case (410, _) | (_, "Expired" | "Gone"):
            return Gone(message, status=code, reason=status.reason)
        case ((400 | 422), _):
            invalid = Invalid(message, status=code, reason=status.reason)
            causes = (status.details and status.details.causes) or ()
            invalid.causes = tuple((cause.field, cause.message) for cause in causes)
            return invalid
        case 401, _:
            return Refused(f"{what}: the server does not know us", hint="renew the credentials", status=code)
        case 403, _:
            return Refused(message, status=code, reason=status.reason)
        case 429, _:
            return TooMany(message, status=code, reason=status.reason)
        case _ if code >= 500:
            return Unreachable(message, status=code, reason=status.reason)
    return ApiError(f"{what}: {message}", status=code, reason=status.reason)


def of_watch(what: str, line: bytes | msgspec.Raw) -> ApiError:
    """The error that a watch delivers as its last event."""
    status = _STATUS.decode(line)
    return _of_status(what, status.code, status)


def never_sent(error: BaseException) -> bool:
    """Whether the server cannot have seen the request: there was no connection to send it on."""
    if isinstance(error, Broken):
        return not error.was_sent
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLCertVerificationError | TimeoutError)


def unreachable(what: str, error: BaseException, server: str) -> Unreachable:
    if isinstance(error, ssl.SSLCertVerificationError):
        return Unreachable(
            f"the certificate of {server} is not trusted: {error.verify_message}",
            hint="check the cluster's certificate-authority in the kubeconfig",
        )
    why = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    return Unreachable(f"{what}: cannot reach {server}: {why}")


class _Cause(msgspec.Struct):
    field: str = ""
    message: str = ""


class _Details(msgspec.Struct, rename="camel"):
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct):
    message: str = ""
    reason: str = ""
    code: int = 0
    details: _Details | None = None


_STATUS = msgspec.json.Decoder(_Status)
