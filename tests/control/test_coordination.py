"""The shell over real WebSockets, in this process and as one that is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from disks import no_room
from stretto.control import journal
from stretto.control.coordination import Coordination
from stretto.control.events import Done, Failed
from stretto.control.roster import Settings, State
from stretto.runtime import messages as m
from stretto.runtime.handshake import Secret
from stretto.runtime.introduction import introduced

PATIENCE_S = 20.0
QUICK = Settings(token="secret", min_workers=2, want=2, heartbeat_timeout_s=60.0)


class Client:
    """A worker's end of the wire."""

    def __init__(self, url: str, name: str, **changes: Any) -> None:
        self.name = name
        self._open = contextlib.ExitStack()
        self.socket: ClientConnection = self._open.enter_context(connect(url))
        secret = changes.pop("token", "secret")
        given = {"worker": name, "incarnation": f"i-{name}", "address": "h:1"} | changes
        self.say(introduced(m.Hello(**given), self.hear(m.Challenge), Secret(secret)))

    def say(self, message: m.Message) -> None:
        self.socket.send(m.encode(message))

    def hear(self, kind: type[m.Message]) -> Any:
        """The next message of this kind; others are passed over."""
        while True:
            message = m.decode(self.socket.recv(timeout=PATIENCE_S))
            if isinstance(message, kind):
                return message

    def join(self) -> Client:
        self.hear(m.Welcome)
        self.say(m.Ready())
        return self

    def form(self) -> m.Switch:
        switch: m.Switch = self.hear(m.Switch)
        self.say(m.Formed(generation=switch.generation, applied=0))
        return switch

    def drop(self) -> None:
        """As a killed process does: the kernel closes the connection, nothing is said."""
        with contextlib.suppress(OSError):
            self.socket.socket.shutdown(2)
        self._open.close()


@contextlib.contextmanager
def serving(
    path: Path | journal.Journal, settings: Settings = QUICK
) -> Iterator[tuple[Coordination, Callable[..., Any]]]:
    """A coordinator in a thread of its own, and a way to call it there."""
    coordination = Coordination(settings, journal.FileJournal(path) if isinstance(path, Path) else path)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            result = function(*arguments)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE_S)

    try:
        call(coordination.start)
        yield coordination, call
    finally:
        call(coordination.stop)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def names(switch: m.Switch) -> list[str]:
    return [peer.worker for peer in switch.members]


