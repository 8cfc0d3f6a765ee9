"""Where a controller listens: with whose key, under which names, and for pages of nobody else's."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from memory_api import MemoryApi
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from keys import impostor, make, needs_openssl
from stretto import pins
from stretto.api import tls
from stretto.api.hosts import Hosts
from stretto.api.serving import HttpServer, bind
from stretto.errors import Conflict
from stretto.kubernetes import own_key
from stretto.kubernetes.kinds import SECRETS
from stretto.kubernetes.serving import Parts, application

PATIENCE_S = 30.0
NAMESPACE = "stretto-system"
JOIN = "/v1/jobs/default/a/join"


def folder(path: Path, name: str) -> Path:
    made = path / name
    made.mkdir()
    return made


@needs_openssl
def test_all_controllers_show_the_same_key(tmp_path: Path) -> None:
    """Also those that start at the same time, and those that come later."""

    async def story() -> None:
        api = MemoryApi()

        async def start(name: str) -> str:
            found = await own_key.found_or_made(api, NAMESPACE, ["a.example"], folder(tmp_path, name))
            assert Path(found.key).stat().st_mode & 0o777 == 0o600
            return found.pin

        shown = {*await asyncio.gather(start("one"), start("two")), await start("later")}
        assert len(shown) == 1
        (key,) = [key for key in api.objects if key[2] == own_key.NAME]
        assert api.objects[key]["type"] == "kubernetes.io/tls"
        assert api.objects[key]["data"].keys() == {"tls.crt", "tls.key"}

    asyncio.run(story())


@needs_openssl
@pytest.mark.parametrize("data", [{}, {"tls.crt": "", "tls.key": ""}, {"tls.crt": "!", "tls.key": "!"}])
def test_a_secret_that_is_spoilt_is_said(tmp_path: Path, data: dict[str, str]) -> None:
    api = MemoryApi()
    api.put(SECRETS, {"metadata": {"name": own_key.NAME}, "data": data}, NAMESPACE)
    with pytest.raises(Conflict, match=own_key.NAME):
        asyncio.run(own_key.found_or_made(api, NAMESPACE, [], tmp_path))


def play(story: Callable[[int], Awaitable[None]], key: tls.Tls | None = None) -> None:
    async def played() -> None:
        with bind("127.0.0.1", 0) as listening:
            hosts = Hosts("127.0.0.1", frozenset({"stretto-controller.stretto-system.svc"}))
            server = HttpServer(application(Parts(lambda: False), hosts), listening, tls=key)
            await server.start()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await story(listening.getsockname()[1])
            finally:
                await server.stop()

    asyncio.run(played())


def status_of(port: int, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection(f"127.0.0.1:{port}", timeout=PATIENCE_S)
    connection.request("GET", path, headers=headers)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def test_host_and_origin_are_checked() -> None:
    async def story(port: int) -> None:
        for path in ("/healthz", "/readyz", "/metrics", "/nothing"):
            assert await asyncio.to_thread(status_of, port, path, Host="evil.example") == 421
        for host in (f"127.0.0.1:{port}", "localhost", "stretto-controller.stretto-system.svc:8080", "[::1]:1"):
            assert await asyncio.to_thread(status_of, port, "/healthz", Host=host) == 200
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}{JOIN}", origin=Origin("http://evil.example"), proxy=None)
        assert refused.value.response.status_code == 403
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{port}{JOIN}", additional_headers={"Host": "evil.example"}, proxy=None)
        async with connect(f"ws://127.0.0.1:{port}{JOIN}", proxy=None) as worker:
            await worker.wait_closed()
            assert worker.close_code == 1013, "this one does not lead: it comes again"

    play(story)


@needs_openssl
def test_workers_are_let_in_by_its_key(tmp_path: Path) -> None:
    key = tls.made(tmp_path)
    other = make(tmp_path, "other")

    async def story(port: int) -> None:
        async with connect(f"wss://127.0.0.1:{port}{JOIN}", ssl=pins.context(key.pin), proxy=None) as worker:
            await worker.wait_closed()
            assert worker.close_code == 1013
        assert await asyncio.to_thread(status_of, port, "/healthz") == 400
        with impostor(other) as wrong:
            with pytest.raises(ssl.SSLError, match="another key"):
                await connect(f"wss://127.0.0.1:{wrong.port}{JOIN}", ssl=pins.context(key.pin), proxy=None)
            assert await asyncio.to_thread(wrong.met.acquire, timeout=PATIENCE_S)
            assert not wrong.heard

    play(story, key)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port", "0"], "--tls"),
        (["--tls", "--url", "ws://x:1"], "wss://"),
        (["--tls-cert", "x"], "--tls-key"),
        (["--url", "http://x"], "wss://"),
    ],
    ids=["everywhere", "ws", "half", "http"],
)
def test_what_the_command_line_refuses(tmp_path: Path, words: list[str], told: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", "controller", "--kubeconfig", str(tmp_path / "none"), *words],
        capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert told in done.stderr
