"""Clients of a server that speaks TLS: nobody but the one with the pinned key is talked to, by anything of ours."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keys import Pair, impostor, make, needs_openssl
from servers import DEADLINE_S, Server, running
from stretto.cli.live import Live
from stretto.cli.options import Connection
from stretto.client import AsyncClient, Client, pinned
from stretto.errors import StrettoError, Unavailable, UsageError, WrongKey

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), "--nodes", "1x4", "--tls") as made:
        yield made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture
def elsewhere(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Another user's surroundings: they know the address and have a token."""
    token = (server.data / "token").read_text().strip()
    around = {
        "STRETTO_HOME": str(tmp_path / "none"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "STRETTO_TOKEN": token,
    }
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STRETTO_SERVER", raising=False)
    return {**os.environ, **around}


def key_of(server: Server) -> str:
    told: dict[str, str] = json.loads((server.data / "server.json").read_text())
    return told["pin"]


def stretto(around: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *words], env=around, capture_output=True, text=True, timeout=120,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_everything_works_here(server: Server) -> None:
    """What a client does, with the key out of the data directory: calls, streams of events, followed logs."""
    with server.client() as client:
        job = client.run({"run": "echo hello"}, timeout_s=DEADLINE_S)
        assert job.phase == "succeeded"
        assert "".join(piece.text for piece in client.follow(job)) == "hello\n"

    async def again() -> None:
        async with AsyncClient(data=server.data) as client:
            job = await client.run({"run": "echo again"}, timeout_s=DEADLINE_S)
            assert job.phase == "succeeded"
            assert "".join([piece.text async for piece in client.follow(job)]) == "again\n"

    asyncio.run(again())


def test_the_live_view(server: Server) -> None:
    async def played() -> None:
        app = Live(Connection(data=server.data))
        async with asyncio.timeout(DEADLINE_S), app.run_test(size=(80, 24)) as pilot:
            while "devices" not in str(app.query_one("#use").render()):
                await pilot.pause(0.05)

    asyncio.run(played())


def test_nobody_is_believed_without_a_pin(server: Server, elsewhere: dict[str, str]) -> None:
    with pytest.raises(WrongKey, match="vouches") as refused:
        Client(server.url).policy()
    assert f"stretto login {server.url}" in refused.value.hint
    done = stretto(elsewhere, "ps", "--server", server.url)
    assert done.returncode == WrongKey.exit_code
    assert "stretto login" in done.stderr


def test_login_with_a_fingerprint(server: Server, elsewhere: dict[str, str], tmp_path: Path) -> None:
    done = stretto(elsewhere, "login", server.url, "--fingerprint", "sha256:" + "0" * 64)
    assert done.returncode == WrongKey.exit_code
    assert key_of(server) in done.stderr
    assert not (tmp_path / "config").exists()
    done = stretto(elsewhere, "login", server.url, "--fingerprint", key_of(server), "--json")
    assert json.loads(done.stdout) == {"url": server.url, "key": key_of(server), "pinned": True}
    kept = tmp_path / "config" / "stretto" / "servers.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert stretto(elsewhere, "ps", "--server", server.url + "/").returncode == 0
    with Client(server.url) as client:
        assert client.policy().name
    # Another server's is kept beside it.
    pinned.keep("https://other.example", "sha256:" + "1" * 64)
    assert pinned.key_of(server.url) == key_of(server)
    assert pinned.key_of("https://OTHER.example:443/") == "sha256:" + "1" * 64


def test_login_asks_nobody_who_is_not_there(server: Server, elsewhere: dict[str, str], tmp_path: Path) -> None:
    done = stretto(elsewhere, "login", server.url)
    assert done.returncode == 2
    assert f"--fingerprint {key_of(server)}" in done.stderr
    assert not (tmp_path / "config").exists()
    assert stretto(elsewhere, "login", server.url.replace("https", "http")).returncode == 2


@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_login_asks(server: Server, elsewhere: dict[str, str], answer: str) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "rb+", buffering=0), open(ours, "rb+", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "stretto.cli", "login", server.url], env=elsewhere, stdin=theirs,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        terminal.write(answer.encode() + b"\n")
        said, _ = process.communicate(timeout=DEADLINE_S)
    assert key_of(server) in said
    assert process.returncode == (0 if answer == "y" else WrongKey.exit_code)
    assert pinned.key_of(server.url) == (key_of(server) if answer == "y" else "")


def test_an_address_may_carry_the_key(server: Server, elsewhere: dict[str, str]) -> None:
    assert stretto({**elsewhere, "STRETTO_SERVER": f"{server.url}#{key_of(server)}"}, "ps").returncode == 0
    with Client(f"{server.url}#{key_of(server)}") as client:
        assert client.policy().name
    with pytest.raises(WrongKey, match="another key"):
        Client(f"{server.url}#sha256:{'0' * 64}").policy()
    with pytest.raises(UsageError, match="fingerprint"):
        Client(f"{server.url}#sha256:what")


def _calls(url: str) -> None:
    Client(url, patience_s=20).policy()


