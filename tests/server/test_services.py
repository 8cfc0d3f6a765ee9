"""Services through the whole control plane: real web servers behind a real haproxy, under real requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine import DEADLINE_S, Machine, machine_of, play
from test_elastic import SCRIPT, result, stepping, train

from stretto.errors import Occupied, UsageError
from stretto.jobs import events as e
from stretto.jobs import lifecycle
from stretto.jobs.model import Context, Job, Seat
from stretto.runtime.ledger import audit, ledger_files
from stretto.runtime.order import Loop
from stretto.server import load, proxy
from stretto.server.drivers import service

HAPROXY = proxy.find(os.environ)
needs_haproxy = pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed; as root: apt-get install haproxy")

SERVER = """
import http.server, os, signal, socket, sys, threading, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/healthz" and not os.path.exists(os.environ.get("HEALTHY", "/")):
            self.send_error(503)
            return
        time.sleep(float(os.environ.get("PAUSE_S", "0.005")))
        end_s = time.monotonic() + float(os.environ.get("BURN_S", "0"))
        while time.monotonic() < end_s:
            pass
        body = os.environ["STRETTO_WORKER"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass

class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False
    request_queue_size = 128

inherited = os.environ.get("LISTEN_PID") == str(os.getpid())
server = Server(("127.0.0.1", int(os.environ["PORT"])), Handler, bind_and_activate=False)
if inherited:
    server.socket.close()
    server.socket = socket.socket(fileno=3)
    server.server_address, server.server_name, server.server_port = server.socket.getsockname(), "", 0
else:
    time.sleep(float(os.environ.get("SLOW_S", "0")))
    server.server_bind()
    server.server_activate()
if os.environ.get("ENDS") != "at once":
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("up", flush=True)
server.serve_forever()
"""


@pytest.fixture(autouse=True)
def server_script(tmp_path: Path) -> Iterator[None]:
    """And nothing that a failed test leaves behind: workers die with their supervisors."""
    (tmp_path / "serve.py").write_text(SERVER)
    yield
    for about in (tmp_path / "data" / "runs").glob("*/running.json"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(json.loads(about.read_text())["pid"], signal.SIGKILL)


def a_port() -> int:
    """For clients; away from where replicas get theirs, and outgoing connections too."""
    while True:
        port = random.SystemRandom().randrange(10000, 19000)
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port


async def serve(m: Machine, port: int, low: int = 1, high: int = 3, **more: Any) -> Job:
    about = {"port": port, "replicas": {"min": low, "max": high}, "hold": "1s", **more.pop("service", {})}
    about.setdefault("target", {"requests": 20} if HAPROXY else {"cpu": 80})
    fields = {"stop": {"grace": "5s"}, **more}
    return await m.submit("python serve.py", service=about, **fields)


async def get(port: int, path: str = "/") -> str:
    """The name of the replica that answered. Raises what went wrong; that a machine is busy is not."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            if b" 200 " not in head.split(b"\r\n")[0] + b" ":
                raise OSError(f"answered {head[:60]!r}")
            return body.decode()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


class Clients:
    """Requests at a steady rate, and what came of them."""

    def __init__(self, port: int, per_s: float) -> None:
        self.port, self.per_s = port, per_s
        self.answers: list[str] = []
        self.errors: list[str] = []
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        next_s = time.monotonic()
        while True:
            self._under_way.add(task := asyncio.create_task(self._one()))
            task.add_done_callback(self._under_way.discard)
            next_s += 1 / self.per_s
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))

    async def _one(self) -> None:
        try:
            self.answers.append(await get(self.port))
        except (OSError, TimeoutError, ValueError) as error:
            self.errors.append(repr(error))

    async def finished(self) -> None:
        await asyncio.gather(*self._under_way)


@contextlib.asynccontextmanager
async def clients(port: int, per_s: float) -> AsyncIterator[Clients]:
    some = Clients(port, per_s)
    running = asyncio.create_task(some.run())
    try:
        yield some
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await some.finished()


