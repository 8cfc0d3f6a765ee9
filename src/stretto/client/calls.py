"""Every call of the API, described once: what is sent, how the answer is read, whether it may be sent twice.

Nothing here does I/O. A client carries a `Call` out and gives its `read` the answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from stretto.client import surroundings
from stretto.client.documents import (
    Class,
    Cluster,
    Document,
    Event,
    Forecast,
    Job,
    LogPage,
    Node,
    Page,
    Policy,
    Preview,
    Token,
    Why,
)
from stretto.errors import SpecError, UsageError

T = TypeVar("T")
D = TypeVar("D", bound=Document)
Source = str | Path | Mapping[str, Any]
Ref = str | int | Job
"""A job: its number, its name (the latest of that name), or the job itself."""

MOST_PER_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    method: str
    path: str
    read: Callable[[bytes], T]
    query: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    safe: bool = False
    """Whether it can be sent again when nobody knows what became of it."""

    @property
    def target(self) -> str:
        return f"{self.path}?{urlencode(self.query)}" if self.query else self.path


def submit(
    source: Source,
    *,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    key: str | None = None,
) -> Call[Job]:
    """The key makes it safe: the same submission twice is one job."""
    headers = {"Idempotency-Key": key or os.urandom(16).hex()}
    return _post("/v1/jobs", Job, _envelope(source, cwd, env), headers=headers, safe=True)


def dry_run(source: Source, *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None) -> Call[Preview]:
    return _post("/v1/jobs", Preview, _envelope(source, cwd, env), query=(("dry_run", "true"),), safe=True)


def job(ref: Ref) -> Call[Job]:
    return _get(_job(ref), Job)


def jobs(
    *,
    phase: str | Iterable[str] = (),
    name: str | None = None,
    user: str | None = None,
    queue: str | None = None,
    level: str | None = None,
    labels: Mapping[str, str] | None = None,
    order: str = "newest",
    limit: int = 200,
    cursor: str | None = None,
) -> Call[Page[Job]]:
    phases = [phase] if isinstance(phase, str) else list(phase)
    query: list[tuple[str, Any]] = [("phase", each) for each in phases]
    query += [("label", f"{label}={value}") for label, value in (labels or {}).items()]
    query += [("name", name), ("user", user), ("queue", queue), ("level", level)]
    query += [("order", order), ("limit", limit), ("cursor", cursor)]
    return _page("/v1/jobs", Job, query)


class Pages:
    """Goes through a list of jobs page by page, up to a limit."""

    def __init__(self, limit: int | None = None, **filters: Any) -> None:
        self._left, self._filters = limit, filters
        self._cursor: str | None = None
        self._over = False

    def next_call(self) -> Call[Page[Job]] | None:
        if self._over or self._left == 0:
            return None
        size = 200 if self._left is None else min(self._left, MOST_PER_PAGE)
        return jobs(**self._filters, limit=size, cursor=self._cursor)

    def took(self, page: Page[Job]) -> list[Job]:
        self._cursor, self._over = page.next, page.next is None
        if self._left is not None:
            self._left -= len(page.items)
        return page.items


def wish(ref: Ref, verb: str, *, force: bool = False) -> Call[Job]:
    """cancel, suspend or resume."""
    return _post(f"{_job(ref)}/{verb}", Job, _forced(force))


def scale(ref: Ref, low: int | None, high: int | None, *, force: bool = False) -> Call[Job]:
    sizes = {name: size for name, size in (("min", low), ("max", high)) if size is not None}
    return _post(f"{_job(ref)}/scale", Job, {**sizes, **_forced(force)})


def migrate(ref: Ref, to: str, *, force: bool = False) -> Call[Job]:
    return _post(f"{_job(ref)}/migrate", Job, {"to": to, **_forced(force)})


def _forced(force: bool) -> dict[str, Any]:
    """Servers of before do not know the field, and need not."""
    return {"force": True} if force else {}


def why(ref: Ref) -> Call[Why]:
    return _get(f"{_job(ref)}/why", Why)


def events(
    ref: Ref | None = None, *, after: int | None = None, limit: int = 200, order: str | None = None
) -> Call[Page[Event]]:
    path = "/v1/events" if ref is None else f"{_job(ref)}/events"
    return _page(path, Event, [("after", after), ("limit", limit), ("order", order)])


def stream(ref: Ref | None, after: int | None) -> Call[bytes]:
    """Server-sent events; its answer has no end."""
    headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})
    query = _given([("job", None if ref is None else _name(ref))])
    return Call("GET", "/v1/events/stream", bytes, query=query, headers=headers, safe=True)


def logs(
    ref: Ref, worker: str | None, tail: int | None, offset: int | None = None, limit: int | None = None
) -> Call[str]:
    query = _given([("worker", worker), ("tail", tail), ("offset", offset), ("limit", limit)])
    return Call("GET", f"{_job(ref)}/logs", _text, query=query, safe=True)


def log_page(ref: Ref, worker: str | None, tail: int | None, cursor: str | None) -> Call[LogPage]:
    query = _given([("worker", worker), ("tail", tail), ("cursor", cursor)])
    return Call("GET", f"{_job(ref)}/logs/pages", _reader(LogPage), query=query, safe=True)


def follow(ref: Ref, worker: str | None, tail: int | None) -> Call[bytes]:
    """A WebSocket."""
    return Call("GET", f"{_job(ref)}/logs/follow", bytes, query=_given([("worker", worker), ("tail", tail)]), safe=True)


def nodes() -> Call[list[Node]]:
    return _list("/v1/nodes", Node)


def drain(node: str, verb: str, within_s: float | None = None) -> Call[Node]:
    """drain or undrain."""
    body = {} if within_s is None else {"within_s": within_s}
    return _post(f"/v1/nodes/{_quoted(node)}/{verb}", Node, body)


def policy() -> Call[Policy]:
    return _get("/v1/policy", Policy)


def set_policy(name: str, options: Mapping[str, Any], placement: str | None) -> Call[Policy]:
    body = {"name": name, "options": dict(options)} | ({} if placement is None else {"placement": placement})
    return Call("PUT", "/v1/policy", _reader(Policy), body=_encoded(body), headers=_JSON)


def forecast() -> Call[Forecast]:
    return _get("/v1/forecast", Forecast)


def classes(name: str | None = None, *, limit: int = 200, cursor: str | None = None) -> Call[Page[Class]]:
    return _page("/v1/classes", Class, [("name", name), ("limit", limit), ("cursor", cursor)])


def job_class(name: str) -> Call[Class]:
    return _get(_class(name), Class)


def forget_class(name: str) -> Call[None]:
    return Call("DELETE", _class(name), _nothing)


def cluster() -> Call[Cluster]:
    return _get("/v1/cluster", Cluster)


def tokens() -> Call[list[Token]]:
    return _list("/v1/tokens", Token)


def create_token(user: str, role: str, expires_s: float | None, account: str | None, shared: bool) -> Call[Token]:
    more = {"expires_s": expires_s, "account": account, "shared": shared or None}
    given = {name: value for name, value in more.items() if value is not None}
    return _post("/v1/tokens", Token, {"user": user, "role": role, **given})


def revoke_token(id: str) -> Call[None]:
    return Call("DELETE", f"/v1/tokens/{_quoted(id)}", _nothing)


_JSON = {"Content-Type": "application/json"}


def _get(path: str, kind: type[D]) -> Call[D]:
    return Call("GET", path, _reader(kind), safe=True)


def _list(path: str, kind: type[D]) -> Call[list[D]]:
    """A list that is short enough for one page."""
    read = _page_reader(kind)
    return Call("GET", path, lambda body: read(body).items, safe=True)


def _page(path: str, kind: type[D], query: Iterable[tuple[str, Any]]) -> Call[Page[D]]:
    return Call("GET", path, _page_reader(kind), query=_given(query), safe=True)


def _post(
    path: str,
    kind: type[D],
    body: Mapping[str, Any] | None = None,
    *,
    query: tuple[tuple[str, str], ...] = (),
    headers: Mapping[str, str] | None = None,
    safe: bool = False,
) -> Call[D]:
    headers = {**_JSON, **(headers or {})}
    return Call("POST", path, _reader(kind), query=query, body=_encoded(body or {}), headers=headers, safe=safe)


def _envelope(source: Source, cwd: str | Path | None, env: Mapping[str, str] | None) -> dict[str, Any]:
    """The job file as it was written, and where it came from."""
    env = surroundings.captured() if env is None else dict(env)
    return {"job": job_file(source), "cwd": _folder(cwd), "env": env}


def _folder(cwd: str | Path | None) -> str:
    try:
        return str(Path(cwd or os.getcwd()).absolute())
    except FileNotFoundError:
        raise UsageError(
            "the current folder does not exist any more", hint="a job runs where it was submitted: go to another folder"
        ) from None


def job_file(source: Source) -> Any:
    """A mapping, or the text as it was written, so that errors can name its lines."""
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, Path) or ("\n" not in source and source.endswith((".yaml", ".yml", ".json"))):
        return _read(Path(source))
    return source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path}: is not a text file: byte {error.start} is not UTF-8", hint="save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{path}: cannot be read: {told}", hint="give the path of a job file in YAML") from None


def _job(ref: Ref) -> str:
    return f"/v1/jobs/{_quoted(_name(ref))}"


def _class(name: str) -> str:
    # In an address they would mean another place.
    if name in ("", ".", ".."):
        raise UsageError(f"{name!r} is not a class of jobs", hint="give its name; `stretto class list` lists them")
    return f"/v1/classes/{_quoted(name)}"


def _quoted(name: str) -> str:
    return quote(_utf8(name, "the name"), safe="")


def _name(ref: Ref) -> str:
    name = ref.id if isinstance(ref, Job) else str(ref)
    # Neither is a job's name, and in an address they would mean another place.
    if name in ("", ".", ".."):
        raise UsageError(f"{name!r} is not a job", hint="give its number or its name; `stretto ps` lists them")
    return name


def _given(query: Iterable[tuple[str, Any]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, _utf8(str(value), name)) for name, value in query if value is not None)


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(_sendable(body), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"this cannot be sent as JSON: {error}", hint="use plain values") from None


def _sendable(value: Any, what: str = "") -> Any:
    """With every text in it as UTF-8; `what` is the path of its field."""
    if isinstance(value, str):
        return _utf8(value, _FIELDS.get(what, what.removeprefix("job.")))
    if isinstance(value, Mapping):
        # A key need not be text: what JSON makes of it is JSON's affair.
        return {_sendable(key, what): _sendable(each, f"{what}.{key}".lstrip(".")) for key, each in value.items()}
    return [_sendable(each, what) for each in value] if isinstance(value, (list, tuple)) else value


_FIELDS = {"cwd": "the current folder", "job": "the job file"}


def _utf8(text: str, what: str) -> str:
    """As Python reads arguments, variables and folders, bytes that the locale has no characters for are stand-ins. They
    are UTF-8 nevertheless where it is only the locale that knows none."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        shown = text.encode("utf-8", "backslashreplace").decode().replace("\\udc", "\\x")
        raise UsageError(f"{what}: '{shown}' is not UTF-8", hint="only text in UTF-8 can be sent") from None


def _reader(kind: type[D]) -> Callable[[bytes], D]:
    return lambda body: kind(json.loads(body))


def _page_reader(kind: type[D]) -> Callable[[bytes], Page[D]]:
    def read(body: bytes) -> Page[D]:
        told = json.loads(body)
        return Page([kind(item) for item in told["items"]], told.get("next"))

    return read


def _text(body: bytes) -> str:
    return body.decode("utf-8", errors="replace")


def _nothing(body: bytes) -> None:
    return None
