"""`notify` reaches nobody whom its submitter could not reach: checked where it connects, whatever a name says."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from stretto.errors import Denied, UsageError
from stretto.jobs import events as e
from stretto.jobs.model import Context, Job
from stretto.server.notifying import Notifier
from stretto.server.reaching import Reach

PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::1.1.1.1"]
PRIVATE = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:80ff:fffe",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_reached(address: str) -> None:
    assert Reach().allows(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_others_are_not_until_they_are_named(address: str) -> None:
    found = ipaddress.ip_address(address)
    assert not Reach().allows(found)
    assert not Reach(["203.0.113.0/24"]).allows(found)
    assert Reach(["0.0.0.0/0", "::/0"]).allows(found)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.1", "2130706433", "0x7f000001", "::1"])
def test_it_is_the_address_behind_the_name_that_counts(host: str) -> None:
    with pytest.raises(Denied):
        asyncio.run(Reach().find(host, 80))
    assert ipaddress.ip_address(asyncio.run(Reach(["127.0.0.0/8", "::1"]).find(host, 80))).is_loopback


@pytest.mark.parametrize("text", ["", "x", "10.0.0.0/99"])
def test_what_is_no_network_is_said(text: str) -> None:
    with pytest.raises(UsageError):
        Reach([text])


class Listener:
    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heard: list[bytes] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(self.answer)
            while self.answer.endswith(b"x"):
                # Without end: whoever read it all would never be done.
                writer.write(b"x" * 2**16)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def listening(answer: bytes) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener(answer)
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    async with server:
        yield listener, server.sockets[0].getsockname()[1]


async def told(address: str, reach: Reach) -> None:
    """Until it was told, or given up."""
    job = Job(
        number=1, name="a", user="me", submitted_s=1.0, spec={"notify": [address]}, context=Context(cwd="/"),
        level="rigid",
    )  # fmt: skip
    spawned: list[Coroutine[Any, Any, None]] = []
    event = e.Interrupted(cause="preempted", lost_s=1.0, text="", by=())
    Notifier(spawned.append, reach)(e.Recorded(seq=1, at_s=1.0, job=1, event=event), job)
    async with asyncio.timeout(30):
        await spawned[0]


def test_this_machine_is_not_asked_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with listening(b"HTTP/1.1 204 No Content\r\n\r\n") as (listener, port):
            for host in ("127.0.0.1", "localhost", "2130706433"):
                await told(f"http://{host}:{port}/", Reach())
            assert listener.heard == []

    with caplog.at_level(logging.WARNING):
        asyncio.run(story())
    assert caplog.text.count("--notify-to") == 3


def test_the_name_is_kept_and_an_answer_without_end_is_not_read() -> None:
    async def story() -> None:
        async with listening(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nx") as (listener, port):
            await told(f"http://localhost:{port}/hook", Reach(["127.0.0.1"]))
            assert len(listener.heard) == 1
            assert listener.heard[0].startswith(b"POST /hook HTTP/1.1\r\n")
            assert f"host: localhost:{port}\r\n".encode() in listener.heard[0].lower()

    asyncio.run(story())


def test_nobody_sends_us_elsewhere() -> None:
    async def story() -> None:
        async with listening(b"HTTP/1.1 204 No Content\r\n\r\n") as (other, elsewhere):
            away = f"HTTP/1.1 307 Away\r\nLocation: http://127.0.0.1:{elsewhere}/\r\nContent-Length: 0\r\n\r\n"
            async with listening(away.encode()) as (first, port):
                telling = asyncio.create_task(told(f"http://127.0.0.1:{port}/", Reach(["127.0.0.1"])))
                while len(first.heard) < 2 and not telling.done():
                    # It was not content with that answer, and asks the same one again.
                    await asyncio.sleep(0.01)
                telling.cancel()
                await asyncio.wait([telling])
            assert other.heard == []

    asyncio.run(story())
