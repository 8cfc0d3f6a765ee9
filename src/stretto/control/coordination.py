"""The coordinator on a WebSocket: carries out what `coordinator` decides, and nothing of its own.

Inside a control plane or a test:

    coordination = Coordination(Settings(token=secret, min_workers=2, want=2), FileJournal(path))
    port = await coordination.start()
    coordination.want(3)
    end = await coordination.finished()

As a process, which may be killed at any instant and started again with the same journal and port:

    python -m stretto.control.coordination --journal F --port P --token-file F --min N --want N [--stdin-commands]

It prints one JSON object a line: `{"event": "listening", "port": …}`, then `announced`, `formed`, `evicted`, `progress`
and at last `done` (exit status 0) or `failed` (1). With `--stdin-commands` it takes one a line: `{"want": 3}`,
`{"leave": ["w1"]}`, both in one, `{"exited": "w1"}` or `{"stop": true}`. A want in the journal is newer than `--want`.

A refused connection gets `evict` with the reason, and is closed with code 1008. Whatever is wrong with what comes over
one connection ends that connection, with a line in the log, and disturbs nobody else; a worker that talks without end
is listened to now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import logging
import math
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from stretto.control import journal as journals
from stretto.control.admission import Admission, Refused, Socket, understood
from stretto.control.coordinator import handle, wake_s
from stretto.control.events import (
    Announced,
    Closed,
    Done,
    Drop,
    Effect,
    Event,
    Evicted,
    Exited,
    Failed,
    Formed,
    Journal,
    Progress,
    Received,
    Refuse,
    Send,
    Slept,
    Tick,
    Want,
)
from stretto.control.roster import Settings, State
from stretto.runtime import bounds
from stretto.runtime.messages import LONGEST_SAID, LONGEST_UNPROVEN, Alive, Evict, Hello, Message, encode
from stretto.tasks import stop

_log = logging.getLogger("stretto.control")

_LONGEST_REASON = 200
_MOST_UNREAD = 4096
"""Messages that wait for a worker to read them."""
_AT_ONCE, _PER_S = 500, 200.0
"""What a worker may say: so many messages, and so many a second from then on."""
_LAST_WORD_S = 1.0
"""So long a refused worker may take to read why."""
_REFUSED = 1008
_AWAY = 1001


class Coordination:
    """One job's coordinator. Call its methods from the event loop it was opened in.

    `start` listens on a port of its own; a server that has one already opens it and hands every socket to `serve`.
    """

    def __init__(
        self,
        settings: Settings,
        journal: journals.Journal,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        watch: Callable[[Effect], None] = lambda effect: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.host, self.port = settings, host, port
        self._journal, self._watch, self._clock = journal, watch, clock
        self._alone = isinstance(journal, journals.FileJournal)
        """Nobody else writes to it: whoever cannot has not been replaced."""
        self._since_s: float | None = None
        """Since when something is being written down; meanwhile no time passes for what is decided here."""
        self._stood_s = 0.0
        """How long no time has passed, altogether."""
        self._outbox: deque[Effect] = deque()
        """Effects that wait until what they depend on is kept."""
        self._admission = Admission(settings.token)
        self._lines: dict[int, _Line] = {}
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._heard_s = math.inf
        self._stopped = False
        self._server: Server | None = None

    def open(self) -> None:
        """Read the journal, and be ready to serve."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[Done | Failed] = self._loop.create_future()
        self._changed = asyncio.Event()
        self._state = journals.replay(self._journal.read(), self.settings, self._now_s())
        if self._state.done or self._state.failed:
            self._carry_out(Failed(self._state.failed) if self._state.failed else Done())
        self._dispatch(Tick())

    async def start(self) -> int:
        """Open, listen, and give the port."""
        self.open()
        # Heartbeats are our own; a peer that freezes keeps its connection, to learn that it is out when it wakes.
        self._server = await serve(
            self._serve_own, self.host, self.port, ping_interval=None, max_size=LONGEST_UNPROVEN, close_timeout=1.0
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        return self.port

    def fall_silent(self) -> None:
        """Decide nothing any more, as before `stop`: whose connection closes from now on has not died."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()

    async def stop(self) -> None:
        """Hang up. The workers train on, and come back to whoever reads the journal next."""
        self.fall_silent()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for line in list(self._lines.values()):
            await line.close()
        self._journal.close()
        self._end.cancel()

    @property
    def url(self) -> str:
        return f"ws://{self.host}:{self.port}"

    @property
    def state(self) -> State:
        """Everything known now; a frozen value."""
        return self._state

    def want(self, size: int, leavers: Iterable[str] = ()) -> None:
        """So many workers; those named leave, otherwise the latest that came."""
        if size < 1:
            raise ValueError(f"a running job wants at least one worker, not {size}: stop the job instead")
        self._dispatch(Want(size, tuple(leavers)))

    def leave(self, workers: Iterable[str]) -> None:
        """These leave at the next boundary; how many are wanted stays, so others may come in their place."""
        self._dispatch(Want(None, tuple(workers)))

    def exited(self, worker: str, incarnation: str = "", status: int | None = None) -> None:
        """The backend confirms that the process is gone, and with which exit status, if it ended by itself."""
        self._dispatch(Exited(worker, incarnation, status))

    async def finished(self) -> Done | Failed:
        """Wait for the job's end."""
        return await asyncio.shield(self._end)

    async def until(self, condition: Callable[[State], bool]) -> State:
        """Wait until the state is as asked for."""
        while not condition(self._state):
            await self._changed.wait()
        return self._state

    async def drained(self) -> None:
        """Wait until all workers have hung up."""
        while self._lines:
            await self._changed.wait()

    async def _serve_own(self, connection: ServerConnection) -> None:
        await self.serve(OwnSocket(connection))

    async def serve(self, socket: Socket) -> None:
        """Talk with one worker until it, or we, hang up. Raises nothing, whatever it says."""
        try:
            words = aiter(socket)
            await self._talk(socket, await self._admission.admit(socket, words), words)
        except (ConnectionClosed, ConnectionError):
            pass
        except Refused as refused:
            _log.warning("a worker's connection was refused: %s", str(refused)[:_LONGEST_REASON])
            with contextlib.suppress(ConnectionClosed, ConnectionError, TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await socket.send(encode(Evict(reason=str(refused))))
                    await socket.close(_REFUSED, _brief(str(refused)))
        except Exception as error:
            _log.warning("a worker's connection was closed: %s", repr(error)[:_LONGEST_REASON])

    async def _talk(self, socket: Socket, hello: Hello, words: AsyncIterator[str | bytes]) -> None:
        self._count += 1
        number = self._count
        patience, pace = asyncio.timeout(None), _Pace(self._loop.time())
        line = self._lines[number] = _Line(socket, patience)
        try:
            with contextlib.suppress(TimeoutError):
                async with patience:
                    self._dispatch(Received(number, hello))
                    async for text in words:
                        self._hear(number, text)
                        if line.ending:
                            break
                        await asyncio.sleep(pace.rest_s(self._loop.time()))
        finally:
            del self._lines[number]
            await line.close()
            self._dispatch(Closed(number))

    def _hear(self, number: int, text: str | bytes) -> None:
        message = understood(text, LONGEST_SAID)
        if isinstance(message, Hello):
            raise Refused("a worker says hello once")
        self._dispatch(Received(number, message))

    def _dispatch(self, event: Event) -> None:
        if self._stopped:
            return
        now_s = self._now_s()
        late_s, silent_s = now_s - self._due_s, now_s - self._heard_s
        if late_s > self.settings.heartbeat_s or silent_s > self.settings.heartbeat_timeout_s / 2:
            # The process was stopped, the machine slept, or it is cut off, if nobody at all is heard: of the workers it
            # only knows that what they said meanwhile is still to be read.
            self._handle(Slept(max(late_s, silent_s)), now_s)
            self._heard_s = now_s
        if isinstance(event, Received):
            self._heard_s = now_s
        self._handle(event, now_s)
        self._set_timer(now_s)
        self._changed.set()
        self._changed = asyncio.Event()

    def _now_s(self) -> float:
        """While something is being written down time stands still: what must be said waits for it, and whoever has not
        heard it cannot be late. A disk may be full for long."""
        return (self._clock() if self._since_s is None else self._since_s) - self._stood_s

    def _handle(self, event: Event, now_s: float) -> None:
        self._state, effects = handle(self._state, event, now_s)
        for effect in effects:
            if self._since_s is not None and self._alone and _is_alive(effect):
                # Nothing has to be written down for that, and without it workers stop by themselves.
                self._carry_out(effect)
            else:
                self._outbox.append(effect)
        self._carry_out_all()

    def _carry_out_all(self) -> None:
        """In order; records that follow each other share one write, and what comes after them waits for it."""
        while self._outbox and self._since_s is None and not self._stopped:
            records: list[journals.Record] = []
            while self._outbox and isinstance(self._outbox[0], Journal):
                records.append(self._outbox.popleft().record)  # type: ignore[union-attr]
            if records:
                self._keep(records)
            else:
                self._carry_out(self._outbox.popleft())

    def _keep(self, records: list[journals.Record]) -> None:
        try:
            under_way = self._journal.write(records, self._state)
        except OSError as error:
            self._give_up(error)
            raise
        if under_way is not None:
            self._since_s = self._clock()
            under_way.add_done_callback(self._kept)

    def _kept(self, under_way: asyncio.Future[None]) -> None:
        if self._since_s is not None:
            self._stood_s += self._clock() - self._since_s
            self._since_s = None
        if under_way.cancelled():
            self._stopped = True
        elif (error := under_way.exception()) is not None:
            self._give_up(error)
        else:
            self._carry_out_all()
            self._dispatch(Tick())

    def _give_up(self, error: BaseException) -> None:
        """What cannot be remembered must not be announced; the workers train on and wait for the next coordinator."""
        self._stopped = True
        if self._server is not None:
            self._server.close()
        for line in self._lines.values():
            line.hang_up(_AWAY, "this coordinator can keep nothing any more")
        if not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # Whoever waits for the end is told; nobody need.

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(connection, _, message):
                if connection in self._lines:
                    self._lines[connection].send(message)
            case Refuse(connection, text):
                if connection in self._lines:
                    self._lines[connection].refuse(text)
            case Drop(connection):
                if connection in self._lines:
                    self._lines[connection].hang_up()
            case Done() | Failed():
                self._finish(effect)
        self._watch(effect)

    def _finish(self, end: Done | Failed) -> None:
        if not self._end.done():
            self._end.set_result(end)

    def _set_timer(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = due_s = wake_s(self._state, now_s)
        waits = math.isinf(due_s) or self._since_s is not None
        self._timer = None if waits else self._loop.call_later(due_s - now_s, self._dispatch, Tick())


def _is_alive(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Alive)


class _Line:
    """A connection with a queue of its own, so that a peer that does not read holds nobody up."""

    def __init__(self, socket: Socket, patience: asyncio.Timeout) -> None:
        """`patience` is ended when the peer has not read for too long."""
        self._socket, self._patience = socket, patience
        self._queue: asyncio.Queue[str | tuple[int, str]] = asyncio.Queue()
        self.ending = False
        """We have hung up, or are about to."""
        self._task = asyncio.create_task(self._write())

    def send(self, message: Message) -> None:
        if self._queue.qsize() < _MOST_UNREAD:
            self._queue.put_nowait(encode(message))
        elif not self.ending:
            self.ending = True
            self._task.cancel()
            self._patience.reschedule(asyncio.get_running_loop().time())

    def refuse(self, text: str) -> None:
        self.send(Evict(reason=text))
        self.hang_up(_REFUSED, _brief(text))

    def hang_up(self, code: int = 1000, why: str = "replaced by a newer connection") -> None:
        self.ending = True
        self._queue.put_nowait((code, why))

    async def close(self) -> None:
        if self.ending and not self._task.done():
            await asyncio.wait([self._task], timeout=_LAST_WORD_S)
        await stop(self._task)

    async def _write(self) -> None:
        with contextlib.suppress(ConnectionClosed, ConnectionError):
            while True:
                item = await self._queue.get()
                if isinstance(item, tuple):
                    await self._socket.close(*item)
                    return
                await self._socket.send(item)


class _Pace:
    """How long to listen to others before the next message of somebody who says much."""

    def __init__(self, now_s: float) -> None:
        self._left, self._since_s = float(_AT_ONCE), now_s

    def rest_s(self, now_s: float) -> float:
        self._left = min(_AT_ONCE, self._left + (now_s - self._since_s) * _PER_S) - 1
        self._since_s = now_s
        return max(0.0, -self._left / _PER_S)


class OwnSocket:
    """A connection to a port of our own."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection

    def __aiter__(self) -> AsyncIterator[str | bytes]:
        return aiter(self._connection)

    async def send(self, message: str) -> None:
        await self._connection.send(message)

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await self._connection.close(code, reason)

    def widen(self, most_bytes: int) -> None:
        bounds.widen(self._connection.protocol, most_bytes)


def _brief(text: str) -> str:
    """As long as a closing frame has room for."""
    return text.encode()[:120].decode(errors="ignore")


# As a process.


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return asyncio.run(_run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stretto.control.coordination", description="One job's coordinator."
    )
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--min", type=int, default=1, dest="min_workers")
    parser.add_argument("--want", type=int, default=1)
    parser.add_argument("--stdin-commands", action="store_true")
    for period in _periods():
        parser.add_argument(f"--{period.name.replace('_', '-')}", type=float, default=period.default)
    return parser


def _periods() -> list[dataclasses.Field[Any]]:
    return [column for column in dataclasses.fields(Settings) if column.name.endswith("_s")]


async def _run(options: argparse.Namespace) -> int:
    settings = Settings(
        token=options.token_file.read_text().strip(),
        min_workers=options.min_workers,
        want=options.want,
        **{period.name: getattr(options, period.name) for period in _periods()},
    )
    journal = journals.FileJournal(options.journal)
    coordination = Coordination(settings, journal, host=options.host, port=options.port, watch=_print_effect)
    _print({"event": "listening", "port": await coordination.start()})
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    tasks = [asyncio.create_task(stop.wait()), asyncio.create_task(coordination.finished())]
    commands = asyncio.create_task(_obey(coordination, stop)) if options.stdin_commands else None
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        end = await tasks[1]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5.0):
                await coordination.drained()
        return 1 if isinstance(end, Failed) else 0
    finally:
        for task in (*tasks, commands):
            if task is not None:
                task.cancel()
        await coordination.stop()


async def _obey(coordination: Coordination, stop: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while text := await reader.readline():
        try:
            _command(coordination, json.loads(text), stop)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _print({"event": "refused", "command": text.decode(errors="replace").strip(), "reason": str(error)})


def _command(coordination: Coordination, command: dict[str, Any], stop: asyncio.Event) -> None:
    unknown = set(command) - {"want", "leave", "exited", "incarnation", "status", "stop"}
    if unknown or not command:
        raise ValueError(f"unknown command {', '.join(sorted(unknown)) or '(none)'}: say want, leave, exited or stop")
    if "want" in command:
        coordination.want(int(command["want"]), command.get("leave", ()))
    elif "leave" in command:
        coordination.leave(command["leave"])
    if "exited" in command:
        status = command.get("status")
        coordination.exited(command["exited"], command.get("incarnation", ""), None if status is None else int(status))
    if command.get("stop"):
        stop.set()


def _print_effect(effect: Effect) -> None:
    if isinstance(effect, (Announced, Formed, Evicted, Progress, Done, Failed)):
        _print({"event": type(effect).__name__.lower(), **dataclasses.asdict(effect)})


def _print(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
