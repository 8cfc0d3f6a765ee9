"""A server that speaks TLS: its key, who is let in, and what others are told."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import socket
import ssl
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from api_client import eventually, options, serving
from msgspec.structs import replace
from test_api_bounds import GET, LONG, PATIENCE_S, application

from keys import make, needs_openssl
from stretto import pins
from stretto.api import tls
from stretto.api.bounds import Limits
from stretto.api.process import down, running, serve
from stretto.api.serving import HttpServer, bind
from stretto.client import Client
from stretto.errors import MissingExtra, StrettoError, UsageError

pytestmark = needs_openssl


def test_its_key_is_made_once_and_kept(tmp_path: Path) -> None:
    with serving(tmp_path, tls=True):
        first = running(tmp_path)
        assert first is not None
        assert first.url.startswith("https://")
        assert first.pin == pins.of_file((tmp_path / "tls.crt").read_text())
        for name in ("tls.key", "tls.crt", "server.json"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
        port = int(first.url.rpartition(":")[2])
        assert pins.shown_by("127.0.0.1", port, PATIENCE_S) == first.pin
        certificate = (tmp_path / "tls.crt").read_bytes()
        down(tmp_path)
        serve(options(tmp_path, tls=True), detach=True)
        again = running(tmp_path)
        assert again is not None
        assert again.pin == first.pin
        assert (tmp_path / "tls.crt").read_bytes() == certificate
        with Client(data=tmp_path) as client:
            assert client.policy().name


def test_a_certificate_is_renewed_for_the_same_key(tmp_path: Path) -> None:
    made = tls.made(tmp_path)
    good = (tmp_path / "tls.crt").read_bytes()
    make(tmp_path, "soon", days=5, key=tmp_path / "tls.key").certificate.rename(tmp_path / "tls.crt")
    soon = (tmp_path / "tls.crt").read_bytes()
    assert tls.made(tmp_path).pin == made.pin
    renewed = (tmp_path / "tls.crt").read_bytes()
    assert renewed not in (good, soon)
    assert tls.made(tmp_path).pin == made.pin
    assert (tmp_path / "tls.crt").read_bytes() == renewed, "and not again"
    # A key that somebody has replaced: the certificate is of another one.
    make(tmp_path, "other").key.rename(tmp_path / "tls.key")
    assert tls.made(tmp_path).pin != made.pin


def test_programs_that_pin_nothing_may_trust_the_certificate(tmp_path: Path) -> None:
    with serving(tmp_path, tls=True, hosts=("stretto.example",)) as api:
        port = int(api.url.rpartition(":")[2])
        trusting = ssl.create_default_context(cafile=str(tmp_path / "tls.crt"))
        for name in ("localhost", "127.0.0.1", "stretto.example"):
            with (
                socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
                trusting.wrap_socket(plain, server_hostname=name) as connection,
            ):
                connection.sendall(f"GET /healthz HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n".encode())
                assert b" 200 " in connection.recv(65536)


def test_given_files(tmp_path: Path) -> None:
    data = tmp_path / "data"
    pair = make(tmp_path, "given")
    with serving(data, tls_files=(str(pair.certificate), str(pair.key))):
        info = running(data)
        assert info is not None
        assert info.pin == pair.pin
        assert not (data / "tls.key").exists()
        with Client(data=data) as client:
            assert client.policy().name


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    pair, other = make(tmp_path, "given"), make(tmp_path, "other")
    for certificate, key in (
        (pair.certificate, other.key), (pair.key, pair.key), (pair.certificate, tmp_path / "none"),
        (tmp_path, pair.key),
    ):  # fmt: skip
        with pytest.raises(StrettoError) as refused:
            serve(options(tmp_path / "data", tls_files=(str(certificate), str(key))), detach=True)
        assert (refused.value.code, refused.value.exit_code) == ("usage", 2)
        assert "--tls-cert" in refused.value.message
        assert running(tmp_path / "data") is None


def test_a_key_with_a_passphrase_asks_nobody(tmp_path: Path) -> None:
    pair = make(tmp_path, "given")
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkey", "-aes256", "-passout", "pass:1234", "-in", str(pair.key), "-out", str(locked)]
    assert os.spawnvp(os.P_WAIT, command[0], command) == 0
    with pytest.raises(UsageError, match="passphrase"):
        tls.given(pair.certificate, locked)


def test_without_openssl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("openssl") is None
    with pytest.raises(MissingExtra, match="openssl") as refused:
        tls.made(tmp_path)
    assert "--tls-cert" in refused.value.hint
    assert os.listdir(tmp_path) == []


def test_beyond_this_machine(tmp_path: Path) -> None:
    """With TLS it needs no further word; without, it does, and TLS is what it is told."""
    with pytest.raises(StrettoError) as refused:
        serve(options(tmp_path, host="0.0.0.0"), detach=True)
    assert "--tls" in refused.value.hint
    with serving(tmp_path, host="0.0.0.0", tls=True), Client(data=tmp_path) as client:
        assert client.policy().name


def test_plain_http_is_told_what_is_spoken(tmp_path: Path) -> None:
    with serving(tmp_path, tls=True) as api:
        connection = http.client.HTTPConnection(api.address, timeout=PATIENCE_S)
        connection.request("POST", "/v1/jobs", b"{}", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["code"] == "speaks-tls"
        connection.close()
        with pytest.raises(UsageError, match="speaks TLS") as refused:
            Client(api.url.replace("https", "http"), api.token).policy()
        assert "https://" in refused.value.hint


TRAINING = """
import os, time
import torch
import stretto.torch as stretto
from torch.utils.data import TensorDataset

