"""What comes in: bodies of bounded size, in JSON or YAML, made into values. Whatever is wrong is the sender's fault."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request

from stretto.api.problems import Malformed, MediaType, TooLarge
from stretto.errors import UsageError
from stretto.jobs.model import Context
from stretto.spec import JobFile, load
from stretto.spec.model import check_variables
from stretto.store import Role

Shape = TypeVar("Shape")

MOST_BYTES = 2**20
_READ_ON = 16 * 2**20
"""So much of a body that is too large is still read, so that its sender listens to the answer."""
_A_PAGE = 2**11
_readers = asyncio.Semaphore(2)
_JSON, _YAML = ("application/json",), ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class Scale(msgspec.Struct, forbid_unknown_fields=True):
    min: int | None = None
    max: int | None = None
    force: bool = False
    """Though it would lose much work."""


class Migrate(msgspec.Struct, forbid_unknown_fields=True):
    to: str
    force: bool = False


class Suspend(msgspec.Struct, forbid_unknown_fields=True):
    force: bool = False


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    within_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """So long jobs may stay that would lose their work; 0: not at all; null: until they end."""


class SetPolicy(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    options: dict[str, Any] = {}
    placement: str | None = None


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    user: str
    role: Role
    expires_s: float | None = None
    account: str | None = None
    """Whose processes its jobs are; the account of the user's name, if not given."""
    shared: bool = False
    """The user may do what the server's account can."""


class Submission(msgspec.Struct, forbid_unknown_fields=True):
    """A job file with the surroundings it was submitted from."""

    job: dict[str, Any] | str
    """Its fields, or its text: then errors name its lines."""
    cwd: str = ""
    env: dict[str, str] = {}


async def raw(request: Request) -> bytes:
    """The body, or `TooLarge`."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and len(announced) < 20 and int(announced) > _READ_ON:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MOST_BYTES:
            chunks.append(chunk)
        elif size > _READ_ON:
            raise _too_large()
    if size > MOST_BYTES:
        raise _too_large()
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def read(request: Request, shape: type[Shape]) -> Shape:
    """A JSON body of this shape."""
    _media_type(request, _JSON)
    return _convert(decode(await raw(request)), shape)


async def read_if_any(request: Request, shape: type[Shape]) -> Shape:
    """The same for a body that may be left out."""
    body = await raw(request)
    if not body:
        return shape()
    _media_type(request, _JSON)
    return _convert(decode(body), shape)


def decode(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8") from None
    except RecursionError:
        raise Malformed("the body is nested too deep", hint="a job file is a page at most") from None
    except msgspec.MsgspecError as error:
        raise Malformed(f"the body is not JSON: {error}", hint="check the place that the message names") from None


async def submission(request: Request, body: bytes) -> tuple[JobFile, Context]:
    """A job file and its surroundings, from whatever form it came in.

    What is more than a page is read in a thread, a few at a time: the event loop goes on meanwhile.
    """
    if len(body) <= _A_PAGE:
        return _submission(request, body)
    async with _readers:
        return await asyncio.to_thread(_submission, request, body)


def _submission(request: Request, body: bytes) -> tuple[JobFile, Context]:
    if _media_type(request, (*_JSON, *_YAML)) in _YAML:
        given = Submission(_text(body))
    else:
        value = decode(body)
        wrapped = isinstance(value, dict) and "job" in value
        given = _convert(value if wrapped else {"job": value}, Submission)
    # With a line's end a text is never taken for the path of a file.
    file = load(given.job + "\n" if isinstance(given.job, str) else given.job)
    if isinstance(given.job, str) or b"\\u0000" in body:
        # Only there can be what JSON cannot carry, or what no database takes.
        _check_texts(file.model_dump(mode="json"))
    _check_numbers(file.hyperparameters)
    cwd = given.cwd or (request.query_params.get("cwd", "") if request.scope["query_string"] else "")
    return file, _context(cwd, given.env)


def plain(text: str, what: str) -> str:
    """No NUL: no name of ours contains one, and not every database takes them."""
    if "\0" in text:
        raise Malformed(f"{what} contains the character NUL", hint="leave it out")
    return text


def _context(cwd: str, env: dict[str, str]) -> Context:
    if cwd and not os.path.isabs(plain(cwd, "cwd")):
        raise UsageError(f"cwd: {cwd!r} is not an absolute path", hint="give the folder you submit from")
    try:
        check_variables(env)
    except ValueError as error:
        raise UsageError(f"env: {error}", hint="leave out what the job does not need") from None
    return Context(cwd=cwd or "~", env=env)


def _convert(value: Any, shape: type[Shape]) -> Shape:
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        fields = ", ".join(getattr(shape, "__struct_fields__", ()))
        raise UsageError(f"the body: {error}", hint=f"known fields: {fields}") from None


def _check_texts(value: Any) -> None:
    """It is stored, and shown: no NUL, no halves of characters, which YAML can write."""
    if isinstance(value, dict):
        for key, one in value.items():
            _check_texts(key)
            _check_texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _check_texts(one)
    elif isinstance(value, str):
        plain(value, "the job file")
        if not value.isascii() and value.encode(errors="replace").decode() != value:
            raise Malformed("the job file contains halves of characters", hint="leave out \\ud800 and the like")


def _check_numbers(values: Mapping[str, Any]) -> None:
    """The only whole numbers of a job file that have no bounds of their own."""
    for name, value in values.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise UsageError(f"hyperparameters.{name}: it is larger than JSON's numbers", hint="write it in quotes")


def _media_type(request: Request, known: tuple[str, ...]) -> str:
    given = request.headers.get("content-type", "")
    name = given.partition(";")[0].strip().lower()
    if name not in known:
        raise MediaType(f"the content type {given!r} is not understood", hint=f"send {' or '.join(known)}")
    return name


def _text(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(f"the body is not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8") from None


def _too_large() -> TooLarge:
    return TooLarge(f"the body is larger than {MOST_BYTES} bytes", hint="a job file is a page at most")