async def up(m: Machine, job: Job, count: int) -> Job:
    """So many serve, and no more are there."""

    def there(job: Job) -> bool:
        driver = m.plane.loop.drivers.get(job.number)
        return driver is not None and len(driver.joined) == len(job.workers) == count

    return await m.until(job, there, f"{count} replicas that serve")


async def cancel(m: Machine, *jobs: Job) -> None:
    for job in jobs:
        await m.plane.wish(job.id, "cancel", "me")
    for job in jobs:
        await m.ended(job, "cancelled")


async def proxy_pid(m: Machine, job: Job, other_than: int = 0) -> int:
    def there(job: Job) -> bool:
        return any(helper.pid not in (0, other_than) for helper in job.helpers)

    return (await m.until(job, there, "a proxy")).helpers[0].pid


# Parts.


def test_a_rate_is_taken_over_a_window_and_survives_a_restart_of_the_count() -> None:
    rate = load.Rate(window_s=5)
    seen = [rate.add(float(t), 10 * t) for t in range(10)]
    assert seen[0] == 0
    assert seen[-1] == 10
    assert rate.add(10.0, 3) == 0
    assert rate.add(11.0, 23) == 20


@pytest.mark.parametrize(
    ("carried", "now", "wished"),
    [(0, 3, 0), (39, 1, 1), (43, 1, 1), (45, 1, 2), (80, 1, 2), (72, 2, 2), (70, 2, 2), (36, 2, 1), (40, 0, 1)],
)
def test_small_deviations_change_nothing(carried: float, now: int, wished: int) -> None:
    assert load.wish(carried, 40, now) == wished


def test_more_at_once_fewer_after_the_hold() -> None:
    wishes = load.Wishes(hold_s=30)
    told = [wishes.add(t, size) for t, size in [(0, 1), (1, 4), (2, 2), (31, 1), (32, 1), (33, 1), (34, 3)]]
    assert told == [1, 4, 4, 4, 2, 1, 3]


def test_haproxy_is_told_only_what_is_not_so_already() -> None:
    places = [proxy.Place("s1", 1, "MAINT", 0), proxy.Place("s2", 1, "MAINT", 0), proxy.Place("s3", 1, "MAINT", 0)]
    new = [proxy.Replica(7, answers=True), proxy.Replica(8, answers=False), proxy.Replica(9, answers=True)]
    assert [order.split()[2:] for order in proxy.orders(places, new)] == [
        ["replicas/s1", "addr", "127.0.0.1", "port", "7"],
        ["replicas/s1", "state", "ready"],
        ["replicas/s2", "addr", "127.0.0.1", "port", "9"],
        ["replicas/s2", "state", "ready"],
    ]
    places = [proxy.Place("s1", 7, "UP", 2), proxy.Place("s2", 9, "UP", 0), proxy.Place("s3", 8, "DRAIN", 1)]
    settled = [proxy.Replica(7, answers=True), proxy.Replica(9, answers=True), proxy.Replica(8, leaving=True)]
    assert list(proxy.orders(places, settled)) == []
    leaves = [proxy.Replica(7, leaving=True)]
    assert [order.split()[2:] for order in proxy.orders(places, leaves)] == [
        ["replicas/s2", "state", "maint"],
        ["replicas/s1", "state", "drain"],
    ]


def test_a_helper_is_counted_nowhere_and_a_job_that_ran_well_starts_counting_faults_anew() -> None:
    job = Job(number=1, name="a", user="me", submitted_s=0, spec={}, context=Context(cwd="/"), level="service")
    job = lifecycle.apply(job, e.Launched(worker="proxy", launch="1.proxy.a", seat=Seat("n"), helper=True), 1)
    assert (job.phase, job.workers, job.launches, len(job.helpers)) == ("queued", (), 0, 1)
    job = lifecycle.apply(job, e.Running(worker="proxy", launch="1.proxy.a", pid=7), 2)
    assert job.helpers[0].pid == 7
    job = lifecycle.apply(job, e.Launched(worker="w0", launch="1.w0.a", seat=Seat("n", (0,))), 3)
    job = lifecycle.apply(job, e.Exited(worker="proxy", launch="1.proxy.a", how="lost"), 13)
    assert (job.phase, job.helpers, len(job.workers)) == ("running", (), 1)
    assert lifecycle.accounted(job, 13).device_s == 10
    for afresh, failures in [(False, 1), (False, 2), (True, 1)]:
        job = lifecycle.apply(job, e.Retried(not_before_s=0, text="", afresh=afresh), 14)
        assert job.failures == failures


