"""How many streams a user may have open: of events and of logs together, whatever the token."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from api_client import PATIENCE_S, Api, eventually, serving
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from stretto.api.bounds import Limits
from stretto.client import Client
from stretto.errors import TooMany, Unavailable

MOST = Limits.here().streams_per_user


def listening(api: Api) -> socket.socket:
    """A stream of events that has begun."""
    host, _, port = api.address.partition(":")
    made = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    head = ["GET /v1/events/stream HTTP/1.1", f"Host: {api.address}", f"Authorization: Bearer {api.token}"]
    made.sendall("\r\n".join([*head, "", ""]).encode())
    said = made.recv(65536)
    if b" 200 " not in said.partition(b"\r\n")[0]:
        made.close()
        raise AssertionError(said)
    return made


def following(api: Api, job: str) -> contextlib.ExitStack:
    """A log that is followed."""
    headers = {"Authorization": f"Bearer {api.token}"}
    made = contextlib.ExitStack()
    made.enter_context(connect(api.websocket(f"/v1/jobs/{job}/logs/follow"), additional_headers=headers, proxy=None))
    return made


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[tuple[Api, Api, str, list[Callable[[], None]]]]:
    """Ana with as many streams as she may have, some of them of logs; Ben; a job; how to close them."""
    with serving(tmp_path) as api, contextlib.ExitStack() as stack:
        job = api.submit("sleep 600")["id"]
        api.until(job, "running")
        ana, ben = (
            api.as_(api.post("/v1/tokens", {"user": name, "role": "user"}).json["secret"]) for name in ("ana", "ben")
        )
        close: list[Callable[[], None]] = []
        for number in range(MOST):
            made = following(ana, job) if number % 16 == 1 else listening(ana)
            stack.callback(made.close)
            close.append(made.close)
        another = api.post("/v1/tokens", {"user": "ana", "role": "viewer"}).json["secret"]
        yield api.as_(another), ben, job, close


def refused(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except AssertionError as error:
        return b" 429 " in error.args[0]
    except InvalidStatus as error:
        return error.response.status_code == 429
    return False


def test_one_more_is_refused_to_that_user_alone(busy: tuple[Api, Api, str, list[Callable[[], None]]]) -> None:
    ana, ben, job, close = busy
    assert refused(lambda: listening(ana))
    assert refused(lambda: following(ana, job))
    assert ana.get("/v1/jobs").status == 200, "all else is answered"
    listening(ben).close()
    following(ben, job).close()
    # Two that end make room for two, of whichever kind.
    close[0]()
    close[1]()
    with contextlib.ExitStack() as stack:

        def again(ask: Callable[[Api], contextlib.ExitStack | socket.socket]) -> bool:
            with contextlib.suppress(AssertionError, InvalidStatus):
                stack.callback(ask(ana).close)
                return True
            return False

        eventually(lambda: again(listening))
        eventually(lambda: again(lambda api: following(api, job)))
        assert refused(lambda: listening(ana))


def test_it_is_one_error(busy: tuple[Api, Api, str, list[Callable[[], None]]]) -> None:
    """At once, though a client otherwise waits for a server that cannot do something now."""
    assert not issubclass(TooMany, Unavailable), "which clients wait for"
    ana, _, job, _ = busy
    with Client(ana.url, ana.token) as client:
        with pytest.raises(TooMany, match=f"ana has {MOST} streams open") as told:
            next(iter(client.watch(after=0)))
        assert told.value.hint
        with pytest.raises(TooMany):
            next(iter(client.follow(job)))
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", "logs", "-f", job, "--server", ana.url],
        env={"STRETTO_TOKEN": str(ana.token), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == TooMany.exit_code
    assert f"{MOST} streams" in done.stderr
