"""Local users at the server's Unix socket: the kernel says who they are."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_client import PATIENCE_S, Api, kill, options, serving

from stretto.api import local
from stretto.api.auth import Auth, Caller
from stretto.api.process import running, serve
from stretto.client import AsyncClient, Client
from stretto.errors import Denied, StrettoError, Unavailable

ELSE = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short enough for a socket, and open to everybody."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRETTO_TOKEN", raising=False)


def near(folder: Path) -> str:
    return f"unix:{folder}/data/socket"


def test_the_servers_own_account_needs_no_token(folder: Path) -> None:
    with serving(folder / "data") as api:
        info = running(folder / "data")
        assert info is not None
        assert info.socket == str(folder / "data" / "socket")
        with Client(near(folder)) as client:
            job = client.run({"run": "echo hello"}, timeout_s=PATIENCE_S)
            assert (job.phase, job.user) == ("succeeded", pwd.getpwuid(os.geteuid()).pw_name)
            assert "".join(piece.text for piece in client.follow(job)) == "hello\n"
            assert client.tokens(), "as an admin"

        async def again() -> None:
            async with AsyncClient(near(folder)) as client:
                job = await client.run({"run": "echo again"}, timeout_s=PATIENCE_S)
                assert "".join([piece.text async for piece in client.follow(job)]) == "again\n"

        asyncio.run(again())
        assert api.get("/v1/jobs", user=job.user).json["items"]
    assert not (folder / "data" / "socket").exists(), "it goes with the server"


def test_a_token_that_is_sent_is_more_than_the_account(folder: Path) -> None:
    with serving(folder / "data") as api:
        viewer = api.post("/v1/tokens", {"user": "vera", "role": "viewer"}).json["secret"]
        with Client(near(folder), viewer) as client, pytest.raises(Denied, match="viewer"):
            client.submit({"run": "true"})
        with Client(near(folder), "stretto_nothing") as client, pytest.raises(Denied, match="not known"):
            client.policy()


def test_over_the_network_nobody_is_an_account(folder: Path) -> None:
    """Also where the server and whoever asks are the same one."""
    with serving(folder / "data") as api:
        assert Api(api.url, None).get("/v1/jobs").status == 401


def test_host_and_origin_are_checked_there_too(folder: Path) -> None:
    with serving(folder / "data"):
        for head, status in (
            ("Host: evil.example", b"421"),
            ("Host: localhost\r\nOrigin: http://evil.example", b"403"),
        ):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(PATIENCE_S)
                connection.connect(f"{folder}/data/socket")
                connection.sendall(f"POST /v1/jobs HTTP/1.1\r\n{head}\r\nContent-Length: 0\r\n\r\n".encode())
                assert connection.recv(65536).split()[1] == status


@needs_root
def test_another_account_is_refused_and_told_what_to_do(folder: Path) -> None:
    """At a socket that everybody reaches; with a token it is let in."""
    path = folder / "open.sock"
    with serving(folder / "data", socket=str(path)) as api:
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        assert not (folder / "data" / "socket").exists()
        told = as_somebody_else(path, "/v1/jobs")
        assert told["status"] == 401
        assert told["json"]["code"] == "unauthenticated"
        assert f"uid {ELSE}" in told["json"]["detail"]
        assert "stretto token create" in told["json"]["hint"]
        secret = api.post("/v1/tokens", {"user": "otto", "role": "viewer"}).json["secret"]
        assert as_somebody_else(path, "/v1/jobs", secret)["status"] == 200
        assert as_somebody_else(path, "/healthz")["status"] == 200


ASK = """
import http.client, json, os, socket, sys
connection = http.client.HTTPConnection("localhost")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
headers = {"Authorization": f"Bearer {sys.argv[3]}"} if sys.argv[3] else {}
connection.request("GET", sys.argv[2], headers=headers)
answer = connection.getresponse()
print(json.dumps({"status": answer.status, "json": json.loads(answer.read())}))
"""


def as_somebody_else(path: Path, target: str, token: str = "") -> dict[str, object]:
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-c", ASK, str(path), target, token], user=ELSE, group=ELSE, extra_groups=[],
        capture_output=True, text=True, timeout=PATIENCE_S, check=True, cwd="/",
        env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
    )  # fmt: skip
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_who_an_account_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert local.user_of_uid(os.geteuid()) == (pwd.getpwuid(os.geteuid()).pw_name, "admin")
    for uid in (os.geteuid() + 1, 65534, 2**31 - 1):
        with pytest.raises(Denied, match=str(uid)):
            local.user_of_uid(uid)
    # In a namespace all strangers look like that, the server's own account perhaps among them.
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(Denied):
        local.user_of_uid(65534)


def test_an_account_goes_on_being_who_it_is() -> None:
    """Streams ask again and again; there is no token that could be asked about."""
    auth = Auth(None, time.monotonic)

    async def story() -> None:
        assert await auth.still(Caller("me", "admin", uid=os.geteuid()))
        assert not await auth.still(Caller("me", "admin", uid=os.geteuid() + 1))

    asyncio.run(story())


def test_what_a_killed_server_left_is_replaced(folder: Path) -> None:
    with serving(folder / "data"):
        kill(folder / "data")
        assert (folder / "data" / "socket").exists()
        serve(options(folder / "data"), detach=True)
        with Client(near(folder)) as client:
            assert client.policy().name


def test_nothing_else_is_replaced(folder: Path) -> None:
    path = folder / "mine"
    path.write_text("mine")
    with pytest.raises(StrettoError, match="something else") as refused:
        serve(options(folder / "data", socket=str(path)), detach=True)
    assert refused.value.exit_code == 2
    assert path.read_text() == "mine"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(StrettoError, match="another server") as refused:
            serve(options(folder / "data", socket=str(path)), detach=True)
        assert refused.value.code == "occupied"
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert running(folder / "data") is None


def test_a_path_that_is_too_long_for_a_socket(folder: Path) -> None:
    """A data directory there works all the same."""
    data = folder / ("d" * 120)
    with serving(data) as api:
        info = running(data)
        assert info is not None
        assert info.socket == ""
        assert api.get("/v1/jobs").status == 200
    with pytest.raises(StrettoError, match="cannot be made"):
        serve(options(folder / "data", socket=str(data / "socket")), detach=True)


def test_where_nobody_listens(folder: Path) -> None:
    with pytest.raises(Unavailable, match=f"unix:{folder}/none"):
        Client(f"unix:{folder}/none").policy()
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", "ps", "--server", f"unix://{folder}/none"],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == Unavailable.exit_code
