"""The clients against a real server."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from servers import DEADLINE_S, Server, until
from stretto.client import AsyncClient, Client
from stretto.errors import Conflict, Denied, Impossible, NotFound, SpecError, Unavailable, UsageError

FOREVER = ["sleep", "600"]


def waiting(go: Path) -> str:
    """A command that ends once this file is there."""
    return f"echo begun; while [ ! -e '{go}' ]; do sleep 0.05; done; echo over"


def test_a_job_from_submission_to_its_end(server: Server) -> None:
    with server.client() as stretto:
        job = stretto.submit({"run": "echo hello; exit 3", "name": "ends"}, env={"PATH": "/usr/bin:/bin"})
        assert (job.name, job.ended) == ("ends", False)
        ended = stretto.wait(job, timeout_s=DEADLINE_S)
        assert (ended.phase, ended.exit_code, ended.succeeded) == ("failed", 3, False)
        assert stretto.wait("ends").number == job.number, "one that has ended is there at once"
        assert stretto.logs(job) == "hello\n"
        assert stretto.logs(job, worker="w0", tail=1) == "hello\n"
        assert [piece.text for piece in stretto.follow(job)] == ["hello\n"]
        kinds = [event.kind for event in stretto.events(job)]
        assert kinds[0] == "submitted"
        assert kinds[-1] == "ended"
        assert stretto.why(job).phase == "failed"


def test_the_same_submission_twice_is_one_job(server: Server) -> None:
    with server.client() as stretto:
        first = stretto.submit({"run": "true"}, key="the-same", env={})
        assert stretto.submit({"run": "true"}, key="the-same", env={}).number == first.number
        with pytest.raises(Conflict):
            stretto.submit({"run": "false"}, key="the-same", env={})


def test_what_the_job_takes_along(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("MY_SECRET", "x")
    with server.client() as stretto:
        job = stretto.run({"run": "pwd; echo $LANG $MY_SECRET."}, timeout_s=DEADLINE_S)
        assert stretto.logs(job) == f"{tmp_path}\nC.UTF-8 .\n"


def test_changes(server: Server) -> None:
    with server.client() as stretto:
        job = stretto.submit({"run": FOREVER, "elastic": {"min": 1, "max": 2}, "level": "restart"}, env={})
        until(lambda: len(stretto.job(job).workers) == 2)
        assert stretto.scale(job, 1, 4).max_workers == 4
        assert stretto.scale(job, max=3).min_workers == 1
        assert stretto.job(job).max_workers == 3
        stretto.suspend(job)
        until(lambda: stretto.job(job).phase == "suspended")
        stretto.resume(job)
        until(lambda: stretto.job(job).phase == "running")
        stretto.cancel(job)
        assert stretto.wait(job, timeout_s=DEADLINE_S).phase == "cancelled"


def test_lists(server: Server) -> None:
    with server.client() as stretto:
        numbers = [stretto.submit({"run": "true", "labels": {"of": "lists"}}, env={}).number for _ in range(5)]
        assert [job.number for job in stretto.jobs(labels={"of": "lists"})] == numbers[::-1]
        assert [job.number for job in stretto.jobs(labels={"of": "lists"}, limit=2)] == numbers[:-3:-1]
        assert not list(stretto.jobs(user="nobody"))


def test_the_cluster(server: Server) -> None:
    with server.client() as stretto:
        names = [node.name for node in stretto.nodes()]
        assert len(names) == 2
        assert stretto.drain(names[0]).drained
        assert [node.drained for node in stretto.nodes()] == [True, False]
        assert not stretto.undrain(names[0]).drained
        before = stretto.policy()
        assert stretto.set_policy("fifo").name == "fifo"
        assert stretto.set_policy(before.name, before.options, placement=before.placement) == before
        assert stretto.cluster().devices == 8
        assert stretto.forecast().at_s > 0
        preview = stretto.dry_run({"run": "true", "name": "never"})
        assert preview.job["name"] == "never"
        assert not list(stretto.jobs(name="never"))


def test_what_was_learned(server: Server) -> None:
    run = "echo 'a/b ü'"
    with server.client() as stretto:
        stretto.run({"run": run, "hyperparameters": {"epochs": 3}}, timeout_s=DEADLINE_S)
        assert [one.name for one in stretto.classes("echo 'a/b*")] == [run]
        assert stretto.job_class(run)["variants"][0]["hyperparameters"] == {"epochs": 3.0}

    async def play() -> None:
        async with AsyncClient(data=server.data) as stretto:
            assert [one.name for one in await stretto.classes("echo 'a/b*")] == [run]
            assert (await stretto.job_class(run)).runs == 1
            await stretto.forget_class(run)
            assert await stretto.classes("echo 'a/b*") == []
            with pytest.raises(NotFound):
                await stretto.job_class(run)

    asyncio.run(play())


def test_tokens(server: Server) -> None:
    with server.client() as stretto:
        made = stretto.create_token("ann", "viewer")
        with Client(server.url, made["secret"]) as viewer:
            assert viewer.nodes()
            with pytest.raises(Denied):
                viewer.submit({"run": "true"})
        assert made.id in [token.id for token in stretto.tokens()]
        stretto.revoke_token(made.id)
        assert made.id not in [token.id for token in stretto.tokens()]
        with Client(server.url, made["secret"]) as nobody, pytest.raises(Denied):
            nobody.nodes()


def test_errors_are_ours(server: Server) -> None:
    with server.client() as stretto:
        with pytest.raises(NotFound) as missing:
            stretto.job("nobody")
        assert missing.value.hint
        with pytest.raises(Impossible, match="never be placed"):
            stretto.submit({"run": "true", "workers": 99})
        with pytest.raises(SpecError) as bad:
            stretto.submit("run: a\nworkrs: 2\n")
        assert [(problem.line, problem.field) for problem in bad.value.problems] == [(2, "workrs")]
        with pytest.raises(NotFound):
            next(stretto.follow("nobody"))
        with pytest.raises(NotFound):
            stretto.wait(10**6)
        with pytest.raises(UsageError):
            stretto.set_policy("fifoo")
    with Client(server.url, "wrong") as stranger, pytest.raises(Denied):
        stranger.job(1)


def test_nobody_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}") as stretto, pytest.raises(Unavailable) as caught:
        stretto.nodes()
    assert "stretto up" in caught.value.hint


def test_waiting_has_an_end(server: Server) -> None:
    with server.client() as stretto:
        job = stretto.submit({"run": FOREVER}, env={})
        with pytest.raises(TimeoutError):
            stretto.wait(job, timeout_s=0.2)
        stretto.cancel(job)


def test_events_as_they_happen(server: Server) -> None:
    with server.client() as stretto:
        job = stretto.submit({"run": "true"}, env={})
        seen = []
        for event in stretto.watch(job, after=0):
            seen.append(event.kind)
            if event.kind == "ended":
                break
        assert seen[0] == "submitted"
        newest = stretto.events(limit=1, order="newest")[0].seq
        stretto.set_policy(**_policy(stretto))
        noted = next(stretto.watch(after=newest))
        assert (noted.kind, noted.seq) == ("noted", newest + 1)


def _policy(stretto: Client) -> dict[str, Any]:
    now = stretto.policy()
    return {"name": now.name, "options": now.options, "placement": now.placement}


def test_one_client_in_many_threads(server: Server) -> None:
    found: list[int] = []
    with server.client() as stretto:

        def ask() -> None:
            found.extend(len(stretto.nodes()) for _ in range(20))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
    assert found == [2] * 160


class Waiter(threading.Thread):
    """Waits for a job in the background, and follows its log."""

    def __init__(self, client: Client, number: int) -> None:
        super().__init__(daemon=True)
        self.client, self.number = client, number
        self.phase, self.log, self.seen = "", "", threading.Event()

    def run(self) -> None:
        for piece in self.client.follow(self.number):
            self.log += piece.text
            self.seen.set()
        self.phase = self.client.wait(self.number).phase


def test_a_server_that_restarts_is_waited_for(server: Server, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with server.client() as stretto:
        job = stretto.submit({"run": waiting(go)})
        waiter = Waiter(stretto, job.number)
        waiter.start()
        awaited = threading.Thread(target=stretto.wait, args=(job.number,), daemon=True)
        awaited.start()
        assert waiter.seen.wait(DEADLINE_S)
        server.kill()
        server.start()
        go.touch()
        waiter.join(DEADLINE_S)
        awaited.join(DEADLINE_S)
        assert not awaited.is_alive()
        assert (waiter.phase, waiter.log) == ("succeeded", "begun\nover\n")


def test_the_same_asynchronously(server: Server, tmp_path: Path) -> None:
    go = tmp_path / "go"

    async def talk() -> None:
        async with AsyncClient(data=server.data) as stretto:
            job = await stretto.submit({"run": waiting(go), "name": "asynchronous"})
            assert [each.number async for each in stretto.jobs(name="asynchronous")] == [job.number]
            text, begun = "", asyncio.Event()

            async def follow() -> None:
                nonlocal text
                async for piece in stretto.follow(job):
                    text += piece.text
                    begun.set()

            async def listen() -> str:
                async for event in stretto.watch(job, after=0):
                    if event.kind == "ended":
                        return str(event.event["phase"])
                return ""

            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(follow())
                phase, waited = tasks.create_task(listen()), tasks.create_task(stretto.wait(job))
                await begun.wait()
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                go.touch()
            assert (phase.result(), waited.result().phase, text) == ("succeeded", "succeeded", "begun\nover\n")
            assert (await stretto.why(job)).phase == "succeeded"
            assert len(await stretto.nodes()) == 2
            with pytest.raises(NotFound):
                await stretto.job("nobody")
            other = await stretto.submit({"run": FOREVER}, env={})
            with pytest.raises(TimeoutError):
                await stretto.wait(other, timeout_s=0.2)
            await stretto.cancel(other)

    asyncio.run(talk())


def test_importing_the_client_costs_little() -> None:
    code = "import sys, stretto.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"fastapi", "sqlalchemy", "scipy", "numpy", "pydantic", "torch", "httpx2", "asyncio", "websockets", "yaml"}
    loaded = set(done.stdout.split())
    assert "stretto.client.sync" in loaded
    assert not loaded & heavy
