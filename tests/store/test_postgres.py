"""A connection that breaks: while nothing is written, before a commit reaches the server, and after."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections.abc import Iterator

import pytest
from histories import job, submission
from places import Opener, Schema

from stretto.store import Store, StoreUnreachable


class Cutter:
    """Passes everything on between a client and the server, until a client says COMMIT and it was told to cut."""

    def __init__(self, folder: str, server: str) -> None:
        self._server = server
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.5432")
        self._listener.listen()
        self.cut = ""
        """`before`: the server never sees it. `after`: the client never hears that it was done."""
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        """After the stores that use it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            self._sockets += [client, server]
            for ends in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass_on, args=ends))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                how = self.cut if asks and b"COMMIT" in data else ""
                if how:
                    self.cut = ""
                if how == "after":
                    source.shutdown(socket.SHUT_RDWR)
                if how == "before":
                    break
                target.sendall(data)
                if how == "after":
                    # It ends the session in its own time, when the commit is done.
                    target.shutdown(socket.SHUT_WR)
                    return
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cutter(schema: Schema) -> Iterator[Cutter]:
    with tempfile.TemporaryDirectory(prefix="cut-") as folder:
        os.chmod(folder, 0o755)
        made = Cutter(folder, schema.socket)
        schema.url = schema.url.replace(os.path.dirname(schema.socket), folder)
        yield made
        made.close()


def test_a_commit_that_took_place_though_nobody_said_so(cutter: Cutter, schema: Schema, opened: Opener) -> None:
    store = opened(schema)
    store.append([submission(job(1))]).result(60)
    cutter.cut = "after"
    assert store.append([submission(job(2))]).result(60) == [2]
    assert cutter.cut == ""
    assert store.append([submission(job(3))]).result(60) == [3]
    assert [each.number for each in store.load().jobs] == [1, 2, 3]
    assert store.verify() == []
    store.close()


def test_a_commit_that_did_not_take_place(cutter: Cutter, schema: Schema, opened: Opener) -> None:
    store = opened(schema)
    store.append([submission(job(1))]).result(60)
    cutter.cut = "before"
    with pytest.raises(StoreUnreachable):
        store.append([submission(job(2))]).result(60)
    assert store.append([submission(job(2))]).result(60) == [2]
    assert [each.number for each in store.load().jobs] == [1, 2]
    assert store.verify() == []
    store.close()


def test_connections_that_broke_meanwhile_are_replaced(schema: Schema, opened: Opener) -> None:
    store = opened(schema)
    store.append([submission(job(1))]).result(60)
    assert store.job(1) == job(1)
    ended = schema.execute(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'stretto'"
    )
    # Sessions of stores that were closed just now may be among them.
    assert len(ended) >= 2
    assert store.job(1) == job(1)
    assert store.append([submission(job(2))]).result(60) == [2]


def test_whoever_lost_the_lock_meanwhile_does_not_write(schema: Schema, opened: Opener) -> None:
    first = opened(schema, busy_s=0.2)
    first.append([submission(job(1))]).result(60)
    schema.execute("SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE application_name = 'stretto'")
    second = opened(schema, busy_s=0.2)
    second.append([submission(job(2))]).result(60)
    with pytest.raises(Exception, match="in use by another server"):
        first.append([submission(job(3))]).result(60)
    second.close()
    assert first.append([submission(job(3))]).result(60) == [3]


def test_a_server_that_is_not_there_is_named_without_the_password() -> None:
    with pytest.raises(StoreUnreachable) as caught:
        Store.open("postgresql://ada:geheim@127.0.0.1:1/db", clock=lambda: 0.0)
    assert "127.0.0.1" in caught.value.message
    assert "geheim" not in str(caught.value)