# With haproxy.


@needs_haproxy
def test_replicas_follow_the_request_rate_and_no_request_is_lost(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x4") as m:
            # A replica that does not care for what it is doing when it is asked to end: only draining can save that.
            # Requests are few and long: as many are under way as with many short ones, and any machine can keep up.
            about = {"service": {"target": {"requests": 4}}, "env": {"PAUSE_S": "0.25", "ENDS": "at once"}}
            job = await up(m, await serve(m, port, **about), 1)
            assert m.plane.book.jobs[job.number].request.priority == 80
            async with clients(port, 10) as busy:
                await up(m, job, 3)
                shown = (await m.until(job, lambda job: job.metrics["requests_per_s"] > 4, "a rate")).metrics
                assert shown["replicas_up"] >= 1
                assert "latency_ms" in shown
                assert (await m.plane.why(job.id)).reason == "service-load"
                await m.until(job, lambda _: len(set(busy.answers)) == 3, "answers of all three")
            async with clients(port, 2) as few:
                await up(m, job, 1)
            assert busy.errors == few.errors == []
            pids = [helper.pid for helper in (await m.plane.job(job.id)).helpers]
            await cancel(m, job)
            assert len(pids) == 1
            assert not os.path.exists(f"/proc/{pids[0]}")

    play(story())


@needs_haproxy
def test_a_long_request_ends_before_its_replica_does(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            job = await serve(m, port, low=2, high=2, env={"PAUSE_S": "1.5", "ENDS": "at once"})
            await up(m, job, 2)
            both = [asyncio.create_task(get(port)) for _ in range(2)]

            async def all_under_way() -> None:
                driver = m.plane.loop.drivers[job.number]
                assert isinstance(driver, service.ServiceDriver)
                while [place.sessions for place in (await driver.proxy.look()).places if place.is_up] != [1, 1]:
                    await asyncio.sleep(0.01)

            async with asyncio.timeout(10):
                await all_under_way()
            await m.plane.scale(job.id, 1, 1, "me")
            await m.until(job, lambda job: any(worker.leaving for worker in job.workers), "one that leaves")
            assert sorted(await asyncio.gather(*both)) == ["w0", "w1"]
            await up(m, job, 1)
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_a_replica_that_is_killed_comes_back_and_clients_hardly_notice(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            job = await up(m, await serve(m, port, low=2, high=2, service={"target": {"requests": 100}}), 2)
            async with clients(port, 50) as some:
                await m.until(job, lambda _: len(some.answers) > 20, "some answers")
                os.kill(job.workers[0].pid, signal.SIGKILL)
                await m.until(job, lambda job: job.launches == 3, "a third launch")
                now = await up(m, job, 2)
            assert now.failures == 1
            assert "signal 9" in now.message
            assert len(some.errors) <= 2, some.errors
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_a_proxy_that_is_killed_comes_back(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            job = await up(m, await serve(m, port, low=2, high=2), 2)
            before = await proxy_pid(m, job)
            os.kill(before, signal.SIGKILL)
            await proxy_pid(m, job, other_than=before)
            after = await up(m, job, 2)
            assert after.workers == job.workers
            assert await get(port) in ("w0", "w1")
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_a_restart_of_the_server_changes_nothing_for_clients(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x3") as m:
            job = await serve(m, port, high=3, service={"hold": "1m"})
            async with clients(port, 50) as some:
                await up(m, job, 3)
                some.errors.clear()  # Those from before it was there.
        async with clients(port, 20) as some, machine_of(tmp_path, "1x3") as m:
            before = (await m.plane.job(job.id)).workers
            after = await up(m, job, 3)
            assert [worker.pid for worker in after.workers] == [worker.pid for worker in before]
            assert (after.launches, len(after.helpers)) == (3, 1)
            count = len(some.answers)
            await m.until(job, lambda _: len(some.answers) > count + 20, "answers")
            # The load is smaller than before; the hold is what keeps them.
            assert len((await m.plane.job(job.id)).workers) == 3
        assert some.errors == []
        async with machine_of(tmp_path, "1x3") as m:
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_it_gets_requests_only_when_it_is_healthy(tmp_path: Path) -> None:
    port, gate = a_port(), tmp_path / "healthy"

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await serve(m, port, high=1, service={"health": "/healthz"}, env={"HEALTHY": str(gate)})
            await m.until(job, lambda job: "up" in m.logs(job), "a process that listens")
            await proxy_pid(m, job)
            # Long enough for several looks; it must not take part whenever we look.
            driver = m.plane.loop.drivers[job.number]
            assert isinstance(driver, service.ServiceDriver)
            for _ in range(3):
                await driver._look()
                assert driver.joined == frozenset()
            gate.touch()
            await up(m, job, 1)
            assert await get(port) == "w0"
            gate.unlink()
            await m.until(job, lambda job: not driver.joined, "taken out")
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_training_gives_way_to_load_without_losing_a_step_and_gets_its_room_back(tmp_path: Path) -> None:
    port, epochs = a_port(), 400
    # A step takes as long as its slice is large: more workers are worth having.
    by_slice = SCRIPT.replace("else pause_s)", "else pause_s * len(batch.x) / 8)")
    assert by_slice != SCRIPT
    (tmp_path / "train.py").write_text(by_slice)

    async def story() -> None:
        async with machine_of(tmp_path, "1x4", warm=True) as m:
            web = await up(m, await serve(m, port), 1)
            training = await train(m, epochs, high=3)
            await stepping(m, await m.running(training, 3), 10)
            async with clients(port, 50) as some:
                await up(m, web, 3)
                await m.running(training, 1)
            await up(m, web, 1)
            await m.until(training, lambda job: len(job.workers) > 1, "workers where the replicas were")
            (tmp_path / "hurry").touch()
            assert some.errors == []
            done = await m.ended(training)
            assert (done.preemptions, done.starts, done.failures) == (0, 1, 0)
            assert result(m, done)[1] == 4 * epochs
            ledgers = ledger_files(m.plane.folder / "jobs" / done.id / "ledger")
            audit(ledgers, {0: Loop(samples=64, size=16, epochs=epochs, seed=1)}).check()
            await cancel(m, web)

    play(story())


@needs_haproxy
def test_two_services_at_once_and_a_port_that_is_taken(tmp_path: Path) -> None:
    one, two = a_port(), a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            first = await serve(m, one, high=1, name="first")
            second = await serve(m, two, high=1, name="second")
            await up(m, first, 1)
            await up(m, second, 1)
            assert await get(one) == await get(two) == "w0"
            with pytest.raises(Occupied, match=rf"{one} belongs to job {first.id} \(first\)"):
                await serve(m, one, name="third")
            with socket.socket() as other:
                other.bind(("127.0.0.1", 0))
                other.listen()
                with pytest.raises(Occupied, match="in use"):
                    await serve(m, other.getsockname()[1], name="third")
            await cancel(m, first, second)

    play(story())


@needs_haproxy
def test_a_port_that_somebody_takes_meanwhile_fails_it_with_the_reason(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await up(m, await serve(m, port, high=1, retries=0), 1)
            await m.plane.wish(job.id, "cancel", "me")
            await m.ended(job, "cancelled")
            with socket.socket() as other:
                gate = await m.submit(f"until [ -e {tmp_path}/go ]; do sleep 0.02; done", name="gate")
                waits = await serve(m, port, high=1, retries=0, after="gate")
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind(("127.0.0.1", port))
                other.listen()
                (tmp_path / "go").touch()
                await m.ended(gate)
                failed = await m.ended(waits, "failed")
            assert f"port {port} on 127.0.0.1 is in use" in failed.message

    play(story())


@needs_haproxy
def test_one_that_always_ends_fails_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "serve.py").write_text("raise SystemExit('no model here')")

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            job = await m.ended(await serve(m, a_port(), low=2, high=2, retries=1), "failed")
            assert "exit code 1" in job.message
            assert "2 faults" in job.message
            assert job.starts == 2
            missing = await m.submit(["no-such-server"], service={"port": a_port()})
            assert "no-such-server" in (await m.ended(missing, "failed")).message

    play(story())


@needs_haproxy
def test_what_still_answers_is_not_ended_and_good_times_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            job = await up(m, await serve(m, port, low=2, high=2, retries=0), 2)
            os.kill(job.workers[0].pid, signal.SIGKILL)
            await m.until(job, lambda job: job.failures == 1, "a fault")
            job = await up(m, job, 2)
            monkeypatch.setattr(service, "HEALTHY_S", 0.0)
            for worker in job.workers:
                os.kill(worker.pid, signal.SIGKILL)
            job = await m.until(job, lambda job: job.launches == 5, "both again")
            assert job.failures == 1
            await up(m, job, 2)
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_the_port_can_be_in_the_command(tmp_path: Path) -> None:
    port = a_port()
    command = ["python", "-m", "http.server", "--bind", "127.0.0.1", "{port}"]

    async def story() -> None:
        async with machine_of(tmp_path, "1x1") as m:
            job = await m.submit(command, service={"port": port}, stop={"grace": "1s"})
            job = await up(m, job, 1)
            assert job.workers[0].member != port
            assert "def do_GET" in await get(port, "/serve.py")
            await cancel(m, job)

    play(story())


@needs_haproxy
def test_it_is_scaled_by_cpu_use(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2") as m:
            about = {"target": {"cpu": 20}}
            job = await up(m, await serve(m, port, high=2, service=about, env={"BURN_S": "0.03"}), 1)
            async with clients(port, 15) as some:
                await up(m, job, 2)
                assert (await m.plane.job(job.id)).metrics["cpu_percent"] > 0
            await up(m, job, 1)
            assert some.errors == []
            await cancel(m, job)

    play(story())


# Without haproxy.

WITHOUT = {**os.environ, proxy.VARIABLE: "none"}


def test_without_haproxy_replicas_share_one_socket(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x3", environment=WITHOUT) as m:
            with pytest.raises(UsageError, match="haproxy"):
                await serve(m, port, service={"target": {"requests": 5}})
            job = await serve(m, port, low=2, high=3, service={"target": {"cpu": 80}})
            await m.until(job, lambda job: m.logs(job).count("up") == 2, "two that listen")
            async with clients(port, 50) as some:
                await m.until(job, lambda _: set(some.answers) == {"w0", "w1"}, "answers of both")
                await m.plane.scale(job.id, 1, 3, "me")
                await up(m, job, 1)
                await m.plane.scale(job.id, 2, 3, "me")
                await m.until(job, lambda _: "w2" in some.answers, "answers of a newcomer")
            assert some.errors == []
        async with machine_of(tmp_path, "1x3") as m:
            assert await get(port) in ("w0", "w1", "w2")
            holder = await proxy_pid(m, job)
            os.kill(holder, signal.SIGKILL)
            await proxy_pid(m, job, other_than=holder)
            await m.until(job, lambda job: job.launches >= 5, "replicas with the new socket")
            await up(m, job, 2)
            assert await get(port)
            await cancel(m, job)

    play(story())


def test_without_haproxy_a_taken_port_is_the_reason_of_the_failure(tmp_path: Path) -> None:
    port = a_port()

    async def story() -> None:
        async with machine_of(tmp_path, "1x2", environment=WITHOUT) as m:
            gate = await m.submit(f"until [ -e {tmp_path}/go ]; do sleep 0.02; done", name="gate")
            about = {"target": {"cpu": 80}}
            waits = await serve(m, port, high=1, retries=0, after="gate", service=about)
            with socket.socket() as other:
                other.bind(("127.0.0.1", port))
                other.listen()
                (tmp_path / "go").touch()
                await m.ended(gate)
                failed = await m.ended(waits, "failed")
            assert f"port {port} on 127.0.0.1 is in use" in failed.message

    play(story())