def _listens(url: str) -> None:
    next(iter(Client(url).watch(after=0)))


def _follows(url: str) -> None:
    with Client(url)._socket(_anything()):
        pass


def _calls_in_a_loop(url: str) -> None:
    asyncio.run(_async(url, lambda client: client.policy()))


def _listens_in_a_loop(url: str) -> None:
    asyncio.run(_async(url, lambda client: anext(aiter(client.watch(after=0)))))


def _follows_in_a_loop(url: str) -> None:
    async def follow(client: AsyncClient) -> None:
        async with client._socket(_anything()):
            pass

    asyncio.run(_async(url, follow))


async def _async(url: str, ask: Callable[[AsyncClient], object]) -> None:
    async with AsyncClient(url, patience_s=20) as client:
        await ask(client)


def _anything() -> object:
    from stretto.client import calls

    return calls.follow(1, None, None)


def _command_line(url: str) -> None:
    done = stretto(dict(os.environ), "ps", "--server", url)
    assert "Traceback" not in done.stderr
    raise WrongKey(done.stderr) if done.returncode == WrongKey.exit_code else StrettoError(done.stderr)


WAYS = [
    _calls, _listens, _follows, _calls_in_a_loop, _listens_in_a_loop, _follows_in_a_loop, _command_line,
]  # fmt: skip


@pytest.mark.parametrize("ask", WAYS, ids=lambda way: way.__name__)
def test_a_man_in_the_middle_hears_nothing(
    server: Server, elsewhere: dict[str, str], other: Pair, ask: Callable[[str], None]
) -> None:
    """At the address for which another key is pinned. It is one error, at once, which names both keys."""
    with impostor(other) as wrong:
        url = f"https://127.0.0.1:{wrong.port}"
        pinned.keep(url, key_of(server))
        with pytest.raises(WrongKey, match="another key") as refused:
            ask(url)
        assert key_of(server) in refused.value.message
        assert other.pin in refused.value.message
        assert f"stretto login {url}" in str(refused.value)
        assert wrong.met.acquire(timeout=DEADLINE_S)
        assert not wrong.heard


def test_a_file_of_keys_that_is_spoilt_is_not_passed_over(elsewhere: dict[str, str], server: Server) -> None:
    kept = pinned.keep(server.url, key_of(server))
    kept.write_text("{")
    with pytest.raises(UsageError, match=r"servers\.json"):
        Client(server.url)


def test_tls_where_none_is_spoken(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    with running(tmp_path) as plain:
        url = plain.url.replace("http", "https")
        with pytest.raises(Unavailable, match="does not speak TLS"):
            Client(f"{url}#sha256:{'0' * 64}").policy()
        with pytest.raises(Unavailable, match="does not speak TLS"):
            Client(url).policy()
        assert stretto(elsewhere, "login", url).returncode == Unavailable.exit_code


def test_the_key_of_the_data_directory_follows_the_server(tmp_path: Path) -> None:
    """A server with a new key is known at once by those who can read its directory."""
    with running(tmp_path, "--tls") as server:
        before = key_of(server)
        server.kill()
        (server.data / "tls.key").unlink()
        server.start("--port", server.url.rpartition(":")[2])
        assert key_of(server) != before
        with server.client() as client:
            assert client.policy().name


@pytest.fixture(scope="module")
def vouched(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A certificate that this machine trusts, if SSL_CERT_FILE says so."""
    return make(tmp_path_factory.mktemp("given"), "given", more=["-addext", "subjectAltName=IP:127.0.0.1"])


def test_a_certificate_that_is_vouched_for_needs_no_pin(
    tmp_path: Path, elsewhere: dict[str, str], vouched: Pair, other: Pair
) -> None:
    trusting = {**elsewhere, "SSL_CERT_FILE": str(vouched.certificate)}
    with running(tmp_path, "--tls-cert", str(vouched.certificate), "--tls-key", str(vouched.key)) as server:
        token = (server.data / "token").read_text().strip()
        trusting["STRETTO_TOKEN"] = elsewhere["STRETTO_TOKEN"] = token
        assert stretto(trusting, "ps", "--server", server.url).returncode == 0
        done = stretto(trusting, "login", server.url)
        assert (done.returncode, pinned.key_of(server.url)) == (0, "")
        assert "nothing is pinned" in done.stdout
        assert stretto(elsewhere, "ps", "--server", server.url).returncode == WrongKey.exit_code
        # The local command line has the key from the data directory.
        assert server.stretto("ps").returncode == 0
        # It may be pinned all the same, and then no signature counts more.
        assert stretto(trusting, "login", server.url, "--fingerprint", vouched.pin).returncode == 0
        assert pinned.key_of(server.url) == vouched.pin
        assert stretto(elsewhere, "ps", "--server", server.url).returncode == 0
        pinned.keep(server.url, other.pin)
        done = stretto(trusting, "ps", "--server", server.url)
        assert done.returncode == WrongKey.exit_code
        assert other.pin in done.stderr
