"""The live view, driven by its pilot against a real server; and once in a real terminal."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from servers import DEADLINE_S, Server, until
from stretto.cli.live import Live
from stretto.cli.options import Connection


def seen(app: Live, name: str) -> str:
    return str(app.query_one(f"#{name}", Static).content)


def drive(server: Server, play: Callable[[Live, Pilot[None]], Awaitable[None]]) -> None:
    async def played() -> None:
        app = Live(Connection(data=server.data))
        async with asyncio.timeout(DEADLINE_S), app.run_test(size=(80, 24)) as pilot:
            await play(app, pilot)

    asyncio.run(played())


async def comes(pilot: Pilot[None], look: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < end_s, "it was never shown"
        await pilot.pause(0.05)


def test_keys(server: Server) -> None:
    with server.client() as client:
        job = client.submit({"run": ["sleep", "600"], "name": "watched", "elastic": {"max": 2}, "level": "restart"})
        until(lambda: client.job(job).phase == "running")

        async def play(app: Live, pilot: Pilot[None]) -> None:
            table = app.query_one(DataTable)
            await comes(pilot, lambda: "devices · 1 running · 0 queued" in seen(app, "use"))
            await comes(pilot, lambda: f" {job.id} " in seen(app, "nodes"))
            assert table.row_count == 1
            assert [str(cell) for cell in table.get_row_at(0)][:3] == [job.id, "watched", "running"]
            await pilot.press("w")
            await comes(pilot, lambda: "devices_total 8" in seen(app, "told"))
            await pilot.press("plus")
            await comes(pilot, lambda: "may have 1..3 workers" in seen(app, "told"))
            assert client.job(job).max_workers == 3
            await pilot.press("minus")
            await comes(pilot, lambda: "may have 1..2 workers" in seen(app, "told"))
            await pilot.press("s")
            await comes(pilot, lambda: str(table.get_row_at(0)[2]) == "suspended")
            await pilot.press("s")
            await comes(pilot, lambda: str(table.get_row_at(0)[2]) in ("queued", "running"))
            await pilot.press("c", "n")
            assert client.job(job).wish == "run"
            await pilot.press("c", "y")
            await comes(pilot, lambda: table.row_count == 0)
            await comes(pilot, lambda: "0 running" in seen(app, "use"))

        drive(server, play)
        assert client.wait(job, timeout_s=DEADLINE_S).phase == "cancelled"


def test_a_server_that_goes_and_comes_back(server: Server) -> None:
    async def play(app: Live, pilot: Pilot[None]) -> None:
        await asyncio.to_thread(server.kill)
        await comes(pilot, lambda: "trying again" in seen(app, "use"))
        await asyncio.to_thread(server.start)
        await comes(pilot, lambda: "0/8 devices" in seen(app, "use"))

    drive(server, play)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux")
def test_in_a_terminal_of_80_by_24(server: Server, tmp_path: Path) -> None:
    def tmux(*words: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    with server.client() as client:
        job = client.submit({"run": ["sleep", "600"], "name": "drawn"})
        view = f"STRETTO_HOME={server.data} {sys.executable} -m stretto.cli top"
        tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", view)
        try:
            until(lambda: "running" in tmux("capture-pane", "-p") and "drawn" in tmux("capture-pane", "-p"))
            screen = tmux("capture-pane", "-p").splitlines()
            assert len(screen) <= 24
            assert any("quit" in line for line in screen), "the keys are in sight"
            tmux("send-keys", "q")
            until(lambda: not _alive(tmp_path / "tmux"))
        finally:
            if _alive(tmp_path / "tmux"):
                tmux("kill-server")
            client.cancel(job)


def _alive(path: Path) -> bool:
    command = ["tmux", "-S", str(path), "list-sessions"]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0