job = stretto.join()
model = job.model(torch.nn.Linear(4, 1))
optimizer = job.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for batch in job.batches(TensorDataset(torch.randn(64, 4)), size=16, epochs=10**6):
    optimizer.zero_grad(); model(batch[0]).square().mean().backward(); optimizer.step()
    if job.leader:
        with open("sizes", "a") as sizes:
            print(job.size, file=sizes)
    if os.path.exists("go"):
        job.stop()
    time.sleep(0.02)
"""


def test_an_elastic_job_trains_and_resizes_and_outlives_a_change_to_tls(tmp_path: Path) -> None:
    """It begins under a server without TLS, whose next has it, and grows there; the one after that has another key."""
    work, data = tmp_path / "work", tmp_path / "data"
    work.mkdir()
    (work / "train.py").write_text(TRAINING)
    file = {
        "run": f"cd {work} && exec {sys.executable} train.py", "elastic": {"min": 1, "max": 1, "explore": False},
        "env": {"OMP_NUM_THREADS": "1"},
    }  # fmt: skip

    def sizes() -> list[str]:
        return (work / "sizes").read_text().split() if (work / "sizes").exists() else []

    def goes_on(workers: int) -> None:
        """The server hears of steps, and they are made by so many."""
        with Client(data=data) as client:
            before = client.job(1)["steps"] or 0
            eventually(lambda: (client.job(1)["steps"] or 0) > before + 5 and sizes()[-3:] == [str(workers)] * 3)

    with serving(data) as api:
        with Client(data=data) as client:
            client.submit(file)
        goes_on(1)
        down(data)
        port = int(api.url.rpartition(":")[2])
        serve(options(data, port=port, tls=True), detach=True)
        goes_on(1)
        with Client(data=data) as client:
            client.scale(1, 3, 3)
        goes_on(3)
        with Client(data=data) as client:
            client.scale(1, 2, 2)
        goes_on(2)
        down(data)
        (data / "tls.key").unlink()
        serve(options(data, port=port, tls=True), detach=True)
        goes_on(2)
        (work / "go").touch()
        with Client(data=data) as client:
            assert client.wait(1, timeout_s=PATIENCE_S).phase == "succeeded"
            assert client.job(1)["starts"] == 1


# Those who do not come to the end of their handshake.


def play(limits: Limits, folder: Path, story: Callable[[int, ssl.SSLContext], Awaitable[None]]) -> None:
    made = tls.made(folder)

    async def played() -> None:
        release = asyncio.Event()
        with bind("127.0.0.1", 0) as listening:
            server = HttpServer(application(release), listening, limits, made)
            await server.start()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await story(listening.getsockname()[1], pins.context(made.pin))
            finally:
                await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(played())


async def answered(port: int, context: ssl.SSLContext) -> bool:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(GET)
    said = await reader.readuntil(b"hello")
    writer.transport.abort()
    return b" 200 " in said


HALF_A_HANDSHAKE = bytes.fromhex("16030100ff010000fb0303")


@pytest.mark.parametrize("says", [b"", HALF_A_HANDSHAKE], ids=["nothing", "half a handshake"])
def test_a_handshake_has_a_few_seconds(tmp_path: Path, says: bytes) -> None:
    async def story(port: int, context: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(says)
        assert await _is_gone(reader)
        writer.close()

    play(replace(LONG, header_s=0.3), tmp_path, story)


@pytest.mark.parametrize("says", [b"", HALF_A_HANDSHAKE], ids=["nothing", "half a handshake"])
def test_who_does_not_finish_it_locks_nobody_out(tmp_path: Path, says: bytes) -> None:
    async def story(port: int, context: ssl.SSLContext) -> None:
        assert await answered(port, context)
        before = _sockets()
        waiting = []
        for _ in range(40):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(says)
            waiting.append((reader, writer))
        assert await answered(port, context)
        for reader, _ in waiting[:30]:
            assert await _is_gone(reader)
        for _, writer in waiting:
            writer.transport.abort()
        while _sockets() > before:
            await asyncio.sleep(0)

    play(replace(LONG, handshakes=8), tmp_path, story)


def _sockets() -> int:
    return sum(os.path.realpath(f"/proc/self/fd/{name}").count("socket:") for name in os.listdir("/proc/self/fd"))


async def _is_gone(reader: asyncio.StreamReader) -> bool:
    try:
        while await reader.read(65536):
            pass
    except ConnectionError:
        pass
    return True
