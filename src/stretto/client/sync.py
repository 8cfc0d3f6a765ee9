"""The synchronous client, over the standard library: importing it must cost a command next to nothing."""

from __future__ import annotations

import http.client
import select
import ssl
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from stretto import pins
from stretto.client import calls, finding, near
from stretto.client.calls import Call, Ref, Source
from stretto.client.documents import Class, Cluster, Event, Forecast, Job, Node, Piece, Policy, Preview, Token, Why
from stretto.client.problems import closed_early, error_of, lost, unreachable
from stretto.client.streams import RESTART_S, SILENCE_S, Feed, Log, Patience, is_last
from stretto.errors import Unavailable

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

T = TypeVar("T")


class Client:
    """A server, found by the arguments, by STRETTO_SERVER and STRETTO_TOKEN, or by what `stretto up` left.

    An address may carry the key that the server must have: `https://HOST:PORT#sha256:…`; otherwise the one counts that
    was pinned by `stretto login`, or the certificate.

    `patience_s`: while the server cannot be reached, calls that may be repeated are, for so long. It can be used from
    several threads.
    """

    def __init__(
        self,
        server: str | None = None,
        token: str | None = None,
        *,
        data: str | Path | None = None,
        timeout_s: float = 30.0,
        patience_s: float = 0.0,
    ) -> None:
        self.server, self._token = finding.find(server, token, data=data)
        self._pin = finding.pin(server, data=data)
        self._timeout_s, self._patience_s = timeout_s, patience_s
        self._near = near.path_in(self.server)
        self._address = urlsplit(near.URL if self._near else self.server)
        self._idle: list[http.client.HTTPConnection] = []

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def submit(
        self,
        source: Source,
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Job:
        """A job file: its path, its text, or a mapping with the same fields. Durable when this returns.

        `env` replaces the variables that are taken along otherwise (`surroundings.CAPTURED`).
        """
        return self._do(calls.submit(source, cwd=cwd, env=env, key=key))

    def dry_run(
        self, source: Source, *, cwd: str | Path | None = None, env: Mapping[str, str] | None = None
    ) -> Preview:
        """What `submit` would do, and when the job would start and end; nothing is submitted."""
        return self._do(calls.dry_run(source, cwd=cwd, env=env))

    def run(
        self,
        source: Source,
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        key: str | None = None,
        timeout_s: float | None = None,
    ) -> Job:
        """Submit, and wait for the end."""
        return self.wait(self.submit(source, cwd=cwd, env=env, key=key), timeout_s=timeout_s)

    def wait(self, ref: Ref, *, timeout_s: float | None = None, patience_s: float = RESTART_S) -> Job:
        """The job once it has ended; `TimeoutError` when that takes too long.

        A server that restarts meanwhile is waited for, `patience_s` long.
        """
        job = self.job(ref)
        due_s = None if timeout_s is None else time.monotonic() + timeout_s
        # Listening first and looking then (None: a connection was made) leaves no gap between the two.
        with closing(self._listen(job, Feed(), Patience(patience_s), due_s)) as listening:
            while not job.ended:
                event = next(listening)
                if event is None or is_last(event, job):
                    job = self._do(calls.job(job), patience_s)
        return job

    def job(self, ref: Ref) -> Job:
        return self._do(calls.job(ref))

    def jobs(
        self,
        *,
        phase: str | Iterable[str] = (),
        name: str | None = None,
        user: str | None = None,
        queue: str | None = None,
        level: str | None = None,
        labels: Mapping[str, str] | None = None,
        order: str = "newest",
        limit: int | None = None,
    ) -> Iterator[Job]:
        """All jobs that fit, page by page; at most `limit`."""
        pages = calls.Pages(
            limit, phase=phase, name=name, user=user, queue=queue, level=level, labels=labels, order=order
        )
        while (call := pages.next_call()) is not None:
            yield from pages.took(self._do(call))

    def cancel(self, ref: Ref) -> Job:
        return self._do(calls.wish(ref, "cancel"))

    def suspend(self, ref: Ref, *, force: bool = False) -> Job:
        """`force`: though it would lose more than a minute of work."""
        return self._do(calls.wish(ref, "suspend", force=force))

    def resume(self, ref: Ref) -> Job:
        return self._do(calls.wish(ref, "resume"))

    def scale(self, ref: Ref, min: int | None = None, max: int | None = None, *, force: bool = False) -> Job:
        return self._do(calls.scale(ref, min, max, force=force))

    def migrate(self, ref: Ref, to: str, *, force: bool = False) -> Job:
        return self._do(calls.migrate(ref, to, force=force))

    def why(self, ref: Ref) -> Why:
        return self._do(calls.why(ref))

    def events(
        self, ref: Ref | None = None, *, after: int | None = None, limit: int = 200, order: str | None = None
    ) -> list[Event]:
        """History: of one job, or of everything."""
        return self._do(calls.events(ref, after=after, limit=limit, order=order)).items

    def watch(
        self, ref: Ref | None = None, *, after: int | None = None, patience_s: float = RESTART_S
    ) -> Iterator[Event]:
        """Events as they happen, for ever; none is lost when the connection or the server goes and comes back."""
        if after is None:
            after = next((event.seq for event in self.events(limit=1, order="newest")), 0)
        with closing(self._listen(ref, Feed(after), Patience(patience_s), None)) as listening:
            for event in listening:
                if event is not None:
                    yield event

    def logs(
        self,
        ref: Ref,
        *,
        worker: str | None = None,
        tail: int | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> str:
        return self._do(calls.logs(ref, worker, tail, offset, limit))

    def log_pages(self, ref: Ref, *, worker: str | None = None, tail: int | None = None) -> Iterator[str]:
        """All that was written, however long, in parts: one worker after the other."""
        cursor: str | None = None
        while True:
            page = self._do(calls.log_page(ref, worker, tail, cursor))
            yield page.text
            if (cursor := page.next) is None:
                return

    def follow(
        self,
        ref: Ref,
        *,
        worker: str | None = None,
        tail: int | None = None,
        tick_s: float | None = None,
        patience_s: float = RESTART_S,
    ) -> Iterator[Piece]:
        """The log as it is written, until the job has ended.

        With `tick_s` an empty piece comes whenever nothing was written for so long.
        """
        job, log, patience = self.job(ref), Log(), Patience(patience_s)
        while not log.ended:
            call = calls.follow(job.number, worker, None if log.begun else tail)
            try:
                with self._socket(call) as socket:
                    patience.worked()
                    while not log.ended:
                        piece = _received(socket, log, tick_s)
                        if piece is not None or tick_s is not None:
                            yield piece or Piece("", "")
            except Unavailable as error:
                log.broken()
                time.sleep(patience.failed(error))
                if tick_s is not None:
                    yield Piece("", "")

    def nodes(self) -> list[Node]:
        return self._do(calls.nodes())

    def drain(self, node: str, *, within_s: float | None = None) -> Node:
        """Leave a node: its workers move, and no new one comes. Jobs that would lose their work stay until they end, or
        so long; 0: not at all."""
        return self._do(calls.drain(node, "drain", within_s))

    def undrain(self, node: str) -> Node:
        return self._do(calls.drain(node, "undrain"))

    def policy(self) -> Policy:
        return self._do(calls.policy())

    def set_policy(
        self, name: str, options: Mapping[str, Any] | None = None, *, placement: str | None = None
    ) -> Policy:
        return self._do(calls.set_policy(name, options or {}, placement))

    def forecast(self) -> Forecast:
        return self._do(calls.forecast())

    def classes(self, name: str | None = None) -> list[Class]:
        """Classes of jobs of which something was learned; `name` may have * and ? for anything."""
        found: list[Class] = []
        cursor: str | None = None
        while True:
            page = self._do(calls.classes(name, cursor=cursor))
            found += page.items
            if (cursor := page.next) is None:
                return found

    def job_class(self, name: str) -> Class:
        """All that was learned of one: lengths by hyper-parameters, speeds by device type."""
        return self._do(calls.job_class(name))

    def forget_class(self, name: str) -> None:
        return self._do(calls.forget_class(name))

    def cluster(self) -> Cluster:
        return self._do(calls.cluster())

    def tokens(self) -> list[Token]:
        return self._do(calls.tokens())

    def create_token(
        self,
        user: str,
        role: str = "user",
        *,
        expires_s: float | None = None,
        account: str | None = None,
        shared: bool = False,
    ) -> Token:
        """Its `secret` is in this answer and nowhere else."""
        return self._do(calls.create_token(user, role, expires_s, account, shared))

    def revoke_token(self, id: str) -> None:
        return self._do(calls.revoke_token(id))

    def _do(self, call: Call[T], patience_s: float | None = None) -> T:
        patience = Patience(self._patience_s if patience_s is None else patience_s)
        while True:
            try:
                return call.read(self._once(call))
            except Unavailable as error:
                if not call.safe:
                    raise
                time.sleep(patience.failed(error))

    def _once(self, call: Call[Any]) -> bytes:
        while (connection := self._reusable()) is not None:
            try:
                return self._exchange(connection, call)
            except Unavailable:
                # The server may have closed it just now; only a new connection tells whether it is there.
                if not call.safe:
                    raise
        return self._exchange(self._connection(self._timeout_s), call)

    def _exchange(self, connection: http.client.HTTPConnection, call: Call[Any]) -> bytes:
        try:
            response = self._answer(connection, call)
            body = self._reading(response.read)
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        if response.status >= 300:
            raise error_of(response.status, body)
        return body

    def _answer(self, connection: http.client.HTTPConnection, call: Call[Any]) -> http.client.HTTPResponse:
        headers = {**self._headers(), **call.headers}

        def ask() -> http.client.HTTPResponse:
            connection.request(call.method, self._address.path + call.target, body=call.body, headers=headers)
            return connection.getresponse()

        return self._reading(ask)

    def _reading(self, read: Callable[[], T]) -> T:
        """Whatever goes wrong on the way is one error."""
        try:
            return read()
        except TimeoutError:
            raise unreachable(self.server, "it does not answer in time") from None
        except OSError as error:
            raise lost(self.server, error) from None
        except http.client.HTTPException as error:
            raise unreachable(self.server, f"the connection broke ({type(error).__name__})") from None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        if self._near:
            return near.Connection(self._near, timeout_s)
        host, port = self._address.hostname or "", self._address.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)

    @cached_property
    def _tls(self) -> ssl.SSLContext | None:
        return pins.context(self._pin) if self._address.scheme == "https" else None

    def _reusable(self) -> http.client.HTTPConnection | None:
        """A connection of an earlier call that the server has not closed (that would be readable)."""
        while self._idle:
            connection = self._idle.pop()
            if connection.sock is not None and not select.select([connection.sock], [], [], 0)[0]:
                return connection
            connection.close()
        return None

    def _listen(
        self, ref: Ref | None, feed: Feed, patience: Patience, due_s: float | None
    ) -> Generator[Event | None, None, None]:
        """Events; None whenever a connection was made."""
        while True:
            connection = self._connection(_within(SILENCE_S, due_s))
            try:
                response = self._answer(connection, calls.stream(ref, feed.last))
                if response.status >= 300:
                    raise error_of(response.status, self._reading(response.read))
                patience.worked()
                yield None
                while line := self._reading(response.readline):
                    event = feed.line(line.decode(errors="replace").rstrip("\r\n"))
                    if event is not None:
                        yield event
                    _within(SILENCE_S, due_s)
                raise unreachable(self.server, "it closed the stream of events")
            except Unavailable as error:
                feed.broken()
                time.sleep(_within(patience.failed(error), due_s))
            finally:
                connection.close()

    @contextmanager
    def _socket(self, call: Call[Any]) -> Iterator[ClientConnection]:
        from websockets.exceptions import InvalidHandshake, InvalidStatus
        from websockets.sync.client import connect, unix_connect

        url = "ws" + self._address.geturl().removeprefix("http") + call.target
        try:
            socket = (partial(unix_connect, self._near) if self._near else connect)(
                url, additional_headers=self._headers(), open_timeout=self._timeout_s, close_timeout=1,
                compression=None, proxy=None, ssl=self._tls,
            )  # fmt: skip
        except InvalidStatus as refused:
            raise error_of(refused.response.status_code, refused.response.body or b"") from None
        except (OSError, InvalidHandshake, EOFError) as error:
            raise lost(self.server, error) from None
        with socket:
            yield socket


def _received(socket: ClientConnection, log: Log, tick_s: float | None) -> Piece | None:
    from websockets.exceptions import ConnectionClosed

    try:
        return log.message(socket.recv(timeout=tick_s))
    except TimeoutError:
        return None
    except ConnectionClosed as closed:
        raise closed_early(closed.rcvd) from None


def _within(span_s: float, due_s: float | None) -> float:
    """A span of time that does not go beyond the end."""
    if due_s is None:
        return span_s
    left_s = due_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the job has not ended in time")
    return min(span_s, left_s)