def test_a_job_from_first_hello_to_done(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as (coordination, call):
        workers = [Client(coordination.url, name).join() for name in ("a", "b")]
        assert [names(w.form()) for w in workers] == [["a", "b"]] * 2
        call(coordination.until, lambda state: state.active is not None and state.active.complete)
        workers[0].say(m.Heartbeat(generation=1, loop=0, step=3, applied=3))
        workers[0].hear(m.Alive)
        for worker in workers:
            worker.say(m.LoopEnd(generation=1, loop=0, applied=9))
        assert [w.hear(m.End).loop for w in workers] == [0, 0]
        for worker in workers:
            worker.say(m.Bye(reason="finished"))
        assert call(coordination.finished) == Done()
        for worker in workers:
            worker.drop()


def test_a_lost_connection_is_noticed_without_any_timeout(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as (coordination, _):
        first, second = [Client(coordination.url, name).join() for name in ("a", "b")]
        first.form(), second.form()
        second.drop()
        switch = first.hear(m.Switch)
        assert (names(switch), switch.planned) == (["a"], False)
        first.drop()


def test_when_nobody_at_all_is_heard_nobody_is_lost(tmp_path: Path) -> None:
    """It is the coordinator that is cut off then."""
    hasty = replace(QUICK, heartbeat_s=0.05, heartbeat_timeout_s=0.4)
    with serving(tmp_path / "journal", hasty) as (coordination, call):
        first, second = [Client(coordination.url, name).join() for name in ("a", "b")]
        first.form(), second.form()
        state = call(coordination.until, lambda state: state.active is not None and state.active.complete)
        heard_s = max(worker.heard_s for worker in state.workers.values())
        # Of time only that is given to them during which somebody could have been heard.
        late_s = heard_s + 3 * hasty.heartbeat_timeout_s
        call(coordination.until, lambda state: min(worker.heard_s for worker in state.workers.values()) > late_s)
        first.say(beat := m.Heartbeat(generation=1, loop=0, step=0, applied=0))
        first.hear(m.Alive)
        assert not any(worker.out for worker in coordination.state.workers.values())
        first.say(beat)
        while not isinstance(heard := m.decode(first.socket.recv(timeout=PATIENCE_S)), m.Switch):
            first.say(beat)
        assert names(heard) == ["a"], "where one is heard, the other is missed"
        first.drop(), second.drop()


def test_grow_and_leave_through_the_methods(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as (coordination, call):
        first, second = [Client(coordination.url, name).join() for name in ("a", "b")]
        first.form(), second.form()
        call(coordination.want, 3)
        third = Client(coordination.url, "c").join()
        for worker in (first, second, third):
            assert names(worker.form()) == ["a", "b", "c"]
        call(coordination.leave, ["a"])
        switch = second.form()
        assert (names(switch), switch.leavers, switch.planned) == (["b", "c"], ("a",), True)
        third.form()
        second.say(m.Committed(generation=switch.generation, applied=1))
        first.hear(m.Release)
        with pytest.raises(ValueError, match="at least one worker"):
            call(coordination.want, 0)
        for worker in (first, second, third):
            worker.drop()


def test_a_refused_worker_is_told_why_and_hung_up_on(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as (coordination, _):
        stranger = Client(coordination.url, "a", token="wrong")
        assert "token is wrong" in stranger.hear(m.Evict).reason
        with pytest.raises(ConnectionClosed) as closed:
            stranger.socket.recv(timeout=PATIENCE_S)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


@pytest.mark.parametrize("text", ["nonsense", "{}", '{"kind": "hello"}', '{"kind": "alive"}', b"\xff\xfe"])
def test_what_is_not_a_message_harms_nobody(tmp_path: Path, text: str | bytes) -> None:
    with serving(tmp_path / "journal") as (coordination, _):
        with connect(coordination.url) as socket:
            assert isinstance(m.decode(socket.recv(timeout=PATIENCE_S)), m.Challenge)
            socket.send(text)
            assert isinstance(m.decode(socket.recv(timeout=PATIENCE_S)), m.Evict)
            with pytest.raises(ConnectionClosed):
                socket.recv(timeout=PATIENCE_S)
        Client(coordination.url, "a").join().drop()


def test_a_users_error_reaches_everybody_once(tmp_path: Path) -> None:
    with serving(tmp_path / "journal") as (coordination, call):
        first, second = [Client(coordination.url, name).join() for name in ("a", "b")]
        first.form(), second.form()
        first.say(m.Bye(reason="error", text="ValueError: no"))
        assert "ValueError: no" in second.hear(m.Fail).text
        assert call(coordination.finished) == Failed("worker a failed: ValueError: no")
        first.drop(), second.drop()


# As a process.


class Process:
    """`python -m stretto.control.coordination`, and what it prints."""

    def __init__(self, folder: Path, port: int = 0, *options: str) -> None:
        (folder / "token").write_text("secret\n")
        command = [sys.executable, "-m", "stretto.control.coordination", "--journal", str(folder / "journal")]
        command += ["--token-file", str(folder / "token"), "--port", str(port), "--min", "2", "--want", "2"]
        self.process = subprocess.Popen(
            [*command, "--stdin-commands", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = self.event("listening")["port"]
        self.url = f"ws://127.0.0.1:{self.port}"

    def event(self, kind: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event
        raise AssertionError(f"it ended without saying {kind}")

    def command(self, **words: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(words), file=self.process.stdin, flush=True)

    def end(self, how: int = signal.SIGKILL) -> int:
        self.process.send_signal(how)
        return self.close()

    def close(self) -> int:
        status = self.process.wait(PATIENCE_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        return status


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        if process.process.poll() is None:
            process.end()


def test_a_killed_coordinator_finds_its_job_again(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(before := Process(tmp_path))
    workers = [Client(before.url, name).join() for name in ("a", "b")]
    for worker in workers:
        worker.form()
    before.event("formed")
    before.end(signal.SIGKILL)
    with (tmp_path / "journal").open("ab") as file:
        file.write(b'{"kind":"generation","number":2,"mem')  # It was killed while it wrote this.

    processes.append(after := Process(tmp_path, before.port))
    back = [Client(after.url, name, generation=1, holds_state=True, applied=7) for name in ("a", "b")]
    for worker in back:
        assert worker.hear(m.Welcome).generation == 1
        worker.say(m.Ready())
        worker.say(m.Formed(generation=1, applied=7))
    assert after.event("formed")["members"] == ["a", "b"]
    after.command(want=3)
    third = Client(after.url, "c").join()
    switch = third.form()
    assert (switch.generation, names(switch), switch.planned) == (2, ["a", "b", "c"], True)
    kept = [record["number"] for record in journal.read(tmp_path / "journal") if record["kind"] == "generation"]
    assert kept == [1, 2]
    for worker in (*workers, *back, third):
        worker.drop()
    assert after.end(signal.SIGTERM) == 0


def test_a_worker_lost_while_the_coordinator_was_dead_is_dropped_after_the_grace(
    tmp_path: Path, processes: list[Process]
) -> None:
    processes.append(before := Process(tmp_path))
    workers = [Client(before.url, name).join() for name in ("a", "b")]
    for worker in workers:
        worker.form()
    before.event("formed")
    before.end(signal.SIGKILL)
    processes.append(after := Process(tmp_path, before.port, "--restart-grace-s", "0.2"))
    alone = Client(after.url, "a", generation=1, holds_state=True)
    alone.hear(m.Welcome)
    assert names(alone.form()) == ["a"]
    for worker in (*workers, alone):
        worker.drop()


def test_commands_and_the_end_of_a_job(tmp_path: Path, processes: list[Process]) -> None:
    processes.append(process := Process(tmp_path))
    workers = [Client(process.url, name).join() for name in ("a", "b")]
    for worker in workers:
        worker.form()
    process.command(nonsense=1)
    assert "say want, leave, exited or stop" in process.event("refused")["reason"]
    process.command(exited="b")
    workers[1].drop()
    assert process.event("announced")["members"] == ["a"]
    workers[0].form()
    workers[0].say(m.Bye(reason="finished"))
    process.event("done")
    for worker in workers:
        worker.drop()
    assert process.close() == 0


# The file.


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"kind":"loops","done":1}\n{"kind":"loo\n{"kind":"loops","done":2}\n')
    with pytest.raises(ValueError, match=r"journal:2: damaged"):
        journal.read(path)


def test_a_torn_last_line_is_cut_off_for_good(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('{"kind":"loops","done":1}\n{"kind":"loops","do')
    assert journal.read(path) == [{"kind": "loops", "done": 1}]
    file = journal.FileJournal(path)
    file.write([{"kind": "loops", "done": 2}])
    file.close()
    assert journal.replay(journal.read(path), QUICK).loops_done == 2


class Distant:
    """A journal that takes its time: it answers when it is told to."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[asyncio.Future[None]] = queue.SimpleQueue()
        self.state: State | None = None
        self.prompt = False

    def read(self) -> list[journal.Record]:
        return [] if self.state is None else journal.kept(self.state)

    def write(self, records: Sequence[journal.Record], state: State) -> asyncio.Future[None] | None:
        self.state = state
        if self.prompt:
            return None
        under_way: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked.put(under_way)
        return under_way

    def close(self) -> None:
        return


def silent(worker: Client) -> bool:
    """Nothing was said for a while."""
    with contextlib.suppress(TimeoutError, ConnectionClosed):
        worker.socket.recv(timeout=0.2)
        return False
    return True


def test_nothing_is_said_before_it_is_kept() -> None:
    distant = Distant()
    with serving(distant, replace(QUICK, min_workers=1, want=1)) as (coordination, call):
        worker = Client(coordination.url, "a").join()
        under_way = distant.asked.get(timeout=PATIENCE_S)
        assert coordination.state.newest is not None, "it is decided"
        assert silent(worker), "and not announced"
        distant.prompt = True
        call(under_way.set_result, None)
        assert worker.form().generation == 1
        call(coordination.until, lambda state: state.active is not None and state.active.complete)
        worker.drop()
    assert [g.number for g in journal.replay(distant.read(), QUICK).open] == [1]


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """Nothing is announced before there is room. Who trains goes on, and nobody is late for what was not said."""
    hasty = replace(QUICK, formation_s=0.2, heartbeat_timeout_s=5.0)
    kept = journal.FileJournal(tmp_path / "journal")
    with serving(kept, hasty) as (coordination, call):
        first, second = Client(coordination.url, "a"), Client(coordination.url, "b")

        def stands_still(generation: int, *workers: Client) -> None:
            call(coordination.until, lambda state: state.number == generation + 1)
            for _ in range(4):
                # Each time longer than a generation may take to form.
                for worker in workers:
                    assert silent(worker)
                    worker.say(m.Heartbeat(generation=generation, loop=0, step=0, applied=0))
                    assert worker.hear(m.Alive)
            assert coordination.state.number == generation + 1

        for worker in (first, second):
            worker.hear(m.Welcome)
        with no_room(kept._file.fileno()):
            for worker in (first, second):
                worker.say(m.Ready())
            stands_still(0, first, second)
        for worker in (first, second):
            worker.form()
        call(coordination.until, lambda state: state.active is not None and len(state.active.formed) == 2)
        with no_room(kept._file.fileno()):
            second.drop()
            stands_still(1, first)
        switch = first.form()
        assert (switch.generation, names(switch)) == (2, ["a"])
        call(coordination.until, lambda state: state.active is not None and state.active.number == 2)
        found = journal.read(tmp_path / "journal")
        assert [record["number"] for record in found if record["kind"] == "generation"] == [1, 2]
        first.drop()


def test_who_cannot_keep_anything_any_more_says_nothing() -> None:
    distant = Distant()
    with serving(distant, replace(QUICK, min_workers=1, want=1)) as (coordination, call):
        worker = Client(coordination.url, "a").join()
        call(distant.asked.get(timeout=PATIENCE_S).set_exception, OSError("another one leads now"))
        with pytest.raises(OSError, match="another one leads now"):
            call(coordination.finished)
        assert silent(worker)
        worker.drop()
